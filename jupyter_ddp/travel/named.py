"""Objects of the notebook that pickle knows by name only: a ``NewType``, a singleton whose ``__reduce__`` is its name.

On a rank there is nothing by that name yet when the variables are loaded, so they travel by what they are made of.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from jupyter_ddp.travel.rebuild import by_value

_TYPING: Final = ("NewType", "ParamSpec", "TypeVarTuple", "TypeAliasType")


def can_be_named(kind: type) -> bool:
    """Whether objects of a class may be known by their name only."""
    if kind.__module__ == "typing":
        return kind.__name__ in _TYPING
    return any("__reduce__" in vars(base) and by_value(base) for base in kind.__mro__)


def reduce_named(obj: Any) -> Any | None:  # noqa: ANN401 - a reduce value
    """Return the reduce value of an object whose class `can_be_named`, or None if it is another's."""
    kind = type(obj)
    if kind.__module__ != "typing":
        return _reduce_singleton(obj)
    if obj.__module__ != "__main__":
        return None
    if kind.__name__ == "NewType":
        return _bare, (kind,), vars(obj)
    if kind.__name__ == "TypeAliasType":
        return kind, (obj.__name__, obj.__value__)
    return kind, (obj.__name__,)


def _reduce_singleton(obj: Any) -> Any:  # noqa: ANN401 - an object and its reduce value
    reduced = obj.__reduce_ex__(5)
    if not isinstance(reduced, str) or getattr(sys.modules["__main__"], reduced, None) is not obj:
        return reduced
    return _bare, (type(obj),), getattr(obj, "__dict__", None) or None


def _bare(kind: type) -> Any:  # noqa: ANN401 - an object
    return object.__new__(kind)
