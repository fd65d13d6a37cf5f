"""The text of a run from its logs and the ranks' files. The files are the record."""

from __future__ import annotations

import codecs
import stat
from typing import TYPE_CHECKING, BinaryIO, Final

from jupyter_ddp.events import Event, OutEvent
from jupyter_ddp.runtime.room import spans
from jupyter_ddp.view.positions import Positions
from jupyter_ddp.view.terminal import Line, Terminal
from jupyter_ddp.words import label, size_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from jupyter_ddp.rundir import RunDirectory

_STREAMS: Final = ("stdout", "stderr")
_PIECE: Final = 1 << 20


def text_size(run_dir: Path, rank: int | None = None) -> int:
    """Return the bytes of a rank's text, or of all ranks'."""
    which = "*" if rank is None else rank
    return sum(map(_size, run_dir.glob(f"rank{which}.std*")))


def read_all(run: RunDirectory, *, rank: int | None = None) -> Iterator[Line]:
    """Yield the lines of a rank, or of all, as `read_lines` does, from all that was logged."""
    return read_lines(run.path, run.events(), rank=rank)


def read_lines(run_dir: Path, log: Iterable[Event], *, rank: int | None = None) -> Iterator[Line]:
    """Yield the lines of a rank, or of all, after the line discipline, in the order in which they were begun.

    The order comes from the ``out`` events, the bytes from the ranks' files; where a file is not here (the run was on
    another machine) the events' own text is taken. What a file has beyond the last event follows at the end. Events may
    begin anywhere: ``…`` stands for the part of a line that none of them tells of.
    A line is yielded when it cannot change any more. Its ``order`` is the number of the event that began it.
    """
    readers: dict[tuple[str, int, str], _Stream] = {}
    queue: list[Line] = []
    number = 0
    for number, event in enumerate(log, 1):
        if not isinstance(event, OutEvent) or event.rank is None or event.stream not in _STREAMS:
            continue
        if (
            event.rank < 0
            or event.offset < 0
            or event.length <= 0
            or (rank is not None and event.rank != rank)
        ):
            continue
        key = (event.attempt, event.rank, event.stream)
        if key not in readers:
            for reader in readers.values():
                if reader.attempt != event.attempt:
                    reader.terminal.close()
            readers[key] = _Stream(run_dir, *key)
        for text in readers[key].texts(event):
            queue += _ordered(readers[key].terminal.feed(text)[0], number)
            yield from _settled(queue)
    for reader in readers.values():
        for text in reader.rest():
            queue += _ordered(reader.terminal.feed(text)[0], number + 1)
            yield from _settled(queue)
    yield from queue


def _ordered(lines: list[Line], order: int) -> list[Line]:
    for line in lines:
        line.order = order
    return lines


def _settled(queue: list[Line]) -> list[Line]:
    """Take the lines in front that are closed, once there are many."""
    if len(queue) < 4_096:
        return []
    # An open line holds up those behind it only so long: a bar at the top must not keep a whole flood in memory.
    count = next((index for index, line in enumerate(queue) if line.open), len(queue))
    if not count and len(queue) > 65_536:
        count = len(queue) // 2
    taken = queue[:count]
    del queue[:count]
    return taken


def _size(path: Path) -> int:
    """Return the bytes of a file, 0 when it is none, or has gone."""
    try:
        facts = path.stat()
    except OSError:
        return 0
    return facts.st_size if stat.S_ISREG(facts.st_mode) else 0


class _Stream:
    """One stream of one rank in one attempt."""

    def __init__(self, run_dir: Path, attempt: str, rank: int, stream: str) -> None:
        self.attempt = attempt
        self.terminal = Terminal(rank, stream, limit=None)
        self._path = run_dir / f"rank{rank}.{stream}"
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._positions = Positions()
        self._missing = 0

    def texts(self, event: OutEvent) -> Iterator[str]:
        """Yield the text of an event in pieces; none of what came before."""
        start, stop = event.offset, event.offset + event.length
        reached = self._positions.next
        new = self._positions.take(start, stop)
        if new is None:
            return
        if new > reached and not self._begins_line(new):
            yield "…"
        if self._path.is_file():
            yield from self._read(new, stop)
        elif event.text is not None:
            yield event.text.encode("utf-8", "replace")[new - start :].decode("utf-8", "replace")
        else:
            yield f"\n… {event.lines:,} lines are not on this machine\n"

    def rest(self) -> Iterator[str]:
        """Yield what the file has beyond the events."""
        yield from self._read(self._positions.next, _size(self._path))
        yield self._decoder.decode(b"", final=True)

    def _begins_line(self, offset: int) -> bool:
        """Tell whether a line begins at a byte of the file; if there is no file, we hope so."""
        try:
            with self._path.open("rb") as file:
                file.seek(offset - 1)
                return file.read(1) == b"\n"
        except OSError:
            return True

    def _read(self, start: int, stop: int) -> Iterator[str]:
        stop = min(stop, _size(self._path))
        try:
            file = self._path.open("rb")
        except OSError:
            return
        with file:
            for begin, end, there in spans(file.fileno(), start, stop):
                if there:
                    yield self._what_is_missing()
                    yield from self._pieces(file, begin, end)
                else:
                    self._missing += end - begin

    def _what_is_missing(self) -> str:
        """Return a line about what was given up since the last text."""
        if not self._missing:
            return ""
        text = f"…\n… {size_text(self._missing)} were not kept\n…"
        self._missing = 0
        self._decoder.reset()
        return text

    def _pieces(self, file: BinaryIO, start: int, stop: int) -> Iterator[str]:
        file.seek(start)
        while start < stop and (data := file.read(min(_PIECE, stop - start))):
            start += len(data)
            yield self._decoder.decode(data)


def join(lines: Iterable[Line], *, labelled: bool = False) -> str:
    """Return lines as text: each closed one ends with a newline; ``labelled`` puts ``[rank]`` before each."""
    parts = []
    for line in lines:
        if labelled:
            parts.append(f"{label(line.rank, line.stream)} ")
        parts.append(line.text)
        if labelled or not line.open:
            parts.append("\n")
    return "".join(parts)
