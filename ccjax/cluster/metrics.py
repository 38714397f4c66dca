"""Metrics of a cluster: those of every replica and generator, distinguished by a label, and the front's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

LOST = ("tried again", "given up", "answer begun")


class FrontMetrics:
    """Counts what the front does, and renders it with the metrics of the replicas."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        text = "Requests whose replica was lost, by outcome"
        self._lost = Counter("ccjax_cluster_lost_replicas", text, ["outcome"], registry=self._registry)
        for outcome in LOST:
            self._lost.labels(outcome)

    def count_lost(self, outcome: str) -> None:
        """Counts a request whose replica was lost; `outcome` is one of `LOST`."""
        self._lost.labels(outcome).inc()

    def render(self, texts: Sequence[str], counts: Mapping[str, int], generators: Sequence[str] = ()) -> bytes:
        """Renders the Prometheus text format.

        Args:
          texts: the metrics of each replica; replicas are numbered here, since the names of processes change.
          counts: state -> number of replicas.
          generators: the metrics of each generator.
        """
        shown = CollectorRegistry()
        shown.register(_Merged({"replica": texts, "generator": generators}, counts))
        return generate_latest(self._registry) + generate_latest(shown)


class _Merged:
    def __init__(self, texts: Mapping[str, Sequence[str]], counts: Mapping[str, int]) -> None:
        self._texts = texts
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        replicas = GaugeMetricFamily("ccjax_cluster_replicas", "Replicas by state", labels=["state"])
        for state, number in sorted(self._counts.items()):
            replicas.add_metric([state], number)
        yield replicas
        merged: dict[str, Metric] = {}
        each = ((label, number, text) for label, texts in self._texts.items() for number, text in enumerate(texts))
        for label, number, text in each:
            for family in text_string_to_metric_families(text):
                metric = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    metric.samples.append(sample._replace(labels={**sample.labels, label: str(number)}))
        yield from merged.values()
