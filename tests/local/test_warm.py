"""A guard and a zygote that wait for the next run: used when nothing has changed, never kept for longer than wanted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jupyter_ddp.backends import _warm, keep_warm
from jupyter_ddp.events import RunEvent
from jupyter_ddp.runtime.process import descendants, is_alive, table

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")

CELL = "import os\nprint(os.environ['JUPYTER_DDP_RUN'], open('/proc/self/environ').read().count('JUPYTER_DDP_RUN=' + os.environ['JUPYTER_DDP_RUN']))"


@pytest.fixture(autouse=True)
def _let_go():
    yield
    keep_warm(on=False)
    assert _warm.WARM._guard is None


def waiting() -> int:
    assert _warm.WARM._guard is not None, "nothing waits"
    return _warm.WARM._guard.pid


def succeeded(run) -> None:
    assert run.end().outcome == "succeeded", (run.errors(), run.notes())
    assert run.of(RunEvent, phase="rendezvous")[-1].detail["why_exec"] == ""


def test_the_next_run_has_what_waits_and_the_one_after_it_another(start):
    keep_warm(on=True)
    pids = [waiting()]
    for _ in range(2):
        run = start(CELL, protocol="torchrun")
        assert run.pid("guard") == pids[-1]
        succeeded(run)
        assert [run.text(rank) for rank in range(2)] == [f"{run.rundir.run_id} 1\n"] * 2
        assert not (run.rundir.path / "spec.json").exists()
        run.close()
        pids.append(waiting())
    assert len(set(pids)) == 3


@pytest.mark.parametrize(
    "change",
    [{"env": {"PYTHONHASHSEED": "7"}}, {"env": {"LD_LIBRARY_PATH": "/nowhere"}}, {"nproc_per_node": 1}],
    ids=["Python's", "the linker's", "threads"],
)
def test_a_changed_environment_gets_a_new_process(start, change):
    keep_warm(on=True)
    before = waiting()
    run = start("import sys\nprint(sys.flags.hash_randomization)", protocol="torchrun", **change)
    assert run.pid("guard") != before
    assert not is_alive(before)
    succeeded(run)


def test_what_only_a_run_was_given_is_not_kept(start):
    keep_warm(on=True)
    before = waiting()
    run = start("import os\nprint(os.environ['TOKEN'])", protocol="torchrun", env={"TOKEN": "s3cret"})
    assert run.pid("guard") == before
    succeeded(run)
    assert run.text(0) == "s3cret\n"
    run.close()
    assert b"s3cret" not in Path(f"/proc/{waiting()}/environ").read_bytes()


def test_limits_that_were_changed_get_a_new_process(monkeypatch):
    mark = _warm._mark(dict(os.environ))
    assert mark == _warm._mark(dict(os.environ))
    before = os.umask(0o077)
    try:
        assert _warm._mark(dict(os.environ)) != mark
    finally:
        os.umask(before)
    monkeypatch.setattr(sys, "executable", "/other/python")
    assert _warm._mark(dict(os.environ)) != mark


def test_one_that_has_died_is_not_used(start):
    keep_warm(on=True)
    pid = waiting()
    os.kill(pid, signal.SIGKILL)
    run = start(CELL, protocol="torchrun")
    assert run.pid("guard") != pid
    succeeded(run)


def test_one_for_torchrun_is_none_for_mpirun(start):
    """mpirun tells torch how many ranks a machine has: such a rank needs another import. It waits for the next one."""
    keep_warm(on=True)
    pid = waiting()
    cell = "# torch\n" + CELL
    first = start(cell, protocol="mpirun")
    assert first.pid("guard") != pid
    succeeded(first)
    first.close()
    pid = waiting()
    second = start(
        CELL, protocol="mpirun"
    )  # a cell that does not name torch is forked too where that costs nothing
    assert second.pid("guard") == pid
    succeeded(second)


def test_a_cell_of_mpirun_without_torch_leaves_it_alone(start):
    keep_warm(on=True)
    before = waiting()
    run = start("print('hi')", protocol="mpirun")
    assert run.end().outcome == "succeeded"
    assert waiting() == before


KERNEL = """
import sys, time
from jupyter_ddp.backends import _warm, keep_warm
keep_warm(on=True)
print(_warm.WARM._guard.pid, flush=True)
time.sleep(300)
"""


def test_it_dies_with_its_kernel():
    with subprocess.Popen([sys.executable, "-c", KERNEL], stdout=subprocess.PIPE, text=True) as kernel:
        guard = int(kernel.stdout.readline())
        while not (zygotes := descendants(table(), guard)):
            time.sleep(0.01)
        kernel.kill()
        kernel.wait()
    end = time.monotonic() + 20
    while any(map(is_alive, [guard, *zygotes])) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(is_alive, [guard, *zygotes]))


def test_it_gives_its_memory_back():
    code = "import os\nfrom jupyter_ddp.runtime import waiting\nprint(waiting.wait(os.getppid(), 0.2))"
    done = subprocess.run([sys.executable, "-c", code], stdin=socket_end(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr


def socket_end():
    import socket

    ends = socket.socketpair()
    socket_end.kept = ends  # open while the test runs
    return ends[1].fileno()


@pytest.mark.parametrize("victim", ["agent0", "guard", "zygote", "nurse", "launcher"])
def test_nothing_survives_a_death_in_a_warm_run(start, protocol, victim):
    from tests.local.test_deaths import HIDING, hidden, until_gone

    keep_warm(on=True)
    if protocol == "mpirun":  # what waits for torchrun is none for it: the next one is
        first = start("import torch", protocol=protocol)
        succeeded(first)
        first.close()
    pid = waiting()
    run = start(HIDING, protocol=protocol)
    assert run.pid("guard") == pid
    run.until_said("here")
    pids = hidden([run.text(rank) for rank in range(2)])
    run.kill(victim)
    assert run.end().outcome == "lost"
    assert until_gone(pids) == []
