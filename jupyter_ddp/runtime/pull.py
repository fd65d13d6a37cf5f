"""Values that a rank leaves for the notebook. What cannot travel is a note of the event, never an error."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.events import ValueEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

LAST_LIMIT: Final = 1 << 20
"""Bytes of a cell's last expression up to which its value is saved; above, its text."""
LAST_FILE: Final = "_"


class Saver:
    """Writes values of one rank into the run directory and tells of each."""

    def __init__(self, run_dir: Path, rank: int, put: Callable[[ValueEvent], None]) -> None:
        self._directory = run_dir
        self._rank = rank
        self._put = put

    def save(
        self, wanted: Sequence[Sequence[Any]], namespace: Mapping[str, Any], *, must_exist: bool
    ) -> None:
        """Save the variables among `wanted`, pairs of a name and a rank or "all", that concern this rank."""
        names = dict.fromkeys(name for name, rank in wanted if rank in {"all", self._rank})
        for name in names:
            if name in namespace:
                self._put(self._saved(name, name, namespace[name]))
            elif must_exist:
                note = f"rank {self._rank} has no variable {name!r} after the cell"
                self._put(ValueEvent(name=name, note=note, time=time.time()))

    def save_last(self, value: object) -> None:
        """Save the cell's last expression, as text when it is large or cannot travel."""
        event = self._saved("", LAST_FILE, value) if _size_hint(value) <= LAST_LIMIT else None
        if event is None or event.file is None or event.size > LAST_LIMIT:
            try:
                text = repr(value)
            except Exception as error:  # noqa: BLE001 - the user's __repr__
                text = f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
            event = self._saved("", LAST_FILE, text[:LAST_LIMIT])
        self._put(event)

    def _saved(self, name: str, file_name: str, value: object) -> ValueEvent:
        path = self._directory / "values" / f"rank{self._rank}.{file_name}.bin"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.unlink(missing_ok=True)
        try:
            from jupyter_ddp.values import save_value  # cloudpickle: only when there is something

            saved = save_value(path, value)
        except Exception as error:  # noqa: BLE001 - user's reducers too; a note in any case
            what = f"the value of {name!r}" if name else "the cell's last value"
            return ValueEvent(name=name, note=f"{what} could not travel: {error}", time=time.time())
        file = os.path.relpath(path, self._directory)
        return ValueEvent(
            name=name, file=file, size=saved.size, note="; ".join(saved.notes), time=time.time()
        )


def _size_hint(value: object) -> int:
    """Return the bytes that a value is known to have without pickling it: arrays and tensors tell."""
    size = getattr(value, "nbytes", 0)
    return size if isinstance(size, int) else 0
