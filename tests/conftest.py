"""Settings every test runs under: strict JAX promotion, checked array shapes, CPU unless `-m gpu`. Imports no jax.

Settings travel in environment variables, so that the subprocesses of tests inherit them. Without the extra `test` the
tests of the kernels still run (`make gpu-check`); what they then leave unchecked is said at the end.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import importlib.util
import os
import random
import shutil
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest

try:
    import beartype
    import hypothesis
    import psutil
except ImportError as error:  # a machine with a GPU may have only what the package needs, and pytest
    beartype = hypothesis = psutil = None
    LESS = f"{error.name} is not installed: array shapes and what tests leave behind are not checked"
else:
    LESS = ""

from tests.data import data_path
from tests.redis_server import RedisServer, redis_server

ROOT = Path(__file__).resolve().parent.parent
_MOST_MAPPINGS = 20_000
_MOST_COMPILED_BYTES = 2 << 30


def _quick_compiles() -> list[str]:
    """Flags with which XLA compiles in a third of the time; code for tiny models need not be fast. With
    CCJAX_TEST_OPTIMIZED=1 (`make test-all`) everything is compiled as users have it."""
    if os.environ.get("CCJAX_TEST_OPTIMIZED") == "1":
        return []
    flags = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": "true",
        "xla_cpu_use_onednn": "false",
        "xla_cpu_use_xnnpack": "false",
        "xla_cpu_parallel_codegen_split_count": 1,
    }
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags["xla_cpu_use_fusion_emitters"] = "false"  # 0.11 ends a process with a flag that it does not know
    return [f"--{name}={value}" for name, value in flags.items()]


def _memory_folder() -> None:
    """Temporary folders in memory where that is a file system: a store's tests wait for the disk 9 seconds in 10."""
    shared = Path("/dev/shm")
    if shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 4 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(shared))


_memory_folder()
# Each process that a test starts would else compile all our sources, half a second of its three.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
_own_context = ssl.create_default_context
_shared_context = functools.cache(_own_context)


def _context_of_httpx(*args: Any, **how: Any) -> ssl.SSLContext:
    """One context for all clients of httpx: each else reads the certificates of all authorities, 40 ms a request."""
    is_httpx = sys._getframe(1).f_globals.get("__name__", "").startswith("httpx.")
    return (_shared_context if is_httpx else _own_context)(*args, **how)


ssl.create_default_context = _context_of_httpx
gc.set_threshold(50_000, 20, 20)  # what is imported is looked through less often
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # of each operation, a tenth of what lowering takes
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Some virtual machines report AMX and then stop a process that uses it: torch's bfloat16 would end the test run.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Three stems are left out: jax rebuilds their dataclasses with leaves that are no arrays (shapes, None, shardings).
_CHECKED = [
    f"ccjax.{name}.{path.stem}"
    for name, folder in (("models.llama3", "models/llama3"), ("kernels", "pallas_kernels"))
    for path in sorted((ROOT / folder).glob("[a-z]*"))
    if path.stem not in ("params", "quantized", "inputs")
]
if beartype is not None:
    jaxtyping.install_import_hook(_CHECKED, "beartype.beartype")


if hypothesis is not None:
    # Examples are the same in every run, or one that fails now and then would be found by whoever changes something
    # else.
    any_speed = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
    hypothesis.settings.register_profile("quick", max_examples=20, derandomize=True, database=None, **any_speed)
    hypothesis.settings.register_profile("thorough", max_examples=200, **any_speed)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the tests marked slow; with more and other examples")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="files, and tests within them, in a random order")


def pytest_configure(config: pytest.Config) -> None:
    is_for_gpu = "gpu" in (config.getoption("markexpr") or "").replace("not gpu", "")
    if not (is_for_gpu and shutil.which("nvidia-smi")):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        flags = ["--xla_force_host_platform_device_count=8", *_quick_compiles()]
        os.environ.setdefault("XLA_FLAGS", " ".join(flags))
    if config.getoption("--all") and hypothesis is not None:
        hypothesis.settings.load_profile(os.environ.setdefault("HYPOTHESIS_PROFILE", "thorough"))
    # Most files compile the same small models' steps, in every process. jax's key of an entry is the program itself
    # with its flags: what other sources compiled to is never taken, it only takes up room.
    folder = Path(sys.prefix) / "ccjax-test-compiled" / f"jaxlib-{importlib.metadata.version('jaxlib')}"
    if not hasattr(config, "workerinput"):
        _drop_if_large(folder)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _drop_if_large(folder: Path) -> None:
    others = folder.parent.glob("*") if folder.parent.is_dir() else ()
    for other in others:
        if other != folder or sum(path.stat().st_size for path in folder.iterdir()) > _MOST_COMPILED_BYTES:
            shutil.rmtree(other, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_without_peers = importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None
    marks = {item: {mark.name for mark in item.own_markers} | _marks(item.parent) for item in items}
    for item in items:
        if is_without_peers and "peers" in marks[item]:
            item.add_marker(pytest.mark.skip(reason="needs torch and transformers"))
    is_named = any("::" in argument for argument in config.args)
    if not (config.getoption("--all") or is_named or "slow" in (config.getoption("markexpr") or "")):
        config.hook.pytest_deselected(items=[item for item in items if "slow" in marks[item]])
        items[:] = [item for item in items if "slow" not in marks[item]]
    seed = config.getoption("--shuffle")
    if seed is not None:  # the same in every worker
        files = {item.path: random.Random(f"{seed} {item.path.name}").random() for item in items}
        items.sort(key=lambda item: (files[item.path], random.Random(f"{seed} {item.nodeid}").random()))


@functools.cache
def _marks(node: Any) -> frozenset[str]:
    """Of a module or class and what it is in, once for all its tests."""
    return frozenset() if node is None else _marks(node.parent) | {mark.name for mark in node.own_markers}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if LESS:
        terminalreporter.write_line(LESS)


def pytest_collection_finish() -> None:
    """What is imported by now stays to the end: no collection of garbage looks through it again."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """When all is torn down, no thread and no process of a test is left, and nobody listens."""
    yield
    gc.collect()
    threads = [thread for thread in threading.enumerate() if not (thread.daemon or thread is threading.main_thread())]
    # The stores of a process share one pool of readers, which ends with the process.
    threads = [thread for thread in threads if not thread.name.startswith("store-read")]
    threads = [thread.name for thread in threads if (thread.join(60), thread.is_alive())[1]]
    assert not threads, f"left behind: {threads=}"
    if psutil is None:
        return
    process = psutil.Process()
    children = [(child.pid, child.cmdline()) for child in process.children(recursive=True) if _is_running(child)]
    ports = [place.laddr.port for place in process.net_connections("inet") if place.status == psutil.CONN_LISTEN]
    assert not (children or ports), f"left behind: {children=}, {ports=}"


def _is_running(child: psutil.Process) -> bool:
    """Whether a process goes on even when it is given time to end. Python's own helpers end with the interpreter."""
    try:
        if child.status() == psutil.STATUS_ZOMBIE or "resource_tracker" in " ".join(child.cmdline()):
            return False
        child.wait(60)
        return False
    except psutil.NoSuchProcess:
        return False
    except psutil.TimeoutExpired:
        return True


@pytest.fixture(scope="module", autouse=True)
def few_enough_mappings() -> Iterator[None]:
    """Every compiled step takes some memory mappings, of which Linux gives a process 65,530: XLA aborts beyond. So what
    the modules before have compiled is dropped in time."""
    yield
    maps = Path("/proc/self/maps")
    if "jax" in sys.modules and maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPPINGS:
        gc.collect()
        sys.modules["jax"].clear_caches()
        gc.collect()


@pytest.fixture
def test_data() -> Callable[..., Path]:
    """`test_data("qa", "file.jsonl")` is the path of a data file, or skips the test."""
    return data_path


@pytest.fixture(scope="session")
def common_redis() -> Iterator[RedisServer]:
    """A server for tests that leave it as it is."""
    with redis_server() as server:
        yield server


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A server for one test, which may do anything to it."""
    with redis_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "redis"])
def index_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty shared index."""
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/index.db"
    redis = request.getfixturevalue("common_redis")
    redis.run("FLUSHALL")
    return redis.url
