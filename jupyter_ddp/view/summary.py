"""One line that says how a run is, and the state of its ranks in words. Pure: the time is passed in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jupyter_ddp.view.failure import RankFailure, late_errors
from jupyter_ddp.words import count_text, duration_text, ranks_named, ranks_text

if TYPE_CHECKING:
    from jupyter_ddp.view.model import RunView

STATE_WORDS: Final = {
    "waiting": "waiting",
    "starting": "starting",
    "running": "running",
    "heard": "cleaning up",
    "finished": "finished",
    "failed": "failed",
    "ended": "stopped",
}
"""What a rank's state is called."""
_OUTCOME_WORDS: Final = {"interrupted": "interrupted", "stopped": "stopped", "lost": "lost"}
_ENDING_WORDS: Final = {
    "interrupted": "interrupting",
    "stopped": "stopping",
    "failed": "stopping the other ranks",
    "timeout": "timed out, stopping",
    "succeeded": "finishing",
    "lost": "ending",
}
_MOST_NOTES: Final = 12
_SHORT: Final = 80
"""Characters of a reason that a status line has room for."""


def elapsed(view: RunView, now: float) -> float:
    """Return the seconds from the run's creation to its end, or to now."""
    begin = view.created or min(view.phases.values(), default=now)
    return max(0.0, (view.ended if view.ended is not None else now) - begin)


def status_line(view: RunView, now: float) -> str:
    """Return the run in one line: ``running on 2 ranks · torchrun · 3.2 s``."""
    head, counted = _head(view)
    parts = [head]
    ranks = count_text(view.world_size, "rank")
    if not counted:
        parts.append(ranks)
    if view.nnodes > 1:
        parts.append(count_text(view.nnodes, "instance"))
    if view.backend != "local":
        parts.append(view.backend)
    parts.append(view.protocol)
    parts.append(duration_text(elapsed(view, now)))
    if view.name:
        parts.append(view.name)
    return " · ".join(parts)


def _head(view: RunView) -> tuple[str, bool]:
    """Return what the run does, and whether that names the number of its ranks."""
    if view.over:
        return _over(view)
    trouble = _trouble(view)
    if trouble:
        return trouble, False
    ranks = count_text(view.world_size, "rank")
    if view.phase == "running" or any(rank.running is not None for rank in view.ranks):
        done = sum(rank.ok is not None for rank in view.ranks)
        if done == view.world_size:
            return "finishing", False
        if done:
            return f"running, {done} of {ranks} finished", True
        return f"running on {ranks}", True
    if view.phase == "rendezvous":
        here = sum(rank.started is not None for rank in view.ranks)
        return f"starting, {here} of {ranks} have connected", True
    if view.phase == "starting" or not view.phases:  # nobody has told that it waits in a queue
        return f"starting {ranks}", True
    return view.phase, False


def _trouble(view: RunView) -> str:
    """Return what a run that is not going well does, "" when it is."""
    heard = [rank.rank for rank in view.ranks if rank.state == "heard"]
    if heard:
        verb = "is" if len(heard) == 1 else "are"
        return f"{ranks_named(heard)} {verb} cleaning up (interrupt again to kill)"
    if view.phase == "ending":
        return _ending(view)
    failure = view.failure
    return f"failing: {_blame(failure)}" if failure is not None else ""


def _ending(view: RunView) -> str:
    words = _ENDING_WORDS.get(view.outcome or "", "ending")
    failure = view.failure if view.outcome == "failed" else None
    return f"failed: {_blame(failure)}, {words}" if failure else words


def _over(view: RunView) -> tuple[str, bool]:
    failure = view.failure
    if view.outcome == "timeout":
        unfinished = failure.unfinished if failure else ()
        return (f"timed out: {ranks_named(unfinished)} unfinished" if unfinished else "timed out"), False
    if view.outcome in _OUTCOME_WORDS:
        return _OUTCOME_WORDS[view.outcome] + _why(view), False
    if failure is not None:
        return f"failed: {_blame(failure)}", False
    if view.outcome == "succeeded":
        return f"succeeded on {count_text(view.world_size, 'rank')}", True
    return "ended", False


def _why(view: RunView) -> str:
    """Return the reason of an end that no rank is to blame for, as a status line says it, or ""."""
    reason = view.reason
    short = len(reason) <= _SHORT and "\n" not in reason
    told = {"stopped": not reason.startswith("it was"), "lost": short}
    return f": {reason}" if reason and told.get(view.outcome or "") else ""


def _blame(failure: RankFailure) -> str:
    if failure.rank is None:
        return "no rank ran" if not failure.followers else "the launcher"
    return ranks_named(failure.same or (failure.rank,))


def states_text(view: RunView) -> str:
    """Return the states of all ranks, grouped: ``ranks 0-3 running · ranks 4-7 starting``."""
    groups: dict[str, list[int]] = {}
    for rank in view.ranks:
        groups.setdefault(rank.state, []).append(rank.rank)
    return " · ".join(
        f"{ranks_named(groups[state])} {STATE_WORDS[state]}" for state in STATE_WORDS if state in groups
    )


def note_lines(view: RunView) -> list[str]:
    """Return what the user should know besides the output, a line each."""
    lines = []
    for note in view.notes[:_MOST_NOTES]:
        who = f"{ranks_named(note.ranks)}: " if note.ranks else ""
        lines.append(f"{'warning' if note.level == 'warning' else 'note'}: {who}{note.text}")
    if len(view.notes) > _MOST_NOTES:
        lines.append(f"note: {count_text(len(view.notes) - _MOST_NOTES, 'more note')} in the log")
    lines += [f"note: {text}" for text in late_errors(view)]
    failure = view.failure
    if failure is not None and view.reason and view.reason not in failure.headline:
        lines.append(f"note: {view.reason}")
    if view.displays.dropped:
        dropped = count_text(view.displays.dropped, "display")
        lines.append(f"note: {dropped} not kept here, too much rich output: the log has all of it")
    if view.missing or view.missing_bytes:
        what = count_text(view.missing, "event") if view.missing else count_text(view.missing_bytes, "byte")
        lines.append(f"warning: {what} of this run's log did not arrive")
    if view.hidden:
        shown = ranks_text(view.show or ()) or "none"
        lines.append(f"note: {count_text(view.hidden, 'line')} of other ranks not shown (--show {shown})")
    return lines


def earlier_text(count: int) -> str:
    """Return the line that stands above the last lines while the run goes on: the others are only not repeated."""
    return f"… {count_text(count, 'earlier line')}"


def cut_text(view: RunView, count: int) -> str:
    """Return the line that stands where lines were left out."""
    where = f"; the whole log: {view.log_dir}" if view.log_dir else ""
    return f"… {count_text(count, 'line')} not shown here{where}"
