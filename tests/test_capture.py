"""Notebook variables reach ranks as they are in the notebook, or the notebook says why not before anything starts."""

from __future__ import annotations

import stat
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from jupyter_ddp.travel.report import CaptureItem, CaptureReport
from tests.journey import travel


def test_a_cell_gets_what_it_reads_and_nothing_else(tmp_path):
    """B13: an unrelated giant stays; so does all that the shell keeps for itself."""
    book = "import numpy as np\nhoard = np.zeros(50_000_000, dtype='u1')\ndef f(x): return x + 1\nother = 1"
    trip = travel(
        tmp_path,
        book,
        "print(f(1))\n# hoard is only mentioned here\nx = open('/dev/null'); print(get_ipython)",
        fails=True,
    )
    assert trip.facts["names"] == ["f"]
    assert trip.facts["nbytes"] < 10_000
    assert trip.out == ["2"]
    assert "get_ipython" in trip.facts["err"]  # this rank has no shell, and the notebook's did not come


def test_a_giant_that_the_cell_uses_is_in_the_table(tmp_path):
    """B13"""
    trip = travel(
        tmp_path, "import numpy as np\nhoard = np.zeros(120_000_000, dtype='u1')", "print(hoard.sum())"
    )
    assert trip.facts["notes"] == []
    assert trip.out == ["0"]
    assert "hoard  numpy.ndarray uint8 (120000000,)     120 MB" in trip.facts["table"]


def test_many_bytes_are_announced_with_the_time_that_they_took():
    items = tuple(
        CaptureItem(name, "numpy.ndarray", size, "value")
        for name, size in {"a": 1_000, "big": 9_000_000, "small": 7_000_000, "none": 0}.items()
    )
    text = "16.0 MB of variables travel to the ranks, made ready in 1.5 s: `big` 9.0 MB, `small` 7.0 MB, `a` 1.0 kB"
    assert CaptureReport(items, total=16_000_000, seconds=0.5).announcement(1.0) == text
    assert CaptureReport(items, total=15_999_999).announcement(1.0) is None


def test_what_was_written_is_let_go(tmp_path):
    """An array that is being sent cannot be resized; one that was sent can, whoever still holds the payload."""
    from types import SimpleNamespace

    from jupyter_ddp.capture import capture

    namespace = {"text": bytearray(10_000), "array": np.arange(10_000), "net": torch.ones(10_000)}
    gone = weakref.ref(namespace["array"])
    payload = capture(SimpleNamespace(reads=frozenset(namespace), assigns=frozenset()), namespace)
    payload.write(tmp_path / "p")
    payload.release()
    namespace["text"].extend(b"more")
    namespace.clear()
    assert gone() is None
    assert payload.names == ("array", "net", "text")
    assert payload.report.total == payload.nbytes


def test_functions_live_in_the_ranks_namespace(tmp_path):
    """A function of the notebook reads, and with `global` binds, the names of the cell that calls it."""
    book = "rate = 1\ndef scaled(x): return x * rate * inner()\ndef inner(): return step\nstep = 1\ndef count():\n    global step\n    step += 1"
    trip = travel(tmp_path, book, "print(scaled(2))\nrate = 10\ncount()\nprint(scaled(2), step)")
    assert trip.out == ["2", "40 2"]


def test_dataclasses(tmp_path):
    """B01"""
    book = (
        "from dataclasses import dataclass, fields, asdict, field\n"
        "@dataclass(frozen=True)\nclass TrainPlan:\n    lr: float = 0.1\n    sizes: list = field(default_factory=lambda: [4, 8])\n"
        "plan = TrainPlan(lr=0.5)"
    )
    trip = travel(
        tmp_path, book, "print([f.name for f in fields(plan)], asdict(plan), isinstance(plan, TrainPlan))"
    )
    assert trip.out == ["['lr', 'sizes'] {'lr': 0.5, 'sizes': [4, 8]} True"]


def test_enums_of_all_kinds(tmp_path):
    """B03"""
    book = """
import enum
class Opt(enum.IntFlag):
    FAST = 1
    SAFE = 2
    BOTH = 3
class Planet(enum.Enum):
    EARTH = (6, 2)
    MARS = (3, 3)
    def __init__(self, mass, radius):
        self.mass, self.radius = mass, radius
    @property
    def density(self): return self.mass / self.radius
class Color(str, enum.Enum):
    RED = "red"
    CRIMSON = "red"
    def loud(self): return self.value.upper()
class Level(enum.IntEnum):
    LOW = enum.auto()
    HIGH = enum.auto()
class Bits(enum.Flag):
    X = enum.auto()
    Y = enum.auto()
class Odd(enum.Enum):
    def __new__(cls, value, label):
        made = object.__new__(cls)
        made._value_ = value
        made.label = label
        return made
    ONE = (1, "one")
    @classmethod
    def _missing_(cls, value): return cls.ONE
mode = Opt.FAST | Opt.SAFE
bits = Bits.X | Bits.Y
"""
    cell = """
print(int(mode), Opt.SAFE in mode, mode is Opt.BOTH, Opt(2) is Opt.SAFE)
print(Planet.EARTH.density, Planet((3, 3)) is Planet.MARS, [p.name for p in Planet])
print(Color.RED == "red", Color.CRIMSON is Color.RED, Color.RED.loud(), "r" in Color.RED)
print(Level.HIGH > Level.LOW, Level.HIGH + 1, bits, Bits.X in bits, ~Bits.X)
print(Odd.ONE.label, Odd(1) is Odd.ONE, Odd(5) is Odd.ONE)
"""
    trip = travel(
        tmp_path,
        book,
        cell,
        pull=("mode", "bits"),
        after="assert pulled['mode'] is mode and pulled['bits'] is bits",
    )
    assert trip.out == [
        "3 True True True",
        "3.0 True ['EARTH', 'MARS']",
        "True True RED True",
        "True 3 Bits.X|Y True Bits.Y" if "Bits.X|Y" in trip.out[3] else "True 3 Bits.Y|X True Bits.Y",
        "one True True",
    ]


def test_abstract_classes(tmp_path):
    """B05"""
    book = """
from abc import ABC, abstractmethod
def make():
    class Scorer(ABC):
        weight: float
        @abstractmethod
        def score(self, x): ...
    class Linear(Scorer):
        weight: float = 2.0
        def score(self, x): return self.weight * x
    return Linear
Linear = make()
"""
    assert travel(tmp_path, book, "print(Linear().score(3))").out == ["6.0"]


def test_decorated_helpers(tmp_path):
    """B07: caches travel empty, with their limits; dispatchers with what is registered; property subclasses."""
    book = """
import functools
@functools.lru_cache(maxsize=7, typed=True)
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
@functools.cache
def steps_for(n): return n * 3
fib(20)
@functools.singledispatch
def describe(x): return "anything"
@describe.register
def _describe_int(x: int): return f"int {unit}"
@describe.register(list)
def _describe_list(x): return describe(x[0])
unit = "kg"
class shouting(property):
    def __get__(self, obj, kind=None): return super().__get__(obj, kind).upper()
class Thing:
    @shouting
    def name(self): return "thing"
    @functools.cached_property
    def made(self): return object()
    @functools.lru_cache
    def twice(self, n): return 2 * n
thing = Thing()
"""
    cell = """
print(fib.cache_info(), fib(30), fib.cache_parameters(), fib.__name__)
print(steps_for(4), describe(3), describe([3]), describe("x"))
print(thing.name, thing.made is thing.made, thing.twice(4))
"""
    trip = travel(tmp_path, book, cell)
    assert trip.out == [
        "CacheInfo(hits=0, misses=0, maxsize=7, currsize=0) 832040 {'maxsize': 7, 'typed': True} fib",
        "12 int kg int kg anything",
        "THING True 8",
    ]


def test_source_of_notebook_code_is_there(tmp_path):
    """B08: TorchScript, inspect and tracebacks read it."""
    book = "import torch, inspect\ndef bump(x: torch.Tensor): return x + 1\ndef broken():\n    return [][3]  # here"
    cell = (
        "print(torch.jit.script(bump)(torch.ones(1)).item())\nprint(inspect.getsource(bump).splitlines()[0])\n"
        "import traceback\ntry: broken()\nexcept IndexError: print(traceback.format_exc())"
    )
    trip = travel(tmp_path, book, cell)
    assert trip.out[0] == "2.0"
    assert trip.out[1].startswith("def bump(x")
    assert "return [][3]  # here" in trip.facts["out"]


def test_one_graph(tmp_path):
    """References between variables survive: the optimizer works on the model's own parameters."""
    book = """
import torch, numpy as np
net = torch.nn.Linear(40, 30)
twin = torch.nn.Linear(40, 30)
twin.weight = net.weight
opt = torch.optim.Adam(net.parameters(), lr=0.1)
net(torch.ones(40)).sum().backward()
base = torch.arange(10_000.)
row = base[10:20]
turned = base.view(100, 100).t()
half, flags, short = torch.ones(5000, dtype=torch.bfloat16), torch.tensor([True] * 3000), torch.ones(3000, dtype=torch.uint16)
leaf, nothing = torch.ones(3, requires_grad=True), torch.empty(0)
dice = torch.Generator(); dice.manual_seed(3); torch.rand(5, generator=dice)
sparse = torch.eye(3).to_sparse()
array = np.arange(10_000.)
same = array
"""
    cell = """
print(all(a is b for a, b in zip(net.parameters(), opt.param_groups[0]["params"])), twin.weight is net.weight)
before = net.weight.detach().clone(); opt.step(); print((net.weight != before).any().item())
base[10] = -1
print(row[0].item(), turned.stride(), turned[10, 0].item(), turned.is_contiguous())
print(half.dtype, half.float().sum().item(), flags.sum().item(), short.dtype, short.long().sum().item())
print(leaf.is_leaf, leaf.requires_grad, nothing.shape, sparse.to_dense()[1].tolist())
roll = torch.rand(1, generator=dice).item()
array[0] = 5
print(same[0], array.flags.writeable)
"""
    after = "assert pulled['roll'] == torch.rand(1, generator=dice).item()\nassert array[0] == 0 and base[10] == 10"
    trip = travel(tmp_path, book, cell, pull=("roll",), after=after)
    assert trip.out == [
        "True True",
        "True",
        "-1.0 (1, 100) -1.0 False",
        "torch.bfloat16 5000.0 3000 torch.uint16 3000",
        "True True torch.Size([0]) [0.0, 1.0, 0.0]",
        "5.0 True",
    ]
    assert trip.facts["sizes"]["row"] < 500  # shared bytes count once, for the first in the alphabet


def test_a_lock_is_named_with_the_way_to_it(tmp_path):
    """B09"""
    book = (
        "import threading\nclass Meter:\n    def __init__(self): self.guard = threading.Lock(); self.n = 0\n"
        "meter = Meter()\nok = 5"
    )
    trip = travel(tmp_path / "1", book, "print(ok, meter.n)") if (tmp_path / "1").mkdir() is None else None
    assert trip.facts["guilty"] == ["meter"]
    assert trip.facts["error"].splitlines() == [
        "`meter` cannot travel to the ranks; nothing was started.",
        "  `meter.guard` is a lock. Create it inside the cell, or leave it out in `__getstate__`.",
    ]
    (tmp_path / "2").mkdir()
    assert travel(tmp_path / "2", book, "print(ok)").out == ["5"]


def test_all_culprits_at_once(tmp_path):
    """B09, B11, B21: each with its variable, the way to it and the way out."""
    book = """
import functools, queue, sqlite3, tempfile, threading, torch
import torch.distributed as dist
class Box: pass
box = Box(); box.fh = open("/dev/null")
cfg = {"a": [1, 2, 3, box]}
db = {"main": sqlite3.connect(":memory:")}
stream = (i for i in range(3))
lock = threading.RLock()
def guarded():
    with lock: return 1
def closing():
    log = open("/dev/null")
    return lambda: log
closed = closing()
part = functools.partial(guarded, key=[lock])
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)
        self.fc.ready = threading.Event()
net = Net()
class Shared:
    jobs = queue.Queue()
shared = Shared()
class Picky:
    def __init__(self): self.lock, self.log = threading.Lock(), open("/dev/null")
    def __getstate__(self): return {"log": self.log}
picky = Picky()
class Bad:
    def __reduce__(self): raise ValueError("not me")
bad = [Bad()]
deep = []
for _ in range(100_000): deep = [deep]
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
pg = dist.group.WORLD
fine = 1
"""
    names = "cfg db stream guarded closed part net shared picky bad deep pg fine"
    after_names = set(names.split()) - {"fine"}
    trip = travel(tmp_path, book, f"print({names.replace(' ', ', ')})")
    assert set(trip.facts["guilty"]) == after_names
    text = trip.facts["error"]
    for words in (
        "12 variables cannot travel to the ranks; nothing was started.",
        "`cfg['a'][3].fh` is an open file (/dev/null). Send its path and open it inside the cell.",
        "`db['main']` is a sqlite3.Connection, which cannot be pickled",
        "`stream` is a generator. Send a list",
        "`lock`, which `guarded` uses, is a lock. Create it",
        "`log`, which `closed` uses, is an open file",
        "`net.fc.ready` is a signal between threads.",
        "`Shared.jobs` is a queue of this process (by way of `shared`).",
        "`picky.log` is an open file",
        "`bad[0]` is a Bad, which cannot be pickled (not me).",
        "`deep` (list [1]) cannot be pickled:",
        "`pg` is a live process group of this process. Ranks make their own:",
    ):
        assert words in text
    assert "picky.lock" not in text  # what __getstate__ leaves out does no harm


def test_an_open_file_is_never_read_and_sent(tmp_path):
    """B11"""
    trip = travel(tmp_path, "src = open('/etc/hostname')", "print(src.readline())")
    assert (
        "`src` is an open file (/etc/hostname). Send its path and open it inside the cell."
        in trip.facts["error"]
    )


def test_standard_streams_mean_the_ranks_own(tmp_path):
    trip = travel(
        tmp_path, "import sys, functools\nsay = functools.partial(print, file=sys.stdout)", "say('hello')"
    )
    assert trip.out == ["hello"]


def test_no_process_group_and_a_wrapped_model(tmp_path):
    """B21: None is a value like any other, and a DDP model travels as the model that it wraps."""
    book = """
import tempfile, torch, torch.distributed as dist
pg = dist.group.WORLD
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
"""
    trip = travel(
        tmp_path,
        book,
        "print(pg, type(net).__name__, next(net.parameters()) is opt.param_groups[0]['params'][0])",
    )
    assert trip.out == ["None Linear True"]
    assert trip.facts["notes"] == [
        "`net`: a DistributedDataParallel model travels as the model that it wraps (.module)"
    ]


def test_history_of_the_notebook_stays(tmp_path):
    for number, (cell, push, name) in enumerate(
        [
            ("print(Out)", None, "Out"),
            ("x = _ + 1", None, "_"),
            ("print(f())", None, "f"),
            ("1", ("In",), "In"),
            ("1", ("get_ipython",), "get_ipython"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        trip = travel(folder, ["41", "def f(): return Out[1]"], cell, push=push)
        assert trip.facts["guilty"] == [name], cell


def test_a_name_of_the_history_that_the_cell_binds_itself(tmp_path):
    trip = travel(tmp_path, "41", "if True:\n    _, x = 1, 2\nprint(_, x)")
    assert trip.out == ["1 2"]


def test_pushed_names(tmp_path):
    (tmp_path / "1").mkdir()
    trip = travel(tmp_path / "1", "a, b = 1, 2", "print(a, 'b' in globals())", push=("a",))
    assert trip.out == ["1 False"]
    (tmp_path / "2").mkdir()
    trip = travel(tmp_path / "2", "learning_rate = 1", "1", push=("learning_rat", "print", "a.b"))
    assert trip.facts["error"].splitlines() == [
        "the notebook has no variable `learning_rat`. Did you mean `learning_rate`?",
        "`print` is built in: every rank has it.",
        "`a.b` is no variable: bind it to a name and push that.",
    ]
    (tmp_path / "3").mkdir()
    assert travel(tmp_path / "3", "a = 1", "print('a' in globals())", push=()).out == ["False"]


@pytest.fixture
def helpers(tmp_path):
    folder = tmp_path / "book"
    folder.mkdir()
    (folder / "helpers.py").write_text(
        "import more\nRATE = 2\ndef halve(x): return more.same(x) / RATE\nclass Net:\n    pass\n"
    )
    (folder / "more.py").write_text("import threading\nLOCK = threading.Lock()\ndef same(x): return x\n")
    package = folder / "kit"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "deep" / "core.py").write_text("from .. import tools\ndef run(): return tools.NAME\n")
    (package / "tools.py").write_text("NAME = __name__\n")
    return folder


def test_a_helper_module_beside_the_notebook(tmp_path, helpers):
    """B15: also when the kernel has changed its directory, and for classes and packages of helpers."""
    book = (
        "import helpers, os\nfrom helpers import halve\nimport kit.deep.core as core\nnet = helpers.Net()\n"
        "os.chdir('/')\nsys_path = __import__('sys').path\nsys_path[:] = [p for p in sys_path if 'book' not in p]"
    )
    cell = (
        "import inspect\nimport helpers as again\nprint(helpers.halve(8), halve(2), core.run(), again is helpers)\n"
        "print(isinstance(net, again.Net), inspect.getsource(halve).strip(), helpers.__file__)"
    )
    trip = travel(tmp_path, book, cell, pull=("net",), after="assert type(pulled['net']) is helpers.Net")
    assert trip.out == [
        "4.0 1.0 kit.tools True",
        f"True def halve(x): return more.same(x) / RATE {helpers / 'helpers.py'}",
    ]
    assert trip.facts["how"] == {"core": "source", "halve": "value", "helpers": "source", "net": "value"}
    assert "as source: helpers, kit, kit.deep, kit.deep.core, kit.tools, more" in trip.facts["table"]
    assert trip.facts["notes"] == []


def test_a_helper_module_that_was_edited(tmp_path, helpers):
    """B15: after a reload the new code runs; without one too, and the report says so."""
    edit = f"from pathlib import Path\nfile = Path({str(helpers / 'helpers.py')!r})\nfile.write_text(file.read_text().replace('/ RATE', '* 100'))"
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "book").symlink_to(helpers)
    trip = travel(tmp_path / "1", ["import helpers", edit], "print(helpers.halve(8))")
    assert trip.out == ["800"]
    assert "helpers.py was edited after the notebook imported it" in trip.facts["notes"][0]
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "book").symlink_to(helpers)
    trip = travel(
        tmp_path / "2",
        ["import helpers", "import importlib; importlib.reload(helpers)"],
        "print(helpers.halve(8))",
    )
    assert trip.out == ["800"]
    assert trip.facts["notes"] == []


def test_modules_of_the_installation_travel_by_name(tmp_path):
    trip = travel(
        tmp_path,
        "import json, numpy as np, torch.nn.functional as F",
        "print(json.dumps(1), np.e > 2, F.__name__)",
    )
    assert trip.facts["how"] == {"F": "import", "json": "import", "np": "import"}
    assert trip.out == ["1 True torch.nn.functional"]


def test_the_payload_is_private_and_new(tmp_path):
    from types import SimpleNamespace

    from jupyter_ddp.capture import capture

    program = SimpleNamespace(reads=frozenset({"n"}), assigns=frozenset())
    payload = capture(program, {"n": 1})
    payload.write(tmp_path / "p")
    assert stat.S_IMODE((tmp_path / "p").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        payload.write(tmp_path / "p")
    assert Path(tmp_path / "p").stat().st_size == payload.nbytes < 1000


def test_warnings_of_pickling_become_notes(tmp_path):
    book = "import torch\nx = torch.ones(2, requires_grad=True)\nhandle = x.register_hook(lambda g: g)"
    trip = travel(tmp_path, book, "print(x.requires_grad)")
    assert trip.out == ["True"]
    assert len(trip.facts["notes"]) == 1
    assert trip.facts["notes"][0].startswith("`x`: backward hook")


def test_a_memory_mapped_file_is_said_to_be_read(tmp_path):
    """B11: as an array it is the user's value, as a file it may be more than the user thinks of."""
    book = "import numpy as np\nwith open('m.bin', 'wb') as f: f.write(bytes(5000))\nm = np.memmap('m.bin', dtype='u1')"
    trip = travel(tmp_path, book, "print(m.sum())")
    assert trip.out == ["0"]
    assert trip.facts["notes"] == [
        f"`m` maps a file ({tmp_path}/book/m.bin): what it maps is read and travels"
    ]


def test_the_payload_outlives_what_it_holds(tmp_path):
    """What is sent is what the notebook had at launch, even if the notebook lets go of it before it is written."""
    book = "import torch\ndef make(): return {'x': torch.full((10_000,), 3.0), 'dice': torch.Generator()}\nsent = make()"
    cell = "print(sent['x'].sum().item(), sent['dice'].initial_seed() > 0)"
    assert travel(tmp_path, book, cell).out == ["30000.0 True"]


def test_classes_behind_objects_are_found_by_name(tmp_path):
    """B16: pickling by name on the rank (spawned data loader workers, torch.save) finds a class that the cell did not name."""
    book = "class Count:\n    def __len__(self): return 8\ndata = Count()"
    trip = travel(
        tmp_path, book, "import pickle\nprint(type(pickle.loads(pickle.dumps(data))) is type(data))"
    )
    assert trip.out == ["True"]
    assert trip.facts["names"] == ["data"]


def test_pickles_outlive_the_pickler_that_made_them():
    """A pickler and its view in a cycle are collected in any order; neither may take the process with it."""
    program = """
import gc
from jupyter_ddp.travel.pickling import ValuePickler
for _ in range(50):
    pickler = ValuePickler()
    pickler.add("value", {"data": [bytes(3000)], "code": lambda x: x})
    ring = [pickler, pickler.pickles()]
    ring.append(ring)
    del pickler, ring
    gc.collect()
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")
