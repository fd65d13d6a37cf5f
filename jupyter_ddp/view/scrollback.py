"""Which lines of a run a view keeps: the first quarter of a byte budget and the last three, and how many were cut."""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from jupyter_ddp.view.terminal import Line

TAIL_LINES: Final = 100
TAIL_BYTES: Final = 64 * 1024
_LABEL: Final = 8  # what "[rank] " and the newline add to a line, about
_MOST_PINNED: Final = 256
_PINNED_BYTES: Final = 1_000


def size_of(line: Line) -> int:
    """Return what a line costs in a saved notebook, in bytes, about."""
    text = line.text
    return _LABEL + (len(text) if text.isascii() else len(text.encode("utf-8", "replace")))


class Scrollback:
    """The kept lines of a run, in the order in which they were begun.

    An open line that falls out of the budget (a progress bar that is still moving) is pinned after the cut, so that
    its last state is kept.
    """

    def __init__(self, budget: int) -> None:
        self.budget = max(4_096, budget)
        self.cut = 0
        """Lines that were dropped."""
        self._head: list[Line] = []
        self._pinned: list[Line] = []
        self._tail: deque[Line] = deque()
        self._head_size = self._tail_size = 0

    def add(self, lines: Iterable[Line]) -> None:
        """Append lines that were just begun."""
        for line in lines:
            line.kept = True
            if not self._tail and not self.cut and self._head_size + line.size <= self.budget // 4:
                self._head.append(line)
                self._head_size += line.size
            else:
                self._tail.append(line)
                self._tail_size += line.size
        self._trim()

    def resized(self, difference: int) -> None:
        """Take account of lines that were changed in place."""
        if self._tail:
            self._tail_size += difference
            self._trim()
        else:
            self._head_size += difference

    def skip(self, count: int) -> None:
        """Count lines that nobody brought here: the text of a flood stays in the rank's file."""
        self.cut += count

    def discard(self, unwanted: Callable[[Line], bool]) -> None:
        """Forget lines as if they had never been: what ``clear_output`` does."""
        for line in self:
            if unwanted(line):
                line.kept = False
        self._head = [line for line in self._head if line.kept]
        self._pinned = [line for line in self._pinned if line.kept]
        self._tail = deque(line for line in self._tail if line.kept)
        self._head_size = sum(line.size for line in self._head)
        self._tail_size = sum(line.size for line in self._tail)

    @property
    def before_cut(self) -> list[Line]:
        """The lines that stand before the gap, if there is one."""
        return self._head

    def last(self, count: int) -> list[Line]:
        """Return the last lines, in order."""
        lines: list[Line] = []
        for line in chain(reversed(self._tail), reversed(self._pinned), reversed(self._head)):
            if len(lines) >= count:
                break
            lines.append(line)
        return lines[::-1]

    def __iter__(self) -> Iterator[Line]:
        return chain(self._head, self._pinned, self._tail)

    def __len__(self) -> int:
        return len(self._head) + len(self._pinned) + len(self._tail)

    def _trim(self) -> None:
        room = self.budget - self.budget // 4
        while self._tail_size > room and len(self._tail) > 1:
            line = self._tail.popleft()
            self._tail_size -= line.size
            if line.open and line.size <= _PINNED_BYTES and len(self._pinned) < _MOST_PINNED:
                self._pinned.append(line)
            else:
                line.kept = False
                self.cut += 1


class Tail:
    """The last lines of one rank, within `TAIL_LINES` and `TAIL_BYTES`: what is shown when it fails."""

    def __init__(self) -> None:
        self.lines: deque[Line] = deque(maxlen=TAIL_LINES)
        self._size = 0

    def add(self, lines: list[Line]) -> None:
        """Append lines that were just begun."""
        self.lines.extend(lines[-TAIL_LINES:])
        self._size += sum(line.size for line in lines[-TAIL_LINES:])
        if self._size > TAIL_BYTES:  # an upper bound: lines that fell out are still in it
            self._size = sum(line.size for line in self.lines)
            while self._size > TAIL_BYTES and len(self.lines) > 1:
                self._size -= self.lines.popleft().size
