"""Raw memory that would travel inside a pickle, or as something else: it travels out of band and stays what it is."""

from __future__ import annotations

import pickle
import sys
from typing import Any, Final

_FORMATS: Final = frozenset("cbB?hHiIlLqQnNfdP")
"""What `memoryview.cast` can give back."""


def reduce_buffer(obj: Any) -> Any | None:  # noqa: ANN401 - any object; a reduce value
    """Return how a memoryview, or an array that is not in one piece, travels; None for all else."""
    if type(obj) is memoryview:
        return _reduce_view(obj)
    numpy = sys.modules.get("numpy")
    if numpy is None or type(obj) is not getattr(numpy, "ndarray", None):
        return None
    if obj.dtype.hasobject or obj.flags.c_contiguous or obj.flags.f_contiguous:
        return None
    # numpy's own pickling does the same, but with the copy inside the pickle: every rank would have it for itself.
    return numpy.ascontiguousarray(obj).__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _reduce_view(view: memoryview) -> Any | None:  # noqa: ANN401 - a reduce value
    """Reduce a view as a view of its bytes. cloudpickle makes bytes of it; so it stays for formats of structures."""
    form = view.format.removeprefix("@")
    if form not in _FORMATS:
        return None
    if view.c_contiguous:
        raw: Any = view
    else:
        raw = view.tobytes() if view.readonly else bytearray(view.tobytes())
    return _view, (pickle.PickleBuffer(raw), form, view.shape)


def _view(raw: Any, form: str, shape: tuple[int, ...]) -> memoryview:  # noqa: ANN401 - a buffer
    view = memoryview(raw).cast("B")
    return view.cast(form, shape) if view.nbytes else view.cast(form)  # type: ignore[call-overload, no-any-return]
