"""What was measured, and the lines of the table that it goes to."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.driver import TooSlow

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Line:
    """One quantity. Less is better for all of them."""

    key: str
    what: str
    unit: str
    target: float | None = None
    """DESIGN's number, in the unit; None where it names none."""
    against: dict[str, str] | None = None
    """For lines that are measured against something else than the best peer: what, by our system."""


@dataclass
class Options:
    """What the command line said."""

    repeat: int = 3
    full: bool = False
    limit: float = 60.0
    """Seconds that a cell of a peer may take."""

    @property
    def flood(self) -> int:
        """Bytes of a flood and of the array."""
        return 1_000_000_000 if self.full else 200_000_000


@dataclass
class Results:
    """Values and remarks by (line, system)."""

    values: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    notes: dict[tuple[str, str], list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, key: str, system: str, value: float) -> None:
        """Keep a value."""
        self.values[key, system].append(value)
        print(f"  {time.strftime('%H:%M:%S')} {key:24} {system:24} {value:.4g}", flush=True)

    def note(self, key: str, system: str, text: str) -> None:
        """Keep a remark, once."""
        if text not in self.notes[key, system]:
            self.notes[key, system].append(text)
            print(f"  {time.strftime('%H:%M:%S')} {key:24} {system:24} {text}", flush=True)

    @contextmanager
    def attempt(self, keys: list[str], system: str) -> Iterator[None]:
        """Turn a failure of a system into a remark on its lines that have no value yet."""
        try:
            yield
        except TooSlow as error:
            self._fail(keys, system, str(error))
        except Exception as error:  # noqa: BLE001 - a peer may fail in any way, and the others go on
            self._fail(keys, system, f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}")

    def _fail(self, keys: list[str], system: str, text: str) -> None:
        for key in keys:
            if not self.values[key, system]:
                self.note(key, system, text)
                return
        self.note(keys[-1], system, text)
