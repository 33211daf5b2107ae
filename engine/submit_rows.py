"""Make the row of a request's next job, with what the sampler needs of the request.

A plan has its rows as the device gets them. What is drawn of a row is a function of the row alone,
so it does not matter which thread draws it, or beside whom.
"""

from collections.abc import Iterable

from laneway.engine.effects import KvOperation, SubmitJob, SubmitRow
from laneway.engine.state import RequestState, State, end_tokens, known_tokens
from laneway.engine.throttling import patience


def decode_rows(state: State, requests: Iterable[RequestState]) -> list[SubmitRow]:
    """Return a step of one token for each request that decodes: of its last one."""
    lanes = state.lanes
    rows: list[SubmitRow] = []
    for request in requests:
        lane = request.lane
        assert lane is not None
        start = lanes[lane].length_tokens
        if request.catching_up:
            rows.append(_caught_up_row(state, request, lane, start))
        else:
            rows.append(drawn_row(state, request, lane, (request.tokens[-1],), start))
    return rows


def _caught_up_row(state: State, request: RequestState, lane: int, start: int) -> SubmitRow:
    """Return a step of a token that the request has but its lane has not."""
    tokens = known_tokens(request, start, start + 1)
    if start + 1 < request.prefill_tokens:
        return SubmitRow(lane, request.number, tokens, start, None)
    return drawn_row(state, request, lane, tokens, start)


def drawn_row(
    state: State, request: RequestState, lane: int, tokens: tuple[int, ...], start: int
) -> SubmitRow:
    """Return a row of which a token is drawn.

    Why ``output`` is copied only for penalties: the tokens of a request grow, and a row is a value.
    """
    sampling = request.sampling
    generated = len(request.tokens)
    return SubmitRow(
        lane,
        request.number,
        tokens,
        start,
        sampling,
        generated,
        request.prompt if sampling.counts_prompt else (),
        tuple(request.tokens) if sampling.counts_output else (),
        () if generated >= request.min_tokens else _masked(state, request),
        request.logprobs,
        bool(request.stop),
    )


def _masked(state: State, request: RequestState) -> tuple[int, ...]:
    """Return the tokens that would end a request that has not its least number of tokens yet."""
    facts = state.models[request.model].facts
    assert facts is not None
    return tuple(token for token in end_tokens(state, request) if token < facts.vocabulary)


def submit_job(
    state: State,
    *,
    model: int,
    generation: int,
    job: int,
    task: str,
    origin: str,
    buffer: int,
    operations: tuple[KvOperation, ...],
    rows: tuple[SubmitRow, ...],
    places: tuple[int, ...] = (),
) -> SubmitJob:
    """Return the submit of a job, with the times after which it is taken to hang (E16)."""
    limits, stretch = state.limits, patience(state)
    return SubmitJob(
        job=job,
        model=model,
        epoch=state.device.epoch,
        generation=generation,
        buffer=buffer,
        task=task,
        origin=origin,
        operations=operations,
        rows=rows,
        suspect_after_ns=limits.hang_suspect_ns * stretch,
        confirm_after_ns=limits.hang_confirm_ns * stretch,
        cap_after_ns=limits.hang_cap_ns * stretch,
        places=places,
    )
