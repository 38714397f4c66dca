"""The arrows between packages: nothing imports upwards or sideways, policy stays free of heavy modules."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Package -> our packages that it may import besides itself; the longest matching name counts.
ALLOWED = {
    "scripts": {"ccjax", "models", "store", "pallas_kernels"},
    # Runs the kernels' test cases, and a small engine, on a GPU.
    "scripts.gpucheck": {"pallas_kernels", "scripts", "tests", "ccjax.engine", "ccjax.types", "models"},
    "ccjax": {"ccjax.types", "ccjax.errors"},
    "ccjax.server": {"ccjax.engine", "ccjax.loading", "ccjax.retrieval", "ccjax.types", "ccjax.errors", "ccjax.text"},
    "ccjax.cluster": {"ccjax.server", "ccjax.engine", "ccjax.retrieval", "ccjax.policy", "ccjax.text", "ccjax.types"}
    | {"ccjax.errors"},
    "ccjax.engine": {"ccjax.policy", "ccjax.loading", "ccjax.text", "ccjax.types", "ccjax.errors"}
    | {"store", "models", "pallas_kernels"},
    "ccjax.loading": {"ccjax.text", "ccjax.errors", "models.llama3"},
    "ccjax.retrieval": {"models.minilm", "ccjax.types", "ccjax.errors"},
    "ccjax.text": {"ccjax.types", "ccjax.errors"},
    "ccjax.policy": {"ccjax.types"},
    "ccjax.demo": {"ccjax.engine", "ccjax.text", "ccjax.types", "ccjax.errors", "models", "pallas_kernels"},
    "ccjax.evaluation": {"ccjax.engine", "ccjax.policy", "ccjax.demo", "ccjax.types", "ccjax.errors"},
    # Virtual time over the engine's index, placement and prompts; no batch loop, which has a device.
    "ccjax.simulation": {
        "ccjax.engine",
        "ccjax.policy",
        "ccjax.types",
        "ccjax.errors",
        "store",
        "models.llama3.config",
    },
    "ccjax.precompute": {
        *(
            "ccjax.engine",
            "ccjax.evaluation",
            "ccjax.policy",
            "ccjax.retrieval",
            "ccjax.types",
            "ccjax.errors",
            "store",
        ),
        "ccjax.server.loading",  # documents are read as a server reads them
    },
    "models.llama3": {"pallas_kernels", "models.lockstep"},
    "models.lockstep": set(),
    "models.minilm": set(),
    "pallas_kernels": set(),
    "store": set(),
}
OURS = ("ccjax", "models", "pallas_kernels", "store", "scripts", "tests")
# `ccjax/__init__` names the engine for type checkers and loads it lazily.
EXEMPT = {"ccjax"}


def _home(module):
    return max((name for name in ALLOWED if module == name or module.startswith(name + ".")), key=len, default=None)


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def _modules():
    for package in ("ccjax", "models", "pallas_kernels", "store", "scripts"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def violations(module, imported):
    """The imports of `module` that its package may not make."""
    home = _home(module)
    allowed = {home, *ALLOWED[home]} if home else set()
    ours = [name for name in imported if name.split(".")[0] in OURS and name != "ccjax"]  # the lazy root: its version
    return [name for name in ours if not any(name == a or name.startswith(a + ".") for a in allowed)]


@pytest.mark.parametrize(
    ("module", "path"), list(_modules()), ids=lambda value: str(value) if "/" not in str(value) else ""
)
def test_imports_follow_the_arrows(module, path):
    if module not in EXEMPT:
        assert not violations(module, _imports(path))


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("store.tiered", "ccjax.types"),
        ("ccjax.policy.reuse", "ccjax.engine"),
        ("ccjax.retrieval.index", "store.spec"),
        ("models.llama3.steps", "ccjax.policy.focus"),
        ("ccjax.engine.engine", "ccjax.server.app"),
        ("ccjax.engine.engine", "ccjax.simulation.run"),
        ("ccjax.simulation.run", "models.llama3.steps"),
    ],
)
def test_a_wrong_arrow_is_seen(module, imported):
    assert violations(module, [imported]) == [imported]


_LIGHT = """
import importlib, sys
# The strictest first: what one has imported is there for all that come behind it.
for package in ("ccjax", "ccjax.types", "ccjax.policy.planner", "ccjax.text"):
    importlib.import_module(package)
    heavy = ("jax", "faiss") if package == "ccjax.text" else ("jax", "numpy", "tensorstore", "faiss")
    found = [name for name in heavy if name in sys.modules]
    if found:
        sys.exit(f"{package} imports {found}")
"""


def test_light_packages_stay_light():
    done = subprocess.run([sys.executable, "-c", _LIGHT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


_FOREIGN = """
import sys
folder, root, *packages = sys.argv[1:]
sys.path.insert(0, root)
for package in packages:
    sys.path.insert(0, f"{folder}/{package}")
    try:
        import ccjax
    except ImportError as error:
        print(error)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("ccjax", package)]:
        del sys.modules[name]
    del sys.path[0]
import ccjax
"""


def test_a_foreign_package_of_the_same_name_is_named(tmp_path):
    """Each in front of ours; without one ccjax can be imported."""
    packages = ("models", "store", "pallas_kernels")
    for package in packages:
        (tmp_path / package / package).mkdir(parents=True)
        (tmp_path / package / package / "__init__.py").write_text("")
    command = [sys.executable, "-c", _FOREIGN, str(tmp_path), str(ROOT), *packages]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for package, line in zip(packages, done.stdout.splitlines(), strict=True):
        assert f"ccjax needs its own package '{package}'" in line and str(tmp_path / package / package) in line


def test_jit_lives_in_steps_only():
    """Serving compiles in one place per model; random weights, the demo's training and the kernels' checks do so
    elsewhere."""
    found = set()
    for module, path in _modules():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            is_jit = isinstance(node, ast.Attribute) and node.attr == "jit"
            if isinstance(node, ast.ImportFrom) and node.module == "models.lockstep":
                is_jit = bool({"step", "Step"} & {alias.name for alias in node.names})
            if is_jit and not module.startswith(("scripts.kernels.", "scripts.gpucheck.")):
                found.add(module)
    assert found <= {
        "models.llama3.params",
        "models.llama3.steps",
        "models.llama3.paged_steps",
        "models.lockstep.steps",
        "models.minilm.encoder",
        "models.minilm.model",
        "ccjax.demo.training",
        "ccjax.demo.objective",
        "ccjax.demo.evaluate",
    }
