"""Where a reader is in a numbered sequence that may come doubled, late or with gaps. Pure."""

from __future__ import annotations

from typing import Final

_MOST_GAPS: Final = 64


class Positions:
    """What has come of a sequence that begins at ``start``: everything below ``next`` but the gaps."""

    __slots__ = ("gaps", "next")

    def __init__(self, start: int = 0) -> None:
        self.next = start
        self.gaps: list[tuple[int, int]] = []

    def take(self, start: int, stop: int) -> int | None:
        """Take ``start … stop`` and return where its new part begins, or None when it has all come before.

        What is ahead of ``next`` leaves a gap, which is filled when it comes after all, in one piece or from its start.
        """
        if start == self.next:
            self.next = stop
            return start
        if start > self.next:
            self.gaps.append((self.next, start))
            del self.gaps[:-_MOST_GAPS]
            self.next = stop
            return start
        for index, (low, high) in enumerate(self.gaps):
            if low <= start and stop <= high:
                self.gaps[index : index + 1] = [
                    gap for gap in ((low, start), (stop, high)) if gap[0] < gap[1]
                ]
                return start
        if stop > self.next:
            start, self.next = self.next, stop
            return start
        return None

    @property
    def missing(self) -> int:
        """How many numbers have not come."""
        return sum(high - low for low, high in self.gaps)
