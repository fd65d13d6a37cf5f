"""The one who decides: runs in agent 0, hears what all agents report, and gives orders that all of them follow.

It knows no sockets and no processes: reports come in through `report`, orders leave through a function, and time is
passed in. A run ends in two phases: when every rank of every instance has ended (`release`), agents flush their logs
and say so; when all have, they leave (`exit`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

LINGER: Final = 0.4
"""Seconds that others have to tell their own error after a first failure, before they are stopped."""
FAILURE_GRACE: Final = 2.0
STOP_GRACE: Final = 5.0
FLUSH_LIMIT: Final = 10.0
END_LIMIT: Final = 15.0
"""Seconds beyond the grace after which ranks whose end no agent reports are given up."""
STACKS_WAIT: Final = 0.5


@dataclass(slots=True)
class Verdict:
    """How the run ends: an outcome of `events.OUTCOMES` and, where the ranks do not tell it, the reason."""

    outcome: str = "succeeded"
    reason: str = ""
    unfinished: list[int] = field(default_factory=list)


class Conductor:
    """Decides for all agents of a run.

    Reports (``op``): ``joined`` (node), ``connected`` / ``running`` / ``finished`` / ``ended`` (rank), ``failed`` (rank
    or none; text), ``launcher`` (node, text: it ended before its ranks had; with try and port_taken), ``flushed``
    (node), ``lost`` (node, text), and the clients' ``interrupt``, ``kill``, ``stop``, ``stacks``.
    Orders (``op``): ``launch`` (try), ``begin``, ``interrupt`` (grace), ``kill``, ``abort`` (outcome, reason,
    unfinished, grace), ``stacks``, ``release`` (outcome, reason, unfinished), ``exit``.

    Args:
        nnodes: Number of agents.
        nproc: Ranks of each.
        timeout: Seconds from the moment at which the first rank runs the cell, or None.
        start_timeout: Seconds within which every agent must have joined and every rank connected.
        interrupt_grace: Seconds that a rank which heard an interrupt has for its own clean-up.
        order: Gives an order to all agents, this one included.
        now: The present time (monotonic seconds).
        launch_tries: How many ports there are to launch with.
        hold: Ranks get their cell by the order ``begin``, when all of the run have connected.
    """

    def __init__(  # noqa: PLR0913 - facts of a run, each by its name
        self,
        *,
        nnodes: int,
        nproc: int,
        timeout: float | None,
        start_timeout: float,
        interrupt_grace: float,
        order: Callable[[dict[str, Any]], None],
        now: float,
        launch_tries: int = 3,
        hold: bool = False,
    ) -> None:
        self._hold = hold
        self._order = order
        self._timeout = timeout
        self._grace = interrupt_grace
        self._start_timeout = start_timeout
        self._start_by: float | None = now + start_timeout
        self._tries = launch_tries
        self._try = 0
        self._nodes_missing = set(range(nnodes))
        self._unconnected = set(range(nnodes * nproc))
        self._living = set(range(nnodes * nproc))
        self._unfinished = set(range(nnodes * nproc))
        self._unflushed = set(range(nnodes))
        self._nproc = nproc
        self._deadline: float | None = None
        self._stacks_until: float | None = None
        self._abort_at: float | None = None
        self._end_by: float | None = None
        self._flush_by: float | None = None
        self._verdict: Verdict | None = None
        self._told = False  # a rank has told an exception
        self._launched = False
        self._aborted = False
        self._abort_grace = FAILURE_GRACE
        self._released = False
        self._exited = False

    def report(self, message: dict[str, Any], now: float) -> None:
        """Take in what an agent or a client says. Words that are not known are ignored."""
        handler = getattr(self, f"_on_{message.get('op')}", None)
        if handler is not None:
            handler(message, now)
            self.tick(now)

    def next_at(self) -> float | None:
        """Return the time at which `tick` has something to do even if nobody reports anything."""
        if self._exited:
            return None
        times = [
            self._start_by,
            self._deadline,
            self._stacks_until,
            self._abort_at,
            self._end_by,
            self._flush_by,
        ]
        return min((at for at in times if at is not None), default=None)

    def tick(self, now: float) -> None:
        """Do what the time demands."""
        if self._start_by is not None and now >= self._start_by:
            self._start_by = None
            self._fail(Verdict("lost", self._start_text()), now, linger=0)
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            if self._verdict is None:
                self._stacks_until = now + STACKS_WAIT
                self._order({"op": "stacks"})
        if self._stacks_until is not None and now >= self._stacks_until:
            self._stacks_until = None
            self._fail(Verdict("timeout", f"the time limit of {self._timeout:g} s was up"), now, linger=0)
        if self._abort_at is not None and now >= self._abort_at:
            self._abort(now)
        if self._end_by is not None and now >= self._end_by:
            self._give_up()
        if not self._living and not self._released:
            self._release(now)
        if self._released and not self._exited and (not self._unflushed or now >= (self._flush_by or now)):
            self._exited = True
            self._order({"op": "exit"})

    # what agents report

    def _on_joined(self, message: dict[str, Any], _now: float) -> None:
        self._nodes_missing.discard(message["node"])
        if not self._nodes_missing and not self._launched and self._verdict is None:
            self._launched = True
            self._order({"op": "launch", "try": self._try})

    def _on_connected(self, message: dict[str, Any], _now: float) -> None:
        self._unconnected.discard(message["rank"])
        if not self._unconnected:
            self._start_by = None
            if self._hold:
                self._order({"op": "begin"})

    def _on_running(self, _message: dict[str, Any], now: float) -> None:
        if self._timeout is not None and self._deadline is None and self._verdict is None:
            self._deadline = now + self._timeout

    def _on_finished(self, message: dict[str, Any], _now: float) -> None:
        self._unfinished.discard(message["rank"])

    def _on_ended(self, message: dict[str, Any], _now: float) -> None:
        self._unconnected.discard(message["rank"])
        self._living.discard(message["rank"])
        self._unfinished.discard(message["rank"])

    def _on_failed(self, message: dict[str, Any], now: float) -> None:
        self._told = self._told or bool(message.get("told"))
        self._fail(Verdict("failed", message.get("text", "")), now)

    def _on_launcher(self, message: dict[str, Any], now: float) -> None:
        """A launcher ended while ranks of its instance were living, or before they came."""
        if message.get("try", self._try) < self._try:  # it has been started again already
            return
        nothing_ran = self._unconnected == self._living
        if (
            message.get("port_taken")
            and nothing_ran
            and self._try + 1 < self._tries
            and self._verdict is None
        ):
            self._try += 1
            self._order({"op": "launch", "try": self._try})
            return
        if self._verdict is None or (self._abort_at is not None and not self._told):
            self._verdict = None  # ranks that die of their launcher's death are not the cause
            self._fail(Verdict("lost", message["text"]), now, linger=0)

    def _on_lost(self, message: dict[str, Any], now: float) -> None:
        """An agent is gone, and with it its ranks."""
        node = message["node"]
        self._nodes_missing.discard(node)
        self._unflushed.discard(node)
        ranks = self._ranks_of(node)
        self._living -= ranks
        self._unconnected -= ranks
        if not self._released:
            self._fail(Verdict("lost", message["text"]), now, linger=0)
        self._unfinished -= ranks

    def _on_flushed(self, message: dict[str, Any], _now: float) -> None:
        self._unflushed.discard(message["node"])

    # what clients ask for

    def _on_interrupt(self, _message: dict[str, Any], now: float) -> None:
        if self._released:
            return
        if self._verdict is not None:  # a second one, or the run is ending already
            self._kill(now)
        elif self._unconnected:  # there is nobody yet whose Python could hear it
            self._fail(Verdict("interrupted"), now, linger=0, grace=LINGER)
        else:
            self._deadline = self._stacks_until = None
            self._end_by = now + self._grace + END_LIMIT
            self._verdict = Verdict("interrupted", unfinished=sorted(self._unfinished))
            self._order({"op": "interrupt", "grace": self._grace})

    def _on_kill(self, _message: dict[str, Any], now: float) -> None:
        if not self._released:
            if self._verdict is None:
                self._verdict = Verdict("stopped", "it was killed", sorted(self._unfinished))
            self._kill(now)

    def _on_stop(self, message: dict[str, Any], now: float) -> None:
        grace = float(message.get("grace", STOP_GRACE))
        if self._verdict is None:
            self._fail(Verdict("stopped", message.get("text", "it was stopped")), now, linger=0, grace=grace)
        elif not self._released:  # it is ending already, perhaps slowly: ranks may be cleaning up
            self._abort_grace = grace
            self._abort(now)

    def _on_stacks(self, _message: dict[str, Any], _now: float) -> None:
        if not self._released:
            self._order({"op": "stacks"})

    # decisions

    def _fail(
        self, verdict: Verdict, now: float, *, linger: float = LINGER, grace: float = FAILURE_GRACE
    ) -> None:
        if self._verdict is not None:
            return
        verdict.unfinished = sorted(self._unfinished or self._living)
        self._verdict = verdict
        self._deadline = self._stacks_until = self._start_by = None
        self._abort_grace = grace
        self._abort_at = now + linger
        if not linger:
            self._abort(now)

    def _abort(self, now: float) -> None:
        """Have all ranks ended, with some grace. Once."""
        self._abort_at = None
        if self._aborted or self._verdict is None:
            return
        self._aborted = True
        self._let_go_of_missing()
        self._end_by = now + self._abort_grace + END_LIMIT
        self._order({"op": "abort", "grace": self._abort_grace, **self._verdict_fields()})

    def _kill(self, now: float) -> None:
        self._start_by = self._deadline = self._stacks_until = self._abort_at = None
        self._aborted = True
        self._let_go_of_missing()
        self._end_by = now + END_LIMIT
        self._order({"op": "kill"})

    def _give_up(self) -> None:
        """Some agent owes the end of its ranks, long after everything was to be killed."""
        verdict = self._verdict or Verdict()
        owed = f"{_listed('rank', self._living)} could not be ended"
        verdict.reason = f"{verdict.reason}; {owed}" if verdict.reason else owed
        self._living.clear()

    def _let_go_of_missing(self) -> None:
        """Nobody will ever tell that the ranks of agents that have not joined have ended."""
        for node in self._nodes_missing:
            self._living -= self._ranks_of(node)
            self._unflushed.discard(node)

    def _ranks_of(self, node: int) -> set[int]:
        return set(range(node * self._nproc, (node + 1) * self._nproc))

    def _release(self, now: float) -> None:
        self._released = True
        self._abort_at = None
        self._start_by = self._deadline = self._stacks_until = self._end_by = None
        self._flush_by = now + FLUSH_LIMIT
        self._verdict = self._verdict or Verdict()
        self._order({"op": "release", **self._verdict_fields()})

    def _verdict_fields(self) -> dict[str, Any]:
        verdict = self._verdict or Verdict()
        return {"outcome": verdict.outcome, "reason": verdict.reason, "unfinished": verdict.unfinished}

    def _start_text(self) -> str:
        within = f"within {self._start_timeout:g} s"
        if self._nodes_missing:
            return f"{_listed('instance', self._nodes_missing)} did not join {within}"
        return f"{_listed('rank', self._unconnected)} did not start {within}"


def _listed(noun: str, numbers: set[int]) -> str:
    names = ", ".join(str(number) for number in sorted(numbers))
    return f"{noun} {names}" if len(numbers) == 1 else f"{noun}s {names}"
