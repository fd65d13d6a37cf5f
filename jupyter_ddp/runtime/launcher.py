"""The launcher process of an instance: torchrun or mpirun, started, watched, and explained when it fails."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.launchers import WORKER, mpirun_command, session_environment, torchrun_command
from jupyter_ddp.runtime.process import MARKER, die_with_parent, reap, restore_file_limit
from jupyter_ddp.runtime.record import read_text
from jupyter_ddp.words import signal_name

if TYPE_CHECKING:
    from pathlib import Path

TAIL_LINES: Final = 12
_PORT_TAKEN: Final = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
_MPI_ABORT: Final = re.compile(
    r"MPI_ABORT was invoked on rank (?P<openmpi>\d+)[\s\S]{,400}?[Ee]rrorcode:? (?P<code>-?\d+)"
    r"|^Abort\((?P<mpich_code>-?\d+)\) on node \d+ \(rank (?P<mpich>\d+) in comm [\s\S]{,100}?called MPI_Abort",
    re.MULTILINE,
)
_NOISE: Final = re.compile(r"^\s*$|^[*=-]{5,}|^W\d{4} |OMP_NUM_THREADS")


class Launcher:
    """Starts this instance's launcher; all children of the agent are collected here, so that its exit code is kept.

    It dies with the agent. Its own output goes to ``launcher-<node>.log`` and is shown only when it failed by itself.

    Attributes:
        command: The command line, [] where another instance's mpirun serves this one.
        pid: The process, None before the start and after the end.
    """

    def __init__(self, spec: dict[str, Any], node: int, run_dir: Path) -> None:
        self._spec = spec
        self._node = node
        self._run_dir = run_dir
        self._log_path = run_dir / f"launcher-{node}.log"
        self._try = 0
        self.command: list[str] = []
        self.pid: int | None = None

    def start(self, attempt: int) -> str | None:
        """Start it with the run's `attempt`-th port; return a sentence if it could not be started.

        One that still runs (another instance could not have the port) is ended first.
        """
        if self.pid is not None:
            with contextlib.suppress(OSError):  # it may have just been collected
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            self.pid = None
        self._try = attempt
        port = self._spec["master_ports"][attempt]
        self.command = self._command(port)
        if not self.command:
            return None
        become = partial(_become_launcher, os.getpid(), self._spec.get("file_limit"))
        log = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            process = subprocess.Popen(
                self.command,
                env=self._environment(port),
                cwd=self._run_dir,  # no file of the user's there can shadow a module of the launcher
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=become,  # noqa: PLW1509 - the agent has one thread
            )
        except OSError as error:
            return f"{self.command[0]} could not be started: {error}"
        finally:
            os.close(log)
        self.pid = process.pid
        process.returncode = 0  # `watch` collects it, not subprocess
        return None

    def watch(self) -> dict[str, Any] | None:
        """Collect children that have ended; return the facts of the launcher's end once, when it comes."""
        ended = reap()
        if self.pid is None or self.pid not in ended:
            return None
        code = ended[self.pid]
        self.pid = None
        text = read_text(self._log_path)
        return {
            "try": self._try,
            "port_taken": bool(_PORT_TAKEN.search(text)),
            "text": self._explain(code, text),
        }

    def abort_text(self) -> str:
        """Return a sentence if mpirun said that a rank called MPI_Abort, else "": it then ended all ranks itself."""
        found = _MPI_ABORT.search(read_text(self._log_path))
        return f"rank {found.group(1)} called MPI_Abort with error code {found.group(2)}" if found else ""

    def _command(self, port: int) -> list[str]:
        spec = self._spec
        if spec["protocol"] == "torchrun":
            return torchrun_command(
                spec["python"],
                nnodes=spec["nnodes"],
                node=self._node,
                nproc=spec["nproc"],
                master_addr=spec["master_addr"],
                master_port=port,
                log_dir=str(self._run_dir / f"torchrun-{self._node}"),
            )
        if self._node != 0:
            return []
        hosts = [("localhost", spec["world_size"])]  # simulated instances share one host
        return mpirun_command(
            spec["mpirun"], spec["mpi"], hosts=hosts, program=[spec["python"], "-m", WORKER]
        )

    def _environment(self, port: int) -> dict[str, str]:
        spec = self._spec
        env = dict(spec["env"])
        if spec["protocol"] == "torchrun":
            env.update(spec["node_env"][self._node])
        else:
            env = session_environment(spec["mpi"], os.path.dirname(spec["sockets"][0])) | env
        env[MARKER] = spec["run_id"]
        env["JUPYTER_DDP_SOCKETS"] = os.pathsep.join(spec["sockets"])
        env["JUPYTER_DDP_NPROC"] = str(spec["nproc"])
        env["JUPYTER_DDP_MASTER"] = f"{spec['master_addr']}:{port}"
        return env

    def _explain(self, code: int, text: str) -> str:
        if found := _MPI_ABORT.search(text):
            rank, error = found["openmpi"] or found["mpich"], found["code"] or found["mpich_code"]
            return f"rank {rank} called MPI_Abort with error code {error}"
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
        lines = [line for line in text.splitlines() if not _NOISE.match(line)][-TAIL_LINES:]
        said = "; it said:\n" + "\n".join(lines) if lines else ""
        return f"{self._spec['protocol']} {how} before its ranks had finished{said}"


def _become_launcher(agent: int, file_limit: int | None) -> None:
    """Between fork and exec: die with the agent, and be as a process that the user's shell starts."""
    die_with_parent(agent)
    restore_file_limit(file_limit)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
