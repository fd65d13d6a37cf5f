"""Runs of this machine as users look at them: their state in a list, and the end of what they wrote."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from jupyter_ddp.errors import JupyterDDPError, RunNotFoundError
from jupyter_ddp.events import (
    DisplayEvent,
    ErrorEvent,
    NoteEvent,
    OutEvent,
    RankEvent,
    RunEvent,
    encode,
)
from jupyter_ddp.history import alive, log_text, row, runs_text, stop, to_stop
from jupyter_ddp.rundir import RunStore


@pytest.fixture
def store(tmp_path):
    return RunStore(tmp_path / "runs")


def record(store, *texts, ended=None, ranks=1, **facts):
    """Write a run whose rank 0 said these texts, as its agent leaves it."""
    run = store.create()
    sizes = {"nnodes": 1, "nproc": ranks, "world_size": ranks}
    run.write_json("run.json", {"id": run.run_id, "created": 1_000.0, **sizes, **facts})
    events, offset = [RunEvent(phase="running", time=1_001.0)], 0
    for text in texts:
        events.append(OutEvent(rank=0, stream="stdout", offset=offset, length=len(text), text=text))
        offset += len(text)
    if ended:
        events.append(RunEvent(phase="ended", outcome=ended, time=1_005.0))
    tell(run, *events)
    (run.path / "rank0.stdout").write_text("".join(texts))
    return run


def tell(run, *events):
    with (run.path / "node-0.jsonl").open("ab") as log:
        log.write(b"".join(map(encode, events)))


@contextmanager
def holding(run):
    """Keep a run alive, as its agents do."""
    lock = run.lock()
    yield
    os.close(lock)


def test_a_list_says_how_runs_are(store):
    over, dead = record(store, ended="succeeded"), record(store)
    assert [(row(run, 2_000.0).state, row(run, 2_000.0).duration) for run in (over, dead)] == [
        ("succeeded", "5.0 s"),
        ("lost", ""),
    ]
    head, *lines = runs_text(store.list(), store.root, 2_000.0).split("\n")
    assert head.split()[:2] == ["id", "name"]
    assert sorted(line.split()[0] for line in lines) == sorted([over.run_id, dead.run_id])


def test_the_end_of_a_long_log_says_how_much_there_is_and_where(store):
    run = record(store, *(f"line {number:06}\n" for number in range(10_000)), ended="succeeded")
    head, *lines = log_text(run, 0, 1_200).split("\n")
    assert head == f"… this is the end of 120 kB of text; all of it is in {run.path}"
    assert lines == [f"line {number:06}" for number in range(9_900, 10_000)]


def test_a_run_that_wrote_nothing_says_so(store):
    run = record(store, ended="succeeded")
    assert log_text(run, None, 1_000) == f"Nothing was shown; the run's directory is {run.path}."
    with pytest.raises(RunNotFoundError, match="rank 0 only"):
        log_text(run, 1, 1_000)


def test_a_run_without_output_that_goes_on_says_so_far(store):
    run = record(store)
    with holding(run):
        assert log_text(run, None, 1_000).startswith("Nothing was shown so far;")


def test_an_interrupted_run_says_so(store):
    run = record(store, "hello\n", ended="interrupted")
    assert log_text(run, None, 1_000) == "[0] hello\n\nthe run was interrupted"
    assert log_text(run, 0, 1_000).startswith("hello\n\nrank 0 had not finished when the run was ended")


@pytest.fixture
def failed(store):
    """A run of two ranks: rank 1 wrote a line, displayed something and failed; rank 0 was stopped."""
    run = record(store, "hello\n", ranks=2)
    trace = "Traceback (most recent call last):\nValueError: no"
    error = ErrorEvent(rank=1, type="ValueError", message="no", line=3, source="raise", time=1_002.0)
    tell(
        run,
        DisplayEvent(rank=1, action="display", data={"text/plain": "<Figure>"}, time=1_001.5),
        error,
        replace(error, traceback=trace),
        RankEvent(rank=1, state="finished", ok=False, time=1_002.0),
        RunEvent(phase="ending", outcome="failed", time=1_002.1),
        RankEvent(rank=0, state="ended", signal=15, by_run=True, time=1_002.2),
        RankEvent(rank=1, state="ended", exit_code=1, time=1_002.2),
        NoteEvent(rank=0, text="look", time=1_002.3),
        RunEvent(phase="ended", outcome="failed", time=1_003.0),
    )
    return run


def test_a_failed_run_says_what_its_view_says(failed):
    assert log_text(failed, None, 1_000).split("\n") == [
        "[0] hello",
        "[1] <Figure>",
        "",
        "rank 1 failed: ValueError: no",
        "cell line 3: raise",
        "",
        "Traceback (most recent call last):",
        "ValueError: no",
        "",
        "stopped because of it: rank 0",
        "note: rank 0: look",
        f"log: {failed.path}",
    ]


def test_a_rank_says_how_itself_ended(failed):
    assert log_text(failed, 1, 1_000).split("\n") == [
        "<Figure>",
        "",
        "rank 1 failed: ValueError: no",
        "cell line 3: raise",
        "",
        "Traceback (most recent call last):",
        "ValueError: no",
    ]
    assert log_text(failed, 0, 1_000).split("\n") == [
        "hello",
        "",
        "rank 0 had not finished when the run was ended: rank 1 failed: ValueError: no",
    ]


def test_a_failure_is_found_before_any_flood(failed):
    """Events of text are not folded for it, and leave no gap that would be taken for a loss."""
    tell(failed, *(OutEvent(rank=0, stream="stdout", offset=6 + n, length=1, text="x") for n in range(9_000)))
    (failed.path / "rank0.stdout").write_text("hello\n" + "x" * 9_000)
    text = log_text(failed, None, 1_000)
    assert text.startswith("… this is the end of 9.0 kB of text")
    assert "rank 1 failed: ValueError: no" in text
    assert "did not arrive" not in text


def test_a_run_whose_log_has_its_end_is_over_though_its_agents_still_tidy_up(store):
    run = record(store, ended="succeeded")
    with holding(run):
        assert stop(run) == f"Run {run.run_id} is over: succeeded."
        assert alive(store) == []
        assert not row(run, 2_000.0).alive
        with pytest.raises(RunNotFoundError, match="no run is alive"):
            to_stop(store, None)
        other = record(store)
        with holding(other):
            assert to_stop(store, None).run_id == other.run_id


def test_a_run_that_does_not_answer_names_the_process_to_end(store):
    run = record(store, pid=4_321)
    with holding(run), pytest.raises(JupyterDDPError, match="does not answer: end process 4321, which"):
        stop(run)


@pytest.mark.parametrize(
    ("facts", "where"),
    [
        ({"pid": os.getpid(), "created": time.time() + 60, "kernel_id": "k"}, "local, this kernel"),
        ({"pid": os.getpid(), "created": time.time() + 60}, "local, this process"),
        ({"pid": os.getpid(), "created": 1_000.0}, f"local, pid {os.getpid()}"),  # a number comes again
        ({"pid": 1}, "local, pid 1"),
        ({}, "local, pid ?"),
    ],
)
def test_a_list_says_who_started_a_run(store, facts, where):
    assert row(record(store, backend="local", **facts), 2_000.0).where == where


def test_a_run_whose_record_was_pruned_says_so(store):
    run = record(store, "hello\n", ended="succeeded")
    (run.path / "model").mkdir()
    (run.path / "model" / "weights").touch()
    run.remove_record()
    assert row(run, 2_000.0).state == "pruned"
    assert "was pruned; what its ranks kept is in" in log_text(run, None, 1_000)
