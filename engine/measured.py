"""What is counted for one model, and for each of its live requests and jobs.

A model is one load, so it has at most one generation: its numbers are the series with that
generation's labels. Records of requests and jobs exist only while these live, so memory is bounded
by what the engine itself holds.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

import attrs

from laneway.engine.buckets import Bucketed
from laneway.engine.distribution import Histogram, ratios, stages
from laneway.engine.inputs import ArtifactValidated, DeviceFacts, JobTimes, SubmodelFacts
from laneway.statemachines import MACHINES

Value = TypeVar("Value")

TASKS = ("prefill", "decode")
STAGES = ("d2h", "h2d", "infer", "postprocess", "queue")
"""In the order in which they are shown."""

FINISHED_REASONS = ("stop", "length", "abort", "error", "deadline")


def _counts_of(machine: str) -> dict[str, int]:
    """Return a count of 0 for each state of a machine."""
    return dict.fromkeys(MACHINES[machine].states, 0)


@attrs.define
class Submodel:
    """The buffers of one submodel, how full its jobs were, and how long their stages took."""

    facts: SubmodelFacts
    buffers: range
    fill: Histogram = attrs.Factory(ratios)
    stages: dict[str, Histogram] = attrs.Factory(lambda: {name: stages() for name in STAGES})

    def take_times(self, times: JobTimes) -> None:
        """Take the durations that a device tells; a stage without both its instants is left out."""
        took = self.stages
        begin_ns, end_ns = times.h2d_begin_ns, times.h2d_end_ns
        if 0 < times.submit_ns <= begin_ns:
            took["queue"].observe(begin_ns - times.submit_ns)
        if 0 < begin_ns <= end_ns:
            took["h2d"].observe(end_ns - begin_ns)
        begin_ns, end_ns = times.exec_begin_ns, times.exec_end_ns
        if 0 < begin_ns <= end_ns:
            took["infer"].observe(end_ns - begin_ns)
        begin_ns, end_ns = times.d2h_begin_ns, times.d2h_end_ns
        if 0 < begin_ns <= end_ns:
            took["d2h"].observe(end_ns - begin_ns)
        took["postprocess"].observe(times.postprocess_ns)


@attrs.define
class MeasuredModel:
    """Everything measured of one load of one artifact.

    ``resident``: it has lanes and buffers, so its gauges mean something. ``requests``, ``lanes``,
    ``buffers`` and ``jobs`` count by state; ``active_lanes`` are lanes of jobs that are not
    terminal. ``turns`` and ``runs`` are, by task, how long sequences waited for their next job and
    how long it took them.
    """

    number: int
    alias: str
    device: DeviceFacts | None = None
    code_version: str = ""
    facts: ArtifactValidated | None = None
    generation: int = 0
    lane_numbers: range = range(0)
    submodels: tuple[Submodel, ...] = ()
    resident: bool = False
    memory_bytes: tuple[int, ...] = ()
    requests: dict[str, int] = attrs.Factory(lambda: _counts_of("request"))
    lanes: dict[str, int] = attrs.Factory(lambda: _counts_of("lane"))
    buffers: dict[str, int] = attrs.Factory(lambda: _counts_of("buffer"))
    jobs: dict[str, int] = attrs.Factory(lambda: _counts_of("job"))
    active_lanes: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    corrupted: int = 0
    finished: Counter[str] = attrs.Factory(Counter)
    time_to_first_token: Bucketed = attrs.Factory(Bucketed)
    inter_token: Bucketed = attrs.Factory(Bucketed)
    time_per_output_token: Bucketed = attrs.Factory(Bucketed)
    end_to_end: Bucketed = attrs.Factory(Bucketed)
    queued: Bucketed = attrs.Factory(Bucketed)
    prefill: Bucketed = attrs.Factory(Bucketed)
    decode: Bucketed = attrs.Factory(Bucketed)
    inference: Bucketed = attrs.Factory(Bucketed)
    turns: dict[str, Bucketed] = attrs.Factory(lambda: {task: Bucketed() for task in TASKS})
    runs: dict[str, Bucketed] = attrs.Factory(lambda: {task: Bucketed() for task in TASKS})

    def accept(
        self, facts: ArtifactValidated, generation: int, lanes: range, buffers: dict[str, range]
    ) -> None:
        """Take over what the artifact is, and the numbers its lanes and buffers will have."""
        self.facts = facts
        self.generation = generation
        self.lane_numbers = lanes
        self.submodels = tuple(
            Submodel(submodel, buffers[submodel.name]) for submodel in facts.submodels
        )

    def bring_up(self, memory_bytes: tuple[int, ...]) -> None:
        """Bring the lanes and buffers into being: all empty and free."""
        self.resident = True
        self.memory_bytes = memory_bytes
        self.lanes["empty"] = len(self.lane_numbers)
        self.buffers["free"] = sum(len(submodel.buffers) for submodel in self.submodels)

    def take_down(self) -> None:
        """Forget what the model held on the device; what it counted stays."""
        self.resident = False
        self.memory_bytes = ()
        for counts in (self.requests, self.lanes, self.buffers, self.jobs):
            counts.update(dict.fromkeys(counts, 0))
        self.active_lanes = 0


@attrs.define
class LiveRequest:
    """What is remembered of a request until its ending.

    ``prompt_left`` are tokens that it has and that no job has run in its present lane: of its
    prompt, and after a fault those of its answer too. ``bucket`` is that of its prompt. Since
    ``idle_since_ns`` it has no job. ``cohort``: where the numbers of now are, if it is in one.
    """

    model: MeasuredModel
    admitted_ns: int
    waiting_since_ns: int
    prompt_tokens: int
    prompt_left: int
    bucket: int
    idle_since_ns: int
    started_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    tokens: int = 0
    cohort: "Cohort | None" = attrs.field(default=None, eq=False, repr=False)


@attrs.define(eq=False)
class Cohort:
    """Requests that got their latest tokens from one job, and what is therefore the same of them.

    ``numbers`` and ``members`` are in the order of the job's rows; all live, and have run all
    tokens that they have. ``buckets`` is how many are in each; ``tokens`` how many each got in
    here. A member's own numbers of these stand still meanwhile; ``scatter`` brings them up to date.

    Why: a job of all of them moves this, and not each of them.
    """

    numbers: tuple[int, ...]
    members: tuple[LiveRequest, ...]
    buckets: tuple[tuple[int, int], ...]
    idle_since_ns: int
    last_token_ns: int
    tokens: int = 0

    def gain(self, at_ns: int) -> None:
        """Count one more token of each member."""
        model = self.members[0].model
        gap_ns = at_ns - self.last_token_ns
        for bucket, times in self.buckets:
            model.inter_token.of[bucket].observe(gap_ns, times)
        model.generation_tokens += len(self.numbers)
        self.last_token_ns = at_ns
        self.tokens += 1

    def scatter(self) -> None:
        """Give every member its own numbers again; then this is nobody's."""
        for member in self.members:
            member.idle_since_ns = self.idle_since_ns
            member.last_token_ns = self.last_token_ns
            member.tokens += self.tokens
            member.cohort = None


@attrs.define
class LiveJob:
    """What is remembered of a job until it is terminal.

    ``owners`` and ``growth`` have an entry for each row: a request or run number, and by how many
    tokens the lane grows.
    """

    model: MeasuredModel
    submodel: Submodel | None
    task: str
    origin: str
    epoch: int
    generation: int
    owners: tuple[int, ...]
    growth: tuple[int, ...]
    planned_ns: int
    ticket: int = 0


def gather(requests: dict[int, LiveRequest], at_ns: int) -> None:
    """Make a cohort of requests whose job gave each a token in this step.

    So each has run what it has, and since this step it has had no job, or its next one.
    """
    members = tuple(requests.values())
    buckets = tuple(tally([member.bucket for member in members]))
    cohort = Cohort(tuple(requests), members, buckets, idle_since_ns=at_ns, last_token_ns=at_ns)
    for member in members:
        member.cohort = cohort


def tally(values: list[Value]) -> Iterable[tuple[Value, int]]:
    """Return each value with how often it occurs.

    Why not at once a Counter: the rows of a job mostly agree, and this is seen faster.
    """
    if values and values.count(values[0]) == len(values):
        return ((values[0], len(values)),)
    return Counter(values).items()
