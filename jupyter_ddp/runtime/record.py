"""The record of an instance: its event log, and the ranks' files that it is made from.

The agent is the only writer of ``node-<i>.jsonl`` and the only one who numbers events. What a rank prints is in the
rank's own files, whatever happens to the rank; `StreamTail` turns what was added to a file into `out` events. When an
agent died, `salvage` does the rest of its work from the same files.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

from jupyter_ddp.events import Event, OutEvent, RunEvent, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STREAMS: Final = ("stdout", "stderr")
CHUNK: Final = 64 << 10
TURN: Final = 1 << 20
FLOOD_RATE: Final = 1 << 20
FLOOD_BURST: Final = 4 << 20
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
RESERVE: Final = 256 << 10
"""Bytes that a log holds back for how a run ends on a disk that is full."""
LOW: Final = 1 << 20
"""Bytes of a disk that ranks leave to the log, to results and to the reasons of failures."""
LOOK_AGAIN: Final = 0.5
"""Seconds after which somebody who found the disk full looks again."""
_E = TypeVar("_E", bound=Event)


def stream_path(run_dir: Path, rank: int, stream: str) -> Path:
    """Return the file of a rank's stream."""
    return run_dir / f"rank{rank}.{stream}"


def log_path(run_dir: Path, node: int) -> Path:
    """Return the event log of a node."""
    return run_dir / f"node-{node}.jsonl"


def read_text(path: Path, start: int = 0) -> str:
    """Return a file's text from byte `start`, "" when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def is_low(descriptor: int, least: int = LOW) -> bool:
    """Tell whether the file system of a file has less room left than `least` bytes."""
    with contextlib.suppress(OSError, AttributeError):
        status = os.fstatvfs(descriptor)
        return status.f_bavail * status.f_frsize < least
    return False


class LogWriter:
    """Appends events to one node's log: numbers them, and writes whole lines.

    Events are kept in memory until `flush`, which `add` calls by itself after every sixteenth: a flood must not
    gather here. While the disk is full they wait; the first time that it is, a reserve is given up for them.

    Attributes:
        full: The disk is full. Who adds text should add none.
        lean: Text stays in the ranks' files from now on.
        make_room: Called when the reserve does not suffice; tells whether it has made some.
    """

    def __init__(self, run_dir: Path, node: int, attempt: str, *, last_seq: int = 0) -> None:
        self._fd = os.open(
            log_path(run_dir, node), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        self._node = node
        self._attempt = attempt
        self._seq = last_seq
        self._pending: list[bytes] = []
        self._reserve = run_dir / f"reserve-{node}"
        self._look_at = 0.0
        self.full = not self._hold_reserve()
        self.lean = False
        self.make_room: Callable[[], bool] | None = None

    def add(self, kind: type[_E], *, rank: int | None = None, at: float | None = None, **values: Any) -> _E:  # noqa: ANN401
        """Append an event of `kind`, and return it. ``at`` is the time of what it tells, now by default."""
        event = kind(
            attempt=self._attempt,
            node=self._node,
            seq=self._seq + 1,
            rank=rank,
            time=round(time.time() if at is None else at, 4),
            **values,
        )
        self._pending.append(encode(event))
        self._seq += 1
        if len(self._pending) >= 16:
            self.flush()
        return event

    def flush(self) -> bool:
        """Write what is pending; tell whether there was anything."""
        if not self._pending:
            return False
        data = memoryview(b"".join(self._pending))
        self._pending.clear()
        size = len(data)
        if self.full and time.monotonic() >= self._look_at:
            self.full = is_low(self._fd, 2 * LOW) or not self._hold_reserve()
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                self.full = True
                if not (self._give_up_reserve() or (self.make_room is not None and self.make_room())):
                    self._pending.append(bytes(data))
                    break
        return len(data) < size

    def close(self) -> None:
        """Flush, and close the file."""
        self.flush()
        self._give_up_reserve()
        os.close(self._fd)

    def _give_up_reserve(self) -> bool:
        """Remove the reserve; tell whether there was one."""
        self._look_at = time.monotonic() + LOOK_AGAIN
        try:
            self._reserve.unlink()
        except OSError:
            return False
        return True

    def _hold_reserve(self) -> bool:
        """Have a reserve; tell whether there is room for it."""
        self._look_at = time.monotonic() + LOOK_AGAIN
        if self._reserve.exists():
            return True
        try:
            self._reserve.write_bytes(os.urandom(RESERVE))  # zeros would take no room on some file systems
        except OSError:
            with contextlib.suppress(OSError):
                self._reserve.unlink()
            return False
        return True


class StreamTail:
    """Follows the file of one stream of one rank, and appends what is new to the log as `out` events.

    A character of which only the first bytes are there waits until it is whole: every event ends where a character
    ends, and stands on its own. Past `FLOOD_RATE`, and where there is little room, the events carry no text: readers
    take it from the file.

    Attributes:
        offset: Bytes of the file that are in the log.
    """

    def __init__(self, run_dir: Path, rank: int, stream: str, *, offset: int = 0) -> None:
        self._path = stream_path(run_dir, rank, stream)
        self._rank = rank
        self._stream = stream
        self._fd: int | None = None
        self._allowance = float(FLOOD_BURST)
        self._filled_at = time.monotonic()
        self.offset = offset

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    def size(self) -> int:
        """Return the bytes that the file has now."""
        if self._fd is None:
            try:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return 0
        return os.fstat(self._fd).st_size

    def drain(self, log: LogWriter, upto: int) -> bool:
        """Append the text up to byte `upto`; tell whether there was any."""
        return self._drain(log, upto, final=False)

    def finish(self, log: LogWriter) -> None:
        """Append all that is left: the rank has ended. A character that was cut off becomes a replacement mark."""
        self._drain(log, self.size(), final=True)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _drain(self, log: LogWriter, upto: int, *, final: bool) -> bool:
        upto = min(upto, self.size())
        start = self.offset
        while self.offset < upto:
            self._refill()
            flood = self._allowance < 0 or log.lean or log.full
            size = min(TURN if flood else CHUNK, upto - self.offset)
            data = os.pread(self._fd, size, self.offset) if self._fd is not None else b""
            if not (final and self.offset + len(data) >= upto):
                data = _whole_characters(data)
            if not data:
                break
            # The debt is bounded: a second after a flood, however long, text comes again.
            self._allowance = max(-FLOOD_RATE, self._allowance - len(data))
            log.add(
                OutEvent,
                rank=self._rank,
                stream=self._stream,
                offset=self.offset,
                length=len(data),
                text=None if flood else data.decode(errors="replace"),
                lines=data.count(b"\n"),
            )
            self.offset += len(data)
        return self.offset > start

    def _refill(self) -> None:
        now = time.monotonic()
        self._allowance = min(FLOOD_BURST, self._allowance + (now - self._filled_at) * FLOOD_RATE)
        self._filled_at = now


def _whole_characters(data: bytes) -> bytes:
    """Return UTF-8 without the beginning of a character (three bytes at most) at its end."""
    _, used = codecs.utf_8_decode(data[-3:], "replace")
    return data[: used - len(data[-3:])] if used < len(data[-3:]) else data


def salvage(run_dir: Path, node: int, ranks: range, attempt: str, reason: str) -> bool:
    """Do what a dead agent left undone: bring its log up to date with its ranks' files, and end it as ``lost``.

    Idempotent: a log that has its end is left alone (False), and what it has already is found by its offsets. A last
    line that was torn is ended, so that the next one stands on its own. The caller sees to it that the run is dead
    and that one process at a time does this.
    """
    path = log_path(run_dir, node)
    path.touch(mode=0o600)
    data = path.read_bytes()
    last = 0
    reached: dict[tuple[int | None, str], int] = {}
    for event in filter(None, map(decode, data.split(b"\n"))):
        last = max(last, event.seq)
        if isinstance(event, OutEvent):
            key = (event.rank, event.stream)
            reached[key] = max(reached.get(key, 0), event.offset + event.length)
        elif isinstance(event, RunEvent) and event.phase == "ended":
            return False
    if data and not data.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
    log = LogWriter(run_dir, node, attempt, last_seq=last)
    for rank in ranks:
        for stream in STREAMS:
            StreamTail(run_dir, rank, stream, offset=reached.get((rank, stream), 0)).finish(log)
    log.add(RunEvent, phase="ended", outcome="lost", reason=reason)
    log.close()
    return True
