"""The clients' side of the engine: who listens to which request, and the text they get.

Theory of operation. A request has one stream for its submitter and one for each ``attach``; all are
given the same, in order. What was delivered before a stream was attached is repeated from the first
one. After a restart the open requests have a first stream that nobody reads, and it is empty until
the request goes on with a model: only a model has a text side, which is rebuilt from the recorded
tokens (decision 12). Then every stream is given what was durable, once, and the new tokens behind
it. The lock keeps deliveries (engine thread) and attachments (callers) apart.
"""

import threading
from collections.abc import Callable, Iterable

import attrs

from laneway.engine.effects import Conclude, Deliver
from laneway.engine.errors import RequestRejectedError
from laneway.engine.inputs import RequestSubmitted
from laneway.engine.ports import TextPort
from laneway.engine.remembering import Pairs, Remembered
from laneway.engine.state import State
from laneway.engine.stream import Stream


@attrs.frozen
class Recorded:
    """What the journal had of an open request when the engine started."""

    stop: tuple[str, ...]
    min_tokens: int
    tokens: tuple[int, ...]
    logprobs: tuple[Pairs, ...]


class Clients:
    """The streams of live requests.

    ``text`` gives the text side of a model, None if it has none any more; ``cancel`` and ``drive``
    are what a stream asks of the engine.
    """

    def __init__(
        self,
        *,
        text: Callable[[int | None], TextPort | None],
        cancel: Callable[[int], None],
        drive: Callable[[], None] | None,
    ) -> None:
        self._text = text
        self._cancel = cancel
        self._drive = drive
        self._lock = threading.Lock()
        self._streams: dict[int, list[Stream]] = {}
        self._models: dict[int, int] = {}
        self._recorded: dict[int, Recorded] = {}

    def make(
        self, request: int, prompt: tuple[int, ...], *, client_id: str | None, first: int = 0
    ) -> Stream:
        """Return a new stream that is told nothing yet."""
        return Stream(
            request,
            prompt=prompt,
            has_text=False,
            client_id=client_id,
            cancel=self._cancel,
            drive=self._drive,
            from_position=first,
        )

    def open(self, taken: RequestSubmitted, model: int | None) -> Stream:
        """Return the stream of a new request.

        Raises: RequestRejectedError for stop strings that cannot be searched for.
        """
        stream = self.make(taken.request, taken.prompt, client_id=taken.client_id)
        text = self._text(model)
        if text is not None and model is not None:
            try:
                text.open(taken.request, stop=taken.stop, min_tokens=taken.min_tokens)
            except ValueError as refused:
                raise RequestRejectedError(
                    str(refused), reason="stop", http_status=400
                ) from refused
            self._models[taken.request] = model
            stream.has_text = text.has_text
        self._streams[taken.request] = [stream]
        return stream

    # ------------------------------------------------------------------ a restart

    def restore(self, state: State, remembered: Remembered) -> None:
        """Give every open request of an earlier life a stream that nobody reads."""
        for number, request in state.requests.items():
            stream = self.make(number, request.prompt, client_id=request.client_id)
            self._streams[number] = [stream]
            self._recorded[number] = Recorded(
                stop=request.stop,
                min_tokens=request.min_tokens,
                tokens=tuple(request.tokens),
                logprobs=tuple(remembered.logprobs.get(number, ())),
            )

    @property
    def awaits_model(self) -> bool:
        """Whether a request of an earlier life has no model yet, and so no text."""
        return bool(self._recorded)

    def go_on(self, request: int, model: int) -> None:
        """Rebuild the text of a request that goes on with a model after a restart, if it does."""
        recorded = self._recorded.get(request)
        text = self._text(model)
        if recorded is None or text is None:
            return
        tokens, stop = recorded.tokens, recorded.stop
        text.open(request, stop=stop, tokens=tokens, min_tokens=recorded.min_tokens)
        self._models[request] = model
        for stream in self._streams[request]:
            stream.has_text = text.has_text
        self._tell_recorded(request, [text.take(request, place) for place in range(len(tokens))])

    def _tell_recorded(self, request: int, pieces: list[str]) -> None:
        """Give all streams of a request what was durable before the restart."""
        recorded = self._recorded.pop(request)
        logprobs = recorded.logprobs or ((),) * len(recorded.tokens)
        with self._lock:
            for position, row in enumerate(zip(recorded.tokens, pieces, logprobs, strict=True)):
                for stream in self._streams[request]:
                    stream.deliver(position, *row)

    def attach(self, request: int, *, from_position: int) -> Stream | None:
        """Return one more stream of a request; None if it is not open."""
        with self._lock:
            streams = self._streams.get(request)
            if streams is None:
                return None
            stream = streams[0].another(from_position)
            streams.append(stream)
            return stream

    def ended(
        self, remembered: Remembered, model: int | None, tokens: str, *, from_position: int
    ) -> Stream:
        """Return a stream of a request that has ended, filled from what the journal has of it.

        Raises: RequestRejectedError if the journal has no such request, or only digests.
        """
        number, asked = remembered.keep, remembered.asked
        if asked is None or remembered.ending is None:
            raise RequestRejectedError(
                f"the journal has no request/{number}", reason="unknown_request", http_status=404
            )
        if tokens != "full":
            raise RequestRejectedError(
                f"the journal keeps only digests of the tokens of request/{number}",
                reason="tokens_not_kept",
                http_status=410,
            )
        text = self._text(model)
        stream = self.make(number, asked.prompt, client_id=asked.client_id, first=from_position)
        own = tuple(remembered.tokens)
        pieces, rest = [""] * len(own), ""
        if text is not None:
            stream.has_text = text.has_text
            text.open(number, stop=asked.stop, tokens=own, min_tokens=asked.min_tokens)
            pieces = [text.take(number, place) for place in range(len(own))]
            rest = text.finish(number, tokens=len(own))
        logprobs = remembered.logprobs.get(number) or [()] * len(own)
        for position, row in enumerate(zip(own, pieces, logprobs, strict=True)):
            stream.deliver(position, *row)
        stream.conclude(remembered.conclude(), rest)
        return stream

    # ------------------------------------------------------------------ the engine's side

    def model_of(self, request: int) -> int | None:
        """Return the model that a request was given a text side of, or None."""
        return self._models.get(request)

    def deliver(self, effects: Iterable[Deliver]) -> None:
        """Hand durable tokens to whoever listens, in order (engine thread)."""
        models, streams = self._models, self._streams
        model: int | None = None
        with self._lock:
            for effect in effects:
                request, position, token = effect.request, effect.position, effect.token
                if models[request] != model:
                    model = models[request]
                    text = self._text(model)
                    assert text is not None
                    take = text.take
                piece = take(request, position, token)
                for stream in streams[request]:
                    stream.deliver(position, token, piece, effect.logprobs)

    def conclude(self, effect: Conclude) -> None:
        """Tell whoever listens the ending (engine thread)."""
        request = effect.request
        if request in self._recorded:  # it ends before a model came for it
            self._tell_recorded(request, [""] * len(self._recorded[request].tokens))
        text = self._text(self._models.pop(request, None))
        rest = "" if text is None else text.finish(request, tokens=effect.completion_tokens)
        with self._lock:
            for stream in self._streams.pop(request):
                stream.conclude(effect, rest)

    def break_off(self, cause: BaseException) -> None:
        """Tell everybody who still listens that nothing follows."""
        with self._lock:
            for streams in self._streams.values():
                for stream in streams:
                    stream.break_off(cause)
            self._streams.clear()
