"""A forked rank is as an exec'd one: every field of a process that a cell can see, compared; and what is not the same."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jupyter_ddp.events import RunEvent
from jupyter_ddp.launchers import torchrun_command
from jupyter_ddp.runtime import pools
from jupyter_ddp.runtime.forking import GONE, ForkedLauncher
from jupyter_ddp.runtime.nurse import shadowed
from jupyter_ddp.runtime.zygote import SETTINGS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")

SAY_ALL = """
import atexit, codecs, faulthandler, gc, inspect, json, locale, logging, multiprocessing, os, random, re, resource
import signal, socket, subprocess, sys, tempfile, threading, time, warnings

def names(objects):
    return [f"{type(one).__module__}.{type(one).__qualname__}" for one in objects]

def function(one):
    return f"{getattr(one, '__module__', None)}.{getattr(one, '__qualname__', one)}"

def descriptors():
    found = {}
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        found[number] = [re.sub(r"[0-9]+", "N", target.replace(RUN, "RUN")), os.get_inheritable(number)]
    return found

def status(*keys):
    with open("/proc/self/status") as file:
        lines = dict(line.rstrip("\\n").split(":\\t", 1) for line in file if ":\\t" in line)
    return {key: lines.get(key) for key in keys}

def tasks():
    found = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as file:
            found.append(file.read().strip())
    return sorted(found)

def death_signal():
    import ctypes
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
    return number.value

def loggers():
    found = {}
    for name in [None, *sorted(logging.root.manager.loggerDict)]:
        logger = logging.getLogger(name)
        if not str(name).startswith("torch.distributed"):
            found[str(name)] = [logger.level, names(logger.handlers), logger.propagate, logger.disabled]
    return found

RUN = os.path.dirname(os.environ["SM_MODEL_DIR"])
with open("/proc/self/cmdline") as file:
    cmdline = file.read().split("\\0")

def process():
    current = multiprocessing.current_process()
    return {
        "handlers": {int(n): function(signal.getsignal(n)) for n in signal.valid_signals()},
        "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "kernel's signals": status("SigBlk", "SigIgn", "SigCgt", "ShdPnd", "SigPnd"),
        "alarm": [signal.getitimer(n) for n in (signal.ITIMER_REAL, signal.ITIMER_PROF)],
        "capabilities": status("NoNewPrivs", "Seccomp", "Uid", "Gid", "Groups", "CapEff", "THP_enabled"),
        "death signal": death_signal(),
        "descriptors": descriptors(),
        "tasks": tasks(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "main thread": [threading.main_thread().name, threading.main_thread().native_id == os.getpid()],
        "argv": sys.argv,
        "original argv": sys.orig_argv,
        "command line": cmdline,
        "name": open("/proc/self/comm").read().strip(),
        "flags": repr(sys.flags),
        "options": [sys.warnoptions, str(sys._xoptions), sys.dont_write_bytecode, sys.executable, sys.prefix],
        "limits of Python": [sys.getrecursionlimit(), sys.getswitchinterval(), sys.get_int_max_str_digits()
                             if hasattr(sys, "get_int_max_str_digits") else None],
        "path": sys.path,
        "importers": [getattr(one, "__qualname__", type(one).__qualname__) for one in [*sys.meta_path, *sys.path_hooks]],
        "hooks": list(map(function, (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.breakpointhook))),
        "tracing": [sys.gettrace() is None, sys.getprofile() is None],
        "cwd": os.getcwd(),
        "umask": [os.umask(0o22), os.umask(0o22)][1:] and None,
        "rlimits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
        "scheduling": [os.nice(0), sorted(os.sched_getaffinity(0)), os.sched_getscheduler(0),
                       open("/proc/self/oom_score_adj").read()],
        "groups": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getppid(), os.tcgetpgrp(0) if os.isatty(0) else None],
        "environment": {k: re.sub(r"jddp-\\w+|[0-9]+", "N", v.replace(RUN, "RUN")) for k, v in sorted(os.environ.items())
                        if k not in ("JUPYTER_DDP_RUN", "TORCHELASTIC_ERROR_FILE", "MASTER_PORT")},
        "marker": b"JUPYTER_DDP_RUN=" + os.environ["JUPYTER_DDP_RUN"].encode() in open("/proc/self/environ", "rb").read(),
        "error file": os.path.basename(os.environ.get("TORCHELASTIC_ERROR_FILE", "")),
        "multiprocessing": [current.name, current.daemon, current._identity, type(current).__name__, len(current.authkey),
                            multiprocessing.parent_process() is None, multiprocessing.active_children(),
                            multiprocessing.get_start_method(allow_none=True), str(current._config.keys())],
        "children": subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "comm="], capture_output=True,
                                   text=True).stdout.split(),
        "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(), sys.getfilesystemencoding()],
        "streams": [[s.encoding, s.errors, s.line_buffering, s.write_through, s.fileno(), s.name, type(s).__name__]
                    for s in (sys.stdin, sys.stdout, sys.stderr)],
        "original streams": [sys.__stdout__ is sys.stdout, sys.__stderr__ is sys.stderr, sys.__stdin__ is sys.stdin],
        "faulthandler": faulthandler.is_enabled(),
        "collector": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)],
        "frozen": gc.get_freeze_count(),
        "temporary directory": tempfile.tempdir,
        "main": sorted(name for name in vars(sys.modules["__main__"]) if name.startswith("__")),
        "main file": [getattr(sys.modules["__main__"], "__file__", None), str(sys.modules["__main__"].__spec__)],
        "stack": len(inspect.stack()),
        "loggers": loggers(),
        "codecs error handlers": function(codecs.lookup_error("surrogateescape")),
        "default timeout": socket.getdefaulttimeout(),
        "time zone": [time.tzname, time.timezone],
        "at exit": atexit._ncallbacks(),
    }

found = {"new": process()}
found["modules"] = sorted(name for name in sys.modules if "." not in name)
import numpy, torch, threadpoolctl
found["with torch"] = process()
found["filters"] = [list(map(str, one)) for one in warnings.filters]
found["pools"] = sorted([p["user_api"], p["internal_api"], p["num_threads"]] for p in threadpoolctl.threadpool_info())
found["torch"] = {
    "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
    "modes": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), str(torch.get_default_dtype()),
              torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled(), torch.get_float32_matmul_precision()],
    "cuda": [torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork(), len(torch.cuda._queued_calls), torch.cuda.is_available()],
    "sharing": torch.multiprocessing.get_sharing_strategy(),
    "distributed": [torch.distributed.is_initialized(), str(torch.distributed.get_debug_level())],
}
in_thread = []
thread = threading.Thread(target=lambda: in_thread.append(torch.get_num_threads()))
thread.start(), thread.join()
found["torch"]["threads of a thread"] = in_thread
found["pools later"] = [(torch.randn(600, 600) @ torch.randn(600, 600)).shape[0], len(tasks()),
                        (numpy.ones((600, 600)) @ numpy.ones((600, 600))).shape[0], len(tasks())]
found["random"] = {"torch": torch.rand(1).item(), "numpy": float(numpy.random.rand()), "random": random.random(),
                   "generator": float(numpy.random.default_rng().random()), "file": tempfile.mktemp(),
                   "authkey": bytes(multiprocessing.current_process().authkey).hex(), "seed": torch.initial_seed()}
print(json.dumps(found))
"""

ALLOWED = {
    "modules": "those of torch, torchrun and IPython are there from the beginning",
    "new/loggers": "they come with those modules",
    "new/at exit": "so do handlers",
    "new/tasks": "OpenBLAS starts its threads at the rank's start, not at the import of numpy",
    "with torch/loggers/torch.numa": "torchrun's",
    "with torch/loggers/torch.numa.binding": "torchrun's",
    "with torch/loggers/torchelastic-events-null": "torchrun's",
    "new/command line": "the zygote's",
    "with torch/command line": "the zygote's",
    "new/frozen": "what the zygote has imported is left alone by the collector",
    "with torch/frozen": "what the zygote has imported is left alone by the collector",
    "new/stack": "below the cell are torchrun's frames",
    "with torch/stack": "below the cell are torchrun's frames",
    "random": "random in both",
}
"""All that may differ, and why."""


def run_both(start, source: str, protocol: str = "torchrun", **fields: object) -> tuple[list, list]:
    """Return what the ranks of a forked and of an executed run printed."""
    found = []
    for fork in (True, False):
        run = start(source, protocol=protocol, fork=fork, **fields)
        assert run.end().outcome == "succeeded", (run.errors(), run.notes())
        detail = run.of(RunEvent, phase="rendezvous")[-1].detail
        assert (detail["why_exec"] == "") == fork, detail
        found.append([run.text(rank) for rank in range(run.world_size)])
    return found[0], found[1]


def comparable(text: str, *, libuv: bool) -> dict:
    """Return what a rank has said of itself; descriptors without their numbers.

    libuv, which torchrun's store uses, makes a pipe in every child of a process that has it: it is left out.
    """
    found = json.loads(text)
    for part in ("new", "with torch"):
        targets = sorted(found[part]["descriptors"].values())
        pipes = [one for one in targets if "pipe" in one[0]]
        assert pipes == [["pipe:[N]", False]] * (2 if libuv else 0)
        found[part]["descriptors"] = [one for one in targets if one not in pipes]
    return found


def differences(forked: object, executed: object, path: str = "") -> dict[str, tuple]:
    if path in ALLOWED or forked == executed:
        return {}
    if isinstance(forked, dict) and isinstance(executed, dict):
        found = {}
        for key in forked.keys() | executed.keys():
            below = f"{path}/{key}".lstrip("/")
            found |= differences(forked.get(key), executed.get(key), below)
        return found
    return {path: (forked, executed)}


@pytest.mark.parametrize(
    ("protocol", "nproc", "env"),
    [
        ("torchrun", 2, {}),
        ("torchrun", 1, {}),
        ("torchrun", 2, {"OMP_NUM_THREADS": "3"}),
        ("torchrun", 1, {"OPENBLAS_NUM_THREADS": "1", "LC_ALL": "C"}),
        ("mpirun", 2, {}),
        ("mpirun", 1, {"OPENBLAS_NUM_THREADS": "2", "LC_ALL": "C"}),
    ],
    ids=["two", "one", "threads", "C", "two of mpirun", "one of mpirun"],
)
def test_a_forked_rank_is_as_an_executed_one(start, protocol, nproc, env):
    pytest.importorskip("threadpoolctl")
    forked, executed = run_both(start, SAY_ALL, protocol, nproc_per_node=nproc, env=env)
    for rank in range(nproc):
        one = comparable(forked[rank], libuv=protocol == "torchrun")
        assert differences(one, comparable(executed[rank], libuv=False)) == {}
    if nproc == 2:
        one, other = (json.loads(text)["random"] for text in forked)
        assert [name for name in one if one[name] == other[name]] == []


AT_THE_END = """
import torch
import atexit, threading, time, weakref, sys
class Last:
    def __del__(self):
        print("torn down", flush=True)
kept = Last()
atexit.register(lambda: (print("at exit, first"), sys.stdout.write("no end of line")))
atexit.register(print, "at exit, last")
thread = threading.Thread(target=lambda: (time.sleep(0.3), print("the thread has ended")))
thread.start()
import ctypes
libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
libc.__cxa_atexit(libc.puts, ctypes.c_void_p(libc.strdup(b"at exit, in C")), None)
libc.printf(b"a buffer of C\\n")
print("the cell has ended")
"""


def test_a_forked_rank_ends_as_an_executed_one(start, protocol):
    """Threads are awaited, handlers run, objects are torn down and text is flushed, that of C too."""
    forked, executed = run_both(start, AT_THE_END, protocol)
    assert forked == executed
    words = ["the cell has ended", "the thread has ended", "at exit, last", "at exit, first", "torn down"]
    words += ["at exit, in C"]
    assert "a buffer of C" in forked[0]
    assert sorted(words, key=forked[0].index) == words


@pytest.mark.parametrize(
    ("last", "code", "signal"),
    [
        ("atexit.register(os._exit, 7)", 7, None),
        ("os._exit(3)", 3, None),
        ("sys.exit(4)", 4, None),
        ("os.abort()", None, 6),
        ("os.kill(os.getpid(), 9)", None, 9),
    ],
)
def test_how_a_forked_rank_ended_is_told(start, protocol, last, code, signal):
    run = start(f"import atexit, os, sys, torch\n{last}", protocol=protocol)
    assert run.end().outcome == "failed"
    assert run.of(RunEvent, phase="rendezvous")[-1].detail["why_exec"] == ""
    first = min(run.ends().values(), key=lambda one: one.by_run)
    assert (first.exit_code, first.signal) == (code, signal)


WORK = """
import multiprocessing, os, subprocess, sys
import torch
from torch.utils.data import DataLoader, Dataset
class Squares(Dataset):
    def __len__(self): return 8
    def __getitem__(self, at): return torch.tensor(at * at)
for context in ("fork", "spawn"):
    loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context=context)
    print(context, [batch.tolist() for batch in loader])
def double(at, start):
    print("spawned", at, start + torch.ones(1).item())
torch.multiprocessing.spawn(double, args=(1,), nprocs=1)
with multiprocessing.Pool(2) as pool:
    print(pool.map(abs, [-1, -2]))
print(subprocess.run([sys.executable, "-c", "import os; print(os.environ['RANK'], os.getppid())"],
      capture_output=True, text=True).stdout.split() == [os.environ["RANK"], str(os.getpid())])
print((torch.ones(300, 300) @ torch.ones(300, 300)).sum().item())
"""


@pytest.mark.slow
def test_processes_of_a_forked_rank(start, protocol):
    forked, executed = run_both(start, WORK, protocol)
    assert forked == executed
    assert "spawn [[0, 1, 4, 9], [16, 25, 36, 49]]" in forked[0]


def test_a_group_of_forked_ranks_on_two_instances(start, protocol):
    cell = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
    cell += "total = torch.ones(1)\ndist.all_reduce(total)\nprint(int(total))"
    forked, executed = run_both(start, cell, protocol, instance_count=2)
    assert forked == executed == ["4\n"] * 4


@pytest.mark.parametrize(
    ("path", "flavour"), [("/usr/bin/mpirun.openmpi", "openmpi4"), ("/usr/bin/mpirun.mpich", "mpich")]
)
def test_other_implementations_of_mpi_have_their_ranks_forked(start, use_mpirun, path, flavour):
    use_mpirun(path, flavour)
    forked, executed = run_both(
        start, "import os, torch\nprint(os.environ['RANK'])", "mpirun", instance_count=2
    )
    assert forked == executed == ["0\n", "1\n", "2\n", "3\n"]


def test_forked_ranks_speak_mpi(start):
    cell = (
        "import torch\nfrom mpi4py import MPI\nprint(MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.Get_rank() + 1))"
    )
    forked, executed = run_both(start, cell, "mpirun", nproc_per_node=4)
    assert forked == executed == ["10\n"] * 4


# when it is not forked


def test_a_module_of_the_notebooks_that_hides_an_imported_one_is_imported(start, tmp_path, monkeypatch):
    (tmp_path / "stringprep.py").write_text("MINE = True")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = start("import torch, stringprep\nprint(stringprep.MINE)", protocol="torchrun")
    assert run.end().outcome == "succeeded"
    assert run.text(0) == "True\n"
    first, last = run.of(RunEvent, phase="rendezvous")
    assert first.detail["why_exec"] == ""
    assert last.detail["why_exec"] == "the notebook's sys.path has another stringprep"


def test_an_mpirun_that_changes_what_an_import_reads_gets_programs(start, use_mpirun, tmp_path):
    """It told another environment when it was asked: the rank that was forked ahead is none of its ranks."""
    mpirun = tmp_path / "mpirun"
    real = Path(sys.executable).with_name("mpirun")
    asked = tmp_path / "asked"
    mpirun.write_text(
        f'#!/bin/sh\ntest -e {asked} && set -- -x TZ=UTC7 "$@"\ntouch {asked}\nexec {real} "$@"\n'
    )
    mpirun.chmod(0o755)
    use_mpirun(str(mpirun), "openmpi5")
    run = start("import os, torch\nprint(os.environ['TZ'])", protocol="mpirun")
    assert run.end().outcome == "succeeded"
    assert [run.text(rank) for rank in range(2)] == ["UTC7\n"] * 2
    told = "mpirun has changed TZ, which is read before a cell runs"
    assert run.of(RunEvent, phase="rendezvous")[-1].detail["why_exec"] == told


def test_what_hides_a_module(tmp_path):
    home = str(Path(json.__file__).parents[1])
    assert shadowed(["json"], [home]) == ""
    (tmp_path / "json").mkdir()
    assert shadowed(["json"], [str(tmp_path), home]) == ""  # a namespace package does not hide a module
    (tmp_path / "json" / "__init__.py").touch()
    assert shadowed(["json"], ["/nowhere", str(tmp_path), home]) == "json"
    assert shadowed(["json"], [home, str(tmp_path)]) == ""
    assert shadowed(["selectors"], [str(tmp_path)]) == ""


def test_a_zygote_that_is_gone_refuses():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    with ours, selectors.DefaultSelector() as selector, Path(os.devnull).open() as log:
        launcher = ForkedLauncher(ours, selector, {}, log.fileno())
        launcher.poll()
        assert (launcher.refusal, launcher.pid, launcher.take_code()) == (GONE, None, None)
        launcher.end()


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({}, 4),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "2,1"}, 2),
        ({"OMP_NUM_THREADS": "9"}, 4),
        ({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "0"}, 4),
        ({"OMP_NUM_THREADS": "many"}, 4),
    ],
)
def test_the_threads_that_openblas_would_have(environ, size):
    assert pools.wanted(environ, 4) == size


# CUDA

ASK_NOTHING = """
import sys
import torch

def telling(name):
    def asked(*_, **__):
        with open(sys.argv[2], "a") as file:
            print(name, file=file)
        raise RuntimeError(f"{name} was called")
    return asked

for name in ("is_available device_count current_device init _lazy_init synchronize get_device_properties manual_seed_all "
             "seed_all set_device get_device_name _lazy_call").split():
    setattr(torch.cuda, name, telling("torch.cuda." + name))
for name in dir(torch._C):
    if name.startswith("_cuda_"):
        setattr(torch._C, name, telling("torch._C." + name))
from jupyter_ddp.runtime import zygote
zygote.main(int(sys.argv[1]))
"""


def test_nothing_asks_cuda_before_a_rank_runs(tmp_path):
    """Zygote, nurse, torchrun, stub and the rank's first steps: after such a question CUDA does not work in a child."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    calls, log = tmp_path / "calls", tmp_path / "log"
    zygote = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ASK_NOTHING), str(theirs.fileno()), str(calls)],
        env=os.environ | SETTINGS,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "agent"))
    listener.listen()
    with ours, listener, selectors.DefaultSelector() as selector, log.open("wb") as file:
        listener.setblocking(False)
        command = torchrun_command(
            sys.executable, nnodes=1, node=0, nproc=1, master_addr="127.0.0.1", master_port=free_port(),
            log_dir=str(tmp_path / "torchrun"),
        )  # fmt: skip
        env = dict(os.environ, JUPYTER_DDP_SOCKETS=str(tmp_path / "agent"), JUPYTER_DDP_NPROC="1")
        request = {"arguments": command[3:], "env": env, "cwd": str(tmp_path), "sys_path": sys.path}
        launcher = ForkedLauncher(ours, selector, request, file.fileno())
        connected, code = 0, None
        while code is None:
            time.sleep(0.01)
            with contextlib.suppress(BlockingIOError):
                listener.accept()[
                    0
                ].close()  # the stub, then the rank, which ends, as its agent seems to be gone
                connected += 1
            launcher.poll()
            assert launcher.refusal == ""
            code = launcher.take_code()
        launcher.end()
    assert zygote.wait(20) == 0
    assert (connected, code) == (2, 1), log.read_text()
    assert not calls.exists(), calls.read_text()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
