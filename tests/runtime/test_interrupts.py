"""An interrupt that Python has heard is told to the agent, whoever handles it then."""

from __future__ import annotations

import signal
import sys
import time

import pytest

from tests.runtime.fakeagent import FakeAgent

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no ranks on Windows")

LIMIT = 60.0


def interrupt(agent, source):
    """Run a cell, interrupt it when it says so, and tell whether that was heard; the cell goes on by itself."""
    agent.send_cell(source)
    deadline = time.monotonic() + LIMIT
    while not ((agent.run_dir / "rank0.stdout").exists() and "up" in agent.text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    agent.signal(signal.SIGINT)
    assert agent.finish() == 0, agent.error
    return "heard" in [frame["op"] for frame in agent.frames]


@pytest.mark.parametrize(
    ("install", "heard"),
    [
        ("signal.signal(signal.SIGINT, mine)", True),
        ("from signal import signal as install; install(2, mine)", True),
        ("asyncio.get_running_loop().add_signal_handler(signal.SIGINT, mine)", True),
        ("signal.signal(signal.SIGINT, mine); signal.signal(signal.SIGTERM, signal.SIG_IGN)", True),
    ],
)
def test_a_handler_of_the_users_hears_too(tmp_path, install, heard):
    """It is all that happens, and the agent learns of it: the rank is not ended for being deaf."""
    source = f"""
import asyncio, signal
hits = []
def mine(*args): hits.append(len(args)); print("mine")
async def wait():
    {install}
    print("up")
    while not hits: await asyncio.sleep(0.01)
await wait()
print("on")
"""
    with FakeAgent(tmp_path) as agent:
        assert interrupt(agent, source) is heard
        assert agent.text() == "up\nmine\non\n"


def test_an_interrupt_that_is_ignored_is_not_heard(tmp_path):
    source = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("up")
time.sleep(0.5)
print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
"""
    with FakeAgent(tmp_path) as agent:
        assert interrupt(agent, source) is False
        assert agent.text() == "up\nTrue\n"


def test_who_asks_for_the_handler_gets_what_was_installed(tmp_path):
    source = """
import inspect, pickle, signal
first = signal.getsignal(signal.SIGINT)
def mine(number, frame): print("mine", number, inspect.isframe(frame))
class Other:
    def stop(self, *args): print("other", len(args))
other = Other()
assert signal.signal(signal.SIGINT, mine) == first
assert signal.getsignal(2) is mine
assert signal.signal(signal.SIGINT, other.stop) is mine
assert signal.signal(signal.SIGINT, mine) == other.stop
signal.raise_signal(signal.SIGINT)
assert signal.signal(signal.SIGINT, signal.default_int_handler) is mine
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
assert signal.signal(signal.SIGINT, first) is signal.default_int_handler
assert signal.getsignal(signal.SIGINT) == first
assert signal.signal(signal.SIGTERM, mine) is signal.SIG_DFL and signal.getsignal(signal.SIGTERM) is mine
for wrong in (lambda: signal.signal(signal.SIGINT, "text"), lambda: signal.signal(2, None)):
    try: wrong()
    except TypeError: print("TypeError")
assert pickle.loads(pickle.dumps(signal.signal)) is signal.signal
print(inspect.signature(signal.signal))
"""
    with FakeAgent(tmp_path) as agent:
        assert agent.run(source) == 0, agent.error
        assert agent.text().splitlines() == [
            "mine 2 True",
            "interrupted",
            "TypeError",
            "TypeError",
            "(signalnum, handler)",
        ]
        assert [frame["op"] for frame in agent.frames].count("heard") == 2


def test_a_handler_that_ends_the_cell_ends_it(tmp_path):
    """Lightning's way: the handler sets a flag or raises, and what was installed before is put back."""
    source = """
import signal, time
before = signal.getsignal(signal.SIGINT)
def stop(*_): raise InterruptedError("by the handler")
signal.signal(signal.SIGINT, stop)
try:
    print("up")
    time.sleep(60)
except InterruptedError as error:
    print(error)
finally:
    signal.signal(signal.SIGINT, before)
"""
    with FakeAgent(tmp_path) as agent:
        assert interrupt(agent, source) is True
        assert agent.text() == "up\nby the handler\n"
