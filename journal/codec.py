"""Inputs and events as compact JSON, by an explicit table of names and versions.

Theory of operation. A step is stored as three texts. ``input_kind`` is a name of the table below,
the class name. ``input`` is an array: the version of that kind, then the fields in the order of the
class, nested values as arrays of their fields; the rows of a completion stand by columns
(``wire.py``), its instants as differences (``instants.py``). How ``events`` are written stands in
``events.py``.

A kind changes by adding a field at its end and raising its version, also when the field belongs to
a value inside it. Nothing is guessed when reading: an unknown name or version, a missing or extra
field or a wrong type is a JournalFormatError. What is written is read back before it is stored, so
that a value of the wrong type stops the engine at the step that made it, and not the reader a week
later; two texts of a kind that differ in nothing but the digits of their numbers are read alike, so
one of them is read back. Rows of the usual form are written at once by C, where that was built
(``native_text.py``): it takes values of the very types alone, so its texts need no such proof.
Arrays inside ``data`` come back as tuples.

With ``tokens="digest"`` (decision 5) a journal holds no text of a client and no tokens
of a request: a prompt is ``{"count", "sha256"}`` (of its ids as little-endian signed 64-bit
integers), stop strings are ``{"count"}``, a client's own id and a sampled token are null, and lists
that name tokens (stop tokens, biases, allowed tokens, log-probabilities) are left out. Sampled
tokens are not digested: the hash of one token is undone by trying the vocabulary. Reading gives as
many NO_TOKEN ids and empty strings; that is enough to fold, not to decide again.
"""

import hashlib
import struct
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import attrs
import msgspec

from laneway.engine import inputs
from laneway.engine.errors import ConfigurationError, JournalFormatError, JournalWriteError
from laneway.engine.inputs import NO_TOKEN, Input
from laneway.engine.sampling import Sampling
from laneway.journal.edges import DECLARED, Edges
from laneway.journal.events import UNFIT, CodedEvents, WordyEvents, encode_json
from laneway.journal.instants import TIMES, is_written_so
from laneway.journal.native_text import BUILT, Texts, UsualRow, nothing
from laneway.journal.wire import Shape, columns_shape, value_shape
from laneway.statemachines import Event

TOKENS_MODES = ("full", "digest")
PROMPT_TOKENS_MAX = 1 << 24
"""Tokens a digest may stand for; a damaged count must not fill the memory."""

KINDS: Mapping[str, tuple[int, type]] = MappingProxyType(
    {
        "EngineStarted": (3, inputs.EngineStarted),
        "LoadRequested": (1, inputs.LoadRequested),
        "ReplaceRequested": (1, inputs.ReplaceRequested),
        "LoadBackRequested": (1, inputs.LoadBackRequested),
        "ArtifactValidated": (3, inputs.ArtifactValidated),
        "ArtifactRefused": (1, inputs.ArtifactRefused),
        "ModelConfigured": (1, inputs.ModelConfigured),
        "ConfigureFailed": (1, inputs.ConfigureFailed),
        "ModelReleased": (1, inputs.ModelReleased),
        "ReleaseFailed": (1, inputs.ReleaseFailed),
        "UnloadRequested": (1, inputs.UnloadRequested),
        "RequestSubmitted": (2, inputs.RequestSubmitted),
        "CancelRequested": (1, inputs.CancelRequested),
        "TimePassed": (1, inputs.TimePassed),
        "InboxOverflowed": (1, inputs.InboxOverflowed),
        "SubmitAccepted": (1, inputs.SubmitAccepted),
        "SubmitRefused": (1, inputs.SubmitRefused),
        "SubmitDoubtful": (1, inputs.SubmitDoubtful),
        "SubmitWithdrawn": (1, inputs.SubmitWithdrawn),
        "KvApplyFailed": (2, inputs.KvApplyFailed),
        "KvApplied": (1, inputs.KvApplied),
        "JobProgressed": (1, inputs.JobProgressed),
        "Completed": (1, inputs.Completed),
        "DeviceFaulted": (1, inputs.DeviceFaulted),
        "JobStalled": (1, inputs.JobStalled),
        "CancelTold": (1, inputs.CancelTold),
        "StatusDoubted": (1, inputs.StatusDoubted),
        "HealthProbed": (1, inputs.HealthProbed),
        "CapabilitiesLost": (1, inputs.CapabilitiesLost),
        "ThrottleTold": (1, inputs.ThrottleTold),
        "BufferRestored": (1, inputs.BufferRestored),
        "RestoreFailed": (1, inputs.RestoreFailed),
        "CountersRead": (1, inputs.CountersRead),
        "MemoryBuried": (1, inputs.MemoryBuried),
        "ResetFinished": (1, inputs.ResetFinished),
        "CloseRequested": (1, inputs.CloseRequested),
        "DeviceClosed": (1, inputs.DeviceClosed),
    }
)


class _PromptDigest(msgspec.Struct, forbid_unknown_fields=True):
    count: int
    sha256: str


class _StopCount(msgspec.Struct, forbid_unknown_fields=True):
    count: int


@attrs.frozen
class _Kind:
    name: str
    version: int
    shape: Shape
    decoder: msgspec.json.Decoder[Any]


DIGITS = b"0123456789"
PROVEN_MAX, PROVEN_BYTES_MAX = 256, 256
"""Forms of a kind that are known to be read back, and the size of one."""


class _Writer:
    """How inputs of one kind are written; ``proven`` are texts without digits that were read."""

    def __init__(self, kind: _Kind) -> None:
        assert kind.shape.to_wire is not None
        self.name = kind.name
        self.to_wire = kind.shape.to_wire
        self.proven: set[bytes] = set()
        self._read = kind.decoder.decode

    def prove(self, text: bytes) -> None:
        """Read a text back. Raises: what `msgspec` raises."""
        self._read(text)
        form = text.translate(None, DIGITS)
        if len(form) <= PROVEN_BYTES_MAX:
            if len(self.proven) >= PROVEN_MAX:
                self.proven.clear()
            self.proven.add(form)


class Codec:
    """Encoder and decoder of one journal; ``tokens`` is ``full`` or ``digest``."""

    def __init__(
        self, tokens: str = "full", *, edges: Edges | None = DECLARED, texts: Texts = BUILT
    ) -> None:
        """Take the table of the mode, and the codes of the file (None: it has none).

        Raises: ConfigurationError for an unknown mode.
        """
        if tokens not in TOKENS_MODES:
            raise ConfigurationError(
                f"journal tokens must be one of {', '.join(TOKENS_MODES)}, not {tokens!r}"
            )
        self.tokens = tokens
        self._kinds = _compile_table(tokens)
        self._writers = {cls: _Writer(self._kinds[name]) for name, (_, cls) in KINDS.items()}
        self._plain_completion = _plain_completions(tokens).decode
        self._events = WordyEvents() if edges is None else CodedEvents(edges, texts)
        self.usual_row: Callable[[bytes, int, int, Input, Sequence[Event]], UsualRow | None]
        """Return what a usual row has behind a chain (previous, step, at_ns, taken, events).

        None for any other row: ``encode_input`` and ``encode_events`` write it, or refuse it.
        """
        if isinstance(self._events, CodedEvents) and tokens == "full":
            versions = tuple(KINDS[kind][0] for kind in texts.kinds)
            self.usual_row = partial(texts.row, versions, self._events.codes)
        else:
            self.usual_row = nothing
        self.encode_events: Callable[[Sequence[Event]], bytes] = self._events.encode
        """Return the JSON of a step's events.

        Raises: JournalWriteError for an event without entities or with data that is not JSON.
        """

    def encode_input(self, taken: Input) -> tuple[str, bytes]:
        """Return (name, JSON) of an input.

        Raises: JournalWriteError for a class outside the table or a field of the wrong type.
        """
        writer = self._writers.get(type(taken))
        if writer is None:
            raise JournalWriteError(f"{type(taken).__name__} is not an input the journal knows")
        try:
            text = encode_json(writer.to_wire(taken))
            if text.translate(None, DIGITS) not in writer.proven:
                writer.prove(text)
        except UNFIT as error:
            raise JournalWriteError(f"input {writer.name} cannot be stored: {error}") from error
        return writer.name, text

    def decode_input(self, name: str, text: bytes) -> Input:
        """Return the input. Raises: JournalFormatError."""
        kind = self._kinds.get(name)
        if kind is None or kind.shape.from_wire is None:
            raise JournalFormatError(f"unknown input kind {name!r}: made by a newer laneway?")
        try:
            taken: Input = kind.shape.from_wire(kind.decoder.decode(text))
        except UNFIT as error:
            raise JournalFormatError(_explain_input(kind, text, error)) from error
        return taken

    def plain_completion(
        self, text: bytes, *, exact: bool = True
    ) -> tuple[int, tuple[int, ...]] | None:
        """Return job and tokens of a Completed whose rows say nothing but their tokens.

        None for any other text; if ``exact``, also for one that a journal would not write.
        """
        try:
            wire = self._plain_completion(text)
        except UNFIT:
            return None
        if exact and not (is_written_so(wire[-1]) and encode_json(wire) == text):
            return None
        tokens: tuple[int, ...] = wire[-2][0]
        return wire[1], tokens

    def decode_events(self, text: bytes) -> tuple[Event, ...]:
        """Return a step's events. Raises: JournalFormatError."""
        try:
            return self._events.decode(text)
        except UNFIT as error:
            raise JournalFormatError(f"events: {error}") from error


@cache
def _compile_table(tokens: str) -> Mapping[str, _Kind]:
    """Compile the table of one mode: a constant that takes milliseconds to make."""
    special = dict(_DIGEST_FIELDS) if tokens == "digest" else {}
    special[inputs.Completed, "times"] = TIMES
    special[inputs.Completed, "rows"] = columns_shape(inputs.RowResult, special=special)
    return MappingProxyType(
        {name: _compile(name, version, cls, special) for name, (version, cls) in KINDS.items()}
    )


@cache
def _plain_completions(tokens: str) -> msgspec.json.Decoder[Any]:
    """Return what reads a Completed whose rows are one column, that of their tokens."""
    checked = typing.get_args(_compile_table(tokens)["Completed"].shape.checked)
    *head, _, times = checked
    return msgspec.json.Decoder(types.GenericAlias(tuple, (*head, tuple[tuple[int, ...]], times)))


def _compile(name: str, version: int, cls: type, special: Mapping[Any, Shape]) -> _Kind:
    shape = value_shape(cls, special=special, version=version)
    return _Kind(name, version, shape, msgspec.json.Decoder(shape.checked))


def _explain_input(kind: _Kind, text: bytes, error: Exception) -> str:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        found = None
    if isinstance(found, list) and found and found[0] != kind.version:
        return (
            f"input {kind.name} has version {found[0]!r}, this laneway reads {kind.version}:"
            " use the laneway that wrote it, or a newer one"
        )
    return f"input {kind.name}: {error}"


# ---------------------------------------------------------------------------- digest


def _digest_prompt(prompt: tuple[int, ...]) -> _PromptDigest:
    packed = struct.pack(f"<{len(prompt)}q", *prompt)
    return _PromptDigest(len(prompt), hashlib.sha256(packed).hexdigest())


def _blank_prompt(digest: _PromptDigest) -> tuple[int, ...]:
    return (NO_TOKEN,) * _bounded(digest.count)


def _blank_stop(stop: _StopCount) -> tuple[str, ...]:
    return ("",) * _bounded(stop.count)


def _bounded(count: int) -> int:
    if not 0 <= count <= PROMPT_TOKENS_MAX:
        raise ValueError(f"a digest of {count} is out of range")
    return count


_DIGEST_FIELDS: Mapping[Any, Shape] = MappingProxyType(
    {
        (inputs.RequestSubmitted, "prompt"): Shape(_PromptDigest, _digest_prompt, _blank_prompt),
        (inputs.RequestSubmitted, "stop"): Shape(
            _StopCount, lambda stop: _StopCount(len(stop)), _blank_stop
        ),
        (inputs.RequestSubmitted, "client_id"): Shape(None, lambda client_id: None),
        (inputs.RowResult, "token"): Shape(
            int | None,
            lambda token: NO_TOKEN if token == NO_TOKEN else None,
            lambda token: NO_TOKEN,
        ),
        (inputs.RequestSubmitted, "stop_token_ids"): Shape(tuple[()], lambda ids: ()),
        (inputs.RowResult, "logprobs"): Shape(tuple[()], lambda pairs: ()),
        (Sampling, "logit_bias"): Shape(tuple[()], lambda pairs: ()),
        (Sampling, "allowed_token_ids"): Shape(None, lambda ids: None),
    }
)
