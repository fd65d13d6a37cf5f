"""What a rank finds when it starts, under every launcher."""

from __future__ import annotations

import json
import os
import resource
import socket

import pytest

from jupyter_ddp.backends import _ports
from jupyter_ddp.launchers import RANK_VARIABLES

SAY_ENVIRONMENT = """
import json, os
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME"
print(json.dumps({name: os.environ.get(name) for name in [*names.split(), "MASTER_ADDR", "MASTER_PORT"]}))
"""
ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total))
"""


def environments(run) -> list[dict]:
    return [json.loads(run.text(rank)) for rank in range(run.world_size)]


@pytest.mark.parametrize(("instances", "nproc"), [(1, 2), (2, 2)])
def test_the_rank_environment_is_complete_and_equal_under_both_protocols(start, instances, nproc):
    """B109: one cell runs unchanged under torchrun and mpirun."""
    found = {}
    for protocol in ("torchrun", "mpirun"):
        run = start(SAY_ENVIRONMENT, protocol=protocol, instance_count=instances, nproc_per_node=nproc)
        assert run.end().outcome == "succeeded"
        found[protocol] = environments(run)
    for rank in range(instances * nproc):
        torchrun, mpirun = found["torchrun"][rank], found["mpirun"][rank]
        assert set(torchrun) == set(RANK_VARIABLES)
        assert torchrun["MASTER_PORT"] != ""
        torchrun.pop("MASTER_PORT"), mpirun.pop("MASTER_PORT")
        assert torchrun == mpirun
        assert (torchrun["RANK"], torchrun["WORLD_SIZE"]) == (str(rank), str(instances * nproc))
        assert (torchrun["LOCAL_RANK"], torchrun["GROUP_RANK"]) == (str(rank % nproc), str(rank // nproc))


@pytest.mark.parametrize("instances", [1, 2])
def test_a_process_group_spans_all_ranks(start, protocol, instances):
    run = start(ALL_REDUCE, protocol=protocol, instance_count=instances, nproc_per_node=2 // instances)
    assert run.end().outcome == "succeeded"
    assert [run.text(rank) for rank in range(2)] == ["sum 2\n"] * 2


@pytest.mark.parametrize(
    ("path", "flavour"), [("/usr/bin/mpirun.openmpi", "openmpi4"), ("/usr/bin/mpirun.mpich", "mpich")]
)
def test_other_implementations_of_mpi_start_the_same_ranks(start, use_mpirun, path, flavour):
    """B39, B40: more ranks than cores, as root, without a flag."""
    use_mpirun(path, flavour)
    run = start(SAY_ENVIRONMENT, instance_count=2, nproc_per_node=2)
    assert run.end().outcome == "succeeded"
    assert [found["RANK"] for found in environments(run)] == ["0", "1", "2", "3"]
    assert [found["GROUP_RANK"] for found in environments(run)] == ["0", "0", "1", "1"]


def test_mpi_works_inside_a_cell(start):
    run = start(
        "from mpi4py import MPI\nprint(MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.Get_rank() + 1))",
        nproc_per_node=4,
    )
    assert run.end().outcome == "succeeded"
    assert [run.text(rank) for rank in range(4)] == ["10\n"] * 4


def test_launcher_variables_of_the_kernel_do_not_reach_the_ranks(start, protocol, monkeypatch):
    """B35: a kernel inside a job, or with stale variables, starts a run of its own and is left as it was."""
    stale = {
        "RANK": "5",
        "WORLD_SIZE": "9",
        "LOCAL_RANK": "3",
        "MASTER_PORT": "1",
        "OMPI_COMM_WORLD_SIZE": "8",
        "PMIX_RANK": "3",
        "SLURM_PROCID": "4",
        "TORCHELASTIC_RUN_ID": "old",
    }
    for name, value in stale.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    run = start(
        "import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ.get('SLURM_PROCID'))",
        protocol=protocol,
    )
    assert run.end().outcome == "succeeded"
    assert [run.text(rank) for rank in range(2)] == ["0 2 None\n", "1 2 None\n"]
    assert dict(os.environ) == before


def test_threads_are_limited_alike_and_without_a_banner(start, protocol):
    """B37: torchrun's default, its boxed warning nowhere; a setting of the user counts."""
    cell = "import os\nprint(os.environ.get('OMP_NUM_THREADS'))"
    run = start(cell, protocol=protocol)
    run.end()
    assert [run.text(rank) for rank in range(2)] == ["1\n", "1\n"]
    assert run.text(0, "stderr") == ""
    own = start(cell, protocol=protocol, env={"OMP_NUM_THREADS": "2"})
    own.end()
    assert own.text(0) == "2\n"


def test_standard_input_is_empty(start, protocol):
    """B107: no launcher and no rank takes what is typed into the kernel."""
    run = start("import sys\nprint(repr(sys.stdin.read()))", protocol=protocol)
    assert run.end().outcome == "succeeded"
    assert run.text(0) == "''\n"


def test_a_rank_has_the_directory_and_the_module_path_of_the_kernel(start, tmp_path, monkeypatch):
    """B15: a module beside the notebook is found, also after os.chdir; a module of the user shadows nothing of ours."""
    (tmp_path / "helpers.py").write_text("def halve(x): return x / 2\n")
    (tmp_path / "queue.py").write_text("raise RuntimeError('shadowed')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    run = start("import os, helpers\nprint(os.getcwd(), helpers.halve(8), os.environ['PYTHONPATH'])")
    assert run.end().outcome == "succeeded", run.errors()
    assert run.text(1) == f"{tmp_path} 4.0 /nowhere\n"


def test_inputs_and_directories_for_results_are_in_the_environment(start, tmp_path):
    cell = """
import os, pathlib
print(os.environ["SM_CHANNEL_TRAIN"])
for name in ("SM_MODEL_DIR", "SM_OUTPUT_DATA_DIR", "JUPYTER_DDP_CHECKPOINT_DIR"):
    (pathlib.Path(os.environ[name]) / f"rank{os.environ['RANK']}").touch()
"""
    run = start(cell, inputs={"train": str(tmp_path)})
    assert run.end().outcome == "succeeded", run.errors()
    assert run.text(0) == f"{tmp_path}\n"
    assert [path.rpartition("/")[2] for path in run.rundir.kept_files()] == ["rank0", "rank1"] * 3


def test_env_takes_the_kernels_value(start, monkeypatch):
    monkeypatch.setenv("FLAVOUR", "sweet")
    run = start(
        "import os\nprint(os.environ['FLAVOUR'], os.environ['COLOUR'])",
        env={"FLAVOUR": None, "COLOUR": "red"},
    )
    run.end()
    assert run.text(0) == "sweet red\n"


def test_taken_ports_are_no_obstacle(start):
    """B33: the usual ports are somebody else's."""
    with socket.socket() as first, socket.socket() as second:
        for sock, port in ((first, 29500), (second, 7777)):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port))
            sock.listen()
        run = start(ALL_REDUCE, protocol="torchrun")
        assert run.end().outcome == "succeeded"


def test_a_port_that_is_taken_in_the_last_moment_is_replaced(start, monkeypatch):
    """B33: between the test of a port and torchrun's bind somebody else may come; the next port is tried."""
    reserve = _ports.reserve
    with socket.socket() as thief:
        thief.bind(("0.0.0.0", 0))
        thief.listen()

        def unlucky(count: int):
            ports, locks = reserve(count)
            return [thief.getsockname()[1], *ports[1:]], locks

        monkeypatch.setattr(_ports, "reserve", unlucky)
        run = start(ALL_REDUCE, protocol="torchrun")
        assert run.end().outcome == "succeeded"
        assert run.text(0) == "sum 2\n"


@pytest.mark.parametrize(("protocol", "count"), [("mpirun", 20), ("torchrun", 8)])
def test_many_runs_at_once_have_ports_and_outputs_of_their_own(start, protocol, count):
    cell = "import os\nprint(os.environ['MASTER_PORT'], {})"
    runs = [start(cell.format(n), protocol=protocol, nproc_per_node=1) for n in range(count)]
    outcomes = [run.end().outcome for run in runs]
    assert outcomes == ["succeeded"] * count
    said = [run.text(0).split() for run in runs]
    assert [int(number) for _, number in said] == list(range(count))
    assert len({port for port, _ in said}) == count


def test_a_launcher_that_fails_is_quoted(start, use_mpirun, tmp_path):
    script = tmp_path / "mpirun"
    script.write_text("#!/bin/sh\necho 'There are not enough slots available' >&2\nexit 3\n")
    script.chmod(0o755)
    use_mpirun(str(script), "openmpi5")
    end = start("1").end()
    assert end.outcome == "lost"
    assert "mpirun ended with code 3 before its ranks had finished" in end.reason
    assert "not enough slots" in end.reason


def test_ranks_that_do_not_start_in_time_are_named(start, use_mpirun, tmp_path):
    script = tmp_path / "mpirun"
    script.write_text("#!/bin/sh\nsleep 300\n")
    script.chmod(0o755)
    use_mpirun(str(script), "openmpi5")
    end = start("1", start_timeout=0.5).end()
    assert end.outcome == "lost"
    assert end.reason == "ranks 0, 1 did not start within 0.5 s"


def test_a_rank_is_as_a_process_that_the_users_shell_starts(start, protocol):
    """Signals are not ignored, limits not changed, no descriptor of ours is open in what it starts."""
    cell = """
import json, os, resource, signal, subprocess, sys
program = '''
import os, signal
ignored = [n for n in ("SIGINT", "SIGTERM", "SIGHUP") if signal.getsignal(getattr(signal, n)) == signal.SIG_IGN]
print(ignored, sorted(fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}")))
'''
print(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    run = start(cell, protocol=protocol)
    assert run.end().outcome == "succeeded", run.errors()
    assert run.text(0).split("\n")[0] == "[] [0, 1, 2]"
    assert run.text(0).split("\n")[2] == str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def test_mpi_under_torchrun_is_explained(start):
    """Each rank would be alone in its world, silently."""
    run = start("from mpi4py import MPI\nprint(MPI.COMM_WORLD.Get_size())", protocol="torchrun")
    assert run.end().outcome == "succeeded"
    assert "write --protocol mpirun" in run.notes()
