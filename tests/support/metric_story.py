"""A journal told by hand, step by step, with the metrics of what a board and clients did."""

from typing import Any

import attrs
from support.told import fault_told

from laneway.engine.distribution import Distribution
from laneway.engine.families import picture
from laneway.engine.inputs import (
    ArtifactValidated,
    ChipFacts,
    Completed,
    DeviceFacts,
    DeviceFaulted,
    EngineStarted,
    HealthFacts,
    Input,
    JobStalled,
    JobTimes,
    LoadRequested,
    ModelConfigured,
    ModelReleased,
    RequestSubmitted,
    RowResult,
    SubmitAccepted,
    SubmodelFacts,
    TimePassed,
)
from laneway.engine.limits import Limits
from laneway.engine.metrics import Metrics
from laneway.engine.ports import Step
from laneway.engine.sampling import Sampling
from laneway.statemachines import MACHINES, Event

SECOND = 1_000_000_000


def started() -> EngineStarted:
    """Return the input that opens an incarnation."""
    return EngineStarted(
        wall_clock_ns=0,
        code_version="1.2",
        journal_tokens="full",
        limits=Limits(),
        device=DeviceFacts(
            url="fake:",
            backend="fake",
            product="fake",
            serial="0",
            runtime_version="r1",
            driver_version="d1",
            firmware_version="f1",
            device_epoch=1,
            inflight_max=1,
            chips=(ChipFacts(total_bytes=5000, used_bytes=100),) * 2,
        ),
    )


def validated(model: int) -> ArtifactValidated:
    """Return an artifact of 4 lanes, a prefill submodel of one row and a decode one of two."""
    return ArtifactValidated(
        model=model,
        name="n",
        sha256=f"hash{model}",
        architecture="a",
        layout="l",
        lane_rule="any",
        context_tokens=64,
        vocabulary=100,
        lane_count=4,
        end_tokens=(0,),
        submodels=(
            SubmodelFacts(name="p1", task="prefill", batch_max=1, tokens_max=32),
            SubmodelFacts(name="d2", task="decode", batch_max=2, tokens_max=1),
        ),
        chip_bytes=(1000, 1000),
        chips=(),
        trials=(),
    )


def submitted(request: int) -> RequestSubmitted:
    """Return a client's wish."""
    return RequestSubmitted(
        request=request,
        alias="m",
        prompt=(7, 8, 9),
        max_tokens=3,
        sampling=Sampling(seed=1),
        stop=(),
        ignore_eos=False,
        deadline_ns=None,
        client_id=None,
        model=1,
    )


def completed(job: int, *rows: RowResult, **change: Any) -> Completed:
    """Return a done job, by default of one row with token 5."""
    done = Completed(
        job=job,
        ticket=900 + job,
        epoch=1,
        generation=1,
        flags=7,
        kv_effect="applied",
        engine_slot=0,
        rows=rows or (RowResult(token=5),),
        times=JobTimes(),
    )
    return attrs.evolve(done, **change)


def faulted(job: int | None, kind: str, **change: Any) -> DeviceFaulted:
    """Return a fault of the device."""
    fault = fault_told(
        kind, 1, job=job, ticket=0 if job is None else 900 + job, epoch=1, generation=1
    )
    return attrs.evolve(fault, **change)


def health(**counters: int) -> HealthFacts:
    """Return a picture of a device that tells these counters."""
    return HealthFacts(
        state="good",
        device_epoch=1,
        sticky=0,
        advised=0,
        observed_ns=0,
        last_progress_ns=0,
        used_bytes=(0, 0),
        counters=tuple(counters.items()),
    )


class Story:
    """Steps told one after the other, and the metrics of them."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.steps: list[Step] = []

    def at(self, seconds: float, taken: Input, *events: Event) -> None:
        """Tell what happened at an instant."""
        step = Step(
            step=len(self.steps) + 1, at_ns=round(seconds * SECOND), taken=taken, events=events
        )
        self.steps.append(step)
        self.metrics.observe(step)

    def value(self, name: str, **labels: str) -> Any:
        """Return a number of now."""
        return picture(self.metrics).value(name, **labels)

    def by(self, name: str) -> dict[str, Any]:
        """Return the numbers of now by the last label, those that are 0 left out."""
        families = {family.name: family for family in picture(self.metrics).families}
        return {labels[-1]: value for labels, value in families["laneway:" + name].series if value}

    def counted(self, name: str, **labels: str) -> list[float]:
        """Return [count, sum] of a histogram."""
        found = self.value(name, **labels)
        assert isinstance(found, Distribution)
        return [found.count, found.total / found.scale]

    # ------------------------------------------------------------------ pieces of the story

    def load(self, at: float = 0.0, *, number: int = 1, generation: int = 1) -> None:
        """Load a model until it is warming; its lanes and buffers follow those before it."""
        lane, buffer = 4 * number - 3, 4 * number - 3
        plans = [["p1", "prefill", buffer, 2], ["d2", "decode", buffer + 2, 2]]
        data = {"lanes": [lane, 4], "buffers": plans}
        alias = {"alias": "m", "source": "s"}
        taken = LoadRequested(model=number, alias="m", source="s")
        self.at(at, taken, event("model", number, "load", "unloaded", data=alias))
        accept = event("model", number, "accept", "validating", generation=generation, data=data)
        self.at(at, validated(number), accept)
        configure = event("model", number, "configure", "configuring", generation=generation)
        self.at(at, configured(number), configure)
        publish = event("model", number, "publish", "warming", generation=generation)
        self.at(at, TimePassed(), publish)

    def unload(self, at: float, number: int) -> None:
        """Let a model go that is idle."""
        for trigger, source in (("drain", "ready"), ("unload", "draining")):
            self.at(at, TimePassed(), event("model", number, trigger, source))
        taken = ModelReleased(model=number, used_bytes=(0, 0), healthy=True)
        self.at(at, taken, event("model", number, "vacate", "unloading"))

    def admit(self, at: float, request: int) -> None:
        """Admit a request."""
        admitted = event("request", request, "admit", "received", data={"model": 1})
        self.at(at, submitted(request), admitted)

    def prefill(self, at: float, request: int, *, lane: int, job: int, accept: bool = True) -> None:
        """Give a request its lane and its prefill job, in buffer/1."""
        self.at(
            at,
            TimePassed(),
            event("lane", lane, "bind", "empty", data={"origin": "request", "owners": [request]}),
            event("request", request, "prefill", "waiting", data={"lanes": [lane]}),
            *plan(job, "prefill", buffer=1, rows=[[lane, request, 0, 3]]),
        )
        if accept:
            self.accept(at + 0.5, job, buffer=1)

    def accept(self, at: float, job: int, *, buffer: int) -> None:
        """Let the device take a job."""
        self.at(at, SubmitAccepted(job=job, ticket=900 + job), *submit(job, buffer=buffer))

    def decode(self, at: float, job: int, *rows: list[int]) -> None:
        """Plan a decode job in buffer/3 and let the device take it."""
        self.at(at, TimePassed(), *plan(job, "decode", buffer=3, rows=list(rows)))
        self.accept(at, job, buffer=3)


def event(machine: str, number: int, trigger: str, source: str, **rest: Any) -> Event:
    """Return the event of one entity; where it leads is read from the declaration."""
    dest = MACHINES[machine].table[source, trigger]
    generation = rest.get("generation", 1)
    return Event(machine, (number,), trigger, source, dest, 1, generation, rest.get("data", {}))


def plan(
    job: int, task: str, *, buffer: int, rows: list[list[int]], origin: str = "request"
) -> list[Event]:
    """Return the events of a plan."""
    data = {"task": task, "origin": origin, "model": 1, "buffer": buffer}
    data["owners"] = [row[1] for row in rows]
    growth = {"job": job, "by": [end - start for _, _, start, end in rows]}
    lanes = tuple(row[0] for row in rows)
    reserve = Event("lane", lanes, "reserve", "ready", "reserved", 1, 1, growth)
    acquire = event("buffer", buffer, "acquire", "free", data={"job": job})
    return [reserve, acquire, event("job", job, "plan", "drafted", data=data)]


def submit(job: int, *, buffer: int) -> list[Event]:
    """Return the events of an accepted submit."""
    ticket = {"ticket": 900 + job}
    return [
        event("buffer", buffer, "submit", "preparing"),
        event("job", job, "submit", "planned", data=ticket),
    ]


def complete(job: int, *, buffer: int, lanes: list[int]) -> list[Event]:
    """Return the events of a completed job whose KV is good."""
    return [
        event("buffer", buffer, "complete", "submitted"),
        event("job", job, "complete", "submitted"),
        *(event("lane", lane, "commit", "reserved") for lane in lanes),
    ]


def end(request: int, trigger: str, source: str, *, reason: str, tokens: int) -> Event:
    """Return the event of an ending."""
    return event("request", request, trigger, source, data={"reason": reason, "tokens": tokens})


def configured(model: int) -> ModelConfigured:
    """Return a configuration that took 1000 bytes on chip 0 and 900 on chip 1."""
    return ModelConfigured(
        model=model,
        device_generation=7,
        device_epoch=1,
        duration_ns=5,
        used_bytes_before=(100, 200),
        used_bytes_after=(1100, 1100),
    )


def opened() -> Story:
    """Return a story with an open device and a model that serves."""
    story = Story()
    story.at(0, started(), event("device", 0, "open", "closed", data={"incarnation": 1}))
    story.load()
    return story


def fed() -> Story:
    """Return a story in which request 1 has its prefill on the device."""
    story = opened()
    story.admit(1, 1)
    story.prefill(4, 1, lane=1, job=1)
    return story


def stall(stage: str) -> JobStalled:
    """Return a stage of the hang rule for job 1."""
    return JobStalled(job=1, ticket=901, stage=stage, phase="exec", age_ns=5, progress_age_ns=5)
