"""Metrics as a table for a person: one line a series, with percentiles where it measures time."""

from typing import Any

from rich.table import Table


def metrics_table(metrics: dict[str, list[dict[str, Any]]]) -> Table:
    """Return the metrics line by line; what is 0 or was never observed is left out.

    ``metrics`` are a picture's JSON values.
    """
    table = Table("metric", "labels", "value", title="metrics after the last step")
    for name, series in metrics.items():
        for one in series:
            value = _spread(one, name) if "count" in one else f"{one['value']:.15g}"
            if value not in ("", "0"):
                told = [f"{k}={v}" for k, v in one["labels"].items() if k != "engine"]
                table.add_row(name.partition(":")[2], ", ".join(told), value)
    return table


def _spread(one: dict[str, Any], name: str) -> str:
    """Return count and mean of a histogram, and percentiles where it measures time."""
    if not one["count"]:
        return ""
    mean = one["sum"] / one["count"]
    if not name.endswith("_seconds"):
        return f"{one['count']} times, mean {mean:.3f}"
    shares = ", ".join(f"{share} {one[share] * 1e3:.3f}" for share in ("p50", "p90", "p99"))
    return f"{one['count']} times, mean {mean * 1e3:.3f} ms, {shares}"
