"""One sentence about an error whose cure is known, for errors on ranks and for one of the notebook.

A hint says only what is certain from the error itself and from what the notebook has: a wrong hint is worse than none.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.cell import NOTEBOOK_LAUNCHER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from jupyter_ddp.view import RunView

_NOT_SENT: Final = frozenset({"In", "Out", "get_ipython", "exit", "quit", "open"})
_UNDEFINED: Final = re.compile(r"name '([^']+)' is not defined")
_NO_MODULE: Final = re.compile(r"No module named '([^']+)'")
_SHARED_MEMORY: Final = re.compile(
    r"unable to [^\n]*</?torch_[^\n]*No space left on device|insufficient shared memory \(shm\)"
)
_MODULE_MISSING: Final = ("ModuleNotFoundError", "ImportError")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a hint may know.

    Attributes:
        type: The exception's type, its name alone.
        message: Its text.
        traceback: Its traceback as text.
        names: The notebook's namespace.
        push: What ``--push`` named, None when it was not given.
        sent: The variables that were sent, None when that is not known.
        process_group: What ``--init-process-group`` said.
    """

    type: str
    message: str
    traceback: str = ""
    names: Mapping[str, Any] | None = None
    push: tuple[str, ...] | None = None
    sent: tuple[str, ...] | None = None
    process_group: str | None = None


WORTH_SAVING: Final = 1.5
"""Seconds of a start from which on `for_start` speaks of them."""
WARM_START: Final = 0.3


def for_failure(view: RunView, namespace: Mapping[str, Any]) -> tuple[str, ...]:
    """Return hints about a run's first cause, none when it went well or nothing certain can be said."""
    failure = view.failure
    if failure is None or not failure.type:
        return ()
    config = view.facts.get("config", {})
    push, sent = config.get("push"), view.facts.get("sent")
    return for_error(
        Facts(
            type=failure.type.rpartition(".")[2],
            message=failure.message,
            traceback=failure.traceback,
            names=namespace if view.unit == "cell" else None,  # a function's run has no line for a flag
            push=None if push is None else tuple(push),
            sent=None if sent is None else tuple(sent),
            process_group=config.get("init_process_group"),
        )
    )


def for_start(view: RunView) -> tuple[str, ...]:
    """Return a hint about a start that took long enough to speak of it, for runs whose ranks are forked."""
    begun, ran = view.phases.get("starting"), view.phases.get("running")
    if begun is None or ran is None or ran - begun < WORTH_SAVING:
        return ()
    seconds = f"{ran - begun - WARM_START:.0f}"
    return (f"%config DistributedMagics.warm = True would have saved about {seconds} s of this run's start",)


def for_error(facts: Facts) -> tuple[str, ...]:
    """Return hints about an error of a rank."""
    found = (hint(facts) for hint in _HINTS)
    return tuple(text for text in found if text)


def _missing_variable(facts: Facts) -> str | None:
    found = _UNDEFINED.search(facts.message)
    if facts.type != "NameError" or not found:
        return None
    name = found[1]
    if name not in (facts.names or {}) or name in _NOT_SENT or name.startswith("_"):
        return None
    what = f"{name} is a variable of the notebook that was not sent to the ranks"
    if facts.push is None and facts.sent is None:
        return f"{what}: write --push with it and all others that the cell uses; what it does not name stays here."
    before = facts.sent or () if facts.push is None else facts.push
    instead = " to add it" if before else " instead of --no-push" if facts.push is not None else ""
    return f"{what}: write --push {','.join([*before, name])}{instead}."


def _no_process_group(facts: Facts) -> str | None:
    if "Default process group has not been initialized" not in facts.message:
        return None
    return "The ranks start outside a process group: write --init-process-group auto, or call init_process_group first."


def _second_process_group(facts: Facts) -> str | None:
    if "initialize the default process group twice" not in facts.message or not facts.process_group:
        return None
    given = f"--init-process-group {facts.process_group}"
    return f"{given} has already made the process group: leave out that flag, or the cell's own init_process_group."


def _nccl_without_gpu(facts: Facts) -> str | None:
    if "ProcessGroupNCCL is only supported with GPUs" not in facts.message:
        return None
    how = "--init-process-group gloo" if facts.process_group else 'init_process_group("gloo")'
    return f"NCCL needs a GPU on every rank, and there is none: write {how}."


def _notebook_launcher(facts: Facts) -> str | None:
    # What the cell's text has shown is the same sentence, and is said once.
    return NOTEBOOK_LAUNCHER if "notebook_launcher" in facts.traceback else None


def _debugger(facts: Facts) -> str | None:
    if facts.type != "BdbQuit":
        return None
    return "Nobody can talk to a debugger on a rank: print what you want to see, or run the code in the notebook."


def _missing_module(facts: Facts) -> str | None:
    found = _NO_MODULE.search(facts.message)
    if facts.type not in _MODULE_MISSING or not found:
        return None
    name = found[1]
    if "." in name:  # the package itself was found: what it lacks there is not known here
        return None
    where = _module_directory(name)
    if where is None:
        if name == "mpi4py":
            return "This kernel's Python has no mpi4py: run %pip install mpi4py in a cell of the notebook."
        return None
    how = f"write --env {shlex.quote(f'PYTHONPATH={where}')}, or put that directory on sys.path in the cell"
    return f"The notebook finds {name} in {where}, and the ranks do not look there: {how}."


def _module_directory(name: str) -> str | None:
    """Return the directory in which the notebook finds a top-level module, absolute; nothing is imported for it."""
    spec = None
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(name)
    if spec is None or not spec.origin or not os.path.isfile(spec.origin):  # noqa: PTH113 - a loader's text
        return None
    above = os.path.dirname(os.path.abspath(spec.origin))  # noqa: PTH100, PTH120
    return os.path.dirname(above) if spec.submodule_search_locations else above  # noqa: PTH120


def _address_in_use(facts: Facts) -> str | None:
    text = facts.message.lower()
    if "address already in use" not in text and "eaddrinuse" not in text:
        return None
    how = "leave address and port out of init_process_group, or take MASTER_PORT, which is free for each run"
    return f"Something else listens on the port that the code asks for: {how}."


def _shared_memory_full(facts: Facts) -> str | None:
    if not _SHARED_MEMORY.search(facts.message):
        return None
    how = "give it more (docker run --shm-size=2g), or write num_workers=0"
    return (
        f"The shared memory, /dev/shm, is full, and a DataLoader's workers leave their batches there: {how}."
    )


def _no_more_threads(facts: Facts) -> str | None:
    if "can't start new thread" not in facts.message:
        return None
    return "No more threads can be started: end some processes, or raise the limit (ulimit -u, or the container's)."


def _gpu_held_by_notebook(facts: Facts) -> str | None:
    if facts.type != "OutOfMemoryError" and "CUDA out of memory" not in facts.message:
        return None
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    held = {number: torch.cuda.memory_reserved(number) for number in range(torch.cuda.device_count())}
    texts = [f"{size / 2**30:.1f} GiB of GPU {number}" for number, size in held.items() if size >= 1 << 28]
    if not texts:
        return None
    how = "delete its CUDA tensors and call torch.cuda.empty_cache() in the notebook"
    return f"This notebook itself holds {' and '.join(texts)}: {how}."


_HINTS: Final[tuple[Callable[[Facts], str | None], ...]] = (
    _missing_variable,
    _no_process_group,
    _second_process_group,
    _nccl_without_gpu,
    _notebook_launcher,
    _debugger,
    _missing_module,
    _address_in_use,
    _shared_memory_full,
    _no_more_threads,
    _gpu_held_by_notebook,
)


def for_notebook_error(error: BaseException | None, assigned: Iterable[str]) -> str | None:
    """Return a hint about a NameError in the notebook for a name that the last distributed cell assigned."""
    if not isinstance(error, NameError) or isinstance(error, UnboundLocalError):
        return None
    found = _UNDEFINED.search(str(error))
    name = getattr(error, "name", None) or (found[1] if found else None)
    if not name or name not in set(assigned):
        return None
    how = f"--pull {name} on its line brings rank 0's value back, --pull {name}@all a list by rank"
    return f"{name} was assigned on the ranks, and the distributed cell did not bring it back: {how}."
