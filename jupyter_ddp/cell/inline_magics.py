"""Names inside nested magics: ``%time stmt``, ``%%capture`` bodies, ``%run -i``, ``{expr}`` and ``$name`` in lines."""

from __future__ import annotations

import re
import shlex
import string
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.cell.names import names_in
from jupyter_ddp.cell.syntax import compile_python, parse

if TYPE_CHECKING:
    import ast

    from jupyter_ddp.cell.names import NameWalk

_RUNS_HERE: Final = frozenset(
    {"time", "prun", "memit", "mprun", "lprun", "debug", "capture", "pyinstrument", "scalene"}
)
_PYTHON: Final = frozenset({"time", "timeit", "prun", "capture"})
"""IPython's own cell magics whose body is Python: a wrong one is a wrong cell."""
_RUNS_APART: Final = frozenset({"timeit"})
_OTHER_LANGUAGES: Final = frozenset(
    {"bash", "sh", "script", "system", "sx", "!", "!!", "perl", "ruby", "pypy", "python", "python2", "python3", "html",
     "HTML", "javascript", "js", "svg", "SVG", "latex", "markdown", "writefile", "file", "cmd", "powershell", "R",
     "sql", "cython"}
)  # fmt: skip
_MOST_WORDS: Final = 64
"""Words at the beginning of a magic's line that may belong to options."""
_DOLLAR: Final = re.compile(r"\$([A-Za-z_]\w*)")
_NAME: Final = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class MagicNames:
    """Finds the names that a magic's text reads and binds, and tells the walk.

    Magics that run Python are transformed by ``shell`` and walked like the cell itself. Of other languages only
    what IPython expands counts. A `SyntaxError` in the body of a magic that runs Python goes to the caller.
    """

    shell: Any

    def __call__(self, walk: NameWalk, method: str, args: tuple[str, ...]) -> None:
        """Handle one ``get_ipython().<method>(*args)`` of a transformed cell."""
        if method == "run_line_magic" and args:
            self._line(walk, args[0], args[1] if len(args) > 1 else "")
        elif method == "run_cell_magic" and len(args) == 3:
            self._cell(walk, *args)
        else:
            for text in args:
                walk.read(expansions(text))

    def _line(self, walk: NameWalk, name: str, text: str) -> None:
        walk.read(expansions(text))
        if name == "run":
            self._script(walk, text)
        elif name in _RUNS_HERE or name in _RUNS_APART:
            tree = self._statement(text)
            if tree is not None:
                walk.isolated(tree) if name in _RUNS_APART else walk.follow(tree)
        elif name.startswith(("pinfo", "pdoc", "pdef", "psource", "pfile")):
            walk.read(_NAME.findall(text)[:1])

    def _cell(self, walk: NameWalk, name: str, line: str, body: str) -> None:
        walk.read(expansions(line))
        if name in _OTHER_LANGUAGES:
            return
        if name in _RUNS_APART:
            tree = self._statement(line)
            if tree is not None:  # the set-up statement
                walk.isolated(tree)
        if name in _PYTHON:
            compile_python(self.shell.transform_cell(body))
        tree = self._parse(body)
        if tree is None:
            walk.read(expansions(body))
        elif name in _RUNS_APART:
            walk.isolated(tree)
        else:
            walk.follow(tree)
        if name == "capture":
            walk.assign([word for word in line.split() if word.isidentifier()][:1])

    def _parse(self, text: str) -> ast.Module | None:
        try:
            return parse(self.shell.transform_cell(text))
        except SyntaxError:
            return None

    def _statement(self, text: str) -> ast.Module | None:
        """Return the statement at the end of a magic's line, its options (``-n 10 -r 3``) cut off."""
        rest = text.strip()
        for _ in range(_MOST_WORDS):
            tree = self._parse(rest)
            if tree is not None and not rest.startswith("-"):
                return tree
            rest = rest.partition(" ")[2].lstrip()
        return None

    def _script(self, walk: NameWalk, text: str) -> None:
        """Walk the file of ``%run -i file``, which runs among the cell's names."""
        try:
            words = shlex.split(text)
        except ValueError:
            return
        options = []
        while words and words[0].startswith("-"):
            options.append(words.pop(0))
        if not words or not any(option.startswith("-") and "i" in option for option in options):
            return
        path = Path(words[0]).expanduser()
        try:
            source = (path if path.suffix else path.with_suffix(".py")).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return
        tree = self._parse(source)
        if tree is not None:
            walk.follow(tree)


def expansions(text: str) -> set[str]:
    """Return the names in ``{expr}`` and ``$name`` of a line that IPython expands."""
    found = set(_DOLLAR.findall(text))
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(text) if field]
    except ValueError:  # braces of another language
        fields = re.findall(r"\{([^{}]+)\}", text)
    return found | names_in(fields)
