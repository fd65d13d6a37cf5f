"""The notebook's interrupt while a run is followed: counted, and never an exception."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading

import pytest

from jupyter_ddp.interrupt import InterruptFlag


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def readable(flag: InterruptFlag) -> bool:
    return bool(select.select([flag], [], [], 0)[0])


def test_interrupts_are_counted_and_wake():
    """B50."""
    with InterruptFlag() as flag:
        assert (flag.count, readable(flag)) == (0, False)
        interrupt()
        assert (flag.count, readable(flag)) == (1, True)
        interrupt()
        assert (flag.count, readable(flag)) == (2, True)
        flag.clear()
        assert (flag.count, readable(flag)) == (2, False)
        flag.clear()
        interrupt()
        assert (flag.count, readable(flag)) == (3, True)


def test_an_interrupt_ends_a_wait():
    with InterruptFlag() as flag:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert select.select([flag.fileno()], [], [], 60)[0]
        assert flag.count == 1


def test_many_interrupts_that_nobody_looks_at_do_no_harm():
    with InterruptFlag() as flag:
        for _ in range(70_000):  # more than a pipe holds
            flag._count(signal.SIGINT, None)
        assert flag.count == 70_000
        flag.clear()
        assert not readable(flag)


@pytest.mark.parametrize(
    "before",
    [signal.default_int_handler, signal.SIG_IGN, signal.SIG_DFL, lambda _number, _frame: None],
    ids=["default_int_handler", "SIG_IGN", "SIG_DFL", "own"],
)
def test_the_handler_that_was_there_comes_back(before):
    old = signal.signal(signal.SIGINT, before)
    try:
        with InterruptFlag():
            assert signal.getsignal(signal.SIGINT) != before
        assert signal.getsignal(signal.SIGINT) == before
    finally:
        signal.signal(signal.SIGINT, old)


def test_it_comes_back_after_an_error_too():
    before = signal.getsignal(signal.SIGINT)
    with contextlib.suppress(ZeroDivisionError), InterruptFlag() as flag:
        interrupt()
        raise ZeroDivisionError
    assert flag.count == 1
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_no_descriptor_is_left_open():
    with InterruptFlag() as flag:
        descriptor = flag.fileno()
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_another_thread_catches_nothing():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def follow() -> None:
        with InterruptFlag() as flag:
            seen.append((signal.getsignal(signal.SIGINT) is before, flag.count, readable(flag)))

    thread = threading.Thread(target=follow)
    thread.start()
    thread.join()
    assert seen == [(True, 0, False)]
    assert signal.getsignal(signal.SIGINT) is before
