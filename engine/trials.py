"""Golden and warm-up: jobs of nobody, whose numbers are known or thrown away (E25).

A trial is a fixed sequence of the artifact. A run of it takes as many lanes as its batch, in the
submodels of that batch, all rows with the same tokens; so every lane position of every
compiled graph is held against the same golden rows. Runs are ordinary jobs: planned, validated,
submitted and accounted like any other (decision 19). While a model is warming nothing else is
planned, and its trials run one after the other. Once it serves, its golden trials run again as
canaries (canaries.py).
"""

from laneway.engine.draft import Draft
from laneway.engine.effects import SubmitRow
from laneway.engine.inputs import RowResult, SubmodelFacts, Trial
from laneway.engine.loading import fail_load, golden_differed, publish
from laneway.engine.plan import Plan, takes_rows
from laneway.engine.queueing import free_buffer
from laneway.engine.reserving import evict
from laneway.engine.state import JobState, ModelState, State, TrialRun


def choose_trial(state: State, model: ModelState) -> Plan | None:
    """Return the next job of the trials of a warming model, or None."""
    assert model.facts is not None
    for run in model.runs.values():
        return None if run.job is not None else plan_run(state, model, run)
    index = next_trial(state, model)
    if index is None:
        return None
    trial = model.facts.trials[index]
    lanes = tuple(sorted(model.empty_lanes)[: trial.batch])
    if len(lanes) < trial.batch:
        return None
    run = TrialRun(number=index, trial=index, origin=trial.origin)
    return plan_run(state, model, run, begin=lanes)


def next_trial(state: State, model: ModelState) -> int | None:
    """Return the trial that a warming model runs next, or None after the last.

    Those of a batch that nothing may run are left out: no request will run in it either (R1.2).
    """
    assert model.facts is not None
    for index in range(model.next_run, len(model.facts.trials)):
        trial = model.facts.trials[index]
        if trial.batch == 1 or submodel_of(state, model, trial, "decode", tokens=1) is not None:
            return index
    return None


def plan_run(
    state: State,
    model: ModelState,
    run: TrialRun,
    *,
    begin: tuple[int, ...] = (),
    pair: bool = False,
) -> Plan | None:
    """Return the next job of a run, or None while its lanes or buffer are not free.

    ``begin``: it is its first, in these lanes. ``pair``: the run is one of two at once.
    """
    assert model.facts is not None
    trial = model.facts.trials[run.trial]
    lanes = begin or run.lanes
    decoded = run.done_tokens - len(trial.prompt)
    task = "prefill" if run.done_tokens == 0 else "decode"
    tokens = trial.prompt if task == "prefill" else trial.forced[decoded : decoded + 1]
    submodel = submodel_of(state, model, trial, task, tokens=len(tokens), rows=len(lanes))
    buffer = None if submodel is None else free_buffer(model, submodel)
    if buffer is None:
        return None
    rows = tuple(
        SubmitRow(lane=lane, owner=run.number, tokens=tokens, start=run.done_tokens, sampling=None)
        for lane in lanes
    )
    return Plan(
        task=task,
        origin=run.origin,
        model=model.number,
        buffer=buffer,
        rows=rows,
        bind=bool(begin),
        trial=run.trial,
        pair=pair,
    )


def submodel_of(
    state: State, model: ModelState, trial: Trial, task: str, *, tokens: int, rows: int = 0
) -> SubmodelFacts | None:
    """Return the submodel that runs a trial: of its batch, or the next larger that may, or None.

    ``rows``: in how many of its rows, 0 for as many as its batch.
    """
    facts = model.facts
    assert facts is not None
    rows = rows or trial.batch
    for submodel in facts.tasks[task]:
        fits = submodel.tokens_max >= tokens and submodel.batch_max >= trial.batch
        if fits and takes_rows(state, facts, submodel, rows):
            return submodel
    return None


def judge_trial(draft: Draft, job: JobState, results: tuple[RowResult, ...]) -> None:
    """Compare golden rows, move the run on, and publish the model after the last one."""
    model = draft.state.models[job.model]
    run = model.runs[job.rows[0].owner]
    assert model.facts is not None
    if model.state != "warming":
        end_run(draft, model, run)
        return
    for row, result in zip(job.rows, results, strict=True):
        lane = draft.state.lanes[row.lane]
        if result.verdict not in ("", "equal"):
            said = f"golden {run.trial} at position {row.to_tokens - 1}: {result.verdict}"
            golden_differed(draft, model, said)
            return
        if lane.state != "ready" or lane.length_tokens != row.to_tokens:
            fail_load(draft, model, f"the KV of trial {run.trial} is in doubt")
            return
    trial = model.facts.trials[run.trial]
    if run.done_tokens == len(trial.prompt) + len(trial.forced):
        end_run(draft, model, run)
        if next_trial(draft.state, model) is None:
            publish(draft, model)


def end_run(draft: Draft, model: ModelState, run: TrialRun) -> None:
    """Give the lanes of a run back, unless a job still names them or they are unknown (E19)."""
    if all(draft.state.lanes[number].state == "ready" for number in run.lanes):
        evict(draft, run.lanes)
