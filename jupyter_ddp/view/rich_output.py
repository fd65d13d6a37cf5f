"""The rich output of a run: what each rank displays, updates and clears; equal displays of ranks are one. Pure."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.words import shorten_text

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BYTES: Final = 10 << 20
"""Bytes of rich output that a view keeps: the latest. A notebook has it twice, for pages with and without us."""
MAX_DISPLAYS: Final = 500
"""Displays of a rank that a view keeps: the latest."""
MAX_TEXT: Final = 20_000
"""Characters of each textual form of a display; HTML and pictures are whole or not there."""
Key = tuple[int, int]
"""A rank, and the number of a display among its own."""
_TEXTS: Final = ("text/plain", "text/markdown", "text/latex")


@dataclass(frozen=True, slots=True)
class DisplayView:
    """One display of a run, of one rank or equal on several.

    Attributes:
        ranks: The ranks that show it, ascending.
        data: Its MIME bundle; binary parts are base64.
        metadata: The metadata of the bundle.
        result: Whether it is the value of the cell's last expression.
        display_id: The id by which its rank updates it, if any.
        order: Its place among all lines and displays of the view.
        ordinal: Its number among the displays of its rank.
        file: Where the bundle is, relative to the run directory, when it was too big for the log.
        key: Equal for equal bundles.
        version: How often it was updated.
    """

    ranks: tuple[int, ...]
    data: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    result: bool = False
    display_id: str | None = None
    order: int = 0
    ordinal: int = 0
    file: str | None = None
    key: str = ""
    version: int = 0

    @property
    def text(self) -> str:
        """Its plain text, or what it is when it has none."""
        text = _joined(self.data.get("text/plain"))
        if text:
            return text
        if self.file:
            return f"<display in {self.file}>"
        return f"<{next(iter(self.data), 'empty display')}>"


def _joined(value: Any) -> str:  # noqa: ANN401 - MIME data of any shape
    """Return text of a MIME bundle, which nbformat may have as a list of lines."""
    if isinstance(value, list):
        return "".join(part for part in value if isinstance(part, str))
    return value if isinstance(value, str) else ""


def shorten(data: dict[str, Any]) -> dict[str, Any]:
    """Return a MIME bundle with its textual forms cut to `MAX_TEXT`: a repr has no bounds. The log has it whole."""
    texts = {mime: _joined(data[mime]) for mime in _TEXTS if mime in data}
    return data | {mime: shorten_text(text, MAX_TEXT) for mime, text in texts.items() if len(text) > MAX_TEXT}


def _fingerprint(data: dict[str, Any], metadata: dict[str, Any], file: str | None) -> tuple[str, int]:
    text = json.dumps([data, metadata, file], sort_keys=True, default=repr)
    return blake2b(text.encode(), digest_size=16).hexdigest(), len(text)


class _Store:
    """Displays by rank and ordinal, the one that was changed last at the end; equal bundles exist once."""

    def __init__(self) -> None:
        self.items: dict[Key, DisplayView] = {}
        self.of_rank: dict[int, dict[Key, None]] = {}
        self.nbytes = 0
        self._bundles: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {}
        self._uses: Counter[str] = Counter()

    def put(self, key: Key, item: DisplayView) -> None:
        """Add a display, or put it in the place of another one."""
        name, size = _fingerprint(item.data, item.metadata, item.file)
        self._uses[name] += 1
        if self._uses[name] == 1:
            self._bundles[name] = (item.data, item.metadata, size)
            self.nbytes += size
        self.forget(key)
        data, metadata, _ = self._bundles[name]
        self.items[key] = replace(item, data=data, metadata=metadata, key=name)
        self.of_rank.setdefault(key[0], {})[key] = None

    def forget(self, key: Key) -> None:
        """Forget a display, if it is there."""
        item = self.items.pop(key, None)
        if item is None:
            return
        del self.of_rank[key[0]][key]
        self._uses[item.key] -= 1
        if not self._uses[item.key]:
            del self._uses[item.key]
            self.nbytes -= self._bundles.pop(item.key)[2]


class Displays:
    """All displays of a run. Iteration gives `DisplayView`s, equal ones of several ranks as one, in order.

    The latest of each rank are kept, as far as there is room; one that alone is too big is kept as its plain text.
    """

    def __init__(self, budget: int = MAX_BYTES) -> None:
        self._budget = budget
        self._store = _Store()
        self._counts: dict[int, int] = {}
        self._frozen: list[DisplayView] = []
        self._frozen_bytes = 0
        self.dropped = 0
        """Displays that are not kept as they were."""
        self.version = 0
        """Grows with each change."""

    def add(self, rank: int, shown: DisplayView) -> None:
        """Add a display of a rank; its ``ranks``, ``ordinal`` and ``key`` are set here."""
        ordinal = self._counts.get(rank, 0)
        self._counts[rank] = ordinal + 1
        self._put((rank, ordinal), replace(shown, ranks=(rank,), ordinal=ordinal))

    def update(self, rank: int, display_id: str, shown: DisplayView) -> bool:
        """Give each display of a rank that has this id the bundle of ``shown``; tell whether there was one."""
        items = self._store.items
        found = [key for key in self._store.of_rank.get(rank, ()) if items[key].display_id == display_id]
        for key in found:
            new = replace(
                items[key],
                data=shown.data,
                metadata=shown.metadata,
                file=shown.file,
                version=items[key].version + 1,
            )
            self._put(key, new)
        return bool(found)

    def clear(self, rank: int) -> None:
        """Forget what a rank has displayed so far."""
        for key in list(self._store.of_rank.get(rank, ())):
            self._store.forget(key)
        self.version += 1

    def freeze(self) -> None:
        """Keep what there is as it is: the ranks that could update it are gone."""
        self._frozen += self._grouped()
        self._frozen_bytes += self._store.nbytes
        self._store = _Store()
        self._counts.clear()

    def _put(self, key: Key, item: DisplayView) -> None:
        self.version += 1
        if _fingerprint(item.data, item.metadata, item.file)[1] > self._budget:
            self.dropped += 1
            item = replace(item, data={"text/plain": item.text[:1_000]}, metadata={})
        store = self._store
        store.put(key, item)
        if len(store.of_rank[key[0]]) > MAX_DISPLAYS:
            self._drop(next(iter(store.of_rank[key[0]])))
        while store.nbytes + self._frozen_bytes > self._budget and len(store.items) > 1:
            self._drop(next(iter(store.items)))
        if store.nbytes + self._frozen_bytes > self._budget:
            self.dropped += len(self._frozen)
            self._frozen, self._frozen_bytes = [], 0

    def _drop(self, key: Key) -> None:
        self._store.forget(key)
        self.dropped += 1

    def _grouped(self) -> list[DisplayView]:
        """Return equal displays of several ranks as one, where the first of them stands.

        The n-th of equal ones in one rank goes with the n-th in the others: what only one rank shows in between (often
        rank 0) keeps nothing apart.
        """
        seen: dict[tuple[int, bool, str], int] = {}
        groups: dict[tuple[int, bool, str], list[DisplayView]] = {}
        for (rank, _), item in sorted(self._store.items.items()):
            number = seen[rank, item.result, item.key] = seen.get((rank, item.result, item.key), 0) + 1
            groups.setdefault((number, item.result, item.key), []).append(item)
        # A value stands where its last rank shows it, after all that these ranks have displayed before.
        views = [
            replace(
                (max if same[0].result else min)(same, key=lambda item: item.order),
                ranks=tuple(item.ranks[0] for item in same),
            )
            for same in groups.values()
        ]
        return sorted(views, key=lambda item: item.order)

    def __iter__(self) -> Iterator[DisplayView]:
        yield from self._frozen
        yield from self._grouped()

    def __len__(self) -> int:
        return sum(1 for _ in self)
