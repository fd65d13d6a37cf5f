"""The nurse: the process between the zygote and an instance's torchrun, or the ranks that mpirun has asked for.

It forks torchrun, tells the agent its pid and its end; or it is a `nursery`. It is the parent of what ranks leave
behind, and takes everything below it along when the agent lets go, and when agent or zygote die. What it has forked
dies with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from jupyter_ddp.launchers import why_exec
from jupyter_ddp.runtime import nursery
from jupyter_ddp.runtime.forked import Fresh, be_worker, close_descriptors
from jupyter_ddp.runtime.process import (
    become_subreaper,
    die_with_parent,
    kill_below,
    news_of_children,
    reap,
)
from jupyter_ddp.runtime.wire import Decoder, pack

if TYPE_CHECKING:
    from collections.abc import Iterable

CHUNK: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class State:
    """What the zygote knows of itself.

    Attributes:
        fresh: What it had when it was new.
        ahead: The top-level modules that an exec'd rank would import later, by the notebook's module path.
        threads: Its threads.
        cuda: Whether CUDA was initialised by the imports.
    """

    fresh: Fresh
    ahead: frozenset[str]
    threads: int
    cuda: bool


def serve(channel: socket.socket, descriptor: int, zygote: int, state: State) -> NoReturn:
    """Fork what the agent at the other end of `channel` asks for, and stay until it lets go.

    Args:
        channel: To the agent.
        descriptor: torchrun's log; or where the stubs of mpirun's ranks connect.
        zygote: This process's parent.
        state: What the zygote knows of itself.
    """
    try:
        signal.signal(signal.SIGTERM, lambda *_: _die(channel))
        die_with_parent(zygote, signal.SIGTERM)
        become_subreaper()
        request = _receive(channel)
        if request is not None:
            _serve(channel, descriptor, request, state)
    except BaseException:  # noqa: BLE001 - the last stop of this process: told in the zygote's log
        sys.excepthook(*sys.exc_info())
    finally:
        _leave()


def _die(channel: socket.socket) -> NoReturn:
    """The zygote is gone; the agent hears it before the ranks end, which is a consequence."""
    with contextlib.suppress(OSError):
        channel.shutdown(socket.SHUT_WR)
    _leave()


def _leave() -> NoReturn:
    kill_below()
    os._exit(0)


def _serve(channel: socket.socket, descriptor: int, request: dict[str, Any], state: State) -> None:
    reason = why_exec(
        threads=state.threads, cuda=state.cuda, shadowed=shadowed(state.ahead, request["sys_path"])
    )
    for_torchrun = "arguments" in request
    reason = reason or (_semaphores_missing() if for_torchrun else nursery.why_not())
    if reason:
        channel.sendall(pack({"op": "refused", "reason": reason}))
    elif for_torchrun:
        _serve_torchrun(channel, descriptor, request, state.fresh)
    else:
        channel.sendall(pack({"op": "started", "pid": None, "nurse": os.getpid()}))
        listener = socket.socket(fileno=descriptor)
        nursery.Nursery(channel, listener, request["env"], state.fresh).serve()


def _serve_torchrun(channel: socket.socket, log: int, request: dict[str, Any], fresh: Fresh) -> None:
    me = os.getpid()
    launcher = os.fork()
    if launcher == 0:
        _be_launcher(me, log, request, fresh)
    os.close(log)
    channel.sendall(pack({"op": "started", "pid": launcher, "nurse": me}))
    news = news_of_children()
    while True:
        ended = reap()
        if launcher in ended:
            channel.sendall(pack({"op": "ended", "code": ended[launcher]}))
            continue
        watched: list[Any] = [channel, news]
        ready = select.select(watched, [], [])[0]
        if news in ready:
            os.read(news, 4096)
        if channel in ready:
            return  # there is nothing more that an agent says: it has gone


def _be_launcher(nurse: int, log: int, request: dict[str, Any], fresh: Fresh) -> NoReturn:
    """Be an instance's torchrun; what it says goes to its log."""
    code = 1
    try:
        die_with_parent(nurse)
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        for here, there in ((null, 0), (log, 1), (log, 2)):
            os.dup2(here, there)
        close_descriptors()
        fresh.restore()
        os.chdir(request["cwd"])
        fresh.enter(request["env"])
        be_torchrun(request["arguments"], fresh)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - as Python does at the end of a program
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def be_torchrun(arguments: list[str], fresh: Fresh) -> None:
    """Do what ``torchrun <arguments>`` does, but fork the workers; returns when they have ended well.

    torchrun's own questions about GPUs are answered here, with no: fork is used where there are none, and CUDA must
    not be touched before a fork.

    Raises:
        BaseException: What torchrun raises.
    """
    import torch
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.launcher.api import elastic_launch

    with open("/proc/self/comm", "w", encoding="ascii") as name:
        name.write("pt_elastic")
    sys.argv[:] = [run.__file__, *arguments]
    options = run.parse_args(arguments)
    options.start_method = "fork"
    asks, torch.cuda.is_available = torch.cuda.is_available, lambda: False
    try:
        config, _, _ = run.config_from_args(options)
    finally:
        torch.cuda.is_available = asks
    record(elastic_launch(config, be_worker))(fresh)


def shadowed(modules: Iterable[str], path: Iterable[str]) -> str:
    """Return the name of a module that was imported, but of which `path` has another one in an earlier place; or "".

    A rank that is exec'd would import that one.
    """
    wanted = set(modules)
    for directory in path:
        try:
            names = os.listdir(directory or os.curdir)
        except OSError:
            continue
        for name in names:
            module = name.partition(".")[0]
            if module in wanted and _is_module(os.path.join(directory, name)):
                if not _comes_from(module, directory):
                    return module
                wanted.discard(module)
    return ""


def _is_module(path: str) -> bool:
    return path.endswith((".py", ".so", ".pyc")) or os.path.isfile(os.path.join(path, "__init__.py"))


def _comes_from(module: str, directory: str) -> bool:
    file: str | None = getattr(sys.modules.get(module), "__file__", None)
    if not file:
        return True
    package = os.path.basename(file).startswith("__init__.")
    home = os.path.dirname(os.path.dirname(file) if package else file)
    return os.path.realpath(home) == os.path.realpath(directory or os.curdir)


def _semaphores_missing() -> str:
    """Return why torchrun could not fork: it then has a semaphore, in memory that may be full or missing."""
    import multiprocessing

    try:
        multiprocessing.get_context("fork").Event()
    except (OSError, ImportError) as error:
        return f"there are no semaphores to be had ({error})"
    return ""


def _receive(channel: socket.socket) -> dict[str, Any] | None:
    """Return the agent's request, None when it has gone."""
    decoder = Decoder()
    while data := channel.recv(CHUNK):
        for message in decoder.feed(data):
            return message
    return None
