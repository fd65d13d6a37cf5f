"""Runs from kernels on machines in a bad state: they work all the same, or one sentence says why not, and nothing stays."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from jupyter_ddp.runtime.process import table

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces and limits are Linux's")

KERNEL = """
import json, sys
from jupyter_ddp import LaunchConfig, launch
from jupyter_ddp.errors import JupyterDDPError
from jupyter_ddp.settings import SETTINGS
SETTINGS.run_root = sys.argv[2]
def work():
    import os
    if os.environ.get("WITH_TORCH"):
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        print("sum", int(total))
    print("h\\u00e4llo")
config = LaunchConfig(nproc_per_node=2, protocol=sys.argv[1], start_timeout=30)
try:
    result = launch(work, config=config, check=False)
    told = {"outcome": result.outcome, "texts": [rank.stdout for rank in result.ranks]}
    told["why"] = result.failure.message if result.failure else ""
    told["id"] = result.run_id
except JupyterDDPError as error:
    told = {"outcome": "refused", "why": str(error), "texts": [], "id": ""}
open(sys.argv[3], "w").write(json.dumps(told))
"""


@dataclass(frozen=True)
class Told:
    """What the kernel knew in the end."""

    outcome: str
    why: str
    texts: list[str]
    id: str


def left_in_the_end(run_id: str) -> list[str]:
    """Return the names of a run's processes that do not end by themselves; a kernel does not wait for their end."""
    end = time.monotonic() + 20
    while (left := [one.name for one in table(run_id).values() if one.marked]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


@pytest.fixture
def run(tmp_path, protocol):
    """Run a function on two ranks from a kernel of its own, which a shell's words have put into an environment."""
    script, answer = tmp_path / "kernel.py", tmp_path / "answer.json"
    script.write_text(KERNEL)

    def run(shell: str, *, root: Path | str | None = None, **variables: str | None) -> Told:
        arguments = [sys.executable, str(script), protocol, str(root or tmp_path / "runs"), str(answer)]
        env = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
        env["KERNEL"] = shlex.join(arguments)
        process = subprocess.Popen(
            ["/bin/bash", "-c", shell],
            env=env,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said, _ = process.communicate(timeout=150)
        assert answer.exists(), said
        assert "Traceback" not in said
        told = Told(**json.loads(answer.read_text()))
        if told.id:
            assert left_in_the_end(told.id) == []
        return told

    return run


@pytest.fixture
def namespace():
    """Return what runs a shell's words in namespaces of their own; the words may not have a single quote."""
    if os.getuid() != 0:
        pytest.skip("needs root, for namespaces and mounts")
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-mun", "true"], check=False).returncode:
        pytest.skip("needs root who may make namespaces")
    return lambda which, words: f"unshare {which} bash -c '{words}'"


PRINTED = ["hällo\n"] * 2
SUMMED = ["sum 2\nhällo\n"] * 2

NAMES = {
    "a host name that cannot be resolved": "hostname no-such-host.invalid",
    "a host name of another machine": "echo 203.0.113.9 faraway > hosts; mount --bind hosts /etc/hosts; hostname faraway",
    "no localhost": "echo > hosts; mount --bind hosts /etc/hosts",
    "loopback only": "ip link set lo up",
}


@pytest.mark.parametrize("words", NAMES.values(), ids=NAMES)
def test_ranks_find_each_other_whatever_the_machine_is_called(run, namespace, words):
    which = "-mn" if "lo up" in words else "-mu"
    assert run(namespace(which, f"{words}; $KERNEL"), WITH_TORCH="1").texts == SUMMED


def test_a_machine_without_loopback_is_told_at_once(run, namespace):
    told = run(namespace("-n", "$KERNEL"))
    assert told.outcome == "refused"
    assert told.why.startswith("this machine has no loopback interface (127.0.0.1)")
    assert told.why.endswith("ip link set lo up")


@pytest.mark.parametrize("limit", [64, 32])
def test_a_low_limit_of_open_files_is_enough(run, limit):
    """The private descriptors of a rank are numbered below it."""
    assert run(f"ulimit -n {limit}; $KERNEL").texts == PRINTED


@pytest.mark.parametrize("limit", [16, 24])
def test_a_limit_of_open_files_that_is_too_low_is_named(run, limit):
    told = run(f"ulimit -n {limit}; $KERNEL")
    assert told.outcome == "refused"
    assert "ulimit -n" in told.why


@pytest.mark.parametrize("options", ["size=64k", "size=64k,nr_inodes=1"])
def test_full_shared_memory_is_passed_over(run, namespace, options):
    fill = "head -c 999999 /dev/zero > /dev/shm/full 2>/dev/null"
    words = f"mount -t tmpfs -o {options} none /dev/shm; {fill}; $KERNEL"
    assert run(namespace("-m", words), WITH_TORCH="1").texts == SUMMED


@pytest.mark.parametrize("options", ["size=4k", "size=1m,nr_inodes=12"])
def test_a_disk_that_has_no_room_for_a_run_is_named(run, namespace, tmp_path, options):
    disk = tmp_path / "disk"
    disk.mkdir()
    told = run(namespace("-m", f"mount -t tmpfs -o {options} none disk; $KERNEL"), root=disk / "runs")
    assert told.outcome == "refused"
    assert str(disk) in told.why
    assert told.why.endswith("set c.DistributedMagics.run_root")


def test_a_run_root_that_cannot_be_made_is_named(run):
    told = run("$KERNEL", root="/proc/none/runs")
    assert told.outcome == "refused"
    assert "/proc/none/runs" in told.why
    assert told.why.endswith("set c.DistributedMagics.run_root")


@pytest.mark.parametrize("temporary", ["/none/at/all", "/etc/passwd", "here", "/" + "x" * 200])
def test_the_temporary_directory_may_be_anything(run, temporary):
    """Sockets do not lie in it: their paths could become too long."""
    assert run("mkdir -p here; $KERNEL", TMPDIR=temporary).texts == PRINTED


@pytest.mark.parametrize("variables", [{"HOME": None}, {"PATH": "/nowhere"}], ids=["HOME", "PATH"])
def test_usual_variables_may_be_missing(run, variables):
    """Open MPI 5 does not even say its version without HOME; an mpirun beside this Python needs no PATH."""
    assert run("$KERNEL", **variables).texts == PRINTED


def test_a_directory_that_is_gone_is_named(run):
    told = run("mkdir gone; cd gone; rmdir ../gone; $KERNEL")
    assert told.why == "the notebook's directory is gone: os.chdir to another one"


def test_a_directory_may_be_read_only(run, namespace):
    words = "mkdir still; mount -t tmpfs -o ro none still; cd still; $KERNEL"
    assert run(namespace("-m", words)).texts == PRINTED


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_standard_descriptors_may_be_closed(run, closed):
    assert run(f"$KERNEL {closed}").texts == PRINTED


def test_text_is_whole_in_an_ascii_locale(run):
    variables = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert run("$KERNEL", **variables).texts == PRINTED


@pytest.mark.parametrize("name", ["CHLD", "PIPE", "INT"])
def test_signals_that_the_kernel_ignores_do_not_matter(run, name):
    assert run(f"trap '' {name}; exec $KERNEL").texts == PRINTED


def test_modules_beside_the_notebook_shadow_nothing(run, tmp_path):
    for name in ("select.py", "selectors.py", "signal.py", "torch.py", "socket.py"):
        (tmp_path / "beside" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "beside" / name).write_text("raise RuntimeError('shadowed')\n")
    assert run("cd beside; $KERNEL").texts == PRINTED
