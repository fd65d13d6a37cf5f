"""Colours and weights of terminal text (SGR, ECMA-48 8.3.117): one canonical form, and what it is in HTML.

A style is a canonical parameter string: attributes in ascending order, then foreground, then background, ``"1;31"``;
``""`` is plain text. A line that is written with `join_runs` stands alone: it begins plain, ends plain, and says a
style only where characters wear it, so that lines of different ranks can be mixed without one colouring the next.
"""

from __future__ import annotations

import re
from functools import lru_cache
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

SGR: Final = re.compile("\x1b\\[([0-9;:]{0,128})m")
"""A complete SGR sequence; its group has the parameters."""

_ATTRIBUTES: Final = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 5, 7: 7, 8: 8, 9: 9, 21: 4}
_CLEARS: Final = {22: (1, 2), 23: (3,), 24: (4,), 25: (5,), 27: (7,), 28: (8,), 29: (9,)}
_FOREGROUND: Final = frozenset({*range(30, 38), 39, *range(90, 98)})
_BACKGROUND: Final = frozenset({*range(40, 48), 49, *range(100, 108)})
_COLOUR_SIZE: Final = {"5": 1, "2": 3}
# Mid-tones: each must be readable on a white and on a dark page, because inline styles cannot ask for the theme.
_PALETTE: Final = (
    "#6b7280", "#d0453e", "#2e8b4f", "#a97700", "#3574d6", "#a651b8", "#1f8a94", "#8b929c",
    "#8d95a1", "#e5534b", "#3fa663", "#c08a1e", "#4c8df0", "#bd6bd0", "#2ea3ae", "#a3abb5",
)  # fmt: skip
_LEVELS: Final = (0, 95, 135, 175, 215, 255)


class _Style:
    """A style while it is being changed."""

    def __init__(self, style: str) -> None:
        self.attributes: set[int] = set()
        self.colours = {"38": "", "48": "", "58": ""}
        codes = style.split(";") if style else []
        while codes:
            codes = self._take(codes)

    def apply(self, parameters: str) -> None:
        """Apply the parameters of an SGR sequence; unknown ones change nothing."""
        codes = parameters.split(";")
        while codes:
            if ":" in codes[0]:  # sub-parameters: 38:2::r:g:b, 38:5:n, 4:3
                parts = codes.pop(0).split(":")
                if parts[0] == "4":
                    self._number(24 if parts[1] == "0" else 4)
                else:
                    self._take([p for i, p in enumerate(parts) if i != 2 or len(parts) != 6])
            else:
                codes = self._take(codes)

    def _take(self, codes: list[str]) -> list[str]:
        """Apply the code in front, with the parameters of a colour, and return the rest."""
        head, rest = codes[0], codes[1:]
        if head in {"38", "48", "58"}:
            size = _COLOUR_SIZE.get(rest[0], 0) if rest else 0
            values, rest = rest[1 : size + 1], rest[size + 1 :]
            if (
                size
                and len(values) == size
                and all(v.isdigit() and len(v) < 4 and int(v) < 256 for v in values)
            ):
                self.colours[head] = ";".join([head, codes[1], *(str(int(v)) for v in values)])
        elif head.isdigit() or not head:
            self._number(int(head[:4] or "0"))
        return rest

    def _number(self, number: int) -> None:
        if number == 0:
            self.attributes, self.colours = set(), {"38": "", "48": "", "58": ""}
        elif number in _ATTRIBUTES:
            self.attributes.add(_ATTRIBUTES[number])
        elif number in _CLEARS:
            self.attributes.difference_update(_CLEARS[number])
        elif number in _FOREGROUND:
            self.colours["38"] = "" if number == 39 else str(number)
        elif number in _BACKGROUND:
            self.colours["48"] = "" if number == 49 else str(number)

    def __str__(self) -> str:
        codes = [*(str(a) for a in sorted(self.attributes)), self.colours["38"], self.colours["48"]]
        return ";".join(c for c in codes if c)


@lru_cache(maxsize=4096)
def apply(style: str, parameters: str) -> str:
    """Return the style that an SGR sequence with these parameters makes of a style. Unknown codes change nothing."""
    changed = _Style(style)
    changed.apply(parameters)
    return str(changed)


def join_runs(runs: Iterable[tuple[str, str]]) -> str:
    """Return one balanced line of (text, style) runs; neighbours of one style are one run."""
    out: list[str] = []
    now = ""
    for text, style in runs:
        if not text:
            continue
        if style != now:
            out.append("\x1b[0m" if not style else f"\x1b[0;{style}m" if now else f"\x1b[{style}m")
            now = style
        out.append(text)
    if now:
        out.append("\x1b[0m")
    return "".join(out)


def split_runs(text: str, style: str = "") -> tuple[list[tuple[str, str]], str]:
    """Return the (text, style) runs of a text whose only controls are SGR sequences, and the style after it."""
    pieces = SGR.split(text)
    runs = [(pieces[0], style)] if pieces[0] else []
    for parameters, piece in zip(pieces[1::2], pieces[2::2], strict=True):
        style = apply(style, parameters)
        if piece:
            runs.append((piece, style))
    return runs, style


def strip(text: str) -> str:
    """Return the text without its SGR sequences."""
    return SGR.sub("", text) if "\x1b" in text else text


def _css_colour(colour: str) -> str:
    codes = [int(c) for c in colour.split(";")]
    if len(codes) == 1:
        base = codes[0] % 10
        return _PALETTE[base + (8 if codes[0] >= 90 else 0)]
    if codes[1] == 2:
        return "#" + "".join(f"{code:02x}" for code in codes[2:5])
    index = codes[2]
    if index < 16:
        return _PALETTE[index]
    if index < 232:
        index -= 16
        return "#" + "".join(f"{_LEVELS[index // place % 6]:02x}" for place in (36, 6, 1))
    grey = f"{8 + 10 * (index - 232):02x}"
    return f"#{grey}{grey}{grey}"


@lru_cache(maxsize=1024)
def css(style: str) -> str:
    """Return the style as CSS declarations for an inline ``style`` attribute."""
    worn = _Style(style)
    attributes = worn.attributes
    front, back = (
        _css_colour(colour) if colour else "" for colour in (worn.colours["38"], worn.colours["48"])
    )
    if 7 in attributes:  # inverse
        front, back = back or "#ffffff", front or "#6b7280"
    rules = [f"color:{front}"] if front else []
    if back:
        rules.append(f"background-color:{back}")
    if 1 in attributes:
        rules.append("font-weight:bold")
    if 2 in attributes:
        rules.append("opacity:0.7")
    if 3 in attributes:
        rules.append("font-style:italic")
    lines = [word for code, word in ((4, "underline"), (9, "line-through")) if code in attributes]
    if lines:
        rules.append("text-decoration:" + " ".join(lines))
    return ";".join(rules)


def to_html(text: str) -> str:
    """Return a text with SGR sequences as escaped HTML; styles are spans with inline CSS."""
    if "\x1b" not in text:
        return escape(text)
    out = []
    for piece, style in split_runs(text)[0]:
        rules = css(style) if style else ""
        safe = escape(piece.replace("\x1b", ""))
        out.append(f'<span style="{rules}">{safe}</span>' if rules else safe)
    return "".join(out)
