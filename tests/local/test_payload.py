"""Variables on real ranks: they arrive as they were, once for all ranks, and nothing of them is left.

What the ranks have is checked on the ranks: a cell of assertions.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import signal
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from jupyter_ddp import carrying
from jupyter_ddp.backends import keep_warm
from jupyter_ddp.capture import capture
from jupyter_ddp.carrying import carry
from jupyter_ddp.config import LaunchConfig
from jupyter_ddp.errors import LaunchError
from jupyter_ddp.memory import free_memory
from jupyter_ddp.rundir import PAYLOAD_KEPT, RunStore
from jupyter_ddp.runner import launch
from jupyter_ddp.settings import SETTINGS

LARGE = PAYLOAD_KEPT + (1 << 20)
WAYS = {
    "forked": {"protocol": "torchrun"},
    "executed": {"protocol": "torchrun", "fork": False},
    "mpirun": {"protocol": "mpirun"},
    "mpirun, forked": {"protocol": "mpirun", "setup": "import torch"},
    "two instances": {"protocol": "torchrun", "instance_count": 2, "nproc_per_node": 1},
    "two instances of mpirun": {"protocol": "mpirun", "instance_count": 2, "nproc_per_node": 1},
}
linux = pytest.mark.skipif(sys.platform != "linux", reason="there is no memfd, and no /proc to look into")


def payload_of(**variables: object):
    program = SimpleNamespace(reads=frozenset(variables), assigns=frozenset())
    return capture(program, variables)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, object]:
    return WAYS[request.param]


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying, "free_memory", lambda: 0)


@pytest.fixture
def check(start):
    """Run a cell of assertions on two ranks that have some variables."""

    def run(variables: dict[str, object], cell: str, **fields: object):
        started = start(textwrap.dedent(cell), payload=payload_of(**variables), **fields)
        outcome = started.end().outcome
        assert outcome == "succeeded", [error.traceback for error in started.errors().values()]
        return started

    return run


# how they get there


def test_large_ones_arrive_however_ranks_are_started(check, way):
    check(
        {"a": np.arange(LARGE)}, f"assert len(a) == {LARGE} and a.sum() == {LARGE * (LARGE - 1) // 2}", **way
    )


@linux
def test_ranks_of_a_warm_process_have_them(check):
    keep_warm(on=True)
    try:
        for value in (1, 2):
            cell = f"import torch\nassert int(a.sum()) == {LARGE * value}"
            check({"a": torch.full((LARGE,), value, dtype=torch.uint8)}, cell, protocol="torchrun")
    finally:
        keep_warm(on=False)


MAPPED = """
    (line,) = {line for line in open("/proc/self/maps") if "memfd:" in line or "payload.bin" in line}
    assert line.split()[1] == "rw-p", line
    print(line.split(None, 5)[5].strip())
"""


@linux
def test_large_ones_are_mapped_from_memory_that_has_no_name(check):
    run = check({"a": np.ones(LARGE, "u1")}, MAPPED)
    assert [run.text(rank) for rank in range(2)] == ["/memfd:jupyter_ddp (deleted)\n"] * 2
    assert not run.rundir.payload.exists()


@linux
def test_where_memory_is_short_they_are_mapped_from_a_file_that_has_no_name(check, on_disk):
    run = check({"a": np.ones(LARGE, "u1")}, MAPPED)
    assert [run.text(rank) for rank in range(2)] == [f"{run.rundir.payload} (deleted)\n"] * 2
    assert not run.rundir.payload.exists()


@linux
def test_few_bytes_stay_with_the_run(check):
    run = check({"a": np.ones(10_000, "u1")}, MAPPED)
    assert [run.text(rank) for rank in range(2)] == [f"{run.rundir.payload}\n"] * 2
    assert run.rundir.payload.stat().st_mode & 0o777 == 0o600


def test_what_a_rank_writes_is_its_own(check, way):
    a = np.zeros(LARGE, "u1")
    cell = """
        import os, pathlib, time
        here = pathlib.Path(os.environ["SM_MODEL_DIR"])
        rank = int(os.environ["RANK"])
        a[:] = rank + 1
        (here / str(rank)).touch()
        while len(list(here.iterdir())) < 2: time.sleep(0.01)
        assert (a == rank + 1).all()
    """
    check({"a": a}, cell, **way)
    assert not a.any()


@linux
def test_memory_cannot_be_changed_by_anybody(tmp_path):
    rundir = RunStore(tmp_path).create()
    carry(payload_of(a=np.ones(LARGE, "u1")), rundir, by_descriptor=True)
    try:
        for change in (
            lambda: os.pwrite(rundir.carried, b"x", 0),
            lambda: os.ftruncate(rundir.carried, 1),
            lambda: mmap.mmap(rundir.carried, LARGE, access=mmap.ACCESS_WRITE),
            lambda: fcntl.fcntl(rundir.carried, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        ):
            with pytest.raises(PermissionError):
                change()
    finally:
        rundir.let_go()


@linux
def test_a_file_can_only_be_read_by_ranks(tmp_path, on_disk):
    rundir = RunStore(tmp_path).create()
    carry(payload_of(a=np.ones(LARGE, "u1")), rundir, by_descriptor=True)
    try:
        assert fcntl.fcntl(rundir.carried, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        assert list(rundir.path.iterdir()) == []
    finally:
        rundir.let_go()


def test_a_backend_that_takes_no_descriptor_finds_a_file(tmp_path):
    rundir = RunStore(tmp_path).create()
    payload = payload_of(a=np.ones(LARGE, "u1"))
    carry(payload, rundir, by_descriptor=False)
    assert rundir.carried is None
    assert rundir.payload.stat().st_size == payload.nbytes


# what is left


def holders() -> dict[int, list[str]]:
    """Return who has a payload without a name, by pid: in descriptors or mapped."""
    found: dict[int, list[str]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mine = [str(fd.readlink()) for fd in (process / "fd").iterdir()]
            mine += (process / "maps").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        if hits := [text for text in mine if "memfd:jupyter_ddp" in text or "payload.bin (deleted)" in text]:
            found[int(process.name)] = hits
    return found


WAITS = "import time\nprint('here', flush=True)\ntime.sleep(60)"


@linux
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_only_the_ranks_have_them_while_their_cell_runs(start, way, place, monkeypatch):
    if place == "disk":
        monkeypatch.setattr(carrying, "free_memory", lambda: 0)
    before = set(holders())
    run = start(WAITS, payload=payload_of(a=np.ones(LARGE, "u1")), **way)
    run.until_said("here")
    assert set(holders()) - before == {run.pid("rank0"), run.pid("rank1")}
    run.close()
    assert set(holders()) <= before


@linux
@pytest.mark.parametrize("victim", ["guard", "agent0", "launcher", "rank0"])
def test_nothing_is_left_when_something_dies(start, victim):
    before = set(holders())
    run = start(WAITS, payload=payload_of(a=np.ones(LARGE, "u1")), protocol="torchrun")
    run.until_said("here")
    run.kill(victim)
    run.end()
    assert set(holders()) <= before
    assert not run.rundir.payload.exists()


@linux
def test_nothing_is_left_of_what_never_reached_a_rank(start):
    before = set(holders())
    run = start(WAITS, payload=payload_of(a=np.ones(LARGE, "u1")), protocol="torchrun")
    run.job._guard.kill()
    run.job.wait_gone()
    assert run.processes() == []
    assert set(holders()) <= before


# what cannot be carried


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    monkeypatch.setattr(SETTINGS, "run_root", str(tmp_path / "runs"))
    return RunStore(tmp_path / "runs")


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch):
    """A disk and a memory on which there is room for a megabyte."""

    def write(descriptor: int, data: memoryview) -> int:
        if os.lseek(descriptor, 0, os.SEEK_CUR) > 1 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data[: 1 << 20])

    real = os.write
    monkeypatch.setattr("jupyter_ddp.travel.container.os", SimpleNamespace(**{**vars(os), "write": write}))


ONE = LaunchConfig(nproc_per_node=1, protocol="mpirun")


@pytest.mark.parametrize("size", [LARGE, 4 << 20])
def test_a_full_disk_is_told_in_a_sentence_and_nothing_is_started(store, full_disk, size):
    before = set(holders())
    with pytest.raises(LaunchError) as caught:
        launch(len, np.ones(size, "u1"), config=ONE)
    text = str(caught.value)
    assert "of variables could not be written to" in text
    assert text.endswith(
        "(No space left on device): free space there, set c.DistributedMagics.run_root to another disk, or send less"
    )
    assert store.list() == []
    assert set(holders()) <= before


@linux
def test_a_limit_for_files_is_told_in_a_sentence_and_nothing_is_started(store):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(LaunchError) as caught:
            launch(len, np.ones(LARGE, "u1"), config=ONE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert "(File too large): start Jupyter with a higher limit for files (ulimit -f)" in str(caught.value)
    assert store.list() == []
    assert os.getpid() not in holders()


def test_many_bytes_are_announced(store, capsys):
    launch(len, np.ones(LARGE, "u1"), config=ONE)
    assert "17.8 MB of variables travel to the ranks, made ready in 0." in capsys.readouterr().out


# how much memory there is


def test_free_memory_is_what_the_tightest_group_leaves(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert free_memory(proc, groups) == 8000 << 10
    (proc / "self/cgroup").write_text("0::/user/me\n")
    (groups / "user/me").mkdir(parents=True)
    for group, limit, used, cache in (("user", 5_000_000, 3_000_000, 500_000), ("user/me", "max", 9, 0)):
        (groups / group / "memory.max").write_text(f"{limit}\n")
        (groups / group / "memory.current").write_text(f"{used}\n")
        (groups / group / "memory.stat").write_text(
            f"anon 7\ninactive_file {cache}\nactive_file 1000\nshmem 9\n"
        )
    assert free_memory(proc, groups) == 5_000_000 - 3_000_000 + 501_000
    (groups / "user/memory.current").write_text("9000000\n")
    assert free_memory(proc, groups) == 0


def test_free_memory_under_groups_of_version_1_as_a_container_sees_them(tmp_path):
    """The path is the host's, which a container does not see: its own group is mounted as the root."""
    proc, group = tmp_path / "proc", tmp_path / "cgroup/memory"
    (proc / "self").mkdir(parents=True)
    group.mkdir(parents=True)
    (proc / "meminfo").write_text("MemAvailable: 8000 kB\n")
    (proc / "self/cgroup").write_text("5:cpu:/\n4:memory,x:/docker/0123\n1:name=systemd:/\n")
    (group / "memory.limit_in_bytes").write_text("2000000\n")
    (group / "memory.usage_in_bytes").write_text("1500000\n")
    (group / "memory.stat").write_text(
        "inactive_file 5\ntotal_inactive_file 100000\ntotal_active_file 200000\n"
    )
    assert free_memory(proc, tmp_path / "cgroup") == 800_000


def test_where_nothing_tells_there_is_no_free_memory(tmp_path):
    assert free_memory(tmp_path, tmp_path) == 0
