"""Parses ``%distributed`` lines: a word, and what belongs to it."""

from __future__ import annotations

import difflib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.config import field_name
from jupyter_ddp.errors import UsageError
from jupyter_ddp.line import field_value, parse_flags
from jupyter_ddp.line.expand import Word, split
from jupyter_ddp.line.flags import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

WORDS: Final[dict[str, str]] = {
    "config": "show every value and where it comes from; K=V … sets, K= forgets one, --reset forgets all",
    "runs": "list the runs",
    "stop": "end a run: stop [ID]",
    "logs": "print what a run showed, and why it failed: logs ID [--rank R]",
    "doctor": "check this machine before anything is started",
}
"""The words of ``%distributed``; alone it shows the panel. ID is a unique beginning of an id, a name or ``last``."""

COMING: Final = ("attach", "detach")
"""Words that come with a later version: they are understood, and not offered."""

_OTHER_NAMES: Final = {
    "status": "runs",
    "list": "runs",
    "ls": "runs",
    "ps": "runs",
    "jobs": "runs",
    "history": "runs",
    "kill": "stop",
    "cancel": "stop",
    "interrupt": "stop",
    "log": "logs",
    "tail": "logs",
    "check": "doctor",
    "diagnose": "doctor",
    "set": "config",
    "configure": "config",
    "settings": "config",
    "reset": "config --reset",
}


@dataclass(slots=True)
class Command:
    """What a ``%distributed`` line asks for.

    Attributes:
        word: One of `WORDS` or `COMING`, or "" for the panel.
        run: The run's id, the beginning of one, or a name; None when it was not given.
        rank: After ``logs --rank``.
        changes: Fields that ``config`` sets.
        forget: Fields that ``config`` forgets.
        reset: ``config --reset`` without fields: all are forgotten.
        help: Only help was asked for.
    """

    word: str = ""
    run: str | None = None
    rank: int | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    forget: list[str] = field(default_factory=list)
    reset: bool = False
    help: bool = False


def parse_command(line: str, namespace: Mapping[str, Any]) -> Command:
    """Return what a ``%distributed`` line asks for.

    Raises:
        UsageError: The line cannot be meant; nothing of it has been done.
    """
    word, *words = split(line, namespace) or [""]
    if word in ("-h", "--help", "help"):
        return Command(help=True)
    if not word:
        return Command()
    if word not in WORDS and word not in COMING:
        raise UsageError(_unknown(word))
    command = Command(word)
    if word == "config":
        _config(command, words, namespace)
    else:
        _run_and_rank(command, words)
    return command


def _unknown(word: str) -> str:
    if word.startswith("-"):
        how = "flags stand on top of a cell (%%distributed -p 4), or set them for all runs: %distributed config -p 4"
        return f"%distributed takes a word, not {word}: {how}."
    if "=" in word:
        return f"%distributed takes a word, not {word}: write %distributed config {word}."
    near = _OTHER_NAMES.get(word) or next(
        iter(difflib.get_close_matches(word.lower(), list(WORDS), 1, 0.5)), None
    )
    known = f"did you mean %distributed {near}?" if near else f"the words are {', '.join(WORDS)}."
    return f"%distributed has no word {word!r}: {known}"


_MOST_DIGITS: Final = 9
_USAGE: Final = {
    "stop": "stop, or stop ID",
    "logs": "logs ID, or logs ID --rank 0",
    "attach": "attach ID",
    "detach": "detach ID",
}
"""What may be written; of a word that stands alone nothing."""


def _run_and_rank(command: Command, words: list[str]) -> None:
    usage = f"write %distributed {_USAGE.get(command.word, command.word)}"
    todo = deque(words)
    while todo:
        word = todo.popleft()
        name, equals, value = word.partition("=")
        if name in ("-r", "--rank") and command.word == "logs":
            text = value if equals else (todo.popleft() if todo else "")
            if not text.isdecimal() or len(text) > _MOST_DIGITS:
                raise UsageError(f"{name} takes a rank's number, not {text!r}: write logs ID --rank 0.")
            command.rank = int(text)
        elif word.startswith("-"):
            raise UsageError(f"%distributed {command.word} has no flag {word}: {usage}.")
        elif command.run is None and command.word not in ("runs", "doctor"):
            command.run = word
        else:
            raise UsageError(f"%distributed {command.word} has no use for {word!r}: {usage}.")
    if command.word in ("attach", "detach", "logs") and command.run is None:
        raise UsageError(
            f"%distributed {command.word} needs a run: write {command.word} last, or an id or name."
        )


def _config(command: Command, words: list[str], namespace: Mapping[str, Any]) -> None:
    reset = "--reset" in words
    flags, rest = parse_flags([word for word in words if word != "--reset"], namespace)
    if flags.help:
        command.help = True
        return
    if flags.dry_run or flags.config_name:
        name = "--dry-run" if flags.dry_run else "--config"
        raise UsageError(f"{name} belongs to one cell's line: write it after %%distributed.")
    for name, value in flags.given.items():
        command.changes[name] = value
    for key, value in _pairs(rest, reset=reset):
        name = field_name(key)
        if value == "" and not isinstance(value, Word):
            command.forget.append(name)
            command.changes.pop(name, None)
        else:
            command.changes[name] = field_value(name, value, namespace)
    command.reset = reset and not command.forget


def _pairs(words: list[str], *, reset: bool) -> list[tuple[str, str]]:
    """Return the K=V among words, with or without spaces around the equals sign; "" is the value to be forgotten."""
    todo, pairs = deque(words), list[tuple[str, str]]()
    while todo:
        key, equals, value = todo.popleft().partition("=")
        if not equals and todo and todo[0].startswith("="):
            equals, value = "=", todo.popleft()[1:]
        if not equals and not reset:
            example = f"{key}={todo[0]}" if todo else f"{key}=…"
            field_name(key)
            raise UsageError(
                f"config takes K=V, and {key!r} has no value: write %distributed config {example}."
            )
        if equals and not value and todo and "=" not in todo[0]:
            value = todo.popleft()
        while todo and "=" not in todo[0] and (value.endswith(",") or todo[0].startswith(",")):
            value += todo.popleft()
        flag = BY_NAME.get(key)
        pairs.append((flag.field if flag and flag.field else key, value))
    return pairs
