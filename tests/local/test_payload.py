"""Variables on real ranks: they arrive as they were, once for all ranks, and nothing of them is left.

What the ranks have is checked on the ranks: a cell of assertions.
"""

from __future__ import annotations

import array
import errno
import fcntl
import mmap
import os
import re
import resource
import signal
import sys
import textwrap
import warnings
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


# what they are


THREE = pytest.mark.parametrize("how", ["forked", "executed", "mpirun"])


@THREE
def test_arrays_are_what_they_were(check, how):
    rng = np.random.default_rng(7)
    base = rng.random((300, 200))
    fixed = np.arange(LARGE // 8)
    fixed.flags.writeable = False
    points = np.zeros(4000, dtype=[("x", "<f4"), ("name", "S5"), ("at", "<M8[s]"), ("pair", "i2", (2,))])
    points["x"], points["name"], points["at"] = np.arange(4000), b"abc", np.datetime64("2024-02-29T01:02:03")
    variables = {
        "base": base,
        "big": np.arange(LARGE, dtype="u1"),
        "fortran": np.asfortranarray(base),
        "turned": base.T,
        "strided": base[::3, 5::7],
        "reversed_": base[::-1],
        "spread": np.broadcast_to(np.arange(500.0), (40, 500)),
        "fixed": fixed,
        "small_fixed": fixed[:3],
        "scalar": np.array(3.5),
        "empty": np.empty((0, 7), "f4"),
        "points": points,
        "records": points[:3].view(np.recarray),
        "objects": np.array([{"a": 1}, None, "text", base[:1]], dtype=object),
        "swapped": np.arange(5000, dtype=">i4"),
        "halves": np.arange(3000).astype("f2"),
        "complexes": base * 1j,
        "words": np.array(["a", "longer"] * 2000),
        "masked": np.ma.masked_less(base, 0.5),
        "number": np.float32(2.5),
        "same": [base, base],
    }
    cell = """
        import numpy as np
        base_ = np.random.default_rng(7).random((300, 200))
        assert (base == base_).all() and base.flags.writeable and base.flags.c_contiguous
        assert (big == np.arange(len(big)).astype("u1")).all()
        assert (fortran == base_).all() and fortran.flags.f_contiguous and not fortran.flags.c_contiguous
        assert (turned == base_.T).all() and turned.flags.f_contiguous
        assert strided.shape == (100, 28) and (strided == base_[::3, 5::7]).all() and strided.flags.writeable
        assert (reversed_ == base_[::-1]).all()
        assert spread.shape == (40, 500) and (spread == np.arange(500)).all()
        assert not fixed.flags.writeable and not small_fixed.flags.writeable and (fixed == np.arange(len(fixed))).all()
        try:
            fixed[0] = 1
        except ValueError:
            pass
        else:
            raise AssertionError("writable")
        assert scalar.shape == () and scalar == 3.5 and empty.shape == (0, 7) and empty.dtype == "f4"
        scalar[()] = 4
        assert points["x"][7] == 7 and points["name"][1] == b"abc" and str(points["at"][2]) == "2024-02-29T01:02:03"
        assert points.dtype["pair"].shape == (2,) and points.flags.writeable
        assert records.x[2] == 2 and type(records) is np.recarray
        assert objects[0] == {"a": 1} and objects[1] is None and (objects[3] == base_[:1]).all()
        assert swapped.dtype == ">i4" and (swapped == np.arange(5000)).all()
        assert halves.dtype == "f2" and halves[7] == 7 and (complexes == base_ * 1j).all() and words[1] == "longer"
        assert masked.sum() == np.ma.masked_less(base_, 0.5).sum() and masked.mask.any()
        assert type(number) is np.float32 and number == 2.5
        assert same[0] is same[1] is base
        base += 1
        assert (same[1] == base_ + 1).all()
    """
    check(variables, cell, **WAYS[how])
    assert not fixed.flags.writeable
    assert base[0, 0] == np.random.default_rng(7).random()


@THREE
def test_tensors_are_what_they_were(check, how):
    """What shares memory still does, and only that; what an optimizer points at are its model's parameters."""
    whole = torch.arange(LARGE // 4, dtype=torch.float32)
    net = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.BatchNorm1d(50))
    net.tied = net[0].weight
    opt = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.rand(3, 50)).sum().backward()
    opt.step()
    weights = net[0].weight.detach().clone()
    leaf = torch.ones(1000, requires_grad=True)
    (leaf * 3).sum().backward()
    frozen = torch.nn.Parameter(torch.ones(700), requires_grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is said to go one day
        quantized = torch.quantize_per_tensor(torch.arange(0, 3, 0.001), 0.1, 2, torch.quint8)
    numbers = torch.complex(torch.arange(900.0), torch.ones(900))
    variables = {
        "whole": whole,
        "row": whole[1000:2000].view(10, 100),
        "every": whole[::2],
        "as_ints": whole.view(torch.int32),
        "grown": torch.arange(5.0).expand(1000, 5),
        "turned": torch.arange(6000.0).reshape(60, 100).T,
        "net": net,
        "opt": opt,
        "weights": weights,
        "gradient": net[0].weight.grad.clone(),
        "leaf": leaf,
        "made": leaf * 2,
        "frozen": frozen,
        "brains": torch.arange(3000).to(torch.bfloat16),
        "eights": torch.arange(16).repeat(300).to(torch.float8_e4m3fn),
        "shorts": torch.arange(3000).to(torch.uint16),
        "flags": torch.arange(3000) % 2 == 0,
        "numbers": numbers,
        "mirrored": numbers.conj(),
        "negative": numbers.conj().imag,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "sparse": torch.eye(500).to_sparse(),
        "from_numpy": torch.from_numpy(np.arange(4000.0)),
        "nested": {"a": [whole[:10]]},
        "quantized": quantized,
    }
    cell = """
        import torch
        count = len(whole)
        assert whole[-1] == count - 1 and torch.equal(every, torch.arange(0.0, count, 2))
        whole[1000:1002] = -1
        assert row.shape == (10, 100) and row[0, 0] == -1 and every[500] == -1 and nested["a"][0][0] == 0
        assert as_ints[1000] == torch.tensor(-1.0).view(torch.int32)
        row[0, 1] = 5
        assert whole[1001] == 5
        every[0] = 9
        assert nested["a"][0][0] == 9
        assert grown.shape == (1000, 5) and grown.stride() == (0, 1) and grown.untyped_storage().nbytes() == 20
        assert turned.stride() == (1, 100) and turned[3, 2] == 203
        assert net.tied is net[0].weight and isinstance(net.tied, torch.nn.Parameter)
        assert torch.equal(net[0].weight, weights) and torch.equal(net[0].weight.grad, gradient)
        assert opt.param_groups[0]["params"][0] is net[0].weight and opt.state[net[0].weight]["step"] == 1
        opt.step()
        assert not torch.equal(net[0].weight, weights)
        assert leaf.requires_grad and leaf.is_leaf and torch.equal(leaf.grad, torch.full((1000,), 3.0))
        assert made.requires_grad and torch.equal(made.detach(), torch.full((1000,), 2.0))
        assert isinstance(frozen, torch.nn.Parameter) and not frozen.requires_grad and frozen.grad is None
        assert brains.dtype is torch.bfloat16 and brains[200] == 200
        assert eights.dtype is torch.float8_e4m3fn and eights[17].float() == 1
        assert shorts.dtype is torch.uint16 and shorts[2999].item() == 2999 and flags.sum() == 1500
        assert mirrored.is_conj() and torch.equal(mirrored.resolve_conj().imag, torch.full((900,), -1.0))
        assert negative.is_neg() and torch.equal(negative.resolve_neg(), torch.full((900,), -1.0))
        numbers[0] = 7 + 2j
        assert mirrored[0] == 7 - 2j and negative[0] == -2
        assert scalar.shape == () and scalar == 2.5 and empty.shape == (0, 4)
        assert sparse.is_sparse and torch.equal(sparse.to_dense(), torch.eye(500))
        assert torch.equal(from_numpy, torch.arange(4000.0, dtype=torch.float64))
        assert quantized.q_scale() == 0.1 and quantized.q_zero_point() == 2 and abs(quantized.dequantize()[1500] - 1.5) < 0.06
        leaf.grad.zero_()
        (leaf * leaf).sum().backward()
        assert torch.equal(leaf.grad, torch.full((1000,), 2.0))
    """
    check(variables, cell, **WAYS[how])
    assert whole[0] == 0
    assert torch.equal(net[0].weight, weights)


@THREE
def test_bytes_and_views_are_what_they_were(check, how):
    data = bytes(range(256)) * 100
    variables = {
        "data": data,
        "growing": bytearray(data),
        "view": memoryview(bytearray(data)),
        "fixed": memoryview(data),
        "short": memoryview(b"abc"),
        "table": memoryview(np.arange(6000.0).reshape(60, 100)),
        "steps": memoryview(data)[::2],
        "nothing": memoryview(b""),
        "numbers": array.array("i", range(5000)),
    }
    cell = """
        expected = bytes(range(256)) * 100
        assert data == expected and type(growing) is bytearray and growing == expected
        growing.extend(b"more")
        assert type(view) is memoryview and view == expected and not view.readonly
        view[0] = 7
        assert view[0] == 7 and growing[0] == 0
        assert type(fixed) is memoryview and fixed == expected and fixed.readonly
        assert short == b"abc" and short.readonly and nothing == b"" and len(nothing) == 0
        assert table.shape == (60, 100) and table.format == "d" and table[2, 3] == 203
        assert bytes(steps) == expected[::2]
        assert numbers.typecode == "i" and list(numbers) == list(range(5000))
        numbers.append(1)
    """
    check(variables, cell, **WAYS[how])


@THREE
def test_frames_are_what_they_were(check, how):
    pandas = pytest.importorskip("pandas", reason="needs pandas: pip install pandas")
    count = 30_000
    frame = pandas.DataFrame(
        {
            "n": np.arange(count),
            "x": np.arange(count) / 2,
            "kind": pandas.Categorical(
                ["a", "b", "c"] * (count // 3), categories=["c", "b", "a"], ordered=True
            ),
            "word": [f"w{n}" for n in range(count)],
            "at": pandas.date_range("2024-01-01", periods=count, freq="min", tz="Europe/Berlin"),
            "maybe": pandas.array([1, None, 3] * (count // 3), dtype="Int64"),
            "thing": [("t", n) for n in range(count)],
        },
        index=pandas.Index(np.arange(count) * 10, name="id"),
    )
    variables = {
        "frame": frame,
        "part": frame[::3],
        "series": frame["x"],
        "wide": pandas.DataFrame(np.ones((2000, 900))),
    }
    cell = """
        import pandas, numpy
        count = len(frame)
        assert (frame["n"].to_numpy() == numpy.arange(count)).all() and frame.index.name == "id"
        assert list(frame["kind"].cat.categories) == ["c", "b", "a"] and frame["kind"].max() == "a"
        assert frame["word"].iloc[-1] == f"w{count - 1}" and frame["word"].str.len().min() == 2
        assert str(frame["at"].dt.tz) == "Europe/Berlin" and frame["at"].iloc[60].hour == 1
        assert frame["maybe"].isna().sum() == count // 3 and frame["maybe"].sum() == 4 * count // 3
        assert frame["thing"].iloc[5] == ("t", 5)
        assert len(part) == count // 3 and part["n"].iloc[1] == 3
        frame.loc[10, "x"] = -1.0
        frame["new"] = frame["n"] + 1
        assert frame["x"].iloc[1] == -1 and series.iloc[1] == 0.5
        wide.iloc[0, 0] = 5
        wide += 1
        assert wide.iloc[0, 0] == 6 and wide.iloc[1, 1] == 2
        assert frame.groupby("kind", observed=True)["n"].count().tolist() == [count // 3] * 3
    """
    check(variables, cell, **WAYS[how])
    assert frame["x"].iloc[1] == 0.5


@THREE
def test_arrow_tables_are_what_they_were(check, how):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install pyarrow")
    count = LARGE // 8
    table = pyarrow.table(
        {
            "n": pyarrow.array(np.arange(count)),
            "word": pyarrow.array(["x", None, "longer"] * 1000 + ["y"] * (count - 3000)),
            "list": pyarrow.array([[1, 2], []] * (count // 2)),
        }
    )
    variables = {"table": table, "part": table.slice(5, 10), "code": table["word"].dictionary_encode()}
    cell = """
        import pyarrow.compute
        count = len(table)
        assert table["n"][count - 1].as_py() == count - 1 and table["word"].null_count == 1000
        assert pyarrow.compute.sum(table["n"]).as_py() == count * (count - 1) // 2
        assert table["list"][0].as_py() == [1, 2] and part["n"].to_pylist() == list(range(5, 15))
        assert code.chunk(0).dictionary.to_pylist() == ["x", "longer", "y"]
        table.validate(full=True)
    """
    check(variables, cell, **WAYS[how])


SHARED = """
    import os, pathlib, time
    def memory(name):
        lines = open("/proc/self/smaps").read().splitlines()
        at = next(i for i, line in enumerate(lines) if "memfd:jupyter_ddp" in line)
        return next(int(line.split()[1]) for line in lines[at:] if line.startswith(name + ":")) << 10
    use()
    here, rank = pathlib.Path(os.environ["SM_MODEL_DIR"]), os.environ["RANK"]
    for turn in "ab":
        (here / (turn + rank)).touch()
        while len(list(here.glob(turn + "*"))) < 2: time.sleep(0.01)
        if turn == "a":
            print(memory("Rss"), memory("Pss"), memory("Private_Dirty"))
"""


@linux
@pytest.mark.parametrize("kind", ["array", "strided array", "tensor", "memoryview", "frame", "arrow"])
def test_ranks_share_the_memory(check, kind):
    """Read from end to end by two ranks it is there once: half of it each, and no copy."""
    data = np.arange(LARGE // 8)
    if kind == "array":
        x, use = data, "x.sum()"
    elif kind == "strided array":
        x, use = np.repeat(data, 2)[::2], "x.sum()"
    elif kind == "tensor":
        x, use = torch.from_numpy(data), "x.sum()"
    elif kind == "memoryview":
        x, use = memoryview(data), "bytes(x)"
    elif kind == "frame":
        pandas = pytest.importorskip("pandas", reason="needs pandas: pip install pandas")
        x, use = pandas.DataFrame({"a": data}), "x['a'].sum()"
    else:
        pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install pyarrow")
        x, use = pyarrow.table({"a": data}), "x['a'].to_numpy().sum()"
    run = check({"x": x}, f"def use(): {use}\n{textwrap.dedent(SHARED)}")
    for rank in range(2):
        rss, pss, copied = map(int, run.text(rank).split())
        assert rss > LARGE * 0.99
        assert pss < rss * 0.51
        assert copied < LARGE // 100


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
@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (1 << 20, "(File too large): start Jupyter with a higher limit for files (ulimit -f)"),
        (10, "(File too large): see to that, or set c.DistributedMagics.run_root to another disk"),
    ],
    ids=["variables", "facts"],
)
def test_a_limit_for_files_is_told_in_a_sentence_and_nothing_is_started(store, limit, words):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(LaunchError) as caught:
            launch(len, np.ones(LARGE, "u1"), config=ONE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert words in str(caught.value)
    assert store.list() == []
    assert os.getpid() not in holders()


def test_many_bytes_are_announced(store, capsys):
    launch(len, np.ones(LARGE, "u1"), config=ONE)
    announced = r"17\.8 MB of variables travel to the ranks, made ready in \d+\.\d s: `_args` 17\.8 MB"
    assert re.search(announced, capsys.readouterr().out)


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
