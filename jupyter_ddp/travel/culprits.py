"""Finds what in a variable keeps it from travelling, and the way to it: ``cfg['a'][3].fh`` is an open file.

The walk is breadth-first, so the shortest way is told. It follows what pickling follows: reduce values, the state that
``__getstate__`` leaves, closures, and the globals that functions of the notebook use.
"""

from __future__ import annotations

import copyreg
import functools
import re
import sys
import time
import types
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cloudpickle import cloudpickle

from jupyter_ddp.travel.own import own_objects
from jupyter_ddp.travel.rebuild import CACHED, by_value, reduce_python
from jupyter_ddp.travel.refusals import HISTORY, Refusal, refusal
from jupyter_ddp.travel.shell_names import is_history, is_ranks_own

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLAIN: Final = (
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    bool,
    type(None),
    types.ModuleType,
    types.CodeType,
)
_PER_NAME: Final = 5
_AT_LEAST: Final = 1000
_MODULE_PARTS: Final = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")


@dataclass(frozen=True, slots=True)
class Culprit:
    """Something that cannot travel.

    Attributes:
        name: The variable.
        path: An expression that leads to it, starting at a variable.
        user: What refers to the path's variable when that is not ``name`` itself: a function or class.
        refusal: What it is, and the way out.
    """

    name: str
    path: str
    user: str
    refusal: Refusal

    def text(self) -> str:
        """Return one sentence for what it is and one for the way out."""
        path = _MODULE_PARTS.sub(r".\1", self.path)
        used = f", which `{self.user}` uses," if self.user else ""
        inside = (
            ""
            if re.match(rf"{re.escape(self.name)}\b", path) or self.user == self.name
            else f" (by way of `{self.name}`)"
        )
        return f"`{path}`{used} is {self.refusal.what}{inside}. {self.refusal.way_out}"


@dataclass(frozen=True, slots=True)
class _Step:
    value: Any
    path: str
    user: str = ""


def find_culprits(
    name: str,
    value: Any,  # noqa: ANN401 - any object
    *,
    until: float,
) -> list[Culprit]:
    """Return what in a variable cannot travel, the nearest first, at most five.

    Args:
        name: The variable.
        value: Its value.
        until: When to stop looking (`time.monotonic`); the first thousand objects are looked at in any case.
    """
    found: list[Culprit] = []
    # Objects that travel by name are not looked into; what is seen is kept alive, so that no id is used twice.
    seen: dict[int, Any] = {**own_objects()}
    steps = deque([_Step(value, name)])
    while steps and len(found) < _PER_NAME and (len(seen) < _AT_LEAST or time.monotonic() < until):
        step = steps.popleft()
        if isinstance(step.value, _PLAIN) or id(step.value) in seen:
            continue
        seen[id(step.value)] = step.value
        refused = refusal(step.value)
        if refused is None:
            try:
                steps.extend(_children(step))
            except _CannotError as error:
                refused = error.refusal
        if refused is not None:
            found.append(Culprit(name, step.path, step.user, refused))
    return found


class _CannotError(Exception):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.what)
        self.refusal = refusal


def _children(step: _Step) -> Iterator[_Step]:  # noqa: C901, PLR0912 - one branch a kind
    value, path, user = step.value, step.path, step.user
    if type(value) is dict:
        for key, item in value.items():
            yield _Step(item, f"{path}[{_short(key)}]", user)
            yield _Step(key, f"(a key of {path})", user)
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield _Step(item, f"{path}[{index}]", user)
    elif type(value) in (set, frozenset):
        for item in value:
            yield _Step(item, f"(an element of {path})", user)
    elif isinstance(value, types.FunctionType):
        if by_value(value):
            yield from _of_function(value, path)
    elif isinstance(value, type):
        if by_value(value):
            yield from _of_class(value)
    elif isinstance(value, types.MethodType):
        yield _Step(value.__self__, f"{path}.__self__", user)
        yield _Step(value.__func__, path, user)
    elif isinstance(value, types.CellType):
        if value != types.CellType():
            yield _Step(value.cell_contents, path, user)
    elif isinstance(value, property):
        yield from (_Step(part, path, user) for part in (value.fget, value.fset, value.fdel))
    elif isinstance(value, (staticmethod, classmethod, CACHED, functools.partial)):
        inner = value.func if isinstance(value, functools.partial) else value.__wrapped__
        yield _Step(inner, path, user)
        if isinstance(value, functools.partial):
            yield _Step(value.args, f"{path}.args", user)
            yield _Step(value.keywords, f"{path}.keywords", user)
    elif not _is_data(value):
        yield from _of_instance(value, path, user)


def _of_function(function: types.FunctionType, path: str) -> Iterator[_Step]:
    label = function.__qualname__.replace("<locals>.", "") if function.__name__ != "<lambda>" else path
    closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from (_Step(cell, name, label) for name, cell in closure)
    for name in cloudpickle._extract_code_globals(function.__code__):  # noqa: SLF001 - what it will pickle
        if name in function.__globals__:
            if is_history(name, function.__globals__):
                raise _CannotError(
                    Refusal(f"a function that uses {HISTORY.what} (`{name}`)", HISTORY.way_out)
                )
            if not is_ranks_own(name, function.__globals__):
                yield _Step(function.__globals__[name], name, label)
    yield _Step(function.__defaults__, f"{path}.__defaults__")
    yield _Step(function.__kwdefaults__, f"{path}.__kwdefaults__")
    yield _Step(vars(function), f"{path}.__dict__")


def _of_class(kind: type) -> Iterator[_Step]:
    for name, part in list(vars(kind).items()):
        if name not in {"__dict__", "__weakref__", "_abc_impl"} and not isinstance(
            part, types.MemberDescriptorType
        ):
            yield _Step(part, f"{kind.__qualname__.replace('<locals>.', '')}.{name}")
    yield from (_Step(base, base.__qualname__) for base in kind.__bases__)


def _is_data(value: Any) -> bool:  # noqa: ANN401 - any object
    """Whether an object is numbers all through: arrays, tensors."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, getattr(torch, "Tensor", ())):
        return not getattr(value, "__dict__", None)
    return numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject


def _of_instance(value: Any, path: str, user: str) -> Iterator[_Step]:  # noqa: ANN401 - any object
    yield _Step(type(value), type(value).__qualname__, path)
    reduced = _reduced(value)
    if not isinstance(reduced, tuple):
        return
    attributes = {id(part): name for name, part in getattr(value, "__dict__", {}).items()}
    if callable(reduced[0]):
        yield _Step(reduced[0], path, user)
    for argument in reduced[1] if isinstance(reduced[1], tuple) else ():
        yield _Step(
            argument, f"{path}.{attributes[id(argument)]}" if id(argument) in attributes else path, user
        )
    state = reduced[2] if len(reduced) > 2 else None
    for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
        if type(part) is dict:
            for name, item in part.items():
                yield _Step(item, f"{path}.{name}" if isinstance(name, str) else path, user)
        else:
            yield _Step(part, path, user)
    items = reduced[3] if len(reduced) > 3 else None
    for index, item in enumerate(items or ()):
        yield _Step(item, f"{path}[{index}]", user)
    pairs = reduced[4] if len(reduced) > 4 else None
    for key, item in pairs or ():
        yield _Step(item, f"{path}[{_short(key)}]", user)
        yield _Step(key, f"(a key of {path})", user)


def _reduced(value: Any) -> Any:  # noqa: ANN401 - any object; a reduce value
    """Return how an object pickles, as the pickler would ask it."""
    try:
        special = reduce_python(value)
        if special is not None:
            return special
        reducer = cloudpickle.Pickler.dispatch_table.get(type(value)) or copyreg.dispatch_table.get(
            type(value)
        )
        return reducer(value) if reducer is not None else value.__reduce_ex__(5)
    except Exception as error:  # noqa: BLE001 - user code; its failure is what we look for
        kind = type(value)
        name = (
            kind.__qualname__
            if kind.__module__ in {"builtins", "__main__"}
            else f"{kind.__module__}.{kind.__qualname__}"
        )
        article = "an" if name[0] in "aeiouAEIOU" else "a"
        detail = str(error)
        raise _CannotError(
            Refusal(f"{article} {name}, which cannot be pickled ({detail})", "Create it inside the cell.")
        ) from None


def _short(key: Any) -> str:  # noqa: ANN401 - a dictionary's key
    text = repr(key) if isinstance(key, (str, int, float, tuple, bytes)) else f"<{type(key).__name__}>"
    return text if len(text) <= 40 else f"{text[:37]}..."
