"""What all tests share: a home of their own, no launcher's variables, nothing left behind, no silent skips in CI."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from jupyter_ddp.launchers import is_launcher_variable
from tests.book import Book
from tests.notebook import Notebook

ALLOWED_SKIPS = ("needs a GPU", "needs macOS", "needs AWS", "needs root")
"""How the reason of a skip begins that CI accepts: what no machine of CI has. Any other skip is a failure there."""

_TOKEN = "DDP_TEST_TOKEN"  # every process that a test starts inherits it, so it can be found
_home = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Give the tests directories of their own: not the user's configuration, kernels or runs."""
    home = Path(tempfile.mkdtemp(prefix="ddp-test-"))
    config.stash[_home] = home
    for name in [name for name in os.environ if is_launcher_variable(name)]:
        del os.environ[name]
    os.environ |= {
        "IPYTHONDIR": str(home / "ipython"),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "MPLCONFIGDIR": str(home / "matplotlib"),
        "XDG_STATE_HOME": str(home / "state"),
        _TOKEN: uuid.uuid4().hex,
    }


def pytest_unconfigure(config: pytest.Config) -> None:
    if home := config.stash.get(_home, None):
        shutil.rmtree(home, ignore_errors=True)


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure in CI, unless its reason is one of `ALLOWED_SKIPS`."""
    if not os.environ.get("CI") or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not reason.removeprefix("Skipped: ").startswith(ALLOWED_SKIPS):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, which has to run it: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    report = yield
    _forbid_skip(report)
    return report


def _left_behind() -> dict[int, str]:
    """Return the processes of runs that tests of this session have started, with their command lines."""
    token = f"{_TOKEN}={os.environ[_TOKEN]}".encode()
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            environment = (directory / "environ").read_bytes().split(b"\0")
            command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # gone meanwhile, or another user's
            continue
        if token in environment and any(entry.startswith(b"JUPYTER_DDP_RUN=") for entry in environment):
            found[int(directory.name)] = command.strip()
    return found


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_behind():
    """Fail a module after which processes of its runs are still there (on Linux; they get a moment to go)."""
    yield
    deadline = time.monotonic() + 5
    while (left := _left_behind()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"processes of runs are left: {left}"


@pytest.fixture
def repository() -> Path:
    """The root of this repository."""
    return Path(__file__).parents[1]


@pytest.fixture(scope="module", params=["mpirun", "torchrun"])
def book(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A notebook whose distributed cells run under one launcher, and then another one under the other."""
    notebook = Notebook(tmp_path_factory.mktemp("state"))
    yield Book(notebook, tmp_path_factory.mktemp("notebook"), request.param)
    notebook.close()
