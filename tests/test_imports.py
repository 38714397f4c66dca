"""The arrows between packages: nothing imports upwards, sideways or in a circle, policy stays free of heavy modules."""

import ast
import functools
import graphlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Package -> our packages that it may import besides itself; the longest matching name counts.
ALLOWED = {
    "examples": {"ccjax.functional"},  # and what `ccjax` itself names: all that users need
    "scripts": {"ccjax", "ccjax.models", "ccjax.store", "ccjax.kernels"},
    "ccjax.__main__": {"ccjax.cli"},
    "ccjax.functional": {"ccjax.loading", "ccjax.models.llama3", "ccjax.kernels", "ccjax.text", "ccjax.config"},
    "ccjax.cli": {"ccjax.server", "ccjax.cluster", "ccjax.precompute", "ccjax.evaluation"}
    | {"ccjax.engine", "ccjax.cache", "ccjax.runner", "ccjax.loading", "ccjax.retrieval", "ccjax.policy"}
    | {"ccjax.store", "ccjax.config", "ccjax.types", "ccjax.errors"},
    "ccjax.server": {"ccjax.engine", "ccjax.cache", "ccjax.runner", "ccjax.loading", "ccjax.retrieval", "ccjax.text"}
    | {"ccjax.config", "ccjax.requests", "ccjax.types", "ccjax.errors"},
    "ccjax.cluster": {"ccjax.server", "ccjax.engine", "ccjax.loading", "ccjax.retrieval", "ccjax.policy", "ccjax.text"}
    | {"ccjax.config", "ccjax.assembly", "ccjax.types", "ccjax.errors"},
    "ccjax.precompute": {"ccjax.evaluation", "ccjax.engine", "ccjax.cache", "ccjax.loading", "ccjax.retrieval"}
    | {"ccjax.policy", "ccjax.store", "ccjax.config", "ccjax.prompts", "ccjax.types", "ccjax.errors"}
    | {"ccjax.runner.device", "ccjax.server.loading"},  # documents are read as a server reads them
    "ccjax.evaluation": {"ccjax.engine", "ccjax.loading", "ccjax.policy"}
    | {"ccjax.config", "ccjax.requests", "ccjax.types", "ccjax.errors"},
    "ccjax.engine": {"ccjax.cache", "ccjax.runner", "ccjax.loading", "ccjax.policy", "ccjax.text", "ccjax.prompts"}
    | {"ccjax.store", "ccjax.models", "ccjax.config", "ccjax.requests", "ccjax.sampling", "ccjax.types"}
    | {"ccjax.assembly", "ccjax.errors"},
    "ccjax.cache": {"ccjax.runner", "ccjax.loading", "ccjax.policy", "ccjax.text", "ccjax.prompts"}
    | {"ccjax.store", "ccjax.models", "ccjax.config", "ccjax.types", "ccjax.errors"},
    "ccjax.runner": {"ccjax.loading", "ccjax.policy", "ccjax.store", "ccjax.models", "ccjax.kernels"}
    | {"ccjax.config", "ccjax.requests", "ccjax.sampling", "ccjax.types", "ccjax.errors"},
    "ccjax.loading": {"ccjax.policy", "ccjax.text", "ccjax.models.llama3", "ccjax.config", "ccjax.errors"},
    "ccjax.assembly": {"ccjax.prompts", "ccjax.text", "ccjax.requests", "ccjax.types", "ccjax.errors"},
    "ccjax.prompts": {"ccjax.policy", "ccjax.types"},
    "ccjax.retrieval": {"ccjax.models.minilm", "ccjax.config", "ccjax.types", "ccjax.errors"},
    "ccjax.text": {"ccjax.types", "ccjax.errors"},
    "ccjax.policy": {"ccjax.types"},
    "ccjax.config": {"ccjax.policy", "ccjax.types", "ccjax.errors"},
    "ccjax.requests": {"ccjax.sampling", "ccjax.types", "ccjax.errors"},
    "ccjax.sampling": {"ccjax.errors"},
    "ccjax.types": set(),
    "ccjax.errors": set(),
    "ccjax.models.llama3": {"ccjax.kernels"},
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
    "examples": "examples",
}
"""Folder -> package; those beside `ccjax` are imported by links in it."""
OURS = ("ccjax", "models", "pallas_kernels", "store", "scripts", "examples", "tests")
# `ccjax/__init__` names the engine for users and loads it on first use; modules take nothing but the version from it.
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


def circle_in(graph):
    """Modules of which each imports the next one and the last is the first again; none where there is no circle."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def _imported_modules(path, known):
    """The modules in `known` that a file imports, on first use and for type checkers alone included."""
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from known.intersection(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from known & names
            if not names <= known:
                yield from known & {node.module}


def test_imports_follow_the_allowed_directions():
    wrong = {module: violations(module, _imports(path)) for module, path in _modules() if module not in EXEMPT}
    assert len(wrong) > 200 and not {module: names for module, names in wrong.items() if names}


def test_there_are_no_circular_imports():
    modules = dict(_modules())
    known = set(modules) - EXEMPT
    graph = {module: set(_imported_modules(modules[module], known)) for module in known}
    assert sum(map(len, graph.values())) > 1000 and not circle_in(graph)


def test_circular_import_is_detected(tmp_path):
    sources = {
        "a": "from p import b",
        "p": "from p.b import x",
        "p.b": "def later():\n    import c",
        "c": "if TYPE_CHECKING:\n    from a import y",
    }
    graph = {}
    for module, source in sources.items():
        path = tmp_path / f"{module}.py"
        path.write_text(source)
        graph[module] = set(_imported_modules(path, set(sources)))
    assert graph == {"a": {"p.b"}, "p": {"p.b"}, "p.b": {"c"}, "c": {"a"}}
    assert set(circle_in(graph)) == {"a", "p.b", "c"}
    assert not circle_in(graph | {"c": set()})


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("ccjax.store.tiered", "ccjax.types"),
        ("ccjax.policy.reuse", "ccjax.engine"),
        ("ccjax.retrieval.index", "ccjax.store.spec"),
        ("ccjax.runner.pool", "models.llama3.steps"),
        ("ccjax.models.llama3.steps", "ccjax.policy.focus"),
        ("ccjax.engine.engine", "ccjax.server.app"),
        ("ccjax.server.app", "ccjax.cli.serve"),
        ("ccjax.cli.serve", "scripts.bench"),
    ],
)
def test_forbidden_import_is_detected(module, imported):
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


def test_light_packages_import_no_heavy_modules():
    done = subprocess.run([sys.executable, "-c", _LIGHT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_user_packages_with_our_names_do_not_shadow_ours(tmp_path):
    """A user's own `models.py` or `store/`, in front of everything."""
    for name in ("models", "store", "pallas_kernels", "kernels"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not ours')")
    code = "import ccjax.models.llama3, ccjax.store.spec, ccjax.kernels.attention; print(ccjax.store.spec.__file__)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).resolve() == ROOT / "store" / "spec.py"


def test_jit_is_used_only_in_designated_modules():
    """Serving compiles in one place per model; random weights, the demo's training and the kernels' checks do so
    elsewhere."""
    found = set()
    for module, path in _modules():
        for node in _nodes(path):
            is_jit = isinstance(node, ast.Attribute) and node.attr == "jit"
            if is_jit:
                found.add(module)
    assert found <= {
        "ccjax.models.llama3.params",
        "ccjax.models.llama3.steps",
        "ccjax.models.llama3.paged_steps",
        "ccjax.models.minilm.encoder",
        "ccjax.models.minilm.model",
        "ccjax.runner.compiler_threads",
        "examples.functional",
        "scripts.benchmarks.kernels",
        "scripts.train_demo",
    }
