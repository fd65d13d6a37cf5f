"""The runs of this machine as users look at them: list, find, attach, print."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jupyter_ddp.errors import RunNotFoundError
from jupyter_ddp.logend import log_state
from jupyter_ddp.run import Run
from jupyter_ddp.rundir import RunDirectory, RunStore
from jupyter_ddp.settings import SETTINGS
from jupyter_ddp.transcript import read_end, text_size
from jupyter_ddp.words import duration_text, size_text, table_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

SHOWN: Final = 20
"""Runs that a list shows."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run of a list.

    Attributes:
        id: The run's id.
        name: Its label, "" without one.
        state: A phase while it lives, else how it ended; ``pruned`` when only what its ranks kept is left.
        alive: Whether somebody keeps it.
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
    created = float(facts.get("created") or now)
    nnodes, nproc = facts.get("nnodes", 1), facts.get("nproc", 0)
    took = (now if state.ended is None else state.ended) - created
    return Row(
        id=run.run_id,
        name=str(facts.get("name") or ""),
        state=state.word,
        alive=state.alive,
        protocol=str(facts.get("protocol", "")),
        ranks=f"{nnodes} x {nproc}" if nnodes != 1 else str(nproc),
        started=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created)),
        duration=duration_text(took) if state.alive or state.ended is not None else "",
        where=f"{facts.get('backend', '')}, kernel {facts.get('pid', '?')}",
    )


def runs_text(found: Sequence[RunDirectory], root: Path, now: float) -> str:
    """Return the list of runs, newest first, as text."""
    if not found:
        return f"No runs yet; they are recorded in {root}."
    cells = [[getattr(row(run, now), column) for column in _COLUMNS] for run in found[:SHOWN]]
    rest = len(found) - SHOWN
    more = f"\n… and {rest} older in {root}" if rest > 0 else ""
    return table_text([_COLUMNS, *cells]) + more


def alive(store: RunStore) -> list[RunDirectory]:
    """Return the runs that live."""
    return [run for run in store.list() if run.is_alive()]


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


def words_for_runs(store: RunStore) -> Iterable[str]:
    """Yield ids and names of the newest runs, for completion."""
    for run in store.list()[:SHOWN]:
        yield run.run_id
        if name := run.facts().get("name"):
            yield str(name)


def log_text(run: RunDirectory, rank: int | None, limit: int) -> str:
    """Return what a run, or one rank of it, wrote so far: its last `limit` characters in whole lines.

    Raises:
        RunNotFoundError: The run has no such rank.
    """
    world_size = int(run.facts().get("world_size", 0))
    if rank is not None and rank >= world_size:
        have = f"ranks 0 to {world_size - 1}" if world_size > 1 else "rank 0 only"
        raise RunNotFoundError(f"run {run.run_id} has {have}: there is no rank {rank}.")
    text, more = read_end(run, limit, rank=rank)
    if not text and log_state(run).word == "pruned":
        return f"The record of run {run.run_id} was pruned; what its ranks kept is in {run.path}."
    if not text:
        return f"Nothing was written; the run's directory is {run.path}."
    if more:
        written = size_text(text_size(run.path, rank))
        text = f"… this is the end of {written} of text; all of it is in {run.path}\n{text}"
    return text.rstrip("\n")


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
