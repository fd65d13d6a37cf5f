"""kill -9 of every process of a run, each with grandchildren that hide: nothing is left, and it is said what happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jupyter_ddp.events import OutEvent, RunEvent
from jupyter_ddp.rundir import EventReader, RunStore
from jupyter_ddp.runtime.process import is_alive

HIDING = """
import os, subprocess, time
print(subprocess.Popen(["sleep", "300"], start_new_session=True).pid)
print(subprocess.Popen(["sleep", "300"], start_new_session=True, env={}).pid)
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(write, str(os.getpid()).encode())
        os.execve("/bin/sleep", ["sleep", "300"], {})
    os._exit(0)
print(int(os.read(read, 32)))
print("here")
time.sleep(300)
"""
"""Three grandchildren a rank: in a session of its own, with a cleared environment too, and a daemon."""


def hidden(texts: list[str]) -> list[int]:
    return [int(word) for text in texts for word in text.split() if word.isdigit()]


def until_gone(pids: list[int]) -> list[int]:
    end = time.monotonic() + 20
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < end:
        time.sleep(0.01)
    return left


WAYS = {
    "torchrun": {"protocol": "torchrun"},
    "torchrun, executed": {"protocol": "torchrun", "fork": False},
    "mpirun": {"protocol": "mpirun"},
    "mpirun, executed": {"protocol": "mpirun", "fork": False},
}
"""How ranks come to be."""


@pytest.fixture(params=WAYS if sys.platform == "linux" else [way for way in WAYS if "executed" in way])
def begin(request, start):
    """Start a run whose ranks have hidden grandchildren, in each way that there is."""

    def begin(**fields):
        run = start("import os  # not torch\n" + HIDING, **WAYS[request.param], **fields)
        run.until_said("here")
        assert (run.of(RunEvent, phase="rendezvous")[-1].detail["why_exec"] == "") == (
            "," not in request.param
        )
        return run

    return begin


@pytest.mark.parametrize(
    ("victim", "outcome", "words"),
    [
        ("agent0", "lost", "agent"),
        ("guard", "lost", "the guard of the run was killed"),
        ("launcher", "lost", "was killed by SIGKILL before its ranks had finished"),
        ("rank0", "failed", ""),
        ("stub0", "failed", ""),
    ],
)
def test_nothing_survives_the_death_of(begin, victim, outcome, words):
    run = begin()
    pids = hidden([run.text(rank) for rank in range(2)])
    assert len(pids) == 6
    (sockets,) = run.job._sockets()
    run.kill(victim)
    end = run.end()
    assert until_gone(pids) == []
    assert not Path(sockets).parent.exists()
    assert end.outcome == outcome
    assert words in end.reason
    if victim in ("rank0", "stub0"):
        assert (run.ends()[0].signal, run.ends()[0].by_run) == (signal.SIGKILL, False)


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("torchrun", "torchrun was killed by SIGKILL before its ranks had finished"),
        ("mpirun", "the process from which the ranks were forked was killed"),
    ],
)
@pytest.mark.parametrize("victim", ["nurse", "zygote"])
@pytest.mark.parametrize("instances", [1, 2])
def test_nothing_survives_the_death_of_what_forks(start, way, victim, instances, words):
    run = start("import os  # not torch\n" + HIDING, **WAYS[way], instance_count=instances)
    run.until_said("here")
    pids = hidden([run.text(rank) for rank in range(run.world_size)])
    run.kill(victim)
    end = run.end()
    assert until_gone(pids) == []
    assert end.outcome == "lost"
    assert words in end.reason


@pytest.mark.parametrize("victim", ["agent0", "agent1", "guard", "launcher", "rank3", "stub3"])
def test_nothing_survives_on_several_instances(begin, victim):
    run = begin(instance_count=2)
    pids = hidden([run.text(rank) for rank in range(4)])
    assert len(pids) == 12
    run.kill(victim)
    end = run.end()
    assert until_gone(pids) == []
    assert end.outcome == ("failed" if victim in ("rank3", "stub3") else "lost")
    if victim == "agent1":
        assert "the agent of instance 1 is gone" in end.reason


def test_the_text_of_a_killed_agents_ranks_is_salvaged(start):
    """Text that no agent could move into the log any more is in the ranks' files, and so in the log afterwards."""
    run = start(
        "import time\nprint('here')\ntime.sleep(0.5)\nprint('written while nobody listened')\ntime.sleep(300)"
    )
    run.until_said("here")
    run.kill("agent0", signal.SIGSTOP)
    path = run.rundir.path / "rank1.stdout"
    while b"nobody" not in path.read_bytes():
        time.sleep(0.01)
    run.kill("agent0")
    assert run.end().outcome == "lost"
    assert run.text(1) == "here\nwritten while nobody listened\n"
    assert not run.rundir.salvage("once more")
    seqs = [event.seq for event in run.events]
    assert seqs == list(range(1, len(seqs) + 1))


KERNEL = """
import multiprocessing, os, sys, time
from jupyter_ddp.config import LaunchConfig
from jupyter_ddp.runner import launch
from jupyter_ddp import rundir

def work():
    exec(HIDING, {})

HIDING = %r

if __name__ == "__main__":
    if sys.argv[2] == "pool":
        pool = multiprocessing.get_context("fork").Pool(2)
    if sys.argv[2] == "child":
        # forked while the run is on: it inherits the run's pipe, and holds it open
        import threading
        threading.Timer(3.0, lambda: os.fork() or time.sleep(300)).start()
    launch(work, config=LaunchConfig(nproc_per_node=2, protocol=sys.argv[1]))
"""


@pytest.mark.parametrize("children", ["none", "pool", "child"])
def test_a_dead_kernel_takes_its_ranks_with_it(protocol, children, tmp_path):
    """B51: also when a child that it forked holds the run's pipe open."""
    script = tmp_path / "kernel.py"
    script.write_text(textwrap.dedent(KERNEL) % HIDING)
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    kernel = subprocess.Popen(
        [sys.executable, script, protocol, children],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        rundir = until_started(Path(tmp_path / "jupyter_ddp" / "runs"))
        events = EventReader(rundir)
        texts = ["", ""]
        while not all("here" in text for text in texts):
            time.sleep(0.02)
            for event in events.read():
                if isinstance(event, OutEvent) and event.stream == "stdout":
                    texts[event.rank] += event.text
        if children == "child":
            time.sleep(3.5)
        pids = hidden(texts)
        assert len(pids) == 6
        kernel.kill()
        kernel.wait()
        assert until_gone(pids) == []
        while rundir.is_alive():
            time.sleep(0.01)
        last = [event for event in events.read() if event.kind == "run"][-1]
        assert (last.phase, last.outcome, last.reason) == (
            "ended",
            "stopped",
            "the notebook's kernel was gone",
        )
    finally:
        os.killpg(kernel.pid, signal.SIGKILL) if children != "none" else kernel.kill()
        kernel.wait()


def until_started(root: Path):
    store = RunStore(root)
    end = time.monotonic() + 30
    while not (runs := store.list()) and time.monotonic() < end:
        time.sleep(0.02)
    return runs[0]


def test_the_last_words_of_guard_and_agents_are_found(start):
    """What guard and agents last wrote is in the reason: an installation that is broken, a directory that is gone."""
    run = start("print('here')")
    (run.rundir.path / "agent-0.log").write_text(
        "Traceback (most recent call last):\nImportError: no such module\n"
    )
    assert run.rundir.last_words().endswith("ImportError: no such module")
    run.end()
