"""The events of a run: what an agent appends to its log and what readers fold.

One event is one line of JSON in ``node-<i>.jsonl``. Every event has the attempt and the node that it belongs to, a
number (``seq``, contiguous from 1 in an attempt and node), a rank or none, and the time of what it tells (seconds
since the epoch, on that node's clock). A reader ignores kinds and fields that it does not know, so both ends may be
of different versions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Final

if TYPE_CHECKING:
    from collections.abc import Callable

PROTOCOL_VERSION: Final = 1

PHASES: Final = (
    "queued",
    "starting",
    "downloading",
    "installing",
    "rendezvous",
    "running",
    "ending",
    "ended",
)
"""Phases of a run, in the order in which they come; ``ending`` says that the run is being stopped, and why."""

OUTCOMES: Final = ("succeeded", "failed", "interrupted", "stopped", "timeout", "lost")
"""How a run ends. ``lost``: an agent or an instance died, or the launcher failed on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What all events have in common."""

    kind: ClassVar[str] = ""
    attempt: str = ""
    node: int = 0
    seq: int = 0
    rank: int | None = None
    time: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent(Event):
    """A phase of the run, as seen by this node. Node 0's ``ended`` carries the run's outcome.

    ``ending`` and ``ended`` have an outcome; ``reason`` is a sentence for people ("" when the ranks' own events say
    all). ``unfinished`` names the ranks that had not finished when the time was up. ``detail`` has what a phase wants
    to tell (the launcher's command line, its exit code).
    """

    kind: ClassVar[str] = "run"
    phase: str
    outcome: str | None = None
    reason: str = ""
    unfinished: tuple[int, ...] = ()
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvent(Event):
    """A change of a rank's state.

    ``started``: its process is there (pid, host, local_rank). ``running``: it runs the cell. ``heard``: its Python
    heard the interrupt and may clean up. ``finished``: the cell is over on this rank, ``ok`` or not. ``ended``: the
    process is gone, with an exit code or a signal's number; ``by_run`` says that the run had already begun to end it.
    """

    kind: ClassVar[str] = "rank"
    state: str
    ok: bool | None = None
    pid: int | None = None
    host: str | None = None
    local_rank: int | None = None
    device: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    by_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OutEvent(Event):
    """Text of a rank's stream: bytes ``offset .. offset + length`` of its file, which is the record.

    In a flood ``text`` is None: readers take the text from the file (or count ``lines``, its newlines). Idempotent by
    (attempt, rank, stream, offset).
    """

    kind: ClassVar[str] = "out"
    stream: str
    offset: int
    length: int
    text: str | None = None
    lines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DisplayEvent(Event):
    """Rich output of a rank.

    ``action`` is ``display``, ``update`` (of ``display_id``), ``result`` (the cell's last expression) or ``clear``
    (with ``wait``). ``data`` is a MIME bundle, binary parts in base64. A bundle above 256 KiB is in ``file``, a JSON
    object ``{"data": …, "metadata": …}`` relative to the run directory, and ``data`` is empty.
    """

    kind: ClassVar[str] = "display"
    action: str
    data: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    display_id: str | None = None
    wait: bool = False
    file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorEvent(Event):
    """An exception that ended a rank's cell.

    Sent twice: at once without a traceback (``time`` is the moment of the exception), then with it. ``line`` is the
    cell's line (the magic line is line 1), ``source`` its text; where no cell was run, ``where`` names the file or the
    function that has the line. ``code`` is the exit code that the rank will have.
    """

    kind: ClassVar[str] = "error"
    type: str
    message: str
    line: int | None = None
    where: str = ""
    source: str | None = None
    traceback: str = ""
    code: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueEvent(Event):
    """A value that a rank left for the notebook.

    ``name`` is the variable's, or "" for the cell's last expression. ``file`` is relative to the run directory; None
    means that it could not travel, and ``note`` says why.
    """

    kind: ClassVar[str] = "value"
    name: str
    file: str | None = None
    size: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteEvent(Event):
    """Something that the user should know. ``level`` is ``info`` or ``warning``."""

    kind: ClassVar[str] = "note"
    text: str
    level: str = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksEvent(Event):
    """Where a rank is: the Python stacks of all its threads, as text."""

    kind: ClassVar[str] = "stacks"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownEvent(Event):
    """An event of a kind that this version does not know. Folding it changes nothing but the position."""

    kind: ClassVar[str] = "unknown"


KINDS: Final[dict[str, type[Event]]] = {
    cls.kind: cls
    for cls in (RunEvent, RankEvent, OutEvent, DisplayEvent, ErrorEvent, ValueEvent, NoteEvent, StacksEvent)
}
_CLASSES: Final[tuple[type[Event], ...]] = (*KINDS.values(), UnknownEvent)
_LARGEST: Final = 2**63 - 1
_DEEPEST: Final = 200
_DEFAULTS: Final = {cls: {f.name: f.default for f in fields(cls)} for cls in _CLASSES}


def _whole(value: Any) -> bool:  # noqa: ANN401 - whatever JSON gave
    return type(value) is int and abs(value) <= _LARGEST


def _count(value: Any) -> bool:  # noqa: ANN401
    return _whole(value) and value >= 0


def _counts(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, (list, tuple)) and all(map(_count, value))


def _number(value: Any) -> bool:  # noqa: ANN401
    return type(value) in (int, float) and abs(value) <= _LARGEST  # which NaN is not


def is_object(value: Any) -> bool:  # noqa: ANN401
    """Tell whether a value from JSON is an object that may be in an event.

    One that nests deeper than anybody means could be read here, but not be written again from a deeper stack.
    """
    if not isinstance(value, dict):
        return False
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        inner = (one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer))
        level = [one for one in inner if isinstance(one, (dict, list))]
        if not level:
            return True
    return False


_CHECKS: Final[dict[str, Callable[[Any], bool]]] = {
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": _count,
    "float": _number,
    "dict[str, Any]": is_object,
    "tuple[int, ...]": _counts,
}
"""By a field's annotation: whether a value from JSON can stand there. All whole numbers count, except exit codes."""


def _check_for(name: str, annotation: str) -> Callable[[Any], bool]:
    wanted, _, none = annotation.partition(" | ")
    check = _whole if name in ("exit_code", "code") else _CHECKS[wanted]
    return (lambda value: value is None or check(value)) if none else check


_FIELDS: Final = {cls: {f.name: _check_for(f.name, str(f.type)) for f in fields(cls)} for cls in _CLASSES}


def to_json(event: Event) -> dict[str, Any]:
    """Return the event as a JSON object: ``kind`` first, fields that have their default left out."""
    out: dict[str, Any] = {"kind": event.kind}
    for name, default in _DEFAULTS[type(event)].items():
        value = getattr(event, name)
        if value not in (default, {}):
            out[name] = value
    return out


def encode(event: Event) -> bytes:
    """Return the event as one line of UTF-8 JSON, newline included. Lone surrogates are escaped."""
    obj = to_json(event)
    try:
        return json.dumps(obj, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(obj, separators=(",", ":")).encode() + b"\n"


def from_json(obj: Any) -> Event | None:  # noqa: ANN401 - whatever JSON gave
    """Return the event that a JSON object tells, or None when it is not an event at all.

    A kind that is not known gives an `UnknownEvent`, so that its number is not taken for a gap; fields that are not
    known are dropped; an event with a field of a wrong type, or without one that it needs, is None.
    """
    if not isinstance(obj, dict) or not isinstance(obj.get("kind"), str):
        return None
    cls = KINDS.get(obj["kind"], UnknownEvent)
    values = {}
    for name, fits in _FIELDS[cls].items():
        if name in obj:
            if not fits(obj[name]):
                return None
            values[name] = obj[name]
    if "unfinished" in values:
        values["unfinished"] = tuple(values["unfinished"])
    try:
        return cls(**values)
    except TypeError:  # a required field is missing
        return None


def decode(line: bytes) -> Event | None:
    """Return the event of one line of a log, or None for a torn or foreign line. Never raises."""
    try:
        return from_json(json.loads(line))
    except (ValueError, RecursionError):
        return None
