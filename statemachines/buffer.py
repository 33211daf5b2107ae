"""The life of a buffer.

Who may touch its memory, and when it may be used again (R4.3 with G1, G2, G3, G13).

A buffer is a whole: runtime objects plus the arena behind them (E1). From `submitted` until its job
is terminal, quiescent, retired and the buffer restored and wiped, nobody on the host touches it
(E3, E4). After an exception, a timeout or a reset it is `quarantined` and comes back only as new
memory for a new generation (R4.5, E5). Only `release` and `rebuild` make a used buffer free.
"""

from laneway.statemachines.declare import Edge, declare

BUFFER = declare(
    name="buffer",
    meaning="pool item: input and output runtime objects plus their backing memory",
    initial="free",
    states={
        "free": "clean and unowned; may be acquired in its own epoch and generation",
        "preparing": "owned by a job that is being filled or handed over",
        "submitted": "the device may read and write it",
        "running": "seen running on the device; same ownership as submitted",
        "completing": "the device is done; output is read, then restored and wiped",
        "quarantined": "may still be touched by DMA or holds doubtful state; left only by rebuild",
    },
    final=(),
    edges=(
        Edge("acquire", ("free",), "preparing", "planning.plan", "R4.3, E1, G3"),
        Edge("submit", ("preparing",), "submitted", "submitting.accept", "R4.3, G13"),
        Edge("refuse", ("preparing",), "free", "submitting.refuse", "R4.3, R7.4"),
        Edge("withdraw", ("preparing",), "free", "submitting.withdraw", "G2"),
        Edge("run", ("submitted",), "running", "submitting.progress", "R4.3"),
        Edge(
            "complete",
            ("submitted", "running"),
            "completing",
            "completing.complete",
            "R4.3",
            "from submitted it is the fast path: done before it was seen running",
        ),
        Edge("release", ("completing",), "free", "completing.restore", "R4.4, E4"),
        Edge(
            "quarantine",
            ("preparing", "submitted", "running", "completing"),
            "quarantined",
            "faulting.fault",
            "R4.3, R4.5, G1, E5",
        ),
        Edge(
            "abandon",
            ("preparing", "submitted", "running", "completing"),
            "quarantined",
            "starting.start",
            "G21",
            "the process that owned the memory is gone",
        ),
        Edge(
            "rebuild",
            ("quarantined", "free"),
            "free",
            "recovering.configured_again",
            "R4.3, R4.5, G3, G12",
            "new memory for a new generation",
        ),
    ),
)
