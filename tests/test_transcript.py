"""The text of a run: of all instances in the order of time, whole, or its end at the cost of the end alone."""

from __future__ import annotations

import tracemalloc

import pytest

from jupyter_ddp.events import OutEvent, encode
from jupyter_ddp.result import build
from jupyter_ddp.rundir import RunStore
from jupyter_ddp.transcript import join, read_all, read_end, read_lines, text_size
from jupyter_ddp.view import fold, new_view


class Spoken:
    """A run of several instances, one rank each, whose words are in its files and logs."""

    def __init__(self, root, nnodes):
        self.run = RunStore(root).create()
        facts = {"id": self.run.run_id, "nnodes": nnodes, "nproc": 1, "world_size": nnodes, "created": 1.0}
        self.run.write_json("run.json", facts)
        self.view = new_view(facts)
        self.now = 1.0

    def say(self, rank, text, stream="stdout", *, flood=False):
        self.now += 1
        path = self.run.path / f"rank{rank}.{stream}"
        offset = path.stat().st_size if path.exists() else 0
        with path.open("ab") as file:
            file.write(text.encode())
        event = OutEvent(
            node=rank,
            rank=rank,
            stream=stream,
            offset=offset,
            length=len(text.encode()),
            text=None if flood else text,
            lines=text.count("\n"),
            time=self.now,
        )
        with (self.run.path / f"node-{rank}.jsonl").open("ab") as log:
            log.write(encode(event))
        fold(self.view, event)
        return self


@pytest.fixture
def spoken(tmp_path):
    return Spoken(tmp_path, 12)


def lines(text):
    return text.split("\n")[:-1]


def test_the_text_of_instances_is_in_the_order_of_time(spoken):
    spoken.say(0, "a\n").say(10, "b\n").say(0, "c\n").say(2, "d\n")
    live = [(line.rank, line.text) for line in spoken.view.lines]
    assert live == [(0, "a"), (10, "b"), (0, "c"), (2, "d")]
    assert [(line.rank, line.text) for line in read_all(spoken.run)] == live
    assert lines(build(spoken.view, spoken.run.path).text()) == ["[0] a", "[10] b", "[0] c", "[2] d"]
    assert lines(read_end(spoken.run, 1_000)[0]) == ["[0] a", "[10] b", "[0] c", "[2] d"]


def test_the_end_of_a_text_that_is_short_is_all_of_it(spoken):
    spoken.say(0, "a\n").say(1, "warn\n", "stderr").say(1, "b\nopen")
    assert read_end(spoken.run, 1_000) == (join(read_all(spoken.run), labelled=True), False)
    assert read_end(spoken.run, 1_000, rank=1) == ("warn\nb\nopen", False)
    assert read_end(spoken.run, 1_000, rank=5) == ("", False)


def test_the_end_is_whole_lines_and_says_that_there_is_more(spoken):
    for number in range(1_000):
        spoken.say(number % 2, f"line {number}\n")
    text, more = read_end(spoken.run, 300)
    assert more
    assert 280 < len(text) <= 300
    count = len(lines(text))
    assert lines(text) == [f"[{n % 2}] line {n}" for n in range(1_000 - count, 1_000)]
    text, more = read_end(spoken.run, 300, rank=1)
    assert (lines(text)[-1], more) == ("line 999", True)


def test_a_line_longer_than_the_end_shows_its_own_end(spoken):
    spoken.say(0, "x" * 5_000 + "yz\n")
    text, more = read_end(spoken.run, 100, rank=0)
    assert (len(text), text[-4:], more) == (100, "xyz\n", True)


def test_a_line_of_whose_beginning_no_event_tells_shows_that(spoken):
    spoken.say(0, "begin").say(0, " tail\n").say(0, "next\n").say(1, " 90%", "stderr").say(
        1, "\r100%\n", "stderr"
    )
    first, second, third, bar, end = spoken.run.events()

    def text(*events):
        return join(read_lines(spoken.run.path, events))

    assert text(first, second, third) == "begin tail\nnext\n"
    assert text(second, third) == "… tail\nnext\n"
    assert text(third) == "next\n"
    assert text(bar, end) == text(end) == "100%\n"


def test_the_end_costs_what_the_end_costs(spoken):
    """A flood is one event a quarter megabyte; nothing of what came before its end is read."""
    flood = "some words of a flood\n" * 50_000
    for _ in range(20):
        spoken.say(0, flood, flood=True)
        spoken.say(1, "x" * 100_000 + "\n")
    assert text_size(spoken.run.path) > 20_000_000
    tracemalloc.start()
    text, more = read_end(spoken.run, 10_000, rank=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert more
    assert lines(text)[-1] == "some words of a flood"
    assert 9_900 < len(text) <= 10_000
    assert peak < 2_000_000


def test_what_the_log_does_not_tell_yet_is_at_the_end(spoken):
    spoken.say(0, "told\n")
    with (spoken.run.path / "rank0.stdout").open("ab") as file:
        file.write(b"not told\n" * 10_000)
    text, more = read_end(spoken.run, 18, rank=0)
    assert (text, more) == ("not told\nnot told\n", True)
