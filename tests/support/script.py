"""One small script of three requests on two lanes, stopped at each of its points in turn."""

from collections.abc import Iterator
from typing import Any

import attrs
from support.fake_device import FakeDevice, artifact
from support.rig import Rig

from laneway.engine.inputs import ArtifactValidated, Trial

PROMPTS = ([3, 1, 4], [1, 5], [9, 2, 6, 5])
TOKENS = 2


def small_artifact(model: int) -> ArtifactValidated:
    """Return an artifact with two lanes and one short trial."""
    trial = Trial(origin="golden", prompt=(1, 2), forced=())
    return attrs.evolve(artifact(model), lane_count=2, trials=(trial,))


def begin(**one: Any) -> Rig:
    """Return a rig with the script's requests handed in; ``one`` holds options of the second."""
    rig = Rig(device=FakeDevice(artifact=small_artifact))
    for number, prompt in enumerate(PROMPTS):
        rest = one if number == 1 else {}
        rig.submit(prompt, seed=number, max_tokens=TOKENS, ignore_eos=True, **rest)
    return rig


def points(stride: int = 1, **one: Any) -> Iterator[Rig]:
    """Yield the script stopped after 0, 1, 2, … actions, as many as it has."""
    whole = begin().run()
    assert whole > 50
    for count in range(0, whole + 1, stride):
        rig = begin(**one)
        assert rig.run_actions(count, seen=count - stride)
        rig.replays = count % 11 == 0
        yield rig


def finish_and_check(rig: Rig, *, ended: list[int]) -> None:
    """Run to the end; those that were ended may have fewer tokens, the others have all."""
    rig.run()
    rig.check_answers(ended_early=[rig.streams[number].stream for number in ended])
    rig.check_idle()
    rig.close()
