"""`--config` and `--print-config`: the same options, checked the same way, wherever they stand."""

from __future__ import annotations

import pytest
import yaml

from ccjax.cli import serve
from ccjax.cli.options import StartupError, config_lines, options_of
from ccjax.cli.serving.options import ServeOptions, serve_options
from tests.scripts import in_process

# Every option, each with another value than its default.
GIVEN: dict[str, object] = dict(
    pair.split("=", 1)
    for pair in """
host=0.0.0.0 port=0 served-model-name=llama api-key-file=/keys admin-key-file=/admin-keys max-queue=3
request-timeout-s=1e2 page=false log-format=json tool-call-parser=mistral
allowed-hosts=a.example,*.b.example allowed-origins=https://a.example,app://b
otlp-traces-endpoint=http://traces:4318/v1/traces warmup=false
warmup-all=true frame=none unprepared=compute compile-cache-dir=/compiled log-level=info docs=/documents
index-dir=/index search=dense embedder=/encoder chunk-tokens=100 context-tokens=900
docs-exclude=drafts/,*.log docs-links=true max-file-bytes=1MB top-k=2 min-score=0.1 refresh-interval-s=60
cluster=ray replicas=2:3 scale-down-after-s=60 cluster-address=10.0.0.1:6379 cluster-host=10.0.0.2
cluster-port=6380 generators=2 model=random:tiny reuse=exact repair=false prepare=false
dtype=bfloat16 tensor-parallel-size=2 quantization=int8 tokenizer=/tokenizer attention=xla max-model-len=4096
strategy=cacheblend calibration=/calibration.json
store=s3://bucket/prefix?endpoint=http://host:9000 store-index=redis://host:6379/1 max-num-seqs=16
max-num-batched-tokens=512 device-cache-bytes=8GiB gpu-memory-utilization=0.8
device-memory-bytes=80GB host-cache-bytes=1GiB disk-cache-bytes=1TB disk-kv-dtype=int8
read-only=true shadow-ratio=0.01
""".split()
)
GIVEN |= {
    "replica-resources": {"GPU": "1", "fast": "0.5"},
    "system-prompt": 'Answer: briefly, "please" - or yes.',
}
SECRET = {"api-key": "first", "admin-key": "second", "tenant-salt": "third"}


@pytest.fixture
def read(tmp_path):
    """`read(content, *argv)` is what comes of a file with that content and these arguments."""

    def read(content: object, *argv: str) -> ServeOptions:
        file = tmp_path / "serve.yaml"
        file.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
        return serve_options(["--config", str(file), *argv])

    return read


def as_arguments(options: dict[str, object]) -> list[str]:
    arguments = []
    for name, value in options.items():
        if name in ("page", "warmup", "repair", "prepare"):
            arguments.append(f"--no-{name}")
        elif value == "true":
            arguments.append(f"--{name}")
        else:
            parts = [f"{key}={part}" for key, part in value.items()] if isinstance(value, dict) else value
            arguments.append(f"--{name}={value if isinstance(value, str) else ','.join(parts)}")
    return arguments


def without_file(args: ServeOptions) -> dict[str, object]:
    return args.model_dump(exclude={"config"})


def test_every_option_works_the_same_in_a_config_file(read):
    by_file = without_file(read({**GIVEN, **SECRET}))
    by_command_line = without_file(serve_options(as_arguments({**GIVEN, **SECRET})))
    assert by_file == by_command_line
    defaults = without_file(serve_options([]))
    keys = options_of(ServeOptions).keys() - {"config", "print-config", "print-memory-plan"}
    assert keys == GIVEN.keys() | SECRET.keys(), "new ones belong there"
    assert not [key for key in keys if by_file[key.replace("-", "_")] == defaults[key.replace("-", "_")]]


def test_command_line_overrides_the_config_file(read):
    args = read({"port": 1, "warmup": False, "read-only": True, "top-k": 9}, "--port", "2", "--warmup")
    assert (args.port, args.warmup, args.read_only, args.top_k) == (2, True, True, 9)
    assert serve_options([]).warmup is True


@pytest.mark.parametrize("content", ["", "# nothing\n", "{}", "\n---\n"])
def test_an_empty_file_changes_nothing(read, content):
    assert without_file(read(content)) == without_file(serve_options([]))


def test_yaml_values_are_read_as_plain_text(read):
    assert read("replicas: 2:30").replicas == (2, 30)  # YAML 1.1 has the number 150 there
    assert read("served-model-name: 1.10").served_model_name == "1.10"
    assert read("system-prompt: no").system_prompt == "no"
    with pytest.raises(StartupError, match=r"host: wanted a text, got \['a'\]"):
        read("host: !!python/object/apply:os.abort [a]")  # no tag makes anything happen


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot: 80", "prot: no such option, did you mean port?"),
        ("unheard-of: 1", "unheard-of: no such option"),
        ("config: other.yaml", "config: no such option"),
        ("no-warmup: true", "no-warmup: no such option, did you mean warmup?"),
        ("port: 123456", r"port: wanted 0 \(any free port\) to 65535, got '123456'"),
        ("port:", r"port: wanted 0 \(any free port\) to 65535, got ''"),
        ("max-queue: many", "max-queue: wanted a positive integer, got 'many'"),
        ("host-cache-bytes: 2 parsecs", "host-cache-bytes: wanted a size such as 2GiB"),
        ("warmup: maybe", "warmup: wanted True or False, got 'maybe'"),
        ("warmup: [true]", r"warmup: wanted True or False, got \['true'\]"),
        ("log-level: loud", r"log-level: wanted one of \('debug', .*'error'\), got 'loud'"),
        ("alpha: 2", "alpha: no such option"),
        ("port: 1\nport: 2", "not YAML as wanted: 'port' comes twice in .*line 2, column 1"),
        ("max-queue: 1\nmax_queue: 2", "'max_queue' comes twice"),
        ("? [a]\n: 1", "is no name"),
        ("port: [", "not YAML as wanted: .*line 1, column 8"),
        ("- port", "wanted lines 'name: value', got a list"),
        ("port", "wanted lines 'name: value', got a str"),
        ("a: " + "[" * 1500, "not YAML as wanted"),
        ("host: &a [*a]", "not YAML as wanted: found unconstructable recursive node"),
    ],
)
def test_error_names_the_config_file_and_key(read, content, message):
    with pytest.raises(StartupError, match=f"^--config: .*serve.yaml: .*{message}"):
        read(content)


def test_error_names_an_unreadable_config_file(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"host: \xe9")
    for name in ("missing.yaml", "latin.yaml"):
        with pytest.raises(StartupError, match=f"--config: cannot read .*{name}: "):
            serve_options(["--config", str(tmp_path / name)])


def test_printed_config_round_trips(read):
    args = read({**GIVEN, **SECRET})
    lines = config_lines(args)
    again = read("\n".join(lines))
    secret = {"config", *(name.replace("-", "_") for name in SECRET)}
    assert again.model_dump(exclude=secret) == args.model_dump(exclude=secret)
    assert not any(secret in "\n".join(lines) for secret in SECRET.values())


def test_passwords_in_urls_are_not_printed(read):
    content = {"store": "file:///x", "store-index": "redis://user:hidden@host/1"}
    lines = config_lines(read(content))
    assert "# store-index: redis://...@host/1 (without its secrets)" in lines and "store: file:///x" in lines


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--shadow-ratio", "-1"], "ccjax serve: error: --shadow-ratio: wanted"),
        (["--top-k", "0"], "ccjax serve: error: --top-k: wanted"),
        (["--config", "missing.yaml"], "ccjax serve: error: --config: cannot read missing.yaml: No such file"),
    ],
)
def test_print_config_validates_options(argv, message):
    done = in_process.run(serve.main, "--print-config", *argv)
    assert done.returncode == 2 and done.stderr.startswith(message) and done.stderr.count("\n") == 1


def test_print_config_outputs_valid_yaml_with_all_defaults(read):
    done = in_process.run(serve.main, "--print-config", "--port", "81")
    assert done.returncode == 0 and yaml.safe_load(done.stdout)["port"] == 81
    lines = config_lines(serve_options([]))
    assert {"port: 8000", "warmup: true", "dtype: auto", "strategy: auto", "# store:"} <= {*lines}
    assert config_lines(read("\n".join(lines))) == lines
