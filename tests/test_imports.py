"""The arrows between packages: nothing imports upwards or sideways, policy stays free of heavy modules."""

import ast
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

_SIMULATOR = ("cache", "costs", "hardware", "outcome", "replica", "run", "sizing", "store", "this_cpu", "workload")
# Package -> our packages that it may import besides itself; the longest matching name counts.
ALLOWED = {
    "scripts": {"ccjax", "ccjax.models", "ccjax.store", "ccjax.kernels"},
    # Runs the kernels' test cases, and a small engine, on a GPU.
    "scripts.gpucheck": {
        "ccjax.kernels",
        "scripts",
        "tests",
        "ccjax.engine",
        "ccjax.config",
        "ccjax.types",
        "ccjax.models",
    },
    "ccjax": {"ccjax.types", "ccjax.errors"},
    "ccjax.__main__": {"ccjax.cli"},
    "ccjax.cli": {"ccjax.server", "ccjax.cluster", "ccjax.precompute", "ccjax.evaluation", "ccjax.demo.world"}
    | {
        "ccjax.config",
        "ccjax.engine",
        "ccjax.loading",
        "ccjax.retrieval",
        "ccjax.policy",
        "ccjax.store",
        "ccjax.types",
        "ccjax.errors",
    },
    "ccjax.config": {"ccjax.policy", "ccjax.types", "ccjax.errors"},
    "ccjax.server": {"ccjax.config", "ccjax.engine", "ccjax.loading", "ccjax.retrieval", "ccjax.text", "ccjax.types"}
    | {"ccjax.errors"},
    "ccjax.cluster": {"ccjax.server", "ccjax.engine", "ccjax.retrieval", "ccjax.policy", "ccjax.text", "ccjax.types"}
    | {"ccjax.config", "ccjax.errors"},
    "ccjax.engine": {"ccjax.config", "ccjax.policy", "ccjax.loading", "ccjax.text", "ccjax.types", "ccjax.errors"}
    | {"ccjax.store", "ccjax.models", "ccjax.kernels"},
    "ccjax.loading": {"ccjax.text", "ccjax.errors", "ccjax.models.llama3"},
    "ccjax.retrieval": {"ccjax.models.minilm", "ccjax.types", "ccjax.errors"},
    "ccjax.text": {"ccjax.types", "ccjax.errors"},
    "ccjax.policy": {"ccjax.types"},
    "ccjax.demo": set(),
    "ccjax.evaluation": {"ccjax.config", "ccjax.engine", "ccjax.policy", "ccjax.demo", "ccjax.types", "ccjax.errors"},
    # Virtual time over the engine's index, placement and prompts; no batch loop, which has a device.
    **{
        f"scripts.simulation.{name}": {
            "ccjax.engine",
            "ccjax.policy",
            "ccjax.types",
            "ccjax.errors",
            "ccjax.store",
            "ccjax.models.llama3.config",
            *(f"scripts.simulation.{other}" for other in _SIMULATOR),
        }
        for name in _SIMULATOR
    },
    "ccjax.precompute": {
        *(
            "ccjax.config",
            "ccjax.engine",
            "ccjax.evaluation",
            "ccjax.policy",
            "ccjax.retrieval",
            "ccjax.types",
            "ccjax.errors",
            "ccjax.store",
        ),
        "ccjax.server.loading",  # documents are read as a server reads them
    },
    "ccjax.models.llama3": {"ccjax.kernels", "ccjax.models.lockstep"},
    "ccjax.models.lockstep": set(),
    "ccjax.models.minilm": set(),
    "ccjax.kernels": set(),
    "ccjax.store": set(),
}
PACKAGES = {
    "ccjax": "ccjax",
    "models": "ccjax.models",
    "pallas_kernels": "ccjax.kernels",
    "store": "ccjax.store",
    "scripts": "scripts",
}
"""Folder -> package; those beside `ccjax` are imported by links in it."""
OURS = ("ccjax", "models", "pallas_kernels", "store", "scripts", "tests")
# `ccjax/__init__` names the engine for type checkers and loads it lazily.
EXEMPT = {"ccjax"}


def _home(module):
    return max((name for name in ALLOWED if module == name or module.startswith(name + ".")), key=len, default=None)


@functools.cache
def _nodes(path):
    return list(ast.walk(ast.parse(path.read_text("utf-8"))))


def _imports(path):
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def _modules():
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = package, *path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def violations(module, imported):
    """The imports of `module` that its package may not make."""
    home = _home(module)
    allowed = {home, *ALLOWED[home]} if home else set()
    ours = [name for name in imported if name.split(".")[0] in OURS and name != "ccjax"]  # the lazy root: its version
    return [name for name in ours if not any(name == a or name.startswith(a + ".") for a in allowed)]


def test_imports_follow_the_arrows():
    wrong = {module: violations(module, _imports(path)) for module, path in _modules() if module not in EXEMPT}
    assert len(wrong) > 200 and not {module: names for module, names in wrong.items() if names}


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("ccjax.store.tiered", "ccjax.types"),
        ("ccjax.policy.reuse", "ccjax.engine"),
        ("ccjax.retrieval.index", "ccjax.store.spec"),
        ("ccjax.engine.pool", "models.llama3.steps"),
        ("ccjax.models.llama3.steps", "ccjax.policy.focus"),
        ("ccjax.engine.engine", "ccjax.server.app"),
        ("ccjax.server.app", "ccjax.cli.serve"),
        ("ccjax.cli.serve", "scripts.bench"),
        ("ccjax.engine.engine", "scripts.simulation.run"),
        ("scripts.simulation.run", "ccjax.models.llama3.steps"),
    ],
)
def test_a_wrong_arrow_is_seen(module, imported):
    assert violations(module, [imported]) == [imported]


_LIGHT = """
import importlib, sys
# The strictest first: what one has imported is there for all that come behind it.
for package in ("ccjax", "ccjax.types", "ccjax.policy.planner", "ccjax.config", "ccjax.text"):
    importlib.import_module(package)
    heavy = ("jax", "faiss") if package == "ccjax.text" else ("jax", "numpy", "tensorstore", "faiss")
    found = [name for name in heavy if name in sys.modules]
    if found:
        sys.exit(f"{package} imports {found}")
"""


def test_light_packages_stay_light():
    done = subprocess.run([sys.executable, "-c", _LIGHT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_packages_of_such_names_stay_out_of_the_way(tmp_path):
    """A user's own `models.py` or `store/`, in front of everything."""
    for name in ("models", "store", "pallas_kernels", "kernels"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not ours')")
    code = "import ccjax.models.llama3, ccjax.store.spec, ccjax.kernels.attention; print(ccjax.store.spec.__file__)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).resolve() == ROOT / "store" / "spec.py"


def test_jit_lives_in_steps_only():
    """Serving compiles in one place per model; random weights, the demo's training and the kernels' checks do so
    elsewhere."""
    found = set()
    for module, path in _modules():
        for node in _nodes(path):
            is_jit = isinstance(node, ast.Attribute) and node.attr == "jit"
            if isinstance(node, ast.ImportFrom) and node.module == "ccjax.models.lockstep":
                is_jit = bool({"step", "Step"} & {alias.name for alias in node.names})
            if is_jit and not module.startswith(("scripts.kernels.", "scripts.gpucheck.")):
                found.add(module)
    assert found <= {
        "ccjax.models.llama3.params",
        "ccjax.models.llama3.steps",
        "ccjax.models.llama3.paged_steps",
        "ccjax.models.lockstep.steps",
        "ccjax.models.minilm.encoder",
        "ccjax.models.minilm.model",
        "scripts.demo_model.training",
        "scripts.demo_model.objective",
        "scripts.demo_model.evaluate",
    }
