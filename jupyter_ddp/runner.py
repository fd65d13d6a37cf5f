"""From a program to its result: the run is recorded, started, followed and shown, and its outcome handed back."""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp import backends, hints
from jupyter_ddp.capture import capture
from jupyter_ddp.cell import Program
from jupyter_ddp.display import NotebookPublisher, Publisher, TerminalPublisher
from jupyter_ddp.errors import DistributedError
from jupyter_ddp.events import NoteEvent
from jupyter_ddp.interrupt import InterruptFlag
from jupyter_ddp.line.effective import effective_line
from jupyter_ddp.run import Run
from jupyter_ddp.rundir import RunStore, new_attempt
from jupyter_ddp.settings import SETTINGS, current_config
from jupyter_ddp.view import fold

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jupyter_ddp.capture import Payload
    from jupyter_ddp.config import LaunchConfig
    from jupyter_ddp.result import DistributedResult

IDLE: Final = 0.5
_INHERITED: Final = {"config", "panel", "traits"}
CALL: Final = "_function(*_args, **_kwargs)"


def launch(
    fn: Callable[..., Any],
    *args: Any,  # noqa: ANN401 - the user's
    config: LaunchConfig | None = None,
    check: bool = True,
    **kwargs: Any,  # noqa: ANN401
) -> DistributedResult:
    """Call a function on every rank of a new run and wait for the result; shows the same view as ``%%distributed``.

    What the function returns is the rank's value: ``result.values`` has them by rank. Anything that `fn` and its
    arguments refer to travels as it does for a cell.

    Args:
        fn: The function. It may be defined in the notebook, in a script or in a module.
        *args: Its positional arguments.
        config: What the run is to be; by default what `configure` and the panel say.
        check: Raise on failure.
        **kwargs: Its keyword arguments.

    Raises:
        DistributedError: A rank failed and `check` is true. ``.result`` has the rest.
        KeyboardInterrupt: The run was interrupted.
        JupyterDDPError: It could not be started; nothing was.
    """
    origins: Mapping[str, str] = {}
    if config is None:
        config, origins = current_config()
    namespace = {"_function": fn, "_args": args, "_kwargs": kwargs}
    name = getattr(fn, "__qualname__", type(fn).__name__)
    program = Program(source=CALL, magic=f"# jupyter_ddp.launch({name})", reads=frozenset(namespace))
    payload = capture(program, namespace, push=tuple(namespace))
    result = run_program(program, payload, config, origins=origins, namespace=_caller_namespace())
    if check:
        raise_for(result)
    return result


def run_program(
    program: Program,
    payload: Payload,
    config: LaunchConfig,
    *,
    origins: Mapping[str, str] | None = None,
    ip: Any = None,  # noqa: ANN401 - an InteractiveShell
    namespace: Mapping[str, Any] | None = None,
    store: RunStore | None = None,
    output_cap: int | None = None,
) -> DistributedResult:
    """Start a run, show it until it is over, and return its result, also of a failed one.

    Args:
        program: The cell.
        payload: Its variables.
        config: What the run is to be.
        origins: Where each field's value comes from, for the first line of the view.
        ip: The shell whose front end gets the view; found by itself when there is one.
        namespace: The notebook's names, for hints about what would have been there.
        store: Where the run is recorded.
        output_cap: Bytes of text that the notebook keeps.

    Raises:
        KeyboardInterrupt: The run was interrupted. The ranks have ended, and what they said is on the screen; its
            ``result`` is the run's.
        JupyterDDPError: It could not be started; nothing was.
    """
    backend = backends.get_backend(config.backend)
    config = backend.resolve(config)
    rundir = (store or RunStore(SETTINGS.run_root)).create()
    ip = ip or _shell()
    try:
        rundir.hold()
        rundir.write_json("run.json", _facts(rundir.run_id, program, config, origins or {}, ip))
        payload.write(rundir.payload)
        job = backend.start(config, program, rundir)
    except BaseException:
        shutil.rmtree(rundir.path, ignore_errors=True)
        raise
    finally:
        rundir.let_go()
    run = Run(rundir, job, output_cap=output_cap)
    _tell(run, *program.warnings, *payload.report.notes)
    publisher = NotebookPublisher() if _has_kernel(ip) else TerminalPublisher()
    try:
        interrupted = follow(run, publisher)
        _tell(run, *run.pulled()[1], *hints.for_failure(run.view, namespace or {}))
        publisher.finish(run.view, time.time())
        result = run.result()
    finally:
        run.close()
    if interrupted and not result.ok:
        stop = KeyboardInterrupt()
        stop.result = result  # type: ignore[attr-defined]
        raise stop
    return result


def _tell(run: Run, *notes: str) -> None:
    """Add what this side has to say of a run to its view."""
    for text in notes:
        run.view = fold(run.view, NoteEvent(attempt=run.view.facts["attempt"], text=text))


def follow(run: Run, publisher: Publisher) -> bool:
    """Show a run until it is over; tell whether the user interrupted it.

    The first interrupt is passed on to the ranks, the second ends all of them at once. If no agent answers, they are
    ended from here.
    """
    with InterruptFlag() as flag:
        heard = 0
        publisher.start(run.view)
        while not run.over:
            now = time.time()
            due = publisher.due(now)
            events = run.pump(IDLE if due is None else min(IDLE, due), wake=flag.fileno())
            publisher.feed(run.view, events, time.time())
            if flag.count > heard:
                flag.clear()
                heard = flag.count
                if not (run.interrupt() if heard == 1 else run.kill()):
                    run.kill_from_here()
    return heard > 0


def raise_for(result: DistributedResult) -> None:
    """Raise the error of a failed run.

    Raises:
        DistributedError: The run did not succeed.
    """
    if not result.ok:
        raise DistributedError(result.message, result)


def _facts(
    run_id: str, program: Program, config: LaunchConfig, origins: Mapping[str, str], ip: object
) -> dict[str, Any]:
    nproc = int(config.nproc_per_node)
    kernel, cell = _ids(ip)
    return {
        "version": 1,
        "id": run_id,
        "attempt": new_attempt(),
        "name": config.name,
        "created": time.time(),
        "backend": config.backend,
        "protocol": config.protocol,
        "nnodes": config.instance_count,
        "nproc": nproc,
        "world_size": config.instance_count * nproc,
        "config": config.to_json(mask_env=True),
        "line": effective_line(config, origins) if _INHERITED & {*map(_kind, origins.values())} else "",
        "source": f"{program.magic}\n{program.source}",
        "pid": os.getpid(),
        "kernel_id": kernel,
        "cell_id": cell,
    }


def _kind(origin: str) -> str:
    return origin.partition(" ")[0]


def _shell() -> Any:  # noqa: ANN401 - an InteractiveShell or None
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    return get_ipython()


def _has_kernel(ip: Any) -> bool:  # noqa: ANN401
    return getattr(ip, "kernel", None) is not None


def _ids(ip: Any) -> tuple[str | None, str | None]:  # noqa: ANN401
    """Return the ids of kernel and cell, by which a page finds the run's output again after a reload."""
    if not _has_kernel(ip):
        return None, None
    kernel = cell = None
    with contextlib.suppress(Exception):  # front ends are free to send neither
        from ipykernel.connect import get_connection_file

        kernel = Path(get_connection_file()).name.removeprefix("kernel-").removesuffix(".json")
        cell = ip.kernel.get_parent()["metadata"].get("cellId")
    return kernel, cell


def _caller_namespace() -> dict[str, Any]:
    frame = inspect.currentframe()
    caller = frame.f_back.f_back if frame and frame.f_back else None
    return dict(caller.f_globals) if caller else {}
