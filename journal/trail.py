"""What led to a fault: the latest steps of each job in flight, of each lane, and of the device."""

from collections import deque
from collections.abc import Iterable

import attrs

from laneway.engine.inputs import (
    ConfigureFailed,
    CountersRead,
    HealthProbed,
    JobProgressed,
    JobStalled,
    KvApplied,
    KvApplyFailed,
    ResetFinished,
    SubmitRefused,
)
from laneway.engine.ports import Step
from laneway.journal.faults import counters_text, health_text
from laneway.journal.story import Line
from laneway.statemachines import MACHINES, Event, entity_name

DEVICE_LINES_MAX = 6
LANE_LINES_MAX = 4
_JOB_FINAL = MACHINES["job"].final


@attrs.define
class Trail:
    """Keeps what may have to be told: bounded by the jobs and lanes that live."""

    jobs: dict[int, list[Line]] = attrs.Factory(dict)
    lanes: dict[int, deque[Line]] = attrs.Factory(dict)
    device: deque[Line] = attrs.field(factory=lambda: deque(maxlen=DEVICE_LINES_MAX))
    health: Line | None = None
    counters: Line | None = None

    def take(self, step: Step) -> None:
        """Take one more step, the next one."""
        self._take_input(step)
        for event in step.events:
            if event.machine == "job":
                self._take_job(step, event)
            elif event.machine == "lane":
                self._take_lanes(step, event)
            elif event.machine in ("device", "model"):
                names = ", ".join(entity_name(event.machine, one) for one in event.entities)
                reason = event.data.get("reason")
                text = f"{names} {event.trigger}" + (f": {reason}" if reason else "")
                self.device.append(_line(step, event.trigger, text))

    def lines(self, jobs: Iterable[int], lanes: Iterable[int]) -> list[Line]:
        """Return what led to a fault of these jobs and lanes, and of the device, in order."""
        found = list(self.device)
        for number in jobs:
            found += self.jobs.get(number, [])
        for number in lanes:
            found += self.lanes.get(number, ())
        found += [line for line in (self.health, self.counters) if line is not None]
        return sorted(found, key=lambda line: line.step)

    def _take_input(self, step: Step) -> None:
        taken = step.taken
        if isinstance(taken, HealthProbed):
            self.health = _line(step, "health", health_text(taken.health))
        elif isinstance(taken, CountersRead):
            told = counters_text(taken.counters)
            self.counters = _line(step, "counters", f"the device counts {told}")
        elif isinstance(taken, JobProgressed):
            text = f"job/{taken.job} was seen in phase {taken.phase}"
            self._of_job(taken.job, _line(step, "phase", text))
        elif isinstance(taken, JobStalled):
            text = f"job/{taken.job}: {taken.stage} a hang in phase {taken.phase}"
            self._of_job(taken.job, _line(step, "stall", text))
        elif isinstance(taken, SubmitRefused):
            text = f"submit of job/{taken.job} refused with {taken.code:#06x}: {taken.reason}"
            self.device.append(_line(step, "refused", text))
        elif isinstance(taken, KvApplyFailed):
            text = f"{taken.operation} of lane/{taken.lane} failed with {taken.code:#06x}"
            self.device.append(_line(step, "kv_failed", text))
        elif isinstance(taken, ConfigureFailed):
            text = f"configuring model/{taken.model} failed with {taken.code:#06x}"
            self.device.append(_line(step, "configure_failed", text))
        elif isinstance(taken, ResetFinished):
            text = f"a reset of level {taken.level} ended with {taken.code:#06x}"
            self.device.append(_line(step, "reset", text))
        elif isinstance(taken, KvApplied):
            for lane in dict.fromkeys(taken.lanes):
                self._of_lane(lane, _line(step, "kv_applied", f"KV list of lane/{lane} applied"))

    def _take_job(self, step: Step, event: Event) -> None:
        for number in event.entities:
            if event.trigger == "plan":
                data = event.data
                owners = ", ".join(f"{data['origin']}/{owner}" for owner in data["owners"])
                text = f"job/{number} planned: {data['task']} for {owners}, buffer/{data['buffer']}"
                self.jobs[number] = [_line(step, "plan", text)]
                continue
            if event.dest in _JOB_FINAL:
                self.jobs.pop(number, None)
                continue
            ticket = event.data.get("ticket", 0)
            text = f"job/{number} {event.trigger}, ticket {ticket}"
            self._of_job(number, _line(step, event.trigger, text))

    def _take_lanes(self, step: Step, event: Event) -> None:
        for number in event.entities:
            text = f"lane/{number} {event.trigger}: {event.source} -> {event.dest}"
            self._of_lane(number, _line(step, event.trigger, text))

    def _of_job(self, number: int, line: Line) -> None:
        if number in self.jobs:
            self.jobs[number].append(line)

    def _of_lane(self, number: int, line: Line) -> None:
        self.lanes.setdefault(number, deque(maxlen=LANE_LINES_MAX)).append(line)


def _line(step: Step, what: str, text: str) -> Line:
    return Line(step=step.step, at_ns=step.at_ns, what=what, text=text)
