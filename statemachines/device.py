"""The life of a device as the engine sees it: may it be given work (R14, G4, G7, G12).

A fault or a suspected hang stops submissions at once (G4, `suspect`). A slow device that turns out
to be alive is absolved; for a fault the recovery ladder chooses a rung (`escalate`), resets, and
proves what it did: only a verified reset leads on to `recovering`, only golden to `serving`. When
the budgets are spent it is `lost` (G7): nothing is submitted any more, readiness is false, every
client is told. While a buffer is
quarantined or a lane unknown the device is `degraded`. A device is closed by drain, or by the
process that finds it abandoned (G21).
"""

from laneway.statemachines.declare import Edge, declare

DEVICE = declare(
    name="device",
    meaning="a board behind the C ABI, opened by one engine",
    initial="closed",
    states={
        "closed": "not opened by this engine",
        "serving": "may be given work up to its in-flight ceiling",
        "degraded": "may be given one job at a time until it is requalified",
        "suspect": "a fault or a hang is being looked at; no submissions",
        "draining": "the engine closes; what is in flight ends first",
        "closing": "nothing is left to do; the handle is being closed",
        "resetting": "a reset runs; nothing else is called",
        "recovering": "reset done; golden and warm-up decide",
        "lost": "out of use for this engine",
    },
    final=(),
    edges=(
        Edge("open", ("closed",), "serving", "starting.start", "R3.2"),
        Edge(
            "degrade",
            ("serving",),
            "degraded",
            "faulting.degrade",
            "R5.3, G12",
            "a buffer is quarantined or a lane unknown",
        ),
        Edge(
            "requalify",
            ("degraded",),
            "serving",
            "faulting.requalify",
            "R5.3, G12",
            "nothing is quarantined or unknown any more",
        ),
        Edge(
            "suspect", ("serving", "degraded", "draining"), "suspect", "faulting.suspect", "G4, E16"
        ),
        Edge("absolve", ("suspect",), "serving", "faulting.absolve", "E16"),
        *(
            Edge(
                "distrust",
                (state,),
                state,
                "counting.compare",
                "E14",
                "its counters differed twice in a row: nothing is believed of them from here on",
            )
            for state in ("serving", "degraded", "draining")
        ),
        *(
            Edge(
                "restrict",
                (state,),
                state,
                "trusting.restrict",
                "R5.3, E11",
                "an anomaly: one job in flight from here on",
            )
            for state in ("serving", "degraded", "suspect", "draining")
        ),
        Edge(
            "relax",
            ("serving",),
            "serving",
            "trusting.relax",
            "R5.3, E11",
            "two golden runs in flight at once were equal: two jobs in flight again",
        ),
        Edge("drain", ("serving", "degraded"), "draining", "closing.close", "R14.6"),
        Edge(
            "escalate",
            ("suspect", "resetting", "recovering"),
            "suspect",
            "recovering.escalate",
            "R14.7",
            "a rung of the ladder is chosen: the first, or the next after one that did not help",
        ),
        Edge("reset", ("suspect",), "resetting", "recovering.run_reset", "R14.7, G2, G4"),
        Edge("recover", ("resetting",), "recovering", "recovering.reset_finished", "G5"),
        Edge("serve", ("recovering",), "serving", "recovering.serve_again", "G5, E25"),
        Edge(
            "lose",
            ("serving", "degraded", "suspect", "draining", "resetting", "recovering"),
            "lost",
            "recovering.lose_device",
            "G7, R14.6",
        ),
        Edge("shut", ("draining", "lost"), "closing", "closing.shut_if_idle", "D13"),
        Edge("close", ("closing",), "closed", "closing.closed", "D13"),
        Edge(
            "abandon",
            (
                "serving",
                "degraded",
                "suspect",
                "draining",
                "closing",
                "resetting",
                "recovering",
                "lost",
            ),
            "closed",
            "starting.start",
            "G21",
            "the process that had it open is gone",
        ),
    ),
)
