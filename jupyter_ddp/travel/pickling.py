"""The pickler of both directions: cloudpickle, with what it cannot carry reduced here and big buffers out of band.

One pickler writes several pickles into one stream and keeps its memo between them. So each variable can be measured and
named, and still everything is one graph: an optimizer points at its model's own parameters.
"""

from __future__ import annotations

import io
import pickle  # the doors of this package say whose files are loaded
import types
import warnings
from typing import TYPE_CHECKING, Any, Final

import cloudpickle

from jupyter_ddp.errors import ValueTravelError
from jupyter_ddp.travel import rebuild
from jupyter_ddp.travel.buffers import reduce_buffer
from jupyter_ddp.travel.loading import current
from jupyter_ddp.travel.named import can_be_named, reduce_named
from jupyter_ddp.travel.origins import known_token, token_for
from jupyter_ddp.travel.own import own_objects
from jupyter_ddp.travel.refusals import HISTORY, RefusedError, refusal, standard_stream
from jupyter_ddp.travel.shell_names import is_history, is_ranks_own
from jupyter_ddp.travel.tensors import TorchReducer
from jupyter_ddp.words import size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_IN_BAND_BELOW: Final = 2048
_BY_NAME: Final = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, rebuild.CACHED)
"""Kinds of objects that are found by name where they are importable."""


class TooLargeError(ValueTravelError):
    """A value is larger than it may be; the pickling ended when that was seen."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"it is larger than {size_text(limit)}")
        self.limit = limit

    def __reduce__(self) -> tuple[type[TooLargeError], tuple[int]]:
        return type(self), (self.limit,)


class TravelPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles values one by one.

    Args:
        keep_device: See `TorchReducer`.
        limit: Bytes, pickles and buffers together, above which the pickling ends with a `TooLargeError`.

    Attributes:
        files: File names of all code that travels by value.
        modules: Modules that the other side has to import.
        mentions: Names that all code mentions which travels by value: of globals, attributes and modules.
        notes: Sentences for the user, in order.
    """

    def __init__(self, *, keep_device: bool, limit: int | None = None) -> None:
        budget = None if limit is None else _Budget(limit)
        self._stream = io.BytesIO() if budget is None else _BudgetedStream(budget)
        # Not this object's own method: the cycle would wait for the garbage collector.
        self._out = _OutOfBand(budget)
        super().__init__(self._stream, protocol=5, buffer_callback=self._out.take)
        self.files: set[str] = set()
        self.modules: set[str] = set()
        self.mentions: set[str] = set()
        self._torch = TorchReducer(keep_device=keep_device)
        self.notes = self._torch.notes
        self._name = ""
        self._plain: set[type] = set()  # kinds whose objects need no help, so that many of them are quick

    @property
    def buffers(self) -> list[memoryview]:
        """Out-of-band buffers so far, in order; they keep their objects alive."""
        return self._out.buffers

    def add(self, name: str, obj: Any) -> int:  # noqa: ANN401 - any object
        """Append the pickle of one value and return how many bytes it added.

        Raises:
            Exception: What the object's own pickling raised; `RefusedError` for what never travels. The pickler is
                of no use afterwards.
        """
        before = self._stream.tell() + self._out.nbytes
        self._name = f"`{name}`" if name else "the value"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.dump(obj)
        for warning in caught:
            self.notes[f"{self._name}: {warning.message}"] = None
        return self._stream.tell() + self._out.nbytes - before

    def pickles(self) -> memoryview:
        """Return all pickles so far."""
        # Not getbuffer: a stream that is collected before its view ends the process (SystemError, CPython 3.12).
        return memoryview(self._stream.getvalue())

    def reducer_override(self, obj: Any) -> Any:  # noqa: ANN401 - a reduce value
        """Return how an object that is not a plain built-in one is reduced (see `pickle.Pickler`)."""
        kind = type(obj)
        if kind in self._plain and standard_stream(obj) is None:
            return NotImplemented
        refused = refusal(obj)
        if refused is not None:
            raise RefusedError(refused)
        if kind is types.CodeType:
            self.files.add(obj.co_filename)
            self.mentions.update(obj.co_names)
        if isinstance(obj, type):
            rebuild.import_home(obj)
        reduced = reduce_buffer(obj) or self._torch(obj, self._name)
        if reduced is None:
            reduced = rebuild.reduce_python(obj)
        if reduced is None:
            reduced = super().reducer_override(obj)
        if isinstance(obj, _BY_NAME):
            if reduced is NotImplemented:
                self._depend(obj)
                return reduced
            return self.defined(obj, rebuild.completed(reduced, obj) if isinstance(obj, type) else reduced)
        if kind.__name__ == "memmap" and hasattr(obj, "filename"):
            self.notes[f"{self._name} maps a file ({obj.filename}): what it maps is read and travels"] = None
        elif reduced is NotImplemented and not isinstance(obj, io.IOBase):
            self._plain.add(kind)
        return reduced

    def defined(self, obj: Any, reduced: Any) -> Any:  # noqa: ANN401 - a class or function and its reduce value
        """Return how a class or function that is not importable travels."""
        del obj
        return reduced

    def _depend(self, obj: Any) -> None:  # noqa: ANN401 - any object
        module = obj.__name__ if isinstance(obj, types.ModuleType) else getattr(obj, "__module__", None)
        if isinstance(module, str):
            self.modules.add(module)


class _Budget:
    """The bytes that one pickler may write."""

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit

    def spend(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left < 0:
            raise TooLargeError(self._limit)


class _BudgetedStream(io.BytesIO):
    def __init__(self, budget: _Budget) -> None:
        super().__init__()
        self._budget = budget

    def write(self, data: Any, /) -> int:  # noqa: ANN401 - any buffer, as the base class
        self._budget.spend(len(data))
        return super().write(data)


class _OutOfBand:
    """Takes the buffers that do not go into the pickle."""

    def __init__(self, budget: _Budget | None) -> None:
        self._budget = budget
        self.buffers: list[memoryview] = []
        self.nbytes = 0

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Take a buffer; True leaves a small one to the pickle."""
        raw = buffer.raw()
        if raw.nbytes < _IN_BAND_BELOW:
            return True
        if self._budget is not None:
            self._budget.spend(raw.nbytes)
        self.buffers.append(raw)
        self.nbytes += raw.nbytes
        return False


class PayloadPickler(TravelPickler):
    """From the notebook to the ranks: functions of the notebook get the rank's ``__main__`` as globals.

    Attributes:
        definitions: Classes and functions that travelled by value, as (token, object).
    """

    def __init__(self, namespaces: Sequence[dict[str, Any]]) -> None:
        """Make a pickler for variables of a notebook whose globals are ``namespaces``."""
        super().__init__(keep_device=True)
        self._mains = {id(namespace): namespace for namespace in namespaces}
        self._own = own_objects()
        self._unnamed: set[type] = set()
        self.definitions: list[tuple[str, Any]] = []
        for identity in self._mains:
            self.globals_ref[identity] = MainGlobals()

    def add(self, name: str, obj: Any) -> int:  # noqa: ANN401 - any object
        """Append the pickle of one variable (see the base class)."""
        return super().add(name, self._own.get(id(obj), obj))

    def reducer_override(self, obj: Any) -> Any:  # noqa: ANN401 - a reduce value
        """Reduce what every process has of its own to its name, all else like any travelling object."""
        own = self._own.get(id(obj))
        if own is not None:
            return own.__reduce__()
        named = self._reduce_named(obj)
        return super().reducer_override(obj) if named is None else named

    def _reduce_named(self, obj: Any) -> Any | None:  # noqa: ANN401 - a reduce value
        kind = type(obj)
        if kind in self._unnamed:
            return None
        if can_be_named(kind):
            return reduce_named(obj)
        self._unnamed.add(kind)
        return None

    def is_own(self, obj: Any) -> bool:  # noqa: ANN401 - any object
        """Whether every process has this object of its own, so that it travels by name."""
        return id(obj) in self._own

    def defined(self, obj: Any, reduced: Any) -> Any:  # noqa: ANN401 - see the base class
        """Give the class or function a token."""
        token = None if isinstance(obj, types.ModuleType) else token_for(obj)
        if token is not None:
            self.definitions.append((token, obj))
        return reduced

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:  # noqa: ANN401 - a reduce value
        reduced = super()._dynamic_function_reduce(func)
        if id(func.__globals__) in self._mains:
            needs: dict[str, Any] = reduced[2][1]["__globals__"]
            for name in list(needs):
                if is_history(name, func.__globals__):
                    raise RefusedError(HISTORY)
                if is_ranks_own(name, func.__globals__):
                    del needs[name]
                else:  # a list or dict is never shown to `reducer_override`
                    needs[name] = self._own.get(id(needs[name]), needs[name])
        return reduced


class ValuePickler(TravelPickler):
    """From a rank to the notebook: the notebook's own classes and functions go as tokens, tensors come on the CPU."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(keep_device=False, limit=limit)

    def reducer_override(self, obj: Any) -> Any:  # noqa: ANN401 - a reduce value
        """Reduce what the notebook has to its token, all else like any travelling object."""
        if isinstance(obj, (type, types.FunctionType, rebuild.CACHED)):
            token = known_token(obj)
            if token is not None:
                return rebuild.notebook_object, (token, obj.__qualname__)
        return super().reducer_override(obj)


class MainGlobals(dict[str, Any]):
    """Stands for the notebook's globals in a pickle; becomes the globals of the notebook's functions there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _main_globals, ()


def _main_globals() -> dict[str, Any]:
    return current().namespace()


def unpickle(pickles: memoryview, buffers: Sequence[memoryview]) -> Iterator[Any]:
    """Yield the values of a stream of pickles that one pickler wrote, one by one."""
    with pickles:
        stream = io.BytesIO(pickles)
    unpickler = pickle.Unpickler(stream, buffers=buffers)  # noqa: S301 - who calls has checked whose file it is
    size = len(stream.getvalue())
    while stream.tell() < size:
        yield unpickler.load()
