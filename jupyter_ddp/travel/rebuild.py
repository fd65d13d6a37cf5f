# ruff: noqa: SLF001 - cloudpickle's parts have no public names; tests pin those used here
"""Reducers for Python's own objects that cloudpickle cannot carry, and the functions that rebuild them.

Each reducer answers with a reduce value (see `object.__reduce__`) or None. The rebuilding
functions run in the other process, which finds them here by name.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import sys
import types
import weakref
from typing import TYPE_CHECKING, Any, Final

from cloudpickle import cloudpickle

from jupyter_ddp.travel.loading import current
from jupyter_ddp.travel.origins import resolve
from jupyter_ddp.travel.refusals import standard_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

CACHED = type(functools.lru_cache(lambda: None))
_PLAIN_VALUE: Final[dict[type, Callable[[Any], Any]]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: lambda member: bytes(memoryview(member)),
}
"""The plain value of an enum member that is one of these itself; its ``__str__`` may say something else."""
_complete: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes of this process that need no definition from a pickle any more."""


class NotHereError(Exception):
    """A notebook's class or function that this process does not have."""


def by_value(obj: Any) -> bool:  # noqa: ANN401 - a function or class
    """Whether a function or class has to travel with its definition."""
    return not cloudpickle._should_pickle_by_reference(obj)


def import_home(kind: type) -> None:
    """Import the module that a class names as its own, where only its package is there.

    numpy says of ``recarray`` that it is of ``numpy.rec``, and imports that when it is asked for. By the modules that
    are there cloudpickle would find that the class is from nowhere, and send a copy of it.
    """
    name: Any = kind.__module__  # a class may say what it likes
    if isinstance(name, str) and name not in sys.modules and name.rpartition(".")[0] in sys.modules:
        with contextlib.suppress(Exception):  # then it is from nowhere
            importlib.import_module(name)


def reduce_python(obj: Any) -> Any | None:  # noqa: ANN401, PLR0911 - one branch a kind
    """Return the reduce value of an object that needs help, else None."""
    if isinstance(obj, types.CodeType):
        return _reduce_code(obj)
    if isinstance(obj, CACHED) and by_value(_unwrapped(obj)):
        settings = obj.cache_parameters()
        return _cached, (obj.__wrapped__, settings["maxsize"], settings["typed"])
    if isinstance(obj, types.FunctionType):
        if hasattr(obj, "registry") and hasattr(obj, "dispatch") and by_value(obj):
            implementations = [
                (kind, function) for kind, function in obj.registry.items() if kind is not object
            ]
            return _dispatching, (obj.registry[object],), implementations, None, None, _register_all
        return None
    if isinstance(obj, functools.cached_property) and type(obj) is functools.cached_property:
        return _cached_property, (obj.func, obj.attrname)
    if isinstance(obj, property) and type(obj) is not property:
        return _property, (type(obj), obj.fget, obj.fset, obj.fdel, obj.__doc__), vars(obj) or None
    if isinstance(obj, enum.EnumMeta) and by_value(obj) and obj.__members__:
        return _reduce_enum(obj)
    if isinstance(obj, enum.Enum) and by_value(type(obj)):
        if type(obj).__members__.get(str(obj.name)) is obj:
            return _member, (type(obj), obj.name)
        return type(obj), (obj.value,)  # a combination of flags
    stream = standard_stream(obj)
    return None if stream is None else (_stream, (stream,))


def _unwrapped(obj: Any) -> Any:  # noqa: ANN401 - a function
    while isinstance(obj, CACHED):
        obj = obj.__wrapped__
    return obj if isinstance(obj, types.FunctionType) else type(obj)


def _reduce_code(code: types.CodeType) -> Any:  # noqa: ANN401 - a reduce value
    """Keep the file name, which cloudpickle drops: with it tracebacks, inspect and TorchScript find the source."""
    make, args = cloudpickle._code_reduce(code)
    return make, tuple(code.co_filename if arg == "<dynamic-code>" else arg for arg in args)


def _cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:  # noqa: ANN401, FBT001
    return functools.lru_cache(maxsize=maxsize, typed=typed)(function)


def _dispatching(function: Callable[..., Any]) -> Any:  # noqa: ANN401 - what singledispatch makes
    return functools.singledispatch(function)


def _register_all(dispatcher: Any, implementations: Iterable[tuple[type, Any]]) -> None:  # noqa: ANN401
    for kind, function in implementations:
        dispatcher.register(kind, function)


def _cached_property(function: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    if name is not None:
        made.__set_name__(type(None), name)
    return made


def _property(kind: type[property], *parts: Any) -> property:  # noqa: ANN401 - getter, setter, deleter, text
    made = property.__new__(kind)
    property.__init__(made, *parts)
    return made


def _stream(name: str) -> Any:  # noqa: ANN401 - a text stream
    return getattr(sys, name)


def _member(kind: type[enum.Enum], name: str) -> enum.Enum:
    return kind.__members__[name]


# -- classes ----------------------------------------------------------------------------------------------------------


def completed(reduced: Any, obj: type) -> Any:  # noqa: ANN401 - reduce values
    """Return a class's reduce value so that a process that has the class already keeps it as it is."""
    _complete.add(obj)
    make, args, *rest = reduced
    if make is cloudpickle._make_skeleton_class:
        make = _skeleton
    if len(rest) == 4 and rest[3] is not None:
        rest[3] = _SetOnce(rest[3])
    return (make, args, *rest)


def _skeleton(
    meta: type, name: str, bases: tuple[type, ...], kwargs: dict[str, Any], tracker: str, extra: object
) -> Any:  # noqa: ANN401 - a class
    """Make a class that gets its state later, as cloudpickle does, without what the notebook does to a new class.

    A metaclass or ``__init_subclass__`` of the notebook has already seen it there; what it did, such as an entry in
    a registry, travels, and the arguments that it was given are gone.
    """
    known = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker)
    if known is not None:
        return known
    plain = next(kind for kind in meta.__mro__ if not by_value(kind))
    resolved = types.resolve_bases(bases)  # ``Generic[T]``
    with _no_init_subclass(resolved):
        if plain is meta:
            return cloudpickle._make_skeleton_class(meta, name, bases, kwargs, tracker, extra)
        body = kwargs if resolved is bases else {**kwargs, "__orig_bases__": bases}
        made: Any = plain.__new__(meta, name, resolved, dict(body))
        return cloudpickle._lookup_class_or_track(tracker, made)


@contextlib.contextmanager
def _no_init_subclass(bases: tuple[Any, ...]) -> Iterator[None]:
    """Take ``__init_subclass__`` away from the notebook's classes among the bases for a moment."""
    hook = "__init_subclass__"
    kinds = {kind: None for base in bases for kind in base.__mro__ if hook in vars(kind) and by_value(kind)}
    hooks = [(kind, vars(kind)[hook]) for kind in kinds]
    for kind, _ in hooks:
        type.__delattr__(kind, hook)
    try:
        yield
    finally:
        for kind, own in hooks:
            type.__setattr__(kind, hook, own)


class _SetOnce:
    """Sets a class's state unless the class is one that this process knows."""

    def __init__(self, setter: Callable[[Any, Any], Any]) -> None:
        self.setter = setter

    def __call__(self, obj: type, state: Any) -> None:  # noqa: ANN401 - the pickler's state
        if obj not in _complete:
            self.setter(obj, state)
            _complete.add(obj)

    def __reduce__(self) -> tuple[type, tuple[Any]]:
        return type(self), (self.setter,)


def notebook_object(token: str, qualname: str) -> Any:  # noqa: ANN401 - a class or function
    """Return the notebook's own class or function that a token stands for.

    Raises:
        NotHereError: This process does not have it.
    """
    found = resolve(token, qualname)
    definition = current().definition
    if found is None and definition is not None:
        found = definition(token)
    if found is None:
        message = f"`{qualname}` is defined in the notebook that started the run, not here: run its cell"
        raise NotHereError(message)
    return found


def _reduce_enum(obj: enum.EnumMeta) -> Any:  # noqa: ANN401 - a reduce value
    """Reduce an Enum, Flag or IntFlag class by its members (cloudpipe/cloudpickle#558).

    The class is made from its raw values by its plain base, then gets its own methods and its members' attributes.
    """
    data_type = getattr(obj, "_member_type_", object)
    named: Mapping[str, Any] = obj.__members__
    members: list[tuple[str, Any, dict[str, Any]]] = [
        (name, _raw(member, data_type), vars(member).copy() if hasattr(member, "__dict__") else {})
        for name, member in named.items()
    ]
    for _, _, attributes in members:
        for own in ("_name_", "__objclass__", "_sort_order_", "_hashable_values_", "_unhashable_values_"):
            attributes.pop(own, None)
    made_by_meta = {
        "__dict__", "__weakref__", "__new__", "__members__", "_member_names_", "_member_map_", "_value2member_map_",
        "_member_type_", "_value_repr_", "_use_args_", "_new_member_", "__new_member__", "_unhashable_values_",
        "_unhashable_values_map_", "_hashable_values_", "_generate_next_value_", "_flag_mask_", "_singles_mask_",
        "_all_bits_", "_boundary_", "_inverted_", "_use_args", "__module__", "__qualname__", "__static_attributes__",
        "__firstlineno__", "__reduce_ex__", "__annotate_func__", "__annotations_cache__",
    }  # fmt: skip
    body = {
        name: value
        for name, value in vars(obj).items()
        if name not in made_by_meta and name not in obj.__members__ and not _is_inherited(obj, name, value)
    }
    boundary = getattr(obj, "_boundary_", None) if sys.version_info >= (3, 11) else None
    tracker = cloudpickle._get_or_create_tracker_id(obj)
    make = (type(obj), obj.__name__, obj.__bases__, obj.__qualname__, obj.__module__, boundary, tracker)
    raws = [(name, raw) for name, raw, _ in members]
    state = (body, [(name, attributes) for name, _, attributes in members])
    return completed((_enum_class, (*make, raws), state, None, None, _set_enum_state), obj)


def _raw(member: enum.Enum, data_type: type) -> Any:  # noqa: ANN401 - the member's value
    plain = _PLAIN_VALUE.get(data_type)
    return member._value_ if plain is None else plain(member)


def _is_inherited(obj: type, name: str, value: Any) -> bool:  # noqa: ANN401 - an attribute
    """Whether EnumMeta copied an attribute from a base class (``__repr__``, ``__format__``, operators of Flag …)."""
    return any(vars(base).get(name) is value for base in obj.__mro__[1:])


def _enum_class(
    meta: type[enum.EnumMeta],
    name: str,
    bases: tuple[type, ...],
    qualname: str,
    module: str,
    boundary: Any,  # noqa: ANN401 - enum.FlagBoundary, Python 3.11
    tracker: str,
    raws: list[tuple[str, Any]],
) -> Any:  # noqa: ANN401 - an enum class
    options = {} if boundary is None else {"boundary": boundary}
    body = meta.__prepare__(name, bases, **options)
    body["__module__"], body["__qualname__"] = module, qualname
    for member, raw in raws:
        body[member] = raw
    made = meta.__new__(meta, name, bases, body, **options)
    return cloudpickle._lookup_class_or_track(tracker, made)


def _set_enum_state(
    obj: enum.EnumMeta, state: tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]
) -> None:
    body, members = state
    for name, value in body.items():
        type.__setattr__(obj, name, value)
    for name, attributes in members:
        member: Any = obj.__members__[name]
        for key, value in attributes.items():
            if member.__dict__.get(key) is not value:
                object.__setattr__(member, key, value)
        if "_value_" in attributes:
            obj._value2member_map_.setdefault(attributes["_value_"], member)
