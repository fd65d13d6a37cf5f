"""The text of a run, whole: of all instances in the order of time."""

from __future__ import annotations

import pytest

from jupyter_ddp.events import OutEvent
from jupyter_ddp.result import build
from jupyter_ddp.transcript import join, read_all, read_lines, text_size
from tests.spoken import Spoken


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


def test_an_event_of_text_that_no_file_can_have(spoken):
    """Its numbers are a hostile log's; what the file has is read."""
    spoken.say(0, "a\n")
    beyond = OutEvent(rank=0, stream="stdout", offset=2**63 - 1, length=2**63 - 1)
    assert join(read_lines(spoken.run.path, [*spoken.run.events(), beyond])) == "a\n"


def test_a_directory_where_the_text_should_be(spoken):
    (spoken.run.path / "rank3.stdout").mkdir()
    event = OutEvent(rank=3, stream="stdout", offset=0, length=2, text="x\n")
    assert join(read_lines(spoken.run.path, [event])) == "x\n"
    assert text_size(spoken.run.path, 3) == 0
