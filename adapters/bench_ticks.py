"""The life of an engine that decodes full batches, as steps, for whoever measures what they cost.

The core runs without device and threads: every effect that wants an answer gets the one a healthy
device would give. So the steps are those of a real journal and can be folded and decided again.
One job is in flight at a time, so that every decode job takes all sequences there are.
"""

from collections import deque
from collections.abc import Iterator

import attrs

from laneway.adapters.bench_null import CHIP, null_artifact
from laneway.engine.decide import decide
from laneway.engine.effects import Effect, RestoreBuffer, SubmitJob
from laneway.engine.evidence import Grant
from laneway.engine.inputs import (
    BufferRestored,
    Completed,
    DeviceFacts,
    EngineStarted,
    Input,
    JobTimes,
    LoadRequested,
    ModelConfigured,
    RequestSubmitted,
    RowResult,
    SubmitAccepted,
    SubmodelFacts,
)
from laneway.engine.limits import Limits
from laneway.engine.ports import Step
from laneway.engine.sampling import Sampling
from laneway.engine.state import State, initial_state

BATCH = 16
PROMPT_TOKENS = 100
CONTEXT_TOKENS = 1 << 20
VOCABULARY = 151_936
BOOTED_NS = 90_000_000_000_000
"""A device clock that has run for a day, so that instants have the digits they have in life."""

TICK_NS = 10_000_000
_PASSED_NS = (0, 4_100, 12_300, 95_400, 101_200, 9_412_700, 9_420_100, 9_690_800, 9_702_300)
"""Instants of a job after its submit, in the order of JobTimes."""


def opening() -> list[Input]:
    """Return what happens before the first batch: start, load, and as many requests as lanes."""
    device = DeviceFacts(
        url="bench:",
        backend="bench",
        product="none",
        serial="0",
        runtime_version="0",
        driver_version="0",
        firmware_version="0",
        device_epoch=1,
        inflight_max=1,
        chips=(CHIP,),
        grants=(
            Grant(feature="batch", calbin_sha256="", value=BATCH, evidence="SIM", by=""),
            Grant(feature="partial_batch", calbin_sha256="", value=0b11, evidence="SIM", by=""),
        ),
    )
    artifact = attrs.evolve(
        null_artifact(1, BATCH, BATCH),
        name="bench",
        context_tokens=CONTEXT_TOKENS,
        vocabulary=VOCABULARY,
        submodels=(
            SubmodelFacts(name="prefill", task="prefill", batch_max=1, tokens_max=PROMPT_TOKENS),
            SubmodelFacts(name="decode", task="decode", batch_max=BATCH, tokens_max=1),
        ),
    )
    requests = [
        RequestSubmitted(
            request=number,
            alias="bench",
            prompt=tuple(range(PROMPT_TOKENS)),
            max_tokens=CONTEXT_TOKENS - PROMPT_TOKENS,
            sampling=Sampling(seed=number),
            stop=(),
            ignore_eos=True,
            deadline_ns=None,
            client_id=None,
            model=1,
        )
        for number in range(1, BATCH + 1)
    ]
    start = EngineStarted(
        wall_clock_ns=0,
        code_version="0",
        journal_tokens="full",
        limits=Limits(inflight_jobs_max=1),
        device=device,
    )
    configured = ModelConfigured(
        model=1,
        device_generation=1,
        device_epoch=1,
        duration_ns=1,
        used_bytes_before=(0,),
        used_bytes_after=(1,),
    )
    load = LoadRequested(model=1, alias="bench", source="bench")
    return [start, load, artifact, configured, *requests]


def life(state: State | None = None) -> Iterator[Step]:
    """Return the steps of a life without end, first the opening, then one batch after the other."""
    state = initial_state() if state is None else state
    later: deque[Input] = deque(opening())
    inbox: deque[Input] = deque()
    at_ns = 0
    while True:
        # Until the model is ready the device goes first; then every request is in at once.
        waits = inbox and not (later and state.aliases)
        taken = inbox.popleft() if waits else later.popleft()
        at_ns += TICK_NS // 3
        decision = decide(state, taken, at_ns)
        yield Step(step=state.step, at_ns=at_ns, taken=taken, events=decision.events)
        for effect in decision.effects:
            inbox.extend(_answers(effect, at_ns))


def _answers(effect: Effect, at_ns: int) -> list[Input]:
    """Return what a healthy device says to an effect."""
    if isinstance(effect, RestoreBuffer):
        return [BufferRestored(buffer=effect.buffer, job=effect.job)]
    if not isinstance(effect, SubmitJob):
        return []
    done = Completed(
        job=effect.job,
        ticket=effect.job,
        epoch=effect.epoch,
        generation=effect.generation,
        flags=7,
        kv_effect="applied",
        engine_slot=effect.job % 2,
        rows=tuple(
            RowResult(token=(row.owner * 7919 + row.start * 104_729) % VOCABULARY)
            for row in effect.rows
        ),
        times=_times(BOOTED_NS + at_ns),
    )
    return [SubmitAccepted(job=effect.job, ticket=effect.job), done]


def _times(submit_ns: int) -> JobTimes:
    names = [field.name for field in attrs.fields(JobTimes)][: len(_PASSED_NS)]
    told = {name: submit_ns + passed for name, passed in zip(names, _PASSED_NS, strict=True)}
    return JobTimes(**told, postprocess_ns=412_345)


def full_batches(steps: Iterator[Step]) -> Iterator[Step]:
    """Leave out everything before the first full batch is done."""
    for step in steps:
        if isinstance(step.taken, Completed) and len(step.taken.rows) == BATCH:
            yield step
            yield from steps


def entity_events(step: Step) -> int:
    """Return how many entities a step moved."""
    return sum(len(event.entities) for event in step.events)
