"""Many requests at once: right tokens, fair turns, nothing kept (I7, I9, R5.4, R6.2, G9)."""

import pytest
from support.fake_device import CONTEXT, LANES, FakeDevice, answer
from support.rig import Rig

from laneway.engine import Limits

PROMPTS = [[(7 * i + j) % 63 + 1 for j in range(1 + i % 9)] for i in range(24)]


def test_answers_do_not_depend_on_the_neighbours() -> None:
    rig = Rig()
    for number, prompt in enumerate(PROMPTS):
        rig.submit(prompt, seed=number % 5, max_tokens=1 + number % 7)
    rig.run()
    rig.check_answers()
    rig.check_idle()
    rig.close()


@pytest.mark.parametrize("prompt_tokens", [1, 2, 17, CONTEXT - 2, CONTEXT - 1])
def test_the_whole_context_can_be_used(prompt_tokens: int) -> None:
    rig = Rig()
    prompt = [(3 * i) % 63 + 1 for i in range(prompt_tokens)]
    rig.submit(prompt, seed=3, max_tokens=CONTEXT - prompt_tokens, ignore_eos=True)
    rig.run()
    rig.check_answers()
    rig.close()


def test_cancels_deadlines_and_refusals_around_leave_the_others_alone() -> None:
    rig = Rig()
    kept = []
    gone = []
    for number, prompt in enumerate(PROMPTS):
        if number % 4 == 1:
            gone.append(rig.submit(prompt, seed=1, max_tokens=9))
        elif number % 4 == 2:
            gone.append(rig.submit(prompt, seed=2, max_tokens=9, deadline_s=number * 4e-6))
        else:
            kept.append(rig.submit(prompt, seed=3, max_tokens=5))
        if number % 4 == 3:
            gone.append(rig.submit([999], seed=4))
            rig.device.submits.extend([0, 0x0601, 0])
        rig.run_actions(17)
        if number % 4 == 1 and number % 8 == 1:
            gone[-1].cancel()
    rig.run()
    endings = {stream.result().finish_reason for stream in gone}
    assert {"cancelled", "deadline", "error"} <= endings
    assert len(kept) == 12
    rig.check_answers(ended_early=gone)
    rig.check_idle()
    rig.close()


def test_waiting_requests_are_served_in_order_of_arrival() -> None:
    rig = Rig()
    for prompt in PROMPTS:
        rig.submit(prompt, max_tokens=3)
    rig.run()
    prefilled = [event.entities[0] for event in rig.events("request", "prefill")]
    assert prefilled == sorted(prefilled) and len(prefilled) == len(PROMPTS)
    rig.close()


def tasks(rig: Rig) -> list[str]:
    """Return the tasks of the client jobs in order."""
    return [job.task for job in rig.device.submitted if job.origin == "request"]


def longest_run(of: list[str], task: str) -> int:
    """Return the length of the longest run of a task."""
    return max(len(run) for run in "".join(t[0] for t in of).split("pd"[task == "prefill"]))


def test_prefill_and_decode_take_turns_while_both_have_work() -> None:
    rig = Rig()
    for number in range(LANES):
        rig.submit([number + 1, 5], seed=1, max_tokens=20, ignore_eos=True)
    rig.run(until=lambda: len(rig.events("request", "prefill")) == LANES)
    both = tasks(rig)
    first_decode = both.index("decode")
    last_prefill = len(both) - 1 - both[::-1].index("prefill")
    between = both[first_decode:last_prefill]
    assert longest_run(between, "prefill") == 1 and longest_run(between, "decode") == 1
    rig.run()
    rig.close()


def test_decode_is_round_robin() -> None:
    rig = Rig()
    for number in range(LANES):
        rig.submit([number + 1, 5], seed=1, max_tokens=20, ignore_eos=True)
    rig.run(until=lambda: len(rig.events("request", "decode")) == LANES)
    begin = len(rig.device.submitted)
    rig.run(until=lambda: len(rig.device.submitted) == begin + 3 * LANES)
    owners = [job.rows[0].owner for job in rig.device.submitted[begin:]]
    for start in range(0, len(owners) - LANES):
        assert len(set(owners[start : start + LANES])) == LANES, owners
    rig.run()
    rig.close()


def test_eight_lanes_live_at_once() -> None:
    rig = Rig()
    for number in range(LANES + 3):
        rig.submit([number + 1], seed=9, max_tokens=30, ignore_eos=True)
    most = 0

    def look() -> bool:
        nonlocal most
        held = [lane for lane in rig.state.lanes.values() if lane.owner is not None]
        most = max(most, len(held))
        return False

    rig.run(until=look)
    assert most == LANES == 8
    rig.close()


def test_what_can_never_fit_does_not_block_the_queue() -> None:
    rig = Rig()
    for _ in range(LANES):
        rig.submit([1, 2], max_tokens=6)
    never = rig.submit([1] * 40, max_tokens=CONTEXT)
    after = rig.submit([4, 4], seed=2, max_tokens=3)
    rig.run()
    error = never.result().error
    assert error is not None and "shorten" in str(error)
    assert list(after.result().tokens) == answer([4, 4], seed=2, max_tokens=3)
    rig.check_answers(ended_early=[never])
    rig.close()


def test_end_token_ends_and_is_not_part_of_the_answer() -> None:
    rig = Rig()
    seed = next(s for s in range(4000) if 0 < len(answer([5], seed=s, max_tokens=8)) < 8)
    expected = answer([5], seed=seed, max_tokens=8)
    stopped = rig.submit([5], seed=seed, max_tokens=8)
    rig.run()
    result = stopped.result()
    assert (list(result.tokens), result.finish_reason) == (expected, "stop")
    assert 0 not in result.tokens
    rig.check_idle()
    rig.close()


def test_end_token_as_first_token() -> None:
    rig = Rig()
    seed = next(s for s in range(4000) if not answer([5], seed=s, max_tokens=8))
    stopped = rig.submit([5], seed=seed, max_tokens=8)
    rig.run()
    assert (stopped.result().tokens, stopped.result().finish_reason) == ((), "stop")
    rig.check_idle()
    rig.close()


def test_client_ids_are_no_keys() -> None:
    rig = Rig()
    for seed in range(3):
        rig.submit([6, 6], seed=seed, client_id="same")
    rig.run()
    rig.check_answers()
    assert {one.stream.client_id for one in rig.streams} == {"same"}
    rig.close()


def test_a_policy_of_two_in_flight_stays_at_one_without_a_record() -> None:
    rig = Rig(device=FakeDevice(inflight_max=2), limits=Limits(inflight_jobs_max=2))
    for number in range(6):
        rig.submit([number + 1], max_tokens=4)
    rig.run()
    rig.check_answers()
    rig.close()
