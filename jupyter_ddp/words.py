"""Small things said in words everywhere alike: ranks, durations, sizes, signals. Pure, standard library only."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST_RANGES: Final = 16
_CRASHES: Final = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP"})


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as ranges: ``"0-2, 5"`` for 0, 1, 2 and 5; past sixteen ranges the rest is counted."""
    ordered = sorted(set(ranks))
    ranges: list[tuple[int, int]] = []
    for rank in ordered:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    shown = ranges[:_MOST_RANGES]
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in shown)
    rest = len(ordered) - sum(b - a + 1 for a, b in shown)
    return f"{text} and {rest} more" if rest else text


def ranks_named(ranks: Iterable[int], world_size: int = 0) -> str:
    """Return ``"rank 3"``, ``"ranks 0-2"``, or ``"all 8 ranks"`` when these are all of several (``"both ranks"``)."""
    some = sorted(set(ranks))
    if len(some) == world_size == 2:
        return "both ranks"
    if len(some) > 1 and len(some) == world_size:
        return f"all {world_size} ranks"
    return ("rank " if len(some) == 1 else "ranks ") + ranks_text(some)


def duration_text(seconds: float) -> str:
    """Return a duration for people: ``"3.2 s"``, ``"2 min 5 s"``, ``"1 h 2 min"``."""
    seconds = max(0.0, seconds)
    if seconds < 59.95:  # what "%.1f" would round up to a minute
        return f"{seconds:.1f} s"
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s"


def size_text(size: int) -> str:
    """Return a number of bytes for people: ``"12 B"``, ``"3.4 kB"``, ``"1.2 GB"``."""
    value = float(size)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def count_text(count: int, noun: str) -> str:
    """Return ``"1 line"``, ``"12,345 lines"``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def signal_name(number: int) -> str:
    """Return ``"SIGSEGV"`` for 11, or ``"signal 77"`` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def signal_words(number: int) -> str:
    """Return what a signal did to a rank: ``"crashed: SIGSEGV"``, ``"was killed: SIGKILL (…)"``."""
    name = signal_name(number)
    if name in _CRASHES:
        return f"crashed: {name}"
    if name == "SIGKILL":
        return "was killed: SIGKILL (if nobody did it: often the machine was out of memory)"
    return f"was ended by {name}"
