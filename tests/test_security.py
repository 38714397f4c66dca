"""What no module of ours may do, and inputs that become a path or a key: none leads out of where it belongs."""

import ast
import itertools
import re
from pathlib import Path

import pytest

from ccjax.cache.snapshot.index import SnapshotIndex, decode_index
from ccjax.errors import SnapshotError
from ccjax.server.keys import KeyRing
from ccjax.store import KVSpec, ShardRecord, StoreIdentity, StoreUnavailableError, TensorStoreTier
from ccjax.store.objects import open_root

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ccjax", "models", "pallas_kernels", "store", "scripts", "examples")

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_ATTRIBUTES = {
    *(("yaml", name) for name in ("load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all")),
    *(("os", name) for name in ("system", "popen")),
    ("tempfile", "mktemp"),
    ("torch", "load"),
    ("np", "load"),
    ("numpy", "load"),
}
UNSAFE_KEYWORDS = {"shell": True, "allow_pickle": True, "verify": False}
JINJA_HOME = "ccjax.text.template"
"""Chat templates come with models; there they run in Jinja's sandbox."""


def unsafe(source: str) -> list[str]:
    """What a module does that none of ours may: run data as code, or read formats that can carry code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNSAFE_MODULES:
            found.append(node.module or "")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in UNSAFE_ATTRIBUTES:
                found.append(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
                found.append(node.func.id)
            for keyword in node.keywords:
                value = keyword.value
                if isinstance(value, ast.Constant) and value.value is UNSAFE_KEYWORDS.get(keyword.arg or "", ...):
                    found.append(f"{keyword.arg}={value.value}")
    return found


def modules():
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_no_module_unpickles_evaluates_or_runs_a_shell():
    found = {str(path.relative_to(ROOT)): what for path in modules() if (what := unsafe(path.read_text("utf-8")))}
    assert found == {}
    assert len(modules()) > 300


def test_templates_run_in_a_sandbox_only():
    users = [path for path in modules() if re.search(r"^\s*(from|import) jinja2", path.read_text("utf-8"), re.M)]
    assert [path.relative_to(ROOT).as_posix() for path in users] == [JINJA_HOME.replace(".", "/") + ".py"]
    tree = ast.parse(users[0].read_text("utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert "ImmutableSandboxedEnvironment" in names and not {"Environment", "Template"} & names


UNSAFE = [
    "import pickle",
    "import numpy, _pickle",
    "from joblib import load",
    "import torch\ntorch.load(path)",
    "yaml.load(text, Loader=yaml.SafeLoader)",
    "read = yaml.unsafe_load",
    "np.load(path)",
    "x.load(path, allow_pickle=True)",
    "subprocess.run(text, shell=True)",
    "httpx.get(url, verify=False)",
    "eval(text)",
    "__import__(name)",
    "os.system(text)",
]


def test_unsafe_code_is_detected():
    assert [source for source in UNSAFE if not unsafe(source)] == []
    assert not unsafe(
        "yaml.safe_load(text)\nsubprocess.run(['ls'], check=True)\nre.compile(x)\nmodel.eval()\nverify(x=False)"
    )


# -- paths and keys --------------------------------------------------------------------------------------------------

TRAVERSALS = ["../x", "..", ".", "a/b", "/etc/passwd", "a\\b", "a\0b", "%2e%2e", "é", "", "a" * 129, "a b", "a\n"]
SPEC = KVSpec(1, 1, 2, "float32")


def test_record_ids_with_path_traversal_are_rejected():
    fields = {"variant_id": "v", "chunk_id": "c", "num_tokens": 1, "num_bytes": SPEC.num_bytes(1)}
    for field, name in itertools.product(("variant_id", "chunk_id"), TRAVERSALS):
        with pytest.raises(ValueError, match=field):
            ShardRecord(**(fields | {field: name}))


def test_snapshot_folder_with_path_traversal_is_rejected():
    """Read from a place that others may write to, and part of the path that is read next."""
    for folder in (*TRAVERSALS, "0" * 31, "g" * 32, f"../{'0' * 29}", "0" * 32 + "\n"):
        index = SnapshotIndex("m", "f", "n", SPEC, 1.0, folder, (), (), {})
        with pytest.raises(SnapshotError, match="folder"):
            decode_index(index.encode(), "somewhere")


def test_salts_and_fingerprints_never_become_part_of_a_path(tmp_path):
    for model, salt in itertools.product(("../../etc", "a/b"), TRAVERSALS):
        namespace = StoreIdentity(model, salt).namespace
        assert len(namespace) == 64 and set(namespace) <= set("0123456789abcdef")
        TensorStoreTier((tmp_path / "in").as_uri(), SPEC, StoreIdentity(model, salt))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_unsafe_store_urls_are_rejected():
    for url in ("file:relative", "file://host/path", "s3://bucket/a/../b", "gs://bucket/../b", "/etc", "ftp://x"):
        with pytest.raises((ValueError, StoreUnavailableError)):
            open_root(url)


def test_invalid_tenant_names_are_rejected(tmp_path):
    path = tmp_path / "keys"
    for tenant in ("../x", "a/b", "a b", "é", "", "a" * 65):
        path.write_text(f"{tenant}:0123456789abcdef\n")
        with pytest.raises(ValueError, match="line 1"):
            KeyRing("api_key_file", None, str(path))
