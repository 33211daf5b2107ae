"""The life of a request: what a client asked for, until its one ending.

A request ends exactly once (I1). Its ending says nothing about the device: a cancelled or expired
request may still have a job in flight, and what that job holds is given back by the job's own
accounting (E7, E19). A fault suspends a request instead of ending it, unless the device is lost.
"""

from laneway.statemachines.declare import Edge, declare

LIVE = ("waiting", "prefilling", "decoding", "suspended")

REQUEST = declare(
    name="request",
    meaning="what a client asked for; ends with exactly one terminal event",
    initial="received",
    states={
        "received": "arrived and numbered; admission has not decided",
        "waiting": "admitted; in the queue for a lane and a prefill job",
        "prefilling": "owns a lane; its prompt is being or will next be run, and its tokens if any",
        "decoding": "has at least one token; takes turns in decode jobs",
        "suspended": "a fault or a restart took its lane; waits to go on from its own tokens",
        "finished": "ended well: stop or length",
        "rejected": "refused by admission; nothing was held for it",
        "cancelled": "ended by its client",
        "expired": "ended by its own deadline",
        "failed": "ended by an error that its client is told",
    },
    final=("finished", "rejected", "cancelled", "expired", "failed"),
    edges=(
        Edge("admit", ("received",), "waiting", "admission.admit", "R7.2, R14.1"),
        Edge("reject", ("received",), "rejected", "admission.admit", "R7.2, R14.1"),
        Edge("prefill", ("waiting",), "prefilling", "planning.plan", "R5.4, G9"),
        Edge("decode", ("prefilling",), "decoding", "completing.complete", "R6.2"),
        Edge("finish", ("prefilling", "decoding"), "finished", "completing.complete", "I1"),
        Edge(
            "suspend",
            ("prefilling", "decoding"),
            "suspended",
            "resuming.suspend_request",
            "G8, G15, E7",
            "a fault took its lane; its tokens are kept",
        ),
        Edge(
            "resume",
            ("suspended",),
            "waiting",
            "resuming.resume_request",
            "G8, G15, D11",
            "its prefill runs all that it has, and the next token is the one that was due",
        ),
        Edge(
            "abandon",
            ("waiting", "prefilling", "decoding"),
            "suspended",
            "starting.start",
            "G21",
            "the process that served it is gone; it waits for a model of its artifact",
        ),
        Edge("cancel", LIVE, "cancelled", "ending.cancel", "R3.5, E6, G10"),
        Edge("expire", LIVE, "expired", "ending.expire", "R7.2, R14.1"),
        Edge("fail", LIVE, "failed", "ending.fail", "R14.2, R14.3, G7"),
    ),
)
