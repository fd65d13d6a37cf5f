"""The text of a cell: the file that its code claims to be from, and how lines are counted in it.

``linecache`` has the magic line as line 1, then the body. The line numbers of the code are moved to fit, as text put in
front of the body would keep a ``%%time`` from being first.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from typing import Final

CELL: Final = "<distributed cell>"
"""The file name of the first cell's code, in tracebacks and for ``inspect``."""
CALL: Final = "<distributed call>"
"""The file name of code that was generated to call a user's function."""
SETUP: Final = "<distributed setup>"
_TIME_CODE: Final = ("<timed exec>", "<timed eval>")
"""The file names that ``%%time`` gives to its body."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file that exists in ``linecache`` only.

    Attributes:
        filename: What the code's ``co_filename`` is.
        aliases: Other names that IPython gives to parts of it, each with what its lines are behind.
        generated: Nobody has written it (`jupyter_ddp.launch` calls a function): what it calls is the user's code.
    """

    filename: str
    aliases: tuple[tuple[str, int], ...] = ()
    generated: bool = False

    def line(self, filename: str | None, lineno: int | None) -> int | None:
        """Return this source's line of a place in a file, or None when that is not in it."""
        if lineno is None:
            return None
        if filename == self.filename:
            return lineno
        return next((lineno + behind for alias, behind in self.aliases if alias == filename), None)

    def text(self, line: int | None) -> str | None:
        """Return the text of a line, stripped, or None."""
        return (linecache.getline(self.filename, line).strip() or None) if line else None

    def register(self, text: str) -> None:
        """Let ``inspect``, ``torch.jit`` and tracebacks find the text."""
        lines = text.splitlines(keepends=True)
        linecache.cache[self.filename] = (len(text), None, lines, self.filename)

    def move(self, error: SyntaxError, behind: int) -> None:
        """Make a syntax error of code of this source speak of its lines; they are `behind` the code's own."""
        if error.filename != self.filename or error.lineno is None:
            return
        error.lineno += behind
        if getattr(error, "end_lineno", None):
            error.end_lineno = (error.end_lineno or 0) + behind
        error.text = error.text or linecache.getline(self.filename, error.lineno)


NOWHERE: Final = Source("")
"""For errors that have no place in any cell."""


def cell_source(number: int, magic: str, body: str, *, generated: bool = False) -> Source:
    """Register the rank's cell of this number, from 0. Code of a leading ``%%time`` counts as the cell's."""
    name = CALL if generated else CELL
    filename = f"{name[:-1]} {number + 1}>" if number else name
    behind = leading_blank_lines(body) + 2
    aliases = tuple((name, behind) for name in _TIME_CODE) if body.lstrip().startswith("%%time") else ()
    source = Source(filename, aliases, generated)
    source.register(f"{magic}\n{body}\n")
    return source


def setup_source(text: str) -> Source:
    """Register the setup code."""
    source = Source(SETUP)
    source.register(text)
    return source


def leading_blank_lines(text: str) -> int:
    """Return how many lines IPython strips from a cell's head."""
    head = text[: len(text) - len(text.lstrip())]
    return head.count("\n") if text.strip() else 0
