"""The notebooks run on real ranks, without a browser; and what runs notebooks in CI sees a failed rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytestmark = [pytest.mark.kernel, pytest.mark.slow, pytest.mark.timeout(400)]

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
RUN = "application/vnd.jupyter-ddp.run+json"


def python(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a module of this environment as a user's shell does, its commands first on PATH."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def texts(notebook: nbformat.NotebookNode, *, of_runs: bool) -> list[str]:
    """Return the plain text of all outputs; of the runs' alone, or of the others'."""
    return [
        output.get("data", {}).get("text/plain") or output.get("text", "")
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if (RUN in output.get("data", {})) is of_runs
    ]


def runs(notebook: nbformat.NotebookNode) -> list[str]:
    return texts(notebook, of_runs=True)


def words(notebook: nbformat.NotebookNode) -> str:
    return "\n".join(texts(notebook, of_runs=False))


def execute(path: Path, target: Path) -> nbformat.NotebookNode:
    """Execute a notebook as `make demo` does."""
    done = python(NOTEBOOKS / "show.py", path, target, cwd=target.parent)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return nbformat.read(target, as_version=4)


def notebook_of(path: Path, *sources: str, parameters: int | None = None) -> Path:
    """Write a notebook of these cells, one of them perhaps tagged for papermill."""
    cells = [new_code_cell(source) for source in sources]
    if parameters is not None:
        cells[parameters]["metadata"]["tags"] = ["parameters"]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=cells, metadata=metadata), path)
    return path


def test_first_steps(tmp_path):
    notebook = execute(NOTEBOOKS / "01_first_steps.ipynb", tmp_path / "out.ipynb")

    hello, shares, failed, total = runs(notebook)
    assert "[0] hello from rank 0 of 2" in hello
    assert "[1] hello from rank 1 of 2" in hello
    assert "[1] 10" in hello
    assert "[0] 4 rows, loss " in shares
    assert "[1] 4 rows, loss " in shares
    assert "rank 1 failed: KeyError: 1" in failed
    assert "[0] rank 0 sees the sum 3" in total
    assert "[1] rank 1 sees the sum 3" in total
    assert "rank 1: KeyError in line 8 of the cell" in words(notebook)


def test_train_ddp(tmp_path):
    notebook = execute(NOTEBOOKS / "02_train_ddp.ipynb", tmp_path / "out.ipynb")

    training, resumed = runs(notebook)
    assert "[0] epoch 1: loss " in training
    assert "[1] epoch 8: loss " in training
    assert "epoch 8" not in resumed
    assert "[1] epoch 9: loss " in resumed
    pictures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if RUN in output.get("data", {})
    ]
    assert "image/png" in json.dumps(pictures[0].data)

    said = words(notebook)
    accuracy = float(said.partition("the model that came back: ")[2][:5])
    assert accuracy > 0.9
    assert f"the ranks counted {accuracy:.3f}" in said
    assert "rank 1: " in said


def test_parameters_of_papermill_reach_the_magic_line(tmp_path):
    path = notebook_of(
        tmp_path / "plain.ipynb",
        "%load_ext jupyter_ddp",
        "nproc = 2\nprotocol = 'torchrun'",
        "%%distributed -p {nproc} --protocol $protocol\nimport os\nprint('rank', os.environ['RANK'], word)",
        parameters=1,
    )
    target = tmp_path / "out.ipynb"
    pairs = ("-p", "nproc", "3", "-p", "protocol", "mpirun", "-p", "word", "sent")
    done = python("-m", "papermill", path, target, *pairs, "--no-progress-bar", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    [text] = runs(nbformat.read(target, as_version=4))
    assert "mpirun" in text.splitlines()[0]
    assert "[0] rank 0 sent" in text
    assert "[2] rank 2 sent" in text


@pytest.mark.parametrize("program", ["nbconvert", "papermill"])
def test_a_failed_rank_stops_what_runs_the_notebook(tmp_path, program):
    """B77: the exit code says that the notebook failed, and its output who and why."""
    path = notebook_of(
        tmp_path / "fails.ipynb",
        "%load_ext jupyter_ddp",
        "%%distributed -p 2\nimport os\nassert os.environ['RANK'] == '0', 'not for me'",
        "print('went', 'on')",
    )
    done = {
        "nbconvert": lambda: python(
            "-m", "nbconvert", "--execute", "--to", "notebook", "--stdout", path, cwd=tmp_path
        ),
        "papermill": lambda: python("-m", "papermill", path, "-", "--no-progress-bar", cwd=tmp_path),
    }[program]()

    assert done.returncode != 0
    assert "rank 1 failed: AssertionError: not for me" in done.stderr
    assert "went on" not in done.stdout


def test_show_prints_each_rank_and_fails_with_the_notebook(tmp_path):
    path = notebook_of(
        tmp_path / "short.ipynb",
        "%load_ext jupyter_ddp",
        "%%distributed -p 2 --protocol mpirun\nimport os\nprint('here is', os.environ['RANK'])",
        "%%distributed -p 2 --protocol mpirun\nimport os\n1 / int(os.environ['RANK'])",
    )
    done = python(NOTEBOOKS / "show.py", path, cwd=tmp_path)

    assert done.returncode == 1
    assert "[0] here is 0\n" in done.stdout
    assert "[1] here is 1\n" in done.stdout
    assert "rank 0 failed: ZeroDivisionError: division by zero" in done.stderr
