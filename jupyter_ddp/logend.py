"""The ends of a run's logs: how it is, and what was told last. What came before is not read, however long."""

from __future__ import annotations

import contextlib
import heapq
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jupyter_ddp.events import DisplayEvent, Event, OutEvent, RunEvent, decode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from jupyter_ddp.rundir import RunDirectory

BLOCK: Final = 64 << 10
"""Bytes of a log that are read at once."""
_FOR_STATE: Final = 64 << 10
_SHOWN: Final = tuple(f'{{"kind":"{kind.kind}"'.encode() for kind in (OutEvent, DisplayEvent))


@dataclass(frozen=True, slots=True)
class LogState:
    """How a run is, as the end of its log tells.

    Attributes:
        word: A phase of `events.PHASES` while the run lives, else how it ended: an outcome of `events.OUTCOMES`, or
            ``pruned`` when its log has been removed.
        alive: Whether somebody keeps it: those who do tidy up for a moment after its end.
        ended: When it ended (seconds since the epoch), None when it has not, or nobody knows.
    """

    word: str
    alive: bool
    ended: float | None = None

    @property
    def going_on(self) -> bool:
        """Whether it can still be waited for, interrupted or stopped."""
        return self.alive and self.ended is None


def log_state(run: RunDirectory) -> LogState:
    """Return how a run is, for lists and reprs: cheap, whatever the size of its logs, and it never raises."""
    alive = run.is_alive()
    log = _log(run, 0)
    for event in _backwards(log, _FOR_STATE):
        if isinstance(event, RunEvent) and event.phase == "ended":
            return LogState(event.outcome or event.phase, alive, event.time)
        if isinstance(event, RunEvent) and alive:
            return LogState(event.phase, alive)
    if alive:
        return LogState("running" if log.exists() else "starting", alive)
    with contextlib.suppress(OSError):
        if not run.has_record():
            return LogState("pruned", alive)
    return LogState("lost", alive)


def what_happened(run: RunDirectory) -> list[Event]:
    """Return all events by time, but not what the ranks showed (text and displays), which is nearly all of a log."""
    found: list[Event] = []
    for node in range(run.nodes()):
        with contextlib.suppress(OSError), _log(run, node).open("rb") as log:
            events = (decode(line) for line in log if not line.startswith(_SHOWN))
            found += (event for event in events if event and not isinstance(event, OutEvent | DisplayEvent))
    return sorted(found, key=operator.attrgetter("time"))


def last_events(run: RunDirectory) -> Iterator[Event]:
    """Yield the events of all logs from the last to the first, all instances' together by time; as far as one asks."""
    logs = (_by_time(_backwards(_log(run, node))) for node in range(run.nodes()))
    for _, event in heapq.merge(*logs, key=operator.itemgetter(0), reverse=True):
        yield event


def _by_time(events: Iterator[Event]) -> Iterator[tuple[float, Event]]:
    """Yield events that go back in a log, with times that only go back: the order of one log stays what it is."""
    time = float("inf")
    for event in events:
        time = min(time, event.time)
        yield time, event


def _log(run: RunDirectory, node: int) -> Path:
    return run.path / f"node-{node}.jsonl"


def _backwards(log: Path, most: int | None = None) -> Iterator[Event]:
    """Yield the events of a log from its end, of its last ``most`` bytes or of all."""
    try:
        at = log.stat().st_size
    except OSError:
        return
    stop = 0 if most is None else max(0, at - most)
    rest = b""
    while at > stop:
        start = max(stop, at - BLOCK)
        try:
            with log.open("rb", buffering=0) as file:
                file.seek(start)
                data = file.read(at - start)
        except OSError:
            return
        rest, *lines = (data + rest).split(b"\n")
        yield from filter(None, map(decode, reversed(lines)))
        at = start
    if at == 0 and (event := decode(rest)) is not None:
        yield event
