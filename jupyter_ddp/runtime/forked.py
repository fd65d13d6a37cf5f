"""How a forked process becomes what an exec'd one would be; what a rank keeps of the zygote is memory, nothing else.

What cannot be undone is listed, with the test that compares the two, in ``tests/local/test_fork.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import multiprocessing.context
import multiprocessing.process
import os
import resource
import signal
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

from jupyter_ddp.launchers import WORKER
from jupyter_ddp.runtime import pools, stub, worker
from jupyter_ddp.runtime.process import outlive_parent

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

_NAME: Final = "/proc/self/comm"
_ADDED: Final = "LC_CTYPE"
"""What Python itself puts into the environment, where the locale is C."""
_MAIN_PROCESS: Final = type(multiprocessing.process.current_process())
"""Its class has no name in its module. This module is imported before anything is forked."""


@dataclass(frozen=True, slots=True)
class Fresh:
    """What a new process of this Python has, noted before anything has changed it.

    Attributes:
        handlers: Signal handlers by number.
        mask: Blocked signals.
        name: The process's name.
        added: What Python added to the environment.
    """

    handlers: dict[int, Any]
    mask: frozenset[int]
    name: str
    added: dict[str, str]

    @classmethod
    def of_this_process(cls) -> Fresh:
        """Return what this process has now."""
        with open(_NAME, encoding="utf-8", errors="surrogateescape") as file:
            name = file.read().rstrip("\n")
        handlers = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
        mask = frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))
        return cls(handlers, mask, name, {_ADDED: os.environ[_ADDED]} if _ADDED in os.environ else {})

    def restore(self, blocked: Collection[int] = ()) -> None:
        """Give this process the same signal handlers, mask (and `blocked`) and name."""
        faulthandler.disable()
        signal.set_wakeup_fd(-1)
        for number, handler in self.handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask | set(blocked))
        with open(_NAME, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(self.name)

    def enter(self, environ: Mapping[str, str]) -> None:
        """Make this the environment, as for a program that is started with it."""
        os.environ.clear()
        os.environ.update(self.added | dict(environ))


def be_worker(fresh: Fresh) -> None:
    """Be a worker: what torchrun calls in each process that it has forked. Returns only to say that all went well."""
    fresh.restore()
    outlive_parent()
    os.setsid()
    close_descriptors(only=("socket:", "anon_inode:"))  # torchrun's store; its pipes to this process stay
    me = os.getpid()
    try:
        code = worker.main(partial(_be_rank, _descriptors()))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - as Python does at the end of a program
        sys.excepthook(*sys.exc_info())
        code = 1
    if os.getpid() != me:
        end(code)
    if code:
        os._exit(code)


def _be_rank(before: Mapping[int, str]) -> None:
    """Undo, in a rank that is not executed, what the zygote and torchrun have left in it.

    Args:
        before: The descriptors before the fork. Those that were made by it stay: libuv, which torchrun's store uses,
            makes a pipe in every child, and closes its number, whatever that is then, in the child's children.
    """
    close_descriptors(
        spare={number for number, target in _descriptors().items() if before.get(number) != target}
    )
    become_program([sys.executable, "-u", "-m", WORKER])


def be_nursed(fresh: Fresh, nurse: int, request: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Be the rank that a stub has asked a nurse for; signals of `stub.FORWARDED` are blocked.

    Args:
        fresh: What the zygote had when it was new.
        nurse: The process that has forked this one.
        request: What `child.ask_nurse` sends.
        descriptors: Those that came with it.
    """
    code = 1
    try:
        fresh.restore(stub.FORWARDED)
        _place_descriptors(descriptors, request["descriptors"])
        os.umask(request["umask"])
        for number, limits in request["limits"]:
            if resource.getrlimit(number) != tuple(limits):
                resource.setrlimit(number, tuple(limits))
        os.sched_setaffinity(0, request["cores"])
        os.chdir(request["cwd"])
        fresh.enter(request["env"])
        become_program(request["orig_argv"])
        code = worker.be_rank(request["path"], request["rank"], request["local_rank"], nurse)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - as Python does at the end of a program
        sys.excepthook(*sys.exc_info())
    end(code)


def _place_descriptors(have: Sequence[int], want: Sequence[int]) -> None:
    """Give the descriptors `have` the numbers `want`, and close all others."""
    above = max([*have, *want, 2]) + 1
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, above) for number in have]
    for here, there in zip(moved, want, strict=True):
        os.dup2(here, there)
    for number in _descriptors():
        if number not in want:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(number)


def become_program(arguments: list[str]) -> None:
    """Undo what a process has that was forked and not executed with these arguments."""
    _be_main_process()
    _reseed()
    _end_before_inherited_handlers()
    pools.resize(os.environ)
    sys.orig_argv[:] = arguments


def close_descriptors(only: tuple[str, ...] = ("",), spare: Collection[int] = ()) -> None:
    """Close all descriptors but the standard ones and `spare`; only those whose target begins with one of `only`.

    Objects that have one of them must stay: they would close somebody else's later.
    """
    for number, target in _descriptors().items():
        if number > 2 and number not in spare and target.startswith(only):
            os.close(number)


def _descriptors() -> dict[int, str]:
    """Return this process's descriptors and what they are of."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return found


def end(code: int) -> NoReturn:
    """End as a program ends: threads awaited, atexit handlers run, modules torn down, buffers flushed.

    A process that multiprocessing has forked ends without all this.
    """
    leave = ctypes.pythonapi.Py_Exit
    leave.argtypes, leave.restype = [ctypes.c_int], None
    leave(code)
    os._exit(code)  # not reached


def _end_before_inherited_handlers() -> None:
    """Leave out what the zygote's libraries have the C library do at the end of a process: torch's takes 0.18 s.

    The C library calls the last registered function first. So what the rank's own libraries register is called before
    its files are flushed and `_exit` gets the status; what was there before the fork is not.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # musl has none
        libc.on_exit(libc._exit, None)  # noqa: SLF001
        libc.on_exit(libc.fcloseall, None)


def _be_main_process() -> None:
    """Take back what multiprocessing notes in the processes that it forks."""
    process: Any = multiprocessing.process
    vars(process).update(_current_process=_MAIN_PROCESS(), _parent_process=None)
    context: Any = multiprocessing.context
    context._default_context._actual_context = None  # noqa: SLF001
    tempfile.tempdir = None  # torchrun has asked for it; a rank may set TMPDIR first


def _reseed() -> None:
    """Give this process random numbers of its own; `random` does so by itself."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()  # not torch.seed: that has CUDA's set, later
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
