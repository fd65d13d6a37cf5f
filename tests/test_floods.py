"""Ranks that print or display without end, in a real kernel: it stays small, the notebook too, and ■ ends it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from jupyter_ddp.rundir import EventReader, RunDirectory
from tests.notebook import Notebook, live_text, outputs, says, until_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, for the memory of processes")

BEGIN = "import os, sys, time\nfrom IPython.display import HTML, Image, display, clear_output\nprint('here', flush=True)\n"
FLOODS = {
    "lines": "n = 0\nwhile True:\n    print(f'line {n} ' + 'x' * 90); n += 1",
    "blocks": "block = ('y' * 99 + '\\n') * 10_000\nwhile True:\n    sys.stdout.write(block)",
    "no newline": "while True:\n    sys.stdout.write('z' * 10_000)",
    "bars": "n = 0\nwhile True:\n    print(f'\\r{n % 100}%|' + '█' * (n % 50), end='', file=sys.stderr); n += 1",
    "both streams": "while True:\n    print('out'); print('err', file=sys.stderr)",
    "displays": "n = 0\nwhile True:\n    display(HTML(f'<b>{n}</b>' + 'q' * 1000)); n += 1; time.sleep(0.001)",
    "updates": "handle = display(display_id=True)\nn = 0\nwhile True:\n    handle.update(HTML(f'<i>{n}</i>')); n += 1; time.sleep(0.001)",
    "cleared": "n = 0\nwhile True:\n    clear_output(wait=True); print(n, flush=True); n += 1; time.sleep(0.001)",
    "C code": "libc = __import__('ctypes').CDLL(None)\nwhile True:\n    libc.puts(b'from C ' + b'c' * 80)",
    "big displays": "n = 0\nwhile True:\n    display(HTML('w' * 400_000 + str(n))); n += 1; time.sleep(0.05)",
}
LASTS = 2.0
MEMORY = 50_000_000
NOTEBOOK = 2_000_000
RICH = 2 * (11 << 20)
"""Big displays are in it twice, for pages with and without the extension."""


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    book = Notebook(tmp_path_factory.mktemp("state"))
    yield book
    book.close()


def resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def agent_of(run: RunDirectory) -> int:
    return next(event.detail["pid"] for event in EventReader(run).read() if event.kind == "run")


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_leaves_everything_usable(book, flood):
    kernel = book.manager.provisioner.pid
    request = book.send(f"%%distributed -p 2 --protocol mpirun\n{BEGIN}{FLOODS[flood]}")
    messages = book.messages(request, until=says("here"))
    run = book.store.list()[0]
    agent = agent_of(run)
    before = {pid: resident(pid) for pid in (kernel, agent)}
    end = time.monotonic() + LASTS
    most = dict(before)
    while time.monotonic() < end:
        messages += book.messages(request, until=lambda _message: time.monotonic() > end)
        most = {pid: max(most[pid], resident(pid)) for pid in most}
    book.manager.interrupt_kernel()
    messages += book.messages(request)
    content = book.reply(request)
    assert (content["status"], content["ename"]) == ("error", "KeyboardInterrupt")
    assert {pid: most[pid] - before[pid] for pid in most if most[pid] - before[pid] > MEMORY} == {}
    shown = outputs(messages)
    assert len(json.dumps(shown)) < (RICH if flood == "big displays" else NOTEBOOK)
    assert "interrupted" in str(shown)
    until_gone(run)
    after = book.run("print('the kernel', 'answers')")
    assert "the kernel answers" in str(after)


def test_what_a_flood_sends_is_bounded(book):
    """What goes to the page does not grow with what ranks print, and the run says how much it left out."""
    cell = f"{BEGIN}for n in range(1_000_000):\n    print(f'line {{n}} ' + 'x' * 90)"
    messages = book.run(f"%%distributed -p 2 --protocol mpirun\n{cell}")
    assert sum(len(live_text(message)) for message in messages) < 20_000_000
    (shown,) = outputs(messages).values()
    assert "lines" in shown["text/plain"]
    run = book.store.list()[0]
    expected = "here\n" + "".join(f"line {n} " + "x" * 90 + "\n" for n in range(1_000_000))
    for rank in range(2):
        assert (run.path / f"rank{rank}.stdout").read_text() == expected
