"""The rules of conftest.py hold: they are what makes a green run in CI mean something."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SKIPS = {
    "test_body.py": "import pytest\ndef test_it(): pytest.skip('no mpirun here')",
    "test_module.py": "import pytest\npytest.skip('no browser here', allow_module_level=True)",
    "test_mark.py": "import pytest\n@pytest.mark.skipif(True, reason='no torch here')\ndef test_it(): pass",
}
FINE = {
    "test_gpu.py": "import pytest\n@pytest.mark.skipif(True, reason='needs a GPU here')\ndef test_it(): pass",
    "test_xfail.py": "import pytest\n@pytest.mark.xfail(reason='known')\ndef test_it(): assert False",
    "test_pass.py": "def test_it(): pass",
}
LEAVES = {
    "test_leaves.py": (
        "import os, subprocess\n"
        "def test_it():\n"
        "    subprocess.Popen(['sleep', '15'], env=os.environ | {'JUPYTER_DDP_RUN': '0'}, start_new_session=True)"
    )
}


def run(directory: Path, suite: dict[str, str], *, ci: bool) -> subprocess.CompletedProcess[str]:
    shutil.copy(Path(__file__).with_name("conftest.py"), directory)
    for name, text in suite.items():
        (directory / name).write_text(text)
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--continue-on-collection-errors",
            f"--rootdir={directory}",
            directory,
        ],
        env=environment | ({"CI": "true"} if ci else {}),
        capture_output=True,
        text=True,
    )


def test_a_skip_fails_in_ci(tmp_path):
    done = run(tmp_path, SKIPS, ci=True)
    assert done.returncode != 0
    for reason in ("no mpirun here", "no browser here", "no torch here"):
        assert f"skipped in CI, which has to run it: Skipped: {reason}" in done.stdout


def test_a_skip_elsewhere_is_a_skip(tmp_path):
    assert "3 skipped" in run(tmp_path, SKIPS, ci=False).stdout


def test_what_ci_cannot_have_may_be_skipped(tmp_path):
    done = run(tmp_path, FINE, ci=True)
    assert done.returncode == 0
    assert "1 passed, 1 skipped, 1 xfailed" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_of_a_run_that_is_left_fails_the_module(tmp_path):
    done = run(tmp_path, LEAVES, ci=False)
    assert done.returncode != 0
    assert "processes of runs are left" in done.stdout
    assert "sleep 15" in done.stdout
