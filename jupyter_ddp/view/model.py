"""The view of a run: its phase, its ranks, the lines and the rich output that are kept. Data; `view.fold` fills it.

Memory is bounded: lines by a byte budget, rich output by `rich_output.MAX_BYTES`, the last lines of each rank by
`scrollback.Tail`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from jupyter_ddp.view.failure import RankFailure, find_failure
from jupyter_ddp.view.rich_output import Displays, DisplayView
from jupyter_ddp.view.scrollback import Scrollback, Tail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jupyter_ddp.events import ErrorEvent, ValueEvent
    from jupyter_ddp.view.positions import Positions
    from jupyter_ddp.view.terminal import Line, Terminal

_D = TypeVar("_D")
OUTPUT_CAP: Final = 256 * 1024
FAILING_LINES: Final = 20
"""Lines of a failing rank that are shown at the end when they are not shown otherwise."""
STATES: Final = ("waiting", "starting", "running", "heard", "finished", "failed", "ended")
"""States of a rank: ``heard`` is cleaning up after an interrupt, ``ended`` was ended by the run before it finished."""
MOST_RANKS: Final = 65_536
MOST_TIME: Final = 1e12


@dataclass(slots=True)
class RankView:
    """One rank as its events have told it. Times are seconds since the epoch, on its node's clock.

    Attributes:
        state: One of `STATES`.
        ok: How its cell ended, None while it has not.
        by_run: Whether the run was already ending it when its process went.
        error: The exception that ended its cell, if any.
        lines: How many lines it has begun, shown or not.
        stacks: Where it was, the last time that somebody asked; for a crash, what faulthandler wrote.
    """

    rank: int
    node: int = 0
    local_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    device: str | None = None
    state: str = "waiting"
    ok: bool | None = None
    exit_code: int | None = None
    signal: int | None = None
    by_run: bool = False
    started: float | None = None
    running: float | None = None
    finished: float | None = None
    ended: float | None = None
    error: ErrorEvent | None = None
    stacks: str = ""
    lines: int = 0
    last: Line | None = None
    tail: Tail = field(default_factory=Tail)
    clear_next: bool = False

    @property
    def duration(self) -> float | None:
        """Seconds in which it ran its cell, None while that is not over."""
        begin = self.running if self.running is not None else self.started
        end = self.finished if self.finished is not None else self.ended
        return None if begin is None or end is None else max(0.0, end - begin)


@dataclass(slots=True)
class Reading:
    """Where a fold is in what it reads. Of no concern to those who show a view.

    Attributes:
        order: The place of the last line or display.
        seen: Numbers of events that have come, by attempt and node.
        offsets: Bytes that have come, by attempt, rank and stream.
        terminals: The line disciplines, by the same.
    """

    order: int = 0
    seen: dict[tuple[str, int], Positions] = field(default_factory=dict)
    offsets: dict[tuple[str, int, str], Positions] = field(default_factory=dict)
    terminals: dict[tuple[str, int, str], Terminal] = field(default_factory=dict)


@dataclass(slots=True)
class Note:
    """Something that the user should know, of some ranks or (``ranks`` empty) of the run."""

    text: str
    level: str = "info"
    ranks: tuple[int, ...] = ()
    time: float = 0.0


@dataclass(slots=True)
class RunView:
    """A run as its events have told it so far. ``fold`` changes it in place.

    Attributes:
        facts: What ``run.json`` says.
        log_dir: Where the whole logs are, for people ("" when unknown).
        show: The ranks whose lines are kept, None for all.
        phase: One of `events.PHASES`, of the whole run.
        phases: When each phase was first seen.
        outcome: One of `events.OUTCOMES`; set from the moment that the run is being ended for a reason.
        unfinished: On a timeout, the ranks that had not finished.
        missing: Events that never came, as their numbers tell.
        hidden: Lines of ranks that ``show`` leaves out.
        changes: Grows with each event that changed something.
        milestones: Grows with each change of the phase, of a rank's state or of the failure.
    """

    facts: Mapping[str, Any]
    id: str
    name: str | None
    backend: str
    protocol: str
    nnodes: int
    nproc: int
    world_size: int
    created: float
    log_dir: str
    show: frozenset[int] | None
    lines: Scrollback
    phase: str = "queued"
    phases: dict[str, float] = field(default_factory=dict)
    outcome: str | None = None
    reason: str = ""
    unfinished: tuple[int, ...] = ()
    detail: dict[str, Any] = field(default_factory=dict)
    ended: float | None = None
    latest: float = 0.0
    ranks: list[RankView] = field(default_factory=list)
    displays: Displays = field(default_factory=Displays)
    notes: list[Note] = field(default_factory=list)
    values: dict[tuple[str, int], ValueEvent] = field(default_factory=dict)
    attempt: str | None = None
    attempts: int = 0
    hidden: int = 0
    changes: int = 0
    milestones: int = 0
    reading: Reading = field(default_factory=Reading)

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.phase == "ended"

    @property
    def ok(self) -> bool:
        """Whether it has ended well."""
        return self.over and self.outcome == "succeeded" and self.failure is None

    @property
    def failure(self) -> RankFailure | None:
        """The first cause of its bad end as far as it is known, or None. Found anew at each access, in all ranks."""
        return find_failure(self)

    @property
    def missing(self) -> int:
        """How many events have not come though later ones have."""
        return sum(seen.missing for seen in self.reading.seen.values())

    @property
    def missing_bytes(self) -> int:
        """How many bytes of the ranks' text have not come though later ones have."""
        return sum(seen.missing for seen in self.reading.offsets.values())

    @property
    def line(self) -> str:
        """The magic line that holds, when it is not the one that stands in the cell: it marks what came from where."""
        line = self.facts.get("line")
        return line if isinstance(line, str) else ""

    @property
    def unit(self) -> str:
        """What each rank runs, for sentences: ``cell``, or ``function`` for a call of `jupyter_ddp.launch`."""
        return "function" if str(self.facts.get("source", "")).startswith("#") else "cell"

    def shown(self, rank: int) -> bool:
        """Tell whether a rank's lines are kept."""
        return self.show is None or rank in self.show

    def recent(self, lines: int, displays: int) -> tuple[int, list[Line | DisplayView]]:
        """Return the last lines and displays in order, and how many lines came before."""
        last = self.lines.last(lines)
        earlier = len(self.lines) + self.lines.cut - len(last)
        shown = [display for display in self.displays if any(map(self.shown, display.ranks))]
        return earlier, sorted([*last, *shown[-displays:]], key=lambda item: item.order)

    def failing_lines(self, visible: Callable[[Line], bool]) -> list[Line]:
        """Return the last lines of the rank that failed first, if not all of them are visible anyway."""
        failure = self.failure
        if failure is None or failure.rank is None:
            return []
        last = list(self.ranks[failure.rank].tail.lines)[-FAILING_LINES:]
        return [] if all(map(visible, last)) else last

    def items(self) -> Iterator[Line | DisplayView]:
        """Yield all kept lines and displays in the order in which they came.

        Displays with no line between them come by rank: which of two ranks was first to show its figure is chance, and
        a saved notebook should not change with it.
        """
        shown = (display for display in self.displays if any(map(self.shown, display.ranks)))
        displays = deque(sorted(shown, key=lambda display: display.order))
        for line in self.lines:
            yield from take_displays(displays, line.order)
            yield line
        yield from take_displays(displays, math.inf)


def take_displays(displays: deque[DisplayView], before: float) -> list[DisplayView]:
    """Take the displays that stand before a place, by rank. Each rank's own stay in their order."""
    taken = []
    while displays and displays[0].order < before:
        taken.append(displays.popleft())
    if all(len(display.ranks) == 1 for display in taken):
        taken.sort(key=lambda display: display.ranks)
    return taken


def new_view(facts: Mapping[str, Any], *, log_dir: str = "", output_cap: int = OUTPUT_CAP) -> RunView:
    """Return the view of a run of which nothing has come yet.

    Args:
        facts: The object in ``run.json``; what is missing or of a wrong type gets a default.
        log_dir: The run directory, to be named to the user.
        output_cap: Bytes of lines that are kept.
    """
    config = facts.get("config")
    config = config if isinstance(config, Mapping) else {}
    nnodes, nproc = _count(facts.get("nnodes"), 1), _count(facts.get("nproc"), 1)
    world_size = _count(facts.get("world_size"), nnodes * nproc)
    show = config.get("show")
    created = facts.get("created")
    view = RunView(
        facts=facts,
        id=str(facts.get("id", "")),
        name=_label(facts.get("name"), None),
        backend=_label(facts.get("backend"), "local"),
        protocol=_label(facts.get("protocol"), "torchrun"),
        nnodes=nnodes,
        nproc=nproc,
        world_size=world_size,
        created=float(created) if isinstance(created, int | float) and 0 < created < MOST_TIME else 0.0,
        log_dir=log_dir,
        show=frozenset(r for r in show if isinstance(r, int)) if isinstance(show, list | tuple) else None,
        lines=Scrollback(output_cap),
    )
    view.ranks = new_ranks(view)
    return view


def _count(value: Any, default: int) -> int:  # noqa: ANN401 - whatever JSON gave
    return min(value, MOST_RANKS) if isinstance(value, int) and value > 0 else default


def _label(value: Any, default: _D) -> str | _D:  # noqa: ANN401 - whatever JSON gave
    """Return a word that can stand in a status line."""
    return value if isinstance(value, str) and value and value.isprintable() else default


def new_ranks(view: RunView) -> list[RankView]:
    """Return the ranks of a run of which nothing has come yet."""
    per_node = max(1, -(-view.world_size // view.nnodes))
    return [RankView(rank, rank // per_node, rank % per_node) for rank in range(view.world_size)]
