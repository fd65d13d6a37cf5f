"""What a run's text may take on disk, and how readers see what is missing."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from jupyter_ddp.events import NoteEvent, OutEvent, RunEvent
from jupyter_ddp.rundir import EventReader, RunDirectory
from jupyter_ddp.runtime import record, room
from jupyter_ddp.runtime.record import LogWriter, StreamTail, log_path
from jupyter_ddp.transcript import read_all

MIB = 1 << 20

needs_holes = pytest.mark.skipif(sys.platform != "linux", reason="files have holes on Linux")


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    facts = {"id": "x", "attempt": "a", "created": 1.0, "nnodes": 1, "nproc": 1, "world_size": 1}
    directory.write_json("run.json", facts)
    return directory


def parts(path, start=0, stop=None) -> list[tuple[int, int, bool]]:
    with path.open("rb") as file:
        return list(
            room.spans(file.fileno(), start, os.fstat(file.fileno()).st_size if stop is None else stop)
        )


@needs_holes
def test_the_middle_of_what_is_too_much_is_given_up(tmp_path):
    big, small = tmp_path / "big", tmp_path / "small"
    big.write_bytes(b"x" * (20 * MIB))
    small.write_bytes(b"y" * 1000)
    watch = room.Room(8 * MIB)
    said = watch.make([(big, 20 * MIB), (small, 1000), (tmp_path / "none", 0)])
    assert said == (
        "ranks have printed more than 8.4 MB, which c.DistributedMagics.run_bytes allows: "
        "the middle of their text is not kept"
    )
    assert parts(big) == [(0, MIB, True), (MIB, 18 * MIB, False), (18 * MIB, 20 * MIB, True)]
    assert parts(small) == [(0, 1000, True)]
    assert big.stat().st_size == 20 * MIB
    with big.open("ab") as file:
        file.write(b"z" * (10 * MIB))
    assert watch.make([(big, 30 * MIB), (small, 1000)]) == ""
    assert parts(big)[1] == (MIB, 28 * MIB, False)


@needs_holes
def test_what_has_not_been_read_is_not_touched(tmp_path):
    big = tmp_path / "big"
    big.write_bytes(b"x" * (20 * MIB))
    room.Room(4 * MIB).make([(big, 10 * MIB)])
    assert parts(big) == [(0, MIB, True), (MIB, 8 * MIB, False), (8 * MIB, 20 * MIB, True)]


def test_a_full_disk_makes_it_give_up_more(tmp_path, monkeypatch):
    big = tmp_path / "big"
    big.write_bytes(b"x" * (20 * MIB))
    watch = room.Room(40 * MIB)
    streams = [(big, 20 * MIB)]
    assert watch.squeeze(streams)
    assert parts(big) == [(0, MIB, True), (MIB, 15 * MIB, False), (15 * MIB, 20 * MIB, True)]
    assert watch.make(streams) == ""  # that was not the limit
    while watch.squeeze(streams):
        pass
    assert parts(big)[-1][2]


def test_a_file_system_without_holes_keeps_all(tmp_path, monkeypatch):
    big = tmp_path / "big"
    big.write_bytes(b"x" * (4 * MIB))
    monkeypatch.setattr(room, "_punch", lambda *_: False)
    watch = room.Room(MIB)
    assert watch.make([(big, 4 * MIB)]).endswith("this file system keeps all of it nevertheless")
    assert watch.make([(big, 4 * MIB)]) == ""
    assert parts(big) == [(0, 4 * MIB, True)]


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (5, 5), (0, 3), (2, 3)])
def test_spans_of_a_file_without_holes(tmp_path, start, stop):
    (tmp_path / "f").write_bytes(b"abc")
    assert parts(tmp_path / "f", start, stop) == ([(start, stop, True)] if stop > start else [])


@needs_holes
def test_readers_say_what_is_missing(run):
    line = b"0123456789abcde\n"
    (run.path / "rank0.stdout").write_bytes(line * (20 * MIB // 16))
    log = LogWriter(run.path, 0, "a")
    tail = StreamTail(run.path, 0, "stdout")
    tail.drain(log, tail.size())
    room.Room(8 * MIB).make([(tail.path, tail.offset)])
    with (run.path / "rank0.stdout").open("ab") as file:
        file.write(b"the last\n")
    tail.drain(log, tail.size())
    log.close()
    lines = [line.text for line in read_all(run)]
    assert lines[0] == "0123456789abcde"
    assert lines[-1] == "the last"
    (at,) = [number for number, text in enumerate(lines) if "were not kept" in text]
    assert lines[at] == "… 15.7 MB were not kept"
    assert {len(text) for text in lines[: at - 1] + lines[at + 2 : -1]} == {15}
    text = run.text(0)
    assert "\0" not in text
    assert text.endswith("the last\n")
    told = [event for event in EventReader(run).read() if isinstance(event, OutEvent)]
    assert not any("\0" in (event.text or "") for event in told)


def full_disk(monkeypatch, room_for: list[int]):
    """Let writes of the log fail when they are more than what is left."""
    write = os.write

    def limited(descriptor: int, data: bytes) -> int:
        if room_for[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        size = write(descriptor, data[: room_for[0]])
        room_for[0] -= size
        return size

    monkeypatch.setattr(record.os, "write", limited)


def test_a_full_disk_costs_the_log_no_event(run, monkeypatch):
    """What was written in part is ended later, what waits is written when there is room."""
    log = LogWriter(run.path, 0, "a")
    assert not log.full
    log.add(NoteEvent, text="first")
    left = [20]
    full_disk(monkeypatch, left)
    assert log.flush()
    assert log.full
    assert not (run.path / "reserve-0").exists()
    log.add(NoteEvent, text="second")
    assert not log.flush()
    left[0] = 10_000
    log.add(RunEvent, phase="ended", outcome="succeeded")
    log.close()
    assert [event.seq for event in EventReader(run).read()] == [1, 2, 3]


def test_a_full_disk_has_room_for_the_end(run):
    """The reserve is of real blocks, and they are given up for the log."""
    log = LogWriter(run.path, 0, "a")
    assert (run.path / "reserve-0").stat().st_blocks * 512 >= record.RESERVE
    log.close()
    assert not (run.path / "reserve-0").exists()


def test_text_stays_in_the_files_while_the_disk_is_full(run):
    (run.path / "rank0.stdout").write_bytes(b"text\n")
    log = LogWriter(run.path, 0, "a")
    log.full = True
    StreamTail(run.path, 0, "stdout").drain(log, 5)
    log.close()
    assert b"text\\n" not in log_path(run.path, 0).read_bytes()
    assert [event.text for event in EventReader(run).read()] == ["text\n"]
