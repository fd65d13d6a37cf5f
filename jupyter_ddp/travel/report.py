"""What goes to the ranks, how big, and what the user should know about it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, Final

from jupyter_ddp.words import duration_text, size_text

WHAT_DOES_NOT_TRAVEL: Final = (
    "Module state of the kernel does not travel: random seeds, logging configuration, tracking URIs, patches."
)
_ANNOUNCE_FROM: Final = 16_000_000
_BIGGEST: Final = 3


@dataclass(frozen=True, slots=True)
class CaptureItem:
    """One variable that travels.

    Attributes:
        name: The variable.
        type: Its type, with shape or length where that is known.
        nbytes: What it adds to the payload; what variables share counts for the first one (in alphabetical order).
        how: ``value``, ``import`` or ``source`` (a helper module, by its source).
    """

    name: str
    type: str
    nbytes: int
    how: str


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What travels.

    Attributes:
        items: The variables.
        notes: Sentences for the user.
        total: The payload's size in bytes.
        sources: Modules that travel as source.
        seconds: How long it took to pickle them.
    """

    items: tuple[CaptureItem, ...] = ()
    notes: tuple[str, ...] = ()
    total: int = 0
    sources: tuple[str, ...] = field(default=())
    seconds: float = 0.0

    def text(self) -> str:
        """Return a table for people."""
        if not self.items:
            lines = ["no variables travel"]
        else:
            wide = max(len(item.name) for item in self.items)
            kinds = max(len(item.type) for item in self.items)
            lines = [f"{size_text(self.total)} travel to the ranks:"]
            for item in self.items:
                how = size_text(item.nbytes) if item.how == "value" else item.how
                lines.append(f"  {item.name:<{wide}}  {item.type:<{kinds}}  {how:>9}")
        if self.sources:
            lines.append(f"  as source: {', '.join(self.sources)}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, WHAT_DOES_NOT_TRAVEL])

    def announcement(self, seconds: float) -> str | None:
        """Return a sentence about a payload of 16 MB or more that names the biggest variables, else None.

        Args:
            seconds: How long it took to write it.
        """
        if self.total < _ANNOUNCE_FROM:
            return None
        biggest = sorted(self.items, key=lambda item: -item.nbytes)[:_BIGGEST]
        parts = ", ".join(f"`{item.name}` {size_text(item.nbytes)}" for item in biggest if item.nbytes)
        time = duration_text(self.seconds + seconds)
        return f"{size_text(self.total)} of variables travel to the ranks, made ready in {time}: {parts}"


def describe(value: Any) -> str:  # noqa: ANN401 - any object
    """Return an object's type for people, with its shape, dtype, device or length. Never calls user code."""
    kind = type(value)
    name = (
        kind.__qualname__
        if kind.__module__ in {"builtins", "__main__"}
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    torch: Any = sys.modules.get("torch")
    numpy: Any = sys.modules.get("numpy")
    if torch is not None and _is(value, torch, "Tensor"):
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{name} {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{where}"
    if numpy is not None and _is(value, numpy, "ndarray"):
        return f"{name} {value.dtype} {value.shape}"
    if isinstance(value, type):
        return "class"
    if kind in {str, bytes, list, tuple, dict, set, frozenset, bytearray}:
        return f"{name} [{len(value)}]"
    return name


def _is(value: Any, module: Any, name: str) -> bool:  # noqa: ANN401 - any object; a module
    return isinstance(value, getattr(module, name, ()))
