"""The state of an engine and what moves it: decided step by step, or in a cruise.

Theory of operation. ``decide`` is asked for everything but a run of like decode jobs. A run may
cruise (cruise.py) once ``decide`` has decided one of its jobs exactly as the cruise would have; so
a condition that a cruise does not know of is found at its first job, and after so many jobs again.
``state`` lands first, so nobody ever sees a state that is not that of the last step; what the loop
asks again and again is answered without landing.

All of it is for whoever has the engine's turn (loop.py), but for ``standing``, which others may
read under the engine's lock: a caller may be interrupted anywhere, and half a landing is no state.
"""

from laneway.engine.canaries import is_examining
from laneway.engine.cruise import Cruise, find_cruise, group_count
from laneway.engine.decide import decide
from laneway.engine.draft import Decision
from laneway.engine.effects import DeviceEffect, ForeseeJob, SubmitJob
from laneway.engine.inputs import BufferRestored, Completed, Input, SubmitAccepted
from laneway.engine.state import State
from laneway.engine.timing import next_wake_ns
from laneway.engine.wanted import is_wanted, withdrawn_job

_ANSWERS = (Completed, SubmitAccepted, BufferRestored)


class Course:
    """A state and its decisions; see the head of this file."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._cruise: Cruise | None = None
        self._wake_ns: int | None = None
        self._proven: Cruise | None = None
        """One whose first job was decided both ways alike."""

        self.grounded = False
        """Whether somebody waits for a look, so that no cruise is to begin."""

        self._calm_jobs = 0
        """Completed jobs in a row without any other input, since a cruise was last looked for in
        vain. Fewer than there are groups are no sign that these will go on to take turns, and
        looking is not for nothing."""

    @property
    def state(self) -> State:
        """The state after the last step; lands."""
        self.land()
        return self._state

    @property
    def standing(self) -> State:
        """The state without landing: models, aliases and device are as after the last step.

        What belongs to requests and jobs may be as it was when a cruise began.
        """
        return self._state

    @property
    def is_cruising(self) -> bool:
        """Whether the state stands still."""
        return self._cruise is not None

    @property
    def step(self) -> int:
        """The number of the last step."""
        cruise = self._cruise
        return self._state.step if cruise is None else cruise.step

    @property
    def now_ns(self) -> int:
        """The instant of the last step."""
        cruise = self._cruise
        return self._state.now_ns if cruise is None else cruise.now_ns

    def decide(self, taken: Input, at_ns: int) -> Decision:
        """Take one input at engine time ``at_ns``."""
        cruise = self._cruise
        if cruise is not None:
            decision = cruise.decide(taken, at_ns)
            if decision is not None:
                return decision
            self._proven = None
            self.land()
        if type(taken) is Completed:
            return self._complete(taken, at_ns)
        if type(taken) not in _ANSWERS:
            self._calm_jobs = 0
        if type(taken) not in _ANSWERS or self._frees_another_buffer(taken):
            self._proven = None
        return decide(self._state, taken, at_ns)

    def _complete(self, taken: Completed, at_ns: int) -> Decision:
        """Begin a cruise with this job, or see whether the next one may."""
        self._calm_jobs += 1
        if self.grounded or self._calm_jobs < group_count(self._state):
            return decide(self._state, taken, at_ns)
        cruise = find_cruise(self._state)
        expected = None if cruise is None else cruise.decide(taken, at_ns)
        if cruise is None or expected is None:
            self._proven = None
            self._calm_jobs = 0
            return decide(self._state, taken, at_ns)
        if self._proven is not None and cruise.is_like(self._proven):
            self._wake_ns = next_wake_ns(self._state)
            self._cruise = cruise
            return expected
        decision = decide(self._state, taken, at_ns)
        self._proven = cruise if decision == expected else None
        return decision

    def _frees_another_buffer(self, taken: Input) -> bool:
        """Return whether a buffer comes back that the proven run does not go through.

        Then a smaller batch may have one that had none.
        """
        if self._proven is None or type(taken) is not BufferRestored:
            return False
        return taken.buffer not in self._proven.run.buffers

    def land(self) -> None:
        """Let the state be that after the last step.

        Why the cruise is forgotten last: whoever asks meanwhile is answered by it and does not see
        a state on its way.
        """
        cruise = self._cruise
        if cruise is not None:
            cruise.land()
            self._cruise = None

    # ------------------------------------------------------------------ the loop's questions

    def foresee(self) -> ForeseeJob | None:
        """Return what to ask for the job that most likely follows, once a job; see ``Cruise``."""
        submit = None if self._cruise is None else self._cruise.foresee()
        return None if submit is None else ForeseeJob(submit=submit)

    def wake_ns(self) -> int | None:
        """Return when the engine wants to be woken if nothing else happens.

        Why not asked anew in a cruise: what could change it ends one.
        """
        return next_wake_ns(self._state) if self._cruise is None else self._wake_ns

    def is_examining(self) -> bool:
        """Return whether clients may have to wait for a golden run; never in a cruise."""
        return self._cruise is None and is_examining(self._state)

    def is_wanted(self, effect: DeviceEffect) -> bool:
        """Return whether an effect is to be carried out now."""
        cruise = self._cruise
        if cruise is None:
            return is_wanted(self._state, effect)
        return not isinstance(effect, SubmitJob) or effect.job == cruise.job

    def withdrawn_job(self, effect: DeviceEffect) -> int | None:
        """Return the job that an effect which is not carried out takes back with it, or None."""
        return None if self._cruise is not None else withdrawn_job(self._state, effect)
