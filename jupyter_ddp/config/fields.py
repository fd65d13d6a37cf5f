"""The values that the fields of a `LaunchConfig` take: one rule a field, one sentence a refusal.

A field takes the forms that people write (``timeout="90s"``, ``pull="loss@all"``, ``show="0,2-3"``) and holds one
normal form. Whatever is wrong is a `ConfigError` that says the value, the rule, and what to write instead. The magic
line, traits, the panel and Python callers all come through `normalise`, so a rule stands once.
"""

from __future__ import annotations

import difflib
import json
import numbers
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from jupyter_ddp.config.forms import (
    identifier,
    items_of,
    parse_duration,
    parse_pull,
    parse_ranks,
    shown_value,
)
from jupyter_ddp.errors import ConfigError

PROTOCOLS: Final = ("torchrun", "mpirun")
PROCESS_GROUPS: Final = ("auto", "nccl", "gloo")
NPROC_WORDS: Final = ("auto", "gpu", "cpu")
MAX_INSTANCES: Final = 4096
MAX_NPROC: Final = 1024
MASK: Final = "***"
"""What stands for a value that is not to be shown."""

_RESERVED_ENV: Final = frozenset(
    ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"],
)
_NONE_WORDS: Final = ("none", "None", "off")


def _is(value: object, *words: str | None) -> bool:
    """Whether the value is one of the words; safe for values that cannot be hashed or compared (arrays)."""
    return (value is None or isinstance(value, str)) and value in words


def _count(field_name: str, value: object, highest: int, words: tuple[str, ...] = ()) -> int | str:
    if isinstance(value, str) and value in words:
        return value
    number: int | None = None
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,9}", value.strip()):
        number = int(value)
    elif not isinstance(value, (bool, str)):
        try:
            number = operator.index(value)  # type: ignore[arg-type]  # numpy's integers too
        except TypeError:
            number = None
    if number is None or not 1 <= number <= highest:
        also = " or one of " + ", ".join(words) if words else ""
        what = "ranks on each instance" if words else "instances"
        rule = f"the number of {what} is a whole number from 1 to {highest}"
        near = _nearest(value, words)
        tail = f": did you mean {near}?" if near else f": write a number{also}."
        raise ConfigError(field_name, f"{field_name} is {shown_value(value)}, but {rule}{tail}")
    return number


def _nearest(value: object, choices: Iterable[str]) -> str | None:
    if not isinstance(value, str):
        return None
    found = difflib.get_close_matches(value.strip().lower(), list(choices), 1, 0.6)
    return found[0] if found else None


def _choice(field_name: str, value: object, choices: tuple[str, ...], rule: str) -> str:
    if isinstance(value, str) and value in choices:
        return value
    near = _nearest(value, choices)
    tail = f"did you mean {near}?" if near else f"write {' or '.join(choices)}."
    raise ConfigError(field_name, f"{field_name} is {shown_value(value)}, but {rule}: {tail}")


def _backend(value: object) -> str:
    if _is(value, "nccl", "gloo", "mpi", "ucc"):
        how = "--protocol mpirun" if value == "mpi" else f"--init-process-group {value}"
        how = "--init-process-group auto" if value == "ucc" else how
        raise ConfigError(
            "backend",
            f"backend is {shown_value(value)}, but the backend says where the ranks run (local or sagemaker): for the "
            f"process group write {how}, or call init_process_group({value!r}) in the cell.",
        )
    if isinstance(value, str) and re.fullmatch(r"[a-z][a-z0-9_.-]*", value):
        return value
    return _choice("backend", value, ("local", "sagemaker"), "it is the name of a place where ranks run")


def _instance_type(value: object) -> str | None:
    if _is(value, None, *_NONE_WORDS):
        return None
    if isinstance(value, str) and re.fullmatch(r"ml\.[a-z0-9-]+\.[a-z0-9-]+", value):
        return value
    example = (
        f"ml.{value}" if isinstance(value, str) and re.fullmatch(r"[a-z0-9-]+\.[a-z0-9-]+", value) else ""
    )
    rule = f"SageMaker's types look like ml.g5.12xlarge: write {example or 'one of those'}"
    raise ConfigError("instance_type", f"instance_type is {shown_value(value)}, but {rule}.")


def _push(value: object) -> tuple[str, ...] | None:
    if _is(value, None, "None", "auto"):
        return None
    items = value.split(",") if isinstance(value, str) else items_of(value)
    names = [item.strip() if isinstance(item, str) else item for item in items]
    return tuple(dict.fromkeys(identifier("push", name) for name in names if name != ""))


def _out(value: object) -> str | None:
    return None if _is(value, None, "None") else identifier("out", value)


def _env(value: object) -> dict[str, str | None]:
    if _is(value, None, "None"):
        return {}
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        items = [value] if isinstance(value, str) else items_of(value)
        pairs = [_env_pair(item) for item in items]
    return {_env_name(name): _env_value(name, text) for name, text in pairs}


def _env_pair(item: object) -> tuple[str, str | None]:
    if not isinstance(item, str):
        raise ConfigError(
            "env", f"env has {item!r}, but it takes NAME=VALUE, NAME or a dict: write --env NAME=VALUE."
        )
    name, equals, text = item.partition("=")
    return name, text if equals else None


def _env_name(name: object) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        rule = "a variable's name has letters, digits and _: write --env NAME=VALUE"
        raise ConfigError("env", f"env has the name {name!r}, but {rule}.")
    if name in _RESERVED_ENV or name.startswith("JUPYTER_DDP_"):
        raise ConfigError(
            "env", f"env has {name}, but each rank gets its own {name} from the launcher: leave it out."
        )
    return name


def _env_value(name: object, value: object) -> str | None:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return str(value)
    if value is None or (isinstance(value, str) and "\0" not in value):
        return value
    shown = (
        "a text with a NUL" if isinstance(value, str) else f"a {type(value).__name__}"
    )  # it may be a secret
    raise ConfigError(
        "env", f"env has {shown} as the value of {name}, but values are texts: write {name}='1'."
    )


def _show(value: object) -> tuple[int, ...] | None:
    if _is(value, None, "all", "None"):
        return None
    return () if _is(value, "none") else parse_ranks(value)


def _timeout(value: object) -> float | None:
    return None if _is(value, None, *_NONE_WORDS) else parse_duration(value)


def _grace(value: object) -> float:
    if _is(value, "0") or (type(value) in (int, float) and value == 0):
        return 0.0
    return parse_duration(value, "interrupt_grace")


def _process_group(value: object) -> str | None:
    if value is False or _is(value, None, *_NONE_WORDS):
        return None
    rule = "the default process group is auto, nccl or gloo"
    return _choice("init_process_group", value, PROCESS_GROUPS, rule)


def _name(value: object) -> str | None:
    if _is(value, None, "None"):
        return None
    limit = 80
    text = value.strip() if isinstance(value, str) else ""
    if not text or len(text) > limit or not text.isprintable() or text.startswith("-"):
        rule = f"a label is 1 to {limit} printable characters and does not start with -"
        raise ConfigError("name", f"name is {shown_value(value)}, but {rule}: write --name baseline.")
    if text == "last":
        raise ConfigError("name", "name is 'last', but that word means the latest run: write another label.")
    return text


def switch(field_name: str, value: object) -> bool:
    """Return what a switch is set to: a bool, or a word such as ``true``, ``off``.

    Raises:
        ConfigError: The value is neither.
    """
    words = {
        "true": True,
        "1": True,
        "yes": True,
        "on": True,
        "false": False,
        "0": False,
        "no": False,
        "off": False,
    }
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise ConfigError(
        field_name, f"{field_name} is {shown_value(value)}, but it is a switch: write True or False."
    )


def _mapping(field_name: str, value: object) -> dict[str, Any]:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        try:
            text = json.dumps(dict(value))
        except (TypeError, ValueError, RecursionError) as error:
            rule = f"it must be writable as JSON ({error}): use plain texts, numbers, lists and dicts"
            raise ConfigError(field_name, f"{field_name} is {shown_value(value)}, but {rule}.") from None
        copy: dict[str, Any] = json.loads(text)
        return copy
    rule = "it takes a dict with texts as keys: write a notebook variable's name or quoted JSON"
    raise ConfigError(field_name, f"{field_name} is {shown_value(value)}, but {rule}.")


def _distribution(value: object) -> dict[str, Any] | None:
    return None if _is(value, None, "None") else _mapping("distribution", value)


def _inputs(value: object) -> dict[str, Any]:
    if isinstance(value, Mapping):
        value = {
            key: os.fspath(path) if isinstance(path, os.PathLike) else path for key, path in value.items()
        }
    channels = _mapping("inputs", {} if _is(value, None, "None") else value)
    for channel, path in channels.items():
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", channel) or not isinstance(path, str) or not path:
            rule = "an input is a channel's name and a path or S3 address: write {'train': 's3://bucket/key'}"
            raise ConfigError("inputs", f"inputs has {channel!r}: {path!r}, but {rule}.")
    return channels


def _text(field_name: str, value: object) -> str:
    if isinstance(value, (str, os.PathLike)):
        return str(os.fspath(value))
    raise ConfigError(
        field_name, f"{field_name} is {shown_value(value)}, but it takes text: write it as a string."
    )


def _checkpoints(value: object) -> str | None:
    return None if _is(value, None, "", "None") else _text("checkpoints", value)


_RULES: Final[dict[str, Callable[[Any], Any]]] = {
    "backend": _backend,
    "instance_count": lambda v: _count("instance_count", v, MAX_INSTANCES),
    "nproc_per_node": lambda v: _count("nproc_per_node", v, MAX_NPROC, NPROC_WORDS),
    "protocol": lambda v: _choice("protocol", v, PROTOCOLS, "a launcher is meant, torchrun or mpirun"),
    "instance_type": _instance_type,
    "push": _push,
    "pull": lambda v: () if _is(v, None, "None") else parse_pull(v),
    "out": _out,
    "env": _env,
    "show": _show,
    "timeout": _timeout,
    "init_process_group": _process_group,
    "distribution": _distribution,
    "name": _name,
    "detach": lambda v: switch("detach", v),
    "fork": lambda v: switch("fork", v),
    "inputs": _inputs,
    "checkpoints": _checkpoints,
    "setup": lambda v: "" if v is None else _text("setup", v),
    "start_timeout": lambda v: parse_duration(v, "start_timeout"),
    "interrupt_grace": _grace,
    "sagemaker_options": lambda v: _mapping("sagemaker_options", {} if _is(v, None, "None") else v),
}
MAPPING_FIELDS: Final = frozenset({"env", "distribution", "inputs", "sagemaker_options"})
"""Fields whose value is a mapping: on a line a notebook variable's name, quoted JSON or a Python literal."""


def field_name(key: str) -> str:
    """Return the field that a key names: dashes for underscores and ``nnodes`` are understood.

    Raises:
        ConfigError: No field has this name; the nearest one is named.
    """
    name = key.strip().lstrip("-").replace("-", "_")
    name = {"nnodes": "instance_count", "nproc": "nproc_per_node"}.get(name, name)
    if name in _RULES:
        return name
    near = difflib.get_close_matches(name, list(_RULES), 1, 0.6)
    tail = f"did you mean {near[0]}?" if near else "the fields are " + ", ".join(_RULES) + "."
    raise ConfigError(key, f"there is no field {key!r}: {tail}")


def normalise(name: str, value: object) -> Any:  # noqa: ANN401 - each field has its own type
    """Return the value in the form that the field `name` of a `LaunchConfig` holds.

    Raises:
        ConfigError: The value is impossible for this field, or there is no such field.
    """
    return _RULES[field_name(name)](value)


FIELDS: Final = tuple(_RULES)
"""The names of all fields, in their order."""
