"""A device throttled by its heat: less is admitted, its jobs are given more time (row 25)."""

import pytest
from support.rig import Rig

from laneway.engine import Limits, Request, RequestRejectedError
from laneway.engine.inputs import ThrottleTold
from laneway.engine.limits import SECOND


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (
            Limits(queued_requests_max=4),
            ("2 requests wait, at most 2", "4 requests wait, at most 4"),
        ),
        (Limits(queued_tokens_max=8), ("4 prompt tokens wait, at most 4", "8 prompt tokens")),
    ],
)
def test_half_of_the_queue_is_filled_and_the_rest_come_again_later(
    limits: Limits, words: tuple[str, str]
) -> None:
    """One runs, prompts of two tokens wait: two of four while it is hot, four when it is cool."""
    rig = Rig(limits=limits)
    rig.device.holding = True
    rig.submit([1, 2])
    rig.run()
    for chips, fits, text, later_s in (((0,), 2, words[0], 2.0), ((), 2, words[1], 1.0)):
        rig.post(ThrottleTold(chips=chips))
        rig.run()
        streams = [
            rig.engine.submit(Request(model="m", prompt=(3, 4), max_tokens=4))
            for _ in range(fits + 1)
        ]
        rig.run()
        error = streams[-1].result().error
        assert isinstance(error, RequestRejectedError)
        assert (error.http_status, error.retry_after_s) == (429, later_s) and text in str(error)
    assert rig.state.waiting_requests == 4
    rig.device.holding = False
    rig.run()
    rig.check_idle()
    rig.close()


def test_hangs_are_suspected_later_while_it_is_hot_and_not_any_more_when_it_is_cool() -> None:
    rig = Rig()
    for chips, factor in (((), 1), ((0, 1), 2), ((), 1)):
        rig.post(ThrottleTold(chips=chips))
        rig.run()
        rig.submit([1, 2], max_tokens=2)
        rig.run()
        job = rig.device.submitted[-1]
        told = (job.suspect_after_ns, job.confirm_after_ns, job.cap_after_ns)
        assert told == (2 * factor * SECOND, 6 * factor * SECOND, 60 * factor * SECOND)
    rig.check_answers()
    rig.close()


def test_nothing_is_reset_and_nobody_ends_for_it() -> None:
    rig = Rig(resets=True)
    rig.submit([1, 2], max_tokens=8, ignore_eos=True)
    rig.run_actions(8)
    rig.post(ThrottleTold(chips=(0,)))
    rig.run()
    assert rig.state.device.throttled == (0,) and rig.state.device.state == "serving"
    assert not rig.events("device", "suspect", "escalate")
    rig.check_answers()
    rig.close()


def test_a_new_life_knows_nothing_of_the_heat_before() -> None:
    rig = Rig()
    rig.post(ThrottleTold(chips=(0,)))
    rig.run()
    rig.close()
    later = Rig(steps=rig.steps)
    assert later.state.device.throttled == ()
    later.close()
