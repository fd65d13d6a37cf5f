"""Ranks that fail: the cause is told, the others are ended, nothing is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jupyter_ddp.events import RankEvent
from jupyter_ddp.run import Run
from jupyter_ddp.runtime.process import table
from jupyter_ddp.runtime.wire import pack

RAISE = """
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("boom")
time.sleep(300)
"""


def test_an_exception_on_one_rank_ends_the_others(start, protocol):
    """B42, B57."""
    run = start(RAISE, protocol=protocol)
    assert run.end().outcome == "failed"
    error = run.errors()[1]
    assert (error.type, error.message, error.line, error.source) == (
        "ValueError",
        "boom",
        5,
        'raise ValueError("boom")',
    )
    assert "jupyter_ddp" not in error.traceback
    ends = run.ends()
    assert (ends[1].exit_code, ends[1].by_run) == (1, False)
    assert (ends[0].signal, ends[0].by_run) == (signal.SIGTERM, True)


def test_ranks_that_wait_in_a_collective_are_ended(start, protocol):
    """B42: nobody waits for the collective's own timeout."""
    cell = """
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=30))
if dist.get_rank() == 1:
    raise ValueError("loss became nan at step 12")
dist.all_reduce(torch.ones(1))
"""
    run = start(cell, protocol=protocol)
    assert run.end().outcome == "failed"
    first = min(run.errors().values(), key=lambda error: error.time)
    assert (first.rank, first.message) == (1, "loss became nan at step 12")


def test_ranks_that_ignore_sigterm_are_killed(start, protocol):
    """B43."""
    ignoring = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    run = start(ignoring + RAISE, protocol=protocol)
    assert run.end().outcome == "failed"
    assert run.ends()[0].signal == signal.SIGKILL


def test_siblings_that_fail_at_once_all_tell_their_own_error(start, protocol):
    """B48: no launcher kills a sibling before it has spoken."""
    run = start(
        "import os\nraise RuntimeError('rank ' + os.environ['RANK'])", protocol=protocol, nproc_per_node=4
    )
    assert run.end().outcome == "failed"
    assert {rank: error.message for rank, error in run.errors().items()} == {r: f"rank {r}" for r in range(4)}
    assert all(error.traceback for error in run.errors().values())


def test_os_exit_is_a_failure_whatever_the_code(start, protocol):
    """B45, B86: a rank that ends without having finished its cell has failed."""
    for code in (3, 0):
        cell = f"import os, time\nprint('last words')\nif os.environ['RANK'] == '1': os._exit({code})\ntime.sleep(300)"
        run = start(cell, protocol=protocol)
        assert run.end().outcome == "failed"
        assert (run.ends()[1].exit_code, run.ends()[1].by_run) == (code, False)
        assert [run.text(rank) for rank in range(2)] == ["last words\n"] * 2


def test_sys_exit(start, protocol):
    """B27: 0 is a quiet end of that rank, anything else a failure with that code or text."""
    quiet = start("import sys\nprint('before')\nsys.exit(0)", protocol=protocol)
    assert quiet.end().outcome == "succeeded"
    assert quiet.text(0) == "before\n"
    code = start("import sys\nsys.exit(3)", protocol=protocol)
    assert code.end().outcome == "failed"
    assert (code.errors()[0].type, code.ends()[0].exit_code) == ("SystemExit", 3)
    text = start("import sys\nsys.exit('bad data')", protocol=protocol)
    assert text.end().outcome == "failed"
    assert text.errors()[0].message == "bad data"


def test_a_crash_is_told_with_its_signal_and_stack(start, protocol):
    """B46."""
    run = start(
        "import ctypes, os, time\nif os.environ['RANK'] == '0': ctypes.string_at(0)\ntime.sleep(300)",
        protocol=protocol,
    )
    assert run.end().outcome == "failed"
    assert (run.ends()[0].signal, run.ends()[0].by_run) == (signal.SIGSEGV, False)
    assert '"<distributed cell>", line 3' in run.stacks()[0]
    assert "jupyter_ddp" not in run.stacks()[0]


def test_mpi_abort_is_named(start):
    cell = "from mpi4py import MPI\nimport time\nif MPI.COMM_WORLD.Get_rank() == 1: MPI.COMM_WORLD.Abort(7)\ntime.sleep(300)"
    end = start(cell).end()
    assert end.outcome in ("lost", "failed")
    assert "rank 1 called MPI_Abort with error code 7" in end.reason


def test_a_background_process_does_not_hold_the_run(start, protocol):
    """B53: the run is over with its ranks; what they left is ended and named."""
    run = start(
        "import subprocess\nsubprocess.Popen(['sleep', '300'])\nprint('rank finished')", protocol=protocol
    )
    assert run.end().outcome == "succeeded"
    assert "ranks left processes running; they were ended: sleep" in run.notes()


def test_a_time_limit_shows_where_the_unfinished_ranks_are(start, protocol):
    """B54."""
    cell = """
import os, time
if os.environ["RANK"] == "1":
    print("done")
else:
    while True:
        time.sleep(0.01)
"""
    run = start(cell, protocol=protocol, timeout=1)
    end = run.end()
    assert (end.outcome, end.unfinished) == ("timeout", (0,))
    assert '"<distributed cell>", line' in run.stacks()[0]
    assert 1 not in run.stacks()


def test_the_time_limit_holds_under_a_deadlock_in_c(start):
    """B54: a rank that waits in gloo runs no Python, and is shown all the same."""
    setup = "import os, torch.distributed as dist\ndist.init_process_group('gloo')"
    cell = """
if os.environ["RANK"] != "0":
    dist.barrier()
else:
    while True:
        pass
"""
    run = start(cell, timeout=1, setup=setup)
    end = run.end()
    assert (end.outcome, end.unfinished) == ("timeout", (0, 1))
    assert "barrier" in run.stacks()[1]
    assert "pass" in run.stacks()[0] or "while True:" in run.stacks()[0]


def test_rank_0_may_end_long_before_others_make_a_new_group(start):
    """The store lives in instance 0's launcher: it stays until the last rank of all instances has ended."""
    cell = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
if rank < 2:
    dist.new_group([2, 3])
    print("left")
else:
    time.sleep(5)
    group = dist.new_group([2, 3])
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    print("sum", int(total))
"""
    run = start(cell, protocol="torchrun", instance_count=2)
    assert run.end().outcome == "succeeded", run.errors()
    assert [run.text(rank) for rank in range(4)] == ["left\n"] * 2 + ["sum 2\n"] * 2


HELD = "import threading, time\nthreading.Thread(target=time.sleep, args=(300,), name='loader').start()\nprint('done')"


def test_a_rank_whose_cell_is_over_but_which_does_not_exit_is_ended_by_an_interrupt(start):
    """A thread of the user's holds it; its cell needs no time for a clean-up any more."""
    run = start(HELD)
    run.until(lambda: len(run.of(RankEvent, state="finished")) == 2)
    run.job.send("interrupt")
    assert run.end().outcome == "interrupted"
    assert all((end.signal, end.by_run) == (signal.SIGTERM, True) for end in run.ends().values())


def test_a_rank_whose_cell_is_over_but_which_does_not_exit_is_named_by_the_time_limit(start):
    run = start(HELD, timeout=1)
    end = run.end()
    assert (end.outcome, end.unfinished) == ("timeout", (0, 1))
    assert all(end.by_run for end in run.ends().values())
    assert "_shutdown" in run.stacks()[0] or "join" in run.stacks()[0]


def test_what_a_rank_started_may_print_after_the_rank_has_ended(start):
    cell = """
import os, subprocess, time
if os.environ["RANK"] == "0":
    subprocess.Popen(["sh", "-c", "sleep 0.5; echo late"])
else:
    time.sleep(1.5)
print("end")
"""
    run = start(cell)
    assert run.end().outcome == "succeeded"
    assert run.text(0) == "end\nlate\n"


def test_messages_that_nobody_understands_end_nothing(start):
    """A client can only ask for what clients may; an agent is taken for one only when one is missing."""
    run = start("import time\nprint('here')\ntime.sleep(1)")
    run.until_said("here")
    (path,) = run.job._sockets()
    hostile = [
        [{"op": "hello", "role": "client"}, {"op": "ended", "rank": 0}],
        [{"op": "hello", "role": "agent", "node": 7}, {"op": "lost"}],
        [{"op": "hello", "role": "agent"}],
        [{"op": "hello", "role": "rank", "rank": 0, "pid": "x"}],
        [{"op": "hello", "role": "stub", "rank": []}],
        [{"no": "op"}],
    ]
    for messages in hostile:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            connection.sendall(b"".join(map(pack, messages)))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(b"\xff" * 64)
    assert run.end().outcome == "succeeded"


IN_A_COLLECTIVE = """
import ctypes, os, resource, sys, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    {end}
dist.barrier()
"""


@pytest.mark.parametrize(
    ("end", "code", "signum", "instances"),
    [
        ("os.abort()", None, signal.SIGABRT, 2),
        ("ctypes.CDLL('libstdc++.so.6')._ZSt9terminatev()", None, signal.SIGABRT, 1),
        ("os._exit(0)", 0, None, 2),
        ("sys.exit('bad data')", 1, None, 1),
    ],
    ids=["abort", "terminate", "exit-0", "sys-exit"],
)
def test_a_rank_that_leaves_a_collective_takes_the_others_along(
    start, protocol, end, code, signum, instances
):
    """B45, B46: no sibling waits for who does not come, and its error is not taken for the cause."""
    cell = IN_A_COLLECTIVE.format(end=end)
    run = start(cell, protocol=protocol, instance_count=instances, nproc_per_node=2 // instances)
    assert run.end().outcome == "failed"
    left = run.ends()[1]
    assert (left.exit_code, left.signal, left.by_run) == (code, signum, False)
    assert "rank 1" in Run(run.rundir).result(timeout=10).message.splitlines()[0]
    if signum:
        assert '"<distributed cell>", line 7 in <module>' in run.stacks()[1]
        assert "jupyter_ddp" not in run.stacks()[1]


def test_a_rank_that_gets_no_memory_says_where(start, protocol):
    cell = IN_A_COLLECTIVE.format(
        end="resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)); held = bytearray(64 << 30)"
    )
    run = start(cell, protocol=protocol)
    assert run.end().outcome == "failed"
    assert (run.errors()[1].type, run.errors()[1].line) == ("MemoryError", 7)


def test_a_stack_that_overflows_in_c_is_shown_in_few_lines(start, protocol):
    cell = """
import ctypes, sys
sys.setrecursionlimit(10**9)
def dive(): return call()
call = ctypes.CFUNCTYPE(ctypes.c_int)(dive)
dive()
"""
    run = start(cell, protocol=protocol, nproc_per_node=1)
    assert run.end().outcome == "failed"
    assert run.ends()[0].signal == signal.SIGSEGV
    assert "more times]" in run.stacks()[0]
    assert run.stacks()[0].count("dive") < 10


@pytest.fixture
def little_memory():
    """A memory cgroup that has 600 MB."""
    group = Path(f"/sys/fs/cgroup/memory/jupyter_ddp-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(600_000_000))
    except OSError:
        pytest.skip("needs root, and memory cgroups of version 1")
    yield group
    group.rmdir()


def test_a_rank_that_the_system_kills_for_its_memory(start, protocol, little_memory):
    join = f"open('{little_memory}/cgroup.procs', 'w').write(str(os.getpid())); held = bytearray(2 << 30)"
    run = start(IN_A_COLLECTIVE.format(end=join), protocol=protocol)
    assert run.end().outcome == "failed"
    assert (run.ends()[1].signal, run.ends()[1].by_run) == (signal.SIGKILL, False)


AS_NOBODY = """
import os, resource, sys
from jupyter_ddp import LaunchConfig, launch
from jupyter_ddp.errors import JupyterDDPError
from jupyter_ddp.settings import SETTINGS
root, protocol, room = sys.argv[1:]
os.setgroups([]), os.setgid(NOBODY), os.setuid(NOBODY)
os.environ["HOME"] = SETTINGS.run_root = root
resource.setrlimit(resource.RLIMIT_NPROC, (int(room), int(room)))
try:
    launch(print, 'hi', config=LaunchConfig(nproc_per_node=2, protocol=protocol))
except JupyterDDPError as error:
    print("ERROR", error)
"""
NOBODY = 65_000
"""A user who has no processes; a test that fails could leave some, so nobody else's."""


def launch_as_nobody(protocol: str, room: int) -> str:
    """Run a cell as a user who may have `room` processes and threads; return what the kernel shows."""
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        os.chown(root, NOBODY, NOBODY)
        program = AS_NOBODY.replace("NOBODY", str(NOBODY))
        done = subprocess.run(
            [sys.executable, "-c", program, root, protocol, str(room)],
            capture_output=True,
            text=True,
            cwd="/",
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        for run in Path(root).glob("????????"):
            assert [process for process in table(run.name).values() if process.marked] == []
    return done.stdout


@pytest.mark.parametrize("room", range(3, 13, 3))
def test_too_few_processes_are_told_as_such(protocol, room):
    """Wherever it is that nothing can be forked: guard, agent, launcher, stub or rank. Root has no such limit."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become a user who has no processes")
    answer = launch_as_nobody(protocol, room)
    assert "(ulimit -u" in answer.partition("ERROR")[2], answer


def test_a_recursion_without_end_is_an_error_of_the_cell(start, protocol):
    cell = "import os, time\nif os.environ['RANK'] == '1':\n    (f := lambda: f())()\ntime.sleep(300)"
    run = start(cell, protocol=protocol)
    assert run.end().outcome == "failed"
    assert (run.errors()[1].type, run.errors()[1].line) == ("RecursionError", 4)


def test_a_quiet_exit_is_the_first_cause_before_siblings_in_a_collective(start, protocol):
    cell = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    os._exit(0)
dist.barrier()
"""
    run = start(cell, protocol=protocol)
    assert run.end().outcome == "failed"
    assert (run.ends()[1].exit_code, run.ends()[1].by_run) == (0, False)
    assert Run(run.rundir, None).result().message.startswith("rank 1 exited with code 0")
