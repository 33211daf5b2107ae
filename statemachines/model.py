"""The life of a model: one load of one artifact (R10.1 with G5, G6, G21).

`model/N` is numbered over the whole journal; an alias is a served name that points to at most one
ready model. A model serves only after golden and warm-up passed in its present generation (E21,
E25, G5). It is unloaded only when its memory came back (E22).
"""

from laneway.statemachines.declare import Edge, declare

MODEL = declare(
    name="model",
    meaning="one load of one artifact",
    initial="unloaded",
    states={
        "unloaded": "holds nothing on the device",
        "validating": "manifest, hashes, permissions, versions, capacity are checked on the host",
        "configuring": "the device is being configured; nothing else runs on it",
        "warming": "golden and warm-up run; nothing is served yet",
        "ready": "serves its alias",
        "recovering": "a fault took its generation; it serves nothing",
        "draining": "refuses new requests; what it has is finished",
        "unloading": "nothing in flight; the device gives its memory back",
        "failed": "cannot serve; leaves when cleaning up is verified",
    },
    final=(),
    edges=(
        Edge("load", ("unloaded",), "validating", "loading.load", "R10.1, R10.2"),
        Edge(
            "vet",
            ("validating",),
            "validating",
            "loading.validated",
            "R10.2",
            "good, and another model has the device: it waits until that is gone",
        ),
        Edge(
            "revalidate",
            ("validating",),
            "validating",
            "successors.ask_again",
            "R10.2",
            "what it waited for is over: its artifact is validated for good",
        ),
        Edge("accept", ("validating",), "configuring", "loading.validated", "R10.1, E20a"),
        Edge("refuse", ("validating",), "failed", "loading.refused", "R10.1, R9.1"),
        Edge(
            "retry",
            ("configuring",),
            "validating",
            "loading.configure_failed",
            "R10.1",
            "the configuration failed and was given back: once more from the artifact",
        ),
        Edge("configure", ("configuring",), "warming", "loading.configured", "R10.1, G12"),
        Edge("publish", ("warming",), "ready", "loading.publish", "R10.1, E21, E25"),
        Edge(
            "degrade",
            ("ready", "draining", "configuring", "warming"),
            "recovering",
            "recovering.run_reset",
            "G5",
            "its generation ends with the reset; before it is ready again golden must pass",
        ),
        Edge(
            "stand_down",
            ("warming",),
            "recovering",
            "going_back.stand_down",
            "R14.5",
            "golden differs after a reset, and another artifact served before: is it there still?",
        ),
        Edge(
            "reconfigure",
            ("recovering",),
            "configuring",
            "recovering.reset_finished",
            "G5, G12",
            "a verified reset: a new generation of the same load",
        ),
        *(
            Edge(trigger, (state,), state, "canaries.judge_canary", rule, why)
            for trigger, rule, why in (
                ("prove", "E25", "a canary was equal: tokens from before it began are believed"),
                (
                    "mark",
                    "E25, R14.5",
                    "a canary differed: tokens since the last good one are in doubt",
                ),
                (
                    "examine",
                    "E11, R14.5",
                    "overlap or abnormal numbers: nothing is believed until a golden run decides",
                ),
                ("acquit", "E11", "that run was equal: it goes on with one job in flight"),
            )
            for state in ("ready", "draining")
        ),
        Edge("drain", ("ready",), "draining", "unloading.drain", "R10.1, R10.3"),
        Edge("unload", ("draining",), "unloading", "unloading.unload_if_idle", "R10.1, R10.3, G16"),
        Edge(
            "linger",
            ("unloading",),
            "unloading",
            "unloading.released",
            "E22",
            "its memory is not back yet: it is read once more after a while",
        ),
        Edge("linger", ("failed",), "failed", "unloading.released", "E22"),
        Edge(
            "release_again",
            ("failed",),
            "failed",
            "recovering.reset_finished",
            "E22, G6",
            "a verified reset: what a failed load held can be given back now",
        ),
        Edge(
            "reread",
            ("unloading",),
            "unloading",
            "unloading.reread",
            "E22",
            "the while is over: the device is asked, and its answer decides",
        ),
        Edge("reread", ("failed",), "failed", "unloading.reread", "E22"),
        Edge("vacate", ("unloading",), "unloaded", "unloading.released", "R10.1, E22"),
        Edge(
            "fail",
            ("validating", "configuring", "warming", "recovering", "draining", "unloading"),
            "failed",
            "loading.fail_load",
            "R10.1, G6, E22",
        ),
        Edge("clean", ("failed",), "unloaded", "unloading.released", "R10.1, G21"),
        Edge(
            "abandon",
            (
                "validating",
                "configuring",
                "warming",
                "ready",
                "recovering",
                "draining",
                "unloading",
            ),
            "failed",
            "starting.start",
            "G21",
            "the process that configured it is gone",
        ),
    ),
)
