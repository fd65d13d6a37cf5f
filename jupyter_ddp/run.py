"""A run as its user holds it: started here or found on disk, followed, stopped, asked for its result."""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp import result as results
from jupyter_ddp.bundles import load_bundle
from jupyter_ddp.config import parse_pull
from jupyter_ddp.errors import UsageError, ValueTravelError
from jupyter_ddp.events import DisplayEvent, Event, RunEvent, ValueEvent
from jupyter_ddp.logend import log_state
from jupyter_ddp.render import failure_text
from jupyter_ddp.rundir import EventReader, RunDirectory
from jupyter_ddp.values import load_value
from jupyter_ddp.view import RunView, fold, new_view
from jupyter_ddp.view.model import OUTPUT_CAP

if TYPE_CHECKING:
    from jupyter_ddp.backends import Job
    from jupyter_ddp.result import DistributedResult

POLL: Final = 0.05
"""Seconds between two looks at a run that cannot ring."""


class Run:
    """One run. Made by `jupyter_ddp.launch`, the magics, `jupyter_ddp.runs` and `jupyter_ddp.attach`.

    A run exists on disk: this object reads it, and may be thrown away and made anew at any time. It is not safe to
    use one object from several threads.

    Attributes:
        view: What is known of the run so far.
    """

    def __init__(
        self, rundir: RunDirectory, job: Job | None = None, *, output_cap: int | None = None
    ) -> None:
        self._rundir = rundir
        self._job = job
        self._reader = EventReader(rundir)
        facts = rundir.facts()
        self.view: RunView = new_view(facts, log_dir=str(rundir.path), output_cap=output_cap or OUTPUT_CAP)
        self._nodes_left = set(range(rundir.nodes()))
        self._salvaged = False
        self._values: dict[tuple[int, str], ValueEvent] = {}
        self._pulled: tuple[dict[str, Any], tuple[str, ...]] | None = None

    def __repr__(self) -> str:
        name = f" {self.name}" if self.name else ""
        return f"<Run {self.id}{name}: {log_state(self._rundir).word}>"

    @property
    def id(self) -> str:
        """The run's id."""
        return self._rundir.run_id

    @property
    def name(self) -> str | None:
        """The label that the run was given."""
        name = self._rundir.facts().get("name")
        return str(name) if name else None

    @property
    def log_dir(self) -> str:
        """The run directory."""
        return str(self._rundir.path)

    @property
    def over(self) -> bool:
        """Whether everything that there will ever be of this run has been read."""
        return not self._nodes_left

    @property
    def status(self) -> str:
        """``queued``, ``starting`` … ``running``, or how it ended: an outcome of `events.OUTCOMES`."""
        while self.pump(0):
            pass
        return self.view.outcome or self.view.phase if self.over else self.view.phase

    def pump(self, timeout: float, wake: int | None = None) -> list[Event]:
        """Return the events that have come, already folded into `view`; wait for them at most `timeout` seconds.

        Args:
            timeout: Seconds; 0 only looks.
            wake: A descriptor that ends the waiting when it becomes readable.
        """
        ended = self._ended()  # also takes in the ring: what comes after it is told by another one
        events = self._take()
        if events or self.over:
            return events
        if ended:
            return self._last_events(ended)
        bell = self._job.fileno() if self._job is not None else None
        if timeout > 0:
            waiting = select.poll()
            for descriptor in (bell, wake):
                if descriptor is not None:
                    waiting.register(descriptor, select.POLLIN)
            waiting.poll(1000 * (timeout if bell is not None else min(timeout, POLL)))
        return self._take()

    def result(self, timeout: float | None = None) -> DistributedResult:
        """Wait until the run is over and return its result, also of a failed run.

        Raises:
            TimeoutError: It is not over after `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not self.over:
            wait = 0.5 if end is None else min(0.5, max(0.0, end - time.monotonic()))
            if not self.pump(wait) and end is not None and time.monotonic() >= end and not self.over:
                raise TimeoutError(f"run {self.id} is not over after {timeout:g} s")
        return self._build()

    def pull(self, what: str) -> Any:  # noqa: ANN401 - the user's own value
        """Return a value that ranks left: ``"loss"`` (rank 0), ``"loss@3"``, ``"loss@all"`` (a list by rank).

        What comes back is named at launch (``--pull``).

        Raises:
            UsageError: `what` is not one name.
            ValueTravelError: It was not named, the run is not that far, or the value could not travel.
        """
        while self.pump(0):
            pass
        pulls = parse_pull(what)
        if len(pulls) != 1:
            raise UsageError(f"pull takes one name, as 'loss' or 'loss@all', not {what!r}.")
        (pull,) = pulls
        if pull.rank == "all":
            return [self._load(pull.name, rank) for rank in range(self.view.world_size)]
        return self._load(pull.name, int(pull.rank))

    def pulled(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the values that were named at launch, by name, and a sentence for each that did not come.

        They are loaded once. Of a name that was pulled in several ways (``loss,loss@all``) the last one counts.
        """
        if self._pulled is None:
            values: dict[str, Any] = {}
            notes = []
            for pull in parse_pull(self._rundir.facts().get("config", {}).get("pull", [])):
                try:
                    values[pull.name] = self.pull(str(pull))
                except ValueTravelError as error:
                    if self.view.ok and not self._told(pull.name):  # a failed run has more to say
                        notes.append(str(error))
            self._pulled = values, tuple(notes)
        return self._pulled

    def _told(self, name: str) -> bool:
        """Tell whether a rank has said itself why a value did not come."""
        return any(
            event.note for (_, told), event in self._values.items() if told == name and event.file is None
        )

    def interrupt(self) -> bool:
        """Interrupt the ranks as ■ does; tell whether the run heard."""
        return self._send("interrupt")

    def stop(self) -> bool:
        """End the run: SIGTERM to the ranks, SIGKILL five seconds later; tell whether the run heard."""
        return self._send("stop")

    def kill(self) -> bool:
        """End every process of the run at once."""
        return self._send("kill")

    def kill_from_here(self) -> None:
        """End every process of the run without asking its agents: they did not answer."""
        if self._job is not None:
            self._job.kill()

    def close(self) -> None:
        """Let go of the run. One that this object has started and that is not over ends."""
        if self._job is not None:
            self._job.close(over=self.over)

    def _send(self, command: str) -> bool:
        if self._job is None:
            from jupyter_ddp.backends import get_backend

            backend = get_backend(str(self._rundir.facts().get("backend", "local")))
            return backend.attach(self._rundir).send(command)
        return self._job.send(command)

    def _ended(self) -> str | None:
        if self._job is not None:
            return self._job.poll()
        return None if self._rundir.is_alive() else "the agents have ended"

    def _take(self) -> list[Event]:
        events = [
            load_bundle(event, self._rundir.path) if isinstance(event, DisplayEvent) else event
            for event in self._reader.read()
        ]
        for event in events:
            self.view = fold(self.view, event)
            if isinstance(event, ValueEvent) and event.rank is not None:
                self._values[event.rank, event.name] = event
            elif isinstance(event, RunEvent) and event.phase == "ended":
                self._nodes_left.discard(event.node)
        return events

    def _last_events(self, ended: str) -> list[Event]:
        """The run is dead and its log has no end: complete it."""
        if self._salvaged:
            return self._unwritten_end()
        self._salvaged = True
        if self._job is not None:
            self._job.wait_gone()
        words = self._rundir.last_words()
        self._rundir.salvage(
            f"{ended}; the last that was heard:\n{words}" if words else f"{ended}: they were killed"
        )
        return self._take()

    def _unwritten_end(self) -> list[Event]:
        """The log has no end, nor can it be completed: end the view at least."""
        reason = (
            f"the end of the run could not be written to {self._rundir.path}: what ranks did last is unknown"
        )
        if not os.access(self._rundir.path, os.F_OK):
            reason = (
                f"the run directory {self._rundir.path} was removed: what ranks did after that is unknown"
            )
        attempt = self.view.facts.get("attempt", "")
        ends: list[Event] = [
            RunEvent(
                attempt=attempt, node=node, phase="ended", outcome="lost", reason=reason, time=time.time()
            )
            for node in sorted(self._nodes_left)
        ]
        for event in ends:
            self.view = fold(self.view, event)
        self._nodes_left.clear()
        return ends

    def _load(self, name: str, rank: int) -> Any:  # noqa: ANN401
        event = self._values.get((rank, name))
        if event is None:
            raise ValueTravelError(
                f"rank {rank} left no {name!r}: name it at launch with --pull {name}@{rank}"
            )
        if event.file is None:
            raise ValueTravelError(f"{name!r} of rank {rank} did not travel: {event.note}")
        return load_value(self._rundir.path / event.file, self._rundir.path)

    def _build(self) -> DistributedResult:
        return results.build(
            self.view,
            self._rundir.path,
            pulled=self.pulled()[0],
            values=self._last_values(),
            files=self._rundir.kept_files(),
            message=failure_text(self.view),
        )

    def _last_values(self) -> dict[int, Any]:
        """Return the values of the cell's last expression by rank, as far as they travelled."""
        values = {}
        for rank in [rank for rank, name in self._values if name == ""]:
            with contextlib.suppress(ValueTravelError):
                values[rank] = self._load("", rank)
        return values
