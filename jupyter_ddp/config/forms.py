"""The forms in which people write durations, ranks and what shall come back.

Each refusal is a `ConfigError` of one sentence: the value, the rule, and what to write instead.
"""

from __future__ import annotations

import datetime as dt
import keyword
import numbers
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal

from jupyter_ddp.errors import ConfigError

MAX_RANK: Final = 65_535
"""The highest rank that can be named."""

MOST_ITEMS: Final = 100_000
"""Items of an iterable that are looked at: it may have no end, and there are fewer ranks."""

_MOST_DIGITS: Final = 9
_LONGEST: Final = 366 * 86400.0
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"(?:(\d+(?:\.\d*)?|\.\d+)\s*([smhd]))\s*")


@dataclass(frozen=True, slots=True)
class Pull:
    """A variable that shall come back, and from where: one rank, or ``"all"`` (a list by rank).

    ``str()`` gives the form that the line takes: ``loss``, ``loss@3``, ``loss@all``.
    """

    name: str
    rank: int | Literal["all"] = 0

    def __str__(self) -> str:
        return self.name if self.rank == 0 else f"{self.name}@{self.rank}"


def parse_duration(value: object, field_name: str = "timeout") -> float:
    """Return seconds of ``90``, ``"90"``, ``"90s"``, ``"1h30m"``, ``"2d"`` or a `datetime.timedelta`; more than 0.

    Raises:
        ConfigError: The value is no such duration.
    """
    seconds: float | None = None
    if isinstance(value, dt.timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        seconds = float(value) if value <= _LONGEST else None  # beyond the floats, perhaps
    elif isinstance(value, str):
        seconds = _seconds_of(value.strip())
    if seconds is None or not 0 < seconds <= _LONGEST:
        what = f"{field_name} is {shown_value(value)}, but a duration of at most a year is meant"
        raise ConfigError(field_name, f"{what}: write a number of seconds above 0, or 90s, 30m, 8h or 2d.")
    return seconds


def _seconds_of(text: str) -> float | None:
    parts = list(_DURATION.finditer(text))
    if parts and "".join(part.group() for part in parts) == text:
        return sum(float(part[1]) * _UNITS[part[2]] for part in parts)
    try:
        return float(text)
    except ValueError:
        return None


def format_duration(seconds: float) -> str:
    """Return seconds in the largest unit that keeps them whole: 5400 gives ``90m``. `parse_duration` reads it."""
    for unit in "dhm":
        if seconds % _UNITS[unit] == 0:
            return f"{seconds / _UNITS[unit]:.0f}{unit}"
    text = f"{seconds:.0f}" if seconds == int(seconds) else repr(seconds)
    return text if "e" in text else text + "s"


def parse_ranks(value: object, field_name: str = "show") -> tuple[int, ...]:
    """Return the ranks of ``3``, ``"0,2-3"`` or an iterable of numbers, each once, in order.

    Raises:
        ConfigError: The value names no ranks.
    """
    items = value.split(",") if isinstance(value, str) else items_of(value)
    ranks: set[int] = set()
    for item in items:
        text = _written(item)
        found = None if isinstance(item, bool) else re.fullmatch(r"(\d{1,6})(?:\s*-\s*(\d{1,6}))?", text)
        if not found and (text or value == ""):
            rule = "ranks are numbers from 0: write 0, 0,3, 0-3 or all"
            raise ConfigError(field_name, f"{field_name} is {shown_value(value)}, but {rule}.")
        if found:
            first, last = int(found[1]), int(found[2] or found[1])
            if first > last or last > MAX_RANK:
                rule = f"the highest is {MAX_RANK}" if last > MAX_RANK else f"write {last}-{first}"
                raise ConfigError(
                    field_name,
                    f"{field_name} is {shown_value(value)}, but {text!r} is no range of ranks: {rule}.",
                )
            ranks.update(range(first, last + 1))
    return tuple(sorted(ranks))


def parse_pull(value: object) -> tuple[Pull, ...]:
    """Return the pulls of ``"loss, w@3, acc@all"``, one `Pull`, or an iterable of either.

    Raises:
        ConfigError: A part is no ``NAME``, ``NAME@RANK`` or ``NAME@all``, or a name would be bound twice.
    """
    items = value.split(",") if isinstance(value, str) else items_of(value)
    pulls: dict[str, Pull] = {}
    for item in items:
        if isinstance(item, str) and not item.strip():
            continue
        pull = _pull(item)
        if pulls.setdefault(pull.name, pull) != pull:
            both = f"{pulls[pull.name]} and {pull}"
            rule = f"a name is bound once: write {pull.name}@all for a list by rank"
            raise ConfigError("pull", f"pull has {both}, but {rule}.")
    return tuple(pulls.values())


def _pull(item: object) -> Pull:
    name, at, rank = str(item).partition("@") if isinstance(item, (str, Pull)) else ("", "", "")
    name, rank = name.strip(), rank.strip()
    is_rank = rank.isdecimal() and len(rank) <= _MOST_DIGITS and int(rank) <= MAX_RANK
    if rank == "all" or is_rank or not at:
        identifier("pull", name, item)
        return Pull(name, "all" if rank == "all" else int(rank or 0))
    raise ConfigError(
        "pull", f"pull is {shown_value(item)}, but it takes NAME, NAME@RANK or NAME@all: write {name}@all."
    )


def shown_value(value: object) -> str:
    """Return the value's repr for a sentence, cut when long; of what has none its type."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of a user's class, or a number with too many digits
        text = f"a {type(value).__name__}"
    limit = 120
    return text if len(text) <= limit else text[:limit] + "…"


def _written(item: object) -> str:
    """Return an item as text, "?" when it has none."""
    try:
        return str(item).strip()
    except Exception:  # noqa: BLE001 - as in `shown_value`
        return "?"


def items_of(value: object) -> list[Any]:
    """Return the items of an iterable, at most `MOST_ITEMS`, or the value alone."""
    return list(islice(value, MOST_ITEMS)) if isinstance(value, Iterable) else [value]


def identifier(field_name: str, name: object, shown: object = None) -> str:
    """Return the name when it can be a variable's.

    Raises:
        ConfigError: It cannot.
    """
    if isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name):
        return name
    shown = name if shown is None else shown
    example = {"out": "--out result", "push": "--push a,b"}.get(field_name, "--pull loss")
    what = "it takes names of variables" if field_name != "out" else "it takes one variable's name"
    raise ConfigError(field_name, f"{field_name} is {shown_value(shown)}, but {what}: write {example}.")
