"""The launcher of an instance: started as it must be, watched, and explained when it fails by itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jupyter_ddp.launchers import WORKER
from jupyter_ddp.runtime.launcher import Launcher
from jupyter_ddp.runtime.process import is_alive

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no ranks on Windows")

# Stands for torchrun or mpirun: says how it was started, then does what the file `then` says.
FAKE = """#!{python}
import json, os, sys
from pathlib import Path
facts = {{
    "argv": sys.argv[1:],
    "env": dict(os.environ),
    "cwd": os.getcwd(),
    "stdin": sys.stdin.read(),
    "leads": os.getpid() == os.getsid(0),
    "fds": sorted(os.listdir("/proc/self/fd"))[:-1] if os.path.isdir("/proc/self/fd") else [],
}}
path = Path({place!r}) / ("started" + facts["env"]["JUPYTER_DDP_MASTER"].rpartition(":")[2])
path.with_suffix(".new").write_text(json.dumps(facts))
path.with_suffix(".new").rename(path)
exec(Path({place!r}, "then").read_text())
"""


class Place:
    """A launcher that starts `FAKE`, and the agent's part in it, in the test's own process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run_dir = directory / "run"
        self.run_dir.mkdir()
        self.program = directory / "fake"
        self.program.write_text(FAKE.format(python=sys.executable, place=str(directory)))
        self.program.chmod(0o755)
        self.then("")

    def then(self, code: str) -> None:
        (self.directory / "then").write_text(code)

    def launcher(self, node: int = 0, **changes: Any) -> Launcher:
        spec = {
            "run_id": "abcd1234",
            "protocol": "torchrun",
            "nnodes": 1,
            "nproc": 2,
            "world_size": 2,
            "master_addr": "127.0.0.1",
            "master_ports": [7001, 7002, 7003],
            "python": str(self.program),
            "mpirun": str(self.program),
            "mpi": "openmpi5",
            "env": {"HOME": "/home/me", "PATH": os.environ["PATH"]},
            "node_env": [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}],
            "sockets": ["/tmp/x/0", "/tmp/x/1"],
        }
        return Launcher({**spec, **changes}, node, self.run_dir)

    def started(self, port: int = 7001) -> dict[str, Any]:
        path = self.directory / f"started{port}"
        for _ in range(3_000):
            if path.exists():
                return json.loads(path.read_text())
            time.sleep(0.01)
        pytest.fail("it did not start")

    def ended(self, launcher: Launcher) -> dict[str, Any]:
        for _ in range(3_000):
            if found := launcher.watch():
                return found
            time.sleep(0.01)
        pytest.fail("it did not end")


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


# starting


def test_torchrun_is_started_with_the_runs_environment_and_nothing_else(place):
    launcher = place.launcher(node=1, nnodes=2)
    assert launcher.start(0) is None
    facts = place.started()
    assert [str(place.program), *facts["argv"]] == launcher.command
    assert launcher.command[:3] == [str(place.program), "-m", "torch.distributed.run"]
    line = " ".join(launcher.command)
    assert "--node-rank 1 --nproc-per-node 2" in line
    assert "--master-addr 127.0.0.1 --master-port 7001" in line
    assert f"--log-dir {place.run_dir}/torchrun-1" in line
    facts["env"].pop("LC_CTYPE", None)  # Python's own doing
    assert facts["env"] == {
        "HOME": "/home/me",
        "PATH": os.environ["PATH"],
        "CUDA_VISIBLE_DEVICES": "2,3",
        "JUPYTER_DDP_RUN": "abcd1234",
        "JUPYTER_DDP_SOCKETS": os.pathsep.join(["/tmp/x/0", "/tmp/x/1"]),
        "JUPYTER_DDP_NPROC": "2",
        "JUPYTER_DDP_MASTER": "127.0.0.1:7001",
    }
    place.ended(launcher)


def test_a_launcher_gets_no_input_no_descriptors_and_no_directory_of_the_users(place):
    """B107."""
    launcher = place.launcher()
    launcher.start(0)
    facts = place.started()
    assert facts["cwd"] == str(place.run_dir)
    assert facts["stdin"] == ""
    assert facts["leads"]  # a session of its own: Ctrl-C in a terminal is the notebook's
    assert facts["fds"] in ([], ["0", "1", "2"])
    place.ended(launcher)


def test_one_mpirun_serves_all_simulated_instances(place):
    launcher = place.launcher(protocol="mpirun", nnodes=2, world_size=4)
    assert launcher.start(0) is None
    facts = place.started()
    assert launcher.command[:4] == [str(place.program), "--allow-run-as-root", "-np", "4"]
    assert launcher.command[-3:] == [str(place.program), "-m", WORKER]
    assert "CUDA_VISIBLE_DEVICES" not in facts["env"]  # each rank gets its instance's with its cell
    place.ended(launcher)
    other = place.launcher(node=1, protocol="mpirun", nnodes=2, world_size=4)
    assert other.start(0) is None
    assert (other.command, other.pid, other.watch()) == ([], None, None)


def test_a_program_that_is_not_there(place):
    launcher = place.launcher(python="/no/such/python")
    assert "/no/such/python could not be started" in launcher.start(0)
    assert (launcher.pid, launcher.watch()) == (None, None)


def test_another_try_takes_the_next_port_and_ends_what_was_there(place):
    """B33."""
    place.then("import time; time.sleep(60)")
    launcher = place.launcher()
    launcher.start(0)
    place.started(7001)
    first = launcher.pid
    place.then("print('the second')")
    assert launcher.start(1) is None
    assert not is_alive(first)
    place.started(7002)
    assert "--master-port 7002" in " ".join(launcher.command)
    ended = place.ended(launcher)
    assert ended["try"] == 1
    assert "the second" in ended["text"]
    with pytest.raises(ChildProcessError):
        os.waitpid(first, 0)


def test_a_launcher_dies_with_its_agent(place, repository):
    """B51."""
    if sys.platform != "linux":
        pytest.skip("needs Linux")
    place.then("import time; time.sleep(60)")
    code = f"""
import sys, time
sys.path.insert(0, {str(repository)!r})
sys.path.insert(0, {str(place.directory)!r})
from jupyter_ddp.runtime.launcher import Launcher
import json, pathlib
launcher = Launcher(json.loads(sys.argv[1]), 0, pathlib.Path({str(place.run_dir)!r}))
launcher.start(0)
print(launcher.pid, flush=True)
time.sleep(60)
"""
    spec = json.dumps(place.launcher()._spec)
    with subprocess.Popen([sys.executable, "-c", code, spec], stdout=subprocess.PIPE, text=True) as agent:
        pid = int(agent.stdout.readline())
        place.started()
        assert is_alive(pid)
        agent.kill()
        agent.wait()
    try:
        for _ in range(1_000):
            if not is_alive(pid):
                break
            time.sleep(0.01)
        assert not is_alive(pid)
    finally:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


# its end


def test_the_end_is_told_once(place):
    launcher = place.launcher()
    assert launcher.watch() is None
    launcher.start(0)
    pid = launcher.pid
    assert is_alive(pid)
    assert place.ended(launcher) == {
        "try": 0,
        "port_taken": False,
        "text": "torchrun ended with code 0 before its ranks had finished",
    }
    assert launcher.pid is None
    assert launcher.watch() is None


def test_other_children_are_collected_without_being_taken_for_it(place):
    place.then("import time; time.sleep(60)")
    launcher = place.launcher()
    launcher.start(0)
    place.started()
    other = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-S", "-c", "raise SystemExit(7)"])
    while is_alive(other):
        time.sleep(0.005)
    assert launcher.watch() is None
    with pytest.raises(ChildProcessError):
        os.waitpid(other, 0)
    os.kill(launcher.pid, signal.SIGKILL)
    assert place.ended(launcher)["text"].startswith("torchrun was killed by SIGKILL before")


NOISE = """\
W0101 12:00:00.000000 4242 torch/distributed/run.py:803] Setting OMP_NUM_THREADS environment variable
*****************************************
----------------------------------------

================
"""


def test_it_is_quoted_without_noise_and_only_its_end(place):
    text = NOISE + "".join(f"line {n}\n" for n in range(40)) + "no such option: --x\n"
    place.then(f"sys.stdout.write({text!r}); sys.stdout.flush(); sys.exit(2)")
    launcher = place.launcher()
    launcher.start(0)
    first, *quoted = place.ended(launcher)["text"].splitlines()
    assert first == "torchrun ended with code 2 before its ranks had finished; it said:"
    assert quoted == [*(f"line {n}" for n in range(29, 40)), "no such option: --x"]


def test_the_log_of_a_try_before_is_not_quoted(place):
    place.then("print('first'); sys.exit(1)")
    launcher = place.launcher()
    launcher.start(0)
    place.ended(launcher)
    place.then("print('second'); sys.exit(1)")
    launcher.start(1)
    text = place.ended(launcher)["text"]
    assert "second" in text
    assert "first" not in text


@pytest.mark.parametrize(
    "text",
    [
        "DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        "RuntimeError: Address already in use",
        "OSError: [Errno 98] Address already in use",
    ],
)
def test_a_port_that_is_taken_is_recognised(place, text):
    """B33."""
    place.then(f"print({text!r}, file=sys.stderr); sys.exit(1)")
    launcher = place.launcher()
    launcher.start(0)
    assert place.ended(launcher)["port_taken"]


OPENMPI_4 = """\
--------------------------------------------------------------------------
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
with errorcode 3.

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
"""
OPENMPI_5 = """\
--------------------------------------------------------------------------
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
  Proc: [[61065,1],1]
  Errorcode: 3

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
"""
MPICH = "Abort(3) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 3) - process 1\n"


@pytest.mark.parametrize("text", [OPENMPI_4, OPENMPI_5, MPICH], ids=["openmpi4", "openmpi5", "mpich"])
def test_an_abort_of_the_users_is_called_by_its_name(place, text):
    """B57."""
    place.then(f"sys.stderr.write({text!r}); sys.exit(3)")
    launcher = place.launcher(protocol="mpirun")
    launcher.start(0)
    assert place.ended(launcher)["text"] == "rank 1 called MPI_Abort with error code 3"


def test_another_abort_of_mpich_is_quoted(place):
    text = "Abort(1090831) on node 0 (rank 0 in comm 0): Fatal error in PMPI_Init: Unknown error class\n"
    place.then(f"sys.stderr.write({text!r}); sys.exit(15)")
    launcher = place.launcher(protocol="mpirun")
    launcher.start(0)
    assert "Fatal error in PMPI_Init" in place.ended(launcher)["text"]


def test_a_log_that_is_no_text(place):
    place.then(r"sys.stdout.buffer.write(b'odd \xff\n'); sys.exit(1)")
    launcher = place.launcher()
    launcher.start(0)
    assert place.ended(launcher)["text"].endswith("odd \ufffd")
