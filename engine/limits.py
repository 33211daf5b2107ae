"""Every maximum of the engine, with its unit, in one frozen value; EngineStarted records it."""

from collections.abc import Iterable

import attrs

MS = 1_000_000
SECOND = 1_000_000_000
MIB = 1 << 20


def _at_least(minimum: int) -> object:
    return attrs.validators.and_(attrs.validators.instance_of(int), attrs.validators.ge(minimum))


def _limit(default: int, minimum: int = 1) -> int:
    return attrs.field(default=default, validator=_at_least(minimum))  # type: ignore[no-any-return,call-overload]


def _as_weights(pairs: Iterable[Iterable[str | int]]) -> tuple[tuple[str | int, ...], ...]:
    return tuple(tuple(pair) for pair in pairs)


def _check_weights(limits: object, field: object, pairs: tuple[tuple[str, int], ...]) -> None:
    for pair in pairs:
        match pair:
            case (str(), int(weight)) if not isinstance(weight, bool) and weight >= 1:
                continue
        raise ValueError(f"tenant_weights are (tenant, weight of at least 1), not {pair!r}")


@attrs.frozen(kw_only=True)
class Limits:
    """Fixed maxima. Raises: TypeError or ValueError for a value that is not an integer in range.

    A job has at most ``batch_rows_max`` rows, whatever its submodel takes.

    Prefill and decode: a prompt of more than ``long_prefill_threshold_tokens`` is long, and after
    ``short_turns_max`` short prefill jobs a long one that waits is next. Prompts go together into a
    job up to ``prefill_tokens_max``; a long one that may be split is, into parts of
    ``prefill_chunk_tokens``. Each decode job pays off ``prefill_tokens_per_decode`` of the prompt
    tokens run before it. ``tenant_weights`` are (tenant, weight), 1 where none is given; a step of
    priority is worth ``priority_step_tokens`` of service.

    Canaries: one is due after ``canary_jobs`` jobs of requests, or ``canary_idle_ns`` after the
    last one began if a request was served since; 0 turns each off. A device that fell to one job
    in flight gets its chance of two after ``requalify_canaries`` good ones (seven are some 32
    tokens), twice as many after each further fall, so without canaries it stays at one.
    ``missed_completions_max`` results in an hour may be found by a poll alone.

    Recovery: at most ``*_resets_max`` attempts on a rung in its window, 0 for none; before a
    further reset of the device a pause of ``device_reset_pause_ns``, doubled each time. What is in
    flight is waited for ``drain_timeout_ns`` before a reset; for a hung job that the device was
    asked to end, ``recall_wait_ns``. A second exception within
    ``exceptions_window_ns`` is not contained any more. A device that is unwell is given
    ``unhealthy_grace_ns``; under load it is asked for its health every ``health_every_ns``. What
    failed a device twice is refused for ``poison_window_ns``.

    Source: R5.3 (in-flight), R6.3 (rows), R5.4, R5.5 and E13 (queues), R7.2 and R14.1 (admission),
    E16 (hang rule), 9.2 rows 2, 3, 13, 17, 19 (retries), E22 (memory), E9 (memory kept for
    good, per process), 9.3 (budgets, drain, pauses), E25 and E11 (canaries), row 10 (missed
    completions).
    """

    inflight_jobs_max: int = _limit(2)
    batch_rows_max: int = _limit(64)
    long_prefill_threshold_tokens: int = _limit(512)
    short_turns_max: int = _limit(3)
    prefill_tokens_max: int = _limit(2048)
    prefill_chunk_tokens: int = _limit(512)
    prefill_tokens_per_decode: int = _limit(512)
    priority_step_tokens: int = _limit(4096)
    tenant_weights: tuple[tuple[str, int], ...] = attrs.field(
        default=(), converter=_as_weights, validator=_check_weights
    )
    queued_requests_max: int = _limit(1024)
    queued_tokens_max: int = _limit(1 << 20)
    inbox_inputs_max: int = _limit(65536)
    step_batch_max: int = _limit(256)
    buffers_per_submodel: int = _limit(3)
    submit_retries_max: int = _limit(1, 0)
    submit_refusals_in_a_row_max: int = _limit(3)
    kv_retries_max: int = _limit(2, 0)
    backoff_first_ns: int = _limit(5 * MS)
    backoff_last_ns: int = _limit(200 * MS)
    backoff_tries_max: int = _limit(20)
    hang_suspect_ns: int = _limit(2 * SECOND)
    hang_confirm_ns: int = _limit(6 * SECOND)
    hang_cap_ns: int = _limit(60 * SECOND)
    unload_tolerance_bytes: int = _limit(64 * MIB, 0)
    configure_timeout_ns: int = _limit(120 * SECOND)
    retry_after_ns: int = _limit(1 * SECOND)
    unload_reread_ns: int = _limit(5 * SECOND)
    configure_retries_max: int = _limit(1, 0)
    buried_items_max: int = _limit(64)
    buried_bytes_max: int = _limit(256 * MIB)
    ccu_resets_max: int = _limit(2, 0)
    ccu_resets_window_ns: int = _limit(600 * SECOND)
    configuration_resets_max: int = _limit(2, 0)
    configuration_resets_window_ns: int = _limit(1800 * SECOND)
    device_resets_max: int = _limit(3, 0)
    device_resets_window_ns: int = _limit(3600 * SECOND)
    device_reset_pause_ns: int = _limit(60 * SECOND)
    process_restarts_max: int = _limit(3, 0)
    process_restarts_window_ns: int = _limit(3600 * SECOND)
    reset_timeout_ns: int = _limit(60 * SECOND)
    recall_wait_ns: int = _limit(2 * SECOND)
    drain_timeout_ns: int = _limit(30 * SECOND)
    exceptions_window_ns: int = _limit(600 * SECOND)
    unhealthy_grace_ns: int = _limit(30 * SECOND)
    health_every_ns: int = _limit(10 * SECOND)
    poison_window_ns: int = _limit(3600 * SECOND)
    canary_jobs: int = _limit(1000, 0)
    canary_idle_ns: int = _limit(600 * SECOND, 0)
    requalify_canaries: int = _limit(7)
    missed_completions_max: int = _limit(2, 0)
