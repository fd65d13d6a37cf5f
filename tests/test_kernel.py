"""A real ipykernel, driven as a front end drives it: what arrives, in which cell, and how an interrupt ends it."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from jupyter_ddp.rundir import RunDirectory, RunStore
from jupyter_ddp.runtime.process import table

pytestmark = pytest.mark.kernel
LIMIT = 60.0
MIME = "application/vnd.jupyter-ddp.run+json"
MAGIC = "%%distributed -p 2 --protocol mpirun"
LOOP = f"{MAGIC}\nimport time\nprint('here')\nwhile True: time.sleep(0.05)"


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


@pytest.fixture
def notebook(tmp_path: Path):
    opened = Notebook(tmp_path)
    yield opened
    opened.close()


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


def test_a_run_is_one_output_with_the_text_of_every_rank(notebook):
    messages = notebook.run(f"{MAGIC}\nimport os\nprint('hello from', os.environ['RANK'])")
    shown = outputs(messages)
    assert len(shown) == 1
    (bundle,) = shown.values()
    assert set(bundle) == {"text/plain", "text/html", MIME}
    assert "[0] hello from 0" in bundle["text/plain"]
    assert "[1] hello from 1" in bundle["text/plain"]
    assert bundle["text/plain"].startswith("succeeded on 2 ranks · mpirun")
    assert texts(messages) == ""


def test_lines_arrive_while_the_cell_runs(notebook):
    """B69: without flush=True, each once."""
    request = notebook.send(f"{MAGIC}\nimport time\nfor i in range(3): print('tick', i); time.sleep(0.4)")
    messages = notebook.messages(request, until=says("tick 0"))
    assert not any("tick 2" in live_text(message) for message in messages)
    messages += notebook.messages(request)
    text = "".join(map(live_text, messages))
    assert [text.count(f"tick {i}\n") for i in range(3)] == [2, 2, 2]


def test_output_stays_in_its_own_cell(notebook):
    """B31, B72: three cells queued at once are three clean runs, one after the other."""
    requests = [notebook.send(f"{MAGIC}\nprint('cell {name}')") for name in "abc"]
    for name, request in zip("abc", requests, strict=True):
        (bundle,) = outputs(notebook.messages(request)).values()
        lines = bundle["text/plain"].splitlines()[1:]
        assert sorted(lines) == [f"[0] cell {name}", f"[1] cell {name}"]
    assert len(notebook.store.list()) == 3


def test_variables_of_the_notebook_are_changed_only_when_asked_for(notebook):
    """B28: also after a failed run."""
    notebook.run("x = 1")
    notebook.run(f"{MAGIC}\nx = 2\ny = 3")
    assert texts(notebook.run("print(x, 'y' in globals())")) == "1 False\n"
    notebook.run(f"{MAGIC} --pull y@all --out r\nx = 2\ny = 3\n1 / 0")
    assert texts(notebook.run("print(x, 'y' in globals(), r.ok)")) == "1 False False\n"
    notebook.run(f"{MAGIC} --pull y@all,x\nimport os\nx = 2\ny = int(os.environ['RANK'])")
    assert texts(notebook.run("print(x, y)")) == "2 [0, 1]\n"


def test_a_failing_rank_fails_the_cell(notebook):
    """B77: what nbconvert, papermill and "run all" look at."""
    request = notebook.send(
        f"{MAGIC}\nimport os\nif os.environ['RANK'] == '1':\n    raise ValueError('boom')"
    )
    error = next(m["content"] for m in notebook.messages(request) if m["msg_type"] == "error")
    assert error["ename"] == "DistributedError"
    assert error["evalue"].startswith(
        "rank 1 failed: ValueError: boom\ncell line 4: raise ValueError('boom')"
    )
    assert notebook.reply(request)["status"] == "error"
    frames = [line for line in error["traceback"] if line.lstrip().startswith("File ")]
    assert frames == ['  File "<distributed cell>", line 4, in <module>']


def test_an_interrupt_ends_the_run_and_the_cell(notebook):
    """B50: the output so far is kept, nothing is left, the next run works."""
    request = notebook.send(LOOP)
    messages = notebook.messages(request, until=states("[0] here", "[1] here"))
    notebook.manager.interrupt_kernel()
    messages += notebook.messages(request)
    assert notebook.reply(request)["ename"] == "KeyboardInterrupt"
    (bundle,) = outputs(messages).values()
    assert bundle["text/plain"].startswith("interrupted")
    assert "[0] here" in bundle["text/plain"]
    assert "Traceback" not in bundle["text/plain"]
    until_gone(notebook.only_run())
    assert "[1] again" in next(iter(outputs(notebook.run(f"{MAGIC}\nprint('again')")).values()))["text/plain"]


def test_a_second_interrupt_kills(notebook):
    cell = f"{MAGIC}\nimport time\ntry:\n    print('here')\n    time.sleep(300)\nfinally:\n    print('cleaning'); time.sleep(300)"
    request = notebook.send(cell)
    notebook.messages(request, until=states("[0] here", "[1] here"))
    notebook.manager.interrupt_kernel()
    notebook.messages(request, until=states("interrupt again to kill", "[0] cleaning", "[1] cleaning"))
    notebook.manager.interrupt_kernel()
    notebook.messages(request)
    assert notebook.reply(request)["ename"] == "KeyboardInterrupt"
    until_gone(notebook.only_run())


def test_a_restarted_kernel_leaves_no_ranks(notebook):
    """B51."""
    request = notebook.send(LOOP)
    notebook.messages(request, until=says("here"))
    run = notebook.only_run()
    notebook.manager.restart_kernel(now=True)
    until_gone(run)


def test_a_killed_kernel_leaves_no_ranks(notebook):
    """B51."""
    request = notebook.send(LOOP)
    notebook.messages(request, until=says("here"))
    run = notebook.only_run()
    notebook.manager.provisioner.process.kill()
    until_gone(run)


def test_flags_are_completed(notebook):
    code = "%%distributed --proto"
    request = notebook.client.complete(code, len(code))
    assert "--protocol" in notebook.reply(request)["matches"]


def test_the_extension_can_be_unloaded_and_loaded_again(notebook):
    notebook.run("%unload_ext jupyter_ddp")
    request = notebook.send("%distributed runs")
    assert "not found" in texts(notebook.messages(request)) + str(notebook.reply(request))
    notebook.run("%load_ext jupyter_ddp")
    assert "No runs yet" in texts(notebook.run("%distributed runs"))
