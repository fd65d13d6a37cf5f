"""Command lines of torchrun and mpirun, and the environment that a rank finds under either. Pure functions.

Sources: the manual pages of mpirun (Open MPI 4 and 5) and mpiexec (MPICH, Hydra), the document "torchrun (Elastic
Launch)" of PyTorch, and what each launcher was seen to set.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROTOCOLS: Final = ("torchrun", "mpirun")
WORKER: Final = "jupyter_ddp.runtime.worker"

RANK_VARIABLES: Final = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""What every rank finds in its environment, under both protocols and with equal values."""

_LAUNCHER_NAMES: Final = frozenset(
    {*RANK_VARIABLES, "NODE_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PE_HOSTFILE"}
)
_LAUNCHER_PREFIXES: Final = (
    "SLURM_",
    "PMI_",
    "PMIX_",
    "OMPI_",
    "PRTE_",
    "HYDI_",
    "HYDRA_",
    "MPIEXEC_",
    "MV2_COMM_",
    "PBS_",
    "LSB_",
    "TORCHELASTIC_",
    "PET_",
    "JUPYTER_DDP_",
)
_SETTINGS: Final = frozenset(
    {"HYDRA_FULL_ERROR"}
)  # of the Hydra that reads configuration files, not of MPICH's


def is_launcher_variable(name: str) -> bool:
    """Tell whether a variable belongs to a launcher or batch system, and so must not reach another launcher."""
    return name in _LAUNCHER_NAMES or (name.startswith(_LAUNCHER_PREFIXES) and name not in _SETTINGS)


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what launchers and batch systems put into it.

    A kernel that was itself started by a launcher, or in which somebody set ``RANK``, would otherwise make every
    launcher below it believe that it is a part of that job.
    """
    return {name: value for name, value in environ.items() if not is_launcher_variable(name)}


_READ_EARLY: Final = re.compile(
    r"(PYTHON|LD_|OMP|GOMP|GOTO|KMP|MKL|OPENBLAS|BLIS|NUMEXPR|CUDA|NVIDIA|NCCL|GLOO|TORCH|PYTORCH|USE_|LC_|LANG|TZ"
    r"|HOME|MALLOC_|GLIBC|LOGLEVEL|TMPDIR|VIRTUAL_ENV|CONDA)"
)


RANKS_HERE: Final = frozenset({"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"})
"""How many ranks an mpirun has on a host: MKL, and by it torch, takes its number of threads from that when loaded."""


def read_early(name: str) -> bool:
    """Tell whether an environment variable is one that is read at a process's start or while torch is imported."""
    return name in RANKS_HERE or (_READ_EARLY.match(name) is not None and not is_launcher_variable(name))


_READ_AT_IMPORT: Final = re.compile(r"\b(?:OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|NUMEXPR|TORCH|PYTORCH)_[A-Z0-9_]+")


_NEEDS_TORCH: Final = re.compile(
    r"\b(?:torch|lightning|pytorch_lightning|transformers|accelerate|deepspeed|diffusers|peft|trl|timm|fastai|monai"
    r"|sentence_transformers)"
)
"""Beginnings of the names of packages that import torch."""


def why_exec(  # noqa: PLR0913 - the facts that count
    *,
    protocol: str = "torchrun",
    fork: bool = True,
    platform: str = "linux",
    gpus: Sequence[str] = (),
    text: str = "",
    threads: int = 1,
    cuda: bool = False,
    shadowed: str = "",
    torch: bool = True,
    warm: bool = False,
) -> str:
    """Return why each rank is a program that imports torch by itself, or "" where ranks are forked after one import.

    Args:
        protocol: The launcher.
        fork: What the user allows.
        platform: As ``sys.platform``.
        gpus: The device nodes of GPUs.
        text: The code that the ranks run, and what its variables mention.
        threads: How many threads the process has that would be forked.
        cuda: Whether CUDA is initialised in it.
        shadowed: A module of which it has another one than the rank's module path would give.
        torch: Whether there is a torch that could be imported.
        warm: Whether it has been imported already, in a process that waits for this run. Ranks of mpirun that do
            not need it would else have to wait for it.
    """
    named = _READ_AT_IMPORT.search(text)
    reasons = (
        (not fork, "--no-fork was given"),
        (platform != "linux", "forking is safe on Linux only"),
        (not torch, "this Python has no torch"),
        (
            protocol == "mpirun" and not warm and not _NEEDS_TORCH.search(text),
            "neither the cell nor its variables name torch",
        ),
        (gpus, f"this machine has a GPU ({', '.join(gpus)}), and forking has not been tested with CUDA"),
        (named, f"the cell names {named and named[0]}, which is read when torch is imported"),
        (threads != 1, f"importing torch started {threads - 1} threads"),
        (cuda, "importing torch initialised CUDA"),
        (shadowed, f"the notebook's sys.path has another {shadowed}"),
    )
    return next((reason for holds, reason in reasons if holds), "")


def torchrun_command(
    python: str,
    *,
    nnodes: int,
    node: int,
    nproc: int,
    master_addr: str,
    master_port: int,
    log_dir: str,
) -> list[str]:
    """Return the command line of one instance's torchrun.

    The rendezvous is static: no extra store, no election. ``--local-addr`` keeps torchrun from looking up the host's
    own name, which fails in some containers; ``--log-dir`` keeps it from leaving a directory in the temporary one.
    """
    command = [python, "-m", "torch.distributed.run"]
    command += ["--nnodes", str(nnodes), "--node-rank", str(node), "--nproc-per-node", str(nproc)]
    command += ["--rdzv-backend", "static", "--master-addr", master_addr, "--master-port", str(master_port)]
    if master_addr == "127.0.0.1":
        command += ["--local-addr", master_addr]
    return [*command, "--max-restarts", "0", "--log-dir", log_dir, "-m", WORKER]


def mpirun_command(
    mpirun: str, flavour: str, *, hosts: Sequence[tuple[str, int]], program: Sequence[str]
) -> list[str]:
    """Return the command line of the one mpirun of a run.

    ``hosts`` are pairs of a host and its number of ranks, in the order of the nodes; ranks are placed host by host,
    unbound, more of them than cores if asked (the user chose the number).

    Raises:
        ValueError: The flavour is none that `mpi_flavour` returns.
    """
    total = str(sum(count for _, count in hosts))
    if flavour == "mpich":
        names = ",".join(f"{host}:{count}" for host, count in hosts)
        fork = ["-launcher", "fork"] if len(hosts) == 1 else []
        return [mpirun, *fork, "-hosts", names, "-np", total, "-bind-to", "none", *program]
    names = ",".join(f"{host}:{count}" for host, count in hosts)
    command = [mpirun, "--allow-run-as-root", "-np", total, "--host", names, "--bind-to", "none"]
    if flavour == "openmpi5":
        command += ["--map-by", "slot:OVERSUBSCRIBE"]
    elif flavour == "openmpi4":
        # CMA needs ptrace, which containers often refuse with a wall of warnings.
        command += ["--map-by", "slot", "--oversubscribe", "--mca", "btl_vader_single_copy_mechanism", "none"]
    else:
        raise ValueError(f"unknown MPI flavour {flavour!r}")
    return [*command, *program]


def session_environment(flavour: str | None, directory: str) -> dict[str, str]:
    """Return what makes an mpirun keep its files, and the memory that its ranks share, in a directory of the run.

    In the common ones, what a killed mpirun leaves stays for ever, and stops a later one that gets its pid.
    """
    if flavour == "openmpi5":
        return {"PRTE_MCA_prte_tmpdir_base": directory, "OMPI_MCA_btl_sm_backing_directory": directory}
    if flavour == "openmpi4":
        return {"OMPI_MCA_orte_tmpdir_base": directory, "OMPI_MCA_btl_vader_backing_directory": directory}
    return {}


def mpi_flavour(version_text: str) -> str | None:
    """Return the flavour of an mpirun by what ``mpirun --version`` prints, or None for one that is not supported."""
    if found := re.search(r"(?:\(Open MPI\)|Open MPI|OpenRTE\))\s+v?(\d+)\.", version_text):
        return "openmpi5" if int(found.group(1)) >= 5 else "openmpi4"
    if re.search(r"HYDRA|MPICH", version_text):
        return "mpich"
    return None


def rank_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the rank's variables (`RANK_VARIABLES`) by what its launcher put into the environment.

    torchrun sets them itself. For MPI they follow from the rank, the size and ``JUPYTER_DDP_NPROC``: the node of a
    rank is ``RANK // nproc``, also when one mpirun serves several simulated instances of one host.

    Raises:
        KeyError: No launcher that we know started this process.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return {name: environ[name] for name in RANK_VARIABLES}
    for rank_name, size_name in (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")):
        if rank_name in environ:
            rank, size = int(environ[rank_name]), int(environ[size_name])
            break
    else:
        raise KeyError("neither torchrun nor mpirun started this process")
    nproc = int(environ["JUPYTER_DDP_NPROC"])
    addr, _, port = environ["JUPYTER_DDP_MASTER"].rpartition(":")
    values: dict[str, int | str] = {
        "RANK": rank,
        "LOCAL_RANK": rank % nproc,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": nproc,
        "GROUP_RANK": rank // nproc,
        "GROUP_WORLD_SIZE": -(-size // nproc),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": addr,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in values.items()}
