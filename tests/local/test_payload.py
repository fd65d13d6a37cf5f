"""Variables on their way to real ranks: one copy for all, which is nobody's but theirs, and gone with them."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

import pytest

from jupyter_ddp.backends import _payload, keep_warm
from jupyter_ddp.errors import LaunchError

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

BIG = numpy.arange(3 << 20, dtype="float64")  # 24 MiB
SAY_SHARE = """
import re
text = open("/proc/self/smaps").read()
blocks = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text)
mine = [block for block in blocks if "jupyter_ddp" in block.split("\\n")[0] or "payload.bin" in block.split("\\n")[0]]
total = float(big.sum())
before = big[5]
big[5] = RANK if (RANK := int(__import__("os").environ["RANK"])) else 100
print(total == sum(range(3 << 20)), before, len(mine), mine[0].split("\\n")[0].split(None, 5)[5])
"""


WAYS = {
    "torchrun": {"protocol": "torchrun"},
    "torchrun, executed": {"protocol": "torchrun", "fork": False},
    "mpirun": {"protocol": "mpirun"},
}


def held_by(pid: int | str) -> list[str]:
    """Return what a process has open of payloads."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            found.append(str(entry.readlink()))
    return [target for target in found if "memfd:jupyter_ddp" in target or "payload.bin" in target]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is a file with a name")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("instances", [1, 2])
def test_a_big_payload_is_memory_that_all_ranks_map(start, way, instances):
    run = start(SAY_SHARE, {"big": BIG}, instance_count=instances, **WAYS[way])
    assert held_by("self") == []  # the notebook has let go of it
    assert run.end().outcome == "succeeded", run.errors()
    for rank in range(run.world_size):
        assert run.text(rank) == "True 5.0 1 /memfd:jupyter_ddp (deleted)\n"
    assert BIG[5] == 5
    assert not run.rundir.payload.exists()
    assert run.job.notes[0].startswith("25.2 MB of variables put into memory in ")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is a file with a name")
@pytest.mark.parametrize("way", WAYS)
def test_what_does_not_fit_into_memory_is_a_file_without_a_name(start, way, monkeypatch):
    monkeypatch.setattr(_payload, "free_memory", lambda: 10 << 20)
    run = start(SAY_SHARE, {"big": BIG}, **WAYS[way])
    assert held_by("self") == []
    assert not run.rundir.payload.exists()
    assert run.end().outcome == "succeeded", run.errors()
    for rank in range(run.world_size):
        assert run.text(rank) == f"True 5.0 1 {run.rundir.payload} (deleted)\n"
    assert "put into a file in" in run.job.notes[0]


def test_a_waiting_guard_gets_it_too(start):
    keep_warm(on=True)
    try:
        run = start(SAY_SHARE, {"big": BIG}, protocol="torchrun")
        assert run.end().outcome == "succeeded", run.errors()
        assert run.text(1) == "True 5.0 1 /memfd:jupyter_ddp (deleted)\n"
    finally:
        keep_warm(on=False)


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_nobody_but_the_ranks_holds_it_while_they_work(start, protocol):
    run = start("import time\nprint('here', flush=True)\ntime.sleep(300)", {"big": BIG}, protocol=protocol)
    run.until_said("here")
    for who in ("guard", "agent0", "stub0", "launcher"):
        assert held_by(run.pid(who)) == [], who


@pytest.mark.parametrize("memory", [True, False])
def test_no_room_is_said_before_anything_starts(start, tmp_path, monkeypatch, memory):
    monkeypatch.setattr(_payload, "free_memory", lambda: (1 << 40) if memory else 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(LaunchError, match=r"of variables could not be written to .* \(File too large\)"):
            start("1", {"big": BIG})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert held_by("self") == []
    assert list(tmp_path.rglob("payload.bin")) == []


def test_a_small_payload_stays_with_its_run(start, protocol):
    run = start("print(small)", {"small": [1, 2]}, protocol=protocol)
    assert run.end().outcome == "succeeded"
    assert run.text(0) == "[1, 2]\n"
    assert run.rundir.payload.stat().st_size < 5000
    assert run.job.notes == ()


def test_what_memory_is_free():
    assert (1 << 20) < _payload.free_memory() < (1 << 50)


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"max": "max", "current": "5"}, None),
        ({"max": "1000", "current": "400"}, 600),
        ({"max": "junk"}, None),
        ({}, None),
    ],
)
def test_the_memory_that_a_container_has_left(tmp_path, monkeypatch, files, free):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    everything = _payload.free_memory()
    monkeypatch.setattr(_payload, "_CGROUPS", ((str(tmp_path / "max"), str(tmp_path / "current")),))
    found = _payload.free_memory()
    assert found == free if free is not None else found > everything // 2


# right values

VALUES = """
import numpy as np, torch
def shape_of(a):
    return (a.dtype.name, a.shape, a.flags.c_contiguous, a.flags.f_contiguous, a.flags.writeable)
print(shape_of(fortran), fortran[2, 1], shape_of(readonly), shape_of(empty), shape_of(zero), float(zero))
print(records["name"].tolist(), objects.tolist(), shape_of(records))
print(base.untyped_storage().data_ptr() == view.untyped_storage().data_ptr(), view.stride(), view[0, 0].item())
view[0, 0] = 77
print(base[0, 0].item(), type(weight).__name__, weight.requires_grad, weight.grad.tolist())
print(half.dtype, half.tolist(), conj.is_conj(), conj.tolist(), expanded.stride(), expanded.tolist())
print(sparse.layout, sparse.to_dense().tolist(), model.weight is tied.weight, model(torch.ones(2)).item())
print(quantized.dtype, quantized.dequantize().tolist(), scalar.item(), nothing.shape)
print(type(raw).__name__, raw[:3], type(plain).__name__, matrix.tolist(), masked.tolist())
"""


def all_kinds() -> dict:
    base = torch.arange(12.0).reshape(3, 4)
    weight = torch.nn.Parameter(torch.ones(2))
    (weight * 3).sum().backward()
    readonly = numpy.arange(4)
    readonly.flags.writeable = False
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(model.weight, 0.5)
    tied = torch.nn.Linear(2, 1, bias=False)
    tied.weight = model.weight
    objects = numpy.empty(2, dtype=object)
    objects[:] = [{"a": 1}, "text"]
    return {
        "fortran": numpy.asfortranarray(numpy.arange(12.0).reshape(3, 4)),
        "readonly": readonly,
        "empty": numpy.empty((0, 3), dtype="int8"),
        "zero": numpy.array(2.5),
        "records": numpy.array([(1, "ann"), (2, "bob")], dtype=[("id", "i4"), ("name", "U8")]),
        "objects": objects,
        "base": base,
        "view": base.t(),
        "weight": weight,
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "conj": torch.tensor([1 + 2j]).conj(),
        "expanded": torch.tensor([7.0]).expand(3),
        "sparse": torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse(),
        "model": model,
        "tied": tied,
        "quantized": torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.5, 0, torch.qint8),
        "scalar": torch.tensor(3),
        "nothing": torch.empty(0, 2),
        "raw": bytearray(b"abc" * 100),
        "plain": b"xyz",
        "matrix": numpy.arange(4).reshape(2, 2).T,
        "masked": numpy.ma.masked_array([1, 2], mask=[False, True]),
    }


@pytest.mark.filterwarnings("ignore:.*quantize.*", "ignore:.*[Ss]parse.*", "ignore:.*torch.ao.*")
@pytest.mark.parametrize("way", WAYS)
def test_arrays_and_tensors_arrive_as_they_are(start, way, capsys):
    variables = all_kinds()
    exec(VALUES, dict(variables, view=variables["view"]))
    here = capsys.readouterr().out
    run = start(VALUES, all_kinds(), **WAYS[way])
    assert run.end().outcome == "succeeded", run.errors()
    assert run.text(0) == run.text(1) == here


TABLES = """
print(frame.dtypes.astype(str).to_dict(), frame["x"].sum(), frame["kind"].cat.categories.tolist(), frame.index.name)
frame.loc[frame.index[0], "x"] = 5.0
print(frame["x"].iloc[0], table.num_rows, table.column("a").to_pylist()[:2], table.schema.names)
"""


def test_tables_arrive_as_they_are(start, protocol, capsys):
    pandas = pytest.importorskip("pandas", reason="needs pandas: it is in the dev extra")
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow: it is in the dev extra")

    def tables() -> dict:
        frame = pandas.DataFrame(
            {"x": numpy.arange(4.0), "kind": pandas.Categorical(list("abab")), "s": list("wxyz")}
        )
        frame.index.name = "row"
        return {"frame": frame, "table": arrow.table({"a": [1, 2, 3], "b": ["x", None, "z"]})}

    exec(TABLES, tables())
    here = capsys.readouterr().out
    run = start(TABLES, tables(), protocol=protocol)
    assert run.end().outcome == "succeeded", run.errors()
    assert run.text(0) == here
