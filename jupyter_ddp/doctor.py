"""``%distributed doctor``: what this machine has and lacks for a run, before one is started."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jupyter_ddp import backends
from jupyter_ddp.backends import Problem, _machine
from jupyter_ddp.config.fields import PROTOCOLS
from jupyter_ddp.errors import JupyterDDPError
from jupyter_ddp.launchers import is_launcher_variable
from jupyter_ddp.words import size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from jupyter_ddp.config import LaunchConfig

_LOW_SPACE: Final = 1 << 30
_ORDER: Final = ("fail", "warn", "ok")


def examine(config: LaunchConfig, root: Path, environ: Mapping[str, str]) -> list[Problem]:
    """Return all findings for a run of this configuration whose directory is made below `root`.

    Nothing is started and nothing stays on disk.
    """
    findings = [Problem("ok", f"Python {platform.python_version()} ({sys.executable})")]
    findings += _backend(config)
    if config.backend == "local":
        findings += _devices(config)
        findings += _process_table()
        findings += _environment(environ)
    findings += _run_root(root)
    return findings


def text(findings: list[Problem]) -> str:
    """Return findings as lines, and a last one that says whether runs can be started."""
    marks = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
    lines = [f"{marks.get(one.level, one.level)}  {one}" for one in findings]
    worst = next((level for level in _ORDER if any(one.level == level for one in findings)), "ok")
    verdicts = {
        "fail": "A run would not start: see FAIL above.",
        "warn": "Runs can start: see warn above.",
        "ok": "Runs can start.",
    }
    return "\n".join([*lines, verdicts[worst]])


def _backend(config: LaunchConfig) -> Iterator[Problem]:
    """Yield the backend's findings for the configuration, and for the other launcher as something to know."""
    try:
        backend = backends.get_backend(config.backend)
    except JupyterDDPError as error:
        yield Problem("fail", str(error))
        return
    found = backend.check(config)
    yield from found
    for protocol in PROTOCOLS:
        if protocol != config.protocol:
            for other in backend.check(config.replace(protocol=protocol)):
                if other not in found:
                    level = "warn" if other.level == "fail" else other.level
                    yield Problem(level, f"--protocol {protocol}: {other.text}", other.remedy)


def _devices(config: LaunchConfig) -> Iterator[Problem]:
    gpus = _machine.visible_gpus()
    cores = _machine.cpu_cores()
    try:
        resolved = backends.get_backend(config.backend).resolve(config).nproc_per_node
        ranks = f"-p {config.nproc_per_node} means {resolved} ranks on each instance"
    except JupyterDDPError:
        return  # the backend's check has said it
    what = f"{len(gpus)} GPUs ({', '.join(gpus)})" if gpus else "no GPU"
    yield Problem("ok", f"{what}, {cores} CPU cores; {ranks}")


def _process_table() -> Iterator[Problem]:
    if not sys.platform.startswith("linux"):
        return
    try:
        readable = (
            Path("/proc/self/environ").read_bytes() is not None
            and Path(f"/proc/{os.getppid()}/stat").exists()
        )
    except OSError:
        readable = False
    if readable:
        yield Problem("ok", "/proc can be read: nothing of a run is left behind")
    else:
        remedy = "processes that a rank starts and lets go may be left behind: mount /proc without hidepid"
        yield Problem("warn", "/proc cannot be read", remedy)


def _environment(environ: Mapping[str, str]) -> Iterator[Problem]:
    found = sorted(name for name in environ if is_launcher_variable(name))
    if found:
        shown = ", ".join(found[:6]) + (" …" if len(found) > 6 else "")
        yield Problem("ok", f"launcher variables of this kernel do not reach the ranks: {shown}")


def _run_root(root: Path) -> Iterator[Problem]:
    remedy = "set c.DistributedMagics.run_root to a directory of yours"
    there = next(path for path in (root, *root.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield Problem("fail", f"runs cannot be recorded below {root}: {there} cannot be written", remedy)
        return
    if there == root and root.stat().st_uid != os.getuid():
        yield Problem("fail", f"{root} belongs to user {root.stat().st_uid}", remedy)
        return
    free = shutil.disk_usage(there).free
    if _machine.is_network_file_system(root):
        slow = "locks and appended lines cannot be relied on there; " + remedy + " on a local disk"
        yield Problem("warn", f"{root} lies on a network file system", slow)
    if free < _LOW_SPACE:
        yield Problem("warn", f"runs are recorded in {root}, where {size_text(free)} are free", remedy)
    else:
        yield Problem("ok", f"runs are recorded in {root} ({size_text(free)} free)")
