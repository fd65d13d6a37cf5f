"""Values that a rank leaves for the notebook: each comes as it is, or not at all and with a note; never as an error."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.events import NoteEvent, ValueEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

LAST_LIMIT: Final = 8_000_000
"""Bytes of a cell's last expression up to which its value is saved: most people only wanted to see it."""
RETURN_LIMIT: Final = 256_000_000
"""Bytes of what a function that was launched returns, up to which it is saved."""
LAST_FILE: Final = "_"
_ONLY_SHOWN: Final = frozenset({"torch.nn.modules.module.Module", "matplotlib.artist.Artist"})
"""Kinds of objects that stand at the end of a cell without being its result: ``model.train()``, a figure."""


class Saver:
    """Writes values of one rank into the run directory and tells of each.

    Args:
        run_dir: The run directory.
        rank: The rank.
        put: Takes the events.
        namespace: The variables after the cell.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        put: Callable[[ValueEvent | NoteEvent], None],
        namespace: Mapping[str, Any],
    ) -> None:
        self._directory = run_dir
        self._rank = rank
        self._put = put
        self._namespace = namespace
        self._pulled: set[str] = set()

    def save(self, wanted: Sequence[Sequence[Any]], *, must_exist: bool) -> None:
        """Save the variables among `wanted`, pairs of a name and a rank or "all", that concern this rank."""
        for name in dict.fromkeys(name for name, rank in wanted if rank in {"all", self._rank}):
            self._pulled.add(name)
            if name in self._namespace:
                try:
                    self._write(name, name, self._namespace[name])
                except Exception as error:  # noqa: BLE001 - user's reducers too; a note in any case
                    self._miss(name, f"{name} did not come back: {error}")
            elif must_exist:
                self._miss(name, f"{name} did not come back: this rank has no such variable after the cell")

    def save_returned(self, value: object) -> None:
        """Save what a function that was launched has returned: this is how it gives its result back."""
        from jupyter_ddp.travel.pickling import TooLargeError

        try:
            self._write("", LAST_FILE, value, limit=RETURN_LIMIT)
        except TooLargeError as error:
            self._miss(
                "", f"the function's value did not come back: {error}; return less, or write it to a file"
            )
        except Exception as error:  # noqa: BLE001
            self._miss("", f"the function's value did not come back: {error}")

    def save_last(self, value: object) -> None:
        """Save the value of a cell's last expression, when it is not large and can travel. It has been shown anyway."""
        from jupyter_ddp.travel.pickling import TooLargeError

        try:
            self._write("", LAST_FILE, value, limit=LAST_LIMIT, explain=False)
        except TooLargeError as error:
            names = [name for name, one in self._namespace.items() if one is value and name[0] != "_"]
            if _is_only_shown(value) or self._pulled & {*names}:
                return
            way = f"--pull {names[0]}" if names else "assign it to a variable; --pull NAME then"
            text = f"the value of the cell's last expression did not come back ({error}): {way} brings it"
            self._put(NoteEvent(text=text, time=time.time()))
        except Exception:  # noqa: BLE001, S110 - nobody has asked for it
            pass

    def _write(self, name: str, file_name: str, value: object, **options: Any) -> None:  # noqa: ANN401
        """Save a value and tell of it, or raise why not; see `values.save_value`."""
        from jupyter_ddp.values import save_value  # cloudpickle: only when there is something

        path = self._directory / "values" / f"rank{self._rank}.{file_name}.bin"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.unlink(missing_ok=True)
        saved = save_value(path, value, name, **options)
        file = os.path.relpath(path, self._directory)
        note = "; ".join(saved.notes)
        self._put(ValueEvent(name=name, file=file, size=saved.size, note=note, time=time.time()))

    def _miss(self, name: str, note: str) -> None:
        self._put(ValueEvent(name=name, note=note, time=time.time()))


def _is_only_shown(value: object) -> bool:
    return any(f"{kind.__module__}.{kind.__qualname__}" in _ONLY_SHOWN for kind in type(value).__mro__)
