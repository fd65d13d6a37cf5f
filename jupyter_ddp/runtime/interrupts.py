"""What a SIGINT does to a rank: it tells the agent that Python heard it, and stops the cell as in a notebook.

A handler that the user's code installs comes in the place of the second, not of the first: the agent would end a rank
that does not seem to hear.
"""

from __future__ import annotations

import functools
import signal
import sys
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine
    from types import FrameType
    from typing import Any

T = TypeVar("T")


class Interrupts:
    """The SIGINT handler of a rank, and what tells the agent of the interrupts that a handler of the user's takes.

    While `listening` is off (no cell runs) an interrupt is nothing; the agent has other means.

    Attributes:
        listening: Whether an interrupt stops what runs.
        count: How many interrupts were heard while listening.
    """

    def __init__(self, heard: Callable[[], None]) -> None:
        self._heard = heard
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.listening = False
        self.count = 0

    def install(self) -> None:
        """Make this the process's handler, and have handlers that come later tell too; main thread only, once.

        ``signal.signal`` and ``signal.getsignal`` go on as documented: who asks for a handler gets what was installed.
        """
        signal.signal(signal.SIGINT, self.handle)
        install, installed = signal.signal, signal.getsignal

        @functools.wraps(install)
        def install_telling(signalnum: Any, handler: Any) -> Any:  # noqa: ANN401 - as `signal.signal`
            if signalnum == signal.SIGINT and callable(handler) and handler != self.handle:
                handler = _Telling(handler, self._heard)
            return _users(install(signalnum, handler))

        @functools.wraps(installed)
        def users_handler(signalnum: Any) -> Any:  # noqa: ANN401 - as `signal.getsignal`
            return _users(installed(signalnum))

        vars(signal).update(signal=install_telling, getsignal=users_handler)

    def run(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end on `loop`.

        An interrupt that finds it in Python code raises KeyboardInterrupt there; one that finds it waiting cancels
        it, so that its ``finally`` blocks run, and becomes a KeyboardInterrupt when it has ended.
        """
        import asyncio

        task = loop.create_task(coroutine)
        before = self.count
        self._loop, self._waiting = loop, (loop, task)
        try:
            try:
                return loop.run_until_complete(task)
            except KeyboardInterrupt:
                # Raised in another task: the cell's own has not been told yet.
                if not task.done():
                    task.cancel()
                    loop.run_until_complete(asyncio.wait([task]))
                if not task.cancelled():
                    task.exception()  # it is the one that is raised here: asyncio shall not report it again
                raise
            except asyncio.CancelledError:
                if self.count > before:
                    raise KeyboardInterrupt from None
                raise
        finally:
            self._waiting = None

    def end_tasks(self, limit: float) -> None:
        """Cancel the tasks that cells left behind; give them `limit` seconds, as ``asyncio.run`` does at its end."""
        if (loop := self._loop) is None:
            return
        import asyncio

        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=limit))
        loop.run_until_complete(loop.shutdown_asyncgens())

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        """Handle a SIGINT, in the main thread."""
        if not self.listening:
            return
        self.count += 1
        self._heard()
        if self._waiting is not None:
            import asyncio

            loop, task = self._waiting
            if loop.is_running() and not task.done() and asyncio.current_task(loop) is None:
                loop.call_soon_threadsafe(task.cancel)
                return
        raise KeyboardInterrupt


class _Telling:
    """A handler of the user's, before which the agent is told."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any], heard: Callable[[], None]) -> None:
        self.handler = handler
        self._heard = heard

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._heard()
        self.handler(number, frame)


def _users(handler: Any) -> Any:  # noqa: ANN401 - what stands for a handler
    return handler.handler if isinstance(handler, _Telling) else handler


def is_cancellation(error: BaseException) -> bool:
    """Tell whether this is asyncio's CancelledError; does not import asyncio (30 ms of a rank's start)."""
    return "asyncio" in sys.modules and isinstance(error, sys.modules["asyncio"].CancelledError)
