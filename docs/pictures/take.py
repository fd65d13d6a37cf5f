# ruff: noqa: INP001 - a script, not a package
"""Takes README's pictures: runs cells in a real JupyterLab with a headless Chromium and cuts each out with its output.

    .venv/bin/python docs/pictures/take.py [chromium]

Look at what came out before you commit it.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
from PIL import Image
from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
SETUP = """\
%load_ext jupyter_ddp
import torch

target = torch.arange(1.0, 7.0)
batches = [[1, 2], [3, 4], [5, 6]]"""
CELL = """\
%%distributed -p 4 --pull losses@all
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from tqdm import tqdm

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
weight, losses = torch.zeros(6), []
for step in tqdm(range(250), desc=f"rank {rank}", ncols=70):
    rows = torch.randn(64, 6)
    error = rows @ (weight - target)  # target is a variable of the notebook
    gradient = rows.T @ error / len(rows)
    dist.all_reduce(gradient)
    weight -= 0.005 * gradient
    losses.append(error.square().mean().item())
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
if rank == 2:
    plt.figure(figsize=(4.4, 1.6))
    plt.semilogy(losses)
    plt.title("loss on rank 2")
    plt.show()
dist.destroy_process_group()
weight.round(decimals=1)"""
FAILURE = """\
%%distributed -p 4
import os
import time

rank = int(os.environ["RANK"])
batch = batches[rank]
print("my batch:", batch)
time.sleep(600)  # the others would go on"""
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
PICTURES = {"cell": 1, "failure": 2}
"""The picture's name, and the number of its cell."""
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


@contextlib.contextmanager
def lab(root: Path) -> Iterator[str]:
    """Serve a JupyterLab with settings of its own; yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {f"JUPYTER_{kind}_DIR": str(root / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    own |= {"IPYTHONDIR": str(root / "ipython"), "XDG_STATE_HOME": str(root / "state")}
    own["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"]
    command += [
        "--IdentityProvider.token=",
        f"--ServerApp.root_dir={root}",
        "--LabApp.expose_app_in_browser=True",
    ]
    server = subprocess.Popen(command, env=os.environ | own, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/api")  # noqa: S310 - our own
                break
            time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        server.wait()


def take(address: str, browser: str) -> dict[str, bytes]:
    """Run the notebook and return its pictures as PNG."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=OPTIONS)
        page = chromium.new_page(viewport={"width": 860, "height": 2400}, device_scale_factor=1.4)
        page.goto(f"{address}/lab/tree/pictures.ipynb")
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        page.evaluate("jupyterapp.commands.execute('application:toggle-left-area')")
        time.sleep(3)  # for the kernel
        page.evaluate(
            "jupyterapp.commands.execute('notebook:run-all-cells')"
        )  # returns when a cell has failed
        cells = page.query_selector_all(".jp-Notebook .jp-Cell")
        cells[0].click()  # so that the others have no cursor and no buttons
        page.mouse.move(5, 5)
        time.sleep(2)
        pictures = {name: cells[number].screenshot() for name, number in PICTURES.items()}
        chromium.close()
    return pictures


def main(browser: str) -> None:
    """Take all pictures and store them beside this file, in few colours."""
    root = Path(tempfile.mkdtemp(prefix="lab-"))
    try:
        cells = [nbformat.v4.new_code_cell(source) for source in (SETUP, CELL, FAILURE)]
        notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})
        nbformat.write(notebook, root / "pictures.ipynb")
        with lab(root) as address:
            pictures = take(address, browser)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for name, png in pictures.items():
        image = Image.open(io.BytesIO(png)).convert("RGB").quantize(255, dither=Image.Dither.NONE)
        image.save(HERE / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:] or [shutil.which("chromium") or "chromium"])
