"""Parses what stands on ``%%distributed`` lines: `parse_cell_line` for flags, `parse_flags` for callers with words.

`expand` splits the line, `flags` is the table that drives this parser, and the rules of the values stand in
`jupyter_ddp.config.fields`. Nothing here prints, starts or remembers anything; whatever is wrong is a
`UsageError` of one sentence.
"""

from __future__ import annotations

import ast
import datetime as dt
import difflib
import json
import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jupyter_ddp.config import LaunchConfig, normalise
from jupyter_ddp.config.fields import MAPPING_FIELDS, switch
from jupyter_ddp.errors import ConfigError, UsageError
from jupyter_ddp.line.effective import effective, effective_line, magic_line
from jupyter_ddp.line.expand import Word, split
from jupyter_ddp.line.flags import BY_NAME, FLAGS, FOREIGN, Flag, answer

__all__ = [
    "FLAGS",
    "Flag",
    "Invocation",
    "effective",
    "effective_line",
    "magic_line",
    "mapping_value",
    "parse_cell_line",
    "parse_flags",
    "split",
]


@dataclass(slots=True)
class Invocation:
    """What a line says.

    Attributes:
        given: The fields that flags of the line set, normalised.
        config_name: The name after ``--config``, or None.
        config: The `LaunchConfig` or dict that it names.
        dry_run: Nothing shall be started.
        help: Only help was asked for.
    """

    given: dict[str, Any] = field(default_factory=dict)
    config_name: str | None = None
    config: LaunchConfig | Mapping[str, Any] | None = None
    dry_run: bool = False
    help: bool = False


def parse_cell_line(line: str, namespace: Mapping[str, Any]) -> Invocation:
    """Return what the line after ``%%distributed`` says; ``{expr}`` and ``$name`` are taken from the namespace.

    Raises:
        UsageError: The line cannot be meant; nothing of it has been done.
    """
    invocation, rest = parse_flags(split(line, namespace), namespace)
    if rest:
        raise UsageError(_stray(rest[0]))
    return invocation


def parse_flags(words: Iterable[str], namespace: Mapping[str, Any]) -> tuple[Invocation, list[str]]:
    """Return what the flags among the words say, and the words that are no flags.

    Raises:
        UsageError: A flag is unknown, lacks its value, or has an impossible one.
    """
    todo, rest, found = deque(words), list[str](), Invocation()
    while todo:
        word = todo.popleft()
        if isinstance(word, Word) and isinstance(word.value, str) and word.lstrip().startswith("-"):
            todo.extendleft(reversed(split(word)))  # {flags}: a notebook variable that holds several words
        elif _is_flag(word):
            _take(word, todo, found, namespace)
        else:
            rest.append(word)
    return found, rest


def _is_flag(word: str) -> bool:
    return not isinstance(word, Word) and re.match(r"--?[A-Za-z]", word) is not None


def _take(word: str, todo: deque[str], found: Invocation, namespace: Mapping[str, Any]) -> None:
    name, value = _name_and_value(word)
    if name in ("-h", "--help"):
        found.help = True
        return
    flag = BY_NAME.get(name)
    if flag is None:
        raise UsageError(answer(name, value if value is not None or not todo else todo[0]))
    if flag.metavar is None:
        _switch(flag, name, value, found)
        return
    if value is None:
        if not todo or _is_flag(todo[0]):
            raise UsageError(f"{name} needs a value: write {name} {flag.metavar}, where that is {flag.help}.")
        value = todo.popleft()
    while flag.listing and not isinstance(value, Word) and todo and _goes_on(value, todo[0]):
        value += todo.popleft()
    if flag.long == "--config":
        found.config_name, found.config = _config(value, namespace)
        return
    try:
        taken = field_value(flag.field, value, namespace)
    except UsageError as error:
        raise _of_flag(error, flag.field, name, value) from None
    found.given[flag.field] = {**found.given.get("env", {}), **taken} if flag.field == "env" else taken


def _of_flag(error: UsageError, field_name: str, typed: str, value: str) -> UsageError:
    """Return the error of a field's value in the words of the one who has typed a flag."""
    message = str(error)
    for said, meant in (
        (f"{field_name} is {str(value)!r}, but ", f"{typed} {value} was given, but "),
        (f"{field_name} ", f"{typed} "),
    ):
        if message.startswith(said):
            message = meant + message[len(said) :]
            break
    return ConfigError(error.field, message) if isinstance(error, ConfigError) else UsageError(message)


def _name_and_value(word: str) -> tuple[str, str | None]:
    """Return the flag's name in the table's spelling, and the value that is part of the same word, if any."""
    name, equals, value = word.partition("=")
    if name.startswith("--"):
        return "--" + name[2:].replace("_", "-"), value if equals else None
    whole = "-" + name.replace("_", "-") in BY_NAME  # -protocol
    foreign = re.fullmatch(r"(-[A-Za-z]+)(\d*)", name)
    if foreign and foreign[1] in FOREIGN and not whole:
        return foreign[1], value or foreign[2] or None
    if whole or len(name) == 2:
        return name, value if equals else None
    return word[:2], word[2:]


def _switch(flag: Flag, name: str, value: str | None, found: Invocation) -> None:
    if flag.long == "--no-push":
        if value is not None:
            raise UsageError(f"{name} takes no value: write {name} to send nothing, or --push a,b.")
        found.given["push"] = ()
        return
    on = switch(name, True if value is None else value)
    if flag.long == "--dry-run":
        found.dry_run = on
    else:
        found.given[flag.field] = on != flag.long.startswith("--no-")


def _goes_on(value: str, following: str) -> bool:
    return not _is_flag(following) and (value.endswith(",") or following.startswith(","))


def field_value(name: str, value: str, namespace: Mapping[str, Any]) -> Any:  # noqa: ANN401 - each field has its type
    """Return the normalised value of a field from a word of a line.

    Raises:
        UsageError: The value is impossible for this field.
    """
    raw: Any = value
    if isinstance(value, Word):
        inner = value.value
        keep = inner is None or isinstance(inner, (Iterable, dt.timedelta))
        raw = inner if keep and not isinstance(inner, str) else str(value)
    elif re.fullmatch(r"\[.*\]|\(.*\)", value) and name in ("push", "pull", "show"):  # --show={ranks}
        raw = _literal(value)
    if name == "env" and isinstance(raw, str):
        return _env(raw, namespace)
    if name in MAPPING_FIELDS and isinstance(raw, str) and raw != "None":
        raw = mapping_value(raw, namespace, name)
    return normalise(name, raw)


def _literal(text: str) -> Any:  # noqa: ANN401 - whatever the text says
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def mapping_value(text: str, namespace: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the mapping that a text means: a notebook variable's name, JSON, or a Python literal.

    Raises:
        UsageError: It means none; `name` is the field that the sentence names.
    """
    text = text.strip()
    if text.isidentifier():
        if text not in namespace:
            raise UsageError(f"{name} is {text}, but {_no_variable(text, namespace, Mapping)}")
        if not isinstance(namespace[text], Mapping):
            kind = type(namespace[text]).__name__
            raise UsageError(f"{name} is {text}, but the notebook's {text} is of type {kind}: give a dict.")
        return dict(namespace[text])
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _literal(text)
    if not isinstance(value, dict):
        how = 'write a notebook variable\'s name, or JSON in single quotes: \'{"key": "value"}\''
        shown = "" if name == "env" else f" {text}"  # it may be a secret
        raise UsageError(f"{name}{shown} is no mapping: {how}.")
    return value


def _no_variable(text: str, namespace: Mapping[str, Any], kinds: Any) -> str:  # noqa: ANN401 - as isinstance takes
    fits = [key for key, value in namespace.items() if isinstance(value, kinds) and not key.startswith("_")]
    near = difflib.get_close_matches(text, fits, 1, 0.6)
    return f"the notebook has no variable {text}: " + (
        f"did you mean {near[0]}?" if near else "define it first."
    )


def _env(value: str, namespace: Mapping[str, Any]) -> dict[str, str | None]:
    raw: Any = value.value if isinstance(value, Word) and isinstance(value.value, Mapping) else str(value)
    if isinstance(raw, str):
        names_mapping = raw.isidentifier() and isinstance(namespace.get(raw), Mapping)
        if names_mapping or raw.lstrip().startswith("{"):
            raw = mapping_value(raw, namespace, "env")
    env: dict[str, str | None] = normalise("env", raw)
    return env


def _config(value: str, namespace: Mapping[str, Any]) -> tuple[str, LaunchConfig | Mapping[str, Any]]:
    kinds = (LaunchConfig, Mapping)
    if isinstance(value, Word) and isinstance(value.value, kinds):
        return "{…}", value.value
    if not value.isidentifier():
        return "{…}", mapping_value(value, namespace, "config")
    if value not in namespace:
        raise UsageError(f"--config {value}: {_no_variable(value, namespace, kinds)}")
    config = namespace[value]
    if isinstance(config, kinds):
        return value, config
    kind = type(config).__name__
    raise UsageError(f"--config {value}: {value} is of type {kind}, but a LaunchConfig or a dict is meant.")


def _stray(word: str) -> str:
    """Return one sentence about a word where a flag was expected."""
    shown = f"'{word}' in the line"
    if word[:1] in "–—−":  # noqa: RUF001 - what editors make of hyphens is the point
        return f"{shown} begins with a long dash: write -{word.lstrip('–—−-')} with plain hyphens."  # noqa: RUF001
    if word.isdecimal():
        return f"{shown} belongs to no flag: write -p {word} for ranks on each instance or -N {word} for instances."
    homes = {"torchrun": "--protocol", "mpirun": "--protocol", "local": "--backend", "sagemaker": "--backend"}
    homes |= {"nccl": "--init-process-group", "gloo": "--init-process-group"}
    if word in homes:
        return f"{shown} belongs to no flag: write {homes[word]} {word}."
    if "=" in word and word.partition("=")[0].isidentifier():
        return (
            f"{shown} belongs to no flag: write --env {word.partition('=')[0]}=… for the ranks' environment."
        )
    if "--" + word in BY_NAME:
        return f"{shown} belongs to no flag: write --{word}."
    return f"{shown} belongs to no flag: a value with spaces needs quotes, and the cell's code begins below the line."
