"""Turn what callers hand in into inputs: prompts into tokens, seconds into instants (R7.2)."""

from collections.abc import Callable

import attrs

from laneway.engine.errors import RequestRejectedError
from laneway.engine.inputs import RequestSubmitted
from laneway.engine.limits import SECOND
from laneway.engine.ports import TextPort
from laneway.engine.request import Request


def tokens_of(request: Request, text: TextPort | None) -> tuple[int, ...]:
    """Return the prompt of a request as tokens; none where there is no model to ask.

    Raises: RequestRejectedError for text that has no tokens with this model.
    """
    if not isinstance(request.prompt, str):
        return tuple(request.prompt)
    if text is None:
        return ()
    try:
        return text.encode(request.prompt)
    except ValueError as refused:
        raise RequestRejectedError(str(refused), reason="prompt", http_status=400) from refused


def submitted(
    request: Request,
    *,
    number: int,
    prompt: tuple[int, ...],
    model: int | None,
    now_ns: int,
    draw_seed: Callable[[], int],
) -> RequestSubmitted:
    """Return the input that a request is; a seed is drawn where none is given."""
    sampling = request.sampling
    if sampling.seed is None:
        sampling = attrs.evolve(sampling, seed=draw_seed())
    deadline_ns = None
    if request.deadline_s is not None:
        deadline_ns = now_ns + int(request.deadline_s * SECOND)
    return RequestSubmitted(
        request=number,
        alias=request.model,
        prompt=prompt,
        max_tokens=request.max_tokens,
        sampling=sampling,
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        deadline_ns=deadline_ns,
        client_id=request.client_id,
        logprobs=request.logprobs,
        stop_token_ids=request.stop_token_ids,
        min_tokens=request.min_tokens,
        model=model or 0,
        priority=request.priority,
        tenant=request.tenant,
        on_fault=request.on_fault,
    )
