"""What a run leaves in the notebook: `DistributedResult`, of a failed run too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.errors import RunNotFoundError
from jupyter_ddp.rundir import RunDirectory
from jupyter_ddp.transcript import join, read_all, text_size
from jupyter_ddp.view.summary import STATE_WORDS, elapsed
from jupyter_ddp.words import count_text, duration_text, signal_name, table_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from jupyter_ddp.view import RankView, RunView
    from jupyter_ddp.view.failure import RankFailure
    from jupyter_ddp.view.terminal import Line

EAGER_BYTES: Final = 1_000_000
"""Text up to this size is taken into the result at once; more is read from the run directory when it is asked for."""
_MOST_ROWS: Final = 32
_COLUMNS: Final = ("rank", "state", "exit", "time", "error")


@dataclass(frozen=True, slots=True)
class _Texts:
    """The text of a run: in memory when it is small, else where it is."""

    run_dir: Path
    ranks: Mapping[int, tuple[str, str, str]] | None = None
    """By rank: stdout, stderr, both in order."""
    all: str = ""

    def of(self, rank: int) -> tuple[str, str, str]:
        if self.ranks is not None:
            return self.ranks.get(rank, ("", "", ""))
        self._check()
        return _split(list(read_all(RunDirectory(self.run_dir), rank=rank)))

    def whole(self) -> str:
        if self.ranks is not None:
            return self.all
        self._check()
        return join(read_all(RunDirectory(self.run_dir)), labelled=True)

    def _check(self) -> None:
        if not self.run_dir.is_dir():
            raise RunNotFoundError(f"the log of this run is gone: {self.run_dir}")


def _split(lines: list[Line]) -> tuple[str, str, str]:
    out = join(line for line in lines if line.stream == "stdout")
    err = join(line for line in lines if line.stream == "stderr")
    return out, err, _both(lines)


def _both(lines: list[Line]) -> str:
    """Return the lines of both streams; an open one that others follow ends its line here."""
    return "".join(line.text + "\n" for line in lines[:-1]) + join(lines[-1:])


@dataclass(frozen=True, slots=True)
class RankError:
    """The exception that ended a rank's cell, as text.

    Attributes:
        type: Its type's name.
        message: Its text.
        traceback: Its traceback, without frames of this package.
        line: The line of the cell, where the magic line is line 1.
        source: That line's text.
    """

    type: str
    message: str
    traceback: str = ""
    line: int | None = None
    source: str | None = None

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What one rank did.

    ``stdout``, ``stderr`` and ``text`` (both, in order) are whole, as a terminal would show them in the end. Those of a
    run with much text are read from its directory, and raise `RunNotFoundError` when that is gone.

    Attributes:
        state: ``finished``, ``failed``, ``ended`` (the run ended it first), or what it was when the run was lost.
        value: The value of the cell's last expression, None when there was none or it could not travel.
        error: The exception that ended its cell, or None.
        duration: Seconds in which it ran the cell, None if it never did.
    """

    rank: int
    local_rank: int
    node: int
    host: str | None
    state: str
    value: Any
    error: RankError | None
    exit_code: int | None
    signal: int | None
    duration: float | None
    _texts: _Texts = field(repr=False, compare=False)

    @property
    def stdout(self) -> str:
        """All that it wrote to its standard output."""
        return self._texts.of(self.rank)[0]

    @property
    def stderr(self) -> str:
        """All that it wrote to its standard error."""
        return self._texts.of(self.rank)[1]

    @property
    def text(self) -> str:
        """All that it wrote to both, in order."""
        return self._texts.of(self.rank)[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedResult:
    """What a run left. It pickles; its repr is a table.

    Attributes:
        ok: Whether every rank finished its cell.
        outcome: ``succeeded``, ``failed``, ``interrupted``, ``stopped``, ``timeout`` or ``lost``.
        run_id: The run's id.
        log_dir: Its directory, with all logs.
        duration: Seconds from its creation to its end.
        world_size: The number of ranks.
        pulled: The variables that were asked for, by name.
        values: The value of the cell's last expression, by rank.
        ranks: One `RankResult` a rank.
        files: Files that the run kept, and where.
        failure: The first cause of a bad end, or None.
        message: What a `DistributedError` about it says, "" when it succeeded.
    """

    ok: bool
    outcome: str | None
    run_id: str
    log_dir: str
    duration: float
    world_size: int
    pulled: dict[str, Any]
    values: list[Any]
    ranks: tuple[RankResult, ...]
    files: tuple[str, ...] = ()
    failure: RankFailure | None = None
    message: str = field(default="", repr=False)
    _texts: _Texts = field(repr=False, compare=False)

    def text(self, rank: int | None = None) -> str:
        """Return the whole text of a rank, or of all with ``[rank]`` before each line (``[rank!]``: stderr).

        Raises:
            IndexError: There is no such rank.
            RunNotFoundError: There was much text, and the run's directory is gone.
        """
        if rank is None:
            return self._texts.whole()
        if not 0 <= rank < self.world_size:
            raise IndexError(f"no rank {rank}: the run had {count_text(self.world_size, 'rank')}")
        return self.ranks[rank].text

    def __repr__(self) -> str:
        lines = [self._head(), table_text([_COLUMNS, *map(_cells, self.ranks[:_MOST_ROWS])])]
        if self.world_size > _MOST_ROWS:
            lines.append(f"… {count_text(self.world_size - _MOST_ROWS, 'more rank')}")
        return "\n".join(lines)

    def _head(self) -> str:
        pulled = f" · pulled: {', '.join(self.pulled)}" if self.pulled else ""
        state = self.outcome or "not over"
        ranks = count_text(self.world_size, "rank")
        return (
            f"<DistributedResult {self.run_id}: {state} · {ranks} · {duration_text(self.duration)}{pulled}>"
        )

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
        rows = "".join(
            "<tr>"
            + "".join(f'<td style="text-align:left">{escape(cell)}</td>' for cell in _cells(rank))
            + "</tr>"
            for rank in self.ranks[:_MOST_ROWS]
        )
        left = self.world_size - _MOST_ROWS
        more = f"<div>… {count_text(left, 'more rank')}</div>" if left > 0 else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        return f"<div><div>{escape(self._head().strip('<>'))}</div>{table}{more}</div>"


def _cells(rank: RankResult) -> tuple[str, str, str, str, str]:
    end = signal_name(rank.signal) if rank.signal else "" if rank.exit_code is None else str(rank.exit_code)
    time = "" if rank.duration is None else duration_text(rank.duration)
    error = "" if rank.error is None else str(rank.error).split("\n", 1)[0][:100]
    return str(rank.rank), STATE_WORDS.get(rank.state, rank.state), end, time, error


def build(
    view: RunView,
    run_dir: Path,
    pulled: Mapping[str, Any] | None = None,
    values: Sequence[Any] | Mapping[int, Any] | None = None,
    *,
    files: Iterable[str] = (),
    message: str = "",
) -> DistributedResult:
    """Return the result of a run that is over, or of what there is of it.

    Args:
        view: The fold of its events.
        run_dir: Its directory.
        pulled: The values that were brought back, by name.
        values: The values of the cell's last expression, by rank.
        files: Files that the run kept.
        message: What a `DistributedError` about it says.
    """
    texts = _take_texts(run_dir)
    by_rank = values if isinstance(values, Mapping) else dict(enumerate(values or ()))
    return DistributedResult(
        ok=view.ok,
        outcome=view.outcome,
        run_id=view.id,
        log_dir=str(run_dir),
        duration=elapsed(view, view.latest),
        world_size=view.world_size,
        pulled=dict(pulled or {}),
        values=[by_rank.get(rank) for rank in range(view.world_size)],
        ranks=tuple(_rank(rank, by_rank.get(rank.rank), texts) for rank in view.ranks),
        files=tuple(files),
        failure=view.failure,
        message=message,
        _texts=texts,
    )


def _take_texts(run_dir: Path) -> _Texts:
    if text_size(run_dir) > EAGER_BYTES:
        return _Texts(run_dir)
    lines: dict[int, list[Line]] = {}
    everything = []
    for line in read_all(RunDirectory(run_dir)):
        lines.setdefault(line.rank, []).append(line)
        everything.append(line)
    ranks = {rank: _split(of_rank) for rank, of_rank in lines.items()}
    return _Texts(run_dir, ranks, join(everything, labelled=True))


def _rank(rank: RankView, value: Any, texts: _Texts) -> RankResult:  # noqa: ANN401 - whatever the user's cell gave
    error = rank.error
    return RankResult(
        rank=rank.rank,
        local_rank=rank.rank if rank.local_rank is None else rank.local_rank,
        node=rank.node,
        host=rank.host,
        state=rank.state,
        value=value,
        error=None
        if error is None
        else RankError(error.type, error.message, error.traceback, error.line, error.source),
        exit_code=rank.exit_code,
        signal=rank.signal,
        duration=rank.duration,
        _texts=texts,
    )
