"""A small agent for tests of the worker: real sockets and a real worker process, no launcher."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_ddp.events import DisplayEvent, ErrorEvent, Event, from_json
from jupyter_ddp.runtime.wire import Decoder, pack

if TYPE_CHECKING:
    from typing_extensions import Self

LIMIT = 60.0


class FakeAgent:
    """Starts one rank and hears it. Use it as a context manager: it ends what it has started."""

    def __init__(
        self, run_dir: Path, *, rank: int = 0, size: int = 1, environ: dict[str, str] | None = None
    ) -> None:
        self.run_dir = run_dir
        self.rank = rank
        self.frames: list[dict[str, Any]] = []
        self.bells = 0
        self._directory = Path(tempfile.mkdtemp(prefix="ddp-"))
        path = str(self._directory / "a")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._bell.bind(path + ".bell")
        self._channels: dict[socket.socket, Decoder] = {}
        self._roles: dict[str, socket.socket] = {}
        self.environ = {
            **{name: value for name, value in os.environ.items() if name != "MPLBACKEND"},
            "JUPYTER_DDP_RUN": "0123abcd",
            "JUPYTER_DDP_SOCKETS": os.pathsep.join([path] * size),
            "JUPYTER_DDP_NPROC": "1",
            "JUPYTER_DDP_MASTER": "127.0.0.1:29599",
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": str(size),
            **(environ or {}),
        }
        self._log = (self._directory / "log").open("wb")
        self.worker = subprocess.Popen(
            [sys.executable, "-m", "jupyter_ddp.runtime.worker"],
            cwd=run_dir,
            env=self.environ,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.vanish()
        try:
            self.worker.wait(15)
        except subprocess.TimeoutExpired:
            self.worker.kill()
            self.worker.wait()
            raise
        finally:
            self._log.close()
            shutil.rmtree(self._directory)

    def vanish(self) -> None:
        """Close everything, as a killed agent would."""
        for sock in (self._listener, self._bell, *self._channels):
            sock.close()
        self._channels.clear()

    def log(self) -> str:
        """Return what the worker wrote where a launcher would read it."""
        return (self._directory / "log").read_text()

    def hear(self, *ops: str, limit: float = LIMIT) -> dict[str, Any]:
        """Wait for the next frame that has one of these ``op`` (an event also by ``event:<kind>``) and return it."""
        start = len(self.frames)
        deadline = time.monotonic() + limit
        while True:
            for frame in self.frames[start:]:
                if frame["op"] in ops or (
                    frame["op"] == "event" and f"event:{frame['event']['kind']}" in ops
                ):
                    return frame
            start = len(self.frames)
            assert time.monotonic() < deadline, f"no {ops} came; heard {self.frames}; log: {self.log()}"
            self._poll(0.1)

    def wait_for(self, *ops: str, limit: float = LIMIT) -> dict[str, Any]:
        """Return the first frame so far that has one of these ``op``, or the next one that comes."""
        for frame in self.frames:
            if frame["op"] in ops or (frame["op"] == "event" and f"event:{frame['event']['kind']}" in ops):
                return frame
        return self.hear(*ops, limit=limit)

    def _poll(self, timeout: float) -> None:
        for sock in select.select([self._listener, self._bell, *self._channels], [], [], timeout)[0]:
            if sock is self._listener:
                self._channels[self._listener.accept()[0]] = Decoder()
            elif sock is self._bell:
                assert self._bell.recv(64) == str(self.rank).encode()
                self.bells += 1
            else:
                try:
                    data = sock.recv(1 << 16)
                except ConnectionError:
                    data = b""
                for frame in self._channels[sock].feed(data):
                    assert frame is not None
                    if frame["op"] == "hello":
                        self._roles[frame["role"]] = sock
                        frame["op"] = f"hello:{frame['role']}"
                    self.frames.append(frame)
                if not data:
                    del self._channels[sock]
                    self.frames.append({"op": "eof"})
                    sock.close()

    def send(self, role: str, frame: dict[str, Any]) -> None:
        self._roles[role].sendall(pack(frame))

    def send_cell(self, source: str, **fields: Any) -> None:
        """Send a cell when the rank is there; fields as in the ``cell`` frame."""
        self.wait_for("hello:rank")
        frame = {
            "op": "cell",
            "n": 0,
            "source": source,
            "magic": "%%distributed -p 1",
            "cwd": str(self.run_dir),
            "sys_path": [path for path in sys.path if path],
            "env": {},
            "payload": None,
            "setup": "",
            "pull": [],
            "init_process_group": None,
            "run_dir": str(self.run_dir),
            "last": True,
            "names": [],
            "argv": ["<cell>"],
        }
        self.send("rank", {**frame, **fields})

    def signal(self, signum: signal.Signals) -> None:
        """Signal the rank itself."""
        os.kill(self.wait_for("hello:rank")["pid"], signum)

    def finish(self, limit: float = LIMIT) -> int:
        """Wait for the rank's end, release the stub and return the worker's exit code."""
        self.wait_for("exit", limit=limit)
        self.send("stub", {"op": "release"})
        return self.worker.wait(limit)

    def run(self, source: str, **fields: Any) -> int:
        """Run one cell to the end of the worker; return its exit code."""
        self.send_cell(source, **fields)
        return self.finish()

    # What was heard, as a reader of the run's log would see it.

    def text(self, stream: str = "stdout") -> str:
        return (self.run_dir / f"rank{self.rank}.{stream}").read_bytes().decode(errors="replace")

    def events(self, kind: type[Event] = Event) -> list[Any]:
        events = [from_json(frame["event"]) for frame in self.frames if frame["op"] == "event"]
        return [event for event in events if isinstance(event, kind)]

    @property
    def error(self) -> ErrorEvent:
        """The error, as it was told the last time."""
        return self.events(ErrorEvent)[-1]

    @property
    def done(self) -> dict[str, Any]:
        return next(frame for frame in self.frames if frame["op"] == "done")

    def transcript(self) -> list[str]:
        """Return text (``out: …``, ``err: …``) and displays (``show: …``) in order, by the places that frames tell."""
        texts = [(self.run_dir / f"rank{self.rank}.{name}").read_bytes() for name in ("stdout", "stderr")]
        at = [0, 0]
        found: list[str] = []
        for frame in [*self.frames, {"op": "end", "o": [len(text) for text in texts]}]:
            if "o" not in frame:
                continue
            for stream, end in enumerate(frame["o"]):
                if end > at[stream]:
                    found.append(
                        ("out: ", "err: ")[stream] + texts[stream][at[stream] : end].decode(errors="replace")
                    )
                    at[stream] = end
            event = from_json(frame.get("event"))
            if isinstance(event, DisplayEvent):
                found.append(f"{event.action}: {event.data.get('text/plain', '')}".rstrip())
        return found
