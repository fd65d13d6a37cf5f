"""The ranks of one instance, as its agent sees them: what they say and print becomes events, their end is noticed.

What a rank prints is read from its files, what else it tells comes as frames. Both are brought into one order by the
sizes of the files that each frame carries.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.events import (
    DisplayEvent,
    ErrorEvent,
    NoteEvent,
    RankEvent,
    RunEvent,
    StacksEvent,
    ValueEvent,
)
from jupyter_ddp.runtime.child import LOST
from jupyter_ddp.runtime.rankrecord import RankRecord
from jupyter_ddp.runtime.record import TURN, read_text, stream_path
from jupyter_ddp.runtime.room import Room
from jupyter_ddp.runtime.stacks import clean
from jupyter_ddp.runtime.streams import STACKS_SIGNAL

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jupyter_ddp.runtime.links import Channel
    from jupyter_ddp.runtime.record import LogWriter

HOT: Final = 0.004
"""Seconds between two looks at a rank that is printing."""
COOL: Final = 0.05
"""Seconds between two looks at all others."""
_TOLD_BY_RANKS: Final = {
    cls.kind: cls for cls in (DisplayEvent, ErrorEvent, NoteEvent, RankEvent, ValueEvent)
}


def holds_cells(spec: dict[str, Any]) -> bool:
    """Tell whether no rank may run the cell before all have connected.

    A torchrun that forks ranks has the store in a thread. A rank that connects to the store keeps that thread busy, and
    a lock of the C library that it has at the moment of the next fork (getnameinfo's was seen) stays locked for ever
    in that child. Ranks that have all been forked may do what they want.
    """
    return spec["protocol"] == "torchrun" and spec.get("why_exec") == ""


class Ranks:
    """All ranks of one instance.

    Args:
        spec: What to run, see `Agent`.
        node: The instance's number.
        run_dir: The run directory.
        log: Where events go.
        report: Tells agent 0: ``report(op=…, rank=…)``.
        read: Reads what has arrived on a channel.

    Attributes:
        ending: The run has begun to end: ranks that go now do not go by themselves.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        node: int,
        run_dir: Path,
        log: LogWriter,
        *,
        report: Callable[..., None],
        read: Callable[[Channel], None],
    ) -> None:
        first = node * spec["nproc"]
        self._records = {rank: RankRecord(run_dir, rank) for rank in range(first, first + spec["nproc"])}
        self._cell = {**spec["cell"], "env": {**spec["cell"].get("env", {}), **spec["node_env"][node]}}
        self._cell_lines = [spec["cell"]["magic"], *spec["cell"]["source"].splitlines()]
        self._node = node
        self._run_dir = run_dir
        self._log = log
        self._report = report
        self._read = read
        self._hot: dict[int, float] = {}
        self._next_sweep = 0.0
        self._running = False
        self._hold = holds_cells(spec)
        self._room = room = Room(spec["run_bytes"] // spec["nnodes"])
        log.make_room = lambda: room.squeeze(self._streams())
        self._payload: int | None = spec["payload"]
        self._without_cell = len(self._records)
        self.ending = False

    # connections

    def hello(self, channel: Channel, message: dict[str, Any]) -> bool:
        """Take in a rank or a stub; tell whether it is one of ours that has not come yet."""
        record = self._records.get(message["rank"])
        if record is None or (record.stub if message["role"] == "stub" else record.channel) is not None:
            return False
        channel.rank = record.rank
        if message["role"] == "stub":
            record.stub = channel
            return True
        record.channel, record.pid = channel, int(message["pid"])
        facts = {name: message.get(name) for name in ("pid", "host", "local_rank")}
        self._log.add(RankEvent, rank=record.rank, state="started", **facts)
        if not self._hold:
            self._send_cell(channel)
        self._report(op="connected", rank=record.rank)
        return True

    def begin(self) -> None:
        """All ranks of the run are there: let those that were held back run the cell."""
        self._hold = False
        for record in self._records.values():
            if record.channel is not None:
                self._send_cell(record.channel)

    def _send_cell(self, channel: Channel) -> None:
        has_payload = self._payload is not None
        channel.send({"op": "cell", "n": 0, "payload": has_payload, **self._cell}, self._payload)
        self._without_cell -= 1
        if self._payload is not None and not self._without_cell:
            os.close(self._payload)  # memory that only the ranks hold goes with them
            self._payload = None

    def receive(self, channel: Channel, message: dict[str, Any]) -> None:
        """Take in a message of a rank or of a stub."""
        record = self._records[channel.rank if channel.rank is not None else -1]
        if channel.role == "stub":
            if message.get("op") == "exit":
                if message.get("lost") and not self.ending:
                    self._report(op="launcher", node=self._node, text=LOST)
                self._end(record, message.get("code"), message.get("signal"), message["time"])
            return
        op, sizes = message.get("op"), message.get("o")
        if op == "mark":
            self._turn(record, sizes or [0, 0])
            return
        if sizes:
            record.drain(self._log, sizes)
        if op == "full":
            self._log.full = True
        elif op == "heard":
            record.heard = True
            self._log.add(RankEvent, rank=record.rank, state="heard")
        elif op == "done":
            record.finished = bool(message["ok"])
            self._log.add(RankEvent, rank=record.rank, state="finished", ok=record.finished)
            self._report(op="finished", rank=record.rank)
        elif op == "event":
            self._take_event(record, dict(message["event"]))

    def _turn(self, record: RankRecord, sizes: list[int]) -> None:
        """The rank turns to its other stream. Turns that come too fast are not told apart: the log would never end."""
        now = time.monotonic()
        if record.may_turn(now):
            record.drain(self._log, sizes)
            self._hot[record.rank] = 0.0
        else:
            self._hot.setdefault(record.rank, now + HOT)

    def release(self) -> None:
        """Let the stubs exit, and so the launcher."""
        for record in self._records.values():
            if record.stub is not None:
                record.stub.send({"op": "release"})

    def _take_event(self, record: RankRecord, event: dict[str, Any]) -> None:
        kind = _TOLD_BY_RANKS.get(event.pop("kind", ""))
        at = event.pop("time", None)
        if kind is None or (kind is DisplayEvent and self._log.full):
            return
        try:
            self._log.add(kind, rank=record.rank, at=at, **event)
        except TypeError:
            text = f"a {kind.kind} event was not understood"
            self._log.add(NoteEvent, rank=record.rank, level="warning", text=text)
            return
        if kind is RankEvent and event.get("state") == "running":
            if not self._running:
                self._running = True
                self._log.add(RunEvent, phase="running", at=at)
            self._report(op="running", rank=record.rank)
        elif kind is ErrorEvent and not record.failed:
            record.failed = True
            self._report(op="failed", rank=record.rank, told=True)

    # text

    def ring(self, rank: int) -> None:
        """A rank has printed: look at once, and soon again."""
        if rank in self._records:
            self._drain(self._records[rank])
            self._hot[rank] = time.monotonic() + HOT

    def next_at(self, now: float) -> float:
        """Return when to look the next time."""
        return min([now + COOL, *self._hot.values()])

    def look(self, now: float) -> None:
        """Move new text of ranks that are due into the log, and notice ranks that are gone without a word."""
        for rank in [rank for rank, at in self._hot.items() if at <= now]:
            if self._drain(self._records[rank]):
                self._hot[rank] = now + HOT
            else:
                del self._hot[rank]
        if now < self._next_sweep:
            return
        self._next_sweep = now + COOL
        for record in self._records.values():
            if record.vanished():
                self._end(record, None, signal.SIGKILL if record.pid else None, time.time())
            elif record.rank not in self._hot and self._drain(record):
                self._hot[record.rank] = now + HOT
        self._make_room()

    def _make_room(self) -> None:
        if text := self._room.make(self._streams()):
            self._log.lean = True
            self._log.add(NoteEvent, level="warning", text=text)

    def _streams(self) -> list[tuple[Path, int]]:
        tails = [tail for record in self._records.values() for tail in record.tails]
        return [(tail.path, tail.offset) for tail in tails]

    def _drain(self, record: RankRecord) -> bool:
        """Move a turn's worth of new text into the log, but never past a frame that comes before it."""
        sizes = record.sizes()
        self._read_frames(record)
        upto = [min(size, tail.offset + TURN) for size, tail in zip(sizes, record.tails, strict=True)]
        return record.drain(self._log, upto)

    def _read_frames(self, record: RankRecord) -> None:
        if record.channel is not None:
            self._read(record.channel)

    # ends

    def interrupt(self) -> None:
        """SIGINT to every rank whose cell is not over."""
        for record in self._records.values():
            if record.finished is None:
                record.kill(signal.SIGINT)

    def signal_unheard(self, signum: signal.Signals) -> None:
        """Signal the ranks whose Python has not heard the interrupt: they are stuck in C, or ignore it."""
        for record in self._records.values():
            if not record.heard and record.finished is None:
                record.kill(signum)

    def signal_finished(self, signum: signal.Signals) -> None:
        """Signal the ranks whose cell is over and which still do not exit: a thread of the user's holds them."""
        for record in self._records.values():
            if record.finished is not None:
                record.kill(signum)

    def terminate(self) -> bool:
        """SIGTERM to every rank whose cell is not over; tell whether all living ranks could be asked."""
        self.ending = True
        living = [record for record in self._records.values() if not record.ended]
        for record in living:
            if record.finished is None:
                record.kill(signal.SIGTERM)
        return all(record.pid is not None for record in living)

    def all_killed(self) -> None:
        """Take note that every process of the run was killed; what the ranks had said and written is still read."""
        self.ending = True
        for record in self._records.values():
            record.signalled = True
            self._end(record, None, signal.SIGKILL if record.pid else None, time.time())

    def finish(self) -> None:
        """Take in the last of what was written for the ranks: nobody is left who could write."""
        for record in self._records.values():
            record.finish(self._log)

    def _end(self, record: RankRecord, code: int | None, signum: int | None, at: float) -> None:
        if record.ended:
            return
        self._read_frames(record)
        if record.ended:  # the frames told it
            return
        record.drain(self._log, record.sizes())
        record.ended = True
        record.mute = not record.signalled and not stream_path(self._run_dir, record.rank, "stdout").exists()
        self._hot.pop(record.rank, None)
        if signum is not None:
            self._add_stack(record.rank, read_text(self._run_dir / f"rank{record.rank}.fault"))
        self._log.add(
            RankEvent,
            rank=record.rank,
            at=at,
            state="ended",
            exit_code=code,
            signal=signum,
            by_run=record.signalled,
        )
        if not record.failed and (record.finished is None or (record.finished and (code or signum))):
            record.failed = True
            self._report(op="failed", rank=record.rank)
        self._report(op="ended", rank=record.rank)

    def mute(self) -> list[int]:
        """Return the ranks that ended by themselves before they had streams of their own."""
        return [record.rank for record in self._records.values() if record.mute]

    # stacks

    def ask_for_stacks(self) -> dict[int, int]:
        """Have the ranks write their stacks; return where in their files those will begin.

        Ranks whose cell is over are asked only when there are no others: then it is they who hold the run.
        """
        asked = [record for record in self._records.values() if record.finished is None]
        begin = {}
        for record in asked or self._records.values():
            path = self._run_dir / f"rank{record.rank}.stacks"
            begin[record.rank] = path.stat().st_size if path.exists() else 0
            record.kill(STACKS_SIGNAL)
        return begin

    def add_stacks(self, begin: dict[int, int]) -> None:
        """Log what has come since `ask_for_stacks`."""
        for rank, start in begin.items():
            self._add_stack(rank, read_text(self._run_dir / f"rank{rank}.stacks", start))

    def _add_stack(self, rank: int, text: str) -> None:
        if cleaned := clean(text, self._cell_lines).strip():
            self._log.add(StacksEvent, rank=rank, text=cleaned)
