"""What is compared: how each starts its ranks and runs a cell on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from benchmarks.driver import Kernel, environment, sweep
from benchmarks.peers import PYTHON as PEERS_PYTHON
from benchmarks.peers import version

KERNEL = ["-m", "ipykernel_launcher", "-f", "{connection_file}"]


class System(ABC):
    """Ranks behind a notebook. ``start`` makes a kernel and, where they are resident, the ranks."""

    name: ClassVar[str]
    resident: ClassVar[bool] = True
    torch_ready: ClassVar[bool] = False  # ranks start inside a process group

    def __init__(self, ranks: int = 2) -> None:
        self.ranks = ranks
        self.kernel: Kernel

    @classmethod
    def available(cls) -> str | None:
        """Return why it cannot be measured, None when it can."""
        return None

    @abstractmethod
    def open(self) -> None:
        """Start the kernel."""

    def start_code(self) -> str:
        """Return the cell that starts resident ranks."""
        return ""

    def after_start(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Prepare the ranks for cells that need ``RANK``."""

    @abstractmethod
    def cell(self, code: str) -> str:
        """Return the cell that runs `code` on all ranks."""

    def start(self) -> System:
        """Start the kernel and the ranks."""
        self.open()
        try:
            if code := self.start_code():
                self.kernel.run(code, limit=90)
            self.after_start()
        except Exception:
            self.kernel.close()
            raise
        return self

    def close(self) -> None:
        """End everything."""
        self.kernel.close()


class Ours(System):
    """jupyter_ddp with torchrun, its default."""

    name = "jupyter_ddp"
    resident = False
    protocol = "torchrun"

    def open(self) -> None:
        self.kernel = Kernel([sys.executable, *KERNEL], {})
        self.kernel.run("%load_ext jupyter_ddp")

    def cell(self, code: str) -> str:
        return f"%%distributed -p {self.ranks} --protocol {self.protocol}\n{code}"

    def runs(self) -> list[Path]:
        """Return the directories of the runs, the oldest first."""
        root = self.kernel.directory / "xdg_state_home" / "jupyter_ddp" / "runs"
        return sorted(
            (path.parent for path in root.glob("*/run.json")), key=lambda path: path.stat().st_mtime
        )


class OursMpi(Ours):
    """jupyter_ddp with mpirun."""

    name = "jupyter_ddp (mpirun)"
    protocol = "mpirun"


class Peer(System):
    """A package in the peers' environment."""

    package: ClassVar[str]

    @classmethod
    def available(cls) -> str | None:
        return None if version(cls.package) else "could not be installed"

    def open(self) -> None:
        self.kernel = Kernel([str(PEERS_PYTHON), *KERNEL], {})


class IPyParallel(Peer):
    """Engines of a local cluster, ``%%px``."""

    name = "ipyparallel"
    package = "ipyparallel"

    def start_code(self) -> str:
        return (
            "import ipyparallel as ipp, os\n"
            f"cluster = ipp.Cluster(n={self.ranks}, ipython_dir=os.environ['IPYTHONDIR'])\n"
            "rc = cluster.start_and_connect_sync()\nview = rc[:]\nview.block = True"
        )

    def after_start(self) -> None:
        self.kernel.run(
            "for i in rc.ids: rc[i].execute(f'import os; os.environ[\"RANK\"] = str({i})', block=True)"
        )

    def cell(self, code: str) -> str:
        return f"%%px\n{code}"


class JupyterDistributed(Peer):
    """A proxy kernel that runs every cell in several kernels; its page subscribes to live patches."""

    name = "jupyter-distributed"
    package = "jupyter-distributed"

    def open(self) -> None:
        proxy = [str(PEERS_PYTHON), "-m", "jupyter_distributed.kernel", "-f", "{connection_file}"]
        ranks = {
            "JUPYTER_DISTRIBUTED_WORLD_SIZE": str(self.ranks),
            "JUPYTER_DISTRIBUTED_BASE_KERNEL": "python3",
        }
        self.kernel = Kernel(proxy, ranks, interrupts="message")
        content = {"comm_id": uuid.uuid4().hex, "target_name": "jupyter.distributed.rank_updates", "data": {}}
        client = self.kernel.client
        client.shell_channel.send(client.session.msg("comm_open", content))

    def start_code(self) -> str:
        return "pass"

    def cell(self, code: str) -> str:
        return code


class NbDistributed(Peer):
    """Workers inside a torch process group. They listen on every interface; here on loopback only."""

    name = "nbdistributed"
    package = "nbdistributed"
    torch_ready = True

    def start_code(self) -> str:
        return (
            "import zmq\n_bind = zmq.Socket.bind\n"
            "zmq.Socket.bind = lambda s, a: _bind(s, a.replace('//*', '//127.0.0.1'))\n"
            f"%load_ext nbdistributed\n%dist_init -n {self.ranks} -a 127.0.0.1\n"
            # What is sent before its workers have connected is lost, and the cell waits for 30 s: wait for them.
            "_magic = get_ipython().magics_manager.registry['DistributedMagic']\n"
            "for _ in range(60):\n"
            "    try: _magic._comm_manager.send_to_all('get_status', {}, timeout=0.5); break\n"
            "    except TimeoutError: pass\n"
        )

    def cell(self, code: str) -> str:
        return f"%%distributed\n{code}"


class Bare(ABC):
    """A launcher alone, on a script."""

    name: ClassVar[str]

    def __init__(self, ranks: int = 2) -> None:
        self.ranks = ranks
        self.token = uuid.uuid4().hex
        self.directory = Path(tempfile.mkdtemp(prefix="ddp-bench-"))
        self.env = environment(self.directory, self.token, [Path(sys.executable).parent])
        self.process: subprocess.Popen[bytes] | None = None

    @classmethod
    def available(cls) -> str | None:
        """Return why it cannot be measured, None when it can."""
        return (
            None
            if shutil.which(cls.name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
            else "not here"
        )

    @abstractmethod
    def command(self) -> list[str]:
        """Return the command line without the script."""

    def run(self, code: str) -> subprocess.Popen[bytes]:
        """Start the launcher on a script with this code."""
        script = self.directory / "script.py"
        script.write_text(code, encoding="utf-8")
        log = (self.directory / "stderr").open("wb")
        self.process = subprocess.Popen(
            [*self.command(), str(script)],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=self.directory,
        )
        return self.process

    def close(self) -> None:
        """End everything."""
        sweep(self.token, [])
        if self.process is not None:
            self.process.wait()
            self.process.stdout.close()  # type: ignore[union-attr]
        shutil.rmtree(self.directory, ignore_errors=True)


class Torchrun(Bare):
    """``torchrun --standalone``."""

    name = "torchrun"

    def command(self) -> list[str]:
        return [
            str(Path(sys.executable).with_name("torchrun")),
            "--standalone",
            "--nproc-per-node",
            str(self.ranks),
        ]


class Mpirun(Bare):
    """``mpirun`` as it is found first beside this Python, else on PATH."""

    name = "mpirun"

    def command(self) -> list[str]:
        mpirun = shutil.which("mpirun", path=self.env["PATH"]) or "mpirun"
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [mpirun, *root, "--oversubscribe", "-np", str(self.ranks), sys.executable, "-u"]


NOTEBOOKS: list[type[System]] = [Ours, OursMpi, IPyParallel, JupyterDistributed, NbDistributed]
PEERS: list[type[Peer]] = [IPyParallel, JupyterDistributed, NbDistributed]
