"""The simulated board as a device: configuration, structure sizes, memory, events.

Source: npurt.h (structure sizes, health, counters, events), npurt_sim.h (profiles).
"""

import ctypes as c

import pytest
from support.native_board import (
    COMMIT,
    CONTEXT,
    DECODE,
    LANES,
    RELEASE,
    RESERVE,
    Bench,
    Board,
    OpenBoard,
    Pair,
)

from laneway.adapters import npurt
from laneway.adapters.npurt import Code


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ("profile = huge", "line 1: profile does not take the value 'huge'"),
        ("seed = 1\nspeed = 2", "line 2: unknown key 'speed'"),
        ("seed = 1\nseed = 2", "line 2: key 'seed' a second time"),
        ("seed", 'line 1: not "key = value"'),
        ("seed = -1", "seed does not take"),
        ("scale = 2", "scale belongs to clock = real"),
        ("strict = yes", "strict does not take"),
        ("driver_version = 1..2", "driver_version does not take"),
        ("overlap = 4", "overlap does not take the value '4'"),
        ("h2d = 1ms", "h2d belongs to profile = cost"),
        ("profile = cost\ndecode = 1ms/2ms", "decode does not take"),
        ("profile = cost\ndecode = 1ms/2ms/3ms/4ms", "decode does not take"),
        ("profile = cost\nprefill = 1ms/2/3ms", "prefill does not take"),
        ("persona =", "persona does not take the value ''"),
    ],
)
def test_a_wrong_configuration_is_refused(bench: Bench, config: str, complaint: str) -> None:
    device = c.c_void_p()
    params = npurt.OpenParams(config=config.encode())
    answer = bench.library.attempt("npurt_device_open", c.byref(params), c.byref(device))
    assert answer.code == Code.INVALID_ARG
    assert complaint in answer.words
    assert not device.value


def test_struct_size_smaller_is_refused_and_larger_is_not_touched_beyond(board: Board) -> None:
    size = c.sizeof(npurt.Health)
    raw = (c.c_uint8 * (size + 64))(*([0xAB] * (size + 64)))
    health = npurt.Health.from_buffer(raw)
    for offered, code in ((size - 1, Code.STRUCT_SIZE), (0, Code.STRUCT_SIZE)):
        health.h.struct_size = offered
        before = bytes(raw)
        pointer = c.cast(raw, c.POINTER(npurt.Health))
        assert board.code("npurt_device_health", board.device, pointer) == code
        assert bytes(raw) == before
    health.h.struct_size = size + 64
    assert board.code("npurt_device_health", board.device, c.byref(health)) == Code.OK
    assert health.h.struct_size == size
    assert bytes(raw[size:]) == b"\xab" * 64


def test_arrays_keep_to_the_callers_stride(board: Board) -> None:
    class Wide(c.Structure):
        _fields_ = [("cap", npurt.Cap), ("more", c.c_uint8 * 24)]

    count = c.c_uint32(0)
    board.ok("npurt_device_caps", board.device, None, 0, c.byref(count))
    assert count.value == len(npurt.CAPABILITIES)
    wide = (Wide * 5)()
    c.memset(wide, 0xCD, c.sizeof(wide))
    count.value = 4
    pointer = c.cast(wide, c.POINTER(npurt.Cap))
    board.ok("npurt_device_caps", board.device, pointer, c.sizeof(Wide), c.byref(count))
    assert [entry.cap.id for entry in wide[:4]] == [1, 2, 3, 4]
    assert {(entry.cap.evidence, entry.cap.source) for entry in wide[:4]} == {(9, 6)}
    assert all(bytes(entry.more) == b"\xcd" * 24 for entry in wide)
    assert bytes(wide[4]) == b"\xcd" * c.sizeof(Wide)
    count.value = 4
    narrow = board.code("npurt_device_caps", board.device, pointer, 100, c.byref(count))
    assert narrow == Code.STRUCT_SIZE


def memory(board: Board, chip: int) -> npurt.Memory:
    told = npurt.Memory()
    board.ok("npurt_device_memory", board.device, chip, c.byref(told))
    return told


def test_the_reference_profile_has_the_reference_memory_and_times(open_board: OpenBoard) -> None:
    board = open_board("profile = tp2-ref")
    gib = 1 << 30
    for chip in (0, 1):
        told = memory(board, chip)
        assert (told.total, told.kv) == (16 * gib, 1.875 * gib)
        assert told.params == pytest.approx(8.469 * gib, abs=1)
        assert told.workspace == pytest.approx(3.731 * gib, abs=1)
        assert told.used == told.params + told.kv + told.workspace + told.dynamic
    times = board.run(Pair(board, DECODE), [(0, [1], 0)]).times
    # 5.4 ms at 2,048 tokens of context, 48 layers x 4.19 MB of KV halved at 200 GB/s of it.
    assert times.exec_end - times.exec_begin == pytest.approx(5.43e6 - 0.503e6, rel=0.01)
    assert times.d2d_bytes == 48 * 2 * 2048 * 2
    assert times.d2h_end - times.d2h_begin == pytest.approx(0.05e6, rel=0.01)


def test_memory_is_taken_by_configure_and_given_back_by_release(open_board: OpenBoard) -> None:
    board = open_board(configured=False)
    assert memory(board, 0).used == 0
    board.configure()
    assert memory(board, 0).kv == LANES * CONTEXT * 256
    board.ok("npurt_kv_close", board.bank)
    board.ok("npurt_calbin_release", board.calbin)
    assert [memory(board, chip).used for chip in (0, 1)] == [0, 0]
    told = npurt.Memory()
    assert board.code("npurt_device_memory", board.device, 2, c.byref(told)) == Code.NOT_FOUND


def test_a_calbin_that_does_not_fit_or_match_is_refused(bench: Bench) -> None:
    cases = {
        "dram_bytes = 500000": Code.CALBIN_TOO_LARGE,
        "firmware_version = 0.0.9": Code.CALBIN_INCOMPATIBLE,
    }
    for config, code in cases.items():
        device, handle = c.c_void_p(), c.c_void_p()
        params = npurt.OpenParams(config=config.encode())
        bench.library.call("npurt_device_open", c.byref(params), c.byref(device))
        source = npurt.CalbinSource(path=str(bench.calbin).encode())
        answer = bench.library.attempt(
            "npurt_calbin_create", device, c.byref(source), c.byref(handle)
        )
        assert (answer.code, handle.value) == (code, None)
        source.expect_sha256 = b"0" * 64
        answer = bench.library.attempt(
            "npurt_calbin_create", device, c.byref(source), c.byref(handle)
        )
        assert answer.code == Code.CALBIN_HASH
        bench.library.call("npurt_device_close", device)


def test_a_full_event_ring_says_how_many_were_lost(board: Board) -> None:
    board.txn = 1
    for _ in range(300):
        assert board.apply((RESERVE, 0, 0, 1), (COMMIT, 0, 0, 1))[0] == Code.OK
        assert board.apply((RELEASE, 0, 0, 0))[0] == Code.OK
    event = npurt.Event()
    board.ok("npurt_device_event", board.device, c.byref(event))
    assert (event.dropped, event.seq) == (45, 46)  # 301 with that of configure, 256 kept
    seen = 1
    while board.code("npurt_device_event", board.device, c.byref(event)) == Code.OK:
        seen += 1
        assert event.dropped == 0
    assert (seen, event.seq) == (256, 301)
