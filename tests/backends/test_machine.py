"""What a machine has, without importing torch or touching CUDA."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_ddp.backends import _machine

NFS = """\
/dev/root / ext4 rw 0 0
proc /proc proc rw 0 0
server:/home /home nfs4 rw,vers=4.2 0 0
tmpfs /home/me/scratch tmpfs rw 0 0
server:/b /mnt/with\\040space nfs rw 0 0
systemd-1 /data autofs rw 0 0
server:/data /data nfs4 rw 0 0
"""


@pytest.fixture(autouse=True)
def _forget():
    """What a machine has does not change; in these tests it does."""
    caches = (_machine._gpus_present, _machine.neuron_cores, _machine._version_text, _machine._changes)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A directory that is all of PATH, and a function that puts programs there."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))

    def add(name: str, script: str, where: Path = directory) -> Path:
        where.mkdir(exist_ok=True)
        path = where / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return add


# accelerators

FOUR = 'for n in 0 1 2 3; do echo "GPU $n: NVIDIA H200 (UUID: GPU-$n)"; done'


@pytest.mark.parametrize(
    ("chosen", "visible"),
    [
        (None, ["0", "1", "2", "3"]),
        ("0,1,2,3", ["0", "1", "2", "3"]),
        (" 2 , 0", ["2", "0"]),
        ("GPU-2,GPU-0", ["GPU-2", "GPU-0"]),
        ("MIG-abc", ["MIG-abc"]),
        ("", []),
        ("-1", []),
        ("0,-1,2", ["0"]),  # CUDA stops at the first that is not there
        ("1,7,2", ["1"]),
        ("NoDevFiles", []),
        ("none", []),
        ("0,", ["0"]),
    ],
)
def test_the_gpus_that_cuda_visible_devices_leaves(programs, monkeypatch, chosen, visible):
    programs("nvidia-smi", FOUR)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert _machine.visible_gpus() == visible


@pytest.mark.parametrize(
    "script",
    ["echo NVIDIA-SMI has failed because it could not talk to the driver; exit 9", "echo No devices found"],
)
def test_a_driver_that_does_not_answer_has_no_gpus(programs, monkeypatch, script):
    programs("nvidia-smi", script)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert _machine.visible_gpus() == []


def test_mig_slices_are_not_counted_as_gpus(programs):
    programs(
        "nvidia-smi", "echo 'GPU 0: NVIDIA A100 (UUID: GPU-1)'; echo '  MIG 1g.5gb Device 0: (UUID: MIG-2)'"
    )
    assert _machine._gpus_present() == 1


@pytest.mark.parametrize(
    ("script", "cores"),
    [
        ("""echo '[{"neuron_device": 0, "nc_count": 2}, {"neuron_device": 1, "nc_count": 2}]'""", 4),
        ("echo '[]'", 0),
        ("echo 'no devices' >&2; exit 1", 0),
        ("""echo '{"nc_count": 2}'""", 0),
        ("""echo '[{"other": 2}]'""", 0),
        (None, 0),
    ],
)
def test_neuron_cores(programs, script, cores):
    if script:
        programs("neuron-ls", script)
    assert _machine.neuron_cores() == cores


def test_a_program_that_prints_no_text_or_does_not_start(programs):
    path = programs("odd", r"printf 'a\377b'")
    assert _machine._output(str(path)) == "a\ufffdb"
    path.write_text("#!/no/such/interpreter\n")
    assert _machine._output(str(path)) == ""
    assert _machine._output("no-such-program-at-all") == ""


def test_the_programs_asked_do_not_take_themselves_for_ranks(programs, monkeypatch):
    """B35."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("RANK", "0")
    path = programs("show", 'echo "[$RANK$OMPI_COMM_WORLD_RANK]"')
    assert _machine._output(str(path)) == "[]\n"


def test_cores_are_those_that_this_process_may_use():
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\nfrom jupyter_ddp.backends._machine import cpu_cores; print(cpu_cores())"
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("needs Linux")
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "1\n"
    )
    assert _machine.cpu_cores() >= 1


def test_looking_imports_nothing_heavy():
    code = """
import sys
from jupyter_ddp.backends import _machine as m
m.visible_gpus(), m.neuron_cores(), m.torch_version(), m.find_mpirun()
print({"torch", "numpy"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_version_of_torch():
    """It is what torch says of itself; reading that file takes no import."""
    spec = importlib.util.find_spec("torch")
    if spec is None:
        pytest.skip("there is no torch")
    said: dict[str, str] = {}
    exec(Path(spec.origin).with_name("version.py").read_text(), said)
    assert _machine.torch_version() == said["__version__"]


def test_no_torch(monkeypatch):
    monkeypatch.setattr(_machine.importlib.util, "find_spec", lambda _name: None)
    assert _machine.torch_version() is None


# mpirun


def test_there_may_be_no_mpirun(programs):
    assert _machine.find_mpirun() is None


def test_an_mpirun_beside_python_comes_before_one_on_path(programs, tmp_path):
    on_path = programs("mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    assert _machine.find_mpirun() == (str(on_path), "openmpi4", "mpirun (Open MPI) 4.1.4")
    beside = programs(
        "mpirun", "echo 'mpirun (Open MPI) 5.0.8'; echo; echo 'Report bugs'", tmp_path / "elsewhere"
    )
    assert _machine.find_mpirun() == (str(beside), "openmpi5", "mpirun (Open MPI) 5.0.8")


def test_an_mpirun_that_was_exchanged_is_asked_again(programs):
    path = programs("mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    assert _machine.find_mpirun()[1] == "openmpi4"
    path = programs("mpirun", "echo 'HYDRA build details:'; echo '    Version:      4.0.2'")
    os.utime(path, ns=(1, 1))
    assert _machine.find_mpirun() == (str(path), "mpich", "HYDRA build details: Version: 4.0.2")


@pytest.mark.parametrize("script", ["exit 1", "echo 'Intel(R) MPI Library for Linux* OS, Version 2021.10'"])
def test_an_mpirun_that_is_not_supported(programs, script):
    programs("mpirun", script)
    assert _machine.find_mpirun()[1] is None


def test_what_an_mpirun_gives_its_ranks_that_they_read_early(programs):
    """Only what matters to an import, only what differs from what it is given, the number of ranks as it will be."""
    env = "LD_LIBRARY_PATH=/mpi/lib\\0OMP_NUM_THREADS=1\\0OMPI_COMM_WORLD_LOCAL_SIZE=1\\0OMPI_UNIVERSE_SIZE=1\\0"
    programs("mpirun", f"""test "$1" = --version && echo 'mpirun (Open MPI) 5.0.8' || printf '{env}'""")
    given = {"OMP_NUM_THREADS": "1", "RANK": "3"}
    found = {"LD_LIBRARY_PATH": "/mpi/lib", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert _machine.early_environment(given, 4) == found
    assert _machine.early_environment({}, 1) == {
        **found,
        "OMP_NUM_THREADS": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    }


@pytest.mark.parametrize("script", ["exit 1", "echo 'mpirun (Open MPI) 5.0.8'; exit 1"])
def test_an_mpirun_that_does_not_tell_what_it_gives(programs, script):
    programs("mpirun", script)
    assert _machine.early_environment({}, 2) == {}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("path", "flavour", "text"),
    [
        ("/usr/bin/mpirun.openmpi", "openmpi4", "4."),
        ("/usr/bin/mpirun.mpich", "mpich", "HYDRA build details: Version: "),
        (str(Path(sys.executable).parent / "mpirun"), "openmpi5", "mpirun (Open MPI) 5."),
    ],
)
def test_the_mpiruns_that_are_installed(tmp_path, monkeypatch, path, flavour, text):
    if shutil.which(path) is None:
        pytest.skip(f"there is no {path}")
    (tmp_path / "mpirun").write_text(f'#!/bin/sh\nexec {path} "$@"\n')
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = _machine.find_mpirun()
    assert found[:2] == (str(tmp_path / "mpirun"), flavour)
    assert text in found[2]


# file systems


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/var/x", "ext4"),
        ("/homes/x", "ext4"),
        ("/home", "nfs4"),
        ("/home/me/runs", "nfs4"),
        ("/home/me/scratch/runs", "tmpfs"),
        ("/mnt/with space/runs", "nfs"),
        ("/data/x", "nfs4"),  # mounted over another
    ],
)
def test_the_file_system_of_a_path(path, kind):
    assert _machine._file_system(Path(path), NFS) == kind


def test_a_link_is_followed_to_the_file_system_where_it_leads(tmp_path):
    if not Path("/proc/mounts").exists():
        pytest.skip("needs Linux")
    assert not _machine.is_network_file_system(tmp_path / "not" / "there" / "yet")
    (tmp_path / "link").symlink_to("/proc")
    kind = _machine._file_system((tmp_path / "link" / "x").resolve(), Path("/proc/mounts").read_text())
    assert kind == "proc"


def test_the_device_nodes_of_gpus(tmp_path):
    for name in ("nvidia0", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia0x", "null"):
        (tmp_path / name).touch()
    assert _machine.gpu_nodes(str(tmp_path)) == [str(tmp_path / "nvidia0"), str(tmp_path / "nvidia10")]
    assert _machine.gpu_nodes(str(tmp_path / "nowhere")) == []
