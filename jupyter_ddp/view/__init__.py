"""What a run looks like after some of its events: a fold, without I/O and without a clock.

``fold`` takes whatever a log holds: events that come twice are dropped by their number, missing ones are counted,
unknown or impossible ones change nothing, and it never raises.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from jupyter_ddp.events import (
    OUTCOMES,
    PHASES,
    DisplayEvent,
    ErrorEvent,
    Event,
    NoteEvent,
    OutEvent,
    RankEvent,
    RunEvent,
    StacksEvent,
    ValueEvent,
)
from jupyter_ddp.view.failure import RankFailure
from jupyter_ddp.view.model import (
    MOST_RANKS,
    MOST_TIME,
    OUTPUT_CAP,
    STATES,
    Note,
    RankView,
    RunView,
    new_ranks,
    new_view,
)
from jupyter_ddp.view.positions import Positions
from jupyter_ddp.view.rich_output import DisplayView, shorten
from jupyter_ddp.view.scrollback import size_of
from jupyter_ddp.view.terminal import Line, Terminal
from jupyter_ddp.words import shorten_text

__all__ = [
    "OUTPUT_CAP",
    "DisplayView",
    "Line",
    "Note",
    "RankFailure",
    "RankView",
    "RunView",
    "fold",
    "new_view",
]

_MOST_NOTES: Final = 200
_MOST_NOTE: Final = 4_000
_MOST_TEXT: Final = 256 * 1024
_MOST_NUMBER: Final = 1 << 62
_STREAMS: Final = ("stdout", "stderr")


def fold(view: RunView, event: Event) -> RunView:
    """Return the view after one more event; the argument itself is changed and returned."""
    if not _is_sane(event):
        return view
    if event.attempt != view.attempt:
        _change_attempt(view, event.attempt)
    if event.seq > 0:
        seen = view.reading.seen.setdefault((event.attempt, event.node), Positions(1))
        if seen.take(event.seq, event.seq + 1) is None:
            return view
    late = event.attempt != view.attempt
    view.latest = max(view.latest, event.time)
    view.changes += 1
    if isinstance(event, OutEvent):
        _fold_out(view, event)
    elif isinstance(event, RunEvent):
        if not late:
            _fold_run(view, event)
    elif isinstance(event, NoteEvent):
        _note(view, event.text, event.level, event.rank, event.time)
    elif event.rank is not None and 0 <= event.rank < len(view.ranks) and not late:
        _fold_of_rank(view, view.ranks[event.rank], event)
    return view


def _is_sane(event: Event) -> bool:
    """Tell whether an event can be folded: hostile numbers are for `events.from_json` to type, here to bound."""
    if not 0 <= event.node < MOST_RANKS or event.seq >= _MOST_NUMBER:
        return False
    return abs(event.time) < MOST_TIME  # false for NaN too


def _change_attempt(view: RunView, attempt: str) -> None:
    """Begin a new attempt. Attempts are named by their start: an older name is a late event of an earlier one."""
    if view.attempt is not None and attempt <= view.attempt:
        return
    if view.attempt is not None:
        view.displays.freeze()
        view.ranks = new_ranks(view)
        view.values.clear()
        view.phase, view.phases, view.outcome, view.reason, view.unfinished = "queued", {}, None, "", ()
        view.ended = None
        _note(view, f"attempt {view.attempts + 1} of this run begins here", "info", None, view.latest)
        view.milestones += 1
    view.attempt = attempt
    view.attempts += 1


def _note(view: RunView, text: str, level: str, rank: int | None, time: float) -> None:
    text = shorten_text(text, _MOST_NOTE)
    ranks = () if rank is None else (rank,)
    for note in view.notes:
        if note.text == text and note.level == level and bool(note.ranks) == bool(ranks):
            note.ranks = tuple(sorted({*note.ranks, *ranks}))
            return
    if len(view.notes) < _MOST_NOTES:
        view.notes.append(Note(text, level, ranks, time))


def _fold_run(view: RunView, event: RunEvent) -> None:
    if event.phase not in PHASES:
        return
    view.phases.setdefault(event.phase, event.time)
    if event.outcome in OUTCOMES and (view.outcome is None or event.phase == "ended"):
        view.outcome = event.outcome
        view.reason = event.reason or view.reason
        view.unfinished = tuple(r for r in event.unfinished if r in range(view.world_size)) or view.unfinished
    if event.node == 0:
        view.detail = {**view.detail, **event.detail}
    if event.phase == "ended" and event.node != 0:
        return  # one instance has ended; the run ends when the first one says so
    if PHASES.index(event.phase) > PHASES.index(view.phase):
        view.phase = event.phase
        view.milestones += 1
    if event.phase == "ended" and view.ended is None:
        view.ended = event.time


def _fold_of_rank(view: RunView, rank: RankView, event: Event) -> None:
    if isinstance(event, RankEvent):
        _fold_rank(view, rank, event)
    elif isinstance(event, ErrorEvent):
        _fold_error(view, rank, event)
    elif isinstance(event, DisplayEvent):
        _fold_display(view, rank, event)
    elif isinstance(event, ValueEvent):
        view.values[event.name, rank.rank] = event
        if event.note:
            _note(view, event.note, "info" if event.file else "warning", rank.rank, event.time)
    elif isinstance(event, StacksEvent):
        rank.stacks = event.text[-_MOST_TEXT:]


def _fold_rank(view: RunView, rank: RankView, event: RankEvent) -> None:
    rank.node = event.node
    for name in ("pid", "host", "local_rank", "device"):
        value = getattr(event, name)
        if value is not None:
            setattr(rank, name, value)
    before = rank.state
    if event.state == "started":
        rank.started = event.time
        _advance(rank, "starting")
    elif event.state == "running":
        rank.running = event.time
        _advance(rank, "running")
    elif event.state == "heard":
        _advance(rank, "heard")
    elif event.state == "finished":
        rank.finished, rank.ok = event.time, bool(event.ok)
        if rank.ok:
            rank.state = "finished"
        elif rank.state != "ended":  # an interrupt ends a cell, it does not fail it
            rank.state = "failed"
    elif event.state == "ended":
        _fold_end(rank, event)
    if rank.state != before:
        view.milestones += 1


def _advance(rank: RankView, state: str) -> None:
    """Go on to a state, never back: what comes late must not revive a rank."""
    if STATES.index(state) > STATES.index(rank.state):
        rank.state = state


def _fold_end(rank: RankView, event: RankEvent) -> None:
    rank.ended, rank.by_run = event.time, bool(event.by_run)
    rank.exit_code, rank.signal = event.exit_code, event.signal
    if rank.signal is None and rank.exit_code is not None and rank.exit_code < 0:
        rank.signal, rank.exit_code = -rank.exit_code, None
    bad = bool(rank.signal or rank.exit_code)
    if rank.ok and (not bad or rank.by_run):
        rank.state = "finished"
    elif rank.ok is None and rank.error is None and rank.by_run:
        rank.state = "ended"
    elif rank.state != "ended":
        rank.state = "failed"


def _fold_error(view: RunView, rank: RankView, event: ErrorEvent) -> None:
    event = replace(
        event, message=_clean(event.message[:_MOST_TEXT]), traceback=_clean(event.traceback[-_MOST_TEXT:])
    )
    old = rank.error
    if old is not None:
        if (old.type, old.message) != (event.type, event.message):
            return  # what comes after the first error of a rank is its consequence
        event = replace(event, time=min(old.time, event.time), traceback=event.traceback or old.traceback)
    rank.error = event
    if not (event.type == "SystemExit" and event.code == 0):
        rank.state = "ended" if event.type == "KeyboardInterrupt" else "failed"
    view.milestones += 1


def _clean(text: str) -> str:
    """Return text that UTF-8 can say: lone surrogates replaced."""
    return text.encode("utf-8", "replace").decode() if not text.isascii() else text


def _fold_display(view: RunView, rank: RankView, event: DisplayEvent) -> None:
    if event.action == "clear":
        if event.wait:
            rank.clear_next = True
        else:
            _clear(view, rank)
        return
    if rank.clear_next:
        _clear(view, rank)
    shown = DisplayView(
        ranks=(rank.rank,),
        data=shorten(event.data),
        metadata=dict(event.metadata),
        result=event.action == "result",
        display_id=event.display_id,
        order=view.reading.order + 1,
        file=event.file,
    )
    if event.action in {"display", "result"}:
        view.reading.order += 1
        view.displays.add(rank.rank, shown)
    elif event.action == "update" and event.display_id:
        view.displays.update(rank.rank, event.display_id, shown)


def _clear(view: RunView, rank: RankView) -> None:
    """Forget what a rank has shown so far, as ``clear_output`` does in a notebook."""
    rank.clear_next = False
    view.displays.clear(rank.rank)
    view.lines.discard(lambda line: line.rank == rank.rank)
    for stream in _STREAMS:
        view.reading.terminals.pop((view.attempt or "", rank.rank, stream), None)


def _fold_out(view: RunView, event: OutEvent) -> None:
    number = event.rank
    if number is None or not 0 <= number < len(view.ranks) or event.stream not in _STREAMS:
        return
    if event.offset < 0 or event.length <= 0 or event.offset >= _MOST_NUMBER or event.length >= _MOST_NUMBER:
        return
    key = (event.attempt, number, event.stream)
    offsets = view.reading.offsets.get(key)
    if offsets is None:
        offsets = view.reading.offsets[key] = Positions()
    new = offsets.take(event.offset, event.offset + event.length)
    if new is None:
        return
    rank = view.ranks[number]
    if event.text is None:
        _skip_lines(view, rank, key, max(0, event.lines))
        return
    if rank.clear_next:
        _clear(view, rank)
    text = event.text
    if new != event.offset:  # a part of it has come before
        text = text.encode("utf-8", "replace")[new - event.offset :].decode("utf-8", "replace")
    terminal = view.reading.terminals.get(key)
    if terminal is None:
        terminal = view.reading.terminals[key] = Terminal(number, event.stream)
    _take_lines(view, rank, *terminal.feed(text))


def _skip_lines(view: RunView, rank: RankView, key: tuple[str, int, str], count: int) -> None:
    """Count the lines of text that nobody brought here; the line that was open before it ended in it."""
    if count and key in view.reading.terminals and view.reading.terminals.pop(key).close():
        count -= 1
    rank.lines += count
    if view.shown(rank.rank):
        view.lines.skip(count)
    else:
        view.hidden += count


def _take_lines(view: RunView, rank: RankView, begun: list[Line], changed: list[Line]) -> None:
    for place, line in enumerate(begun, view.reading.order + 1):
        line.order = place
        line.size = size_of(line)
    view.reading.order += len(begun)
    if begun:
        rank.lines += len(begun)
        rank.last = begun[-1]
        rank.tail.add(begun)
        if view.shown(rank.rank):
            view.lines.add(begun)
        else:
            view.hidden += len(begun)
    difference = 0
    for line in changed:
        size = size_of(line)
        if line.kept:
            difference += size - line.size
        line.size = size
    if changed:
        rank.last = changed[-1]
        if difference:
            view.lines.resized(difference)
