"""What ``%distributed`` and ``%distributed config`` print: every value, where it comes from, and what it amounts to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jupyter_ddp.config import FIELDS, LaunchConfig
from jupyter_ddp.line.effective import effective_line, field_text, origin_text
from jupyter_ddp.line.flags import FLAGS
from jupyter_ddp.words import table_text

if TYPE_CHECKING:
    from collections.abc import Mapping

_FLAG_OF: Final = {
    flag.field: flag.short for flag in reversed(FLAGS) if flag.metavar or flag.field in ("detach", "fork")
}
_UNSET: Final = {
    "push": "what the cell uses",
    "show": "all",
    "instance_type": "SageMaker's own",
    "init_process_group": "off",
}


def values_text(config: LaunchConfig, origins: Mapping[str, str]) -> str:
    """Return a table of every field: name, flag, value, origin. Values of ``env`` are masked."""
    rows = [("field", "flag", "value", "from")]
    rows += [(name, _FLAG_OF.get(name, ""), _value(config, name), _origin(origins, name)) for name in FIELDS]
    return table_text(rows)


def _origin(origins: Mapping[str, str], name: str) -> str:
    origin = origins.get(name, "default")
    return origin if origin == "default" else origin_text(origin)


def _value(config: LaunchConfig, name: str) -> str:
    value = getattr(config, name)
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return _UNSET.get(name, "none")
    if value == () or value in ({}, ""):
        return "nothing" if name == "push" else "none"
    text = field_text(config, name).replace("\n", "\\n")
    limit = 60
    return text if len(text) <= limit else text[: limit - 1] + "…"


def total_text(config: LaunchConfig, resolved: LaunchConfig | None) -> str:
    """Return the total number of ranks; `resolved` has the number that ``auto`` comes to here, if it is known."""
    nproc = (resolved or config).nproc_per_node
    count = config.instance_count
    instances = "1 instance" if count == 1 else f"{count} instances"
    if not isinstance(nproc, int):
        return f"{instances} with {nproc} ranks each, by {config.protocol}"
    said = "" if nproc == config.nproc_per_node else f" (-p {config.nproc_per_node})"
    total = count * nproc
    return f"{instances} x {nproc}{said} = {total} {'rank' if total == 1 else 'ranks'}, by {config.protocol}"


def panel_text(
    config: LaunchConfig, origins: Mapping[str, str], resolved: LaunchConfig | None, runs: str
) -> str:
    """Return the panel as text."""
    return "\n".join(
        [
            values_text(config, origins),
            "",
            f"total: {total_text(config, resolved)}",
            f"line:  {effective_line(config, origins)}",
            "",
            runs,
            "",
            "%distributed config K=V … changes a value; runs, logs, stop and doctor are the other words.",
        ]
    )
