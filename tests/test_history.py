"""Runs of this machine as users look at them: their state in a list, and the end of what they wrote."""

from __future__ import annotations

import pytest

from jupyter_ddp.errors import RunNotFoundError
from jupyter_ddp.events import OutEvent, RunEvent, encode
from jupyter_ddp.history import log_text, row, runs_text
from jupyter_ddp.rundir import RunStore


@pytest.fixture
def store(tmp_path):
    return RunStore(tmp_path / "runs")


def record(store, *texts, ended=None):
    """Write a run of one rank that said these texts, as its agent leaves it."""
    run = store.create()
    run.write_json(
        "run.json", {"id": run.run_id, "created": 1_000.0, "nnodes": 1, "nproc": 1, "world_size": 1}
    )
    events, offset = [RunEvent(phase="running", time=1_001.0)], 0
    for text in texts:
        events.append(OutEvent(rank=0, stream="stdout", offset=offset, length=len(text), text=text))
        offset += len(text)
    if ended:
        events.append(RunEvent(phase="ended", outcome=ended, time=1_005.0))
    (run.path / "node-0.jsonl").write_bytes(b"".join(map(encode, events)))
    (run.path / "rank0.stdout").write_text("".join(texts))
    return run


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
    assert log_text(run, None, 1_000) == f"Nothing was written; the run's directory is {run.path}."
    with pytest.raises(RunNotFoundError, match="rank 0 only"):
        log_text(run, 1, 1_000)


def test_a_run_whose_record_was_pruned_says_so(store):
    run = record(store, "hello\n", ended="succeeded")
    (run.path / "model").mkdir()
    (run.path / "model" / "weights").touch()
    run.remove_record()
    assert row(run, 2_000.0).state == "pruned"
    assert "was pruned; what its ranks kept is in" in log_text(run, None, 1_000)
