"""Run a notebook without a browser, and print its cells and their outputs as they come.

    python notebooks/show.py notebooks/01_first_steps.ipynb [where/to/save.ipynb]

Ends with an error, as `jupyter nbconvert --execute` does, when a cell fails that is not tagged `raises-exception`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

RULE = "─" * 80


def text_of(output: dict[str, Any]) -> str:
    """Return an output as a terminal shows it."""
    if output["output_type"] == "stream":
        text = output["text"]
    elif output["output_type"] == "error":
        text = "\n".join(output["traceback"])
    else:
        text = output["data"].get("text/plain", "")
    return text.rstrip("\n")


def show(cell: dict[str, Any], **_: Any) -> None:  # noqa: ANN401 - nbclient's hook: the cell's number, and its reply
    """Print a cell that has been executed."""
    shown = f"{RULE}\n{cell['source']}\n\n"
    for text in map(text_of, cell["outputs"]):
        if text and text not in shown:  # a run's output and its error tell the same failure
            shown += f"{text}\n\n"
    print(shown, end="", flush=True)


def main(source: str, target: str | None = None) -> int:
    """Execute the notebook `source`, and save it with its outputs as `target`. Returns an exit code."""
    notebook = nbformat.read(source, as_version=4)
    print(f"Running {source} on real ranks, without a browser.\n", flush=True)
    client = NotebookClient(
        notebook,
        timeout=600,
        extra_arguments=[
            "--log-level=ERROR"
        ],  # no warning that the kernel listens on this machine, as always
        on_cell_executed=show,
        resources={"metadata": {"path": str(Path(source).parent)}},
    )
    try:
        client.execute()
    except CellExecutionError as error:
        print(error, file=sys.stderr)
        return 1
    if target is not None:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, target)
        print(f"{RULE}\nSaved with its outputs: {target}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
