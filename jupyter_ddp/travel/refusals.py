"""What never travels between processes, why, and what to do instead: one table for both directions.

Types are known by their names, so that nothing is imported to ask about it.
"""

from __future__ import annotations

import io
import sys
import weakref
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an object stays: ``what`` it is ("a lock"), and the way out, a sentence."""

    what: str
    way_out: str


class RefusedError(Exception):
    """Raised inside a pickler by an object that must not travel."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.what} cannot travel. {refusal.way_out}")
        self.refusal = refusal


HISTORY: Final = Refusal("the notebook's history", "Bind the value to a name of its own and use that.")

_IN_CELL: Final = "Create it inside the cell."
_LOCK: Final = Refusal("a lock", "Create it inside the cell, or leave it out in `__getstate__`.")
_SIGNAL: Final = Refusal("a signal between threads", _LOCK.way_out)
_PROCESS: Final = Refusal("a process", "Start it inside the cell.")
_QUEUE: Final = Refusal("a queue of this process", "Create it inside the cell; send list(its elements).")
_ASYNC: Final = Refusal("something asynchronous under way", "Await it in the notebook and send the result.")
_TRACE: Final = Refusal("a part of a traceback", "Send its text: traceback.format_exc().")
_FSDP: Final = Refusal(
    "a model sharded over ranks (FSDP)",
    "Send a full state dict: torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True, cpu_offload=True)).",
)
_FILE_WAY_OUT: Final = "Send its path and open it inside the cell."

_BY_NAME: Final[dict[str, Refusal]] = {
    "_thread.lock": _LOCK,
    "_thread.RLock": _LOCK,
    "multiprocessing.synchronize.SemLock": _LOCK,
    "threading.Condition": _SIGNAL,
    "threading.Event": _SIGNAL,
    "threading.Semaphore": _SIGNAL,
    "threading.Barrier": _SIGNAL,
    "threading.Thread": Refusal("a thread", "Start it inside the cell."),
    "_thread._local": Refusal("thread-local data", _IN_CELL),
    "multiprocessing.process.BaseProcess": _PROCESS,
    "subprocess.Popen": _PROCESS,
    "multiprocessing.pool.Pool": Refusal("a pool of workers", _IN_CELL),
    "concurrent.futures._base.Executor": Refusal("a pool of workers", _IN_CELL),
    "queue.Queue": _QUEUE,
    "_queue.SimpleQueue": _QUEUE,
    "multiprocessing.queues.Queue": _QUEUE,
    "socket.socket": Refusal("a socket", "Connect inside the cell."),
    "builtins.generator": Refusal("a generator", "Send a list of its elements, or make it inside the cell."),
    "builtins.coroutine": _ASYNC,
    "builtins.async_generator": _ASYNC,
    "_asyncio.Future": _ASYNC,
    "asyncio.futures.Future": _ASYNC,
    "asyncio.events.AbstractEventLoop": _ASYNC,
    "ipywidgets.widgets.widget.Widget": Refusal(
        "a widget, whose other half is in the notebook's page", "Send its value: `x = widget.value`."
    ),
    "builtins.frame": _TRACE,
    "builtins.traceback": _TRACE,
}
_TORCH_DISTRIBUTED: Final[dict[str, Refusal]] = {
    "ProcessGroup": Refusal(
        "a live process group of this process",
        "Ranks make their own: torch.distributed.init_process_group() in the cell, or --init-process-group.",
    ),
    "Store": Refusal("a store of torch.distributed", _IN_CELL),
    "Work": Refusal("a collective under way", "Wait for it and send the tensor."),
    "DeviceMesh": Refusal("a device mesh of running ranks", "Create it inside the cell: init_device_mesh()."),
    "FullyShardedDataParallel": _FSDP,
    "FSDPModule": _FSDP,
    "DTensor": Refusal(
        "a tensor sharded over ranks (DTensor)",
        "Gather it with tensor.full_tensor() on every rank and send the result.",
    ),
}
_known: weakref.WeakKeyDictionary[type, Refusal | None] = weakref.WeakKeyDictionary()


def refusal(obj: Any) -> Refusal | None:  # noqa: ANN401 - any object
    """Return why an object must not travel, or None. Asks nothing but its type, except of files."""
    if isinstance(obj, io.IOBase):
        return _file(obj)
    kind = type(obj)
    if kind not in _known:
        _known[kind] = _of_type(kind)
    return _known[kind]


def _of_type(kind: type) -> Refusal | None:
    for base in kind.__mro__:
        module = str(base.__module__)
        found = _BY_NAME.get(f"{module}.{base.__qualname__}")
        if found is None and module.startswith(("torch.distributed", "torch._C._distributed")):
            found = _TORCH_DISTRIBUTED.get(base.__name__)
        if found is not None:
            return found
    return None


def standard_stream(obj: Any) -> str | None:  # noqa: ANN401 - any object
    """Return ``stdout`` or ``stderr`` when the object is that stream of this process."""
    if obj is sys.stdout or obj is sys.__stdout__:
        return None if obj is None else "stdout"
    return "stderr" if obj is not None and (obj is sys.stderr or obj is sys.__stderr__) else None


def _file(obj: io.IOBase) -> Refusal | None:
    if isinstance(obj, (io.BytesIO, io.StringIO)) or standard_stream(obj) is not None:
        return None
    name = getattr(obj, "name", None)
    of = f" ({name})" if isinstance(name, str) else ""
    return Refusal(f"{'a closed' if obj.closed else 'an open'} file{of}", _FILE_WAY_OUT)
