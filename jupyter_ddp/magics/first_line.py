"""Lets ``%%distributed`` stand below comments: IPython takes a cell magic only from a cell's first line."""

from __future__ import annotations

import re
from typing import Final

_MAGIC: Final = re.compile(r"%%distributed(?:\s|$)")


def magic_first(lines: list[str]) -> list[str]:
    """Move blank lines and comments that stand above ``%%distributed`` below it; leave other cells alone.

    An input transformer. Every line of the cell's body keeps its number; IPython itself would drop blank lines. A cell
    that is nothing but the magic gets an empty line, so that the magic can answer and not IPython.
    """
    for number, line in enumerate(lines):
        if _MAGIC.match(line):
            body = [*lines[:number], *lines[number + 1 :]]
            return [line if line.endswith("\n") else line + "\n", *(body or ["\n"])]
        if line.strip() and not line.lstrip().startswith("#"):
            break
    return lines
