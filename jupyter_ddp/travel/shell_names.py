"""Names of a notebook's namespace that are the shell's own, not the user's variables."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

OWN_NAMES: Final = frozenset(
    {"get_ipython", "exit", "quit", "__name__", "__doc__", "__package__", "__loader__", "__spec__", "__builtin__",
     "__builtins__", "__file__", "__session__", "__annotations__"}
)  # fmt: skip
"""Names that each rank has of its own."""

_SHELLS: Final = frozenset({"open", "display"})
_HISTORY: Final = re.compile(r"_{1,3}|_i{1,3}|_i\d+|_oh|_ih|_dh")
_OUTPUT: Final = re.compile(r"_(\d+)")


def is_history(name: str, namespace: Mapping[str, Any]) -> bool:
    """Whether a name is the notebook's history: ``In``, ``Out``, ``_``, ``_i3``, ``_3``, ``_oh`` and their like.

    A variable of the user's that happens to have such a name is none, where that can be told.
    """
    outputs = namespace.get("_oh")
    if not isinstance(outputs, dict):  # not a notebook: a script's `_` may be gettext
        return False
    value = namespace.get(name)
    if name in {"In", "Out"}:
        return value is namespace.get("_ih" if name == "In" else "_oh")
    output = _OUTPUT.fullmatch(name)
    if output is not None:
        number = int(output[1])
        return number in outputs and outputs[number] is value
    return _HISTORY.fullmatch(name) is not None


def is_ranks_own(name: str, namespace: Mapping[str, Any]) -> bool:
    """Whether a name means something of the process, so that a rank's own takes its place.

    ``open`` and ``display`` count only while they are the shell's.
    """
    if name in _SHELLS:
        return str(getattr(namespace.get(name), "__module__", "")).startswith(("IPython", "io", "_io"))
    return name in OWN_NAMES
