"""Which capabilities of the simulated board its own conformance tests prove (G22).

The simulator without a persona carries a record for each of them, so that its features are on
without a file. With a persona, or with ``records=none`` in its URL, it carries none and is verified
like any board.
"""

from collections.abc import Mapping
from types import MappingProxyType

PROOFS: Mapping[str, str] = MappingProxyType(
    {
        "IN_FLIGHT": "test_two_jobs_are_taken_and_a_third_is_refused",
        "PING_PONG": "test_two_in_flight_equal_each_alone",
        "POLL_THREADSAFE": "test_states_seen_from_another_thread_never_go_back",
        "COUNTERS": "test_counters_equal_a_ledger_kept_by_hand",
        "CANCEL": "test_cancel_ends_a_queued_job_only",
        "BATCH_LANES": "test_a_batch_equals_each_lane_alone_and_inactive_rows_write_nothing",
        "LANE_RULE": "test_a_batch_equals_each_lane_alone_and_inactive_rows_write_nothing",
        "INCREMENTAL_PREFILL": "test_a_prompt_in_pieces_equals_the_whole",
        "LAYOUTS": "test_layouts_equal_each_other",
    }
)
"""Capability to the test of the simulated board that fails without it."""
