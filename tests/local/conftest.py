"""Real runs on this machine, below the notebook: a `Driven` starts one, reads its events and does things to it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_ddp.backends import _machine
from jupyter_ddp.backends.local import LocalBackend
from jupyter_ddp.capture import Payload
from jupyter_ddp.carrying import carry
from jupyter_ddp.cell import Program
from jupyter_ddp.config import LaunchConfig
from jupyter_ddp.events import ErrorEvent, Event, NoteEvent, OutEvent, RankEvent, RunEvent, StacksEvent
from jupyter_ddp.rundir import RUN_BYTES, EventReader, RunStore, new_attempt
from jupyter_ddp.runtime.process import table

LIMIT = 60.0


class Driven:
    """A run that a test drives."""

    def __init__(
        self,
        store: RunStore,
        source: str,
        *,
        payload: Payload | None = None,
        run_bytes: int = RUN_BYTES,
        **fields: object,
    ) -> None:
        backend = LocalBackend()
        config = backend.resolve(LaunchConfig(**{"nproc_per_node": 2, "protocol": "mpirun", **fields}))
        self.rundir = store.create()
        world_size = config.instance_count * config.nproc_per_node
        facts = {
            "id": self.rundir.run_id,
            "attempt": new_attempt(),
            "created": time.time(),
            "backend": "local",
            "protocol": config.protocol,
            "nnodes": config.instance_count,
            "nproc": config.nproc_per_node,
            "world_size": world_size,
            "config": config.to_json(),
            "run_bytes": run_bytes,
        }
        self.rundir.write_json("run.json", facts)
        self.world_size = world_size
        self._protocol = config.protocol
        self.events: list[Event] = []
        self._reader = EventReader(self.rundir)
        if payload is not None:
            carry(payload, self.rundir, by_descriptor=True)
        self.job = backend.start(config, Program(source=source, magic="%%distributed"), self.rundir)

    def until(self, what: Callable[[], object], *, or_over: bool = True) -> None:
        """Read events until something is true, or the run is over."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            self.events += self._reader.read()
            if what():
                return
            if self.job.poll():
                self.events += self._reader.read()
                if or_over or what():
                    return
                break
            select.select([self.job.fileno()], [], [], 0.05)
        raise AssertionError(f"it did not happen in time; events: {self.events[-10:]}")

    def until_running(self) -> None:
        self.until(lambda: len(self.of(RankEvent, state="running")) == self.world_size, or_over=False)

    def until_said(self, word: str) -> None:
        """Wait until all ranks have printed a word."""
        self.until(lambda: all(word in self.text(rank) for rank in range(self.world_size)), or_over=False)

    def end(self) -> RunEvent:
        """Wait until the run is over and nothing of it is left; return its last word."""
        self.until(lambda: False)
        self.job.wait_gone()
        assert self.processes() == []
        self.rundir.salvage("the agent was killed")
        while events := self._reader.read():
            self.events += events
        return self.of(RunEvent, phase="ended")[0]

    def of(self, kind: type, **values: object) -> list:
        return [
            event
            for event in self.events
            if isinstance(event, kind)
            and all(getattr(event, name) == value for name, value in values.items())
        ]

    def text(self, rank: int, stream: str = "stdout") -> str:
        return "".join(event.text or "" for event in self.of(OutEvent, rank=rank, stream=stream))

    def errors(self) -> dict[int, ErrorEvent]:
        return {event.rank: event for event in self.of(ErrorEvent)}

    def ends(self) -> dict[int, RankEvent]:
        return {event.rank: event for event in self.of(RankEvent, state="ended")}

    def notes(self) -> str:
        return "\n".join(event.text for event in self.of(NoteEvent))

    def stacks(self) -> dict[int, str]:
        return {event.rank: event.text for event in self.of(StacksEvent)}

    def pid(self, who: str) -> int:
        """Return the pid of ``guard``, ``agent0``, ``launcher``, ``rank1``, ``stub1``, ``nurse``, ``zygote``."""
        if who == "guard":
            return self.job._guard.pid
        number = int(who[-1]) if who[-1].isdigit() else 0
        if who.startswith("agent"):
            return self.of(RunEvent, phase="starting", node=number)[0].detail["pid"]
        if who.startswith("rank"):
            return self.of(RankEvent, state="started", rank=number)[0].pid
        if who == "launcher":
            return self._parent("stub0")
        if who == "zygote":
            return self._parent("nurse")
        if who == "nurse":
            return self._parent("rank0" if self._protocol == "mpirun" else "launcher")
        return self._nursed_stub(number) if self._nursed() else self._parent(f"rank{number}")

    def _parent(self, who: str) -> int:
        return table(self.rundir.run_id)[self.pid(who)].ppid

    def _nursed(self) -> bool:
        """Whether ranks are not children of the processes that mpirun has started."""
        started = self.of(RunEvent, phase="rendezvous")[-1].detail
        return self._protocol == "mpirun" and started["why_exec"] == ""

    def _nursed_stub(self, rank: int) -> int:
        """Return the process that mpirun has started for a rank that a nurse has forked."""
        for pid, process in table(self.rundir.run_id).items():
            if process.marked and process.name.startswith("python"):
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if f"OMPI_COMM_WORLD_RANK={rank}".encode() in environ:
                    return pid
        raise LookupError(f"no stub of rank {rank}")

    def kill(self, who: str, signum: int = signal.SIGKILL) -> None:
        os.kill(self.pid(who), signum)

    def processes(self) -> list[str]:
        """Return the names of the run's living processes, by its marker."""
        return [process.name for process in table(self.rundir.run_id).values() if process.marked]

    def close(self) -> None:
        self.job.close(over=False)
        with contextlib.suppress(Exception):
            self.job.wait_gone()


@pytest.fixture
def start(tmp_path: Path):
    """Start runs whose processes are gone when the test is over."""
    runs: list[Driven] = []

    def begin(source: str, **fields: object) -> Driven:
        runs.append(Driven(RunStore(tmp_path / "runs"), source, **fields))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.fixture
def use_mpirun(monkeypatch: pytest.MonkeyPatch):
    """Have runs use another mpirun than the one that would be found."""

    def use(path: str, flavour: str) -> None:
        if not Path(path).exists():
            pytest.skip(f"needs {path}: apt-get install openmpi-bin mpich")
        monkeypatch.setattr(_machine, "find_mpirun", lambda: (path, flavour, path))

    return use


@pytest.fixture(params=["mpirun", "torchrun"])
def protocol(request: pytest.FixtureRequest) -> str:
    return request.param
