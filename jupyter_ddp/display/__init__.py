"""Shows a run while it goes on: in a notebook or in a terminal. Everything is published from the caller's thread.

Both publishers have the same four calls. ``start`` once; ``feed`` with each batch of events that was just folded (or
none, when ``due`` has passed); ``due`` says in how many seconds they want to be fed again; ``finish`` once at the end.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TextIO, cast

from jupyter_ddp.display.pack import Packer, printable
from jupyter_ddp.events import DisplayEvent, ErrorEvent, Event, OutEvent, RankEvent, RunEvent
from jupyter_ddp.render import LIVE_DISPLAYS, MIME, bundle, failing_tail
from jupyter_ddp.view import DisplayView
from jupyter_ddp.view.positions import Positions
from jupyter_ddp.view.rich_output import MAX_TEXT, shorten
from jupyter_ddp.view.summary import cut_text, note_lines, status_line
from jupyter_ddp.view.terminal import Line, Terminal
from jupyter_ddp.words import label, shorten_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from jupyter_ddp.view import RunView

COMM_TARGET: Final = "jupyter_ddp.run"
_RATES: Final = ((10.0, 0.2), (120.0, 1.0))  # (until this age, seconds between snapshots)
_SLOWEST: Final = 10.0
_COALESCE: Final = 0.05
_HEARTBEAT: Final = 1.0
_BYTES_A_SECOND: Final = 500_000.0
_REPEATED_A_SECOND: Final = 50_000.0  # of rich output that the page has already
_URGENT: Final = 1.0  # what is urgent waits at most so long, however big the output is
_ENDED_BY_ERROR: Final = ("failed", "lost")
_SILENCE: Final = 2.0  # seconds without a line after which a terminal says what the run does


class Publisher(Protocol):
    """Shows one run."""

    def start(self, view: RunView) -> None:
        """Show the run for the first time."""

    def feed(self, view: RunView, events: Iterable[Event], now: float) -> None:
        """Take events that were just folded into the view, and publish what is due."""

    def due(self, now: float) -> float | None:
        """Return the seconds until ``feed`` wants to be called even without events; None: not before there are some."""

    def finish(self, view: RunView, now: float) -> None:
        """Show the run for the last time, as it stays."""


class Handle(Protocol):
    """What shows one output and can replace it: IPython's ``DisplayHandle``."""

    def update(self, obj: dict[str, Any], *, raw: bool) -> None:
        """Replace the output."""


class Comm(Protocol):
    """What carries live messages to the page."""

    def send(self, data: dict[str, Any]) -> None:
        """Send a message."""


def open_display(data: dict[str, Any]) -> Handle | None:
    """Show a MIME bundle with IPython's ``display`` and return its handle."""
    from IPython.display import display

    handle: Handle | None = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
    return handle


def open_comm(comm_id: str, data: dict[str, Any]) -> Comm | None:
    """Return a comm under our own id, or None where there is no kernel to carry it.

    It is never opened or closed by a message. Pages look for messages with an id of ours, whenever they were loaded; to
    open it would make every front end complain that does not know it.
    """
    from comm import create_comm
    from IPython.core.getipython import get_ipython

    if getattr(get_ipython(), "kernel", None) is None:
        return None
    comm: Any = create_comm(target_name=COMM_TARGET, comm_id=comm_id, data=data, primary=False)
    comm.close = lambda **_: None  # which a comm calls, with a message, when its object goes
    return cast("Comm", comm)


class NotebookPublisher:
    """One output that is replaced as the run goes on, and live messages beside it.

    The output is replaced 5 times a second at first, less often later, at once when something of weight happens, and
    never so fast that it costs more than half a megabyte a second. As it is replaced whole, figures go with it again
    when only lines or the time have changed: then it is replaced less often the bigger they are. What is of weight (a
    phase, a rank's state) waits for none of this more than a second. The last state is always shown.
    """

    def __init__(
        self,
        *,
        display: Callable[[dict[str, Any]], Handle | None] = open_display,
        comm: Callable[[str, dict[str, Any]], Comm | None] = open_comm,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._open_display = display
        self._open_comm = comm
        self._clock = clock
        self._handle: Handle | None = None
        self._comm: Comm | None = None
        self._begun = self._last = 0.0
        self._size = self._rich = 0  # bytes of the last output, and of the rich output in its HTML
        self._changes = self._milestones = self._displays = -1
        self._dirty = self._urgent = self._new_displays = False
        # Numbers go on over publishers of one run (attach, a new kernel), because pages drop those that they had.
        self._packer = Packer(0.0)

    def start(self, view: RunView) -> None:
        """Show the run, and open its comm."""
        now = self._clock()
        self._begun = now
        self._packer = Packer(now, seq=int(now * 1000))
        self._comm = self._open_comm(f"{COMM_TARGET}:{view.id}", {"seq": self._packer.seq})
        self._publish(view, now, final=False)

    def feed(self, view: RunView, events: Iterable[Event], now: float) -> None:
        """Send live messages as far as their rate allows; replace the output when that is due."""
        if self._comm is not None:
            for event in events:
                self._packer.add(event)
            self._send(now)
        self._dirty = view.changes != self._changes
        self._urgent = view.milestones != self._milestones
        self._new_displays = view.displays.version != self._displays
        self._last = min(self._last, now)  # a clock that was set back must not stop us
        if self._until_snapshot(now) <= 0:
            self._publish(view, now, final=False)

    def due(self, now: float) -> float | None:
        """Return the seconds until a message or the output is due."""
        message = self._packer.due(now) if self._comm is not None else None
        output = self._until_snapshot(now)
        return output if message is None else min(message, output)

    def finish(self, view: RunView, now: float) -> None:
        """Send what waits and show the final output."""
        self._send(now, last=True)
        self._publish(view, now, final=True)

    def _until_snapshot(self, now: float) -> float:
        by_size = self._size / _BYTES_A_SECOND
        if self._urgent:
            interval = max(_COALESCE, min(by_size, _URGENT))
        else:
            age = now - self._begun
            interval = max(by_size, next((seconds for until, seconds in _RATES if age < until), _SLOWEST))
            if not self._dirty:  # only the time goes on
                interval = max(interval, _HEARTBEAT)
            if not self._new_displays:
                interval = max(interval, min(self._rich / _REPEATED_A_SECOND, _SLOWEST))
        return max(0.0, self._last + interval - now)

    def _send(self, now: float, *, last: bool = False) -> None:
        if self._comm is None:
            return
        message = self._packer.message(now, last=last)
        if message is not None:
            self._comm.send(printable(message))

    def _publish(self, view: RunView, now: float, *, final: bool) -> None:
        shown = view.displays.version
        data = bundle(view, now=now, final=final, seq=self._packer.seq, displays=shown != self._displays)
        data = printable(data)
        self._size = sum(len(data[mime]) for mime in ("text/plain", "text/html")) + _size(data[MIME])
        self._rich = _rich_size(view)
        self._changes, self._milestones, self._displays = view.changes, view.milestones, shown
        self._dirty = self._urgent = self._new_displays = False
        self._last = now
        if self._handle is None:
            self._handle = self._open_display(data)
        else:
            self._handle.update(data, raw=True)


def _size(snapshot: dict[str, Any]) -> int:
    """Return about how many bytes a snapshot has: what can be big in it, and the ranks."""
    displays = sum(_text_size(shown["data"]) for shown in snapshot.get("displays", ()))
    return 1_000 + 40 * len(snapshot["ranks"]) + displays


def _rich_size(view: RunView) -> int:
    """Return about how many bytes of rich output a live output has."""
    _, items = view.recent(0, LIVE_DISPLAYS)
    return sum(_text_size(item.data) for item in items if isinstance(item, DisplayView))


def _text_size(data: dict[str, Any]) -> int:
    return sum(len(value) for value in data.values() if isinstance(value, str))


@dataclass(slots=True)
class _Gap:
    """Lines of a stream that nobody brought here."""

    rank: int
    stream: str
    lines: int


class TerminalPublisher:
    """Plain lines as they come, ``[rank] text``; an open line (a progress bar) is printed once it is closed.

    Lines of a flood that nobody brought here are counted where they would stand; the last lines of a rank that failed
    are printed at the end if ``--show`` has left them out. That a run starts and runs is said only if nothing else is
    to be seen for a while; that somebody is ending it, at once.
    """

    def __init__(self, *, out: TextIO | None = None, clock: Callable[[], float] = time.time) -> None:
        self._out = out
        self._clock = clock
        self._terminals: dict[tuple[str, int, str], tuple[Terminal, Positions]] = {}
        self._waiting: dict[int, Line | _Gap] = {}  # begun and not yet printed, by id, in order
        self._said: set[str] = set()
        self._silent_since: float | None = None  # None once a rank has shown something

    def start(self, view: RunView) -> None:
        """Print the line that holds, if the cell does not say all of it."""
        if view.line:
            self._print(view.line)
            self._flush()
        self._silent_since = self._clock()

    def feed(self, view: RunView, events: Iterable[Event], now: float) -> None:
        """Print lines that were closed, and what is new of the run."""
        for event in events:
            if isinstance(event, OutEvent):
                self._take(view, event)
            elif isinstance(event, DisplayEvent) and event.action != "clear" and event.rank is not None:
                self._print_closed(view)
                if view.shown(event.rank):
                    self._print_display(event.rank, event)
            elif isinstance(event, RunEvent) and event.phase == "ending":
                if event.outcome in _ENDED_BY_ERROR:
                    self._silent_since = now  # ranks tell of their errors, and the end comes soon
                else:
                    self._say_status(view, now)
            elif isinstance(event, ErrorEvent) and event.rank is not None and not event.traceback:
                self._print_closed(view)
                text = (
                    f"{event.type}: {shorten_text(event.message, MAX_TEXT)}" if event.message else event.type
                )
                self._print_of_rank(event.rank, text, "stderr")
            elif isinstance(event, RankEvent) and event.state == "heard":
                self._say_status(view, now)
        self._print_closed(view)
        if self.due(now) == 0:
            self._say_status(view, now)
            self._silent_since = None if _is_under_way(view) else now
        self._flush()

    def due(self, now: float) -> float | None:
        """Return the seconds until silence is too long; None once a rank has shown something or all run."""
        return None if self._silent_since is None else max(0.0, self._silent_since + _SILENCE - now)

    def finish(self, view: RunView, now: float) -> None:
        """Print the lines that are still open, what was left out, the notes and how the run ended."""
        for waiting in self._waiting.values():
            if isinstance(waiting, _Gap) or waiting.text.strip():
                self._print_line(view, waiting)
        self._waiting.clear()
        for text in (*failing_tail(view, lambda line: view.shown(line.rank)), *note_lines(view)):
            self._print(text)
        self._print(status_line(view, now))
        self._flush()

    def _take(self, view: RunView, event: OutEvent) -> None:
        if event.rank is None or not view.shown(event.rank) or event.length <= 0:
            return
        key = (event.attempt, event.rank, event.stream)
        if key not in self._terminals:
            self._terminals[key] = (Terminal(event.rank, event.stream), Positions())
        terminal, positions = self._terminals[key]
        if positions.take(event.offset, event.offset + event.length) is None:
            return
        if event.text is None:
            lines = max(0, event.lines)
            if lines and terminal.close():  # the line that was open ended in the text that is not here
                lines -= 1
                self._terminals[key] = (Terminal(event.rank, event.stream), positions)
            last = next(reversed(self._waiting.values()), None)
            if isinstance(last, _Gap) and (last.rank, last.stream) == (event.rank, event.stream):
                last.lines += lines
            elif lines:
                gap = _Gap(event.rank, event.stream, lines)
                self._waiting[id(gap)] = gap
            return
        begun, _ = terminal.feed(event.text)
        for line in begun:
            self._waiting[id(line)] = line

    def _print_closed(self, view: RunView) -> None:
        for key, waiting in list(self._waiting.items()):
            if isinstance(waiting, _Gap) or not waiting.open:
                self._print_line(view, waiting)
                del self._waiting[key]

    def _print_line(self, view: RunView, line: Line | _Gap) -> None:
        if isinstance(line, _Gap):
            self._print_of_rank(line.rank, cut_text(view, line.lines), line.stream)
        else:
            self._print_of_rank(line.rank, line.text, line.stream)

    def _print_display(self, rank: int, event: DisplayEvent) -> None:
        shown = DisplayView(ranks=(rank,), data=shorten(event.data), file=event.file)
        self._print_of_rank(rank, shown.text.rstrip("\n"))

    def _say_status(self, view: RunView, now: float) -> None:
        text = status_line(view, now)
        head = text.split(" · ", 1)[0]
        if head not in self._said:
            self._said.add(head)
            self._print(text)
            self._flush()

    def _print_of_rank(self, rank: int, text: str, stream: str = "stdout") -> None:
        self._silent_since = None
        for line in text.split("\n"):
            self._print(f"{label(rank, stream)} {line}")

    def _print(self, text: str) -> None:
        out = self._where()
        if out is not None:
            encoding = getattr(out, "encoding", None) or "utf-8"
            out.write(text.encode(encoding, "replace").decode(encoding) + "\n")

    def _flush(self) -> None:
        out = self._where()
        if out is not None:
            out.flush()

    def _where(self) -> TextIO | None:
        """Return where lines go; a program that was started without a standard output has none."""
        return self._out or sys.stdout


def _is_under_way(view: RunView) -> bool:
    return view.phase == "ending" or any(rank.running is not None for rank in view.ranks)


def publisher() -> Publisher:
    """Return what shows a run here: a notebook when there is a kernel, else a terminal."""
    from IPython.core.getipython import get_ipython

    return NotebookPublisher() if getattr(get_ipython(), "kernel", None) is not None else TerminalPublisher()
