"""Processes of a run: found however they hid, ended however they resist, and nobody else with them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from jupyter_ddp.runtime import process
from jupyter_ddp.runtime.process import MARKER, Process, descendants, is_alive, of_run, table

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: /proc and prctl")

DAEMON = """
import os, sys
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
print(os.getpid(), flush=True)
import time; time.sleep(60)
"""


def python(code: str, *arguments: str, **changes: object) -> subprocess.Popen[str]:
    """Start Python; an environment value of None is left out."""
    env = {**os.environ, **changes.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, "-S", "-c", code, *arguments],
        env={name: value for name, value in env.items() if value is not None},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **changes,
    )


def agent(code: str, run_id: str, repository, *arguments: str) -> list:
    """Run code as an agent would: in a process of its own, a subreaper; return what it prints as JSON."""
    start = "import json, os, signal, subprocess, sys, time\nfrom jupyter_ddp.runtime.process import *\nbecome_subreaper()\nrun_id = sys.argv[1]\n"
    with python(
        start + code, run_id, *arguments, env={"PYTHONPATH": str(repository), MARKER: None}
    ) as running:
        try:
            out, _ = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 0
    return json.loads(out)


def gone(pid: int) -> bool:
    """Wait until a process that is to end has ended."""
    for _ in range(1_000):
        if not is_alive(pid):
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def run_id():
    return uuid.uuid4().hex[:8]


@pytest.fixture
def end():
    """A list of pids that are ended after the test, whatever it found."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


# finding


def test_descendants_are_those_below():
    processes = {
        pid: Process(pid, ppid, "x", marked=False)
        for pid, ppid in {1: 0, 2: 1, 3: 2, 4: 3, 5: 2, 6: 1, 7: 99}.items()
    }
    assert descendants(processes, 2) == {3, 4, 5}
    assert descendants(processes, 4) == set()
    assert descendants(processes, 99) == {7}


def test_descendants_in_a_circle_end():
    """The table is not read at one moment: a pid may have been used again meanwhile."""
    processes = {pid: Process(pid, ppid, "x", marked=False) for pid, ppid in {2: 3, 3: 2}.items()}
    assert descendants(processes, 2) == {2, 3}


def test_the_table_shows_this_process_and_its_children(run_id):
    with python("import sys; print('ready', flush=True); sys.stdin.read()", env={MARKER: run_id}) as child:
        child.stdout.readline()
        found = table(run_id)
        assert found[child.pid] == Process(child.pid, os.getpid(), found[child.pid].name, marked=True)
        assert found[child.pid].name.startswith("python")
        assert not found[os.getpid()].marked
        assert not table(run_id[:-1])[child.pid].marked  # the whole id, not its beginning
        assert not table("")[child.pid].marked
        assert [p.pid for p in of_run(run_id, root=child.pid)] == []
        assert [p.pid for p in of_run(run_id, root=os.getpid())] == [child.pid]


def test_names_with_spaces_and_brackets_do_not_confuse(tmp_path, run_id, end):
    """/proc/<pid>/stat has the name, whatever it is, between brackets."""
    odd = tmp_path / ") R 1 (a b"
    odd.symlink_to(sys.executable)
    with subprocess.Popen(
        [odd, "-S", "-c", "import sys; print(flush=True); sys.stdin.read()"],
        env={**os.environ, MARKER: run_id, "PYTHONHOME": sys.base_prefix},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        end.append(child.pid)
        child.stdout.readline()
        found = table(run_id)[child.pid]
        assert (found.name, found.ppid, found.marked) == (") R 1 (a b", os.getpid(), True)
        assert is_alive(child.pid)


def test_a_zombie_is_not_alive(run_id):
    child = subprocess.Popen([sys.executable, "-S", "-c", ""], env={**os.environ, MARKER: run_id})
    assert gone(child.pid)
    assert Path(f"/proc/{child.pid}").exists()
    assert child.pid not in table(run_id)
    child.wait()
    assert not is_alive(child.pid)


HALF_DEAD = """
import ctypes, subprocess, sys, threading
child = subprocess.Popen(["sleep", "60"], env={})
threading.Thread(target=threading.Event().wait).start()
print(child.pid, flush=True)
ctypes.CDLL(None).syscall(%d, 0)
"""


def test_a_process_whose_main_thread_has_ended_is_alive(run_id, end):
    """So it is between the ends of its threads when it is killed: then its children are still its own."""
    number = {"x86_64": 60, "aarch64": 93}[os.uname().machine]  # exit, of one thread
    with python(HALF_DEAD % number, env={MARKER: run_id}) as parent:
        child = int(parent.stdout.readline())
        end += [parent.pid, child]
        while ") Z " not in Path(f"/proc/{parent.pid}/stat").read_text():
            time.sleep(0.01)
        assert is_alive(parent.pid)
        assert {p.pid for p in of_run(run_id, os.getpid())} == {parent.pid, child}
        parent.kill()
    assert not is_alive(parent.pid)


def test_a_daemon_is_found_by_its_marker(run_id, end):
    """B53: it has left its parent, its session and its process group."""
    with python(DAEMON, env={MARKER: run_id}) as parent:
        daemon = int(parent.stdout.readline())
        end.append(daemon)
        parent.wait()
        assert daemon not in descendants(table(run_id), os.getpid())
        assert daemon in [p.pid for p in of_run(run_id, os.getpid())]


# ending


def test_everything_of_a_run_is_killed_and_nobody_else(run_id, repository, end):
    """B53: children, grandchildren, daemons, those that ignore signals; not the agent, not another run."""
    with python("import sys; print(flush=True); sys.stdin.read()", env={MARKER: run_id + "0"}) as other:
        other.stdout.readline()
        code = f"""
marked = {{**os.environ, "{MARKER}": run_id}}
start = lambda code: subprocess.Popen([sys.executable, "-S", "-c", code], env=marked, stdout=subprocess.PIPE)
stubborn = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 15, 1, 3)]; print(0, flush=True); import time; time.sleep(60)"
family = "import os, time; os.fork(); os.fork(); print(0, flush=True); time.sleep(60)"
children = [start(code) for code in (stubborn, family, {DAEMON!r})]
said = [int(child.stdout.readline()) for child in children]
before = [p.pid for p in of_run(run_id, os.getpid())]
names = kill_all(run_id)
print(json.dumps([before, said[-1], sorted(names), [p.pid for p in of_run(run_id, os.getpid())]]))
"""
        before, daemon, names, after = agent(code, run_id, repository)
        assert len(before) >= 1 + 4 + 1
        assert daemon in before
        assert after == []
        assert all(gone(pid) for pid in before)
        assert names
        assert all(name.startswith("python") for name in names)
        assert is_alive(other.pid)


def test_daemons_that_cleared_their_environment_do_not_get_away(run_id, repository):
    """They become children of the agent, which is a subreaper."""
    code = f"""
daemon = {DAEMON!r}
child = subprocess.Popen([sys.executable, "-S", "-c", daemon], env={{}}, stdout=subprocess.PIPE)
pid = int(child.stdout.readline())
child.wait()
unmarked = not table(run_id)[pid].marked
names = kill_all(run_id)
print(json.dumps([pid, unmarked, sorted(names)]))
"""
    pid, unmarked, names = agent(code, run_id, repository)
    assert unmarked
    assert len(names) == 1
    assert gone(pid)


def test_those_who_multiply_are_ended_too(run_id, repository):
    code = f"""
breed = "import os, time\\nprint(0, flush=True)\\nfor n in range(400):\\n    if os.fork() == 0:\\n        time.sleep(60)\\n    time.sleep(0.0005)\\ntime.sleep(60)"
child = subprocess.Popen([sys.executable, "-S", "-c", breed], env={{**os.environ, "{MARKER}": run_id}}, stdout=subprocess.PIPE)
child.stdout.readline()
kill_all(run_id)
print(json.dumps([p.pid for p in of_run(run_id, os.getpid())]))
"""
    assert agent(code, run_id, repository) == []


def test_a_stopped_process_is_killed(run_id, repository):
    code = """
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
os.kill(child.pid, signal.SIGSTOP)
kill_all(run_id)
print(json.dumps([is_alive(child.pid)]))
"""
    assert agent(code, run_id, repository) == [False]


def test_children_of_others_are_not_collected(run_id, repository):
    """In the notebook's kernel: what its own code starts and waits for is not taken away from it."""
    code = """
mine = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"])
while is_alive(mine.pid):
    time.sleep(0.01)
victim = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
kill_all(run_id, root=os.getpid(), collect=False)
print(json.dumps([mine.wait(), victim.wait()]))
"""
    assert agent(code, run_id, repository) == [3, -9]


def test_only_what_is_below_the_given_root(run_id, repository, end):
    """The kernel ends a run whose guard does not answer; its own other children are none of it."""
    code = """
start = lambda code: subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
guard = start("import os, time; os.fork(); print(os.getpid(), flush=True); time.sleep(60)")
guard.stdout.readline(), guard.stdout.readline()
mine = start("import time; time.sleep(60)")
kill_all(run_id, root=guard.pid)
print(json.dumps([is_alive(guard.pid), len(descendants(table(run_id), guard.pid)), is_alive(mine.pid)]))
guard.kill(), mine.kill()
"""
    assert agent(code, run_id, repository) == [True, 0, True]


def test_it_gives_up_on_what_cannot_be_ended(run_id, repository):
    code = """
import jupyter_ddp.runtime.process as process
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
kill, process.os.kill = os.kill, lambda pid, number: None  # stands for uninterruptible sleep
kill_all(run_id, limit=0.02)
kill(child.pid, signal.SIGKILL)
print(json.dumps(child.wait()))
"""
    assert agent(code, run_id, repository) == -signal.SIGKILL


def test_children_are_collected_with_their_exit_codes(run_id, repository):
    code = """
start = lambda code: os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-S", "-c", code])
assert reap() == {}
codes = ("raise SystemExit(3)", "", "import os; os.kill(os.getpid(), 11)", "import time; time.sleep(60)")
pids = [start(code) for code in codes]  # not by subprocess, which would collect some of them itself
codes = {}
while len(codes) < 3:
    codes |= reap()
    time.sleep(0.005)
print(json.dumps([codes.get(pid) for pid in pids]))
os.kill(pids[3], 9)
"""
    assert agent(code, run_id, repository) == [3, 0, -11, None]


def test_there_may_be_no_children(run_id, repository):
    assert agent("print(json.dumps([len(reap())]))", run_id, repository) == [0]


# dying together


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_dies_with_its_parent(repository, number, end):
    code = f"""
import os, time
from jupyter_ddp.runtime.process import die_with_parent
parent = os.getpid()
if not os.fork():
    die_with_parent(parent, {int(number)})
    print(os.getpid(), flush=True)
    time.sleep(60)
time.sleep(60)
"""
    with python(code, env={"PYTHONPATH": str(repository)}) as parent:
        child = int(parent.stdout.readline())
        end.append(child)
        assert is_alive(child)
        parent.kill()
        parent.wait()
        assert gone(child)


def test_a_child_whose_parent_died_before_it_could_ask_ends_at_once(repository):
    code = """
import os
from jupyter_ddp.runtime.process import die_with_parent
die_with_parent(os.getppid() + 1)
print("still here", flush=True)
"""
    with python(code, env={"PYTHONPATH": str(repository)}) as child:
        assert child.communicate()[0] == ""
        assert child.returncode == 1


# names


def test_a_pid_that_nobody_has_is_not_alive():
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    assert not is_alive(child.pid)
    assert is_alive(os.getpid())


def test_without_proc_the_table_comes_from_ps(monkeypatch, tmp_path):
    """macOS."""
    listing = (
        "    1     0 Ss   /sbin/launchd\n   77     1 S    /Applications/A b/c d\n   78    77 Z    (old)\n"
    )
    (tmp_path / "ps").write_text(f"#!/bin/sh\ncat <<'END'\n{listing}END\n")
    (tmp_path / "ps").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(process, "_LINUX", False)
    assert table("x") == {
        1: Process(1, 0, "launchd", marked=False),
        77: Process(77, 1, "c d", marked=False),
    }
    assert is_alive(os.getpid())
