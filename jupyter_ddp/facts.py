"""What ``run.json`` says of a run. The file may be damaged: what cannot be meant is left out, and the rest holds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.config import FIELDS, normalise
from jupyter_ddp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_MOST_RANKS: Final = 65_536
_MOST_TIME: Final = 1e12
_MOST_PID: Final = 2**31


def _count(value: Any) -> bool:  # noqa: ANN401 - whatever JSON gave
    return type(value) is int and 0 < value <= _MOST_RANKS


def _text(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, str) and "\0" not in value


def _word(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, str) and bool(value) and value.isprintable()


_CHECKS: Final[dict[str, Callable[[Any], bool]]] = {
    "id": _word,
    "attempt": _word,
    "name": _word,
    "created": lambda value: type(value) in (int, float) and 0 < value < _MOST_TIME,
    "backend": _word,
    "protocol": _word,
    "nnodes": _count,
    "nproc": _count,
    "world_size": _count,
    "config": lambda value: isinstance(value, dict),
    "checkpoints": _text,
    "sent": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    "line": _text,
    "source": _text,
    "pid": lambda value: type(value) is int and 0 < value < _MOST_PID,
    "kernel_id": _word,
    "cell_id": _word,
}


def read_facts(path: Path) -> dict[str, Any]:
    """Return the facts in a ``run.json``: known ones of a right type, and all that this version does not know.

    An empty dictionary if there is no such file, or nothing in it. Never raises.
    """
    try:
        facts = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(facts, dict):
        return {}
    facts = {name: value for name, value in facts.items() if name not in _CHECKS or _CHECKS[name](value)}
    if "config" in facts:
        facts["config"] = {
            name: value for name, value in facts["config"].items() if name not in FIELDS or _fits(name, value)
        }
    return facts


def _fits(name: str, value: object) -> bool:
    """Tell whether a field of a configuration can have a value."""
    try:
        normalise(name, value)
    except ConfigError:
        return False
    return True
