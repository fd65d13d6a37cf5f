"""The field cases, as a user meets them: cells in a real kernel, one kernel for all of them, under each launcher.

What other tests pin below the notebook (endings, signals, the record of the output) is not repeated here; neighbours of
a case are here when they broke something once.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.book import ONE, TWO, under_mpirun
from tests.notebook import states, texts, until_gone

pytestmark = [pytest.mark.kernel, pytest.mark.mpi]


# -- A. variables and definitions -------------------------------------------------------------------------------------

DATACLASS = """
from dataclasses import dataclass, fields, asdict, field
@dataclass(frozen=True)
class TrainPlan:
    lr: float = 0.1
    sizes: list = field(default_factory=lambda: [4, 8])
plan = TrainPlan(lr=0.5)
"""
FLAGS = """
import enum
class Opt(enum.IntFlag):
    FAST = 1
    SAFE = 2
mode = Opt.FAST | Opt.SAFE
"""
ABSTRACT = """
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
CACHED = """
from functools import cache, lru_cache, singledispatch
@lru_cache(maxsize=None)
def steps_for(n): return n * 3
@cache
def squared(n): return n * n
@singledispatch
def kind(x): return "any"
@kind.register
def _(x: int): return "int"
class shouting(property): pass
class Thing:
    @shouting
    def name(self): return "thing"
steps_for(1)
"""
REGISTRIES = """
class Registry(type):
    known = {}
    def __new__(meta, name, bases, body, tag=None):
        made = super().__new__(meta, name, bases, body)
        meta.known[name] = made
        return made
    def __init__(cls, name, bases, body, tag=None): cls.tag = tag
class Plugin(metaclass=Registry, tag="base"): pass
class Loud(Plugin, tag="loud"): pass
TAGGED = {}
class Base:
    def __init_subclass__(cls, *, tag): TAGGED[tag] = cls
class Child(Base, tag="child"): pass
"""
OWN = """
import numpy as np
from matplotlib import rcParams
from numpy.random import rand
from os import environ
from random import random
from sys import argv, path
def rank_of(): return environ["RANK"]
def add_path(): path.insert(0, "/from/a/rank")
"""
OWN_CELL = """
import os, sys, random as module, numpy, matplotlib
print(environ is os.environ, rank_of() == os.environ["RANK"], argv)
add_path(); print(sys.path[0])
module.seed(3); a = random(); module.seed(3); print(a == random())
numpy.random.seed(3); a = rand(); numpy.random.seed(3); print(a == rand())
rcParams["figure.dpi"] = 33; print(matplotlib.rcParams["figure.dpi"])
"""


@pytest.mark.parametrize(
    ("notebook_has", "cell", "lines"),
    [
        pytest.param(
            DATACLASS,
            "print([f.name for f in fields(plan)], asdict(plan), isinstance(plan, TrainPlan))",
            ["['lr', 'sizes'] {'lr': 0.5, 'sizes': [4, 8]} True"],
            id="B01-dataclass",
        ),
        pytest.param(FLAGS, "print(int(mode), Opt.SAFE in mode)", ["3 True"], id="B03-IntFlag"),
        pytest.param(ABSTRACT, "print(Linear().score(3))", ["6.0"], id="B05-abstract"),
        pytest.param(
            CACHED,
            "print(steps_for(4), steps_for.cache_info().currsize, squared(3), kind(1), kind('x'), Thing().name)",
            ["12 1 9 int any thing"],
            id="B07-cached",
        ),
        pytest.param(
            REGISTRIES,
            "print(sorted(Registry.known), Registry.known['Loud'] is Loud, Loud.tag, TAGGED, TAGGED['child'] is Child)\n"
            "class Second(Base, tag='second'): pass\nprint(sorted(TAGGED))",
            [
                "['Loud', 'Plugin'] True loud {'child': <class '__main__.Child'>} True",
                "['child', 'second']",
            ],
            id="registries",
        ),
        pytest.param(
            OWN, OWN_CELL, ["True True ['<cell>']", "/from/a/rank", "True", "True", "33.0"], id="own-objects"
        ),
    ],
)
def test_definitions_mean_the_same_on_ranks(book, notebook_has, cell, lines):
    """B01, B03, B05, B07; what a metaclass or __init_subclass__ registered; what every process has of its own."""
    book.run(notebook_has)
    shown = book.distribute(cell)
    assert [shown.lines(rank) for rank in range(2)] == [lines, lines]


def test_a_model_is_changed_where_it_is_brought_back(book):
    """B06: instances of the notebook's own class, and only when asked for."""
    book.run(
        "import torch, torch.nn as nn\nclass Tiny(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc = nn.Linear(2, 1)\n    def forward(self, x): return self.fc(x)\n"
        "net = Tiny()\nbefore = net.fc.weight.detach().clone()"
    )
    cell = "with torch.no_grad():\n    net.fc.weight.fill_(7.0)"
    assert book.distribute(cell, ONE).ok
    assert book.run("print(torch.equal(net.fc.weight, before))") == "True\n"
    assert book.distribute(cell, f"{ONE} --pull net").ok
    assert book.run("print(isinstance(net, Tiny), net.fc.weight[0, 0].item())") == "True 7.0\n"


def test_code_finds_its_source(book):
    """B08: TorchScript, inspect, and the traceback of a function of the notebook."""
    book.run(
        "import torch, inspect\ndef bump(x: torch.Tensor): return x + 1\n"
        "def broken(x):\n    y = x + 1\n    return y / 0  # here"
    )
    shown = book.distribute(
        "print(torch.jit.script(bump)(torch.ones(1)).item())\nprint(inspect.getsource(bump).splitlines()[0])\nbroken(3)",
        ONE,
    )
    assert shown.lines(0) == ["2.0", "def bump(x: torch.Tensor): return x + 1"]
    assert shown.error.startswith(
        "rank 0 failed: ZeroDivisionError: division by zero\ncell line 4: broken(3)"
    )
    assert "return y / 0  # here" in shown.error


@pytest.mark.parametrize(
    ("notebook_has", "cell", "words"),
    [
        pytest.param(
            "import threading\nclass Meter:\n    def __init__(self): self.guard = threading.Lock(); self.n = 0\n"
            "meter = Meter()",
            "print(meter.n)",
            ("`meter`", "`meter.guard` is a lock"),
            id="B09-lock",
        ),
        pytest.param(
            "open('secret.csv', 'w').close()\nsrc = open('secret.csv')",
            "print(src.readline())",
            ("`src` is an open file (secret.csv)", "open it inside the cell"),
            id="B11-file",
        ),
        pytest.param("", "print(In)", ("`In` is the notebook's history",), id="B13-history"),
        pytest.param(
            "import ipywidgets\nslider = ipywidgets.FloatSlider()\nui = {'lr': slider}",
            "print(slider.value, ui)",
            ("`slider` is a widget", "`ui['lr']` is a widget", "widget.value"),
            id="widget",
        ),
        pytest.param(
            "import torch.distributed as dist\n"
            "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\npg = dist.group.WORLD",
            "print(pg)",
            ("`pg` is a live process group", "init_process_group"),
            id="B21-process-group",
        ),
        pytest.param(
            "", "for i in range(3)\n    print(i)", ("SyntaxError in line 2 of the cell",), id="B30-syntax"
        ),
        pytest.param("", "%%time\nx = (", ("SyntaxError in line 3 of the cell",), id="B30-in-a-magic"),
    ],
)
def test_what_cannot_run_is_said_before_anything_starts(book, notebook_has, cell, words):
    """B09, B11, B13, B21, B30: one short error with the culprit and the way out."""
    if notebook_has:
        book.run(notebook_has)
    before = book.runs()
    shown = book.distribute(cell)
    assert not shown.plain
    assert [word for word in words if word not in shown.error] == []
    assert len(shown.error.splitlines()) <= 3
    assert book.runs() == before


def test_a_process_group_of_the_notebook_reaches_no_rank(book):
    """B21: the kernel has a live group of its own."""
    book.run(
        "import torch.distributed as dist\nif not dist.is_initialized():\n"
        "    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
    )
    shown = book.distribute("dist.init_process_group('gloo'); print(dist.get_rank(), dist.get_world_size())")
    assert [shown.lines(rank) for rank in range(2)] == [["0 2"], ["1 2"]]
    book.run("dist.destroy_process_group()")


def test_a_cell_without_code_starts_nothing(book):
    """B30."""
    before = book.runs()
    for cell in ("", "# only a comment\n"):
        assert "nothing was started" in book.distribute(cell).streams
    assert book.runs() == before


def test_a_giant_that_the_cell_does_not_use_stays(book):
    """B13: and one that it uses is announced."""
    book.run("import numpy as np\nhoard = np.zeros(250_000_000, dtype='u1')\ndef f(x): return x + 1")
    shown = book.distribute("print(f(1))\n# hoard is only mentioned in this comment")
    assert shown.lines(0) == ["2"]
    assert "travel" not in shown.plain
    shown = book.distribute("print(hoard.sum())")
    assert shown.lines(1) == ["0"]
    assert "`hoard` 250 MB" in shown.plain
    book.run("del hoard")


def test_a_module_beside_the_notebook(book):
    """B15: after os.chdir, and the new code after a reload."""
    helper = book.directory / "case_helpers.py"
    helper.write_text("def halve(x): return x / 2\n")
    book.run("import case_helpers, importlib\nos.makedirs('elsewhere', exist_ok=True); os.chdir('elsewhere')")
    assert book.distribute("print(case_helpers.halve(8))").lines(1) == ["4.0"]
    helper.write_text("def halve(x): return x / 2 + 100  # edited\n")
    book.run("importlib.reload(case_helpers)\nos.chdir('..')")
    assert book.distribute("print(case_helpers.halve(8))").lines(0) == ["104.0"]


def test_data_loaders_with_workers(book):
    """B16: a dataset of the notebook, under fork and spawn; nothing is left."""
    book.run(
        "import torch\nfrom torch.utils.data import Dataset, DataLoader\nclass Count(Dataset):\n"
        "    def __len__(self): return 4\n    def __getitem__(self, i): return i"
    )
    shown = book.distribute(
        "for ctx in ('fork', 'spawn'):\n"
        "    dl = DataLoader(Count(), batch_size=2, num_workers=1, multiprocessing_context=ctx)\n"
        "    print(ctx, [b.tolist() for b in dl])",
        ONE,
    )
    assert shown.lines(0) == ["fork [[0, 1], [2, 3]]", "spawn [[0, 1], [2, 3]]"]


@pytest.mark.parametrize(
    ("definition", "first_line"),
    [
        pytest.param(
            "class Bad(Exception):\n    def __init__(self, idx, why): super().__init__(f'{idx}: {why}')\nmade = (17, 'nan')",
            "rank 1 failed: Bad: 17: nan",
            id="constructor",
        ),
        pytest.param(
            "import threading\nclass Bad(Exception):\n    def __init__(self): super().__init__('x'); self.l = threading.Lock()\n"
            "made = ()",
            "rank 1 failed: Bad: x",
            id="lock",
        ),
        pytest.param(
            "class Bad(Exception):\n    def __str__(self): raise RuntimeError('no')\nmade = ()",
            "rank 1 failed: Bad: (this Bad has no text: its __str__ raised RuntimeError)",
            id="str",
        ),
    ],
)
def test_an_error_of_any_shape_arrives(book, definition, first_line):
    """B19: as text."""
    book.run(definition)
    shown = book.distribute("import os\nif os.environ['RANK'] == '1':\n    raise Bad(*made)")
    assert shown.error.splitlines()[0] == first_line
    assert "cell line 4: raise Bad(*made)" in shown.error


def test_a_failed_run_is_silent_about_values_that_it_could_not_make(book):
    """B28: they were asked for, and the error says why they are not here."""
    shown = book.distribute("1 / 0\nmade_by_it = 1", f"{ONE} --pull made_by_it")
    assert shown.error.startswith("rank 0 failed: ZeroDivisionError")
    assert "made_by_it" not in shown.error
    assert "--pull" not in texts(book.notebook.run("made_by_it"))


# -- B. the language of a cell ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "lines"),
    [
        ("import os\n{'rank': int(os.environ['RANK']), 'sq': 9}", ["{'rank': 1, 'sq': 9}"]),
        ("5  # shown", ["5"]),
        ("5; # silent", []),
        ("None", []),
        ("import asyncio\nasync def f(): return 3\nawait f()", ["3"]),
        ("'''only a docstring'''", ["'only a docstring'"]),
    ],
)
def test_the_last_expression(book, cell, lines):
    """B24."""
    shown = book.distribute(cell)
    assert (shown.ok, shown.lines(1)) == (True, lines)


def test_magics_and_shell_lines(book):
    """B25."""
    book.run("word = 'hey'")
    shown = book.distribute(
        "!echo from-shell\n%env FOO=bar\nimport os\nfiles = !ls /\n%timeit -n1 -r1 sum(range(10))\n"
        "print(os.environ.get('FOO'), len(files) > 0)\n!echo {word} $word\n%load_ext jupyter_ddp\nprint('end')"
    )
    lines = shown.lines(1)
    assert (lines[0], lines[1], lines[3], lines[4], lines[-1]) == (
        "from-shell",
        "env: FOO=bar",
        "bar True",
        "hey hey",
        "end",
    )


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("%pip install x", "Run %pip in a cell without %%distributed"),
        ("breakpoint()", "nobody can talk to a debugger on a rank"),
        ("import pdb; pdb.set_trace()", "Nobody can talk to a debugger on a rank"),
        ("%%distributed -p 2\nprint(1)", "this cell already runs on every rank"),
        ("%distributed runs", "this cell already runs on every rank"),
        ("input('name? ')", "nobody can answer input() on a rank"),
    ],
)
def test_what_ranks_cannot_do_is_told(book, cell, words):
    """B25."""
    assert words in book.distribute(cell, ONE).error


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("sys.exit(3)", "rank 0 called sys.exit(3)"),
        ("sys.exit('bad data')", "rank 0 called sys.exit(bad data)"),
        ("sys.exit(256)", "rank 0 called sys.exit(256)"),
        ("sys.exit()", ""),
        ("exit()", ""),
    ],
)
def test_exits(book, call, error):
    """B27."""
    shown = book.distribute(f"import sys\nprint('before')\n{call}\nprint('never')", ONE)
    assert shown.error.split("\n")[0] == error
    assert shown.lines(0) == ["before"]


def test_figures_and_displays(book):
    """B32: on a backend without a screen, each under its rank; a widget is its text, here and in the notebook."""
    shown = book.distribute(
        "import matplotlib.pyplot as plt, os, ipywidgets\nplt.plot([1, 2, int(os.environ['RANK'])]); plt.show()\n"
        "from IPython.display import display, HTML\ndisplay(HTML(f\"<b>done {os.environ['RANK']}</b>\"))\n"
        "ipywidgets.IntSlider()"
    )
    assert shown.lines(1) == [
        "<Figure size 640x480 with 1 Axes>",
        "<IPython.core.display.HTML object>",
        "IntSlider(value=0)",
    ]
    assert shown.lines(1, "!") == []
    assert shown.bundle["text/html"].count("data:image/png") == 2
    assert "<b>done 1</b>" in shown.bundle["text/html"]
    assert book.run("import gc; gc.collect(); print('quiet')") == "quiet\n"


# -- C. launching and environment; H. -----------------------------------------------------------------------------------

CONTRACT = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
print(json.dumps({name: os.environ.get(name) for name in names}))
print(os.environ["MASTER_PORT"] in ("1", "7777", "29500"), "SLURM_PROCID" in os.environ, repr(sys.stdin.read()))
import torch, torch.distributed as dist
print(torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"))
print(torch.cuda.is_available(), torch.ones(2).sum().item())
dist.init_process_group("gloo"); dist.barrier(); print(dist.get_rank(), dist.get_world_size())
"""
STALE = {
    "RANK": "5", "WORLD_SIZE": "9", "MASTER_PORT": "1", "LOCAL_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8",
    "SLURM_PROCID": "4", "PMI_RANK": "3", "PMIX_RANK": "3", "TORCHELASTIC_RUN_ID": "x",
}  # fmt: skip


def test_what_a_launcher_gives_to_ranks(book):
    """B33, B35, B36, B37, B56, B107, B109: the same under both, from a kernel that has used torch, has stale variables, and holds the ports."""
    book.run(
        f"import socket, torch\nprobe = torch.zeros(1)\nkept = dict(os.environ)\nos.environ.update({STALE})\n"
        "stale = dict(os.environ)\nblockers = [socket.socket() for _ in range(2)]\n"
        "for blocker, port in zip(blockers, (29500, 7777)):\n"
        "    try: blocker.bind(('127.0.0.1', port)); blocker.listen()\n"
        "    except OSError: pass  # somebody else blocks it"
    )
    shown = book.distribute(CONTRACT)
    assert shown.ok, shown.error
    for rank in range(2):
        facts, *rest = shown.lines(rank)
        assert json.loads(facts) == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
        }
        assert rest[:2] == ["False False ''", "1 1"]
        assert rest[3] == f"{rank} 2"
        assert shown.lines(rank, "!") == []
    assert book.run("print(dict(os.environ) == stale)") == "True\n"
    book.run("for blocker in blockers: blocker.close()\nos.environ.clear(); os.environ.update(kept)")


def test_a_directory_that_is_gone(book):
    before = book.runs()
    book.run("os.makedirs('gone'); os.chdir('gone'); os.rmdir('../gone')")
    assert "the notebook's directory is gone" in book.distribute("1").error
    book.run(f"os.chdir({str(book.directory)!r})")
    assert book.runs() == before


def test_a_thread_count_of_the_users(book):
    """B37."""
    cell = "import torch, os; print(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])"
    shown = book.distribute(cell, f"{TWO} -e OMP_NUM_THREADS=2")
    assert shown.lines(0) == shown.lines(1) == ["2 2"]


@under_mpirun
def test_more_ranks_than_cores_meet_in_mpi(book):
    """B39, B40: as whoever runs this."""
    cell = "from mpi4py import MPI\nprint(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.allreduce(1))"
    shown = book.distribute(cell, "-p 4")
    assert [shown.lines(rank) for rank in range(4)] == [[f"{rank} 4"] for rank in range(4)]


@under_mpirun
def test_what_mpi_puts_on_disk_goes_with_the_run(book):
    """B51: also when everything is killed; files of a dead mpirun would stop a later one that has its pid."""
    cell = (
        "import os\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n"
        "print(os.environ.get('PMIX_SERVER_TMPDIR', ''), flush=True)\nprint('here')\nimport time; time.sleep(300)"
    )
    request = book.notebook.send(f"{book.magic()}\n{cell}")
    messages = book.notebook.messages(request, until=states("[0] here", "[1] here"))
    run = book.last_run()
    place = Path(json.loads((run.path / "agent.json").read_bytes())["sockets"][0]).parent
    shown = book.shown(messages)
    assert shown.lines(0)[0].startswith(str(place)), shown.lines(0)
    book.notebook.manager.interrupt_kernel()
    book.notebook.manager.interrupt_kernel()
    book.notebook.messages(request)
    until_gone(run)
    end = time.monotonic() + 20
    while place.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not place.exists()


# -- D. failures as the notebook shows them ---------------------------------------------------------------------------


def test_one_rank_fails_while_the_others_wait(book):
    """B42, B43: the same words under both launchers."""
    shown = book.distribute(
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nif os.environ['RANK'] == '3':\n"
        "    raise ValueError('loss became nan at step 12')\ntime.sleep(600)",
        "-p 4",
    )
    head, line, _, trace, *_ = shown.error.split("\n")
    assert head == "rank 3 failed: ValueError: loss became nan at step 12"
    assert line == "cell line 5: raise ValueError('loss became nan at step 12')"
    assert trace == "Traceback (most recent call last):"
    assert "stopped because of it: ranks 0-2" in shown.error


@under_mpirun
def test_a_rank_fails_while_the_others_wait_in_mpi(book):
    """B57."""
    cell = "from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1: raise OSError(28, 'disk full')\nMPI.COMM_WORLD.Barrier()"
    shown = book.distribute(cell, "-p 3")
    assert shown.error.startswith("rank 1 failed: OSError: [Errno 28] disk full\n")
    assert "stopped because of it: ranks 0, 2" in shown.error
    assert "MPI_ABORT" not in shown.plain


def test_all_ranks_fail_alike(book):
    """B48: one traceback, no launcher's frames; different texts of one type are counted.

    On a busy machine a rank may come too late to tell its own error.
    """
    shown = book.distribute("import this_module_is_missing", "-p 8")
    assert re.match(r"(all 8 ranks|ranks [-\d, ]+) failed: ModuleNotFoundError: No module named", shown.error)
    assert shown.error.count("Traceback") == shown.error.count("  File ") == 1
    shown = book.distribute("import os\nraise RuntimeError(f\"rank {os.environ['RANK']}\")", "-p 4")
    assert shown.error.count("Traceback") == 1
    assert re.match(r"rank (\d) failed: RuntimeError: rank \1\n", shown.error)


def test_crashes_and_endings_without_a_traceback(book):
    """B45, B46: with where it was, and its last words."""
    shown = book.distribute(
        "import ctypes, os, time\nif os.environ['RANK'] == '0': ctypes.string_at(0)\ntime.sleep(60)"
    )
    assert shown.error.startswith("rank 0 crashed: SIGSEGV")
    assert 'File "<distributed cell>", line 3 in <module>' in shown.error
    shown = book.distribute(
        "import os, time\nprint('last words of', os.environ['RANK'])\nif os.environ['RANK'] == '1': os._exit(3)\n"
        "time.sleep(60)"
    )
    assert shown.error.startswith("rank 1 exited with code 3")
    assert "no Python traceback" in shown.error
    assert shown.lines(1) == ["last words of 1"]


def test_a_time_limit_tells_where_each_rank_is(book):
    """B54."""
    cell = "import os, time\nif os.environ['RANK'] != '0': time.sleep(600)\nelse:\n    while True: pass"
    shown = book.distribute(cell, f"{TWO} --timeout 1")
    assert shown.error.startswith("timed out: ranks 0-1 had not finished")
    assert "while True: pass" in shown.error
    assert "if os.environ['RANK'] != '0': time.sleep(600)" in shown.error


def test_a_child_that_stays_holds_no_cell(book):
    """B53."""
    shown = book.distribute("import subprocess\nsubprocess.Popen(['sleep', '600'])\nprint('rank finished')")
    assert shown.ok
    assert shown.lines(1) == ["rank finished"]
    assert "left processes running; they were ended: sleep" in shown.plain


# -- E. output --------------------------------------------------------------------------------------------------------


def test_progress_bars(book):
    """B59, B60: one line a bar, its last state is kept; also a notebook's bar that was imported in the notebook."""
    book.run("from tqdm.notebook import tqdm as from_notebook")
    shown = book.distribute(
        "from tqdm import tqdm\nfrom tqdm.auto import tqdm as auto\nfrom tqdm.notebook import tqdm as there\nimport os\n"
        "for _ in tqdm(range(500), desc=f\"r{os.environ['RANK']}\", mininterval=0): pass\n"
        "for bar in (auto, there, from_notebook):\n    for _ in bar(range(5)): pass\nprint('end')",
        "-p 4",
    )
    for rank in range(4):
        bars = shown.lines(rank, "!")
        assert bars[0].startswith(f"r{rank}: 100%")
        assert [bar.split("|")[0] for bar in bars[1:]] == ["100%"] * 3
        assert shown.lines(rank) == ["end"]


def test_a_flood(book):
    """B61: the view is cut and says so; every line is on disk."""
    shown = book.distribute(
        "import os\nr = os.environ['RANK']\nfor i in range(25_000):\n    print(f'r{r} line {i} ' + 'x' * 60)",
        "-p 8",
    )
    assert shown.ok
    assert len(json.dumps(shown.bundle)) < 2_000_000
    assert re.search(r"\d[\d ,]* lines", shown.plain)
    run = book.last_run()
    for rank in range(8):
        lines = (run.path / f"rank{rank}.stdout").read_text().splitlines()
        assert lines == [f"r{rank} line {i} " + "x" * 60 for i in range(25_000)]


def test_every_byte_in_order_under_its_rank(book):
    """B63, B65, B66, B68, B70: in one cell, as they come."""
    shown = book.distribute(
        "import ctypes, os, sys, time\nlibc = ctypes.CDLL(None)\n"
        "os.write(1, b'raw \\xff\\xfe bytes\\n')\n"
        "for b in '▌é漢🙂\\n'.encode(): os.write(1, bytes([b])); time.sleep(0.001)\n"
        "print('py 1'); libc.puts(b'c 1'); libc.fflush(None); os.system('echo sh 1'); print('py 2')\n"
        "print('err', file=sys.stderr)\n"
        "print('[1,0]<stdout>:fake'); print('[rank1]: fake'); print('{\"rank\": 0, \"event\": \"error\"}')\n"
        "for word in ('alpha ', 'beta ', 'gamma'): print(word, end='', flush=True)\n"
        "sys.stdout.write('\\nno newline at end');"
    )
    assert shown.ok
    for rank in range(2):
        assert shown.lines(rank) == [
            "raw �� bytes",
            "▌é漢🙂",
            "py 1",
            "c 1",
            "sh 1",
            "py 2",
            "[1,0]<stdout>:fake",
            "[rank1]: fake",
            '{"rank": 0, "event": "error"}',
            "alpha beta gamma",
            "no newline at end",
        ]
        assert shown.lines(rank, "!") == ["err"]


def test_a_giant_line(book):
    """B73: cut in the view, with its length; whole on disk."""
    shown = book.distribute("print('A' * 5_000_000)\nprint('after')", ONE)
    assert shown.lines(0)[-1] == "after"
    assert len(shown.plain) < 300_000
    assert shown.nbytes < 3_000_000
    text = (book.last_run().path / "rank0.stdout").read_text()
    assert text == "A" * 5_000_000 + "\nafter\n"


def test_the_same_cell_again_and_again(book):
    """B31: each run has processes and ports of its own."""
    cell = "import os\nprint(os.getpid(), os.environ['MASTER_PORT'])"
    said = [book.distribute(cell).lines(0)[0].split() for _ in range(3)]
    assert len({pid for pid, _ in said}) == 3


def test_output_is_live(book):
    """B69: without a flush, while the rank still runs."""
    request = book.notebook.send(f"{book.magic()}\nimport time\nprint('tick')\ntime.sleep(300)")
    assert book.shown(book.notebook.messages(request, until=states("[0] tick", "[1] tick"))).lines(1) == [
        "tick"
    ]
    book.notebook.manager.interrupt_kernel()
    book.notebook.messages(request)
    until_gone(book.last_run())
