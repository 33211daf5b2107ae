"""Every maximum of the engine, with its unit, in one frozen value; EngineStarted records it."""

import attrs

MS = 1_000_000
SECOND = 1_000_000_000
MIB = 1 << 20


def _at_least(minimum: int) -> object:
    return attrs.validators.and_(attrs.validators.instance_of(int), attrs.validators.ge(minimum))


def _limit(default: int, minimum: int = 1) -> int:
    return attrs.field(default=default, validator=_at_least(minimum))  # type: ignore[no-any-return,call-overload]


@attrs.frozen(kw_only=True)
class Limits:
    """Fixed maxima. Raises: TypeError or ValueError for a value that is not an integer in range.

    Source: R5.3 (in-flight), R7.2 and R14.1 (admission), E16 (hang rule), 9.2 rows 2, 3, 13, 19
    (retries), E22 (memory).
    """

    inflight_jobs_max: int = _limit(1)
    queued_requests_max: int = _limit(1024)
    queued_tokens_max: int = _limit(1 << 20)
    inbox_inputs_max: int = _limit(65536)
    step_batch_max: int = _limit(256)
    buffers_per_submodel: int = _limit(2)
    submit_retries_max: int = _limit(1, 0)
    submit_refusals_in_a_row_max: int = _limit(3)
    kv_retries_max: int = _limit(3, 0)
    backoff_first_ns: int = _limit(5 * MS)
    backoff_last_ns: int = _limit(200 * MS)
    backoff_tries_max: int = _limit(20)
    hang_suspect_ns: int = _limit(2 * SECOND)
    hang_confirm_ns: int = _limit(6 * SECOND)
    hang_cap_ns: int = _limit(60 * SECOND)
    unload_tolerance_bytes: int = _limit(64 * MIB, 0)
    configure_timeout_ns: int = _limit(120 * SECOND)
    retry_after_ns: int = _limit(1 * SECOND)
