"""Live events as comm messages: packed, within a rate of messages and of bytes, counted when there are too many. Pure.

A message is ``{"seq": n, "e": [...]}``: ``[rank, 0 | 1, text]`` for text of stdout or stderr, other events as objects;
or ``{"seq": n, "skip": events}`` for what was too much: the whole is in the run's log. ``seq`` grows by one a message.
"""

from __future__ import annotations

import json
from typing import Any, Final

from jupyter_ddp.events import Event, OutEvent, to_json

BURST: Final = 8
"""Messages that may go out at once after a pause."""
RATE: Final = 62.0
"""Messages a second in the long run; a Jupyter server lets 1000 pass."""
BYTES: Final = 1_000_000
"""Bytes a second in the long run, and at once after a pause."""
MOST_PENDING: Final = 2_000_000
"""Characters that may wait; beyond it all that waits is skipped."""
MOST_BUNDLE: Final = 64_000
"""Characters of a display's bundle that go in a live message."""


class Bucket:
    """A token bucket: ``size`` at most, ``rate`` a second."""

    def __init__(self, size: float, rate: float, now: float) -> None:
        self._size, self._rate, self._at = size, rate, now
        self._tokens = size

    def has(self, count: float, now: float) -> bool:
        """Tell whether ``count`` tokens are there."""
        self._tokens = min(self._size, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = now
        return self._tokens >= count

    def take(self, count: float) -> None:
        """Take tokens; the bucket may go below zero."""
        self._tokens -= count

    def wait(self, count: float) -> float:
        """Return the seconds until ``count`` tokens are there."""
        return max(0.0, count - self._tokens) / self._rate


class Packer:
    """Collects events and gives the messages that may be sent."""

    def __init__(self, now: float, seq: int = 0) -> None:
        self.seq = seq
        """The number of the last message."""
        self._messages = Bucket(BURST, RATE, now)
        self._bytes = Bucket(BYTES, BYTES, now)
        self._entries: list[list[Any] | dict[str, Any]] = []
        self._open: dict[int, list[Any]] = {}  # by rank: its last entry, while it is text
        self._count = self._size = self._skipped = 0

    def add(self, event: Event) -> None:
        """Take an event."""
        self._count += 1
        if isinstance(event, OutEvent) and event.text is not None and event.rank is not None:
            self._add_text(event.rank, 1 if event.stream == "stderr" else 0, event.text)
        else:
            entry = _slim(to_json(event))
            self._entries.append(entry)
            if event.rank is not None:
                self._open.pop(event.rank, None)
            self._size += _size(entry)
        if self._size > MOST_PENDING:
            self._skip()

    def _add_text(self, rank: int, stream: int, text: str) -> None:
        last = self._open.get(rank)
        if last is not None and last[1] == stream:
            last[2].append(text)
        else:
            last = [rank, stream, [text]]
            self._entries.append(last)
            self._open[rank] = last
            self._size += 12
        self._size += len(text) if text.isascii() else len(text.encode("utf-8", "replace"))

    @property
    def pending(self) -> bool:
        """Whether anything waits."""
        return bool(self._entries or self._skipped)

    def due(self, now: float) -> float | None:
        """Return the seconds until a message may be sent, None when nothing waits."""
        if not self.pending:
            return None
        return 0.0 if self._messages.has(1, now) else self._messages.wait(1)

    def message(self, now: float, *, last: bool = False) -> dict[str, Any] | None:
        """Return the next message, or None when nothing waits or it is too early (never, if it is the ``last``)."""
        if not self.pending or not (last or self._messages.has(1, now)):
            return None
        if self._entries and not self._bytes.has(self._size, now):
            self._skip()
        self._messages.take(1)
        self.seq += 1
        out: dict[str, Any] = {"seq": self.seq}
        if self._skipped:
            out["skip"], self._skipped = self._skipped, 0
        if self._entries:
            self._bytes.take(self._size)
            out["e"] = [[e[0], e[1], "".join(e[2])] if isinstance(e, list) else e for e in self._entries]
            self._forget()
        return out

    def _skip(self) -> None:
        self._skipped += self._count
        self._forget()

    def _forget(self) -> None:
        self._entries, self._open, self._count, self._size = [], {}, 0, 0


def _slim(entry: dict[str, Any]) -> dict[str, Any]:
    """Leave out a bundle that is too big to be worth sending twice: the next snapshot has it."""
    if entry.get("data") and _size(entry["data"]) > MOST_BUNDLE:
        return {**entry, "data": {}, "later": True}
    return entry


def _size(obj: Any) -> int:  # noqa: ANN401 - JSON
    return len(json.dumps(obj, ensure_ascii=False, default=str))


def printable(obj: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a JSON value that UTF-8 can say: lone surrogates replaced. The same object when it needs nothing."""
    try:
        json.dumps(obj, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return json.loads(json.dumps(obj, ensure_ascii=False, default=str).encode("utf-8", "replace"))
    return obj
