"""A run on this machine as a process outside of it has it: its guard, its doorbell, and the way to its agents."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.backends._warm import WARM
from jupyter_ddp.errors import LaunchError
from jupyter_ddp.launchers import clean_environment
from jupyter_ddp.runtime.process import kill_all
from jupyter_ddp.runtime.wire import pack

if TYPE_CHECKING:
    from jupyter_ddp.rundir import RunDirectory

SOCKETS_PREFIX: Final = "jddp-"
COMMAND_TIMEOUT: Final = 1.0
END_TIMEOUT: Final = 6.0


class LocalJob:
    """A run on this machine, as its kernel or another process of the same user sees it."""

    def __init__(self, rundir: RunDirectory) -> None:
        self._rundir = rundir
        self._guard: subprocess.Popen[bytes] | None = None
        self._doorbell: int | None = None
        self._rang_out = False

    @classmethod
    def launch(cls, rundir: RunDirectory, spec: dict[str, Any], keep: list[int]) -> LocalJob:
        """Start the guard of a run; it inherits the descriptors `keep`: locks, which it holds, and the payload's."""
        job = cls(rundir)
        read, write = os.pipe()
        env = {**clean_environment(os.environ), "PYTHONUNBUFFERED": "1"}
        if path := spec["env"].get("PYTHONPATH"):
            env["PYTHONPATH"] = path
        log = os.open(rundir.path / "guard.log", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not spec["why_exec"]:
                job._guard = WARM.take(spec["env"] | spec["early_env"], rundir.path, [write, log, *keep])
            job._guard = job._guard or subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "jupyter_ddp.runtime.guard",
                    str(rundir.path),
                    str(os.getpid()),
                ],
                stdin=subprocess.PIPE,
                stdout=write,
                stderr=log,
                cwd=rundir.path,
                env=env,
                pass_fds=keep,
                start_new_session=True,
            )
        except OSError as error:
            os.close(read)
            cures = {
                errno.EMFILE: ": raise the kernel's limit of open files (ulimit -n)",
                errno.EAGAIN: ": this user has too many processes (ulimit -u): end some, or raise the limit",
            }
            raise LaunchError(
                f"the run could not be started: {error}{cures.get(error.errno or 0, '')}"
            ) from error
        finally:
            os.close(write)
            os.close(log)
        os.set_blocking(read, False)
        job._doorbell = read
        return job

    def fileno(self) -> int | None:
        """Return the doorbell's descriptor."""
        return None if self._rang_out else self._doorbell

    def poll(self) -> str | None:
        """Return None while agents live; listens to the doorbell."""
        if self._doorbell is not None and not self._rang_out:
            with contextlib.suppress(BlockingIOError):
                while word := os.read(self._doorbell, 4096):
                    if len(word) < 4096:
                        return None
                self._rang_out = True
        if self._doorbell is not None:
            return "the agents have ended" if self._rang_out else None
        return None if self._rundir.is_alive() else "the agents have ended"

    def wait_gone(self) -> None:
        """Wait until the guard has ended everything (bounded); end it by force if it cannot."""
        if self._guard is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(END_TIMEOUT)
        end = time.monotonic() + END_TIMEOUT
        while self._rundir.is_alive() and time.monotonic() < end:
            kill_all(self._rundir.run_id, self._guard.pid if self._guard else None, collect=False, limit=1.0)
            time.sleep(0.01)
        with contextlib.suppress(OSError, ValueError, LookupError):  # a guard that was killed has left them
            directory = Path(self._sockets()[0]).parent
            if directory.name.startswith(SOCKETS_PREFIX):
                shutil.rmtree(directory, ignore_errors=True)

    def _sockets(self) -> list[str]:
        """Return where the agents listen, by instance; a `ValueError` or `LookupError` when the file does not tell."""
        told = json.loads((self._rundir.path / "agent.json").read_bytes())
        sockets = told["sockets"] if isinstance(told, dict) else ()
        return [path for path in sockets if isinstance(path, str)] if isinstance(sockets, list) else []

    def send(self, command: str) -> bool:
        """Put a command before the agent of instance 0; tell whether there is one that will read it."""
        try:
            path = self._sockets()[0]
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(COMMAND_TIMEOUT)
                connection.connect(path)
                connection.sendall(pack({"op": "hello", "role": "client"}) + pack({"op": command}))
        except (OSError, ValueError, LookupError):
            return False
        return True

    def kill(self) -> None:
        """End every process of the run from here: for an agent that does not answer."""
        kill_all(self._rundir.run_id, self._guard.pid if self._guard else -1, collect=False)

    def describe(self) -> str:
        """Return where it runs."""
        return f"this machine ({socket.gethostname()})"

    def close(self, *, over: bool) -> None:
        """Let go. A run that is not over ends: its guard's pipe is closed. One that is over tidies up by itself."""
        if self._guard is not None and self._guard.stdin is not None and not over:
            self._guard.stdin.close()
        if self._doorbell is not None:
            os.close(self._doorbell)
            self._doorbell = None
            self._rang_out = True
        _Undertaker.bury(self._guard)
        WARM.renew()


class _Undertaker:
    """Collects guards that have ended, so that the kernel keeps no zombies. No thread: done at the next call."""

    _ended: Final[list[subprocess.Popen[bytes]]] = []

    @classmethod
    def bury(cls, guard: subprocess.Popen[bytes] | None) -> None:
        if guard is not None:
            cls._ended.append(guard)
        for process in [process for process in cls._ended if process.poll() is not None]:
            cls._ended.remove(process)
            if process.stdin is not None:
                process.stdin.close()
