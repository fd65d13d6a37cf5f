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

from jupyter_ddp.travel import rebuild
from jupyter_ddp.travel.loading import current
from jupyter_ddp.travel.origins import known_token, token_for
from jupyter_ddp.travel.refusals import HISTORY, RefusedError, refusal, standard_stream
from jupyter_ddp.travel.shell_names import is_history, is_ranks_own
from jupyter_ddp.travel.tensors import TorchReducer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_IN_BAND_BELOW: Final = 2048
_BY_NAME: Final = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, rebuild.CACHED)
"""Kinds of objects that are found by name where they are importable."""


class TravelPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles values one by one.

    Attributes:
        files: File names of all code that travels by value.
        modules: Modules that the other side has to import.
        notes: Sentences for the user, in order.
    """

    def __init__(self, *, keep_device: bool) -> None:
        self._stream = io.BytesIO()
        self._out = (
            _OutOfBand()
        )  # not this object's own method: the cycle would wait for the garbage collector
        super().__init__(self._stream, protocol=5, buffer_callback=self._out.take)
        self.files: set[str] = set()
        self.modules: set[str] = set()
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
        return self._stream.getbuffer()

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
        reduced = self._torch(obj, self._name)
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


class _OutOfBand:
    """Takes the buffers that do not go into the pickle."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self.nbytes = 0

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Take a buffer; True leaves a small one to the pickle."""
        raw = buffer.raw()
        if raw.nbytes < _IN_BAND_BELOW:
            return True
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
        self.definitions: list[tuple[str, Any]] = []
        for identity in self._mains:
            self.globals_ref[identity] = MainGlobals()

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
        return reduced


class ValuePickler(TravelPickler):
    """From a rank to the notebook: the notebook's own classes and functions go as tokens, tensors come on the CPU."""

    def __init__(self) -> None:
        super().__init__(keep_device=False)

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
    size = stream.getbuffer().nbytes
    while stream.tell() < size:
        yield unpickler.load()
