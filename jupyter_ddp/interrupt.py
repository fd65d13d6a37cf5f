"""The notebook's interrupt while a run is followed: a flag that wakes the waiting, instead of an exception.

A KeyboardInterrupt could fall between reading an event, folding it and showing it. While a run is followed SIGINT only
counts, and makes a descriptor readable.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType


@final
class InterruptFlag:
    """Counts interrupts as long as it is entered; the handler that was there before comes back afterwards.

    In a thread other than the main one nothing is caught, and the count stays 0.

    Attributes:
        count: How many interrupts have come.
    """

    def __init__(self) -> None:
        self.count = 0
        self._read = self._write = -1
        self._before: Callable[[int, FrameType | None], Any] | int | None = None
        self._active = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> InterruptFlag:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        if self._active:
            self._before = signal.signal(signal.SIGINT, self._count)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._active:
            # None: it was not set from Python, and cannot be set again from here
            signal.signal(signal.SIGINT, signal.default_int_handler if self._before is None else self._before)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        """Return the descriptor that is readable after an interrupt, until `clear`."""
        return self._read

    def clear(self) -> None:
        """Make the descriptor wait for the next interrupt."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 64):
                pass

    def _count(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b".")
