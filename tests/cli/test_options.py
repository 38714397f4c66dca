"""Where options come from besides flags and flat files: groups of a file, the environment; and the help of them all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ccjax.cli.options import StartupError, config_lines, options_of, parse
from ccjax.cli.precompute import PrecomputeOptions
from ccjax.cli.serving.cluster import cluster_options
from ccjax.cli.serving.options import ServeOptions, engine_settings, serve_options
from ccjax.config import EngineConfig
from ccjax.models.llama3.quantized import WEIGHT_FORMATS
from ccjax.policy.strategies import STRATEGIES
from ccjax.server import ServerSettings
from ccjax.store.formats import KV_DTYPES


@pytest.fixture
def file(tmp_path: Path):
    """`file(content)` is the flag that names a file of that content."""

    def written(content: str) -> list[str]:
        (tmp_path / "serve.yaml").write_text(content)
        return ["--config", str(tmp_path / "serve.yaml")]

    return written


def test_grouped_config_equals_flat_config(file) -> None:
    grouped = "model: demo\nreuse: {strategy: h2o}\ncache: {host_cache_bytes: 3GB, store: file:///x}"
    flat = "model: demo\nstrategy: h2o\nhost-cache-bytes: 3GB\nstore: file:///x"
    options = serve_options(file(grouped))
    assert options.model_dump() == serve_options(file(flat)).model_dump()
    assert engine_settings(options) == {
        "dtype": "auto",
        "max_queue": 128,
        "strategy": "h2o",
        "host_cache_bytes": 3 * 10**9,
        "store": "file:///x",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("cache: {strategy: h2o}", "cache: strategy: no such option, it belongs to reuse"),
        ("cache: {stor: x}", "cache: stor: no such option, did you mean store?"),
        ("quality: {shadow-ratio: 2}", "quality: shadow-ratio: wanted a share from 0 to 1, got '2'"),
        ("store: file:///x\ncache: {store: file:///y}", "cache: store: given twice, first as store"),
        ("log-format: {a: b}", "log-format: wanted one of ('text', 'json'), got {'a': 'b'}"),
    ],
)
def test_invalid_grouped_config_entry_is_named_in_the_error(file, content: str, message: str) -> None:
    with pytest.raises(StartupError, match=f"^--config: .*serve.yaml: {re.escape(message)}$"):
        serve_options(file(content))


def test_environment_variables_set_only_secrets_with_lowest_precedence(file, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CCJAX_PORT", "tcp://10.0.0.1:80")  # as Kubernetes sets it
    monkeypatch.setenv("CCJAX_CONFIG", "no-such-file.yaml")
    monkeypatch.setenv("CCJAX_STORE_INDEX", "")
    monkeypatch.setenv("CCJAX_ADMIN_KEY", "first")
    options = serve_options([])
    assert (options.admin_key, options.port, options.store_index) == ("first", 8000, None)
    assert serve_options(file("admin-key: second")).admin_key == "second"
    assert serve_options([*file("admin-key: second"), "--admin-key", "third"]).admin_key == "third"


def test_empty_key_is_rejected_and_secrets_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CCJAX_API_KEY", "")
    with pytest.raises(StartupError, match="^CCJAX_API_KEY: wanted a non-empty text"):
        serve_options([])
    monkeypatch.setenv("CCJAX_API_KEY", "hidden")
    monkeypatch.setenv("CCJAX_STORE_INDEX", "redis://user:hidden@host/1")
    with pytest.raises(StartupError, match="^CCJAX_STORE_INDEX: wanted a store") as caught:
        serve_options([])
    options = serve_options(["--store", "file:///x", "--tenant-salt", "hidden"])
    assert "hidden" not in f"{caught.value} {options!r} {config_lines(options)}"
    assert options.api_key == "hidden"


def test_help_has_every_option_with_its_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_options(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for keyword in ("alpha", "flow-share", "focus-window", "generator-device", "max-prefill-bs"):
        assert f"--{keyword}" not in text, "keywords of the library only"
    assert "paper" not in text
    for names in (STRATEGIES, WEIGHT_FORMATS, KV_DTYPES):
        assert "{" + ",".join(names) + "}" in text
    for name, field in ServeOptions.model_fields.items():
        assert field.description, name
    assert "Most queued requests; more get 429. (default: 128)" in text
    assert "Most requests that run at once; others are queued. (default: 32)" in text


def test_number_of_serve_options_is_limited() -> None:
    assert len(options_of(ServeOptions)) <= 70


def test_precompute_options_match_server_options() -> None:
    ours, its = PrecomputeOptions.model_fields, ServeOptions.model_fields
    for name in ours.keys() & its.keys() - {"model", "store", "top_k"}:
        assert (ours[name].annotation, ours[name].default) == (its[name].annotation, its[name].default), name
    options = parse(PrecomputeOptions, ["--store", "file:///x", "--strategy", "h2o"], prog="x")
    assert engine_settings(options) == {"dtype": "auto", "store": "file:///x", "strategy": "h2o"}


def test_engine_config_parses_size_strings() -> None:
    config = EngineConfig(host_cache_bytes="2GiB", ranking_layers=[0, 2])
    assert config.host_cache_bytes == 2 << 30 and config.ranking_layers == (0, 2)
    assert config.replace(alpha=2).alpha == 2 and config.alpha == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # as ray is imported
def test_a_generator_is_the_default_only_beside_replicas_on_accelerators():
    pytest.importorskip("ray")
    from ccjax.cluster.serving import with_generators

    def number(resources, *flags):
        options = cluster_options(serve_options(["--cluster", "ray", *flags]), ServerSettings())
        found = with_generators(options, resources)
        assert ("order_after_s" in found.replica.engine) == bool(found.generators), "orders that nobody takes"
        return found.generators

    cpus, gpus, store = {"CPU": 8.0}, {"CPU": 8.0, "GPU": 1.0}, ("--store", "file:///tmp/never")
    assert (number(cpus, *store), number(gpus, *store), number(gpus)) == (0, 1, 0)
    assert number(cpus, *store, "--generators", "2") == 2 and number(gpus, *store, "--generators", "0") == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # as ray is imported
def test_replicas_on_one_machine_get_an_index_by_which_orders_are_placed():
    pytest.importorskip("ray")
    orders: dict[str, Any] = {"cluster": "ray", "order_after_s": 2}
    options = ServeOptions(**orders, store="file:///tmp/never")
    engine = cluster_options(options, ServerSettings()).replica.engine
    assert engine["store_index"].startswith("sqlite://") and engine["order_after_s"] == 2.0
    assert engine["share_computation"]
    elsewhere = {**orders, "store": "s3://bucket", "cluster_address": "10.0.0.1:6379"}
    for refused in (orders, elsewhere, {"order_after_s": 2}):
        with pytest.raises(ValueError, match="order_after_s: wanted a store_index"):
            ServeOptions(**refused)
