"""A picture of all metrics that does not change any more, for whoever shows or compares them."""

from typing import Any

import attrs

from laneway.engine.distribution import Distribution

PREFIX = "laneway:"

Value = int | float | Distribution
Series = tuple[tuple[str, ...], Value]


@attrs.frozen(kw_only=True)
class Family:
    """All series of one name. ``series`` are label values in the order of ``labels``, and value."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    series: tuple[Series, ...]


@attrs.frozen
class MetricsPicture:
    """All families after one step, by name; equal if and only if every number is."""

    families: tuple[Family, ...]

    def value(self, name: str, **labels: str) -> Value | None:
        """Return the value of the first series with these labels, or None; ``name`` unprefixed.

        Histograms of several series are added up.
        """
        found: Value | None = None
        for family in self.families:
            if family.name != PREFIX + name:
                continue
            for values, value in family.series:
                told = dict(zip(family.labels, values, strict=True))
                if not labels.items() <= told.items():
                    continue
                if not isinstance(value, Distribution):
                    return value
                found = value.plus(found) if isinstance(found, Distribution) else value
        return found

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """Return the picture as JSON values: by name, each series with its labels."""
        return {
            family.name: [
                {"labels": dict(zip(family.labels, values, strict=True)), **_plain(value)}
                for values, value in family.series
            ]
            for family in self.families
            if family.series
        }


def _plain(value: Value) -> dict[str, Any]:
    if not isinstance(value, Distribution):
        return {"value": value}
    return {
        "count": value.count,
        "sum": value.total / value.scale,
        "p50": value.quantile(0.5),
        "p90": value.quantile(0.9),
        "p99": value.quantile(0.99),
        "buckets": {f"{bound:g}": count for bound, count in value.cumulative()},
    }
