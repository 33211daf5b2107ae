"""Memory that is kept for good has a budget, and exceeding it ends the device (E9)."""

import pytest
from support.lost import check_lost
from support.rig import Rig
from support.script import points

from laneway.engine import Limits, ModelError
from laneway.engine.inputs import MemoryBuried


@pytest.mark.parametrize(
    ("items", "byte_count", "lost"),
    [(64, 1, False), (65, 1, True), (1, 256 << 20, False), (1, (256 << 20) + 1, True)],
)
def test_the_budget_is_64_items_and_256_mib(items: int, byte_count: int, lost: bool) -> None:
    rig = Rig()
    rig.post(MemoryBuried(item_count=items, byte_count=byte_count))
    rig.run()
    assert (rig.state.device.state == "lost") is lost
    assert ("restart the process" in rig.engine.health().reason) is lost
    rig.close()
    assert rig.device.closes == [lost]


def test_exceeding_it_at_every_point_is_one_true_end() -> None:
    for rig in points(stride=5):
        rig.interrupt(MemoryBuried(item_count=65, byte_count=0))
        live = {event.entities[0] for event in rig.events("request", "fail")}
        rig.run()
        check_lost(rig, live)
        assert "a process may keep 64" in rig.engine.health().reason
        rig.close()


def test_a_load_in_a_process_over_its_budget_is_refused_with_what_to_do() -> None:
    rig = Rig(load=False, limits=Limits(buried_items_max=2))
    rig.post(MemoryBuried(item_count=3, byte_count=0))
    with pytest.raises(ModelError, match="restart the process"):
        rig.engine.load("m", "source")
    rig.close()
