"""Runs whose words are on disk as agents leave them: in the ranks' files, and in the logs of their instances."""

from __future__ import annotations

from jupyter_ddp.events import DisplayEvent, OutEvent, encode
from jupyter_ddp.rundir import RunStore
from jupyter_ddp.view import fold, new_view


class Spoken:
    """A run of several instances, one rank each, whose words are in its files and logs."""

    def __init__(self, root, nnodes):
        self.run = RunStore(root).create()
        facts = {"id": self.run.run_id, "nnodes": nnodes, "nproc": 1, "world_size": nnodes, "created": 1.0}
        self.run.write_json("run.json", facts)
        self.view = new_view(facts)
        self.now = 1.0

    def say(self, rank, text, stream="stdout", *, flood=False):
        self.now += 1
        path = self.run.path / f"rank{rank}.{stream}"
        offset = path.stat().st_size if path.exists() else 0
        with path.open("ab") as file:
            file.write(text.encode())
        event = OutEvent(
            node=rank,
            rank=rank,
            stream=stream,
            offset=offset,
            length=len(text.encode()),
            text=None if flood else text,
            lines=text.count("\n"),
            time=self.now,
        )
        return self.tell(event)

    def show(self, rank, text, **more):
        """Display something; ``data`` in ``more`` goes with the text."""
        self.now += 1
        data = {"text/plain": text, **more.pop("data", {})}
        more = {"action": "display", "node": rank, "rank": rank, "time": self.now, **more}
        return self.tell(DisplayEvent(data=data, **more))

    def tell(self, event):
        with (self.run.path / f"node-{event.node}.jsonl").open("ab") as log:
            log.write(encode(event))
        fold(self.view, event)
        return self
