"""The life of a job.

One submission to the device, decided, handed over, and accounted for exactly once.

Four facts about a job are separate and never inferred from each other (D2): terminal (this
machine's final states), quiescent, output valid and KV effect (data of the terminal input). The
decision names a job by the engine's own number; the device's ticket arrives with the answer
(decision 10). A terminal state is written once; an answer that comes later is
accounted as stale and changes nothing (I5).
"""

from laneway.statemachines.declare import Edge, declare

JOB = declare(
    name="job",
    meaning="one submission to the device: one task, distinct lanes, one buffer",
    initial="drafted",
    states={
        "drafted": "being put together inside one decision",
        "planned": "decided and handed to the submit thread; no answer yet",
        "submitted": "the device gave it a ticket; its memory belongs to the device",
        "uncertain": "the submit failed after it may have queued: treated as in flight",
        "completed": "done with valid output; its KV is committed or rolled back",
        "refused": "nothing was queued; rolled back",
        "withdrawn": "taken back before it was handed to the device",
        "faulted": "ended by an exception, a DMA error or abnormal numbers",
        "aborted": "ended by a cancel or a reset on the device",
        "lost": "given up: its answer will never be believed",
    },
    final=("completed", "refused", "withdrawn", "faulted", "aborted", "lost"),
    edges=(
        Edge("plan", ("drafted",), "planned", "planning.plan", "R2.1, R3.3, E12"),
        Edge("submit", ("planned",), "submitted", "submitting.accept", "G13, R2.4"),
        Edge("doubt", ("planned",), "uncertain", "submitting.doubt", "D6, E5"),
        *(
            Edge(
                "recall",
                (state,),
                state,
                "faulting.stall",
                "E6, R14.4",
                "it hangs and the device is asked to end it; the device still has it",
            )
            for state in ("submitted", "uncertain")
        ),
        Edge("refuse", ("planned",), "refused", "submitting.refuse", "R7.4, R14.2"),
        Edge("withdraw", ("planned",), "withdrawn", "submitting.withdraw", "G2"),
        Edge("complete", ("submitted",), "completed", "completing.complete", "R7.4, E7, E17"),
        Edge("fault", ("submitted", "uncertain"), "faulted", "faulting.fault", "R14.3, R14.5"),
        Edge("abort", ("submitted", "uncertain"), "aborted", "faulting.fault", "R14.4, E6"),
        Edge(
            "lose",
            ("planned", "submitted", "uncertain"),
            "lost",
            "recovering.lose_device",
            "R14.4, G7",
        ),
        Edge(
            "abandon",
            ("planned", "submitted", "uncertain"),
            "lost",
            "starting.start",
            "G21",
            "the process that could hear the answer is gone",
        ),
    ),
)
