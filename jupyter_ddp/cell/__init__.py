"""A cell's text as a `Program`: transformed and compiled here, before anything starts, with the names that it reads."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any, Final

from jupyter_ddp.cell.inline_magics import MagicNames
from jupyter_ddp.cell.names import NameWalk
from jupyter_ddp.cell.syntax import compile_python
from jupyter_ddp.errors import CellError

NOTEBOOK_LAUNCHER: Final = (
    "notebook_launcher starts processes of its own, and this code already runs on every rank: "
    "call the function itself."
)


@dataclass(frozen=True, slots=True)
class Program:
    """A cell that compiles.

    Attributes:
        source: The cell's body as the user wrote it, without the magic line.
        magic: The magic line, "" when there is none.
        reads: Names that the body may look up in the notebook; not all of them need exist there.
        assigns: Names that the body may bind.
        empty: Nothing but blank lines and comments.
        warnings: Sentences about what will not work on ranks as it does in a notebook.
        returns: Its last value is what a function gives back, not only something to look at.
        mentions: What its variables mention, once they are known: modules that they need, names in their code.
    """

    source: str
    magic: str = ""
    reads: frozenset[str] = frozenset()
    assigns: frozenset[str] = frozenset()
    empty: bool = False
    warnings: tuple[str, ...] = ()
    returns: bool = False
    mentions: frozenset[str] = frozenset()


def compile_cell(source: str, shell: Any, magic: str = "") -> Program:  # noqa: ANN401 - an InteractiveShell
    """Return the program of a cell's body.

    Nothing runs. Magics and shell lines are transformed by the shell's own transformers, top-level ``await`` is
    allowed.

    Raises:
        CellError: The cell does not compile. Its line counts the magic line as line 1.
    """
    shift = 1 + _leading_blank_lines(source)  # the shell's transformers drop leading blank lines
    try:
        text = shell.transform_cell(source)
        tree = compile_python(text)
    except SyntaxError as error:
        raise _cell_error(error, source, shift) from None
    except (
        ValueError,
        RecursionError,
        MemoryError,
    ) as error:  # null bytes, nesting beyond the parser's limits
        message = f"the cell does not compile: {str(error) or type(error).__name__}"
        raise CellError(message) from None
    walk = NameWalk(MagicNames(shell))
    try:
        walk.run(tree)
    except SyntaxError as error:  # in the body of a cell magic, which is the cell's first line then
        raise _cell_error(error, source, shift + 1) from None
    except (ValueError, MemoryError) as error:  # there too
        message = f"the cell does not compile: {str(error) or type(error).__name__}"
        raise CellError(message) from None
    except RecursionError:  # Python can run it, but it nests deeper than a walk can follow
        walk = _all_names(tree)
    return Program(
        source=source,
        magic=magic,
        reads=frozenset(walk.reads),
        assigns=frozenset(walk.assigns),
        empty=not tree.body,
        warnings=_warnings(walk),
    )


def _all_names(tree: ast.Module) -> NameWalk:
    """Return a walk that has found every name that is written anywhere."""
    walk = NameWalk(lambda *_: None)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (walk.reads if isinstance(node.ctx, ast.Load) else walk.assigns).add(node.id)
    return walk


def _leading_blank_lines(source: str) -> int:
    count = 0
    for line in source.splitlines():
        if line.strip():
            break
        count += 1
    return count


def _cell_error(error: SyntaxError, source: str, shift: int) -> CellError:
    name = type(error).__name__
    if error.lineno is None:
        return CellError(f"{name}: {error.msg}")
    line = error.lineno + shift
    lines = source.splitlines()
    body_line = line - 2
    written = lines[body_line] if 0 <= body_line < len(lines) else (error.text or "")
    compiled = (error.text or "").rstrip("\n")
    shown = compiled if compiled.strip() and compiled.strip() not in written else written
    message = f"{name} in line {line} of the cell: {error.msg}\n    {shown.strip()}"
    if error.offset and error.offset > 0 and shown.strip():
        indent = len(shown) - len(shown.lstrip())
        column = min(max(error.offset - 1 - indent, 0), len(shown.strip()))
        message += f"\n    {' ' * column}^"
    return CellError(message, line)


def _warnings(walk: NameWalk) -> tuple[str, ...]:
    return (NOTEBOOK_LAUNCHER,) if "notebook_launcher" in walk.calls else ()
