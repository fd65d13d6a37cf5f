"""An exception of a rank as text: what it is, where in the cell it came from, and a traceback of the user's frames.

Exceptions never travel as pickles: the notebook could not always load them, and should not have to.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import jupyter_ddp
from jupyter_ddp.events import ErrorEvent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from jupyter_ddp.runtime.source import Source

INTERRUPT_CODE: Final = 130
MESSAGE_LIMIT: Final = 16_000
TRACEBACK_LIMIT: Final = 200_000


def _folder(package: str) -> str:
    """Return the folder of a package as its frames name it. It is not imported: what cannot be imported is told too."""
    spec = importlib.util.find_spec(package)
    return os.path.join(os.path.dirname(spec.origin), "") if spec and spec.origin else f"<{package}>"


_HIDDEN: Final = (
    _folder("IPython"),
    _folder(jupyter_ddp.__name__),
    "<frozen runpy>",
    os.path.join(os.path.dirname(os.__file__), "runpy.py"),
    os.path.join(os.path.dirname(os.__file__), "codeop.py"),
)
"""Frames of these files are between the user's code and the user's code, and say nothing about either."""


def describe(error: BaseException, source: Source, time: float) -> ErrorEvent:
    """Return the event of an exception, without its traceback. Never raises, whatever the exception does."""
    line, where, text = _place(error, source)
    name = type(error).__name__
    message = _message(error)
    return ErrorEvent(
        type=name,
        message=message
        if len(message) <= MESSAGE_LIMIT
        else f"{message[:MESSAGE_LIMIT]}… ({len(message)} characters)",
        line=line,
        where=where,
        source=text,
        code=exit_code(error),
        time=time,
    )


def with_traceback(
    event: ErrorEvent, error: BaseException, source: Source, *, whole: bool = False
) -> ErrorEvent:
    """Return the event with the traceback that Python would print, of the user's frames only. Never raises.

    A `whole` one has all frames: for what no code of the user's has to do with. There is none when no frame is the
    user's: a function that could not be called.
    """
    try:
        text = _render(error, source, whole=whole)
    except BaseException:  # noqa: BLE001 - an exception that breaks `traceback` still has to be told
        text = f"{event.type}: {event.message}"
    if len(text) > TRACEBACK_LIMIT:
        half = TRACEBACK_LIMIT // 2
        text = f"{text[:half]}\n… ({len(text) - 2 * half} characters)\n{text[-half:]}"
    return replace(event, traceback=text)


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that ends by `error`; for a failure it is never 0."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPT_CODE
    if not isinstance(error, SystemExit):
        return 1
    if is_quiet_end(error):
        return 0
    return (error.code & 0xFF or 1) if isinstance(error.code, int) else 1


def is_quiet_end(error: BaseException | None) -> bool:
    """Tell whether this is no failure: nothing at all, or ``sys.exit()`` and ``sys.exit(0)``."""
    return error is None or (isinstance(error, SystemExit) and (error.code is None or error.code == 0))


def _message(error: BaseException) -> str:
    try:
        if isinstance(error, SyntaxError) and error.msg:
            return str(error.msg)
        return str(error)
    except BaseException as broken:  # noqa: BLE001 - the user's __str__ may do anything, and even exit
        return f"(this {type(error).__name__} has no text: its __str__ raised {type(broken).__name__})"


def _place(error: BaseException, source: Source) -> tuple[int | None, str, str | None]:
    """Return the line to be named, what it is a line of ("" for the cell), and its text."""
    if source.generated:
        return _line_of_called(error, source)
    line = _cell_line(error, source)
    return line, "", source.text(line)


def _line_of_called(error: BaseException, source: Source) -> tuple[int | None, str, str | None]:
    """Return the innermost place in the file of the function that generated code has called."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != source.filename and not frame.filename.startswith(_HIDDEN)
    ]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    if not own:
        return None, "", None
    frame = own[-1]
    # A notebook's cell has a file's name that says nothing, and mostly no file.
    where = os.path.basename(frame.filename) if os.path.exists(frame.filename) else f"{frame.name}()"
    return frame.lineno, where, frame.line or None


def _cell_line(error: BaseException, source: Source) -> int | None:
    """Return the line of the innermost frame that is the cell's own code."""
    if isinstance(error, SyntaxError) and (line := source.line(error.filename, error.lineno)):
        return line
    found = None
    for filename, lineno in _places(error.__traceback__):
        found = source.line(filename, lineno) or found
    return found


def _places(tb: TracebackType | None) -> Iterator[tuple[str, int | None]]:
    while tb is not None:
        yield tb.tb_frame.f_code.co_filename, tb.tb_lineno
        tb = tb.tb_next


def _render(error: BaseException, source: Source, *, whole: bool) -> str:
    tree = traceback.TracebackException(
        type(error), error, error.__traceback__, lookup_lines=False, compact=True
    )
    if isinstance(error, KeyboardInterrupt):
        tree.__cause__ = tree.__context__ = None
    if not whole:
        _clean(tree, source, set())
    if source.generated and not (tree.stack or tree.__cause__ or tree.__context__):
        return ""
    return "".join(tree.format()).rstrip("\n")


def _clean(tree: traceback.TracebackException, source: Source, seen: set[int]) -> None:
    """Take the hidden frames out of a tree of exceptions, and count the lines of the cell's parts as the cell's."""
    if id(tree) in seen:
        return
    seen.add(id(tree))
    hidden = (*_HIDDEN, source.filename) if source.generated else _HIDDEN
    tree.stack[:] = [frame for frame in tree.stack if not frame.filename.startswith(hidden)]
    for frame in tree.stack:
        line = source.line(frame.filename, frame.lineno)
        if line is not None and frame.filename != source.filename and frame.lineno is not None:
            behind = line - frame.lineno
            frame.filename, frame.lineno = source.filename, line
            if sys.version_info >= (3, 11) and frame.end_lineno is not None:
                frame.end_lineno += behind
    related = [tree.__cause__, tree.__context__, *(getattr(tree, "exceptions", None) or ())]
    for other in related:
        if other is not None:
            _clean(other, source, seen)
