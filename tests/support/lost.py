"""The end state of a lost device, as every caller sees it (G7, E5, I1)."""

from support.rig import Rig

from laneway.engine import Request, RequestLostError, RequestRejectedError


def check_lost(rig: Rig, live: set[int]) -> None:
    """Hold a rig whose device is lost against the end state (G7, E5, I1)."""
    state = rig.state
    assert state.device.state == "lost"
    assert not state.jobs and not state.requests and not state.aliases
    assert {model.state for model in state.models.values()} == {"failed"}
    assert {lane.state for lane in state.lanes.values()} <= {"empty", "unknown"}
    assert {b.state for b in state.buffers.values()} <= {"free", "completing", "quarantined"}
    failed = [event.entities for event in rig.events("request", "fail")]
    assert sorted(number for entities in failed for number in entities) == sorted(live)
    health = rig.engine.health()
    assert (health.live, health.ready, health.device) == (True, False, "lost")
    assert health.reason and not rig.engine.ready()
    for one in rig.streams:
        result = one.stream.result()
        if one.stream.request in live:
            assert result.finish_reason == "error"
            assert isinstance(result.error, RequestLostError)
    rig.check_answers(ended_early=[one.stream for one in rig.streams])
    late = rig.engine.submit(Request(model="m", prompt=(1, 2)))
    rig.run()
    error = late.result().error
    assert isinstance(error, RequestRejectedError)
    assert (error.reason, error.http_status) == ("device_lost", 503)
