"""What a run's log tells, written as a test would tell it: numbered events, offsets counted, folded into a view."""

from __future__ import annotations

from jupyter_ddp.events import (
    DisplayEvent,
    ErrorEvent,
    NoteEvent,
    OutEvent,
    RankEvent,
    RunEvent,
    StacksEvent,
    from_json,
    to_json,
)
from jupyter_ddp.view import fold, new_view

T0 = 1_700_000_000.0


class Story:
    """One run. Times are seconds after its creation; ``events`` has all that was told."""

    def __init__(self, world_size=2, *, nnodes=1, log_dir="/runs/abcd1234", output_cap=262_144, **facts):
        self.facts = {
            "id": "abcd1234",
            "created": T0,
            "nnodes": nnodes,
            "nproc": world_size // nnodes,
            "world_size": world_size,
            "backend": "local",
            "protocol": "torchrun",
            "config": {},
            "source": f"%%distributed -p {world_size}\nprint('hello')",
            "kernel_id": "kernel-1",
            "cell_id": "cell-1",
            **facts,
        }
        self.view = new_view(self.facts, log_dir=log_dir, output_cap=output_cap)
        self.events = []
        self.attempt = "a1"
        self._now = T0
        self._offsets = {}

    def at(self, seconds):
        self._now = T0 + seconds
        return self

    def tell(self, cls, **values):
        event = cls(attempt=self.attempt, seq=len(self.events) + 1, **{"time": self._now, **values})
        assert from_json(to_json(event) | {"unfinished": []}) is not None
        self.events.append(event)
        fold(self.view, event)
        return self

    def run(self, phase, outcome=None, **values):
        return self.tell(RunEvent, phase=phase, outcome=outcome, **values)

    def rank(self, rank, state, **values):
        return self.tell(RankEvent, rank=rank, state=state, **values)

    def out(self, rank, text, stream="stdout", **values):
        key = (self.attempt, rank, stream)
        offset = self._offsets.get(key, 0)
        length = len(text.encode())
        self._offsets[key] = offset + length
        return self.tell(
            OutEvent, rank=rank, stream=stream, offset=offset, length=length, text=text, **values
        )

    def show(self, rank, data, action="display", **values):
        data = {"text/plain": data} if isinstance(data, str) else data
        return self.tell(DisplayEvent, rank=rank, action=action, data=data, **values)

    def error(self, rank, kind, message, **values):
        return self.tell(ErrorEvent, rank=rank, type=kind, message=message, **values)

    def note(self, text, rank=None, level="info"):
        return self.tell(NoteEvent, rank=rank, text=text, level=level)

    def stacks(self, rank, text):
        return self.tell(StacksEvent, rank=rank, text=text)

    @property
    def ranks(self):
        return range(self.facts["world_size"])

    def begin(self):
        """All ranks run the cell after one second."""
        self.at(0.1).run("starting")
        for rank in self.ranks:
            self.at(0.5).rank(rank, "started", pid=100 + rank, host="box", local_rank=rank)
        self.at(1).run("running")
        for rank in self.ranks:
            self.rank(rank, "running")
        return self

    def succeed(self, after=3.0):
        self.at(after)
        for rank in self.ranks:
            self.rank(rank, "finished", ok=True)
        for rank in self.ranks:
            self.rank(rank, "ended", exit_code=0)
        return self.run("ended", "succeeded")

    def fail(self, after=3.0, *, by_run=()):
        """End the ranks in ``by_run`` by SIGTERM, then the run."""
        self.at(after).run("ending", "failed")
        for rank in by_run:
            self.rank(rank, "ended", signal=15, by_run=True)
        return self.run("ended", "failed")

    @property
    def texts(self):
        """The kept lines, as (rank, text)."""
        return [(line.rank, line.text) for line in self.view.lines]
