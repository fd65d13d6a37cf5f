"""A notebook whose cells a test runs one by one, and what its distributed cells leave in it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.notebook import Notebook, outputs, texts, until_gone

TWO = "-p 2"
ONE = "-p 1"
_LINE = re.compile(r"\[(\d+)(?:-(\d+))?(!?)\] ?(.*)")


@dataclass
class Shown:
    """What one distributed cell has left in the notebook."""

    plain: str = ""
    error: str = ""
    streams: str = ""
    bundle: dict[str, Any] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def ok(self) -> bool:
        return self.plain.startswith("succeeded") and not self.error

    def lines(self, rank: int, mark: str = "") -> list[str]:
        """Return what a rank shows; ``mark`` is "!" for stderr."""
        found = [match for line in self.plain.split("\n") if (match := _LINE.fullmatch(line))]
        return [
            text
            for first, last, stream, text in (match.groups() for match in found)
            if stream == mark and int(first) <= rank <= int(last or first)
        ]


class Book:
    """A notebook whose cells are run one by one."""

    def __init__(self, notebook: Notebook, directory: Path, protocol: str) -> None:
        self.notebook = notebook
        self.directory = directory
        self.protocol = protocol
        self.run("import os, sys")
        self.run(f"os.chdir({str(directory)!r}); sys.path.insert(0, {str(directory)!r})")

    def run(self, code: str) -> str:
        """Run a cell of the notebook, and return what it prints."""
        messages = self.notebook.run(code)
        errors = [message["content"]["evalue"] for message in messages if message["msg_type"] == "error"]
        assert not errors, errors
        return texts(messages)

    def distribute(self, cell: str, flags: str = TWO) -> Shown:
        """Run a cell on ranks, and wait until its processes are gone."""
        shown = self.shown(self.notebook.run(f"{self.magic(flags)}\n{cell}"))
        if shown.plain:
            until_gone(self.last_run())
        return shown

    def magic(self, flags: str = TWO) -> str:
        return f"%%distributed --protocol {self.protocol} {flags}"

    def shown(self, messages: list[dict[str, Any]]) -> Shown:
        bundles = list(outputs(messages).values())
        assert len(bundles) <= 1  # a run is one output
        error = next((m["content"]["evalue"] for m in messages if m["msg_type"] == "error"), "")
        size = sum(len(json.dumps(message["content"])) for message in messages)
        bundle = bundles[0] if bundles else {}
        return Shown(bundle.get("text/plain", ""), error, texts(messages), bundle, size)

    def runs(self) -> int:
        return len(self.notebook.store.list())

    def last_run(self):
        return max(self.notebook.store.list(), key=lambda run: run.path.stat().st_ctime)


under_mpirun = pytest.mark.parametrize("book", ["mpirun"], indirect=True)
