"""A forked rank is as an exec'd one: every field of a process that a cell can see, compared; and what is not the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from jupyter_ddp.events import RunEvent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")

SAY_ALL = '''
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
        if name and not name.startswith("torch.distributed") or not name:
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
        "environment": {k: re.sub(r"[0-9]+", "N", v.replace(RUN, "RUN")) for k, v in sorted(os.environ.items())
                        if k not in ("JUPYTER_DDP_RUN", "TORCHELASTIC_ERROR_FILE", "MASTER_PORT")},
        "marker": b"JUPYTER_DDP_RUN=" + os.environ["JUPYTER_DDP_RUN"].encode() in open("/proc/self/environ", "rb").read(),
        "error file": os.path.basename(os.environ["TORCHELASTIC_ERROR_FILE"]),
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
'''
