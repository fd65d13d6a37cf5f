"""Completion on the magic's lines: flags, their values, the words of ``%distributed``, variables and runs.

`suggest` is the whole of it, as a function of texts; `matcher` makes IPython's matcher of it (API v2, which JupyterLab
needs).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from jupyter_ddp.config import LaunchConfig
from jupyter_ddp.config.fields import FIELDS, NPROC_WORDS, PROCESS_GROUPS, PROTOCOLS
from jupyter_ddp.line.commands import WORDS
from jupyter_ddp.line.flags import BY_NAME, FLAGS, Flag

_HIDDEN: Final = frozenset({"In", "Out", "get_ipython", "exit", "quit", "open"})
_ASSIGNED: Final = re.compile(r"^([A-Za-z_]\w*)\s*(?::[^=\n]+)?=(?!=)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What completion may look at.

    Attributes:
        names: The notebook's namespace.
        cell: The whole cell, for names that it assigns.
        backends: Names of the backends.
        runs: Returns ids and names of runs; called only where one is expected.
        environ: The kernel's environment.
    """

    names: Mapping[str, Any] = field(default_factory=dict)
    cell: str = ""
    backends: tuple[str, ...] = ("local",)
    runs: Callable[[], Iterable[str]] = tuple
    environ: Mapping[str, str] = field(default_factory=dict)


def suggest(line: str, around: Surroundings) -> tuple[str, list[tuple[str, str]]] | None:
    """Return what is being typed at the end of the line, and the (text, type) that it may become.

    None when the line is not one of the magic's.
    """
    found = re.match(r"\s*(%%?)distributed\s", line)
    if not found:
        return None
    *before, typed = line[found.end() :].replace("\t", " ").split(" ")
    words = [word for word in before if word]
    if found[1] == "%%":
        return _flags_and_values(words, typed, around)
    return _words(words, typed, around)


def _flags_and_values(
    words: list[str], typed: str, around: Surroundings
) -> tuple[str, list[tuple[str, str]]]:
    name, equals, value = typed.partition("=")
    if equals and name.startswith("--"):
        flag = BY_NAME.get("--" + name[2:].replace("_", "-"))
    else:
        flag, value = _open_flag(words), typed
    if flag and flag.metavar and not (value.startswith("-") and flag is _open_flag(words)):
        part = value.rpartition(",")[2] if flag.listing else value
        return part, _fitting(part, _values(flag.field or "config", around, part))
    given = {flag for word in words if (flag := BY_NAME.get(word.partition("=")[0])) and not flag.repeatable}
    names = [flag.long for flag in FLAGS if flag not in given]
    dashed = typed.replace("_", "-")
    return typed, [(name, "flag") for name in names if name.startswith(dashed)]


def _open_flag(words: list[str]) -> Flag | None:
    """Return the flag that the word being typed is the value of."""
    for distance, word in enumerate(reversed(words)):
        flag = BY_NAME.get(word if not word.startswith("--") else word.replace("_", "-"))
        if flag is not None:
            goes_on = distance == 0 or (flag.listing and words[-1].endswith(","))
            return flag if flag.metavar and goes_on else None
        if word.startswith("-"):
            return None
    return None


def _words(words: list[str], typed: str, around: Surroundings) -> tuple[str, list[tuple[str, str]]]:
    if not words:
        return typed, _fitting(typed, [(word, "word") for word in WORDS])
    if words[0] == "config":
        name, equals, value = typed.partition("=")
        if equals and name in FIELDS:
            return value, _fitting(value, _values(name, around, value))
        if typed.startswith("-") or _open_flag(words[1:]):
            typed, flags = _flags_and_values(words[1:], typed, around)
            return typed, flags + (_fitting(typed, [("--reset", "flag")]) if typed.startswith("-") else [])
        return typed, _fitting(typed, [(f"{name}=", "field") for name in FIELDS])
    if words[0] in ("stop", "logs") and len(words) == 1:
        runs = [(run, "run") for run in dict.fromkeys(["last", *around.runs()])]
        flags = [("--rank", "flag")] if words[0] == "logs" else []
        return typed, _fitting(typed, runs + flags)
    return typed, _fitting(
        typed, [("--rank", "flag")] if words[0] == "logs" and "--rank" not in words else []
    )


_CONSTANTS: Final[dict[str, tuple[str, ...]]] = {
    "protocol": PROTOCOLS,
    "init_process_group": PROCESS_GROUPS,
    "nproc_per_node": NPROC_WORDS,
    "timeout": ("90s", "30m", "8h"),
    "show": ("all", "none", "0"),
    "detach": ("True", "False"),
    "fork": ("True", "False"),
}


def _values(name: str, around: Surroundings, typed: str) -> list[tuple[str, str]]:
    if name in _CONSTANTS:
        return [(value, "value") for value in _CONSTANTS[name]]
    if name == "backend":
        return [(value, "value") for value in around.backends]
    variables = {
        key: value for key, value in around.names.items() if not key.startswith("_") and key not in _HIDDEN
    }
    if name == "pull":
        base, at, _ = typed.partition("@")
        if at:
            return [(f"{base}@all", "value")]
        return [(key, "variable") for key in dict.fromkeys([*_ASSIGNED.findall(around.cell), *variables])]
    if name == "config":
        return [
            (key, "variable")
            for key, value in variables.items()
            if isinstance(value, (LaunchConfig, Mapping))
        ]
    if name in ("distribution", "inputs", "sagemaker_options"):
        return [(key, "variable") for key, value in variables.items() if isinstance(value, Mapping)]
    if name == "env":
        mappings = [(key, "variable") for key, value in variables.items() if isinstance(value, Mapping)]
        return [(key, "environment") for key in sorted(around.environ)] + mappings
    return [(key, "variable") for key in variables] if name in ("push", "out") else []


def _fitting(typed: str, choices: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(text, kind) for text, kind in choices if text.startswith(typed)]


def matcher(shell: Any, runs: Callable[[], Iterable[str]]) -> Callable[[Any], Any]:  # noqa: ANN401 - InteractiveShell
    """Return the matcher for ``shell.Completer.custom_matchers``."""
    from IPython.core.completer import SimpleCompletion, context_matcher

    @context_matcher(identifier="jupyter_ddp.magics.completion.distributed")  # type: ignore[untyped-decorator]
    def distributed(context: Any) -> dict[str, Any]:  # noqa: ANN401 - a CompletionContext
        from jupyter_ddp import backends

        line = context.text_until_cursor
        names = tuple(backends.names()) if re.search(r"(-b|--backend|backend=)\s*=?\S*$", line) else ()
        around = Surroundings(shell.user_ns, context.full_text, names, runs, os.environ)
        found = suggest(line, around)
        if found is None:
            return {"completions": []}
        typed, choices = found
        completions = [SimpleCompletion(text, type=kind) for text, kind in choices]
        return {
            "completions": completions,
            "matched_fragment": typed,
            "suppress": bool(choices),
            "ordered": True,
        }

    made: Callable[[Any], Any] = distributed
    return made
