"""Small things said in words everywhere alike: ranks, durations, sizes, signals, tables. Pure."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


def ranks_named(ranks: Iterable[int]) -> str:
    """Return ``"rank 3"`` or ``"ranks 0-2, 5"``: how ranks are named wherever they are not a label."""
    some = set(ranks)
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
    """Return a number of bytes for people: ``"12 B"``, ``"3.4 kB"``, ``"120 MB"``, ``"1.2 GB"``."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def count_text(count: int, noun: str) -> str:
    """Return ``"1 line"``, ``"12,345 lines"``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def label(rank: int, stream: str = "stdout") -> str:
    """Return what stands before a rank's line: ``"[3]"``, and ``"[3!]"`` for stderr."""
    return f"[{rank}!]" if stream == "stderr" else f"[{rank}]"


def shorten_text(text: str, limit: int) -> str:
    """Return text that is at most ``limit`` characters long; a longer one is cut and says how long it was."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def table_text(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines of aligned columns, the first row being the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def signal_name(number: int) -> str:
    """Return ``"SIGSEGV"`` for 11, or ``"signal 77"`` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def signal_words(number: int, *, several: bool = False) -> str:
    """Return what a signal did to a rank, or to several: ``"crashed: SIGSEGV"``, ``"were killed: SIGKILL (…)"``."""
    name = signal_name(number)
    was = "were" if several else "was"
    if name in _CRASHES:
        return f"crashed: {name}"
    if name == "SIGKILL":
        return f"{was} killed: SIGKILL (if nobody did it: often the machine was out of memory)"
    return f"{was} ended by {name}"
