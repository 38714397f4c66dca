"""The examples in deploy/ and docs/operations.md say what the server takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from ccjax.cli.options import config_lines
from ccjax.cli.serving.options import serve_options
from ccjax.server.metrics import ServerMetrics
from tests.engine.helpers import TinyModel

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def checked(tmp_path: Path, text: str):
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    args = serve_options(["--config", str(file)])  # refuses what the server would
    assert config_lines(args)
    return args


def test_kubernetes_example_is_valid_and_consistent(tmp_path):
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    by_kind = {document["kind"]: document for document in documents}
    args = checked(tmp_path, by_kind["ConfigMap"]["data"]["serve.yaml"])
    assert args.shares_computation and args.store == "s3://bucket/kv"
    pod = by_kind["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["args"] == ["--config=/etc/ccjax/serve.yaml"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    for path in (args.api_key_file, args.model, args.compile_cache_dir):
        assert any(str(path).startswith(f"{mount}/") for mount in mounts), path
    names = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == names
    probes = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("liveness", "readiness")]
    assert probes == ["/health", "/ready"]
    assert by_kind["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()


def test_compose_example_is_valid():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name in ("first", "second"):
        args = serve_options(services[name]["command"])
        assert args.store.startswith("file:///") and args.store_index.startswith("redis://index:")
        assert services[name]["depends_on"].keys() <= services.keys()


def test_dockerfile_copies_existing_paths():
    text = (DEPLOY / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
    assert {name for line in copied for name in line.split()} >= {"ccjax", "models", "pallas_kernels", "store"}
    assert all((ROOT / name).exists() for line in copied for name in line.split())


def test_config_example_in_the_operations_page_is_valid(tmp_path):
    text = (ROOT / "docs/operations.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert checked(tmp_path, example).replicas == (2, 8)


def expressions() -> list[str]:
    groups = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    alerts = [rule["expr"] for group in groups for rule in group["rules"]]
    return alerts + [target["expr"] for panel in panels for target in panel["targets"]]


def test_dashboard_and_alerts_use_existing_metrics(tmp_path):
    settings = {"store": f"file://{tmp_path}/store", "store_index": f"sqlite://{tmp_path}/index.db"}
    with TinyModel().engine(**settings) as engine:
        metrics = ServerMetrics()
        metrics.attach(version="0", model="tiny", engine=engine, retriever=None)
        text = metrics.render().decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert len(expressions()) > 30
    for expression in expressions():
        names = re.findall(r"\bccjax_\w+", expression)
        assert names
        for name in names:
            kind = "histogram" if name.endswith("_bucket") else "counter" if name.endswith("_total") else "gauge"
            assert kinds.get(name.removesuffix("_bucket")) == kind, name
    for name in re.findall(r"`.*?(ccjax_\w+)", (ROOT / "docs/operations.md").read_text()):
        assert name in kinds, name
