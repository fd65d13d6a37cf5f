"""Why a run ended badly: the first cause, who else failed of it, who was stopped because of it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jupyter_ddp.words import ranks_named, shorten_text, signal_words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jupyter_ddp.events import ErrorEvent
    from jupyter_ddp.view.model import RankView, RunView

_MOST_MESSAGE: Final = 1_000
"""Characters of an exception's text that a headline has."""
_ENDED_BY_USER: Final = frozenset({"interrupted", "stopped"})
# What a collective says when another rank has gone: true, but never the cause when there is anything else to blame.
_CONSEQUENCE: Final = re.compile(
    r"(?i)(?:closed|reset|aborted) by (?:peer|remote)|broken pipe|remote (?:process|peer)|ncclRemoteError"
    r"|connection (?:was )?(?:closed|refused|reset)|MPI_ERR_PROC_FAILED|store.*(?:closed|shut down)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The first cause of a run's bad end.

    Attributes:
        headline: One line that says it: ``rank 3 failed: ValueError: loss became nan at step 12``.
        rank: The rank that failed first, None when no rank is to blame (a launcher that did not start).
        type: The exception's type, "" when there was none (an exit, a crash, a launcher).
        message: The exception's text, or what happened instead.
        traceback: The traceback as text without frames of launchers; for a crash the stack that faulthandler wrote.
        line: The line of the cell, where the magic line is line 1; that of `where` when this is not "".
        where: In a call of `jupyter_ddp.launch`, the name of the file or of the function that has the line.
        source: That line's text.
        exit_code: The exit code of the rank's process, if it has ended with one.
        signal: The number of the signal that ended it, if one has.
        same: All ranks with the equal failure, ``rank`` among them.
        similar: Other ranks with an exception of the same type and another text.
        followers: Ranks that ended badly or were stopped in consequence.
        unfinished: On a timeout, the ranks that had not finished.
        stacks: On a timeout, where those were: (rank, text).
    """

    headline: str
    rank: int | None = None
    type: str = ""
    message: str = ""
    traceback: str = ""
    line: int | None = None
    where: str = ""
    source: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    same: tuple[int, ...] = ()
    similar: tuple[int, ...] = ()
    followers: tuple[int, ...] = ()
    unfinished: tuple[int, ...] = ()
    stacks: tuple[tuple[int, str], ...] = ()

    @property
    def place(self) -> str:
        """Where it happened, ``cell line 3: …`` or ``train.py line 11: …``, "" when that is not known."""
        if self.line is None:
            return ""
        source = (self.source or "").strip()
        place = f"{self.where or 'cell'} line {self.line}"
        return f"{place}: {source}" if source else place

    def consequences(self) -> list[str]:
        """Return what else is to be said, a line each: similar failures, and ranks that ended because of it."""
        lines = []
        if self.similar:
            lines.append(f"also {self.type} on {ranks_named(self.similar)}")
        if self.followers:
            lines.append(f"stopped because of it: {ranks_named(self.followers)}")
        return lines


def find_failure(view: RunView) -> RankFailure | None:
    """Return the first cause of a run's bad end as far as its events tell it, or None.

    What happens after the user ended the run is no failure; `late_errors` has it. When the run was lost, what its ranks
    say of it is a consequence: only an error of their own, from before, is a cause.
    """
    if view.outcome == "timeout":
        return _timeout(view)
    causes = [rank for rank in view.ranks if _failed(rank, view)]
    if view.outcome in _ENDED_BY_USER:
        causes = [rank for rank in causes if _before_ending(rank, view) and not _is_interrupt(rank)]
    elif view.outcome == "lost":
        own = [rank for rank in causes if rank.error is not None and not _looks_caused(rank)]
        causes = [rank for rank in own if _before_ending(rank, view)]
    if causes:
        return _of_rank(
            view, min(causes, key=lambda rank: (_is_interrupt(rank), _looks_caused(rank), _time(rank)))
        )
    if view.outcome in {"failed", "lost"}:
        message = view.reason or "the run ended badly and no rank has told why"
        ended = tuple(rank.rank for rank in view.ranks if rank.state in {"failed", "ended"})
        return RankFailure(headline=message, message=message, followers=ended)
    return None


def failure_of(view: RunView, rank: int) -> RankFailure | None:
    """Return how one rank failed, whoever was first, or None when it did not, or ended because the run did."""
    one = view.ranks[rank]
    return _of_rank(view, one, alone=True) if _failed(one, view) and not _is_interrupt(one) else None


def late_errors(view: RunView) -> list[str]:
    """Return the errors of ranks that the user had interrupted or stopped, a line each, equal ones together."""
    if view.outcome not in _ENDED_BY_USER:
        return []
    groups: dict[str, list[int]] = {}
    for rank in view.ranks:
        error = rank.error
        if error is not None and error.type not in {"KeyboardInterrupt", "SystemExit"}:
            groups.setdefault(exception_text(error.type, error.message), []).append(rank.rank)
    return [f"{ranks_named(ranks)} then raised {text}" for text, ranks in groups.items()]


def _failed(rank: RankView, view: RunView) -> bool:
    error = rank.error
    if error is not None:
        return not (error.type == "SystemExit" and error.code == 0)
    if rank.ended is not None and not rank.by_run:
        return not rank.ok or bool(rank.exit_code or rank.signal)
    return rank.ok is False and (rank.ended is not None or view.over)


def _time(rank: RankView) -> float:
    if rank.error is not None:
        return rank.error.time
    return next((t for t in (rank.ended, rank.finished) if t is not None), 0.0)


def _before_ending(rank: RankView, view: RunView) -> bool:
    """Tell whether a rank failed before the run began to end."""
    ending = view.phases.get("ending", view.phases.get("ended"))
    return ending is not None and _time(rank) < ending


def _is_interrupt(rank: RankView) -> bool:
    return rank.error is not None and rank.error.type == "KeyboardInterrupt"


def _looks_caused(rank: RankView) -> bool:
    return rank.error is not None and _CONSEQUENCE.search(rank.error.message) is not None


def _of_rank(view: RunView, first: RankView, *, alone: bool = False) -> RankFailure:
    ranks = [first] if alone else view.ranks
    same = tuple(rank.rank for rank in ranks if _failed(rank, view) and _same(rank, first))
    error = first.error
    similar = tuple(
        rank.rank
        for rank in ranks
        if error is not None
        and rank.error is not None
        and rank.error.type == error.type
        and rank.rank not in same
    )
    others = {*same, *similar}
    followers = tuple(r.rank for r in ranks if r.state in {"failed", "ended"} and r.rank not in others)
    who = ranks_named(same)
    message = error.message if error else _end_words(first, view.unit, several=len(same) > 1)
    return RankFailure(
        headline=_headline(who, error) if error else f"{who} {message}",
        rank=first.rank,
        type=error.type if error else "",
        message=message,
        traceback=(error.traceback if error else "") or ("" if error else first.stacks),
        line=error.line if error else None,
        where=error.where if error else "",
        source=error.source if error else None,
        exit_code=first.exit_code if first.ended is not None else (error.code if error else None),
        signal=first.signal,
        same=same,
        similar=similar,
        followers=followers,
    )


def _same(rank: RankView, first: RankView) -> bool:
    if rank.error is not None and first.error is not None:
        return (rank.error.type, rank.error.message) == (first.error.type, first.error.message)
    if rank.error is not None or first.error is not None:
        return False
    return (rank.exit_code, rank.signal, rank.ok) == (first.exit_code, first.signal, first.ok)


def _headline(who: str, error: ErrorEvent) -> str:
    if error.type == "SystemExit":
        return f"{who} called sys.exit({shorten_text(error.message, _MOST_MESSAGE) or error.code})"
    return f"{who} failed: {exception_text(error.type, error.message)}"


def exception_text(kind: str, message: str) -> str:
    """Return an exception in one line: ``ValueError: boom``, or its type alone when it has no text."""
    first_line = message.strip().split("\n", 1)[0]
    return f"{kind}: {shorten_text(first_line, _MOST_MESSAGE)}" if first_line else kind


def _end_words(rank: RankView, unit: str, *, several: bool) -> str:
    """Return how a rank, or several like it, ended that raised nothing."""
    cell = f"{'their' if several else 'its'} {unit}"
    when = f"after {cell} had finished" if rank.ok else f"without finishing {cell} (no Python traceback)"
    if rank.signal:
        return signal_words(rank.signal, several=several) + (f" {when}" if rank.ok else "")
    if rank.ended is None:
        return f"ended {cell} badly and {'have' if several else 'has'} not told why"
    code = "an unknown code" if rank.exit_code is None else f"code {rank.exit_code}"
    return f"exited with {code} {when}"


def _timeout(view: RunView) -> RankFailure:
    unfinished = view.unfinished or tuple(rank.rank for rank in view.ranks if rank.ok is None)
    who = ranks_named(unfinished) if unfinished else "the run"
    reason = view.reason or "the time was up"
    stacks = tuple((r, view.ranks[r].stacks) for r in _known(unfinished, view) if view.ranks[r].stacks)
    text = "\n".join(f"rank {rank}:\n{stack.rstrip()}\n" for rank, stack in stacks)
    return RankFailure(
        headline=f"timed out: {who} had not finished" + (f" ({view.reason})" if view.reason else ""),
        rank=unfinished[0] if unfinished else None,
        type="TimeoutError",
        message=reason,
        traceback=text,
        unfinished=tuple(unfinished),
        stacks=stacks,
    )


def _known(ranks: Iterable[int], view: RunView) -> list[int]:
    return [rank for rank in ranks if rank in range(len(view.ranks))]
