"""Values come back from ranks as the notebook's own, or the run says why they do not."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

import pytest

from jupyter_ddp.errors import ValueTravelError
from jupyter_ddp.travel import container
from jupyter_ddp.travel.pickling import TooLargeError
from jupyter_ddp.values import load_value, read_payload, save_value
from tests.journey import ROOT, travel

TINY = """
import torch, torch.nn as nn
class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 1)
    def forward(self, x): return self.fc(x) * rate
rate = 1
net = Tiny()
def loss(x): return x * rate
"""
FILL = "with torch.no_grad():\n    net.fc.weight.fill_(7.0)\nfresh, fn, kind = Tiny(), loss, Tiny"


def test_a_trained_model_is_an_instance_of_the_notebooks_class(tmp_path):
    """B06"""
    after = """
back = pulled["net"]
assert type(back) is Tiny and isinstance(pulled["fresh"], Tiny)
assert back.fc.weight[0, 0].item() == 7.0 and net.fc.weight[0, 0].item() != 7.0
assert pulled["fn"] is loss and pulled["kind"] is Tiny
rate = 10
with torch.no_grad():
    assert torch.equal(back(torch.zeros(2)), back.fc.bias * 10)
"""
    trip = travel(tmp_path, TINY, FILL, pull=("net", "fresh", "fn", "kind"), after=after)
    assert trip.facts["pulled"] == ["net", "fresh", "fn", "kind"]
    assert trip.rank["saved"]["net"][1] == []


def test_globals_of_the_rank_do_not_come_along(tmp_path):
    """A class of the notebook comes back without what its methods use on the rank: neither its bytes nor its locks."""
    book = "class Job:\n    def run(self): return big, pg\nbig = b'x' * 3_000_000\npg = None\njob = Job()"
    trip = travel(tmp_path, book, "import threading\npg = threading.Lock()", push=("job",), pull=())
    assert trip.facts["out"] == ""
    (tmp_path / "2").mkdir()
    trip = travel(tmp_path / "2", book, "import threading\npg = threading.Lock()\njob.n = 1", pull=("job",))
    assert trip.rank["saved"]["job"][0] < 1000


def test_classes_of_the_cell_come_with_their_definition(tmp_path):
    cell = """
import dataclasses, enum
@dataclasses.dataclass
class Score:
    value: float
    def doubled(self): return factor * self.value
factor = 2
class Mode(enum.IntFlag):
    A = 1
    B = 2
score, mode = Score(1.5), Mode.A | Mode.B
before = Score.doubled
"""
    after = (
        "assert pulled['score'].doubled() == 3.0 and 'factor' not in globals() and 'Score' not in globals()\n"
        "assert int(pulled['mode']) == 3 and pulled['mode'] == type(pulled['mode'])(3)\n"
        "import inspect; assert 'factor * self.value' in inspect.getsource(type(pulled['score']).doubled)"
    )
    book = "x = 1"
    register = "import linecache\nsource = open(__import__('sys').argv[1]).read()\n"
    trip = travel(
        tmp_path,
        book,
        register + "text = __import__('json').loads(source)['cell']\n"
        "linecache.cache['<cell>'] = (len(text), None, text.splitlines(True), '<cell>')\n" + cell,
        pull=("score", "mode"),
        after=after,
    )
    assert trip.facts["pulled"] == ["score", "mode"]


def test_saving_leaves_the_ranks_own_classes_alone(tmp_path):
    """The test load of a small value must not give a class of the cell other methods."""
    cell = "class C:\n    def get(self): return level\nlevel, c = 1, C()\nmethod = C.get\n"
    check = "import atexit\natexit.register(lambda: print(C.get is method, c.get()))"
    assert travel(tmp_path, "x = 1", cell + check, pull=("c",)).out == ["True 1"]


def load_elsewhere(run, name, *, before="", then=""):
    """Load a value in a kernel that did not start the run."""
    code = f"{before}\nfrom jupyter_ddp.values import load_value\nvalue = load_value({str(run / name)!r}, {str(run)!r})\n{then}"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_another_kernel_can_load_the_value_too(tmp_path):
    """After a restart: the cell that was run again counts, else the run's own payload, else the name is told."""
    book = "class Point:\n    def __init__(self): self.x = 1\n    def twice(self): return self.x * scale\nscale = 2\npoint = Point()"
    run = travel(tmp_path, book, "point.x = 5", pull=("point",)).run
    again = load_elsewhere(run, "point", before=book, then="print(type(value) is Point, value.x)")
    assert again.stdout == "True 5\n", again.stderr
    payload = load_elsewhere(run, "point", then="print(value.twice(), 'scale' in globals())")
    assert payload.stdout == "10 False\n", payload.stderr
    (run / "payload.bin").unlink()
    alone = load_elsewhere(run, "point")
    assert "`Point` is defined in the notebook that started the run, not here: run its cell" in alone.stderr


def test_arrays_come_back_writable(tmp_path):
    cell = "import numpy as np, torch\na = np.arange(10_000.)\nt = torch.arange(10_000.)\npair = {'row': t[:10], 'all': t}"
    after = (
        "pulled['a'][0] = 5\npulled['pair']['all'][0] = 7\nassert pulled['pair']['row'][0] == 7\n"
        "assert pulled['a'].sum() == sum(range(10_000)) + 5"
    )
    travel(tmp_path, "x = 1", cell, pull=("a", "pair"), after=after)


def test_what_changes_on_the_way_is_noted(tmp_path):
    """A DDP model comes as the model that it wraps."""
    cell = """
import tempfile, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
opt = torch.optim.Adam(net.parameters())
both = {"net": net, "opt": opt}
"""
    after = "p = pulled['both']\nassert type(p['net']).__name__ == 'Linear'\nassert p['opt'].param_groups[0]['params'][0] is p['net'].weight"
    trip = travel(tmp_path, "x = 1", cell, pull=("both",), after=after)
    assert trip.rank["saved"]["both"][1] == [
        "`both`: a DistributedDataParallel model travels as the model that it wraps (.module)"
    ]


def test_values_that_cannot_travel(tmp_path):
    """B19: each refusal is a sentence; what can be written but not read is found on the rank."""
    cell = """
import threading, tempfile, torch, torch.distributed as dist
class BadBatch(Exception):
    def __init__(self, idx, reason):
        super().__init__(f"{idx}: {reason}")
class Holder: pass
guard = Holder(); guard.lock = threading.Lock()
bad = BadBatch(17, "nan loss")
gen = (i for i in range(3))
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
from torch.distributed.tensor import distribute_tensor, init_device_mesh, Shard
mesh = init_device_mesh("cpu", (1,))
sharded = {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}
from torch.distributed.fsdp import fully_shard
fsdp = fully_shard(torch.nn.Linear(2, 2))
good = 1
"""
    names = ("guard", "bad", "gen", "sharded", "mesh", "fsdp", "good")
    trip = travel(tmp_path, "x = 1", cell, pull=names)
    refused = trip.rank["not_saved"]
    assert refused["guard"].startswith("`guard.lock` is a lock.")
    assert refused["bad"].startswith("bad cannot be loaded: TypeError:")
    assert refused["gen"].startswith("`gen` is a generator.")
    assert "(DTensor). Gather it with tensor.full_tensor()" in refused["sharded"]
    assert "is a device mesh" in refused["mesh"]
    assert "sharded over ranks (FSDP). Send a full state dict" in refused["fsdp"]
    assert trip.facts["pulled"] == ["good"]
    assert sorted(path.name for path in trip.run.iterdir()) == [
        "good",
        "payload.bin",
        "rank.json",
        "result.json",
    ]


@pytest.fixture
def run(tmp_path):
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    return run


def test_a_value_is_private(run):
    saved = save_value(run / "v", [1, 2])
    assert stat.S_IMODE((run / "v").stat().st_mode) == 0o600
    assert saved.size == (run / "v").stat().st_size
    assert load_value(run / "v", run) == [1, 2]
    with pytest.raises(FileExistsError):
        save_value(run / "v", 3)


class Sized:
    def __init__(self, nbytes):
        self.nbytes = nbytes

    def __reduce__(self):
        raise AssertionError("it was pickled")


class Counted:
    """Counts how often one of its kind is pickled."""

    pickled = 0

    def __reduce__(self):
        Counted.pickled += 1
        return Counted, (), {"filling": bytes(1000)}


@pytest.mark.parametrize(
    "value",
    [
        bytes(2_000_000),
        list(range(1_000_000)),
        "é" * 1_000_000,
        bytearray(600_000) * 2,
        [bytearray(b"x" * 300_000) for _ in range(4)],
        Sized(1_000_001),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_above_the_limit_is_not_written(run, value):
    with pytest.raises(TooLargeError, match=r"^it is larger than 1\.0 MB$"):
        save_value(run / "v", value, limit=1_000_000)
    assert list(run.iterdir()) == []


def test_the_limit_counts_what_goes_out_of_band(run):
    numpy = pytest.importorskip("numpy")
    parts = [numpy.zeros(50_000) for _ in range(3)]
    with pytest.raises(TooLargeError):
        save_value(run / "v", parts, limit=1_000_000)
    assert save_value(run / "v", parts[:2], limit=1_000_000).size > 800_000
    assert len(load_value(run / "v", run)) == 2


def test_what_is_too_large_is_not_pickled_to_its_end(run, monkeypatch):
    monkeypatch.setattr(Counted, "pickled", 0)
    with pytest.raises(TooLargeError):
        save_value(run / "v", [Counted() for _ in range(10_000)], limit=1_000_000)
    assert 900 < Counted.pickled < 2_000


def test_values_are_loaded_from_ones_own_runs_only(run, tmp_path):
    save_value(run / "v", 1)
    run.chmod(0o750)
    with pytest.raises(ValueTravelError, match="0700"):
        load_value(run / "v", run)
    run.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(run)
    with pytest.raises(ValueTravelError, match="0700"):
        load_value(link / "v", link)
    save_value(tmp_path / "outside", 1)
    for path in (tmp_path / "outside", run / ".." / "outside", run / "missing"):
        with pytest.raises(ValueTravelError, match="is not a file of yours"):
            load_value(path, run)


def test_a_file_that_is_none_of_ours_or_torn(run):
    save_value(run / "v", list(range(1000)))
    whole = (run / "v").read_bytes()
    for damaged in (whole[:-10], whole[:20], b"", b"x" * 100, whole[:8] + b"\xff" * 24 + whole[32:]):
        (run / "v").write_bytes(damaged)
        with pytest.raises(ValueTravelError):
            load_value(run / "v", run)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "n" * 5_000, "v/x"])
def test_a_name_that_no_file_can_have(run, name):
    save_value(run / "v", 1)
    with pytest.raises(ValueTravelError):
        load_value(run / name, run)
    with pytest.raises(ValueTravelError):
        load_value(run / "v", run / "gone")


@pytest.mark.parametrize("head", [b"[]", b"null", b"{}", b'{"python":3,"names":[]}', b"[" * 100_000, b"\xff"])
def test_a_head_that_is_none(run, head):
    sizes = b"".join(size.to_bytes(8, "little") for size in (0, len(head), 0))
    (run / "v").write_bytes(b"JDDP\x01\x00\x00\x00" + sizes + head)
    with pytest.raises(ValueTravelError):
        load_value(run / "v", run)


def test_another_python_is_refused_by_name(run):
    """B22"""
    content = container.Container(
        {"python": "3.4", "names": [], "sources": {}, "modules": {}}, memoryview(b""), []
    )
    container.write(run / "payload.bin", content)
    with pytest.raises(ValueTravelError, match=r"written by Python 3\.4, read by Python 3\.\d+"):
        read_payload(run / "payload.bin", 0)


def test_tensors_of_an_accelerator_that_is_not_here(run):
    """B18: they arrive on the CPU, with a note."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    from jupyter_ddp.travel.loading import Loading, loading
    from jupyter_ddp.travel.tensors import _storage

    with loading(Loading(local_rank=1)) as load:
        storage = _storage(b"\1\2\3", "cuda")
    assert list(storage) == [1, 2, 3]
    assert list(load.notes) == ["no cuda here: tensors that were on cuda are on the CPU"]


def test_a_rank_reads_without_ipython_and_torch(run):
    """What runs on ranks starts fast: neither IPython nor torch is imported for plain values."""
    save_value(run / "v", {"a": 1})
    code = (
        "import sys\nfrom jupyter_ddp.values import load_value\n"
        f"load_value({str(run / 'v')!r}, {str(run)!r})\n"
        "import json; print(json.dumps([m for m in ('IPython', 'torch', 'numpy', 'asyncio') if m in sys.modules]))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert json.loads(done.stdout) == [], done.stderr
