"""What only the simulated board can do: step its clock, take faults, show what happened inside.

None of this is part of the engine's view of a device; tests, benchmarks and the soak use it, and
``NpurtDevice`` moves a stepped clock through it.

Source: native/npurt_sim.h.
"""

import ctypes
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from laneway.adapters import npurt
from laneway.adapters.binding import Library
from laneway.adapters.calls import DeviceCalls
from laneway.engine.errors import ConfigurationError

_STEP_ONE, _STEP_TIME, _STEP_IDLE, _STEP_END = 1, 2, 4, 6
_CLOCK_NEXT = 2
_NO_EVENT = (1 << 64) - 1
_VIOLATIONS_MAX = 1024


@attrs.frozen(kw_only=True)
class Violation:
    """A mistake of the host that the simulated board saw; ``ticket`` 0 if it is about no job."""

    ticket: int
    when_ns: int
    code: int
    text: str

    @property
    def kind(self) -> str:
        """What it is, in one of the words that native/npurt_sim.h lists."""
        return self.text.partition(" ")[0]


class SimulatorControls:
    """The simulator's own entries for one opened board."""

    def __init__(self, calls: DeviceCalls) -> None:
        self._calls = calls

    @property
    def stepped(self) -> bool:
        """Whether the board's time moves only by stepping."""
        answer = self._calls.attempt("npurt_sim_step", _STEP_TIME, 0, None)
        return answer.ok

    def next_event_ns(self) -> int | None:
        """Return the instant of the next event, or None."""
        told = ctypes.c_uint64(0)
        self._calls.call("npurt_sim_clock", _CLOCK_NEXT, 0, ctypes.byref(told))
        return None if told.value == _NO_EVENT else told.value

    def step_event(self) -> bool:
        """Let the next event happen; return False if there is none."""
        return self._step(_STEP_ONE, 0) > 0

    def step_to(self, instant_ns: int) -> None:
        """Let everything up to an instant happen; the clock stands there afterwards."""
        self._step(_STEP_TIME, instant_ns)

    def step_to_end(self, until_ns: int) -> bool:
        """Let everything up to an instant happen, or up to the first end of a job.

        The clock stays at the last event; return False if there was none.
        """
        return self._step(_STEP_END, until_ns) > 0

    def step_idle(self) -> int:
        """Let everything happen that will; return how many events that was."""
        return self._step(_STEP_IDLE, 0)

    def _step(self, how: int, argument: int) -> int:
        fired = ctypes.c_uint32(0)
        self._calls.call("npurt_sim_step", how, argument, ctypes.byref(fired))
        return fired.value

    def set_faults(self, plan: str) -> None:
        """Replace the fault plan; empty means no faults.

        Raises: ConfigurationError with the line that is wrong.
        """
        answer = self._calls.attempt("npurt_sim_faults", plan.encode())
        if answer.code == npurt.Code.INVALID_ARG:
            raise ConfigurationError(f"fault plan: {answer.words or answer.reason}")
        self._calls.library.check(answer, about="fault plan")

    def arm(self) -> None:
        """Arm the plan now; publishing a model does it otherwise."""
        self._calls.call("npurt_sim_arm")

    def violations(self) -> tuple[Violation, ...]:
        """Return the host's mistakes so far, oldest first."""
        events = (npurt.Event * _VIOLATIONS_MAX)()
        for event in events:
            event.h.struct_size = ctypes.sizeof(npurt.Event)
        count = ctypes.c_uint32(_VIOLATIONS_MAX)
        self._calls.call(
            "npurt_sim_violations", events, ctypes.sizeof(npurt.Event), ctypes.byref(count)
        )
        return tuple(
            Violation(
                ticket=event.ticket,
                when_ns=event.when_ns,
                code=event.code,
                text=event.text.decode("utf-8", "replace"),
            )
            for event in events[: min(count.value, _VIOLATIONS_MAX)]
        )

    def trace(self) -> str:
        """Return everything that happened on the board, one event a line."""
        need = ctypes.c_uint64(0)
        self._calls.call("npurt_sim_trace", None, 0, ctypes.byref(need))
        text = ctypes.create_string_buffer(max(1, need.value))
        self._calls.call("npurt_sim_trace", text, len(text), ctypes.byref(need))
        return text.value.decode("utf-8", "replace")

    def kv_digest(self, bank: ctypes.c_void_p, lane: int) -> int:
        """Return the digest of a device lane's committed KV."""
        digest = ctypes.c_uint64(0)
        self._calls.library.call("npurt_sim_kv_digest", bank, lane, ctypes.byref(digest))
        return digest.value

    def logits(
        self, ticket: int, *, row: int, position: int, vocabulary: int
    ) -> NDArray[np.float32]:
        """Return float32 logits of a job's own token, with ``capture=1``, until it is retired.

        Shapes: [vocabulary].
        """
        out = np.empty(vocabulary, np.float32)
        pointer = out.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        self._calls.call("npurt_sim_logits", ticket, row, position, pointer, vocabulary)
        return out

    def routing(
        self, ticket: int, *, row: int, position: int, layer: int, experts_per_token: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the experts and weights of a job's own token, with ``capture=1``."""
        experts = np.empty(experts_per_token, np.int32)
        weights = np.empty(experts_per_token, np.float32)
        self._calls.call(
            "npurt_sim_routing",
            *(ticket, row, position, layer),
            experts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            weights.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
            experts_per_token,
        )
        return experts, weights


def recompute(
    library: Library, folder: str, tokens: Sequence[int], *, vocabulary: int
) -> tuple[NDArray[np.uint16], int]:
    """Compute the logits after the last token from nothing, and the KV digest; needs no board.

    Shapes: logits u16[vocabulary], BF16 bits.
    """
    ids = (ctypes.c_int32 * len(tokens))(*tokens)
    logits = np.empty(vocabulary, np.uint16)
    digest = ctypes.c_uint64(0)
    library.call(
        "npurt_sim_oracle",
        *(folder.encode(), ids, len(tokens)),
        logits.ctypes.data_as(ctypes.POINTER(ctypes.c_uint16)),
        ctypes.byref(digest),
    )
    return logits, digest.value
