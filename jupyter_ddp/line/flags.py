"""The flags of the magic line: one table for the parser, the help, traits, completion and README's test.

`FLAGS` says what there is. `FOREIGN` answers what people know from other tools, one sentence each, before anything
starts.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of ``%%distributed``.

    Attributes:
        names: Its spellings, the short one first when there is one, then the long one that texts use.
        field: The field of `LaunchConfig` that it sets, or "" for a flag of the line itself.
        metavar: What stands for its value in help, or None when it takes none.
        help: What it means, for help and README.
        default: What holds when it is not given, in words.
        repeatable: Several are collected; of any other flag the last one wins.
        listing: Its value is a list: ``a,b`` and ``a, b``.
    """

    names: tuple[str, ...]
    field: str
    metavar: str | None
    help: str
    default: str
    repeatable: bool = False
    listing: bool = False

    @property
    def long(self) -> str:
        """The long spelling."""
        return next(name for name in self.names if name.startswith("--"))

    @property
    def short(self) -> str:
        """The spelling that a written line has: the short one where there is one."""
        return self.names[0]


FLAGS: Final = (
    Flag(
        ("-b", "--backend"),
        "backend",
        "NAME",
        "where the ranks run: local (this machine); sagemaker comes with a later version",
        "local",
    ),
    Flag(
        ("-N", "--instance-count", "--nnodes"),
        "instance_count",
        "COUNT",
        "instances; locally, simulated ones on this machine",
        "1",
    ),
    Flag(
        ("-p", "--nproc-per-node"),
        "nproc_per_node",
        "RANKS",
        "ranks on each instance: a number, gpu, cpu, or auto: one for each GPU, else for each Neuron core, else 2",
        "auto",
    ),
    Flag(("--protocol",), "protocol", "LAUNCHER", "torchrun or mpirun", "torchrun"),
    Flag(
        ("-t", "--instance-type"),
        "instance_type",
        "TYPE",
        "SageMaker instance type, e.g. ml.g5.12xlarge",
        "SageMaker's own configuration",
    ),
    Flag(
        ("--push",), "push", "NAMES", "send exactly these variables: a,b", "what the cell uses", listing=True
    ),
    Flag(("--no-push",), "push", None, "send no variables", "what the cell uses"),
    Flag(
        ("--pull",),
        "pull",
        "NAMES",
        "bring values back: loss (rank 0), loss@3, loss@all (a list by rank)",
        "none",
        listing=True,
    ),
    Flag(("-o", "--out"), "out", "NAME", "bind the DistributedResult, also of a failed run", "none"),
    Flag(
        ("-e", "--env"),
        "env",
        "NAME[=VALUE]",
        "environment of the ranks (repeatable); a bare NAME takes the kernel's value",
        "inherited",
        repeatable=True,
    ),
    Flag(
        ("--show",),
        "show",
        "RANKS",
        "ranks whose text is shown and kept in the notebook: 0,3 or 0-3 or all; a failing rank always shows",
        "all",
        listing=True,
    ),
    Flag(
        ("--timeout",),
        "timeout",
        "TIME",
        "90s, 30m, 8h or 2d, counted from the moment the first rank runs the cell",
        "none",
    ),
    Flag(
        ("--init-process-group",),
        "init_process_group",
        "BACKEND",
        "auto, nccl or gloo: ranks start inside a default process group",
        "your code calls init_process_group",
    ),
    Flag(
        ("--distribution",),
        "distribution",
        "DICT",
        "SageMaker's distribution dictionary; comes with a later version",
        "none",
    ),
    Flag(
        ("--config",), "", "NAME", "a LaunchConfig or dict of the notebook; other flags win over it", "none"
    ),
    Flag(
        ("--name",), "name", "LABEL", "a name for the run, in lists and for %distributed logs LABEL", "none"
    ),
    Flag(
        ("--detach",),
        "detach",
        None,
        "return at once and leave the run going; comes with a later version",
        "off",
    ),
    Flag(
        ("--no-fork",),
        "fork",
        None,
        "every rank is a program of its own, which imports torch by itself",
        "ranks are forked after one import, where that is safe",
    ),
    Flag(
        ("--dry-run",),
        "",
        None,
        "print what would be sent and the exact launch command, secrets masked; start nothing",
        "off",
    ),
)

BY_NAME: Final = {name: flag for flag in FLAGS for name in flag.names}

FIELD_ONLY: Final = (
    "inputs",
    "checkpoints",
    "setup",
    "start_timeout",
    "interrupt_grace",
    "sagemaker_options",
)
"""Fields that have no flag."""

_COUNT_HERE: Final = "write -p {0} for ranks on each instance or -N {0} for instances"
_NO_BLOCK: Final = "a cell blocks while its ranks run, and ■ interrupts them"
_ENV: Final = "write --env NAME=VALUE"
_CHOSEN: Final = "address and port are chosen for each run, so that runs cannot collide: leave it out"

FOREIGN: Final[dict[str, str]] = {
    "-n": "-n means ranks to mpirun and could mean instances here: " + _COUNT_HERE,
    "-np": _COUNT_HERE,
    "--np": _COUNT_HERE,
    "--num-processes": _COUNT_HERE,
    "--num-proc": _COUNT_HERE,
    "--num-procs": _COUNT_HERE,
    "--n-procs": _COUNT_HERE,
    "--nprocs": _COUNT_HERE,
    "--nproc": _COUNT_HERE,
    "--procs": _COUNT_HERE,
    "--processes": _COUNT_HERE,
    "--workers": _COUNT_HERE,
    "--num-workers": _COUNT_HERE,
    "--ranks": _COUNT_HERE + "; --show 0,3 picks ranks to show",
    "--world-size": _COUNT_HERE,
    "--gpus": "write -p gpu for one rank on each GPU, or -p {0}",
    "--ngpus": "write -p gpu for one rank on each GPU, or -p {0}",
    "--num-machines": "write -N {0} for instances",
    "--num-nodes": "write -N {0} for instances",
    "--nodes": "write -N {0} for instances",
    "-i": "write -t for the instance type or -N for the number of instances",
    "--targets": "every rank runs the cell: write --show 0,3 to see some, or test RANK in the cell",
    "--target": "every rank runs the cell: write --show 0,3 to see some, or test RANK in the cell",
    "--rank": "every rank runs the cell: write --show 0 to see one, or test RANK in the cell",
    "--noblock": _NO_BLOCK,
    "--no-block": _NO_BLOCK,
    "--block": _NO_BLOCK,
    "--async": _NO_BLOCK,
    "--local": "the line's cell runs on the ranks alone: write -b local to run them on this machine",
    "-x": _ENV,
    "--launcher": "write --protocol torchrun or --protocol mpirun",
    "--mpi": "write --protocol mpirun",
    "--torchrun": "write --protocol torchrun",
    "--mpirun": "write --protocol mpirun",
    "--dist-backend": "write --init-process-group nccl or gloo, or call init_process_group in the cell",
    "--master-addr": _CHOSEN,
    "--master-port": _CHOSEN,
    "--rdzv-backend": _CHOSEN,
    "--rdzv-endpoint": _CHOSEN,
    "--standalone": _CHOSEN,
    "--node-rank": "each instance gets its own node rank: leave it out",
    "--host": "hosts are chosen by the backend: write -N for the number of instances",
    "--hostfile": "hosts are chosen by the backend: write -N for the number of instances",
    "--max-restarts": "a failed rank fails the cell: run it again",
    "--map-by": "placement is chosen by jupyter_ddp: leave it out",
    "--bind-to": "placement is chosen by jupyter_ddp: leave it out",
    "--oversubscribe": "local runs may always have more ranks than cores: leave it out",
    "--allow-run-as-root": "it is set where it is needed: leave it out",
    "--no-python": "the cell is Python; !command runs a program on every rank: leave it out",
    "-m": "write %run -m module in the cell",
    "--role": "it is an option of SageMaker: put it into sagemaker_options",
    "--image-uri": "it is an option of SageMaker: put it into sagemaker_options",
    "--region": "it is an option of SageMaker: put it into sagemaker_options",
    "--volume-size": "it is an option of SageMaker: put it into sagemaker_options",
}
"""What other tools call it; ``{0}`` is the number that was given, or N."""


def answer(name: str, value: str | None = None) -> str:
    """Return one sentence about a flag that is not one of ours: what to write instead, or the nearest flag."""
    spelling = name if not name.startswith("--") else name.replace("_", "-")
    near = None if spelling in FOREIGN or _is_field(spelling) else nearest_flag(spelling)
    known = near if near in FOREIGN else spelling
    if known in FOREIGN:
        number = value if value is not None and value.isdecimal() else "N"
        text = FOREIGN[known].format(number)
        return text + "." if text.startswith(name) else f"{name} is not a flag here: {text}."
    field = spelling.lstrip("-").replace("-", "_")
    if _is_field(spelling):
        how = f"%distributed config {field}=… sets it, and so does a LaunchConfig given by --config"
        return f"{name} is a field without a flag: {how}."
    tail = f"did you mean {near}?" if near else "%%distributed? shows the flags."
    return f"{name} is not a flag of %%distributed: {tail}"


def _is_field(spelling: str) -> bool:
    return spelling.lstrip("-").replace("-", "_") in FIELD_ONLY


def nearest_flag(name: str) -> str | None:
    """Return the flag, ours or one of `FOREIGN`, whose spelling is nearest, or None when none is near."""
    if name.startswith("--"):
        known = [*BY_NAME, *(flag for flag in FOREIGN if flag.startswith("--"))]
        begun = [flag for flag in known if flag.startswith(name)]
        near = begun[:1] or difflib.get_close_matches(name, known, 1, 0.6)
        return near[0] if near else None
    if len(name) > 2 and "-" + name in BY_NAME:  # -protocol
        return "-" + name
    letter = name[:2].swapcase()  # -P, -B
    return letter if letter in BY_NAME else None
