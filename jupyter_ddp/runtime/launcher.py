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
from jupyter_ddp.runtime.forking import ForkedLauncher, RankNurse
from jupyter_ddp.runtime.process import MARKER, become_plain, reap
from jupyter_ddp.runtime.record import read_text
from jupyter_ddp.runtime.worker import MASTER, NPROC, NURSERY, SOCKETS
from jupyter_ddp.words import ranks_named, signal_name

if TYPE_CHECKING:
    import selectors
    import socket
    from pathlib import Path

TAIL_LINES: Final = 12
_PORT_TAKEN: Final = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
_MPI_ABORT: Final = re.compile(
    r"MPI_ABORT was invoked on rank (?P<openmpi>\d+)[\s\S]{,400}?[Ee]rrorcode:? (?P<code>-?\d+)"
    r"|^Abort\((?P<mpich_code>-?\d+)\) on node \d+ \(rank (?P<mpich>\d+) in comm [\s\S]{,100}?called MPI_Abort",
    re.MULTILINE,
)
_CURES: Final = (
    (
        # the last two are what Open MPI 5 says when it cannot fork, and when it cannot start a thread
        re.compile(
            r"Resource temporarily unavailable|can't start new thread|odls_default_module\.c|start listen thread"
        ),
        "this user has too many processes or threads: end some, or raise the limit (ulimit -u)",
    ),
    (
        re.compile("Too many open files"),
        "too few files may be open: raise the kernel's limit (ulimit -n)",
    ),
    (
        re.compile("Cannot allocate memory"),
        "there is not enough memory: end what has it, or start fewer ranks",
    ),
)
_NOISE: Final = re.compile(r"^\s*$|^[*=-]{5,}|^W\d{4} |OMP_NUM_THREADS")


class Launcher:
    """Starts this instance's launcher; all children of the agent are collected here, so that its exit code is kept.

    It dies with the agent. Its own output goes to ``launcher-<node>.log`` and is shown only when it failed by itself.

    Args:
        spec: What to run, see `Agent`.
        node: The instance's number.
        run_dir: The run directory.
        zygote: Where a forked torchrun, or forked ranks for mpirun, can be asked for; None has all started as programs.
        selector: What wakes the agent when there is news of those.

    Attributes:
        command: The command line, [] where another instance's mpirun serves this one.
        pid: The process, None before the start and after the end.
        why_exec: Why no rank is forked, or "" while they are.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        node: int,
        run_dir: Path,
        *,
        zygote: socket.socket | None = None,
        selector: selectors.BaseSelector | None = None,
    ) -> None:
        self._spec = spec
        self._node = node
        self._run_dir = run_dir
        self._log_path = run_dir / f"launcher-{node}.log"
        self._try = 0
        self._zygote = zygote
        self._selector = selector
        self._forked: ForkedLauncher | RankNurse | None = None
        self.command: list[str] = []
        self.pid: int | None = None
        self.why_exec = "" if zygote else spec.get("why_exec") or "there is no zygote"

    @property
    def nurse(self) -> int | None:
        """The process that has, in the agent's place, what a forked launcher starts and what its ranks leave."""
        return self._forked.nurse if self._forked is not None else None

    def start(self, attempt: int) -> str | None:
        """Start it with the run's `attempt`-th port; return a sentence if it could not be started.

        One that still runs (another instance could not have the port) is ended first.
        """
        self._end()
        self._try = attempt
        port = self._spec["master_ports"][attempt]
        self.command = self._command(port)
        if not self.command:
            return None
        log = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            env = self._environment(port)
            if self._zygote is None or self._selector is None:
                return self._execute(env, log)
            request = {"env": env, "sys_path": self._spec["cell"]["sys_path"]}
            if self._spec["protocol"] == "torchrun":
                request["arguments"] = self.command[3:]  # without python -m torch.distributed.run
                request["cwd"] = str(self._run_dir)
                self._forked = ForkedLauncher(self._zygote, self._selector, request, log)
                return None
            request["env"] = env | self._spec["early_env"]
            path = f"{os.path.dirname(self._spec['sockets'][0])}/nurse{attempt}"
            self._forked = RankNurse(self._zygote, self._selector, request, path)
            return self._execute({**env, NURSERY: path}, log)
        finally:
            os.close(log)

    def _execute(self, env: dict[str, str], log: int) -> str | None:
        try:
            process = subprocess.Popen(
                self.command,
                env=env,
                cwd=self._run_dir,  # no file of the user's there can shadow a module of the launcher
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=partial(become_plain, os.getpid(), self._spec.get("file_limit")),  # noqa: PLW1509 - the agent has one thread
            )
        except OSError as error:
            return f"{self.command[0]} could not be started: {error}{_cure(str(error))}"
        self.pid = process.pid
        process.returncode = 0  # `watch` collects it, not subprocess
        return None

    @property
    def refused(self) -> bool:
        """Whether something was to be forked and could not be: then `fall_back`."""
        return self._zygote is not None and self._forked is not None and bool(self._forked.refusal)

    def fall_back(self) -> str | None:
        """Start torchrun as a program instead; ranks of mpirun see to it themselves. Return a sentence if it fails."""
        self._zygote = None
        if self._forked is not None:
            self.why_exec = self._forked.refusal
        return self.start(self._try) if isinstance(self._forked, ForkedLauncher) else None

    def watch(self) -> dict[str, Any] | None:
        """Collect children that have ended; return the facts of the launcher's end once, when it comes."""
        ended = reap()
        if isinstance(self._forked, ForkedLauncher):
            code = self._watch_forked(self._forked)
        else:
            code = ended.get(self.pid) if self.pid is not None else None
        if code is None:
            return None
        self.pid = None
        text = read_text(self._log_path)
        return {
            "try": self._try,
            "port_taken": bool(_PORT_TAKEN.search(text)),
            "text": self._explain(code, text),
        }

    def _watch_forked(self, forked: ForkedLauncher) -> int | None:
        """Return the exit code of a forked launcher once, when it has ended."""
        forked.poll()
        self.pid = forked.pid
        return forked.take_code()

    def _end(self) -> None:
        """End a launcher that still runs, and what was not started by it yet."""
        forked, self._forked = self._forked, None
        if forked is not None:
            forked.end()
        if self.pid is not None and not isinstance(forked, ForkedLauncher):
            with contextlib.suppress(OSError):  # it may have just been collected
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        self.pid = None

    def abort_text(self) -> str:
        """Return a sentence if mpirun said that a rank called MPI_Abort, else "": it then ended all ranks itself."""
        found = _MPI_ABORT.search(read_text(self._log_path))
        return f"rank {found.group(1)} called MPI_Abort with error code {found.group(2)}" if found else ""

    def last_words(self, ranks: list[int]) -> str:
        """Return in words why ranks ended that could not tell it, "" if they wrote nothing to the launcher's log."""
        said = _said(read_text(self._log_path), "they")
        return f"{ranks_named(ranks)} could not start{said}" if ranks and said else ""

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
        env[SOCKETS] = os.pathsep.join(spec["sockets"])
        env[NPROC] = str(spec["nproc"])
        env[MASTER] = f"{spec['master_addr']}:{port}"
        return env

    def _explain(self, code: int, text: str) -> str:
        if found := _MPI_ABORT.search(text):
            rank, error = found["openmpi"] or found["mpich"], found["code"] or found["mpich_code"]
            return f"rank {rank} called MPI_Abort with error code {error}"
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
        return f"{self._spec['protocol']} {how} before its ranks had finished{_said(text, 'it')}"


def _said(text: str, who: str) -> str:
    """Return what a launcher's log adds to a sentence: what helps, if it is known, and the log's end."""
    cure = _cure(text)
    lines = [line for line in text.splitlines() if not _NOISE.match(line)][-TAIL_LINES:]
    return f"{cure}; {who} said:\n" + "\n".join(lines) if lines else cure


def _cure(text: str) -> str:
    return next((f": {cure}" for pattern, cure in _CURES if pattern.search(text)), "")
