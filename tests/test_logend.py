"""The ends of logs: how a run is, and its last events, whatever the size of what came before."""

from __future__ import annotations

import os

import pytest

from jupyter_ddp import logend
from jupyter_ddp.events import NoteEvent, RunEvent, encode
from jupyter_ddp.logend import last_events, log_state
from jupyter_ddp.rundir import RunStore


@pytest.fixture
def run(tmp_path):
    made = RunStore(tmp_path).create()
    made.write_json("run.json", {"nnodes": 2, "nproc": 1, "world_size": 2})
    return made


def write(run, *events, node=0):
    with (run.path / f"node-{node}.jsonl").open("ab") as log:
        log.writelines(map(encode, events))


def phase(word, outcome=None, time=1.0):
    return RunEvent(phase=word, outcome=outcome, time=time)


def note(text, time=1.0, node=0):
    return NoteEvent(text=text, time=time, node=node)


@pytest.fixture
def kept(run):
    """The run is alive."""
    descriptor = run.lock()
    yield run
    os.close(descriptor)


def test_a_run_that_lives_is_in_the_phase_of_its_last_word(kept):
    assert log_state(kept).word == "starting"
    write(kept, phase("starting"), phase("running"), note("x"))
    state = log_state(kept)
    assert (state.word, state.alive, state.ended) == ("running", True, None)
    write(kept, phase("ending", "timeout"))
    assert log_state(kept).word == "ending"


def test_a_run_that_talks_much_is_running(kept):
    write(kept, phase("running"), *[note("x" * 1_000)] * 200)
    assert log_state(kept).word == "running"


def test_a_run_that_is_over_says_how(run):
    write(run, phase("running"), phase("ended", "failed", time=5.0), note("said later"))
    state = log_state(run)
    assert (state.word, state.alive, state.ended) == ("failed", False, 5.0)


@pytest.mark.parametrize("events", [[], [phase("running")], [phase("ending", "stopped")]])
def test_a_dead_run_whose_log_has_no_end_is_lost(run, events):
    write(run, *events)
    state = log_state(run)
    assert (state.word, state.alive, state.ended) == ("lost", False, None)


def test_a_run_whose_record_was_removed_says_so(run):
    (run.path / "model").mkdir()
    (run.path / "model" / "weights").touch()
    assert log_state(run).word == "pruned"


def test_a_run_that_is_gone_raises_nothing(run):
    (run.path / "run.json").unlink()
    run.path.rmdir()
    assert log_state(run).word == "lost"
    assert list(last_events(run)) == []


def test_the_size_of_a_log_does_not_matter(run, monkeypatch):
    """A sparse file of a terabyte, which nobody could read."""
    with (run.path / "node-0.jsonl").open("wb") as log:
        log.seek(1 << 40)
        log.write(b"\n" + encode(note("last")) + encode(phase("ended", "succeeded")))
    assert log_state(run).word == "succeeded"
    events = last_events(run)
    assert [type(next(events)), next(events).text] == [RunEvent, "last"]


@pytest.mark.parametrize("block", [1, 7, 100, 1 << 16])
def test_events_come_from_the_last_to_the_first(run, monkeypatch, block):
    monkeypatch.setattr(logend, "BLOCK", block)
    events = [note("ü" * size) for size in (1, 50, 3, 200)]
    write(run, *events)
    with (run.path / "node-0.jsonl").open("ab") as log:
        log.write(b'not an event\n{"kind": "note", "te')
    assert list(last_events(run)) == events[::-1]


def test_instances_are_told_together_by_time_each_in_its_order(run):
    write(run, note("a", 1.0), note("c", 3.0), note("c2", 2.5), note("e", 5.0))
    write(run, note("b", 2.0, node=1), note("d", 4.0, node=1), node=1)
    assert "".join(event.text for event in last_events(run)) == "edc2cba"
