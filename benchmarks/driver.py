"""A real kernel, driven as a front end drives it; what it sends is kept raw, with the time at which it came."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

from benchmarks.processes import TOKEN, Process, find, marked, wait_gone

if TYPE_CHECKING:
    from collections.abc import Callable

DELIMITER = b"<IDS|MSG>"


class TooSlow(Exception):  # noqa: N818 - it is a result
    """A cell was not over in its time."""


@dataclass(frozen=True)
class Message:
    """A message on iopub; ``content`` as it was on the wire."""

    at: float
    kind: str
    parent: str
    content: bytes

    @property
    def data(self) -> dict[str, Any]:
        """Its content, parsed."""
        parsed: dict[str, Any] = json.loads(self.content)
        return parsed

    def ends(self) -> bool:
        """Tell whether the cell is over."""
        return self.kind == "status" and self.data.get("execution_state") == "idle"


class Kernel:
    """A kernel of a given Python, in a directory of its own which is its home for configuration and state."""

    def __init__(
        self,
        argv: list[str],
        env: dict[str, str],
        *,
        interrupts: str = "signal",
        path: list[Path] | None = None,
    ) -> None:
        self.token = uuid.uuid4().hex
        self.directory = Path(tempfile.mkdtemp(prefix="ddp-bench-"))
        self.env = environment(self.directory, self.token, [*(path or []), Path(argv[0]).parent]) | env
        self._known: list[Process] = []
        spec = {"argv": argv, "display_name": "bench", "language": "python", "interrupt_mode": interrupts}
        where = self.directory / "kernels" / "bench"
        where.mkdir(parents=True)
        (where / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
        specs = KernelSpecManager(
            kernel_dirs=[str(self.directory / "kernels")],
            ensure_native_kernel=False,
            allowed_kernelspecs=set(),
        )
        self.manager = KernelManager(kernel_name="bench", kernel_spec_manager=specs)
        self.manager.start_kernel(env=self.env, cwd=str(self.directory))
        self.client = self.manager.client()
        self.client.start_channels()
        try:
            self.client.wait_for_ready(timeout=60)
        except Exception:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The kernel's process."""
        pid: int = self.manager.provisioner.process.pid  # type: ignore[union-attr]
        return pid

    def send(self, code: str) -> str:
        """Send a cell; return the request's id."""
        return self.client.execute(code, store_history=False)

    def receive(
        self,
        request: str,
        *,
        until: Callable[[Message], bool] = Message.ends,
        limit: float = 60.0,
        keep: bool = True,
    ) -> list[Message]:
        """Return the cell's messages up to the one that is waited for (by default its end), raw and stamped.

        Without `keep` only the last one: a flood of them would not fit into memory.
        """
        socket = self.client.iopub_channel.socket
        found: list[Message] = []
        end = time.time() + limit
        while time.time() < end:
            if not socket.poll(200):
                continue
            frames = socket.recv_multipart()
            at = time.time()
            start = frames.index(DELIMITER)
            kind = json.loads(frames[start + 2])["msg_type"]
            parent = json.loads(frames[start + 3]).get("msg_id", "")
            message = Message(at, kind, parent, frames[start + 5])
            if parent != request:
                continue
            if not keep:
                found.clear()
            found.append(message)
            if until(message):
                return found
            if message.ends():
                break
        if found and found[-1].ends():
            said = " ".join(
                m.data.get("evalue", "") or m.data.get("text", "")
                for m in found
                if m.kind in ("error", "stream")
            )
            raise RuntimeError(f"the cell ended before what was waited for came: {said.strip()[-300:]}")
        raise TooSlow(f"cell not over in {limit:.0f} s")

    def run(self, code: str, limit: float = 60.0) -> list[Message]:
        """Run a cell to its end; an error of the cell is raised."""
        messages = self.receive(self.send(code), limit=limit)
        for message in messages:
            if message.kind == "error":
                raise RuntimeError(f"{message.data['ename']}: {message.data['evalue']}"[:400])
        return messages

    def interrupt(self) -> None:
        """Interrupt it as a front end's stop button does."""
        self.manager.interrupt_kernel()

    def processes(self) -> list[Process]:
        """Return everything that it has started and that lives."""
        return [process for process in marked(self.token) if process.pid != self.pid]

    def adopt(self, pid: int) -> Process | None:
        """Remember a process that has lost the token, so that it is ended too."""
        process = find(pid)
        if process:
            self._known.append(process)
        return process

    def close(self) -> None:
        """End the kernel and everything that it has left."""
        self.client.stop_channels()
        with contextlib.suppress(Exception):
            self.manager.shutdown_kernel(now=True)
        sweep(self.token, self._known)
        shutil.rmtree(self.directory, ignore_errors=True)


def sweep(token: str, known: list[Process]) -> None:
    """End, by pid, whatever has the token or is known."""
    for _ in range(20):
        left = [*marked(token), *[process for process in known if process.lives()]]
        if not left:
            return
        for process in left:
            process.kill()
        wait_gone(left, 0.5)


def environment(home: Path, token: str, path: list[Path]) -> dict[str, str]:
    """Return an environment with a home of its own, a harmless ``pkill`` in front, and the token."""
    tools = home / "tools"
    tools.mkdir(exist_ok=True)
    for name in (
        "pkill",
        "killall",
    ):  # nbdistributed calls `pkill -f worker.py`: other people's processes too
        (tools / name).write_text("#!/bin/sh\nexit 1\n", encoding="ascii")
        (tools / name).chmod(0o755)
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "XDG_STATE_HOME")
    return {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("OMP_", "JUPYTER_", "PYTHON"))
        },
        **{name: str(home / name.lower()) for name in names},
        "PATH": os.pathsep.join([str(tools), *map(str, path), os.environ["PATH"]]),
        "GLOO_SOCKET_IFNAME": "lo",
        TOKEN: token,
    }
