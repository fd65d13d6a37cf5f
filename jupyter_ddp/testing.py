"""A backend without processes, for tests: yours of what you build on this package, and ours."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from jupyter_ddp import backends
from jupyter_ddp.events import Event, RunEvent, encode
from jupyter_ddp.runtime.record import log_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jupyter_ddp.backends import Problem
    from jupyter_ddp.cell import Program
    from jupyter_ddp.config import LaunchConfig
    from jupyter_ddp.rundir import RunDirectory

NAME = "scripted"


class ScriptedBackend:
    """Plays events instead of running anything.

    Events are numbered here; `attempt`, `node`, `seq` of what you pass are not looked at, except the node. A run ends
    with the script: an ``ended`` of outcome ``succeeded`` is added for every node that has none.

    Attributes:
        name: ``scripted``, the name for ``--backend`` inside `installed`.
        started: The configurations and programs of the runs that were started.
        commands: What was sent to the runs: ``interrupt``, ``kill``, ``stop``, ``stacks``.
    """

    name = NAME

    def __init__(self, events: Sequence[Event] = (), *, problems: Sequence[Problem] = ()) -> None:
        self._events = list(events)
        self._problems = list(problems)
        self.started: list[tuple[LaunchConfig, Program]] = []
        self.commands: list[str] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[ScriptedBackend]:
        """Make this the backend ``scripted`` as long as the context is entered."""
        backends.register(NAME, lambda: self)
        try:
            yield self
        finally:
            backends.register(NAME, None)

    def check(self, config: LaunchConfig) -> list[Problem]:
        """Return the problems that were given."""
        del config
        return self._problems

    def resolve(self, config: LaunchConfig) -> LaunchConfig:
        """Return the configuration; ``auto`` is two ranks."""
        return config if isinstance(config.nproc_per_node, int) else config.replace(nproc_per_node=2)

    def plan(self, config: LaunchConfig, program: Program) -> str:
        """Return a line that says what would be played."""
        del config, program
        return f"{len(self._events)} scripted events"

    def start(self, config: LaunchConfig, program: Program, rundir: RunDirectory) -> ScriptedJob:
        """Write all events into the run directory."""
        self.started.append((config, program))
        attempt = rundir.facts()["attempt"]
        for node in range(config.instance_count):
            events = [event for event in self._events if event.node == node]
            if not any(isinstance(event, RunEvent) and event.phase == "ended" for event in events):
                events.append(RunEvent(node=node, phase="ended", outcome="succeeded"))
            numbered = [dataclasses.replace(e, attempt=attempt, seq=n) for n, e in enumerate(events, 1)]
            log_path(rundir.path, node).write_bytes(b"".join(map(encode, numbered)))
        return ScriptedJob(self)

    def attach(self, rundir: RunDirectory) -> ScriptedJob:
        """Return a job that is over."""
        del rundir
        return ScriptedJob(self)


class ScriptedJob:
    """The job of a `ScriptedBackend`: over from the start."""

    def __init__(self, backend: ScriptedBackend) -> None:
        self._backend = backend

    def poll(self) -> str | None:
        """Return how it ended."""
        return "the script is over"

    def send(self, command: str) -> bool:
        """Note the command."""
        self._backend.commands.append(command)
        return True

    def describe(self) -> str:
        """Return where it runs."""
        return "nowhere (scripted)"

    def fileno(self) -> int | None:
        """Return None: it never rings."""
        return None

    def kill(self) -> None:
        """Note the command."""
        self._backend.commands.append("kill")

    def wait_gone(self) -> None:
        """Do nothing."""

    def close(self, *, over: bool) -> None:
        """Do nothing."""
