"""What Prometheus reads is what the metrics say: by hand, and read back by its own parser.

Source: R15.1 to R15.4, G20.
"""

from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.rig import Rig

from laneway.adapters.prometheus import CONTENT_TYPE, MetricsCollector, render
from laneway.engine.distribution import Distribution
from laneway.engine.families import NAMES
from laneway.engine.picture import Family, MetricsPicture


def family(name: str, kind: str, *series: Any, labels: tuple[str, ...] = ("engine",)) -> Family:
    """Return a family with a help text."""
    return Family(name=name, kind=kind, help="What it is.", labels=labels, series=series)


def read(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every sample of a text by name and labels, as Prometheus' own parser reads it."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for metric in text_string_to_metric_families(text.decode())
        for sample in metric.samples
    }


def expected(picture: MetricsPicture) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every sample that a picture stands for."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for one in picture.families:
        for values, value in one.series:
            labels = set(zip(one.labels, values, strict=True))
            if not isinstance(value, Distribution):
                found[one.name, frozenset(labels)] = value
                continue
            reached = 0
            bounds = [str(bound / value.scale) for bound in value.bounds]
            for bound, count in zip([*bounds, "+Inf"], value.counts, strict=True):
                reached += count
                found[one.name + "_bucket", frozenset({*labels, ("le", bound)})] = reached
            found[one.name + "_count", frozenset(labels)] = reached
            found[one.name + "_sum", frozenset(labels)] = value.total / value.scale
    return found


@pytest.fixture(scope="module")
def told() -> MetricsPicture:
    """Metrics of an engine that has answered, refused and cancelled."""
    rig = Rig()
    for number in range(12):
        rig.submit([1 + number, 2, 3], seed=number)
    rig.submit([])
    rig.streams[4].stream.cancel()
    rig.run_actions(100)
    return rig.engine.metrics()


def test_the_text_by_hand() -> None:
    picture = MetricsPicture(
        (
            family("laneway:done_total", "counter", (("0",), 3)),
            family("laneway:held", "gauge", (("0", "a"), 0.25), labels=("engine", "state")),
            family("laneway:took_seconds", "histogram", (("0",), Distribution(
                (50_000, 2_000_000), (1, 0, 2), 7_500_000, 1_000_000))),
            family("laneway:nothing", "gauge"),
        )
    )  # fmt: skip
    assert render(picture).decode() == (
        "# HELP laneway:done_total What it is.\n"
        "# TYPE laneway:done_total counter\n"
        'laneway:done_total{engine="0"} 3.0\n'
        "# HELP laneway:held What it is.\n"
        "# TYPE laneway:held gauge\n"
        'laneway:held{engine="0",state="a"} 0.25\n'
        "# HELP laneway:took_seconds What it is.\n"
        "# TYPE laneway:took_seconds histogram\n"
        'laneway:took_seconds_bucket{engine="0",le="0.05"} 1.0\n'
        'laneway:took_seconds_bucket{engine="0",le="2.0"} 1.0\n'
        'laneway:took_seconds_bucket{engine="0",le="+Inf"} 3.0\n'
        'laneway:took_seconds_count{engine="0"} 3.0\n'
        'laneway:took_seconds_sum{engine="0"} 7.5\n'
    )


def test_every_number_is_read_back(told: MetricsPicture) -> None:
    numbers = expected(told)
    assert read(render(told)) == numbers
    assert len(numbers) > 250 and sum(value > 0 for value in numbers.values()) > 100


def test_a_name_of_a_model_may_hold_anything() -> None:
    alias = 'a"b\\c\nd é'
    one = family("laneway:x_total", "counter", ((alias,), 1), labels=("model_name",))
    (key,) = read(render(MetricsPicture((one,))))
    assert key == ("laneway:x_total", frozenset({("model_name", alias)}))


def test_every_family_has_the_type_of_its_name(told: MetricsPicture) -> None:
    lines = [line.split() for line in render(told).decode().splitlines()]
    types = {line[2]: line[3] for line in lines if line[:2] == ["#", "TYPE"]}
    assert types == {name: kind for name, kind in NAMES.items() if name in types}
    unseen = {"device_exceptions_total", "stale_completions_total"}
    unseen |= {"canary_runs_total", "device_resets_total", "recovery_rungs_total"}
    unseen |= {"requests_suspended_total", "device_last_reset_timestamp"}  # it never failed
    unseen |= {"engine_slot_busy_seconds_total", "engine_slot_busy_ratio"}  # it tells no times
    assert set(NAMES) - set(types) == {f"laneway:{name}" for name in unseen}
    assert {family.name: family.kind for family in told.families} == dict(NAMES)


def test_names_follow_the_conventions() -> None:
    for name, kind in NAMES.items():
        assert name.startswith("laneway:")
        assert name.endswith("_total") == (kind == "counter"), name
        if name.endswith("_ratio"):
            assert kind in ("histogram", "gauge"), name
        else:
            assert (kind == "histogram") == name.endswith("_seconds"), name


def test_nothing_registers_itself(told: MetricsPicture) -> None:
    before = {metric.name for metric in REGISTRY.collect()}
    assert render(told) == render(told)
    assert {metric.name for metric in REGISTRY.collect()} == before
    assert not any("laneway" in name for name in before)


def test_a_collector_tells_what_is_true_when_it_is_asked() -> None:
    rig = Rig()
    registry = CollectorRegistry()
    registry.register(MetricsCollector(rig.engine.metrics))
    name = "laneway:generation_tokens_total"
    labels = frozenset({("model_name", "m"), ("engine", "0"), ("generation", "1")})
    assert read(generate_latest(registry))[name, labels] == 0
    stream = rig.submit([1, 2, 3])
    rig.run()
    tokens = stream.result().usage.completion_tokens
    assert read(generate_latest(registry))[name, labels] == tokens > 0
    assert read(generate_latest(registry)) == read(render(rig.engine.metrics()))


def test_the_type_is_that_of_the_text_format() -> None:
    assert CONTENT_TYPE.startswith("text/plain; version=")
