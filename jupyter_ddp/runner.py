"""From a program to its result: the run is recorded, started, followed and shown, and its outcome handed back."""

from __future__ import annotations

import contextlib
import errno
import inspect
import math
import os
import re
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp import backends, hints
from jupyter_ddp.capture import capture
from jupyter_ddp.carrying import carry
from jupyter_ddp.cell import Program
from jupyter_ddp.config.fields import MASK
from jupyter_ddp.display import NotebookPublisher, Publisher, TerminalPublisher
from jupyter_ddp.errors import DistributedError, LaunchError, RunInterrupt
from jupyter_ddp.events import PROTOCOL_VERSION, NoteEvent
from jupyter_ddp.interrupt import InterruptFlag
from jupyter_ddp.line.effective import effective_line
from jupyter_ddp.preflight import preflight
from jupyter_ddp.run import Run
from jupyter_ddp.rundir import PAYLOAD_KEPT, RUN_BYTES, RunStore, new_attempt
from jupyter_ddp.settings import SETTINGS, current_config
from jupyter_ddp.view import fold

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jupyter_ddp.capture import Payload
    from jupyter_ddp.config import LaunchConfig
    from jupyter_ddp.result import DistributedResult

IDLE: Final = 0.5
RETRY: Final = 0.02
KILL_LIMIT: Final = 1.0
_INHERITED: Final = {"config", "panel", "traits"}
SECRET_LENGTH: Final = 6
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
        RunInterrupt: The run was interrupted (a KeyboardInterrupt).
        JupyterDDPError: It could not be started; nothing was.
    """
    origins: Mapping[str, str] = {}
    if config is None:
        config, origins = current_config()
    namespace = {"_function": fn, "_args": args, "_kwargs": kwargs}
    name = getattr(fn, "__qualname__", type(fn).__name__)
    magic = f"# jupyter_ddp.launch({name})"
    program = Program(source=CALL, magic=magic, reads=frozenset(namespace), returns=True)
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
        RunInterrupt: The run was interrupted (a KeyboardInterrupt).
        JupyterDDPError: It could not be started; nothing was.
    """
    preflight(config)
    backend = backends.get_backend(config.backend)
    config = backend.resolve(config)
    ip = ip or _shell()
    publisher = NotebookPublisher() if _has_kernel(ip) else TerminalPublisher()
    program = replace(program, magic=_masked(program.magic, config), mentions=payload.mentions)
    rundir = (store or RunStore(SETTINGS.run_root)).create()
    with InterruptFlag() as flag:
        try:
            rundir.hold()
            rundir.write_json("run.json", _facts(rundir.run_id, program, payload, config, origins or {}, ip))
            seconds = carry(payload, rundir, by_descriptor=getattr(backend, "takes_descriptor", False))
            job = backend.start(config, program, rundir)
        except BaseException as error:
            shutil.rmtree(rundir.path, ignore_errors=True)
            if isinstance(error, OSError):
                raise LaunchError(_why_not_started(error, rundir.path.parent)) from error
            raise
        finally:
            rundir.let_go()
        run = Run(rundir, job, output_cap=output_cap)
        try:
            announcement = payload.report.announcement(seconds)
            _tell(run, *program.warnings, *filter(None, [announcement]), *payload.report.notes)
            follow(run, publisher, flag)
            _tell(run, *run.pulled()[1], *hints.for_failure(run.view, namespace or {}))
            if ip is not None and SETTINGS.warm is False and backends.forks(config, program):
                _suggest_warm(run)
            publisher.finish(run.view, time.time())
            result = run.result()
        finally:
            run.close()
            rundir.drop_payload(PAYLOAD_KEPT)
    if flag.count and result.outcome in ("interrupted", "stopped"):
        raise RunInterrupt(result)
    return result


_CURES: Final = {
    errno.ENOSPC: "free space there, or set c.DistributedMagics.run_root to another disk",
    errno.EDQUOT: "free space there, or set c.DistributedMagics.run_root to another disk",
    errno.EMFILE: "raise the kernel's limit of open files (ulimit -n), or close some",
}


def _why_not_started(error: OSError, root: Path) -> str:
    """Return in a sentence what this machine refused to a run that was about to start, and what helps."""
    where = "" if error.errno == errno.EMFILE else f" in {root}"
    cure = _CURES.get(error.errno or 0, "see to that, or set c.DistributedMagics.run_root to another disk")
    return f"the run could not be recorded{where} ({error.strerror or error}): {cure}"


def _tell(run: Run, *notes: str) -> None:
    """Add what this side has to say of a run to its view."""
    for text in notes:
        run.view = fold(run.view, NoteEvent(attempt=run.view.facts["attempt"], text=text))


def _suggest_warm(run: Run) -> None:
    """Say once that the start can be faster, when it was slow."""
    if found := hints.for_start(run.view):
        SETTINGS.warm = None
        _tell(run, *found)


def follow(run: Run, publisher: Publisher, flag: InterruptFlag) -> None:
    """Show a run until it is over.

    The first interrupt is passed on to the ranks, the second ends all of them at once. A command waits for agents that
    are not there yet. Ranks whose agents do not end them within `KILL_LIMIT` after the second interrupt, and all at the
    third, are ended from here.
    """
    passed = 0
    kill_at = math.inf
    publisher.start(run.view)
    while not run.over:
        due = publisher.due(time.time())
        wait = min(IDLE if due is None else due, RETRY if passed < min(flag.count, 2) else IDLE)
        publisher.feed(run.view, run.pump(wait, wake=flag.fileno()), time.time())
        flag.clear()
        while passed < min(flag.count, 2) and (run.interrupt() if passed == 0 else run.kill()):
            passed += 1
            kill_at = time.monotonic() + KILL_LIMIT if passed == 2 else kill_at
        if flag.count > 2 or time.monotonic() >= kill_at:
            run.kill_from_here()


def raise_for(result: DistributedResult) -> None:
    """Raise the error of a failed run.

    Raises:
        DistributedError: The run did not succeed.
    """
    if not result.ok:
        raise DistributedError(result.message, result)


def _facts(
    run_id: str,
    program: Program,
    payload: Payload,
    config: LaunchConfig,
    origins: Mapping[str, str],
    ip: object,
) -> dict[str, Any]:
    nproc = int(config.nproc_per_node)
    kernel, cell = _ids(ip)
    return {
        "version": PROTOCOL_VERSION,
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
        "run_bytes": SETTINGS.run_bytes or RUN_BYTES,
        "checkpoints": str(Path(config.checkpoints).expanduser().resolve()) if config.checkpoints else None,
        "sent": list(payload.names),
        "line": effective_line(config, origins) if _is_inherited(origins) else "",
        "source": f"{program.magic}\n{program.source}",
        "pid": os.getpid(),
        "kernel_id": kernel,
        "cell_id": cell,
    }


def _is_inherited(origins: Mapping[str, str]) -> bool:
    """Tell whether a value comes from elsewhere than the line, the defaults and this machine."""
    parts = {part.partition(" ")[0] for origin in origins.values() for part in origin.split(", ")}
    return bool(parts & _INHERITED)


def _masked(magic: str, config: LaunchConfig) -> str:
    """Return the magic line without values of ``env``: it is stored in the run and in the notebook."""
    for name, value in config.env.items():
        if value:
            magic = re.sub(rf"(\b{name}=)('[^']*'|\"[^\"]*\"|\S+)", rf"\1{MASK}", magic)
            magic = magic.replace(value, MASK) if len(value) >= SECRET_LENGTH else magic
    return magic


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
