"""Exclusive calls keep others out; closing lets nobody in; nothing waits for ever."""

import ctypes
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from laneway.adapters.binding import Answer, Library
from laneway.adapters.calls import DeviceCalls
from laneway.engine.errors import DeviceError, DeviceLostError

PATIENCE_S = 60.0


def make_calls(answer: Answer | None = None) -> DeviceCalls:
    """A device whose library answers everything the same."""
    said = answer if answer is not None else Answer("npurt_anything", 0)
    library = cast(Any, SimpleNamespace(attempt=lambda *_: said, path="lib.so"))
    library.check = lambda one, *, about="": Library.check(library, one, about=about)
    return DeviceCalls(library, ctypes.c_void_p(1))


def test_shared_calls_overlap() -> None:
    calls = make_calls()
    met = threading.Barrier(2, timeout=PATIENCE_S)

    def enter() -> None:
        with calls.shared():
            met.wait()

    other = threading.Thread(target=enter)
    other.start()
    enter()
    other.join(PATIENCE_S)
    assert not met.broken


def test_an_exclusive_call_waits_for_those_inside_and_keeps_others_out() -> None:
    calls = make_calls()
    order: list[str] = []
    inside, leave, queued = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with calls.shared():
            inside.set()
            leave.wait(PATIENCE_S)
            order.append("first leaves")

    def second() -> None:
        queued.wait(PATIENCE_S)
        with calls.shared():
            order.append("second enters")

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    assert inside.wait(PATIENCE_S)
    leave.set()
    with calls.exclusive(timeout_s=PATIENCE_S):
        order.append("exclusive")
        queued.set()
        order.append("exclusive ends")
    for thread in threads:
        thread.join(PATIENCE_S)
    assert order == ["first leaves", "exclusive", "exclusive ends", "second enters"]


def test_an_exclusive_call_gives_up_when_another_does_not_return() -> None:
    calls = make_calls()
    with (
        calls.shared(),
        pytest.raises(DeviceLostError, match="has not returned within 0") as raised,
        calls.exclusive(timeout_s=0),
    ):
        pytest.fail("somebody was inside")
    assert raised.value.code == 0x0802
    with calls.shared():
        pass


def test_after_closing_nobody_enters_and_no_call_is_made() -> None:
    calls = make_calls()
    calls.close()
    with pytest.raises(DeviceLostError, match="closed"), calls.shared():
        pytest.fail("entered a closed device")
    with pytest.raises(DeviceLostError, match="closed"), calls.exclusive(timeout_s=1):
        pytest.fail("entered a closed device")
    assert calls.attempt("npurt_device_health").code == 0x0102


def test_a_waiter_is_let_go_when_the_device_is_closed() -> None:
    calls = make_calls()
    ended: list[str] = []

    def enter() -> None:
        try:
            with calls.shared():
                ended.append("entered")
        except DeviceLostError:
            ended.append("refused")

    with calls.exclusive(timeout_s=PATIENCE_S):
        waiter = threading.Thread(target=enter)
        waiter.start()
        calls.close()
        waiter.join(PATIENCE_S)
        assert ended == ["refused"]


def test_a_failed_call_raises_with_call_code_words_and_ids() -> None:
    calls = make_calls(Answer("npurt_job_retire", 0x0305, "job 3 is not terminal"))
    with pytest.raises(DeviceError) as raised:
        calls.call("npurt_job_retire", 3, about="buffer/7 ticket 3")
    assert raised.value.code == 0x0305
    assert str(raised.value) == (
        "buffer/7 ticket 3: npurt_job_retire: OBJECT_IN_FLIGHT (0x0305): job 3 is not terminal"
    )


def test_who_leaves_for_a_while_is_not_waited_for_until_it_is_back() -> None:
    calls = make_calls()
    with calls.shared():
        calls.leave_shared()
        with calls.exclusive(timeout_s=0):
            pass
        calls.rejoin_shared()
        with pytest.raises(DeviceLostError), calls.exclusive(timeout_s=0):
            pytest.fail("somebody was inside")
    with calls.exclusive(timeout_s=0):
        pass


def test_who_left_comes_back_to_a_device_that_was_closed_meanwhile() -> None:
    calls = make_calls()
    with calls.shared():
        calls.leave_shared()
        calls.close()
        calls.rejoin_shared()
    assert calls._inside == 0
