"""One rank as its agent sees it: its connections, its files, and how far it has come."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Final

from jupyter_ddp.runtime.process import is_alive
from jupyter_ddp.runtime.record import STREAMS, LogWriter, StreamTail

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_ddp.runtime.links import Channel


ENDING: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGKILL})
"""Signals by which a run ends its ranks."""


TURNS: Final = 200
TURNS_BURST: Final = 2000
"""Turns of a rank between its streams whose places the log has: so many at once, and so many a second."""


class RankRecord:
    """What an agent knows of one of its ranks.

    Attributes:
        rank: The rank's number.
        pid: The rank's process, None before its hello.
        heard: Its Python heard the interrupt.
        finished: None while the cell runs, then whether it ended well.
        ended: The process is gone and everything that it left has been read.
        failed: It told an error, or ended in a way that fails the run.
        signalled: The run has signalled it to end.
        mute: It ended by itself before its streams were files: what it said last is in the launcher's log.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.rank = rank
        self.pid: int | None = None
        self.stub: Channel | None = None
        self.channel: Channel | None = None
        self.heard = False
        self.finished: bool | None = None
        self.ended = False
        self.failed = False
        self.signalled = False
        self._turns = float(TURNS_BURST)
        self._turned_at = 0.0
        self.mute = False
        self.tails = [StreamTail(run_dir, rank, stream) for stream in STREAMS]

    def may_turn(self, now: float) -> bool:
        """Tell whether a turn between the streams gets its place in the log: `TURNS` a second do, in the long run."""
        self._turns = min(float(TURNS_BURST), self._turns + (now - self._turned_at) * TURNS)
        self._turned_at = now
        if self._turns < 1:
            return False
        self._turns -= 1
        return True

    def sizes(self) -> list[int]:
        """Return the bytes that the files of the two streams have now."""
        return [tail.size() for tail in self.tails]

    def drain(self, log: LogWriter, upto: list[int]) -> bool:
        """Move the text up to these sizes into the log; tell whether there was any."""
        moved = [tail.drain(log, size) for tail, size in zip(self.tails, upto, strict=False)]
        return any(moved)

    def finish(self, log: LogWriter) -> None:
        """Move all that is left into the log: the process is gone."""
        for tail in self.tails:
            tail.finish(log)

    def kill(self, signum: int) -> bool:
        """Send a signal to the rank's process; tell whether there was one to get it."""
        if self.pid is None or self.pid <= 1 or self.ended:  # 0 and less would mean groups of processes
            return False
        try:
            os.kill(self.pid, signum)
            self.signalled = self.signalled or signum in ENDING
        except OSError:
            return False
        return True

    def vanished(self) -> bool:
        """Tell whether both the stub and the rank are gone without a word."""
        return (
            not self.ended
            and self.stub is not None
            and self.stub.closed
            and (self.pid is None or not is_alive(self.pid))
        )
