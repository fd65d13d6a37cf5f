"""Runs on a disk that is full, or too small for what they print, or whose directory is taken away."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from jupyter_ddp.events import NoteEvent
from jupyter_ddp.run import Run
from jupyter_ddp.transcript import read_all

FULL = "the disk is full: what ranks print is not kept until there is room again"

TRAIN = """
import os, sys, time
for step in range(400):
    print(step, "x" * 20_000)
    print("warn", "y" * 100, file=sys.stderr)
print("trained", flush=True)
%s
"""


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MiB, on which runs are recorded."""
    if os.geteuid() != 0:
        pytest.skip("needs root: it mounts a file system")
    directory = tmp_path / "runs"
    directory.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m,mode=700", "none", directory], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"needs root that may mount: {done.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "--lazy", directory], check=True)


def test_a_full_disk_ends_neither_the_training_nor_its_record(start, small_disk, protocol):
    run = start(TRAIN % "", protocol=protocol)
    assert run.end().outcome == "succeeded", run.errors()
    assert [event.text for event in run.of(NoteEvent)].count(FULL) == 1
    assert any(run.text(rank).startswith("0 xxx") for rank in range(2))
    assert [event.seq for event in run.events if event.seq] == list(
        range(1, len([e for e in run.events if e.seq]) + 1)
    )
    assert not (run.rundir.path / "reserve-0").exists()


def test_an_error_on_a_full_disk_is_told(start, small_disk, protocol):
    run = start(TRAIN % "raise ValueError('the cause')", protocol=protocol)
    assert run.end().outcome == "failed"
    assert {error.message for error in run.errors().values()} == {"the cause"}
    assert "raise ValueError" in run.errors()[0].traceback


C_CODE = """
import ctypes, subprocess
libc = ctypes.CDLL(None)
for _ in range(60):
    libc.puts(b"c" * 100_000)
    subprocess.run(["printf", "%0100000d", "1"], stderr=subprocess.DEVNULL)
libc.fflush(None)
print("over")
"""


def test_text_that_c_code_and_programs_write_to_a_full_disk_ends_nothing(start, small_disk, protocol):
    run = start(C_CODE, protocol=protocol)
    assert run.end().outcome == "succeeded", run.errors()
    assert FULL in run.notes()


LOUD = """
import sys
line = ("%07d " + "z" * 91 + "\\n")
sys.stdout.write("begin\\n")
for block in range(120):
    sys.stdout.write("".join(line % number for number in range(block * 1000, block * 1000 + 1000)))
print("the end")
"""


def test_a_run_keeps_the_beginning_and_the_end_of_what_is_too_much(start, protocol):
    run = start(LOUD, protocol=protocol, run_bytes=6_000_000)
    assert run.end().outcome == "succeeded", run.errors()
    (note,) = [event.text for event in run.of(NoteEvent)]
    assert note.startswith(
        "ranks have printed more than 6.0 MB, which c.DistributedMagics.run_bytes allows: "
    )
    files = [run.rundir.path / f"rank{rank}.stdout" for rank in range(2)]
    assert [file.stat().st_size for file in files] == [12_000_000 + 14] * 2
    assert sum(file.stat().st_blocks * 512 for file in files) < 7_000_000
    for rank in range(2):
        lines = [line.text for line in read_all(run.rundir, rank=rank)]
        assert lines[:2] == ["begin", "0000000 " + "z" * 91]
        assert lines[-2:] == ["0119999 " + "z" * 91, "the end"]
        assert [text for text in lines if "were not kept" in text] != []


WAITING = """
import time
print("here", flush=True)
time.sleep(1.5)
print("still", flush=True)
"""


@pytest.mark.parametrize("fate", ["removed", "renamed"])
def test_a_run_directory_that_is_taken_away(start, protocol, fate, tmp_path):
    driven = start(WAITING, protocol=protocol)
    driven.until_said("here")
    run = Run(driven.rundir, driven.job)
    if fate == "removed":
        shutil.rmtree(driven.rundir.path)
    else:
        driven.rundir.path.rename(tmp_path / "elsewhere")
    result = run.result(timeout=30)
    assert result.outcome == "lost"
    assert f"the run directory {driven.rundir.path} was removed" in result.message
    assert driven.processes() == []
