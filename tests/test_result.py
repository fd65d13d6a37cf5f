"""What a run leaves: texts from the ranks' files in the order of the log, values, errors; it pickles."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil

import pytest

from jupyter_ddp import events, result
from jupyter_ddp.errors import RunNotFoundError
from jupyter_ddp.events import OutEvent
from jupyter_ddp.render import failure_text
from jupyter_ddp.result import build
from tests.story import Story


class OnDisk:
    """A story whose ranks' files and logs are in a directory."""

    def __init__(self, run_dir, world_size=2):
        self.run_dir = run_dir
        self.story = Story(world_size, log_dir=str(run_dir)).begin()
        self.sizes = {}

    def write(self, rank, data, stream="stdout", *, events=1, text=True):
        """Append to a rank's file, and tell it in so many events of equal length."""
        path = self.run_dir / f"rank{rank}.{stream}"
        offset = path.stat().st_size if path.exists() else 0
        with path.open("ab") as file:
            file.write(data)
        step = -(-len(data) // events)
        for at in range(0, len(data), step):
            part = data[at : at + step]
            told = part.decode("utf-8", "replace") if text else None
            self.story.tell(
                OutEvent,
                rank=rank,
                stream=stream,
                offset=offset + at,
                length=len(part),
                text=told,
                lines=part.count(b"\n"),
            )
        return self

    def log(self):
        (self.run_dir / "run.json").write_text(json.dumps(self.story.facts))
        with (self.run_dir / "node-0.jsonl").open("wb") as log:
            log.writelines(map(events.encode, self.story.events))
        return self

    def build(self, **values):
        self.log()
        return build(self.story.view, self.run_dir, **values)


@pytest.fixture
def run(tmp_path):
    return OnDisk(tmp_path)


def test_a_good_end(run):
    run.write(0, b"hello\n").write(1, b"warn\n", "stderr").write(1, b"out\n").write(0, b"no newline")
    run.story.succeed()
    told = run.build(
        pulled={"loss": 0.5},
        values={0: "a", 1: None},
        files=("model.pt",),
        message=failure_text(run.story.view),
    )
    assert told.ok
    assert told.message == ""
    assert (told.outcome, told.run_id, told.world_size, told.failure) == ("succeeded", "abcd1234", 2, None)
    assert (told.pulled, told.values, told.files) == ({"loss": 0.5}, ["a", None], ("model.pt",))
    assert told.duration == 3.0
    first, second = told.ranks
    assert (first.stdout, first.stderr, first.text) == ("hello\nno newline", "", "hello\nno newline")
    assert (second.stdout, second.stderr, second.text) == ("out\n", "warn\n", "warn\nout\n")
    assert (second.rank, second.local_rank, second.node, second.host, second.state) == (
        1,
        1,
        0,
        "box",
        "finished",
    )
    assert (second.exit_code, second.signal, second.duration, second.value) == (0, None, 2.0, None)
    assert told.text() == "[0] hello\n[1!] warn\n[1] out\n[0] no newline\n"
    assert told.text(1) == "warn\nout\n"
    with pytest.raises(IndexError, match="no rank 2: the run had 2 ranks"):
        told.text(2)


def test_a_bad_end(run):
    run.story.error(1, "ValueError", "no", line=3, source="raise", traceback="Traceback …").rank(
        1, "ended", exit_code=1
    )
    run.story.fail(by_run=(0,))
    told = run.build(message=failure_text(run.story.view))
    assert not told.ok
    assert told.failure.headline == "rank 1 failed: ValueError: no"
    assert told.message.startswith("rank 1 failed: ValueError: no\ncell line 3: raise")
    assert str(told.ranks[1].error) == "ValueError: no"
    assert (told.ranks[1].error.line, told.ranks[1].error.traceback) == (3, "Traceback …")
    assert (told.ranks[0].state, told.ranks[0].error, told.ranks[0].signal) == ("ended", None, 15)


def test_the_repr_is_a_table(run):
    run.story.error(1, "ValueError", "no\nmore").rank(1, "ended", exit_code=1).fail(by_run=(0,))
    assert repr(run.build(pulled={"x": 1})).split("\n") == [
        "<DistributedResult abcd1234: failed · 2 ranks · 3.0 s · pulled: x>",
        "rank  state    exit     time   error",
        "0     stopped  SIGTERM  2.0 s",
        "1     failed   1        0.0 s  ValueError: no",
    ]


def test_tables_of_many_ranks_are_short(tmp_path):
    run = OnDisk(tmp_path, world_size=100)
    told = run.build()
    assert repr(told).split("\n")[-1] == "… 68 more ranks"
    assert "… 68 more ranks" in told._repr_html_()
    assert told._repr_html_().count("<tr>") == 33


def test_html_is_escaped(run):
    run.story.error(1, "ValueError", "<script>")
    assert "&lt;script&gt;" in run.build()._repr_html_()


def test_the_files_are_the_record(run):
    """B63: bytes that are cut within a character, and bytes that are none."""
    text = "▌é漢🙂\n".encode() * 3 + b"raw \xff bytes\n"
    run.write(0, text, events=11).write(0, b"\r 10%\r100%\n", "stderr", events=4)
    told = run.build()
    assert told.ranks[0].stdout == "▌é漢🙂\n" * 3 + "raw \ufffd bytes\n"
    assert told.ranks[0].stderr == "100%\n"


def test_a_flood_is_read_from_the_file(run):
    """B61"""
    run.write(0, b"first\n").write(0, b"line\n" * 1_000, text=False).write(0, b"last\n")
    assert run.story.view.lines.cut == 1_000
    assert run.build().ranks[0].stdout == "first\n" + "line\n" * 1_000 + "last\n"


def test_a_long_line_is_whole(run):
    """B73"""
    run.write(0, b"A" * 200_000 + b"\nafter\n", events=7)
    assert run.build().ranks[0].stdout == "A" * 200_000 + "\nafter\n"


def test_what_no_event_tells_of_is_at_the_end(run):
    """The agent was killed: its log ends before the rank's file does."""
    run.write(1, b"told\n")
    with (run.run_dir / "rank1.stdout").open("ab") as file:
        file.write(b"not told\n")
    assert run.build().ranks[1].text == "told\nnot told\n"


def test_without_files_the_events_are_the_record(run):
    """A run on another machine."""
    run.write(0, b"hello\n").write(0, b"flood\n" * 3, text=False).write(0, b"end\n")
    (run.run_dir / "rank0.stdout").unlink()
    assert run.build().ranks[0].stdout == "hello\n\n… 3 lines are not on this machine\nend\n"


def test_doubled_and_torn_lines_of_the_log_change_nothing(run):
    run.write(0, b"one\n").write(0, b"two\n")
    run.story.events += run.story.events
    run.log()
    with (run.run_dir / "node-0.jsonl").open("ab") as log:
        log.write(b'{"kind": "out", "rank": 0, "str')
    assert build(run.story.view, run.run_dir).text() == "[0] one\n[0] two\n"


@pytest.mark.parametrize("eager", [True, False])
def test_it_pickles(run, eager, monkeypatch):
    if not eager:
        monkeypatch.setattr(result, "EAGER_BYTES", 0)
    run.write(0, b"hello\n").story.error(1, "ValueError", "no").fail(by_run=(0,))
    told = run.build(pulled={"x": [1]})
    again = pickle.loads(pickle.dumps(told))
    assert again == told
    assert again.ranks[0].text == "hello\n"
    assert again.failure.headline == "rank 1 failed: ValueError: no"


def test_small_texts_outlive_the_directory_and_large_ones_say_that_it_is_gone(run, monkeypatch):
    run.write(0, b"hello\n").story.succeed()
    small = run.build()
    monkeypatch.setattr(result, "EAGER_BYTES", 0)
    large = run.build()
    assert large.ranks[0].text == large.text(0) == "hello\n"
    assert large.text() == "[0] hello\n"
    shutil.rmtree(run.run_dir)
    assert small.text() == "[0] hello\n"
    with pytest.raises(RunNotFoundError, match="the log of this run is gone"):
        large.text()


def test_it_cannot_be_changed(run):
    told = run.build()
    with pytest.raises(dataclasses.FrozenInstanceError):
        told.ok = True
