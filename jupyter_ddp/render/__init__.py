"""A run as a MIME bundle for a notebook. Pure: the time is passed in.

``text/plain`` is the record, for people and for grep: a status line, then each kept line as ``[rank] text``
(``[rank!] text`` for stderr; ``[0-3] text`` for what several ranks display alike), then a failure's first cause.
``text/html`` must read well with no style and no script of ours. The vendor JSON is `snapshot.snapshot`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from jupyter_ddp.render.html import LIVE_DISPLAYS, LIVE_LINES, html
from jupyter_ddp.render.snapshot import MIME, snapshot
from jupyter_ddp.view import DisplayView, RankFailure, RunView, sgr
from jupyter_ddp.view.failure import failure_of
from jupyter_ddp.view.summary import cut_text, earlier_text, note_lines, status_line
from jupyter_ddp.view.terminal import Line
from jupyter_ddp.words import label, ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "LIVE_DISPLAYS",
    "MIME",
    "bundle",
    "failing_tail",
    "failure_text",
    "line_text",
    "plain",
    "rank_text",
]


class _Row(NamedTuple):
    """A line of text/plain, and whose it is: (rank or None, 0 stdout, 1 stderr, 2 display or other)."""

    text: str
    rank: int | None
    stream: int
    order: int = 0  # of a display: its place in the view


def bundle(view: RunView, *, now: float, final: bool, seq: int = 0, displays: bool = True) -> dict[str, Any]:
    """Return the MIME bundle of a run.

    Args:
        view: The run.
        now: Seconds since the epoch, for the duration of a run that goes on.
        final: Whether this is the record that stays: all kept lines. Else it is short, and its JSON has no lines.
        seq: The number of the last live message that was sent.
        displays: Whether the JSON has the rich output too (the HTML always has it).
    """
    rows = list(_rows(view)) if final else _last_rows(view)
    head = status_line(view, now)
    text = "\n".join([head, *(row.text for row in rows), *_after(view, final=final)])
    index = _index(rows) if final else None
    places = _places(rows) if final else {}
    shown = displays or final
    return {
        "text/plain": text,
        "text/html": html(view, now=now, final=final),
        MIME: snapshot(view, now=now, seq=seq, status=head, displays=shown, index=index, places=places),
    }


def plain(view: RunView, *, now: float, final: bool = True) -> str:
    """Return a run as plain text, as in `bundle`."""
    rows = _rows(view) if final else _last_rows(view)
    return "\n".join([status_line(view, now), *(row.text for row in rows), *_after(view, final=final)])


def failure_text(view: RunView) -> str:
    """Return the message of a `DistributedError`: the first cause on top, then all that belongs to it.

    That of a run that succeeded is "".
    """
    if view.ok:
        return ""
    failure = view.failure
    if failure is None:
        return view.reason or f"the run ended without success ({view.outcome or view.phase})"
    lines = [*_cause(failure), *failure.consequences(), *note_lines(view)]
    if view.log_dir:
        lines.append(f"log: {view.log_dir}")
    return "\n".join(lines)


def rank_text(view: RunView, rank: int) -> str:
    """Return how one rank ended badly: its own failure, or why it was stopped; "" when it did not."""
    failure, state = failure_of(view, rank), view.ranks[rank].state
    if failure is not None:
        return "\n".join(_cause(failure)).rstrip("\n")
    if view.ok or state in ("finished", "failed") or not view.over:
        return ""
    first = view.failure
    why = first.headline if first else view.reason or f"the run was {view.outcome}"
    lines = [f"rank {rank} had not finished when the run was ended: {why}"]
    if view.ranks[rank].stacks:
        lines += ["", view.ranks[rank].stacks.strip("\n")]
    return "\n".join(lines)


def _cause(failure: RankFailure) -> list[str]:
    lines = [failure.headline]
    extra = failure.message.strip().split("\n")[1:] if failure.type else []
    lines += extra[:20] if not failure.traceback else []
    if failure.place:
        lines.append(failure.place)
    if failure.traceback:
        lines += ["", failure.traceback.strip("\n"), ""]
    return lines


def line_text(line: Line) -> str:
    """Return a line as text/plain has it: ``[rank] text``."""
    return f"{label(line.rank, line.stream)} {line.text}"


def _line_row(line: Line) -> _Row:
    return _Row(line_text(line), line.rank, 1 if line.stream == "stderr" else 0)


def _display_rows(shown: DisplayView) -> Iterator[_Row]:
    who = ranks_text(shown.ranks)
    for text in shown.text.rstrip("\n").split("\n"):
        yield _Row(f"[{who}] {text}", shown.ranks[0], 2, shown.order)


def _is_idle(line: Line) -> bool:
    """Tell whether a line is only a cursor that waits: what a cleared progress bar leaves."""
    return line.open and not sgr.strip(line.text).strip()


def _inherited(view: RunView) -> Iterator[_Row]:
    """Yield the magic line that holds, when the cell's own line does not say all of it.

    With what comes from elsewhere (``setup`` is code) it may be several lines.
    """
    if view.line:
        yield from (_Row(text, None, 2) for text in view.line.split("\n"))


def _rows(view: RunView) -> Iterator[_Row]:
    yield from _inherited(view)
    cut = view.lines.cut
    before = view.lines.before_cut[-1].order if view.lines.before_cut else 0
    for item in view.items():
        if cut and isinstance(item, Line) and item.order > before:
            yield _Row(cut_text(view, cut), None, 2)
            cut = 0
        if isinstance(item, DisplayView):
            yield from _display_rows(item)
        elif not _is_idle(item):
            yield _line_row(item)
    if cut:
        yield _Row(cut_text(view, cut), None, 2)


def _last_rows(view: RunView) -> list[_Row]:
    earlier, items = view.recent(LIVE_LINES, LIVE_DISPLAYS)
    rows = list(_inherited(view))
    for item in items:
        if isinstance(item, DisplayView):
            rows += _display_rows(item)
            continue
        if earlier:
            rows.append(_Row(earlier_text(earlier), None, 2))
            earlier = 0
        if not _is_idle(item):
            rows.append(_line_row(item))
    return rows


def _index(rows: list[_Row]) -> list[list[int | None]]:
    """Return the runs of lines of one rank and stream below the status line: [rank, stream, lines]."""
    index: list[list[int | None]] = []
    for row in rows:
        if index and index[-1][0] == row.rank and index[-1][1] == row.stream:
            index[-1][2] = (index[-1][2] or 0) + 1
        else:
            index.append([row.rank, row.stream, 1])
    return index


def _places(rows: list[_Row]) -> dict[int, tuple[int, int]]:
    """Return where each display stands in text/plain: its first line (the status line is 0), and how many it has."""
    places: dict[int, tuple[int, int]] = {}
    for number, row in enumerate(rows, 1):
        if row.order:
            first, count = places.get(row.order, (number, 0))
            places[row.order] = first, count + 1
    return places


def _after(view: RunView, *, final: bool) -> list[str]:
    """Return what stands below the lines: the failure with its traceback, notes, and where the log is."""
    lines: list[str] = []
    failure = view.failure
    if failure is None:
        notes = note_lines(view)
        return ["", *notes] if notes else []
    if final:
        tail = failing_tail(view, lambda line: line.kept)
        lines += ["", *tail] if tail else []
        lines += ["", *failure_text(view).split("\n")]
    else:
        lines += ["", failure.headline]
    return lines


def failing_tail(view: RunView, visible: Callable[[Line], bool]) -> list[str]:
    """Return the last lines of the rank that failed, with a heading, if not all of them are visible anyway."""
    last = [line for line in view.failing_lines(visible) if not _is_idle(line)]
    return [f"last lines of rank {last[0].rank}:", *map(line_text, last)] if last else []
