"""Show the metrics of an engine in the text format of Prometheus.

Nothing registers itself anywhere: whoever serves the text asks for it, and two engines in one
process do not meet. A ``MetricsCollector`` can be registered in a registry of the caller's own.

Source: R15.1 to R15.4.
"""

from collections.abc import Callable, Iterator

import attrs
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from laneway.engine.distribution import Distribution
from laneway.engine.picture import Family, MetricsPicture

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""What the text is to be served as."""


@attrs.frozen
class MetricsCollector:
    """Gives a registry what ``take`` returns at the moment it is asked: ``engine.metrics``."""

    take: Callable[[], MetricsPicture]

    def collect(self) -> Iterator[Metric]:
        """Return every family that has a series."""
        for family in self.take().families:
            if family.series:
                yield _metric(family)


def render(metrics: MetricsPicture) -> bytes:
    """Return the text that a Prometheus server reads; ``CONTENT_TYPE`` is its type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsCollector(lambda: metrics))
    return generate_latest(registry)


def _metric(family: Family) -> Metric:
    if family.kind == "histogram":
        return _histogram(family)
    shape = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = shape(family.name, family.help, labels=family.labels)
    for labels, value in family.series:
        if not isinstance(value, Distribution):
            metric.add_metric(labels, value)
    return metric


def _histogram(family: Family) -> HistogramMetricFamily:
    metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    for labels, value in family.series:
        if isinstance(value, Distribution):
            buckets = [(_bound(upper), float(n)) for upper, n in value.cumulative()]
            metric.add_metric(labels, buckets, value.total / value.scale)
    return metric


def _bound(upper: float) -> str:
    return "+Inf" if upper == float("inf") else repr(upper)
