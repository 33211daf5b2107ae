"""Inputs and events as JSON: the table is complete and pinned, round trips are exact."""

import hashlib
import types
import typing
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.journal_steps import completed, started, submitted

from laneway.engine.errors import ConfigurationError, JournalFormatError, JournalWriteError
from laneway.engine.evidence import EVIDENCE, SOURCES, SUPPORT, Capability
from laneway.engine.inputs import (
    NO_TOKEN,
    Completed,
    Input,
    JobTimes,
    RowResult,
    SubmitAccepted,
    TimePassed,
)
from laneway.engine.limits import Limits
from laneway.engine.sampling import Sampling
from laneway.journal.codec import KINDS, Codec
from laneway.journal.native_text import PYTHON
from laneway.statemachines import Event

FULL = Codec()
IN_PYTHON = Codec(texts=PYTHON)
DIGEST = Codec("digest")
WORDY = Codec(edges=None)
"""As files of schema version 1 are written; events of later ones: test_coded_events.py."""

EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True)

INTEGERS = st.integers(-(1 << 63), (1 << 64) - 1)


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Return values of an annotation, built from the fields of attrs classes."""
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: INTEGERS,
        str: st.text(max_size=20),
        bool: st.booleans(),
        float: st.floats(allow_nan=False, allow_infinity=False),
    }
    if annotation in simple:
        return simple[annotation]
    if annotation is Limits:
        limits: dict[str, st.SearchStrategy[Any]] = {
            f.name: st.integers(1, 1 << 40) for f in attrs.fields(Limits)
        }
        weights = st.tuples(st.text(max_size=4), st.integers(1, 1 << 20))
        limits["tenant_weights"] = st.lists(weights, max_size=3).map(tuple)
        return st.builds(Limits, **limits)
    if annotation is Sampling:
        return st.builds(
            Sampling,
            temperature=st.floats(0, 2),
            top_k=st.integers(-1, 1 << 20),
            top_p=st.floats(0, 1, exclude_min=True),
            min_p=st.floats(0, 1),
            seed=st.none() | st.integers(0, (1 << 64) - 1),
            repetition_penalty=st.floats(0, exclude_min=True, allow_infinity=False),
            presence_penalty=st.floats(-2, 2),
            frequency_penalty=st.floats(-2, 2),
            logit_bias=st.dictionaries(st.integers(0, 1 << 20), st.floats(-100, 100), max_size=4),
            allowed_token_ids=st.none() | st.lists(st.integers(0, 1 << 20), min_size=1, max_size=4),
        )
    if annotation is Capability:
        words = {
            "support": st.sampled_from(SUPPORT),
            "evidence": st.sampled_from(EVIDENCE),
            "source": st.sampled_from(SOURCES),
        }
        return st.builds(
            Capability,
            value=st.integers(-(1 << 63), (1 << 63) - 1),
            **{name: st.text(max_size=20) for name in ("name", "scope", "note")},
            **words,
        )
    if field_names(annotation):
        return instances_of(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is types.UnionType:
        (inner,) = (a for a in arguments if a is not types.NoneType)
        return st.none() | values_of(inner)
    assert origin is tuple
    if arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=4).map(tuple)
    return st.tuples(*map(values_of, arguments))


def instances_of(cls: type) -> st.SearchStrategy[Any]:
    """Return instances of an attrs class."""
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{name: values_of(hints[name]) for name in field_names(cls)})


def field_names(cls: Any) -> tuple[str, ...]:
    """Return the fields of a class of values in order, none for another annotation."""
    if isinstance(cls, type) and issubclass(cls, msgspec.Struct):
        return cls.__struct_fields__
    return tuple(field.name for field in attrs.fields(cls)) if attrs.has(cls) else ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
EVENTS = st.lists(
    st.builds(
        Event,
        machine=st.text(max_size=8),
        entities=st.lists(st.integers(0, 12), min_size=1, max_size=12).map(tuple),
        trigger=st.text(max_size=8),
        source=st.text(max_size=8),
        dest=st.text(max_size=8),
        epoch=st.integers(0, 1 << 62),
        generation=st.integers(0, 1 << 62),
        data=st.dictionaries(st.text(max_size=8), JSON, max_size=3),
    ),
    max_size=4,
).map(tuple)


# ---------------------------------------------------------------------------- the table


def test_every_input_has_an_entry_under_its_own_name() -> None:
    union = typing.get_args(Input)
    assert {cls for _, cls in KINDS.values()} == set(union)
    assert {name: cls.__name__ for name, (_, cls) in KINDS.items()} == {
        cls.__name__: cls.__name__ for cls in union
    }


CHIPS = "chips[total_bytes used_bytes]"
HEALTH = (
    "health[state device_epoch sticky advised observed_ns last_progress_ns used_bytes counters]"
)
WIRE_NAMES = {
    "EngineStarted": (
        3,
        "wall_clock_ns code_version journal_tokens limits[inflight_jobs_max batch_rows_max"
        " long_prefill_threshold_tokens short_turns_max prefill_tokens_max prefill_chunk_tokens"
        " prefill_tokens_per_decode priority_step_tokens tenant_weights queued_requests_max"
        " queued_tokens_max inbox_inputs_max step_batch_max buffers_per_submodel submit_retries_max"
        " submit_refusals_in_a_row_max kv_retries_max backoff_first_ns backoff_last_ns"
        " backoff_tries_max hang_suspect_ns hang_confirm_ns hang_cap_ns"
        " unload_tolerance_bytes configure_timeout_ns retry_after_ns unload_reread_ns"
        " configure_retries_max buried_items_max buried_bytes_max ccu_resets_max"
        " ccu_resets_window_ns configuration_resets_max configuration_resets_window_ns"
        " device_resets_max device_resets_window_ns device_reset_pause_ns process_restarts_max"
        " process_restarts_window_ns reset_timeout_ns recall_wait_ns drain_timeout_ns"
        " exceptions_window_ns unhealthy_grace_ns health_every_ns poison_window_ns canary_jobs"
        " canary_idle_ns requalify_canaries missed_completions_max]"
        " device[url backend product serial runtime_version driver_version firmware_version"
        f" device_epoch inflight_max {CHIPS}"
        " capabilities[name support evidence source value scope note] backend_kind backend_version"
        " chip_mask proven grants[feature calbin_sha256 value evidence by] chunked_prefill"
        " counters]",
    ),
    "LoadRequested": (1, "model alias source"),
    "ReplaceRequested": (1, "model alias source"),
    "LoadBackRequested": (1, "model alias source sha256 instead_of"),
    "ArtifactValidated": (
        3,
        "model name sha256 architecture layout lane_rule context_tokens vocabulary lane_count"
        " end_tokens submodels[name task batch_max tokens_max incremental fixed_rows] chip_bytes"
        f" {CHIPS} trials[origin prompt forced batch]",
    ),
    "ArtifactRefused": (1, "model reason"),
    "ModelConfigured": (
        1,
        "model device_generation device_epoch duration_ns used_bytes_before used_bytes_after",
    ),
    "ConfigureFailed": (1, "model code reason"),
    "ModelReleased": (1, "model used_bytes healthy"),
    "ReleaseFailed": (1, "model code reason"),
    "UnloadRequested": (1, "model"),
    "RequestSubmitted": (
        2,
        "request alias prompt max_tokens sampling[temperature top_k top_p min_p seed"
        " repetition_penalty presence_penalty frequency_penalty logit_bias allowed_token_ids] stop"
        " ignore_eos deadline_ns client_id logprobs stop_token_ids min_tokens model"
        " priority tenant on_fault",
    ),
    "CancelRequested": (1, "request"),
    "TimePassed": (1, ""),
    "InboxOverflowed": (1, "count"),
    "SubmitAccepted": (1, "job ticket"),
    "SubmitRefused": (1, "job code reason"),
    "SubmitDoubtful": (1, "job ticket code reason"),
    "SubmitWithdrawn": (1, "job"),
    "CancelTold": (1, "job ticket code reason"),
    "StatusDoubted": (1, "job ticket kind before shown"),
    "ResetFinished": (
        1,
        "level code reason quiesced verified wider epoch_before epoch_after claimed effects"
        " jobs_aborted jobs_unaccounted duration_ns used_bytes_before used_bytes_after"
        f" {HEALTH.replace('health', 'health_before', 1)} {HEALTH}"
        " runtime_version driver_version firmware_version",
    ),
    "KvApplyFailed": (2, "job lane operation code unknown reason lanes"),
    "KvApplied": (1, "lanes"),
    "JobProgressed": (1, "job ticket phase"),
    "Completed": (
        1,
        "job ticket epoch generation flags kv_effect engine_slot"
        " rows[token stop_hit fault verdict kv_digest logprobs]"
        " times[submit_ns accept_ns h2d_begin_ns h2d_end_ns exec_begin_ns exec_end_ns d2h_begin_ns"
        " d2h_end_ns visible_ns postprocess_ns]",
    ),
    "DeviceFaulted": (
        1,
        "job ticket epoch generation kind code quiescent kv_effect reason"
        f" record[chip ccu code subcode task_index cmd_index pc text] {HEALTH}",
    ),
    "JobStalled": (1, "job ticket stage phase age_ns progress_age_ns"),
    "HealthProbed": (1, f"{HEALTH} reason"),
    "CapabilitiesLost": (1, "names"),
    "ThrottleTold": (1, "chips"),
    "BufferRestored": (1, "buffer job"),
    "RestoreFailed": (1, "buffer job code reason"),
    "CountersRead": (1, "asked counters"),
    "MemoryBuried": (1, "item_count byte_count"),
    "CloseRequested": (1, "drain"),
    "DeviceClosed": (1, "abandoned reason"),
}
"""Fields in wire order. A new field goes to the end, with a new version here and in the table."""


def test_field_order_is_pinned() -> None:
    found = {name: (version, wire_names(cls)) for name, (version, cls) in KINDS.items()}
    assert found == WIRE_NAMES


def wire_names(cls: type) -> str:
    """Return the field names of a class in order, nested ones in brackets."""
    names = []
    hints = typing.get_type_hints(cls)
    for name in field_names(cls):
        annotation = hints[name]
        inner = [a for a in (annotation, *typing.get_args(annotation)) if field_names(a)]
        names.append(f"{name}[{wire_names(inner[0])}]" if inner else name)
    return " ".join(names)


# ---------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("name", sorted(KINDS))
def test_inputs_round_trip(name: str) -> None:
    @EXAMPLES
    @given(instances_of(KINDS[name][1]))
    def check(taken: Input) -> None:
        kind, text = FULL.encode_input(taken)
        assert kind == name
        assert FULL.decode_input(kind, text) == taken

    check()


@EXAMPLES
@given(EVENTS)
def test_events_round_trip(events: tuple[Event, ...]) -> None:
    for codec in (FULL, IN_PYTHON, WORDY):
        text = codec.encode_events(events)
        assert codec.decode_events(text) == events
        assert codec.encode_events(codec.decode_events(text)) == text


def test_the_text_of_an_input() -> None:
    taken = completed(17, (101, 102))
    assert FULL.encode_input(taken) == (
        "Completed",
        b'[1,17,917,1,2,7,"applied",1,[[101,102]],[5,null,null,null,null,null,null,null,85,0]]',
    )
    rows = (RowResult(token=101), RowResult(token=NO_TOKEN, fault="numeric"))
    told = attrs.evolve(taken, rows=rows)
    assert FULL.encode_input(told) == (
        "Completed",
        b'[1,17,917,1,2,7,"applied",1,[[101,-1],null,["","numeric"]],'
        b"[5,null,null,null,null,null,null,null,85,0]]",
    )


def test_instants_are_written_as_what_has_passed() -> None:
    instants = (1000, 1007, 1007, 0, 990, 2**64 - 1, 5, 0, 12)
    names = [field.name for field in attrs.fields(JobTimes)]
    times = JobTimes(**dict(zip(names, (*instants, 77), strict=True)))
    taken = attrs.evolve(completed(17, (101,)), times=times)
    kind, text = FULL.encode_input(taken)
    assert text.endswith(b",[1000,7,0,null,[990],18446744073709550625,[5],null,7,77]]")
    assert FULL.decode_input(kind, text) == taken
    assert FULL.encode_input(TimePassed()) == ("TimePassed", b"[1]")


@pytest.mark.parametrize(
    ("entities", "text"),
    [
        ((4,), "[4]"),
        ((1, 2), "[1,2]"),
        ((1, 2, 3), "[[1,3]]"),
        ((1, 3, 4, 5, 6), "[1,[3,6]]"),
        ((3, 2, 1), "[3,2,1]"),
        ((5, 6, 7, 1, 2, 3, 3, 4), "[[5,7],[1,3],3,4]"),
        ((1, 1, 2, 3), "[1,[1,3]]"),
        ((1, 3, 2, 4), "[1,3,2,4]"),
    ],
)
def test_the_text_of_entities(entities: tuple[int, ...], text: str) -> None:
    event = Event("lane", entities, "commit", "reserved", "ready", 1, 2)
    expected = f'[["lane",{text},"commit","reserved","ready",1,2]]'
    assert WORDY.encode_events((event,)).decode() == expected
    assert WORDY.decode_events(expected.encode()) == (event,)


def test_event_data_is_sorted_and_left_out_when_empty() -> None:
    with_data = Event("job", (1,), "plan", "drafted", "planned", 1, 2, {"b": (1, 2), "a": None})
    without = Event("job", (1,), "submit", "planned", "submitted", 1, 2, {})
    assert WORDY.encode_events((with_data, without)) == (
        b'[["job",[1],"plan","drafted","planned",1,2,{"a":null,"b":[1,2]}],'
        b'["job",[1],"submit","planned","submitted",1,2]]'
    )


# ---------------------------------------------------------------------------- refusals


DONE = b'[1,17,917,1,2,7,"applied",1,%s,[5,0,0,0,0,0,0,0,90,0]]'


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("Nonsense", b"[1]", "unknown input kind 'Nonsense'"),
        ("SubmitAccepted", b"[2,17,912]", "has version 2, this laneway reads 1"),
        ("SubmitAccepted", b'["1",17,912]', "has version '1'"),
        ("SubmitAccepted", b"[1,17]", "length 3"),
        ("SubmitAccepted", b"[1,17,912,0]", "length 3"),
        ("SubmitAccepted", b"[1,17,9.5]", "Expected `int`, got `float`"),
        ("SubmitAccepted", b"[1,17,true]", "Expected `int`, got `bool`"),
        ("SubmitAccepted", b'[1,17,"912"]', "Expected `int`, got `str`"),
        ("SubmitAccepted", b"[1,17,null]", "Expected `int`, got `null`"),
        ("SubmitAccepted", b'{"job":17,"ticket":912}', "got `object`"),
        ("SubmitAccepted", b"[1,17,912", "truncated"),
        ("SubmitAccepted", b"[1,17,912] []", "trailing"),
        ("SubmitAccepted", b"", "truncated"),
        ("LoadRequested", b'[1,1,"\xff","x"]', "UTF-8"),
        ("CloseRequested", b"[1,1]", "Expected `bool`, got `int`"),
        ("KvApplied", b"[1,[1,[2]]]", "Expected `int`, got `array`"),
        ("Completed", DONE % b"[[5],[true,false]]", "2 of stop_hit for 1 token"),
        ("Completed", DONE % b"[[5,6],null,[1,2]]", "Expected `str`, got `int`"),
        ("Completed", DONE % b"[[5],null,null,null,null,null,null]", "length 6"),
        ("Completed", DONE % b"[]", "length 1"),
        (
            "RequestSubmitted",
            b'[2,5,"m",[7],4,[9.0,0,1.0,0.0,5,1.0,0.0,0.0,[],null],[],false,null,null,null,[],0,1'
            b',0,"a","continue"]',
            "temperature",
        ),
        (
            "RequestSubmitted",
            b'[2,5,"m",[7],4,[1.0,0,1.0,0.0,5,1.0,0.0,0.0,[[3,101.0]],null],[],false,null,null'
            b',null,[],0,1,0,"a","continue"]',
            "logit_bias",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(kind: str, text: bytes, says: str) -> None:
    with pytest.raises(JournalFormatError, match=says.replace("[", r"\[")):
        FULL.decode_input(kind, text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'[["lane",[1],"t","a","b",1]]', "length 7"),
        (b'[["lane",[1],"t","a","b",1,2,{},3]]', "length 8"),
        (b'[["lane",[1],"t","a","b",1,"2"]]', "Expected `int`"),
        (b'[["lane",1,"t","a","b",1,2]]', "Expected `array`"),
        (b'[["lane",[],"t","a","b",1,2]]', "names no entity"),
        (b'[["lane",[[3,4]],"t","a","b",1,2]]', "entity range"),
        (b'[["lane",[[6,3]],"t","a","b",1,2]]', "entity range"),
        (b'[["lane",[[1,2,3]],"t","a","b",1,2]]', "length 2"),
        (b'[["lane",[[0,99999999999999]],"t","a","b",1,2]]', "more than"),
        (b'[["lane",[1],"t","a","b",1,2,[]]]', "Expected"),
        (b"{}", "Expected `array`"),
        (b"[", "truncated"),
    ],
)
def test_events_that_do_not_fit_are_refused(text: bytes, says: str) -> None:
    with pytest.raises(JournalFormatError, match=says):
        WORDY.decode_events(text)


@pytest.mark.parametrize(
    "taken",
    [
        SubmitAccepted(job=1.0, ticket=2),  # type: ignore[arg-type]
        SubmitAccepted(job=True, ticket=2),
        SubmitAccepted(job=np.int64(1), ticket=2),  # type: ignore[arg-type]
        SubmitAccepted(job=None, ticket=2),  # type: ignore[arg-type]
        RowResult(token=1),
        object(),
    ],
)
def test_what_could_not_be_read_again_is_not_written(taken: Any) -> None:
    with pytest.raises(JournalWriteError):
        FULL.encode_input(taken)


@pytest.mark.parametrize(
    "changed",
    [
        {"job": 17.0},
        {"job": True},
        {"job": None},
        {"job": (1, 7)},
        {"flags": "7"},
        {"kv_effect": 7},
        {"kv_effect": None},
        {"rows": (RowResult(token=101.0), RowResult(token=102))},  # type: ignore[arg-type]
        {"rows": (RowResult(token=101), RowResult(token=False))},
        {"rows": (RowResult(token=101), RowResult(token=(7,)))},  # type: ignore[arg-type]
        {"rows": (RowResult(token=101, stop_hit=None), RowResult(token=102))},  # type: ignore[arg-type]
        {"rows": (RowResult(token=101, fault=None), RowResult(token=102))},  # type: ignore[arg-type]
        {"rows": (RowResult(token=101, logprobs=None), RowResult(token=102))},  # type: ignore[arg-type]
        {"times": JobTimes(submit_ns=5, visible_ns=90.5)},  # type: ignore[arg-type]
        {"times": JobTimes(submit_ns=5, visible_ns=90, postprocess_ns=None)},  # type: ignore[arg-type]
        {"times": JobTimes(submit_ns=5, visible_ns=90, postprocess_ns="1")},  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_what_was_read_back_before_is_no_licence_for_another_type(changed: dict[str, Any]) -> None:
    """Texts that differ in digits alone are read back once; one of another type is none of them."""
    codec = Codec()
    sound = completed(17, (101, 102))
    for job in (17, 18, 123_456_789):
        codec.encode_input(attrs.evolve(sound, job=job))
    with pytest.raises(JournalWriteError, match="Completed cannot be stored"):
        codec.encode_input(attrs.evolve(sound, **changed))


def test_text_that_is_not_unicode_is_not_written() -> None:
    with pytest.raises(JournalWriteError, match="LoadRequested"):
        FULL.encode_input(KINDS["LoadRequested"][1](model=1, alias="\ud800", source=""))


@pytest.mark.parametrize("data", [{"a": {1}.__iter__()}, {"a": np.int64(1)}])
def test_event_data_that_is_not_json_is_not_written(data: dict[str, Any]) -> None:
    with pytest.raises(JournalWriteError):
        FULL.encode_events((Event("job", (1,), "plan", "a", "b", 1, 1, data),))


def test_an_event_without_entities_is_not_written() -> None:
    with pytest.raises(JournalWriteError, match="names no entity"):
        FULL.encode_events((Event("job", (), "plan", "a", "b", 1, 1),))


# ---------------------------------------------------------------------------- digest


def test_a_digest_keeps_no_words_of_a_client() -> None:
    prompt = (7, 8, 65_000)
    taken = attrs.evolve(
        submitted(5, prompt, stop=("secret stop", "x")),
        sampling=Sampling(seed=5, logit_bias={65_001: 1.0}, allowed_token_ids=(65_002,)),
        stop_token_ids=(65_003,),
    )
    _, text = DIGEST.encode_input(taken)
    packed = b"".join(token.to_bytes(8, "little", signed=True) for token in prompt)
    sha256 = hashlib.sha256(packed).hexdigest()
    assert text.decode() == (
        f'[2,5,"m",{{"count":3,"sha256":"{sha256}"}},4,[1.0,0,1.0,0.0,5,1.0,0.0,0.0,[],null],'
        '{"count":2},false,null,null,null,[],0,1,0,"","continue"]'
    )
    assert DIGEST.decode_input("RequestSubmitted", text) == attrs.evolve(
        taken,
        prompt=(NO_TOKEN,) * 3,
        stop=("", ""),
        client_id=None,
        sampling=Sampling(seed=5),
        stop_token_ids=(),
    )


def test_a_digest_keeps_no_sampled_token() -> None:
    taken = attrs.evolve(
        completed(17, (101,)),
        rows=(
            RowResult(token=101, stop_hit=True, logprobs=((101, -0.5), (102, -1.5))),
            RowResult(token=NO_TOKEN, verdict="equal"),
        ),
    )
    _, text = DIGEST.encode_input(taken)
    assert b'[[null,-1],[true,false],null,["","equal"]]' in text
    read = DIGEST.decode_input("Completed", text)
    assert isinstance(read, Completed)
    assert [row.token for row in read.rows] == [NO_TOKEN, NO_TOKEN]
    assert attrs.evolve(read, rows=taken.rows) == taken


def test_the_modes_do_not_read_each_other() -> None:
    taken = submitted(5, (7, 8))
    with pytest.raises(JournalFormatError):
        FULL.decode_input(*DIGEST.encode_input(taken))
    with pytest.raises(JournalFormatError):
        DIGEST.decode_input(*FULL.encode_input(taken))


def test_a_damaged_count_does_not_fill_the_memory() -> None:
    _, text = DIGEST.encode_input(submitted(5, (7, 8)))
    with pytest.raises(JournalFormatError, match="out of range"):
        DIGEST.decode_input("RequestSubmitted", text.replace(b'"count":2', b'"count":99999999999'))


def test_other_inputs_are_the_same_in_both_modes() -> None:
    for taken in (started(), TimePassed()):
        assert DIGEST.encode_input(taken) == FULL.encode_input(taken)


def test_unknown_mode() -> None:
    with pytest.raises(ConfigurationError, match="full, digest"):
        Codec("none")
