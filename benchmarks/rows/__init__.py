"""The rows: each module has the ``LINES`` of the table that it fills and ``measure(options, results)``."""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.driver import TooSlow

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.driver import Message

HERE = b"@here@"


def says_here(message: Message) -> bool:
    """Tell whether this is the first message with a rank's "@here@" (the cell's own text comes back too)."""
    return message.kind != "execute_input" and HERE in message.content


class Meeting:
    """A directory in which ranks leave a file each, named by their pid, and wait for a file ``go``."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="ddp-bench-meet-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def arrive(self, text: str = "''") -> str:
        """Return code that leaves the file with the text that an expression gives."""
        return (
            f"import os, time\n_p = os.path.join({str(self.path)!r}, str(os.getpid()))\n"
            f"_f = open(_p + '~', 'w'); _f.write(str({text})); _f.close(); os.rename(_p + '~', _p)\n"
        )

    def wait(self) -> str:
        """Return code that waits for ``go``."""
        return f"while not os.path.exists(os.path.join({str(self.path)!r}, 'go')): time.sleep(0.01)\n"

    def go(self) -> None:
        """Let the ranks go on."""
        (self.path / "go").touch()

    def come(self) -> dict[int, str]:
        """Return the ranks that have come, with their texts."""
        return {int(p.name): p.read_text() for p in self.path.iterdir() if p.name.isdigit()}

    def all(
        self, ranks: int, limit: float = 30.0, meanwhile: Callable[[], object] | None = None
    ) -> dict[int, str]:
        """Wait until all have come."""
        end = time.time() + limit
        while len(found := self.come()) < ranks:
            if time.time() > end:
                raise TooSlow(f"{len(found)} of {ranks} ranks came in {limit:.0f} s")
            if meanwhile:
                meanwhile()
            time.sleep(0.01)
        return found

    def close(self) -> None:
        """Remove it."""
        self._remove()
