"""What the measured numbers are called, and how each is read.

Names are those that users of LLM servers know, with the prefix ``laneway:``. Series of a model
carry ``model_name``, ``engine`` and ``generation``; the versions stand on ``build_info`` alone and
are joined by generation (G20). Gauges of a model are there while it holds lanes and buffers; its
counters stay.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import attrs

from laneway.engine.distribution import SECOND_NS
from laneway.engine.measured import FINISHED_REASONS, TASKS, MeasuredModel
from laneway.engine.metrics import Metrics
from laneway.engine.picture import PREFIX, Family, MetricsPicture, Series, Value
from laneway.engine.recoveries import BREAKER
from laneway.statemachines import MACHINES

ENGINE_LABEL = "0"
"""One engine drives one device; a second one would have another journal."""

_MODEL_LABELS = ("model_name", "engine", "generation")
_RUNNING = ("prefilling", "decoding")
_WAITING = ("waiting", "suspended")
_SUBMITTING = ("serving", "degraded", "draining")


@attrs.frozen
class _Spec:
    """A name and how its series are read; of each model, or of the engine as a whole."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    read: Callable[..., Iterable[Series]]
    of_gone: bool = False
    """Whether a gauge is shown for models that are gone too."""


def picture(metrics: Metrics, *, failures: int = 0) -> MetricsPicture:
    """Return every family; ``failures`` are steps that could not be measured."""
    families = [_of_models(spec, metrics) for spec in OF_A_MODEL]
    families += [
        Family(
            name=PREFIX + spec.name,
            kind=spec.kind,
            help=spec.help,
            labels=("engine", *spec.labels),
            series=tuple(((ENGINE_LABEL, *labels), value) for labels, value in spec.read(metrics)),
        )
        for spec in OF_THE_ENGINE
    ]
    failed = ((ENGINE_LABEL,), failures)
    families.append(
        Family(
            name=PREFIX + "metrics_failures_total",
            kind="counter",
            help="Steps that could not be measured: the other numbers may be off.",
            labels=("engine",),
            series=(failed,),
        )
    )
    return MetricsPicture(tuple(families))


def _of_models(spec: _Spec, metrics: Metrics) -> Family:
    shown: list[Series] = []
    for model in metrics.models.values():
        if not model.generation or not (model.resident or spec.kind != "gauge" or spec.of_gone):
            continue
        labels = (model.alias, ENGINE_LABEL, str(model.generation))
        read = spec.read(model, metrics)
        shown += [((*labels, *values), value) for values, value in read]
    return Family(
        name=PREFIX + spec.name,
        kind=spec.kind,
        help=spec.help,
        labels=(*_MODEL_LABELS, *spec.labels),
        series=tuple(shown),
    )


# ---------------------------------------------------------------------------- how each is read


def _one(read: Callable[[MeasuredModel], Value]) -> Callable[..., Iterable[Series]]:
    return lambda model, _: [((), read(model))]


def _by_state(machine: str, field: str) -> Callable[..., Iterable[Series]]:
    states = tuple(MACHINES[machine].states)
    return lambda model, _: [((state,), getattr(model, field)[state]) for state in states]


def _latency(field: str) -> Callable[..., Iterable[Series]]:
    return lambda model, _: [((name,), told) for name, told in getattr(model, field).freeze()]


def _by_task(field: str) -> Callable[..., Iterable[Series]]:
    return lambda model, _: [
        ((task, name), told)
        for task in TASKS
        for name, told in getattr(model, field)[task].freeze()
    ]


def _count(counts: Mapping[str, int], states: Iterable[str]) -> int:
    return sum(counts[state] for state in states)


def _waiting_by_reason(model: MeasuredModel, metrics: Metrics) -> Iterable[Series]:
    """Say what the waiting wait for; the first in the queue get the empty lanes first.

    ``device``: nothing is submitted now. ``lane``: every lane is taken or promised to a request
    before it. ``capacity``: a lane is there, the device has no room or it is not its turn.
    """
    waiting = _count(model.requests, _WAITING)
    stopped = metrics.device_state not in _SUBMITTING
    with_lane = 0 if stopped else min(waiting, model.lanes["empty"])
    return [
        (("capacity",), with_lane),
        (("lane",), 0 if stopped else waiting - with_lane),
        (("device",), waiting if stopped else 0),
    ]


def _kv_usage(model: MeasuredModel) -> float:
    lanes = len(model.lane_numbers)
    return (lanes - model.lanes["empty"]) / lanes if lanes else 0.0


def _cache_config(model: MeasuredModel, _: Metrics) -> Iterable[Series]:
    tokens = model.facts.context_tokens if model.facts is not None else 0
    return [((str(tokens), str(len(model.lane_numbers))), 1)]


def _build(model: MeasuredModel, _: Metrics) -> Iterable[Series]:
    device = model.device
    if device is None or model.facts is None:
        return []
    versions = (device.runtime_version, device.driver_version, device.firmware_version)
    return [((model.facts.sha256, *versions, model.code_version), 1)]


def _memory(model: MeasuredModel, _: Metrics) -> Iterable[Series]:
    return [((str(model.number), str(chip)), held) for chip, held in enumerate(model.memory_bytes)]


def _stages(model: MeasuredModel, _: Metrics) -> Iterable[Series]:
    for submodel in model.submodels:
        for stage, histogram in submodel.stages.items():
            if histogram.seen:
                yield (stage, submodel.facts.task, submodel.facts.name), histogram.freeze()


def _fill(model: MeasuredModel, _: Metrics) -> Iterable[Series]:
    for submodel in model.submodels:
        yield (submodel.facts.task, submodel.facts.name), submodel.fill.freeze()


def _counts_of(field: str) -> Callable[..., Iterable[Series]]:
    return lambda metrics: [
        ((name,), count) for name, count in sorted(getattr(metrics, field).items())
    ]


def _last_reset(metrics: Metrics) -> Iterable[Series]:
    at_ns = metrics.recoveries.last_reset_ns
    return [] if at_ns is None else [((), at_ns / SECOND_NS)]


# ---------------------------------------------------------------------------- the names

OF_A_MODEL: tuple[_Spec, ...] = (
    _Spec(
        "num_requests_running",
        "gauge",
        "Requests that own a lane.",
        (),
        _one(lambda model: _count(model.requests, _RUNNING)),
    ),
    _Spec(
        "num_requests_waiting",
        "gauge",
        "Admitted requests that own no lane yet.",
        (),
        _one(lambda model: _count(model.requests, _WAITING)),
    ),
    _Spec(
        "num_requests_waiting_by_reason",
        "gauge",
        "The waiting by what they wait for: capacity, lane, device.",
        ("reason",),
        _waiting_by_reason,
    ),
    _Spec(
        "kv_cache_usage_perc",
        "gauge",
        "Share of lanes that are not empty, 0 to 1; unknown ones count as used.",
        (),
        _one(_kv_usage),
    ),
    _Spec(
        "cache_config_info",
        "gauge",
        "KV of the model: tokens of a lane and how many lanes; always 1.",
        ("block_size", "num_gpu_blocks"),
        _cache_config,
    ),
    _Spec("kv_slots", "gauge", "Lanes by state.", ("state",), _by_state("lane", "lanes")),
    _Spec(
        "buffer_pool_items",
        "gauge",
        "Buffers by state.",
        ("state",),
        _by_state("buffer", "buffers"),
    ),
    _Spec(
        "submit_queue_depth",
        "gauge",
        "Jobs handed over that the device has not answered yet.",
        (),
        _one(lambda model: model.jobs["planned"]),
    ),
    _Spec(
        "jobs_inflight",
        "gauge",
        "Jobs that the device has, or may have.",
        (),
        _one(lambda model: _count(model.jobs, ("submitted", "uncertain"))),
    ),
    _Spec(
        "lanes_active",
        "gauge",
        "Lanes that take part in jobs which are not terminal.",
        (),
        _one(lambda model: model.active_lanes),
    ),
    _Spec(
        "model_memory_bytes",
        "gauge",
        "What the device's used memory grew by when the model was configured.",
        ("model", "chip"),
        _memory,
    ),
    _Spec(
        "build_info",
        "gauge",
        "Versions of a generation, to join with its series by generation; always 1.",
        ("model_hash", "runtime_version", "driver_version", "firmware_version", "version"),
        _build,
        of_gone=True,
    ),
    _Spec(
        "prompt_tokens_total",
        "counter",
        "Prompt tokens of completed prefills.",
        (),
        _one(lambda model: model.prompt_tokens),
    ),
    _Spec(
        "generation_tokens_total",
        "counter",
        "Tokens that became part of an answer.",
        (),
        _one(lambda model: model.generation_tokens),
    ),
    _Spec(
        "request_success_total",
        "counter",
        "Admitted requests that ended, by reason: stop, length, abort, error, deadline.",
        ("finished_reason",),
        lambda model, _: [((reason,), model.finished[reason]) for reason in FINISHED_REASONS],
    ),
    _Spec(
        "corrupted_requests_total",
        "counter",
        "Requests that abnormal numbers of the device ended.",
        (),
        _one(lambda model: model.corrupted),
    ),
    _Spec(
        "time_to_first_token_seconds",
        "histogram",
        "From admission to the first token.",
        ("bucket",),
        _latency("time_to_first_token"),
    ),
    _Spec(
        "inter_token_latency_seconds",
        "histogram",
        "From one token of a request to its next.",
        ("bucket",),
        _latency("inter_token"),
    ),
    _Spec(
        "request_time_per_output_token_seconds",
        "histogram",
        "Mean time from token to token of each ended request with two tokens or more.",
        ("bucket",),
        _latency("time_per_output_token"),
    ),
    _Spec(
        "e2e_request_latency_seconds",
        "histogram",
        "From admission to the ending, whatever that is.",
        ("bucket",),
        _latency("end_to_end"),
    ),
    _Spec(
        "request_queue_time_seconds",
        "histogram",
        "Time without a lane: from admission to the first job, or to the ending.",
        ("bucket",),
        _latency("queued"),
    ),
    _Spec(
        "request_prefill_time_seconds",
        "histogram",
        "From the first job to the first token.",
        ("bucket",),
        _latency("prefill"),
    ),
    _Spec(
        "request_decode_time_seconds",
        "histogram",
        "From the first token to the last, of ended requests that got one.",
        ("bucket",),
        _latency("decode"),
    ),
    _Spec(
        "request_inference_time_seconds",
        "histogram",
        "From the first job to the last token, of ended requests that got one.",
        ("bucket",),
        _latency("inference"),
    ),
    _Spec(
        "turn_wait_seconds",
        "histogram",
        "How long a sequence without a job waited for its next one.",
        ("task", "bucket"),
        _by_task("turns"),
    ),
    _Spec(
        "job_seconds",
        "histogram",
        "From planning a job to its result, for each of its sequences that lives.",
        ("task", "bucket"),
        _by_task("runs"),
    ),
    _Spec(
        "job_stage_seconds",
        "histogram",
        "Stages of completed jobs of requests: queue, h2d, infer, d2h as the device tells them;"
        " postprocess (sampling included) on the host.",
        ("stage", "task", "submodel"),
        _stages,
    ),
    _Spec(
        "batch_fill_ratio",
        "histogram",
        "Rows of a completed job of requests, as a share of what its submodel takes.",
        ("task", "submodel"),
        _fill,
    ),
)

OF_THE_ENGINE: tuple[_Spec, ...] = (
    _Spec(
        "admission_rejections_total",
        "counter",
        "Requests refused by admission, by reason; inbox_full counts every refused call.",
        ("reason",),
        _counts_of("rejections"),
    ),
    _Spec(
        "device_exceptions_total",
        "counter",
        "Faults of the device by kind, as reported; hang when it was confirmed.",
        ("kind",),
        _counts_of("exceptions"),
    ),
    _Spec(
        "stale_completions_total",
        "counter",
        "Answers for a job that changed nothing of it: not_in_flight, epoch, generation, ticket.",
        ("reason",),
        _counts_of("stale"),
    ),
    _Spec(
        "canary_runs_total",
        "counter",
        "Golden runs among the jobs of requests that ended with a verdict: equal, different.",
        ("result",),
        _counts_of("canaries"),
    ),
    _Spec(
        "inflight_restricted",
        "gauge",
        "1 while an anomaly leaves the device one job in flight, else 0.",
        (),
        lambda metrics: [((), int(metrics.restricted))],
    ),
    _Spec(
        "engine_slot_busy_seconds_total",
        "counter",
        "Time of each command bank with a job of requests, as the device tells it.",
        ("slot",),
        lambda metrics: [
            ((slot,), busy_ns / SECOND_NS)
            for slot, busy_ns in sorted(metrics.occupancy.slots.items())
        ],
    ),
    _Spec(
        "device_busy_seconds_total",
        "counter",
        "Time with one job of requests or two.",
        (),
        lambda metrics: [((), metrics.occupancy.busy_ns / SECOND_NS)],
    ),
    _Spec(
        "device_overlap_seconds_total",
        "counter",
        "Time with two jobs of requests at once.",
        (),
        lambda metrics: [((), metrics.occupancy.overlap_ns / SECOND_NS)],
    ),
    _Spec(
        "device_idle_seconds",
        "histogram",
        "Pauses of the device between two jobs while requests lived.",
        (),
        lambda metrics: [((), metrics.occupancy.pauses.freeze())],
    ),
    _Spec(
        "engine_slot_busy_ratio",
        "gauge",
        "Share of each command bank's busy time in all time with work so far, pauses included.",
        ("slot",),
        lambda metrics: [
            ((slot,), metrics.occupancy.share(slot)) for slot in sorted(metrics.occupancy.slots)
        ],
    ),
    _Spec(
        "overlap_ratio",
        "gauge",
        "Share of the busy time so far in which two jobs ran at once.",
        (),
        lambda metrics: [((), metrics.occupancy.overlap_share)],
    ),
    _Spec(
        "device_jobs",
        "gauge",
        "Job counters of the device as it last told them: compared, at a fault or a probe.",
        ("counter",),
        _counts_of("device_jobs"),
    ),
    _Spec(
        "device_resets_total",
        "counter",
        "Resets by level, row of the ladder and result: verified, failed, V1 to V5, proof,"
        " cut_off.",
        ("level", "row", "result"),
        lambda metrics: sorted(metrics.recoveries.resets.items()),
    ),
    _Spec(
        "recovery_rungs_total",
        "counter",
        "How often each rung of the ladder was chosen.",
        ("rung",),
        lambda metrics: [
            ((rung,), count) for rung, count in sorted(metrics.recoveries.rungs.items())
        ],
    ),
    _Spec(
        "requests_suspended_total",
        "counter",
        "Requests taken off the device: suspect, innocent, or abandoned with their process.",
        ("taken_for",),
        lambda metrics: [
            ((how,), count) for how, count in sorted(metrics.recoveries.waits.items())
        ],
    ),
    _Spec(
        "requests_resumed_total",
        "counter",
        "Requests that went on from their own tokens.",
        (),
        lambda metrics: [((), metrics.recoveries.resumed)],
    ),
    _Spec(
        "device_recovery_seconds",
        "histogram",
        "From the first time that the device was given no more work until it served again.",
        (),
        lambda metrics: [((), metrics.recoveries.took.freeze())],
    ),
    _Spec(
        "device_breaker",
        "gauge",
        "1 for the state that the breaker is in: closed, half_open, open.",
        ("state",),
        lambda metrics: [((state,), int(state == metrics.recoveries.breaker)) for state in BREAKER],
    ),
    _Spec(
        "device_last_reset_timestamp",
        "gauge",
        "Engine time in seconds at which the latest reset was asked for.",
        (),
        _last_reset,
    ),
)

NAMES = MappingProxyType(
    {PREFIX + spec.name: spec.kind for spec in (*OF_A_MODEL, *OF_THE_ENGINE)}
    | {PREFIX + "metrics_failures_total": "counter"}
)
"""Every name that exists, and its kind."""
