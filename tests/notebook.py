"""A real ipykernel with the extension loaded, driven as a front end drives it."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

from jupyter_ddp.rundir import RunDirectory, RunStore
from jupyter_ddp.runtime.process import table

LIMIT = 60.0


class Notebook:
    """A kernel with the extension loaded, and what it sends."""

    def __init__(self, root: Path) -> None:
        self.store = RunStore(root / "jupyter_ddp" / "runs")
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env={**os.environ, "XDG_STATE_HOME": str(root)})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT)
        self.run("%load_ext jupyter_ddp")

    def send(self, code: str) -> str:
        return self.client.execute(code)

    def messages(
        self, request: str, until: Callable[[dict[str, Any]], bool] | None = None
    ) -> list[dict[str, Any]]:
        """Return the request's messages up to the one that is waited for, by default the end of the cell."""
        found = []
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            found.append(message)
            idle = message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"
            if (until is not None and until(message)) or idle:
                return found
        raise AssertionError(f"nothing came; the last messages: {found[-3:]}")

    def run(self, code: str) -> list[dict[str, Any]]:
        return self.messages(self.send(code))

    def reply(self, request: str) -> dict[str, Any]:
        while True:
            reply = self.client.get_shell_msg(timeout=LIMIT)
            if reply["parent_header"]["msg_id"] == request:
                return reply["content"]

    def only_run(self) -> RunDirectory:
        (run,) = self.store.list()
        return run

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def live_text(message: dict[str, Any]) -> str:
    """Return the text of a live message of a run."""
    entries = message["content"].get("data", {}).get("e", []) if message["msg_type"] == "comm_msg" else []
    return "".join(entry[2] for entry in entries if isinstance(entry, list))


def says(word: str) -> Callable[[dict[str, Any]], bool]:
    return lambda message: word in live_text(message)


def states(*words: str) -> Callable[[dict[str, Any]], bool]:
    """Wait for a state of the output that has all these words."""
    return lambda message: all(
        word in str(message["content"].get("data", {}).get("text/plain")) for word in words
    )


def outputs(messages: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the last state of each output, by its display id."""
    shown = [m for m in messages if m["msg_type"] in ("display_data", "update_display_data")]
    return {m["content"]["transient"]["display_id"]: m["content"]["data"] for m in shown}


def texts(messages: list[dict[str, Any]]) -> str:
    return "".join(m["content"]["text"] for m in messages if m["msg_type"] == "stream")


def until_gone(run: RunDirectory) -> None:
    end = time.monotonic() + 20
    while run.is_alive() and time.monotonic() < end:
        time.sleep(0.01)
    assert not [process for process in table(run.run_id).values() if process.marked]
