"""The end of what a run showed: text and displays, at the cost of the end alone."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from jupyter_ddp.render import plain
from jupyter_ddp.tail import read_end
from jupyter_ddp.transcript import join, read_all, text_size
from tests.spoken import Spoken


@pytest.fixture
def spoken(tmp_path):
    return Spoken(tmp_path, 12)


def lines(text):
    return text.split("\n")[:-1]


def test_the_end_of_all_instances_is_in_the_order_of_time(spoken):
    spoken.say(0, "a\n").say(10, "b\n").say(0, "c\n").say(2, "d\n")
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


def test_what_was_displayed_stands_where_the_view_has_it(spoken):
    spoken.say(0, "before\n").show(0, "a figure", data={"image/png": "AAAA"}).say(0, "after\n")
    spoken.show(1, "a figure", data={"image/png": "BBBB"}).say(1, "next\n")
    for rank in (1, 0):
        spoken.show(rank, "42\n43", action="result")
    rows = lines(read_end(spoken.run, 1_000)[0])
    assert rows == plain(spoken.view, now=0.0).split("\n")[1:]
    assert rows[-2:] == ["[0-1] 42", "[0-1] 43"]
    assert "[0-1] a figure" not in rows  # their text is equal, and they are not


def test_the_displays_of_one_rank_stand_between_its_lines(spoken):
    spoken.say(0, "open").show(0, "shown").show(1, "another's").say(0, "\nend\n")
    assert read_end(spoken.run, 1_000, rank=0) == ("open\nshown\nend\n", False)


def test_a_display_that_was_updated_is_there_once_as_it_is_in_the_end(spoken):
    spoken.show(0, "0 %", display_id="bar")
    for percent in range(1, 101):
        spoken.show(0, f"{percent} %", display_id="bar", action="update")
    spoken.show(0, "", action="clear")
    assert read_end(spoken.run, 50) == ("[0] 100 %\n", False)


def test_a_display_that_was_too_big_for_the_log_is_there_as_its_text(spoken):
    (spoken.run.path / "displays").mkdir()
    data = {"text/plain": "<Figure>", "image/png": "A" * 1_000_000}
    (spoken.run.path / "displays" / "0.json").write_text(json.dumps({"data": data, "metadata": {}}))
    spoken.show(0, "", file="displays/0.json")
    assert read_end(spoken.run, 1_000) == ("[0] <Figure>\n", False)


def test_many_displays_cost_what_the_end_costs(spoken):
    for number in range(300):
        spoken.show(0, f"figure {number}", data={"image/png": "A" * 100_000})
    tracemalloc.start()
    text, more = read_end(spoken.run, 2_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert more
    assert lines(text)[-1] == "[0] figure 299"
    assert peak < 3_000_000
