"""One rank as its agent sees it: its two streams, and the one process that may be signalled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from jupyter_ddp.events import decode
from jupyter_ddp.runtime.rankrecord import TURNS, TURNS_BURST, RankRecord
from jupyter_ddp.runtime.record import LogWriter, log_path, stream_path

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no ranks on Windows")


@pytest.fixture
def record(tmp_path):
    return RankRecord(tmp_path, 1)


def test_both_streams_are_read_up_to_the_sizes_that_a_frame_tells(tmp_path, record):
    """B68."""
    log = LogWriter(tmp_path, 0, "a")
    assert record.sizes() == [0, 0]
    assert not record.drain(log, [10, 10])
    stream_path(tmp_path, 1, "stdout").write_text("out 1\nout 2\n")
    stream_path(tmp_path, 1, "stderr").write_text("err 1\nerr 2\n")
    assert record.sizes() == [12, 12]
    assert record.drain(log, [6, 0])
    assert record.drain(log, [6, 6])
    assert not record.drain(log, [6, 6])
    record.finish(log)
    log.close()
    told = [decode(line) for line in log_path(tmp_path, 0).read_bytes().splitlines()]
    assert [event.text for event in told] == ["out 1\n", "err 1\n", "out 2\n", "err 2\n"]


def test_signals_go_to_the_rank_as_long_as_it_is_there(record):
    assert not record.kill(signal.SIGTERM)  # it has not said hello
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as rank:
        record.pid = rank.pid
        assert record.kill(signal.SIGTERM)
        assert rank.wait() == -signal.SIGTERM
    assert not record.kill(signal.SIGKILL)


@pytest.mark.parametrize("pid", [0, 1, -1])
def test_a_pid_that_means_many_processes_gets_no_signal(record, monkeypatch, pid):
    sent = []
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
    record.pid = pid
    assert not record.kill(signal.SIGKILL)
    assert sent == []


def test_a_rank_that_has_ended_gets_no_signal(record):
    """Its pid may be somebody else's by now."""
    record.pid = os.getpid()
    record.ended = True
    assert not record.kill(signal.SIGTERM)


def test_turns_between_the_streams_have_their_places_up_to_a_rate(tmp_path):
    record = RankRecord(tmp_path, 0)
    assert sum(record.may_turn(1000.0) for _ in range(5000)) == TURNS_BURST
    assert sum(record.may_turn(1001.0) for _ in range(5000)) == TURNS
    assert sum(record.may_turn(5000.0) for _ in range(5000)) == TURNS_BURST
