"""Fast scenarios in which a golden run among the jobs of requests has something to find.

Each is a detector as those of detectors.py.
"""

from support.canary_rig import bad, begin_examination, busy, differs, fill, planned, told_so_far

from laneway.engine.effects import Deliver, SubmitJob
from laneway.engine.inputs import Completed, Input


def canary_that_differs() -> None:
    """The device begins to compute wrongly with one job in flight: nothing of it is believed."""
    rig = busy(inflight=1)
    rig.device.on_result = bad(lambda asked: True)
    streams = fill(rig, 20)
    rig.run()
    assert rig.state.device.state == "lost", f"R14.5: the device is {rig.state.device.state}"
    marked = [stream.result().suspect_tokens_from for stream in streams if stream.result().tokens]
    assert marked and None not in marked[-4:], f"decision 15: marked from {marked}"
    rig.close()


def canary_that_overlapped() -> None:
    """One differs while jobs overlap, the golden alone does not: one in flight, then two again."""
    rig = begin_examination()
    fill(rig, 40, first=100)
    rig.run(until=lambda: bool(rig.events("device", "relax")))
    pairs = [event for event in rig.events("lane", "bind") if event.data.get("pair")]
    relaxed = len(rig.events("device", "relax"))
    assert relaxed == 1, "E11: it never had two in flight again"
    assert len(pairs) == 2, f"E11: two in flight after {len(pairs)} golden runs at once"
    rig.run()
    rig.check_answers()
    rig.check_idle()
    rig.close()


def tokens_decided_before() -> None:
    """A token waits to be told when a canary differs: it waits on until that is decided."""
    rig, held = busy(), list[Input]()

    def on_result(asked: SubmitJob, done: Completed) -> Input | None:
        if held or asked.origin != "canary" or asked.rows[0].start == 0:
            return done
        held.append(differs(asked, done))
        return None

    rig.device.on_result = on_result
    fill(rig, 14)
    rig.run(until=lambda: bool(held))
    rig.run(until=lambda: any(isinstance(e, Deliver) for e in rig.engine._outbox))
    rig.interrupt(held[0])
    counts = told_so_far(rig)
    rig.run(until=lambda: bool(rig.events("model", "acquit")))
    assert counts == told_so_far(rig), "E11: clients are told while it is not decided"
    rig.run()
    rig.check_answers()
    rig.close()


def canaries_under_load() -> None:
    """Canaries among many requests: each of their turns waits for one more at most."""
    rig = busy(inflight=1)
    fill(rig, 20)
    rig.run(until=lambda: len(planned(rig, "request")) >= 60)
    origins = [event.data["origin"] for event in planned(rig)][2:]
    assert "canary" in origins, "E25: no canary ran"
    pairs = list(zip(origins, origins[1:], strict=False))
    assert ("canary", "canary") not in pairs, "E25: a request waits for two turns of a canary"
    rig.run()
    rig.check_answers()
    rig.close()


CANARY_DETECTORS = (
    canary_that_differs,
    canary_that_overlapped,
    tokens_decided_before,
    canaries_under_load,
)
