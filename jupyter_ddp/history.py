"""The runs of this machine as users look at them: list, find, attach, print."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from jupyter_ddp.errors import JupyterDDPError, RunNotFoundError
from jupyter_ddp.logend import log_state, what_happened
from jupyter_ddp.render import failure_text, rank_text
from jupyter_ddp.run import Run
from jupyter_ddp.rundir import RunDirectory, RunStore
from jupyter_ddp.settings import SETTINGS
from jupyter_ddp.tail import read_end
from jupyter_ddp.transcript import text_size
from jupyter_ddp.view import RunView, fold, new_view
from jupyter_ddp.view.summary import note_lines
from jupyter_ddp.words import duration_text, size_text, table_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import Any

SHOWN: Final = 20
"""Runs that a list shows."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run of a list.

    Attributes:
        id: The run's id.
        name: Its label, "" without one.
        state: A phase while it lives, else how it ended; ``pruned`` when only what its ranks kept is left.
        alive: Whether it goes on.
        protocol: The launcher.
        ranks: The number of ranks, ``4`` or ``2 x 4``.
        started: When, as local time.
        duration: How long it has taken so far, or took.
        where: The backend, and the process that started it.
    """

    id: str
    name: str
    state: str
    alive: bool
    protocol: str
    ranks: str
    started: str
    duration: str
    where: str


_COLUMNS: Final = ("id", "name", "state", "protocol", "ranks", "started", "duration", "where")


def row(run: RunDirectory, now: float) -> Row:
    """Return a run's row. Reads its facts and the end of its log only, however long that is."""
    facts = run.facts()
    state = log_state(run)
    created = float(facts.get("created", now))
    nnodes, nproc = facts.get("nnodes", 1), facts.get("nproc", 0)
    took = (now if state.ended is None else state.ended) - created
    return Row(
        id=run.run_id,
        name=facts.get("name", ""),
        state=state.word,
        alive=state.going_on,
        protocol=facts.get("protocol", ""),
        ranks=f"{nnodes} x {nproc}" if nnodes != 1 else str(nproc),
        started=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created)),
        duration=duration_text(took) if state.alive or state.ended is not None else "",
        where=f"{facts.get('backend', '')}, {_starter(facts, created)}",
    )


def _starter(facts: Mapping[str, Any], created: float) -> str:
    """Return who started a run. Numbers of processes come again: one from before this process is another's."""
    pid = facts.get("pid", "?")
    if pid != os.getpid() or created < SETTINGS.since:
        return f"pid {pid}"
    return "this kernel" if facts.get("kernel_id") else "this process"


def runs_text(found: Sequence[RunDirectory], root: Path, now: float, most: int = SHOWN) -> str:
    """Return the list of the newest runs, the newest first, as text."""
    if not found:
        return f"No runs yet; they are recorded in {root}."
    cells = [[getattr(row(run, now), column) for column in _COLUMNS] for run in found[:most]]
    rest = len(found) - most
    more = f"\n… and {rest} older in {root}" if rest > 0 else ""
    return table_text([_COLUMNS, *cells]) + more


def alive(store: RunStore) -> list[RunDirectory]:
    """Return the runs that go on. Those whose log has its end are over, though their agents may still tidy up."""
    return [run for run in store.list() if log_state(run).going_on]


def to_stop(store: RunStore, word: str | None) -> RunDirectory:
    """Return the run that ``stop`` means: the one named, or the only one that lives.

    Raises:
        RunNotFoundError: None is meant, or several could be.
    """
    if word is not None:
        return store.find(word)
    living = alive(store)
    if len(living) == 1:
        return living[0]
    if living:
        ids = ", ".join(run.run_id for run in living)
        raise RunNotFoundError(f"several runs are alive ({ids}): write %distributed stop ID.")
    raise RunNotFoundError("no run is alive: there is nothing to stop.")


def stop(found: RunDirectory) -> str:
    """End a run and return what became of that, for people: it may be over already.

    Raises:
        JupyterDDPError: It goes on and does not answer.
    """
    if log_state(found).going_on:
        run = Run(found)
        try:
            heard = run.stop()
        finally:
            run.close()
        if heard:
            return f"Run {found.run_id} is being stopped: its ranks get SIGTERM, and SIGKILL if they stay."
    state = log_state(found)
    if not state.going_on:
        return f"Run {found.run_id} is over: {state.word}."
    starter = f"process {found.facts().get('pid', '?')}"
    raise JupyterDDPError(f"run {found.run_id} does not answer: end {starter}, which started it.")


def words_for_runs(store: RunStore) -> Iterable[str]:
    """Yield ids and names of the newest runs, for completion."""
    for run in store.list()[:SHOWN]:
        yield run.run_id
        if name := run.facts().get("name"):
            yield name


def log_text(run: RunDirectory, rank: int | None, limit: int) -> str:
    """Return what a run, or one rank of it, showed so far: its last `limit` characters in whole lines, then its end.

    That is why it failed, or what became of the rank, and what else the view of the run says below its lines.

    Raises:
        RunNotFoundError: The run has no such rank.
    """
    world_size = new_view(run.facts()).world_size
    if rank is not None and rank >= world_size:
        have = f"ranks 0 to {world_size - 1}" if world_size > 1 else "rank 0 only"
        raise RunNotFoundError(f"run {run.run_id} has {have}: there is no rank {rank}.")
    text, more = read_end(run, limit, rank=rank)
    state = log_state(run)
    if not text and state.word == "pruned":
        return f"The record of run {run.run_id} was pruned; what its ranks kept is in {run.path}."
    after = _after(_happened(run), rank)
    if not text and not after:
        so_far = " so far" if state.going_on else ""
        return f"Nothing was shown{so_far}; the run's directory is {run.path}."
    if more:
        written = size_text(text_size(run.path, rank))
        text = f"… this is the end of {written} of text; all of it is in {run.path}\n{text}"
    return "\n\n".join(part.rstrip("\n") for part in (text, after) if part)


def _happened(run: RunDirectory) -> RunView:
    """Return the view of a run without what its ranks showed."""
    view = new_view(run.facts(), log_dir=str(run.path))
    for event in what_happened(run):
        view = fold(view, replace(event, seq=0))  # those that are left out are no gap
    return view


def _after(view: RunView, rank: int | None) -> str:
    if rank is not None:
        return rank_text(view, rank)
    if view.failure is not None:
        return failure_text(view)
    told = [] if view.ok or view.outcome is None else [f"the run was {view.outcome}"]
    return "\n".join([*told, *note_lines(view)])


def runs(root: Path | str | None = None) -> list[Run]:
    """Return the runs that are recorded on this machine, the newest first.

    Args:
        root: The directory of runs; by default ``c.DistributedMagics.run_root``.
    """
    return [Run(run) for run in RunStore(root or SETTINGS.run_root).list()]


def attach(run: str, root: Path | str | None = None) -> Run:
    """Return a run by its id, a unique beginning of it, its name, or ``last``.

    Raises:
        RunNotFoundError: There is none, or the beginning fits several.
    """
    return Run(RunStore(root or SETTINGS.run_root).find(run))
