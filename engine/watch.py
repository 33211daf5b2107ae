"""What must hold of the steps of a journal, told by what came before them.

``Watch`` is the other half of invariants.py: it takes the steps in order and keeps what it must
know in tables of its own, read from events and inputs alone, so that a wrong state cannot hide a
wrong step. A rule that is broken is an InvariantError with the rule's id.

Source: I1, I5, I10, I12, E4, E7, E17, decisions 3, 8 and 9; specs/invariants.md.
"""

from collections.abc import Sequence

import attrs

from laneway.engine.errors import InvariantError
from laneway.engine.inputs import BufferRestored, Completed, DeviceFaulted, RequestSubmitted
from laneway.engine.ports import Step
from laneway.statemachines import MACHINES, Event
from laneway.statemachines.coupling import broken_couplings

PLANNABLE = ("serving", "degraded", "draining")
"""Device states in which a job may be planned; golden and warm-up also while `recovering`."""

PLANNING = frozenset(
    {
        ("job", "plan"),
        ("lane", "bind"),
        ("lane", "reserve"),
        ("buffer", "acquire"),
        ("request", "prefill"),
    }
)
"""What may follow from any input at all: the next job."""

DUE = frozenset({("device", "reset"), ("device", "escalate"), ("device", "lose")})
"""What a suspect device waits for comes with the first input after its time, whichever that is; all
that goes with it is its own."""


@attrs.define
class _Flight:
    """A job as its events told it."""

    epoch: int
    generation: int
    buffer: int
    ticket: int | None = None
    model: int = 0
    run: int | None = None
    """The run of a trial, None for a job of requests."""


@attrs.define
class Watch:
    """Holds the steps of one journal, in order and from its first, against their past.

    It keeps what it must know in tables of its own, read from events and inputs alone, so that a
    wrong state cannot hide a wrong step.
    """

    step: int = 0
    at_ns: int = 0
    endings: dict[int, str] = attrs.Factory(dict)
    """Every request received so far, with the trigger of its ending or ""."""

    _device: str = "closed"
    _one_alone: bool = False
    """Whether the device fell to one job in flight and has not two again."""

    _pairs: set[int] = attrs.Factory(set)
    """Runs that are to be in flight two at once."""

    _examined: set[int] = attrs.Factory(set)
    """Models of which nothing is believed until a golden run alone decides."""

    _flights: dict[int, _Flight] = attrs.Factory(dict)
    _restoring: dict[int, int] = attrs.Factory(dict)
    _last: dict[str, int] = attrs.Factory(dict)

    def take(self, step: Step) -> None:
        """Take one more step. Raises: InvariantError naming the rule it breaks."""
        expected = self.step + 1
        if step.step != expected:
            raise InvariantError("decision 3", f"step {step.step} stands for {expected}")
        if step.at_ns < self.at_ns:
            raise InvariantError("decision 8", f"step {step.step}: time fell")
        self.step, self.at_ns = step.step, step.at_ns
        for broken in broken_couplings(step.events):
            need = " or ".join(" ".join(pair) for pair in broken.then)
            when = " ".join(broken.when)
            raise InvariantError(broken.rule, f"step {step.step}: {when} without {need}")
        self._check_answer(step)
        for event in step.events:
            if len(event.entities) > 1 and len(set(event.entities)) != len(event.entities):
                said = f"step {step.step}: {event.machine} {event.trigger} twice for one"
                raise InvariantError("I3", said)
            self._take_event(step, event)

    def check_all_ended(self) -> None:
        """I1: every request that was accepted or refused has exactly one ending."""
        live = sorted(number for number, ending in self.endings.items() if not ending)
        if live:
            raise InvariantError("I1", f"requests {live} have no ending")

    # -------------------------------------------------------------- what an answer may do

    def _check_answer(self, step: Step) -> None:
        """I5, I12, E7: what does not match is recorded only; what matches is accounted once."""
        taken = step.taken
        if not isinstance(taken, Completed | DeviceFaulted | RequestSubmitted):
            return
        moved = {(event.machine, event.trigger) for event in step.events}
        is_due = self._device == "suspect" and bool(moved & DUE)
        if isinstance(taken, RequestSubmitted):
            more = sorted(moved - PLANNING - {("request", "reject")})
            if ("request", "reject") in moved and more and not is_due:
                said = f"step {step.step}: a refused request also moves {more}"
                raise InvariantError("I12", said)
        elif isinstance(taken, Completed):
            if self._matches(taken):
                ended = _ended_jobs(step)
                if taken.job not in ended:
                    raise InvariantError("E7", f"{_completion(step, taken)} ends jobs {ended}")
            elif moved - PLANNING and not is_due:
                said = f"matches nothing in flight, yet {sorted(moved - PLANNING)}"
                raise InvariantError("I5", f"{_completion(step, taken)} {said}")
        elif taken.epoch not in (0, self._last.get("epoch")):
            if moved - PLANNING and not is_due:
                said = f"a fault of another epoch, yet {sorted(moved - PLANNING)}"
                raise InvariantError("I5", f"step {step.step}: {said}")

    def _matches(self, taken: Completed) -> bool:
        """Return whether a completion is of a job in flight, of its own epoch and generation."""
        flight = self._flights.get(taken.job)
        if flight is None or flight.ticket not in (None, taken.ticket):
            return False
        return (flight.epoch, flight.generation) == (taken.epoch, taken.generation)

    # -------------------------------------------------------------- what an event may say

    def _take_event(self, step: Step, event: Event) -> None:
        match event.machine:
            case "request":
                for number in event.entities:
                    self._take_request(number, event.trigger, event.dest)
            case "job":
                for number in event.entities:
                    self._take_job(step, number, event)
            case "lane" if event.trigger == "commit":
                self._check_commit(step, event)
            case "lane" if event.trigger == "bind" and event.data.get("pair"):
                self._pairs.update(event.data["owners"])
            case "buffer":
                self._take_buffer(step, event)
            case "model":
                self._take_model(event)
            case "device":
                self._device = event.dest
                if event.trigger == "recover" and event.epoch != self._last.get("epoch"):
                    self._rises("epoch", (event.epoch,))
                if event.trigger in ("open", "restrict", "relax"):
                    self._one_alone = event.trigger == "restrict"
                    self._pairs.clear()
                if event.trigger == "open":
                    self._rises("epoch", (event.epoch,))
                    self._rises("incarnation", (event.data["incarnation"],))

    def _take_request(self, number: int, trigger: str, dest: str) -> None:
        if trigger in ("admit", "reject"):
            self._rises("request", (number,))
            self.endings[number] = ""
        if dest in MACHINES["request"].final:
            before = self.endings.get(number)
            if before != "":
                raise InvariantError("I1", f"request/{number} ends by {trigger} after {before!r}")
            self.endings[number] = trigger

    def _take_job(self, step: Step, number: int, event: Event) -> None:
        if event.trigger == "plan":
            proof = self._device == "recovering" and event.data["origin"] != "request"
            if self._device not in PLANNABLE and not proof:
                said = f"step {step.step}: job/{number} on a {self._device} device"
                raise InvariantError("I10", said)
            self._rises("job", (number,))
            data = event.data
            run = None if data["origin"] == "request" else data["owners"][0]
            new = _Flight(event.epoch, event.generation, data["buffer"], None, data["model"], run)
            self._check_alone(step, number, new)
            self._flights[number] = new
            return
        flight = self._flights.get(number)
        if flight is None:
            said = f"step {step.step}: job/{number} moves by {event.trigger}"
            raise InvariantError("E7", f"{said} after its end")
        if event.trigger in ("submit", "doubt"):
            flight.ticket = event.data["ticket"]
        if event.dest in MACHINES["job"].final:
            if event.trigger == "complete":
                if not isinstance(step.taken, Completed) or step.taken.job != number:
                    told = type(step.taken).__name__
                    said = f"step {step.step}: job/{number} completes at a {told}"
                    raise InvariantError("E7", said)
                withheld = bool(event.data.get("withheld"))
                if withheld != (flight.run is None and flight.model in self._examined):
                    said = f"step {step.step}: of job/{number} withheld: {withheld}"
                    raise InvariantError("E11", f"{said}, examined: {not withheld}")
                self._restoring[flight.buffer] = number
            del self._flights[number]

    def _check_alone(self, step: Step, number: int, flight: _Flight) -> None:
        """E11: after an anomaly one job flies alone, and while one decides no request's does."""
        said = f"step {step.step}: job/{number}"
        others = self._flights.values()
        if self._one_alone and others:
            if not all(one.run in self._pairs for one in (flight, *others)):
                raise InvariantError(
                    "E11", f"{said} is planned beside jobs {sorted(self._flights)}"
                )
        if flight.model in self._examined and (flight.run is None or others):
            raise InvariantError("E11", f"{said} is planned while model/{flight.model} is examined")

    def _check_commit(self, step: Step, event: Event) -> None:
        """E17: KV becomes true only when the device said so, and only for the job it said it of."""
        taken = step.taken
        if not isinstance(taken, Completed) or taken.kv_effect != "applied":
            told = type(taken).__name__
            said = f"step {step.step}: lanes {event.entities} commit at a {told}"
            raise InvariantError("E17", said)

    def _take_buffer(self, step: Step, event: Event) -> None:
        """E4: a done buffer is free only once it was restored for the job it served."""
        if event.trigger != "release":
            return
        for number in event.entities:
            job = self._restoring.pop(number, 0)
            taken = step.taken
            told = (taken.buffer, taken.job) if isinstance(taken, BufferRestored) else None
            if told != (number, job):
                said = f"step {step.step}: buffer/{number} is free unrestored"
                raise InvariantError("E4", said)

    def _take_model(self, event: Event) -> None:
        if event.trigger == "examine":
            self._examined.update(event.entities)
        if event.trigger == "degrade":
            self._pairs.clear()  # runs are numbered anew
        if event.trigger == "acquit" or event.dest not in ("ready", "draining"):
            self._examined.difference_update(event.entities)
        if event.trigger == "load":
            self._rises("model", event.entities)
        elif event.trigger == "reconfigure":
            self._rises("generation", (event.generation,))
        elif event.trigger == "accept":
            self._rises("generation", (event.generation,))
            first, count = event.data["lanes"]
            self._rises("lane", range(first, first + count))
            for _, _, first, count in event.data["buffers"]:
                self._rises("buffer", range(first, first + count))

    def _rises(self, kind: str, numbers: Sequence[int]) -> None:
        for number in numbers:
            last = self._last.get(kind, 0)
            if number != last + 1:
                raise InvariantError("decision 9", f"{kind} {number} follows {last}")
            self._last[kind] = number


def _completion(step: Step, taken: Completed) -> str:
    return f"step {step.step}: the completion of job/{taken.job}"


def _ended_jobs(step: Step) -> list[int]:
    final = MACHINES["job"].final
    ended = [event for event in step.events if event.machine == "job" and event.dest in final]
    return [number for event in ended for number in event.entities]
