"""A rank: the process that runs cells. A loop that ends after one cell, or when the agent says so."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.events import Event, NoteEvent, RankEvent, to_json
from jupyter_ddp.runtime import group
from jupyter_ddp.runtime.device import own_device
from jupyter_ddp.runtime.interrupts import Interrupts
from jupyter_ddp.runtime.link import Bell, Link, start_quiet_thread
from jupyter_ddp.runtime.source import NOWHERE, Source, cell_source, setup_source
from jupyter_ddp.runtime.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_ddp.runtime.shell import RankShell

SEND_LIMIT: Final = 2.0
"""Seconds that a rank waits until its last frames have been sent."""
END_LIMIT: Final = 1.0
"""Seconds for destroying a process group that was left, and for asyncio tasks that were left."""
LINGER: Final = 2.0
"""Seconds after the last cell in which a rank is expected to end; then it says what keeps it."""
_NO_MPI: Final = "mpi4py sees one rank only, as torchrun starts no MPI: for MPI write --protocol mpirun"
_STARTING: Final = "while the rank was made ready"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a step of a rank ended.

    Attributes:
        error: What ended it; None for a good end.
        time: When.
        source: What the error's lines are counted in.
        step: What was being done, for an error outside of the cell.
        value: The cell's last expression.
    """

    error: BaseException | None = None
    time: float = 0.0
    source: Source = NOWHERE
    step: str = ""
    value: object = None


class Rank:
    """One rank, from its hello to its exit code."""

    def __init__(self, sock: socket.socket, bell: Bell, rank: int, local_rank: int) -> None:
        self._rank = rank
        self._local_rank = local_rank
        self._link = Link(sock)
        self._streams = Streams(self._link, bell)
        self._interrupts = Interrupts(lambda: self._link.put({"op": "heard"}))
        self._interrupts.install()
        self._shell: RankShell | None = None
        self._code = 0

    def run(self) -> int:
        """Say hello, run cells, and return the exit code. Does not return in a process that a cell has forked."""
        self._link.put(
            {
                "op": "hello",
                "role": "rank",
                "rank": self._rank,
                "local_rank": self._local_rank,
                "pid": os.getpid(),
                "host": socket.gethostname(),
            }
        )
        while True:
            frame = self._link.receive()
            if frame.get("op") == "exit":
                break
            if frame.get("op") == "cell":
                self._code = self._run_frame(frame)
                if frame.get("last", True) or self._shell is None:
                    break
        return self._finish()

    def _run_frame(self, frame: dict[str, Any]) -> int:
        """Run one cell, with what comes before and after it; return the exit code that it asks for."""
        from jupyter_ddp.runtime.failure import exit_code, is_quiet_end

        ending = Ending() if self._shell else self._make_ready(Path(frame["run_dir"]))
        shell = self._shell
        if shell is not None:
            ending = self._guard(lambda: self._run_cell(shell, frame))
        if not self._link.is_owner:  # a forked child that did not end where the cell did
            self._tell_here(ending)
            self._streams.sizes()
            os._exit(0 if ending.error is None else exit_code(ending.error))
        failed = not is_quiet_end(ending.error)
        if failed:
            self._tell(ending)
        if shell is not None:
            saved = self._guard(lambda: self._save(shell, frame, ending, must_exist=not failed))
            if saved.error is not None and not failed:
                self._tell(saved)
                ending = saved
        if (
            "mpi4py.MPI" in sys.modules
            and "TORCHELASTIC_RUN_ID" in os.environ
            and os.environ["WORLD_SIZE"] != "1"
        ):
            self._put(NoteEvent(level="warning", text=_NO_MPI, time=time.time()))
        ok = is_quiet_end(ending.error)
        self._link.put({"op": "done", "ok": ok, "n": frame.get("n", 0), "o": self._streams.sizes()})
        self._link.drain(SEND_LIMIT)
        return 0 if ending.error is None else exit_code(ending.error)

    def _guard(self, work: Callable[[], Ending]) -> Ending:
        """Do something that an interrupt may stop; whatever is raised ends it, and nothing else."""
        try:
            try:
                self._interrupts.listening = True
                return work()
            finally:
                self._interrupts.listening = False
        except BaseException as error:  # noqa: BLE001
            return Ending(error, time.time())

    def _make_ready(self, run_dir: Path) -> Ending:
        """Make the streams files, then the shell. Only what went wrong before is in the launcher's log."""
        try:
            self._streams.open(run_dir, self._rank)
            self._streams.watch_faults(run_dir, self._rank)
            # After the streams: IPython and what it needs may be broken here.
            from jupyter_ddp.runtime.adapt import adapt_libraries
            from jupyter_ddp.runtime.display import Outlet
            from jupyter_ddp.runtime.shell import make_shell

            adapt_libraries()
            self._worker_main = sys.modules["__main__"]  # kept: its code still runs
            outlet = Outlet(self._rank, run_dir, self._put, lambda: self._link.is_owner)
            self._shell = make_shell(outlet, self._interrupts, run_dir / "ipython")
        except Exception as error:  # noqa: BLE001 - of packages that are not ours
            return Ending(error, time.time(), step=_STARTING)
        return Ending()

    def _run_cell(self, shell: RankShell, frame: dict[str, Any]) -> Ending:
        prepared = self._prepare(shell, frame)
        if prepared.error is not None:
            return prepared
        magic, generated = frame.get("magic", "%%distributed"), bool(frame.get("returns"))
        source = cell_source(frame.get("n", 0), magic, frame["source"], generated=generated)
        device = own_device(self._local_rank, os.environ)
        self._put(RankEvent(state="running", device=device, time=time.time()))
        outcome = shell.run(frame["source"], source, behind=1)
        return Ending(outcome.error, outcome.time, source, value=outcome.value)

    def _prepare(self, shell: RankShell, frame: dict[str, Any]) -> Ending:
        """Do what comes before the cell."""
        setup = frame.get("setup") or ""
        source, step = setup_source(setup), "at the rank's start"
        try:
            _enter(frame)
            step = "in the setup code"
            if setup and (error := shell.run(setup, source).error) is not None:
                raise error
            step = "while the notebook's variables were loaded"
            if frame.get("payload"):
                payload, frame["payload"] = frame["payload"], None
                self._load(shell, payload)
            step = "in init_process_group"
            if frame.get("init_process_group"):
                group.initialise(frame["init_process_group"])
        except BaseException as error:  # noqa: BLE001 - whatever it is, it ends the rank
            return Ending(error, time.time(), source, step)
        return Ending()

    def _load(self, shell: RankShell, payload: int) -> None:
        from jupyter_ddp.values import read_payload

        loaded = read_payload(payload, self._local_rank, main=shell.user_ns)
        shell.user_ns.update(loaded.namespace)
        for note in loaded.notes:
            self._put(NoteEvent(text=note, time=time.time()))

    def _save(self, shell: RankShell, frame: dict[str, Any], ending: Ending, *, must_exist: bool) -> Ending:
        from jupyter_ddp.runtime.pull import Saver

        saver = Saver(Path(frame["run_dir"]), self._rank, self._put, shell.user_ns)
        saver.save(frame.get("pull") or [], must_exist=must_exist)
        if ending.value is not None:
            (saver.save_returned if frame.get("returns") else saver.save_last)(ending.value)
        return Ending()

    def _tell(self, ending: Ending) -> None:
        """Send an error at once, then again with its traceback."""
        from jupyter_ddp.runtime.failure import describe, with_traceback

        if ending.error is None:
            return
        event = describe(ending.error, ending.source, ending.time)
        if ending.step:
            event = replace(
                event, line=None, where="", source=None, message=f"{ending.step}: {event.message}"
            )
        self._put(event)
        whole = ending.step == _STARTING
        told = with_traceback(event, ending.error, ending.source, whole=whole)
        if told.traceback:
            self._put(told)
        self._link.drain(SEND_LIMIT)

    def _tell_here(self, ending: Ending) -> None:
        """Write a forked child's error to stderr, as Python does: nobody is told by frames."""
        from jupyter_ddp.runtime.failure import describe, is_quiet_end, with_traceback

        if ending.error is None or is_quiet_end(ending.error) or sys.stderr is None:
            return
        event = describe(ending.error, ending.source, ending.time)
        text = with_traceback(event, ending.error, ending.source).traceback
        if isinstance(ending.error, SystemExit):
            text = "" if isinstance(ending.error.code, int) else event.message
        with contextlib.suppress(Exception):
            sys.stderr.write(f"{text}\n" if text else "")

    def _put(self, event: Event) -> None:
        self._streams.put_event(to_json(event))

    def _finish(self) -> int:
        """Clean up after the last cell; the rest is the interpreter's own end, atexit handlers included."""
        start_quiet_thread(self._name_what_stays, "jupyter_ddp-linger")
        if signal.getsignal(signal.SIGINT) == self._interrupts.handle:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        with contextlib.suppress(Exception):
            self._interrupts.end_tasks(END_LIMIT)
        if not group.destroy(END_LIMIT):
            # Its peers are gone and a thread hangs in it: so would the interpreter's end.
            atexit._run_exitfuncs()  # noqa: SLF001
            self._streams.sizes()
            os._exit(self._code)
        return self._code

    def _name_what_stays(self) -> None:
        """Say which threads keep the process, if it is still there after a while: Python waits for them to end."""
        time.sleep(LINGER)
        main = threading.main_thread()
        names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main]
        if names:
            text = f"its cell is over, but these threads keep it alive: {', '.join(names)}"
            self._put(NoteEvent(text=text, time=time.time()))


def _enter(frame: dict[str, Any]) -> None:
    """Make this process look like the kernel's: directory, module path, arguments, environment."""
    for name, value in (frame.get("env") or {}).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.path[:] = frame["sys_path"]
    sys.argv[:] = frame.get("argv", ["<cell>"])
    os.chdir(frame["cwd"])
