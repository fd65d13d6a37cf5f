r"""The line discipline: what a terminal would make of one stream of one rank, as lines. Pure.

A `Terminal` is fed decoded text in arbitrary chunks and gives `Line` objects. The last line is open and updated in
place; earlier lines are updated too when the cursor goes back up to them (tqdm's ``position=``). Understood are
``\n \r \b \t``, SGR (kept, balanced in each line) and CSI A B C D E F G J K. Every other escape sequence is
swallowed whole, other control characters are dropped. How the text was cut into chunks makes no difference.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from itertools import groupby, repeat
from typing import Final

from jupyter_ddp.view import sgr

MAX_LINE: Final = 20_000
"""Characters of a line that a view keeps; the rest is counted."""
MAX_ROWS: Final = 64
"""How many lines the cursor can go back up."""
MAX_COLUMN: Final = 1_000
"""How far to the right a cursor sequence can go, as on a terminal of that width."""
_MAX_STRING: Final = 1_000_000  # a control string that never ends must not swallow the rest of the run

_BESIDE: Final = "\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff"
_NOT_PLAIN: Final = re.compile(f"[{_BESIDE}]")
_TOKEN: Final = re.compile(
    f"(?P<text>[^\n{_BESIDE}]+)"
    "|\x1b\\[(?P<parameters>[0-?]{0,128})(?P<between>[ -/]{0,16})(?P<final>[@-~])"
    "|(?P<string>\x1b[]P^_X])"
    "|\x1b[ -/]{0,16}[0-Z\\\\`-~]",
)
_TORN: Final = re.compile("\x1b(?:\\[[0-?]{0,128}[ -/]{0,16}|[ -/]{0,16})\\Z")
_BROKEN: Final = re.compile("\x1b(?:\\[[0-?]{0,128}[ -/]{0,16}|[ -/]{0,16})")
_STRING_END: Final = re.compile("[\x07\x18\x1a\x1b\x9c]")
_COMMAND_END: Final = re.compile(
    "[\x07\x18\x1a\x1b\x9c\n]"
)  # an OSC has no newline: a stray one ends with its line


@dataclass(slots=True, eq=False)
class Line:
    """One line of one stream of one rank, updated in place while it is ``open``.

    Attributes:
        rank: The rank that wrote it.
        stream: ``stdout`` or ``stderr``.
        text: Its characters and balanced SGR sequences; beyond `MAX_LINE` cut, with ``… (N characters)`` at its end.
        open: Whether the cursor is on it or may still come back to it.
        length: Its true length in characters when it was cut, else 0.
        order: Its place among all lines and displays of a view.
        size: Its bytes, as they were counted when it was last kept.
        kept: Whether the view still shows it.
    """

    rank: int
    stream: str
    text: str = ""
    open: bool = False
    length: int = 0
    order: int = 0
    size: int = 0
    kept: bool = False


class Terminal:
    """The terminal of one stream of one rank.

    ``limit`` is the number of characters of a line that are kept, None for all.
    """

    __slots__ = (
        "_begun", "_changed", "_chars", "_column", "_fresh", "_length", "_limit", "_line", "_pending", "_raised",
        "_rank", "_rows", "_stream", "_string", "_string_size", "_style", "_styles", "_up",
    )  # fmt: skip

    def __init__(self, rank: int, stream: str, limit: int | None = MAX_LINE) -> None:
        self._rank = rank
        self._stream = stream
        self._limit = limit
        self._pending = ""  # the start of an escape sequence whose rest has not come
        self._string = ""  # inside a control string: what it began with
        self._string_size = 0
        self._style = ""
        self._rows: deque[Line] = deque(maxlen=MAX_ROWS)
        self._fresh = True  # the bottom row has not been begun: it is no line yet
        self._up = 0  # rows between the cursor's and the bottom one
        self._raised = 0  # the highest that the cursor has been since the bottom row came
        self._column = 0
        self._line: Line | None = None  # the row that is loaded into the next three
        self._chars = ""
        self._styles: list[str] | None = None  # one a character; None: all plain
        self._length = 0
        self._begun: list[Line] = []
        self._changed: list[Line] = []

    @property
    def open_lines(self) -> list[Line]:
        """The lines that may still change, from the top."""
        return [line for line in self._rows if line.open]

    def feed(self, text: str) -> tuple[list[Line], list[Line]]:
        """Take the next text; return the lines that it began, in order, and those that it changed.

        A line that was begun may be among the changed ones.
        """
        self._begun, self._changed = [], []
        if self._pending or self._string:
            text, self._pending = self._pending + text, ""
            self._slow(text)
        elif self._column != self._length or self._up:
            self._slow(text)
        elif not _NOT_PLAIN.search(text):
            (self._fast_coloured if self._style else self._fast)(text)
        elif "\x1b" in text and not _NOT_PLAIN.search(sgr.SGR.sub("", text)):
            self._fast_coloured(text)
        else:
            self._slow(text)
        if self._line is not None:
            self._store()
        return self._begun, self._changed

    def close(self) -> list[Line]:
        """End the stream: no line is open any more. Return those that were."""
        lines = self.open_lines
        for line in lines:
            line.open = False
        return lines

    # -- without cursor movement: whole lines at once

    def _fast(self, text: str) -> None:
        first, *rest = text.split("\n")
        if first:
            self._write(first)
        if not rest:
            return
        self._newline()
        last = rest.pop()
        lines = [*map(Line, repeat(self._rank), repeat(self._stream), rest)]
        if self._limit is not None and len(text) > self._limit:
            for line in lines:
                self._cut(line, [(line.text, "")])
        self._begun += lines
        self._rows.extend(lines[-MAX_ROWS:])
        if last:
            self._write(last)

    def _fast_coloured(self, text: str) -> None:
        first, *rest = text.split("\n")
        self._write_coloured(first)
        if not rest:
            return
        self._newline()
        last = rest.pop()
        lines = []
        for part in rest:
            runs, self._style = sgr.split_runs(part, self._style)
            line = Line(self._rank, self._stream, sgr.join_runs(runs))
            if self._limit is not None and len(part) > self._limit:
                self._cut(line, runs)
            lines.append(line)
        self._begun += lines
        self._rows.extend(lines[-MAX_ROWS:])
        self._write_coloured(last)

    def _cut(self, line: Line, runs: list[tuple[str, str]]) -> None:
        """Cut a whole line to the limit, if it is longer."""
        length = sum(len(run) for run, _ in runs)
        if self._limit is None or length <= self._limit:
            return
        room, kept = self._limit, []
        for run, style in runs:
            kept.append((run[:room], style))
            room -= len(kept[-1][0])
        line.length = length
        line.text = f"{sgr.join_runs(kept)}… ({length} characters)"

    def _write_coloured(self, text: str) -> None:
        for match in _TOKEN.finditer(text):
            if match["text"]:
                self._write(match["text"])
            else:
                self._style = sgr.apply(self._style, match["parameters"])

    # -- with everything

    def _slow(self, text: str) -> None:
        at, end = 0, len(text)
        while at < end:
            if self._string:
                at = self._swallow(text, at)
                continue
            match = _TOKEN.match(text, at)
            if match is None:
                at = self._control(text, at)
                if at < 0:
                    return
                continue
            at = match.end()
            if match["text"]:
                self._write(match["text"])
            elif match["string"]:
                self._string, self._string_size = match["string"], 0
            elif match["final"] and not match["between"]:
                self._sequence(match["final"], match["parameters"])

    def _swallow(self, text: str, at: int) -> int:
        """Pass over a control string, from ``at``; return where it ends, or the end of the text."""
        ends = _COMMAND_END if self._string == "\x1b]" else _STRING_END
        limit = at + _MAX_STRING - self._string_size
        match = ends.search(text, at, limit)
        if match is None:
            stop = min(limit, len(text))
            self._string_size += stop - at
            if self._string_size >= _MAX_STRING:
                self._string = ""
            return stop
        self._string = ""  # ESC \ is a sequence of its own, which does nothing
        return match.start() if match[0] in "\x1b\n" else match.end()

    def _control(self, text: str, at: int) -> int:
        """Act on the control character at ``at``; return where to go on, or -1 when the rest has to come first."""
        char = text[at]
        if char == "\n":
            self._newline()
        elif char == "\r":
            self._column = 0
        elif char == "\b":
            self._column = max(0, self._column - 1)
        elif char == "\x1b":
            if _TORN.match(text, at):
                self._pending = text[at:]
                return -1
            broken = _BROKEN.match(text, at)
            return broken.end() if broken else at + 1
        elif "\ud800" <= char <= "\udfff":
            self._write("\ufffd")
        return at + 1

    def _sequence(self, final: str, parameters: str) -> None:
        if final == "m":
            if not parameters or parameters[0] not in "<=>?":
                self._style = sgr.apply(self._style, parameters)
            return
        if final not in "ABCDEFGJK" or not all(c.isdigit() or c == ";" for c in parameters):
            return
        count = int(parameters.partition(";")[0][:6] or "0")
        if final in "JK":
            self._erase(final, count)
            return
        count = max(1, count)
        if final in "ABEF":
            self._move(count if final in "AF" else -count)
        if final in "EF":
            self._column = 0
        elif final == "C":
            self._column = max(self._column, min(self._column + count, MAX_COLUMN - 1))
        elif final == "D":
            self._column = max(0, self._column - count)
        elif final == "G":
            self._column = min(count, MAX_COLUMN) - 1

    # -- rows

    def _write(self, text: str) -> None:
        self._load(begin=True)
        at, end = self._column, self._column + len(text)
        self._column = end
        limit = self._limit
        shown = text if limit is None or end <= limit else text[: max(0, limit - at)]
        if at > len(self._chars) and shown:
            if self._styles is not None:
                self._styles += [""] * (at - len(self._chars))
            self._chars = self._chars.ljust(at)
        if shown:
            stop = at + len(shown)
            if self._style and self._styles is None:
                self._styles = [""] * len(self._chars)
            if self._styles is not None:
                self._styles[at:stop] = [self._style] * len(shown)
            old = self._chars
            self._chars = old + shown if at == len(old) else old[:at] + shown + old[stop:]
        self._length = max(self._length, end)

    def _newline(self) -> None:
        if self._up:
            self._leave()
            self._up -= 1
            self._column = 0
            return
        self._load(begin=True)
        self._leave()
        rows = self._rows
        for index in range(max(0, len(rows) - 1 - self._raised), len(rows)):
            rows[index].open = False
        self._fresh = True
        self._column = self._length = self._raised = 0

    def _move(self, up: int) -> None:
        """Go ``up`` rows up, or down; never past the oldest row or the bottom one."""
        highest = len(self._rows) - (0 if self._fresh else 1)
        target = min(max(0, self._up + up), highest)
        if target == self._up:
            return
        self._leave()
        self._up = target
        for above in range(self._raised, target + 1):
            line = self._row(above)
            if line is not None:
                line.open = True
        self._raised = max(self._raised, target)
        self._load(begin=False)

    def _row(self, up: int) -> Line | None:
        """Return the row that is ``up`` above the bottom, or None for the bottom one that was not begun."""
        index = len(self._rows) - up - (0 if self._fresh else 1)
        return self._rows[index] if 0 <= index < len(self._rows) else None

    def _load(self, *, begin: bool) -> None:
        """Make the cursor's row the one that is worked on; begin it if it is none yet."""
        if self._line is not None:
            return
        line = self._row(self._up)
        if line is None:
            if not begin:
                return
            line = Line(self._rank, self._stream, open=True)
            self._rows.append(line)
            self._begun.append(line)
            self._fresh = False
        self._line = line
        line.open = True
        if line.text:
            text = line.text[: line.text.rindex("… (")] if line.length else line.text
            runs, _ = sgr.split_runs(text)
            self._chars = "".join(run for run, _ in runs)
            coloured = len(self._chars) != len(text)
            self._styles = [style for run, style in runs for _ in run] if coloured else None
        else:
            self._chars, self._styles = "", None
        self._length = line.length or len(self._chars)

    def _store(self) -> None:
        """Write the row that is worked on into its line."""
        line = self._line
        if line is None:
            return
        if self._styles is None:
            text = self._chars
        else:
            pairs = zip(self._chars, self._styles, strict=True)
            groups = groupby(pairs, key=lambda pair: pair[1])
            text = sgr.join_runs(("".join(char for char, _ in group), style) for style, group in groups)
        cut = self._limit is not None and self._length > self._limit
        line.length = self._length if cut else 0
        line.text = f"{text}… ({self._length} characters)" if cut else text
        if not self._changed or self._changed[-1] is not line:
            self._changed.append(line)

    def _leave(self) -> None:
        self._store()
        self._line = None
        self._chars, self._styles, self._length = "", None, 0

    def _erase(self, what: str, mode: int) -> None:
        if mode > (3 if what == "J" else 2):
            return
        self._load(begin=False)
        if self._line is not None:
            self._erase_row(mode)
        if what == "J":  # lines that are closed are the record: a cleared screen does not take them away
            self._erase_rows(below=mode != 1, above=mode != 0)

    def _erase_row(self, mode: int) -> None:
        column = self._column
        if mode == 0:
            self._chars = self._chars[:column]
            self._length = min(self._length, column)
        elif mode == 1:
            count = min(column + 1, len(self._chars))
            self._chars = " " * count + self._chars[count:]
            if self._styles is not None:
                self._styles[:count] = [""] * count
        else:
            self._chars, self._length = "", 0
        if self._styles is not None:
            del self._styles[len(self._chars) :]

    def _erase_rows(self, *, below: bool, above: bool) -> None:
        for up in range(self._raised + 1):
            line = self._row(up)
            if line is None or line is self._line or not line.open:
                continue
            if (below and up < self._up) or (above and up > self._up):
                line.text, line.length = "", 0
                self._changed.append(line)
