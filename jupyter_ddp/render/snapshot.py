"""The vendor JSON of a run's output: a versioned snapshot that a page can read without a kernel. Pure.

The text of the run is not in it: the final one has an index into ``text/plain`` of the same bundle. While the run goes
on it is small (512 ranks in under 20 kB), because it is sent again and again.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.view import sgr
from jupyter_ddp.view.summary import note_lines
from jupyter_ddp.words import shorten_text

if TYPE_CHECKING:
    from jupyter_ddp.view.model import RankView, RunView
    from jupyter_ddp.view.rich_output import DisplayView

MIME: Final = "application/vnd.jupyter-ddp.run+json"
VERSION: Final = 1
LIVE_COLUMNS: Final = ("state", "lines", "started", "finished")
"""What a rank's row has while the run goes on; times are seconds since the run was created."""
FINAL_COLUMNS: Final = (*LIVE_COLUMNS, "node", "local_rank", "host", "device", "exit_code", "signal", "last")
_LAST: Final = 200
_LIVE_TEXT: Final = 4_000
_CONFIG: Final = ("show", "timeout", "detach", "instance_type")


def snapshot(
    view: RunView,
    *,
    now: float,
    seq: int,
    status: str,
    displays: bool,
    index: list[list[int | None]] | None,
    places: dict[int, tuple[int, int]],
) -> dict[str, Any]:
    """Return the snapshot.

    Args:
        view: The run.
        now: Seconds since the epoch.
        seq: The number of the last live message.
        status: The status line.
        displays: Whether the rich output is in it.
        index: Whose the lines of text/plain below its first line are: [rank, stream, lines]; streams are 0 (stdout),
            1 (stderr) and 2 (what stands for rich output, or, without a rank, for lines that were cut). None while
            the run goes on.
        places: Where rich output stands in text/plain, by its order: (first line, lines).
    """
    final = index is not None
    columns = FINAL_COLUMNS if final else LIVE_COLUMNS
    out: dict[str, Any] = {
        "version": VERSION,
        "final": final,
        "seq": seq,
        "now": round(now, 3),
        "run": _run(view),
        "status": status,
        "phase": view.phase,
        "phases": {phase: round(time - view.created, 3) for phase, time in view.phases.items()},
        "outcome": view.outcome,
        "ended": None if view.ended is None else round(view.ended - view.created, 3),
        "columns": list(columns),
        "ranks": [_row(view, rank, final=final) for rank in view.ranks],
        "failure": _failure(view, final=final),
        "notes": note_lines(view),
        "cut": view.lines.cut,
        "hidden": view.hidden,
    }
    if displays:
        out["displays"] = [_display(shown, places.get(shown.order)) for shown in view.displays]
    if index is not None:
        out["index"] = index
    return out


def _run(view: RunView) -> dict[str, Any]:
    facts = view.facts
    source = facts.get("source")
    config = facts.get("config")
    return {
        "id": view.id,
        "name": view.name,
        "backend": view.backend,
        "protocol": view.protocol,
        "nnodes": view.nnodes,
        "nproc": view.nproc,
        "world_size": view.world_size,
        "created": view.created,
        "kernel": facts.get("kernel_id"),
        "cell": facts.get("cell_id"),
        "magic": source.split("\n", 1)[0][:1_000] if isinstance(source, str) else "",
        "log_dir": view.log_dir,
        "attempts": max(1, view.attempts),
        "config": {k: config[k] for k in _CONFIG if config.get(k)} if isinstance(config, dict) else {},
    }


def _row(view: RunView, rank: RankView, *, final: bool) -> list[Any]:
    def since(time: float | None) -> float | None:
        return None if time is None else round(time - view.created, 2)

    begin = rank.running if rank.running is not None else rank.started
    end = rank.finished if rank.finished is not None else rank.ended
    row: list[Any] = [rank.state, rank.lines, since(begin), since(end)]
    if final:
        last = sgr.strip(rank.last.text)[:_LAST] if rank.last is not None else ""
        row += [rank.node, rank.local_rank, rank.host, rank.device, rank.exit_code, rank.signal, last]
    return row


def _failure(view: RunView, *, final: bool) -> dict[str, Any] | None:
    failure = view.failure
    if failure is None:
        return None
    out = asdict(failure)
    del out["stacks"]  # they are in the traceback
    if not final:
        out["message"] = shorten_text(failure.message, _LIVE_TEXT)
        out["traceback"] = failure.traceback[-_LIVE_TEXT:]
    return {key: value for key, value in out.items() if value not in (None, "", ())}


def _display(shown: DisplayView, place: tuple[int, int] | None) -> dict[str, Any]:
    out: dict[str, Any] = {"ranks": list(shown.ranks), "data": shown.data}
    if place:
        out["line"], out["lines"] = place
    if shown.metadata:
        out["metadata"] = shown.metadata
    if shown.result:
        out["result"] = True
    if shown.file:
        out["file"] = shown.file
    return out
