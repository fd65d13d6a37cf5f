"""What holds in the end: line, then ``--config``, then panel, then traits, then default; and the line that says it."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from jupyter_ddp.config import DEFAULTS, FIELDS, LaunchConfig, field_name, format_duration, normalise
from jupyter_ddp.config.fields import MASK
from jupyter_ddp.line.flags import FIELD_ONLY, FLAGS, Flag

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def effective(
    given: Mapping[str, Any],
    config: LaunchConfig | Mapping[str, Any] | None = None,
    panel: Mapping[str, Any] | None = None,
    traits: Mapping[str, Any] | None = None,
    *,
    config_name: str | None = None,
) -> tuple[LaunchConfig, dict[str, str]]:
    """Return the configuration that holds, and for each field where its value comes from.

    Origins are ``line``, ``config NAME``, ``panel``, ``traits`` or ``default``. A dict as `config` sets the fields that
    it has. A `LaunchConfig` is a whole: it hides panel and traits, fields at their default included, so that a run
    which is described by one does not depend on what was clicked. Of ``env`` the names are merged, and the origin
    lists all layers that gave one.

    Raises:
        ConfigError: A value is impossible, or two of them do not go together.
    """
    named = f"config {config_name}" if config_name else "config"
    layers: list[tuple[str, Mapping[str, Any]]] = [("traits", traits or {}), ("panel", panel or {})]
    if isinstance(config, LaunchConfig):
        whole = {name: getattr(config, name) for name in FIELDS}
        layers = [(named, {name: value for name, value in whole.items() if value != getattr(DEFAULTS, name)})]
    elif config is not None:
        layers.append((named, {field_name(key): value for key, value in config.items()}))
    layers.append(("line", given))
    values: dict[str, Any] = {}
    origins = dict.fromkeys(FIELDS, "default")
    for origin, layer in layers:
        for name, raw in layer.items():
            value = normalise(name, raw)
            if name == "env" and values.get("env") and value:
                values[name] = {**values[name], **value}
                origins[name] = f"{origin}, {origins[name]}"
            else:
                values[name], origins[name] = value, origin
    return LaunchConfig(**values), origins


def magic_line(config: LaunchConfig, *, mask_env: bool = False) -> str:
    """Return the ``%%distributed`` line that means this configuration; fields at their default are left out.

    Parsed again it gives the same fields; those without a flag are not in it. `mask_env` hides values of ``env``.
    """
    return " ".join(
        ["%%distributed", *(part for flag in FLAGS for part in _parts(flag, config, mask_env=mask_env))]
    )


def effective_line(config: LaunchConfig, origins: Mapping[str, str]) -> str:
    """Return the magic line with a comment that says what does not stand in the cell's own line.

    Values of ``env`` are masked.
    """
    sources: dict[str, list[str]] = {}
    for flag in FLAGS:
        parts = _parts(flag, config, mask_env=True)
        origin = origins.get(flag.field, "default")
        if parts and origin != "line":
            sources.setdefault(origin, []).append(" ".join(parts))
    for name in FIELD_ONLY:
        if getattr(config, name) != getattr(DEFAULTS, name):
            sources.setdefault(origins.get(name, "default"), []).append(f"{name}={field_text(config, name)}")
    notes = "; ".join(f"from {origin_text(origin)}: {', '.join(parts)}" for origin, parts in sources.items())
    line = magic_line(config, mask_env=True)
    return f"{line}  # {notes}" if notes else line


def origin_text(origin: str) -> str:
    """Return an origin as `effective` gives it in words: what the user has written, and where."""
    # What came from nowhere and is not at its default is what the backend made of it: -p auto.
    words = {
        "panel": "%distributed config",
        "traits": "c.DistributedMagics",
        "line": "the line",
        "default": "this machine",
    }
    return " and ".join(words.get(part, part.replace("config ", "--config ")) for part in origin.split(", "))


def _parts(flag: Flag, config: LaunchConfig, *, mask_env: bool) -> list[str]:
    """Return the words that a written line has for this flag; none when the field has its default."""
    if not flag.field or getattr(config, flag.field) == getattr(DEFAULTS, flag.field):
        return []
    if flag.field == "env":
        return [f"{flag.short} {_quote(pair)}" for pair in _pairs(config, mask_env=mask_env)]
    if flag.field == "push" and (flag.metavar is None) != (config.push == ()):
        return []
    if flag.metavar is None:
        return [flag.short]
    return [f"{flag.short} {_quote(field_text(config, flag.field))}"]


def _pairs(config: LaunchConfig, *, mask_env: bool) -> Iterable[str]:
    for name, value in config.env.items():
        yield name if value is None else f"{name}={MASK if mask_env else value}"


def _quote(text: str) -> str:
    """Quote for the line: `shlex.quote` leaves no word bare that expansion or a comment could touch."""
    return shlex.quote(text)


def field_text(config: LaunchConfig, name: str) -> str:
    """Return a field's value as the line and ``%distributed config`` take it; values of ``env`` masked."""
    value = getattr(config, name)
    if name == "env":
        return ", ".join(_pairs(config, mask_env=True)) or "{}"
    if name == "show" and value is not None:
        return ",".join(_ranges(value)) or "none"
    if name in ("push", "pull") and value is not None:
        return ",".join(str(item) for item in value)
    if name in ("timeout", "start_timeout", "interrupt_grace") and value is not None:
        return format_duration(value) if value else "0"
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _ranges(ranks: tuple[int, ...]) -> Iterable[str]:
    start = None
    for at, rank in enumerate(ranks):
        start = rank if start is None else start
        if at + 1 == len(ranks) or ranks[at + 1] != rank + 1:
            yield str(start) if start == rank else f"{start}-{rank}"
            start = None
