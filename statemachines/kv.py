"""The life of a lane.

One KV space of the device bank, bound to one sequence for its life (R6.2, R7, E15).

A lane belongs to one sequence from bind to evict. Its length moves only by commit. After a fault
nobody knows what the device wrote, so the lane is `unknown` and leaves that state only when its
generation is cleared (R7.5, G8, G14).
"""

from laneway.statemachines.declare import Edge, declare

LANE = declare(
    name="lane",
    meaning="one KV space of the device bank, bound to one sequence for its life",
    initial="empty",
    states={
        "empty": "bound to no sequence",
        "ready": "bound; its committed length is true",
        "reserved": "bound; growth is promised to one job",
        "unknown": "nobody knows its content; not scheduled again in this generation",
    },
    final=(),
    edges=(
        Edge("bind", ("empty",), "ready", "planning.plan", "R6.2, E15"),
        Edge("reserve", ("ready",), "reserved", "planning.plan", "R7.1, R7.3, E17"),
        Edge("commit", ("reserved",), "ready", "completing.complete", "R7.4, E17"),
        Edge("rollback", ("reserved",), "ready", "reserving.rollback", "R7.4, E17, G10"),
        Edge("evict", ("ready",), "empty", "reserving.evict_if_idle", "E19"),
        Edge(
            "suspect", ("empty", "ready", "reserved"), "unknown", "reserving.suspect", "R7.5, G14"
        ),
        Edge("clear", ("unknown",), "empty", "recovering.configured_again", "G8, G12"),
        Edge(
            "abandon",
            ("ready", "reserved"),
            "unknown",
            "starting.start",
            "G21",
            "the process that configured the bank is gone",
        ),
    ),
)
