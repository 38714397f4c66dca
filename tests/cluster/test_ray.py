"""A real cluster on this machine, with faults: two replicas and a generator of the demo model over one store. `make
test-cluster` runs it; the tests run in order, the last one ends the cluster."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.processes import (
    CHAT,
    GENERATOR,
    QUICK,
    READY_S,
    REPLICA,
    Serving,
    documents,
    end,
    environment,
    is_alive,
    loading,
    refusal,
    serving,
)
from tests.conftest import ROOT
from tests.polling import wait_until
from tests.store.servers import free_port

pytestmark = pytest.mark.cluster
LONG = {"max_tokens": 120, "ignore_eos": True, "reuse": "exact"}
QUESTIONS = ["Which tool does Yara Ames own?", "What colour is the boat of Dora Vance?", "Who owns a lemon boat?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def running(folder: Path, port: int) -> Iterator[Serving]:
    store = f"file://{folder}/store"
    options = ["--cluster", "ray", "--replicas", "2", "--generators", "1", "--store", store]
    with serving(folder, *options, "--cluster-port", str(port)) as server:
        yield server


@pytest.fixture
def cluster(running: Serving) -> Serving:
    """The cluster, recovered from the previous test."""
    running.wait_for(2)
    return running


def requests_by_replica(cluster: Serving) -> dict[str, float]:
    """Replica -> answers so far."""
    found: dict[str, float] = {}
    for (name, *labels), value in cluster.metrics().items():
        if name == "ccjax_e2e_request_latency_seconds_count":
            found[labels[-1]] = found.get(labels[-1], 0) + value
    return found


def test_answers_match_those_of_one_server(cluster: Serving, folder: Path) -> None:
    """Token for token, in mode exact, from both replicas, cold and from the cache."""

    def ask(server: Serving, question: str) -> list:
        whole = server.chat(question, retrieval=True, reuse="exact", logprobs=True, max_tokens=12, ignore_eos=True)
        choice = whole.json()["choices"][0]
        streamed = [
            json.loads(line) for line in server.stream(question, retrieval=True, reuse="exact", max_tokens=12)[:-1]
        ]
        pieces = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in streamed if chunk["choices"])
        return [choice["message"]["content"], [token["token"] for token in choice["logprobs"]["content"]], pieces]

    with serving(folder, "--no-repair") as single:
        wanted = [ask(single, question) for question in QUESTIONS]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda question: ask(cluster, question), QUESTIONS * 2)) == wanted * 2
    assert len({text for text, *_ in wanted}) > 1


def test_same_passages_are_routed_to_one_replica_and_others_are_spread(cluster: Serving) -> None:
    passages = documents("bees")
    cluster.chat("What is it?", documents=passages, reuse="exact")
    in_a_row, last, number = 0, None, 0
    deadline = time.monotonic() + 120
    while in_a_row < 12:  # the first ones may come before the summary with the passages; a coin needs 4,000 questions
        assert time.monotonic() < deadline, f"{number} questions, the last {in_a_row} of them to one replica"
        before = requests_by_replica(cluster)
        report = cluster.chat(f"What is number {number}?", documents=passages, reuse="exact").json()["reuse"]
        after = requests_by_replica(cluster)
        home = next(name for name in before if after[name] > before[name])
        reused = [row["tier"] for row in report["per_document"] if row["role"] == "passage"] == ["host"] * 3
        in_a_row = (in_a_row + 1 if home == last else 1) if reused else 0
        last, number = home, number + 1
    before = requests_by_replica(cluster)
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda n: cluster.chat("Who?", documents=documents(f"load {n}")), range(24)))
    assert {answer.status_code for answer in answers} == {200}
    grown = [requests_by_replica(cluster)[name] - before[name] for name in before]
    assert sum(grown) == 24 and min(grown) >= 3  # a coin would give one of them less once in 30,000 times


def test_a_burst_is_not_refused(cluster: Serving) -> None:
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda n: cluster.chat(f"Who is {n}?", max_tokens=1).status_code, range(40)))
    assert answers == [200] * 40


def test_a_stream_arrives_in_parts_and_a_disconnect_frees_its_slot(cluster: Serving) -> None:
    body = {"messages": [{"role": "user", "content": "Tell."}], "max_tokens": 900, "ignore_eos": True}
    json_body = {**body, "stream": True, "retrieval": False}
    with httpx.stream("POST", f"{cluster.url}{CHAT}", json=json_body, timeout=120) as answer:
        lines = (line for line in answer.iter_lines() if line)
        started = time.monotonic()
        for _ in range(10):
            next(lines)
        taken_s = time.monotonic() - started
        wait_until(lambda: cluster.total("ccjax_num_requests_running") == 1)
    left = time.monotonic()
    wait_until(lambda: cluster.total("ccjax_num_requests_running") == 0)
    # 890 more pieces would take 90 times as long as the ten did.
    assert time.monotonic() - left < max(20 * taken_s, 3.0)


def test_killed_replica_affects_only_its_own_streams(cluster: Serving) -> None:
    names = [f"Tell me of {number}." for number in range(12)]
    wanted = {name: cluster.text(name, **LONG) for name in names}
    victim = cluster.pids(REPLICA)[0]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        plain = {name: pool.submit(cluster.chat, name, **LONG) for name in names[:6]}
        streams = {name: pool.submit(cluster.stream, name, **LONG) for name in names[6:]}
        wait_until(lambda: cluster.total("ccjax_num_requests_running") >= 6, timeout_s=60)
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        for name, answer in plain.items():
            assert answer.result().status_code == 200, answer.result().text
            assert answer.result().json()["choices"][0]["message"]["content"] == wanted[name]
        errors = 0
        for name, answer in streams.items():
            *pieces, done = map(str, answer.result())
            events = [json.loads(piece) for piece in pieces]
            text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e.get("choices"))
            is_lost = "error" in events[-1]
            assert done == "[DONE]" and sum("error" in event for event in events) == is_lost
            assert events[-1]["error"]["code"] == "replica_lost" if is_lost else text == wanted[name]
            assert wanted[name].startswith(text)
            errors += is_lost
    lost = {
        labels[0]: value for (name, *labels), value in cluster.metrics().items() if name.endswith("lost_replicas_total")
    }
    assert lost["given up"] == 0 and lost["answer begun"] == errors and sum(lost.values()) >= 1
    cluster.wait_for(2)
    print(f"killed replica: two answer again after {time.monotonic() - killed:.1f} s; {lost}")
    assert victim not in cluster.pids(REPLICA)


def test_while_no_replica_runs_requests_wait_for_a_limited_time(cluster: Serving) -> None:
    wanted = cluster.text("Who has a boat?", reuse="exact")
    for victim in cluster.pids(REPLICA):
        os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        patient = pool.submit(cluster.text, "Who has a boat?", reuse="exact", timeout_s=200.0)
        hasty = cluster.chat("Who has a boat?", timeout_s=1.0)
        print(f"no replica: 503 after {time.monotonic() - killed:.1f} s")
        assert (hasty.status_code, hasty.headers["retry-after"]) == (503, "1")
        assert hasty.json()["error"]["code"] == "no_replica"
        ready = httpx.get(f"{cluster.url}/ready", timeout=60)
        assert (ready.status_code, ready.json()["status"]) == (503, "no replica runs")
        assert httpx.get(f"{cluster.url}/", timeout=60).status_code == 200
        assert patient.result() == wanted
    print(f"no replica: who waited is answered after {time.monotonic() - killed:.1f} s")


def test_metrics_include_those_of_generators(cluster: Serving) -> None:
    name = "ccjax_orders_taken_total"
    wait_until(lambda: (name, "0") in cluster.metrics(generators=True), timeout_s=60)
    assert [key for key in cluster.metrics(generators=True) if key[0] == name] == [(name, "0")]
    assert {key[-1] for key in cluster.metrics() if key[0] == name} == {"0", "1"}


def test_a_killed_generator_is_replaced_without_affecting_requests(cluster: Serving) -> None:
    (victim,) = cluster.pids(GENERATOR)
    with loading(cluster) as load:
        time.sleep(0.5)
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: [pid for pid in cluster.pids(GENERATOR) if pid != victim], timeout_s=60)
        print(f"killed generator: a new one begins after {time.monotonic() - killed:.1f} s")
    assert set(load.statuses) == {200}


def test_a_joining_host_with_other_options_replaces_replicas_without_failures(
    cluster: Serving, folder: Path, port: int
) -> None:
    before = cluster.pids(REPLICA)
    options = ["--cluster", "ray", "--cluster-address", f"127.0.0.1:{port}", "--replicas", "2", "--max-num-seqs", "8"]
    options += ["--store", f"file://{folder}/store", "--generators", "0"]
    with loading(cluster) as load:
        started = time.monotonic()
        with serving(folder, *options) as joiner:
            joiner.wait_for(2)
            print(f"rolled after {time.monotonic() - started:.1f} s, {len(load.statuses)} requests meanwhile")
            assert not set(before) & set(cluster.pids(REPLICA) + joiner.pids(REPLICA))
            assert joiner.text("Who?") == cluster.text("Who?")
            time.sleep(1.0)
        cluster.wait_for(2)  # those that were on the joiner's node have others in their place
    assert set(load.statuses) == {200}, load.statuses


def test_a_failed_start_is_explained_in_one_line(folder: Path) -> None:
    ray, nobody = ("--cluster", "ray"), f"127.0.0.1:{free_port()}"
    assert f"--cluster-address: no answer from a Ray cluster at {nobody}" in refusal(
        folder, *ray, "--cluster-address", nobody
    )
    assert "error: --max-num-seqs: wanted" in refusal(folder, *ray, "--max-num-seqs", "0")
    assert "error: --cluster: cannot listen on 203.0.113.9" in refusal(folder, *ray, "--cluster-host", "203.0.113.9")
    (folder / "calibration.json").write_text("{}")
    last = refusal(folder, *ray, "--calibration", str(folder / "calibration.json"))  # only replicas read it
    assert "error: --replicas: they do not start" in last and "calibration" in last


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_server_stopped_while_waiting_for_hosts_leaves_no_processes(folder: Path, number: int) -> None:
    """No host has such a resource, but one that has may join."""
    command = [sys.executable, str(ROOT / "scripts/serve.py"), "--model", "demo", "--cluster", "ray", *QUICK]
    command += ["--replica-resources", "unobtainable=1"]
    with (folder / "waiting").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=environment(folder))
    server = Serving("", process, folder / "waiting")  # type: ignore[arg-type]
    try:
        wait_until(lambda: "unobtainable" in server.log.read_text(), timeout_s=READY_S)
        below = server.pids("")
        assert len(below) > 5
        process.send_signal(number)
        assert process.wait(60) == (0 if number == signal.SIGTERM else -number)
        wait_until(lambda: not any(is_alive(pid) for pid in below), timeout_s=60)
    finally:
        process.kill()


def test_sigterm_finishes_accepted_requests_and_ends(cluster: Serving) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        taken = [pool.submit(cluster.stream, "Tell.", **LONG), pool.submit(cluster.chat, "Tell me.", **LONG)]
        wait_until(lambda: cluster.total("ccjax_num_requests_running") == 2)
        ending = pool.submit(end, cluster, 120)
        wait_until(lambda: cluster.chat("Who?").status_code == 503)
        assert taken[1].result().status_code == 200
        assert taken[0].result()[-1] == "[DONE]" and not any("error" in line for line in taken[0].result())
        assert ending.result() == 0
    assert cluster.pids("") == []
