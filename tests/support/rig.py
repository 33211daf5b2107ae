"""An engine over a FakeDevice and a ListJournal, with every invariant checked at every step."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
from support.fake_device import FakeDevice, answer
from support.memory_steps import ListJournal

from laneway.engine import Engine, Limits, Request, Result, Sampling, Stream
from laneway.engine.decide import decide
from laneway.engine.effects import CloseDevice
from laneway.engine.evolve import fold
from laneway.engine.inputs import (
    CloseRequested,
    Input,
    LoadRequested,
    ReplaceRequested,
    UnloadRequested,
)
from laneway.engine.invariants import check
from laneway.engine.ports import Step
from laneway.engine.state import State, freeze, initial_state
from laneway.engine.watch import Watch
from laneway.statemachines import Event

ACTIONS_MAX = 20_000


@attrs.frozen
class Submitted:
    """A stream, and what its request asked for."""

    stream: Stream
    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    ignore_eos: bool

    def expected(self) -> list[int]:
        """Return the tokens of a run alone."""
        return answer(
            self.prompt, seed=self.seed, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos
        )


def without_resets(limits: Limits | None = None) -> Limits:
    """Return limits under which no reset and no restart is left in the budget."""
    return attrs.evolve(
        limits if limits is not None else Limits(),
        ccu_resets_max=0,
        configuration_resets_max=0,
        device_resets_max=0,
        process_restarts_max=0,
    )


class Rig:
    """Drives one engine, one action at a time.

    The model ``m`` is loaded unless ``load`` is False. ``replays``: hold the journal against replay
    at the close. Without ``resets`` no reset is left in the budget, so that what is to be reset is
    lost at once.
    ``canaries``: let them run as the limits say; otherwise there are none, so that a story has the
    jobs it asks for.
    """

    def __init__(
        self,
        *,
        steps: Sequence[Step] = (),
        device: FakeDevice | None = None,
        limits: Limits | None = None,
        load: bool = True,
        resets: bool = False,
        wall_ns: int = 1_000,
        canaries: bool = False,
        resume: bool = False,
    ) -> None:
        if not canaries:
            limits = without_canaries(limits)
        self.device = device if device is not None else FakeDevice()
        self.journal = ListJournal(steps)
        self.watch = Watch()
        for step in steps:
            self.watch.take(step)
        self.wall_ns = wall_ns
        self.journal.watch = self._watch_first
        self.engine = Engine(
            device=self.device,
            journal=self.journal,
            limits=limits if resets else without_resets(limits),
            threads=False,
            wall_clock=lambda: self.wall_ns,
            draw_seed=lambda: 77,
            resume=resume,
        )
        self.journal.watch = self._watch
        check(self.state)
        self.streams: list[Submitted] = []
        self.replays = True
        self.checks = True
        if load:
            self.engine.load("m", "source")

    # ------------------------------------------------------------------ looking

    @property
    def state(self) -> State:
        """The engine's state, to look at."""
        return self.engine._state

    @property
    def steps(self) -> list[Step]:
        """The durable steps."""
        return self.journal.steps

    def events(self, machine: str, *triggers: str) -> list[Event]:
        """Return the events of a machine so far, of the given triggers if any are given."""
        return [
            event
            for step in self.steps
            for event in step.events
            if event.machine == machine and (not triggers or event.trigger in triggers)
        ]

    def events_of_all(self) -> list[Event]:
        """Return all events so far."""
        return [event for step in self.steps for event in step.events]

    # ------------------------------------------------------------------ doing

    def submit(
        self, prompt: Sequence[int], *, seed: int = 0, max_tokens: int = 4, **rest: Any
    ) -> Stream:
        """Hand in a request that ``check_answers`` holds against the reference."""
        stream = self.engine.submit(
            Request(
                model=rest.pop("model", "m"),
                prompt=tuple(prompt),
                max_tokens=max_tokens,
                sampling=Sampling(seed=seed),
                **rest,
            )
        )
        ignore_eos = bool(rest.get("ignore_eos"))
        self.streams.append(Submitted(stream, tuple(prompt), seed, max_tokens, ignore_eos))
        return stream

    def post(self, taken: Input) -> None:
        """Let the device say something."""
        self.device.post(taken)

    def interrupt(self, taken: Input) -> None:
        """Let the engine take an input now, before those that wait."""
        self.engine._inbox._queue.appendleft(taken)
        assert self.act()

    def ask(self, make: Callable[[], Input]) -> None:
        """Let a caller say something without waiting for what follows."""
        self.engine._inbox.ask(make)

    def ask_load(self, alias: str = "m") -> int:
        """Ask for a load without waiting for it; return the model's number."""
        number = self.engine._next_model

        def make() -> Input:
            self.engine._next_model += 1
            return LoadRequested(model=number, alias=alias, source="source")

        self.ask(make)
        return number

    def ask_replace(self, alias: str = "m") -> int:
        """Ask for a replacement without waiting for it; return the new model's number."""
        number = self.engine._next_model

        def make() -> Input:
            self.engine._next_model += 1
            return ReplaceRequested(model=number, alias=alias, source="newer")

        self.ask(make)
        return number

    def ask_unload(self, number: int) -> None:
        """Ask for an unload without waiting for it."""
        self.ask(lambda: UnloadRequested(model=number))

    def ask_close(self, *, drain: bool) -> None:
        """Ask for the end without waiting for it."""
        self.ask(lambda: CloseRequested(drain=drain))

    def act(self) -> bool:
        """Do one thing, or let time pass; return False when nothing is left."""
        return self.engine.advance()

    def run(self, *, until: Callable[[], bool] = lambda: False) -> int:
        """Act until nothing is left or ``until`` holds; return the number of actions."""
        for count in range(ACTIONS_MAX):
            if until() or not self.act():
                return count
        raise AssertionError(f"the engine is still busy after {ACTIONS_MAX} actions")

    def run_actions(self, count: int, *, seen: int = 0) -> bool:
        """Act ``count`` times; return False when there was less to do.

        The first ``seen`` were checked in an earlier rig of the same script, and are not again.
        """
        seen = max(0, min(seen, count))
        self.checks = False
        begun = all(self.act() for _ in range(seen))
        self.checks = True
        return begun and all(self.act() for _ in range(count - seen))

    # ------------------------------------------------------------------ the end

    def check_idle(self) -> None:
        """Hold an idle engine against: nothing is held, by anybody."""
        state = self.state
        assert not state.jobs and not state.requests, (state.jobs, state.requests)
        assert {lane.state for lane in state.lanes.values()} <= {"empty"}, state.lanes
        assert {buffer.state for buffer in state.buffers.values()} <= {"free"}, state.buffers
        assert not self.device.running

    def check_idle_lanes(self) -> None:
        """Hold the lanes alone against: all are empty."""
        assert {lane.state for lane in self.state.lanes.values()} == {"empty"}, self.state.lanes

    def check_answers(self, *, ended_early: Iterable[Stream] = ()) -> None:
        """I7: every request has its ending, and its tokens are those of a run alone.

        A request that ended early has a prefix of them.
        """
        early = {stream.request for stream in ended_early}
        for one in self.streams:
            result = one.stream.result()
            expected = one.expected()
            if one.stream.request in early and result.finish_reason not in ("stop", "length"):
                assert list(result.tokens) == expected[: len(result.tokens)], result
            else:
                check_answer(result, expected, one.max_tokens)

    def close(self, *, drain: bool = True) -> None:
        """Close the engine and hold its journal against replay and I1."""
        self.engine.close(drain=drain)
        assert self.state.device.state == "closed"
        assert self.device.stopped and self.journal.closed
        assert len(self.device.closes) == 1
        asked = [effect for effect in self.device.executed if isinstance(effect, CloseDevice)]
        assert len(asked) == 1, f"D13: a device is closed once, not {len(asked)} times"
        self.watch.check_all_ended()
        if self.replays:
            check_replay(self.steps, self.state)

    # ------------------------------------------------------------------ watching

    def _watch_first(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self.watch.take(step)

    def _watch(self, steps: Sequence[Step]) -> None:
        self._watch_first(steps)
        if self.checks:
            check(self.state)


def without_canaries(limits: Limits | None) -> Limits:
    """Return limits under which no canary is ever due."""
    return attrs.evolve(limits or Limits(), canary_jobs=0, canary_idle_ns=0)


def check_answer(result: Result, expected: list[int], max_tokens: int) -> None:
    """Hold a result that ended well against the independent reference."""
    assert list(result.tokens) == expected, f"{result} instead of {expected}"
    reason = "length" if len(expected) == max_tokens else "stop"
    assert (result.finish_reason, result.error) == (reason, None), result
    assert result.text == "".join(f"<{token}>" for token in expected), result
    assert result.usage.completion_tokens == len(expected), result


def check_replay(steps: Sequence[Step], live: State) -> None:
    """I11: folding the steps gives the live state; deciding again gives the recorded events."""
    folded = initial_state()
    decided = initial_state()
    for step in steps:
        events = tuple(map(as_stored, step.events))
        fold(folded, Step(step=step.step, at_ns=step.at_ns, taken=step.taken, events=events))
        again = decide(decided, step.taken, step.at_ns)
        assert again.events == step.events, f"step {step.step}: {again.events} != {step.events}"
        assert decided.step == step.step
    assert are_alike(folded, live), "I11: the fold differs from the live state"
    assert are_alike(decided, live), "I11: deciding again differs from the live state"


def are_alike(one: State, other: State) -> bool:
    """Return whether two states are the same; what is in another order may still be."""
    return one == other or freeze(one) == freeze(other)


def as_stored(event: Event) -> Event:
    """Return the event as a journal gives it back: its data went through JSON."""
    if not event.data:
        return event
    return attrs.evolve(event, data=json.loads(json.dumps(dict(event.data))))
