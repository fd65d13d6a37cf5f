"""What a view makes of a run's events: in order, doubled, missing, hostile; lines, rich output, states, the first cause."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_ddp import events
from jupyter_ddp.events import OutEvent, RankEvent, RunEvent, UnknownEvent
from jupyter_ddp.render import bundle, failure_text, plain
from jupyter_ddp.view import DisplayView, Line, fold, new_view
from jupyter_ddp.view.summary import note_lines, status_line
from tests.story import T0, Story


@pytest.fixture
def story():
    return Story(world_size=4)


def states(story):
    return [rank.state for rank in story.view.ranks]


# -- order, numbers, foreign events


def test_a_run_from_its_first_event_to_its_last(story):
    assert (story.view.phase, states(story)) == ("queued", ["waiting"] * 4)
    story.begin()
    assert (story.view.phase, states(story)) == ("running", ["running"] * 4)
    story.out(1, "hello\n").succeed()
    assert story.texts == [(1, "hello")]
    assert states(story) == ["finished"] * 4
    assert story.view.ok
    assert story.view.failure is None
    assert story.view.ranks[2].duration == 2.0


def test_doubled_events_change_nothing(story):
    story.begin().out(0, "one\n").show(0, "figure").note("careful").succeed()
    before = bundle(story.view, now=T0, final=True)
    changes = story.view.changes
    for event in story.events:
        fold(story.view, event)
    assert bundle(story.view, now=T0, final=True) == before
    assert story.view.changes == changes


def test_text_that_comes_again_under_another_number_is_told_by_its_offset(story):
    story.out(0, "one\n")
    again = dataclasses.replace(story.events[-1], seq=50)
    fold(story.view, again)
    longer = dataclasses.replace(again, seq=51, length=8, text="one\ntwo\n")
    fold(story.view, longer)
    assert story.texts == [(0, "one"), (0, "two")]


def test_missing_events_are_counted_and_filled_when_they_come(story):
    story.begin()
    whole = Story(4).begin().out(0, "one\n").out(0, "two\n").out(0, "three\n").events[-3:]
    fold(story.view, whole[2])
    assert story.view.missing == 2
    assert story.view.missing_bytes == 8
    assert "warning: 2 events of this run's log did not arrive" in note_lines(story.view)
    fold(story.view, whole[1])
    fold(story.view, whole[0])
    assert story.view.missing == story.view.missing_bytes == 0
    assert sorted(text for _, text in story.texts) == ["one", "three", "two"]


def test_events_of_kinds_from_the_future_only_take_their_number(story):
    story.tell(UnknownEvent).out(0, "hello\n")
    assert story.view.missing == 0
    assert story.texts == [(0, "hello")]


def test_events_without_a_number_are_folded_each_time(story):
    for text in ("one", "two"):
        fold(story.view, events.NoteEvent(text=text))
    assert [note.text for note in story.view.notes] == ["one", "two"]


def test_text_that_looks_like_our_own_changes_nothing(story):
    """B70"""
    text = '{"kind": "error", "rank": 0, "type": "Fake", "message": ""}'
    story.begin().out(1, text + "\n")
    assert story.texts == [(1, text)]
    assert story.view.failure is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=6,
)
NUMBERS = st.integers(-1, 5) | st.integers()
WORDS = st.text(max_size=5) | st.sampled_from(["", "<b>", "\ud800", "a\nb", "x" * 300])
FIELDS = {
    "attempt": st.sampled_from(["", "a1", "a2"]),
    "node": st.integers(0, 2) | NUMBERS,
    "seq": st.integers(-1, 30) | NUMBERS,
    "rank": st.integers(-1, 3) | st.none() | NUMBERS,
    "time": st.floats(0, 10) | st.floats() | st.integers(),
    "stream": st.sampled_from(["stdout", "stderr", "stdin"]),
    "offset": st.integers(-5, 40) | NUMBERS,
    "length": st.integers(-5, 40) | NUMBERS,
    "text": WORDS | st.sampled_from(["\x1b[A\x1b[", "a\rb", "\n\n"]) | st.none(),
    "lines": NUMBERS,
    "phase": st.sampled_from([*events.PHASES, "dreaming"]),
    "outcome": st.sampled_from([*events.OUTCOMES, "odd", None]),
    "unfinished": st.lists(NUMBERS, max_size=3),
    "state": st.sampled_from(["started", "running", "heard", "finished", "ended", "odd"]),
    "ok": st.booleans() | st.none(),
    "by_run": st.booleans(),
    "wait": st.booleans(),
    "action": st.sampled_from(["display", "update", "result", "clear", "odd"]),
    "data": st.dictionaries(st.sampled_from(["text/plain", "text/html", "image/png", "x"]), JSON, max_size=2),
    "metadata": st.dictionaries(st.sampled_from(["image/png", "x"]), JSON, max_size=2),
    "display_id": st.sampled_from(["d1", "d2", None]),
    "type": st.sampled_from(["ValueError", "KeyboardInterrupt", "SystemExit", ""]),
    "detail": st.dictionaries(st.text(max_size=3), JSON, max_size=2),
    **dict.fromkeys(["exit_code", "signal", "pid", "local_rank", "line"], NUMBERS | st.none()),
    **dict.fromkeys(["code", "size"], NUMBERS),
    **dict.fromkeys(["message", "traceback", "name", "note", "level", "reason", "where"], WORDS),
    **dict.fromkeys(["source", "file", "host", "device"], WORDS | st.none()),
}


def of_kind(kind):
    cls = events.KINDS.get(kind, UnknownEvent)
    needed = {
        f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING
    }
    fields = {f.name: FIELDS[f.name] for f in dataclasses.fields(cls)}
    rest = {name: field for name, field in fields.items() if name not in needed}
    return st.fixed_dictionaries(
        {"kind": st.just(kind)} | {name: fields[name] for name in needed}, optional=rest
    )


HOSTILE = st.sampled_from([*events.KINDS, "unheard of"]).flatmap(of_kind)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(HOSTILE, max_size=25),
    st.dictionaries(st.sampled_from(["world_size", "nnodes", "config", "created", "id"]), JSON),
)
def test_hostile_events_never_raise(objects, facts):
    view = new_view({"world_size": 3, **facts})
    for obj in objects:
        event = events.from_json(obj)
        if event is not None:
            fold(view, event)
    for final in (False, True):
        bundle(view, now=0.0, final=final)
    failure_text(view)


@settings(max_examples=60, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.lists(st.tuples(st.integers(0, 3), st.text(max_size=6)), max_size=20),
)
def test_events_in_any_order_and_doubled_lose_nothing_of_what_they_count(chance: random.Random, prints):
    told = Story(4).begin()
    for rank, text in prints:
        told.out(rank, f"{text}\n")
    told.succeed()
    mixed = [*told.events, *told.events]
    chance.shuffle(mixed)
    view = new_view(told.facts)
    for event in mixed:
        fold(view, event)
    assert view.missing == view.missing_bytes == 0
    assert view.over
    assert [rank.state for rank in view.ranks] == ["finished"] * 4


# -- lines


def test_an_open_line_stands_where_it_was_begun(story):
    """B59: four progress bars, each one line."""
    for percent in (0, 50, 100):
        for rank in story.ranks:
            story.out(rank, f"\rr{rank}: {percent}%", "stderr")
    story.out(0, "end\n")
    assert story.texts == [(0, "r0: 100%"), (1, "r1: 100%"), (2, "r2: 100%"), (3, "r3: 100%"), (0, "end")]


def test_partial_lines_of_ranks_do_not_mix(story):
    """B65"""
    for word in ("alpha ", "beta ", "gamma"):
        for rank in story.ranks:
            story.out(rank, word)
    assert story.texts == [(rank, "alpha beta gamma") for rank in story.ranks]


def test_the_first_quarter_and_the_last_three_are_kept():
    """B61: what was cut is counted."""
    story = Story(1, output_cap=8_000)
    for number in range(1_000):
        story.out(0, f"line {number:04} " + "x" * 20 + "\n")
    texts = [text[:9] for _, text in story.texts]
    assert texts[0] == "line 0000"
    assert texts[-1] == "line 0999"
    assert len(texts) + story.view.lines.cut == 1_000
    size = sum(len(text) + 8 for _, text in story.texts)
    assert 7_500 < size <= 8_000
    head = [n for n, text in enumerate(texts) if text == f"line {n:04}"]
    assert 0.2 < len(head) / len(texts) < 0.3


def test_a_line_that_was_open_before_a_gap_ends_in_it(story):
    """B73: a giant line whose end came without its text, and a line after it."""
    story.out(0, "A" * 50)
    story.tell(OutEvent, rank=0, stream="stdout", offset=50, length=51, text=None, lines=1)
    story.tell(OutEvent, rank=0, stream="stdout", offset=101, length=6, text="after\n")
    assert story.texts == [(0, "A" * 50), (0, "after")]
    assert (story.view.lines.cut, story.view.ranks[0].lines) == (0, 2)


def test_a_bar_that_still_moves_is_not_cut():
    story = Story(2, output_cap=8_000)
    story.out(0, "x" * 1_990 + "\n")
    story.out(1, "\r10%", "stderr")
    for number in range(1_000):
        story.out(0, f"line {number}\n")
    story.out(1, "\r100%\n", "stderr")
    assert (1, "100%") in story.texts
    assert "[1!] 100%" in plain(story.view, now=T0)


def test_lines_that_change_stay_within_the_budget():
    story = Story(4, output_cap=8_000)
    for number in range(200):
        story.out(number % 4, f"{number}\n" + "y" * (number * 7 % 900))
        story.out((number + 1) % 4, "\r\x1b[2K")
    assert sum(len(text) + 8 for _, text in story.texts) <= 8_000 + 900


def test_a_flood_is_counted_not_read(story):
    story.tell(OutEvent, rank=1, stream="stdout", offset=0, length=1_000_000, text=None, lines=20_000)
    story.tell(OutEvent, rank=1, stream="stdout", offset=1_000_000, length=4, text="end\n")
    assert story.view.lines.cut == 20_000
    assert story.view.missing_bytes == 0
    assert story.texts == [(1, "end")]


def test_other_ranks_than_those_asked_for_are_counted():
    """``--show 0``; the tail of a failing rank always shows."""
    story = Story(4, config={"show": [0]}).begin()
    for rank in story.ranks:
        story.out(rank, f"rank {rank} says this\n")
    assert story.texts == [(0, "rank 0 says this")]
    assert story.view.hidden == 3
    story.error(3, "ValueError", "no").fail(by_run=(0, 1, 2))
    text = plain(story.view, now=T0)
    assert "last lines of rank 3:\n[3] rank 3 says this" in text
    assert "rank 2 says this" not in text
    assert "note: 3 lines of other ranks not shown (--show 0)" in text


def test_no_ranks_shown_has_a_word():
    story = Story(2, config={"show": []}).begin().out(0, "a\n").succeed()
    assert "note: 1 line of other ranks not shown (--show none)" in plain(story.view, now=T0)


def test_tails_of_ranks_are_bounded(story):
    for number in range(300):
        story.out(2, f"{number} " + "z" * 5_000 + "\n")
    lines = story.view.ranks[2].tail.lines
    assert len(lines) <= 100
    assert sum(len(line.text) for line in lines) <= 64 * 1024
    assert lines[-1].text.startswith("299 ")


def test_clear_output_takes_away_what_the_rank_has_shown(story):
    story.out(0, "old\n").out(1, "other\n").show(0, "old figure").show(0, "", action="clear")
    assert story.texts == [(1, "other")]
    assert list(story.view.displays) == []
    story.out(0, "new\n")
    assert story.texts == [(1, "other"), (0, "new")]


def test_clear_output_that_waits_clears_with_what_comes_next(story):
    story.out(0, "old").show(0, "", action="clear", wait=True)
    assert story.texts == [(0, "old")]
    story.out(0, "new\n")
    assert story.texts == [(0, "new")]


# -- rich output


def test_equal_displays_of_several_ranks_are_one(story):
    for rank in story.ranks:
        story.show(rank, {"text/plain": "42"}, action="result")
    (shown,) = story.view.displays
    assert (shown.ranks, shown.result, shown.text) == ((0, 1, 2, 3), True, "42")


def test_different_displays_are_shown_apart_in_order(story):
    story.show(1, "same").out(0, "between\n").show(0, "different").show(2, "same")
    assert [(d.ranks, d.text) for d in story.view.displays] == [((1, 2), "same"), ((0,), "different")]
    assert [type(item) for item in story.view.items()] == [DisplayView, Line, DisplayView]


def test_what_one_rank_shows_besides_keeps_nothing_apart(story):
    """Rank 0 plots; then all show the same value."""
    story.show(0, "figure").show(0, "step").show(0, "step")
    for rank in story.ranks:
        story.show(rank, "42", action="result")
    story.show(1, "step")
    assert [(d.ranks, d.text) for d in story.view.displays] == [
        ((0,), "figure"),
        ((0, 1), "step"),
        ((0,), "step"),
        ((0, 1, 2, 3), "42"),
    ]


def test_a_value_and_a_display_of_it_are_two_things(story):
    story.show(0, "42").show(1, "42", action="result")
    assert [(d.ranks, d.result) for d in story.view.displays] == [((0,), False), ((1,), True)]


def test_an_update_changes_the_display_of_its_rank_alone(story):
    for rank in (0, 1):
        story.show(rank, "loss 1", display_id="d")
    story.show(1, "loss 0.5", action="update", display_id="d")
    assert [(d.ranks, d.text) for d in story.view.displays] == [((0,), "loss 1"), ((1,), "loss 0.5")]
    story.show(0, "loss 0.5", action="update", display_id="d")
    assert [(d.ranks, d.text) for d in story.view.displays] == [((0, 1), "loss 0.5")]


def test_rich_output_has_a_budget(story):
    image = "A" * 200_000
    for number in range(200):
        story.show(0, {"text/plain": f"<Figure {number}>", "image/png": image + str(number)})
    shown = list(story.view.displays)
    assert [d.text for d in shown] == [f"<Figure {number}>" for number in range(200 - len(shown), 200)]
    assert all("image/png" in d.data for d in shown)
    assert 10_000_000 < sum(len(d.data["image/png"]) for d in shown) <= 10 << 20
    assert (
        f"note: {200 - len(shown)} displays not kept here, too much rich output: the log has all of it"
        in note_lines(story.view)
    )


def test_a_figure_that_alone_is_too_big_is_its_text(story):
    story.show(0, {"text/plain": "<Figure>", "image/png": "A" * 11_000_000}).show(1, "small")
    assert [d.data for d in story.view.displays] == [{"text/plain": "<Figure>"}, {"text/plain": "small"}]
    assert story.view.displays.dropped == 1


@pytest.mark.parametrize("text", ["the same", "number {}"])
def test_the_latest_displays_of_each_rank_are_kept(story, text):
    story.show(1, "of another rank").show(0, "first", display_id="bar")
    for number in range(600):
        story.show(0, text.format(number))
        if number % 100 == 0:
            story.show(0, f"bar {number}", action="update", display_id="bar")
    shown = list(story.view.displays)
    assert len(shown) == 501
    assert [d.text for d in shown if d.ranks == (1,)] == ["of another rank"]
    assert shown[-1].text == text.format(599)
    assert "bar 500" in [d.text for d in shown]  # what is updated is not old
    assert story.view.displays.dropped == 101
    story.show(0, "", action="clear")
    assert [d.text for d in story.view.displays] == ["of another rank"]


def test_what_earlier_attempts_displayed_makes_room(story):
    story.show(0, {"image/png": "A" * 6_000_000})
    story.attempt = "a2"
    story.begin().show(0, {"image/png": "B" * 6_000_000})
    assert [d.data["image/png"][0] for d in story.view.displays] == ["B"]


@pytest.mark.parametrize("mime", ["text/plain", "text/markdown", "text/latex"])
def test_texts_that_are_shown_are_cut_and_say_how_long_they_were(story, mime):
    story.show(0, {mime: "x" * 5_000_000, "text/html": "y" * 50_000}, action="result")
    story.show(1, {mime: ["z" * 15_000, "z" * 15_000]}).show(2, "short", display_id="d")
    story.show(2, {mime: "u" * 30_000}, action="update", display_id="d")
    texts = [shown.data[mime] for shown in story.view.displays]
    assert texts[0] == "x" * 20_000 + "… (5000000 characters)"
    assert texts[1] == "z" * 20_000 + "… (30000 characters)"
    assert texts[2] == "u" * 20_000 + "… (30000 characters)"
    assert len(next(iter(story.view.displays)).data["text/html"]) == 50_000


def test_what_is_said_of_a_run_is_short_though_an_error_is_long(story):
    story.begin().error(1, "ValueError", "x" * 300_000).note("y" * 300_000).fail(by_run=(0, 2, 3))
    assert story.view.failure.headline.endswith("… (262144 characters)")
    told = bundle(story.view, now=T0, final=False)
    assert len(repr(told)) < 25_000


def test_a_display_that_is_updated_for_ever_takes_no_more_room(story):
    story.show(0, {"image/png": ""}, display_id="d")
    for number in range(200):
        story.show(0, {"image/png": "A" * 200_000 + str(number)}, action="update", display_id="d")
    (shown,) = story.view.displays
    assert shown.data["image/png"].endswith("199")
    assert story.view.displays.dropped == 0


# -- attempts


def test_a_new_attempt_closes_the_old_one_and_keeps_its_lines(story):
    story.begin().out(0, "first try\n").out(1, "open")
    story.show(0, "figure").error(0, "ValueError", "spot instance lost")
    story.attempt = "a2"
    story.begin().out(0, "second try\n")
    assert story.texts == [(0, "first try"), (1, "open"), (0, "second try")]
    assert story.view.failure is None
    assert [d.text for d in story.view.displays] == ["figure"]
    assert states(story) == ["running"] * 4
    assert "note: attempt 2 of this run begins here" in note_lines(story.view)


def test_late_text_of_an_earlier_attempt_is_kept(story):
    story.begin()
    late = dataclasses.replace(Story(4).out(0, "late\n").events[0], seq=99, node=1)
    failed = RankEvent(attempt="a1", node=1, seq=100, rank=0, state="ended", exit_code=1)
    story.attempt = "a2"
    story.begin()
    fold(story.view, late)
    fold(story.view, failed)
    assert (0, "late") in story.texts
    assert states(story) == ["running"] * 4


def test_a_run_of_several_instances_ends_when_the_first_says_so():
    story = Story(4, nnodes=2).begin()
    fold(story.view, RunEvent(attempt="a1", node=1, seq=1, phase="ended", outcome="succeeded"))
    assert not story.view.over
    story.succeed()
    assert story.view.over


# -- the first cause


def test_the_earliest_error_is_the_cause(story):
    """B42: secondary errors are folded away, whoever tells first."""
    story.begin()
    story.error(0, "RuntimeError", "Connection closed by peer [127.0.0.1]:4242", time=T0 + 2.01)
    story.error(
        3, "ValueError", "loss became nan at step 12", line=5, source="    raise ValueError(x)", time=T0 + 2
    )
    story.at(2.1).rank(3, "finished", ok=False).rank(3, "ended", exit_code=1)
    story.rank(0, "finished", ok=False).rank(0, "ended", exit_code=1)
    story.fail(by_run=(1, 2))
    failure = story.view.failure
    assert failure.headline == "rank 3 failed: ValueError: loss became nan at step 12"
    assert (failure.rank, failure.type, failure.line, failure.exit_code) == (3, "ValueError", 5, 1)
    assert (failure.same, failure.followers) == ((3,), (0, 1, 2))
    assert states(story) == ["failed", "ended", "ended", "failed"]
    lines = failure_text(story.view).split("\n")
    assert lines[:2] == [failure.headline, "cell line 5: raise ValueError(x)"]
    assert "stopped because of it: ranks 0-2" in lines
    assert lines[-1] == "log: /runs/abcd1234"


def test_a_crash_is_the_cause_though_others_heard_of_it_earlier(story):
    """A core dump takes its time; the peers see the closed connection at once."""
    story.begin().at(2).error(0, "RuntimeError", "[../gloo] Connection reset by peer")
    story.at(2.5).rank(1, "ended", signal=11).fail(by_run=(2, 3))
    assert story.view.failure.headline == "rank 1 crashed: SIGSEGV"


def test_equal_errors_of_all_ranks_are_one():
    """B48"""
    story = Story(8).begin()
    for rank in story.ranks:
        story.error(rank, "ModuleNotFoundError", "No module named 'this_module_is_missing'")
        story.error(
            rank, "ModuleNotFoundError", "No module named 'this_module_is_missing'", traceback=f"trace {rank}"
        )
    story.fail()
    failure = story.view.failure
    assert (
        failure.headline == "ranks 0-7 failed: ModuleNotFoundError: No module named 'this_module_is_missing'"
    )
    assert failure.same == tuple(range(8))
    assert failure.followers == ()
    assert failure_text(story.view).count("trace") == 1


def test_different_messages_of_one_type_are_grouped():
    """B48"""
    story = Story(8).begin()
    for rank in story.ranks:
        story.at(2 + rank / 100).error(rank, "RuntimeError", f"rank {rank}")
    story.fail()
    assert story.view.failure.headline == "rank 0 failed: RuntimeError: rank 0"
    assert "also RuntimeError on ranks 1-7" in failure_text(story.view)


def test_the_traceback_comes_after_the_error(story):
    story.begin().error(1, "ValueError", "no", line=3, time=T0 + 2)
    assert story.view.failure.traceback == ""
    story.error(1, "ValueError", "no", line=3, traceback="Traceback", time=T0 + 2)
    assert story.view.failure.traceback == "Traceback"


@pytest.mark.parametrize(
    ("end", "headline"),
    [
        ({"exit_code": 3}, "rank 1 exited with code 3 without finishing its cell (no Python traceback)"),
        ({"exit_code": 0}, "rank 1 exited with code 0 without finishing its cell (no Python traceback)"),
        ({"exit_code": -11}, "rank 1 crashed: SIGSEGV"),
        ({"signal": 6}, "rank 1 crashed: SIGABRT"),
        ({"signal": 9}, "rank 1 was killed: SIGKILL (if nobody did it: often the machine was out of memory)"),
        ({"signal": 10_000}, "rank 1 was ended by signal 10000"),
        ({}, "rank 1 exited with an unknown code without finishing its cell (no Python traceback)"),
    ],
)
def test_a_rank_that_ends_without_finishing_is_a_failure(story, end, headline):
    """B45, B46: whatever its exit code."""
    story.begin().at(2).rank(1, "ended", **end).fail(by_run=(0, 2, 3))
    assert story.view.failure.headline == headline
    assert story.view.failure.followers == (0, 2, 3)


def test_a_crash_shows_where_it_was(story):
    """B46: faulthandler's text."""
    story.begin().stacks(0, 'Fatal Python error: Segmentation fault\n  File "<cell>", line 3 in <module>')
    story.rank(0, "ended", signal=11).fail(by_run=(1, 2, 3))
    assert 'File "<cell>", line 3' in failure_text(story.view)


def test_a_rank_that_crashes_after_its_cell_is_a_failure(story):
    story.begin().rank(0, "finished", ok=True).rank(0, "ended", signal=11).fail(by_run=(1, 2, 3))
    assert story.view.failure.headline == "rank 0 crashed: SIGSEGV after its cell had finished"


@pytest.mark.parametrize(
    ("message", "code", "headline"),
    [("3", 3, "rank 2 called sys.exit(3)"), ("text", 1, "rank 2 called sys.exit(text)"), ("0", 0, None)],
)
def test_sys_exit(story, message, code, headline):
    """B27: zero is a quiet end of the rank."""
    story.begin().error(2, "SystemExit", message, code=code).rank(2, "finished", ok=code == 0)
    failure = story.view.failure
    assert (failure and failure.headline) == headline


def test_an_interrupt_is_no_failure(story):
    """B50"""
    story.begin().at(2).run("ending", "interrupted").rank(2, "heard")
    assert status_line(story.view, T0 + 2.5).startswith(
        "rank 2 is cleaning up (interrupt again to kill) · 4 ranks"
    )
    for rank in story.ranks:
        story.error(rank, "KeyboardInterrupt", "", code=130).rank(rank, "finished", ok=False)
        story.rank(rank, "ended", exit_code=130)
    story.run("ended", "interrupted")
    assert story.view.failure is None
    assert states(story) == ["ended"] * 4
    assert status_line(story.view, T0) == "interrupted · 4 ranks · torchrun · 2.0 s"


def test_what_fails_while_cleaning_up_is_a_note(story):
    story.begin().at(2).run("ending", "interrupted").rank(2, "heard")
    story.at(2.2).error(2, "OSError", "disk full").rank(2, "finished", ok=False).rank(2, "ended", exit_code=1)
    for rank in (0, 1, 3):
        story.rank(rank, "ended", signal=9, by_run=True)
    story.run("ended", "interrupted")
    assert story.view.failure is None
    assert "note: rank 2 then raised OSError: disk full" in note_lines(story.view)


def test_an_interrupt_as_the_only_error_of_a_failed_run_is_its_cause(story):
    story.begin().error(1, "KeyboardInterrupt", "").fail(by_run=(0, 2, 3))
    assert story.view.failure.headline == "rank 1 failed: KeyboardInterrupt"


def test_a_timeout_names_who_had_not_finished_and_where_they_were(story):
    """B54"""
    story.begin().rank(1, "finished", ok=True).rank(1, "ended", exit_code=0)
    story.at(6).run("ending", "timeout", reason="5 s were up", unfinished=(0, 2))
    story.stacks(0, 'File "<cell>", line 5').stacks(2, 'File "<cell>", line 4')
    for rank in (0, 2, 3):
        story.rank(rank, "ended", signal=15, by_run=True)
    story.run("ended", "timeout", unfinished=(0, 2))
    assert status_line(story.view, T0).startswith("timed out: ranks 0, 2 unfinished · 4 ranks")
    failure = story.view.failure
    assert failure.headline == "timed out: ranks 0, 2 had not finished (5 s were up)"
    assert failure.unfinished == (0, 2)
    text = failure_text(story.view)
    assert text.index("rank 0:") < text.index("line 5") < text.index("rank 2:") < text.index("line 4")


def test_a_launcher_that_does_not_start(story):
    story.run("starting").run("ended", "failed", reason="mpirun ended with code 1: not enough slots")
    assert story.view.failure.headline == "mpirun ended with code 1: not enough slots"
    assert status_line(story.view, T0).startswith("failed: no rank ran")


def test_a_lost_run_says_why(story):
    story.begin().rank(0, "ended").run("ended", "lost", reason="the agent of instance 1 has died")
    assert failure_text(story.view).startswith("the agent of instance 1 has died")
    assert not story.view.ok


def lost(story, *, reason="the agent of instance 1 is gone"):
    """End a run that lost an instance."""
    return story.run("ending", "lost", reason=reason).at(9).run("ended", "lost", reason=reason)


@pytest.mark.parametrize(
    ("message", "time"),
    [
        ("Connection closed by peer [10.0.0.1]:4242", T0 + 2.3),
        ("Connection closed by peer [10.0.0.1]:4242", T0 + 1.9),  # a peer may notice before the agent does
        ("the all-reduce has failed", T0 + 2.3),
    ],
)
def test_what_ranks_say_of_a_lost_instance_is_not_the_cause(message, time):
    story = Story(4, nnodes=2).begin().error(0, "RuntimeError", message, time=time)
    lost(story.at(2))
    failure = story.view.failure
    assert (failure.headline, failure.rank) == ("the agent of instance 1 is gone", None)
    assert failure_text(story.view).startswith(
        "the agent of instance 1 is gone\nstopped because of it: rank 0\n"
    )
    assert status_line(story.view, T0).startswith("lost: the agent of instance 1 is gone · 4 ranks")


def test_an_error_from_before_an_instance_was_lost_is_the_cause():
    story = Story(4, nnodes=2).begin().error(3, "ValueError", "no", time=T0 + 1.5)
    lost(story.error(0, "RuntimeError", "Connection reset by peer", time=T0 + 1.6).at(2))
    assert story.view.failure.headline == "rank 3 failed: ValueError: no"
    assert "note: the agent of instance 1 is gone" in note_lines(story.view)


def test_a_status_line_has_no_room_for_a_long_reason():
    story = lost(Story(2).begin(), reason="the launcher said: " + "x" * 200)
    assert status_line(story.view, T0).startswith("lost · 2 ranks")


@pytest.mark.parametrize(
    ("end", "headline"),
    [
        (
            {"exit_code": 1},
            "ranks 0-1 exited with code 1 without finishing their cell (no Python traceback)",
        ),
        (
            {"signal": 9},
            "ranks 0-1 were killed: SIGKILL (if nobody did it: often the machine was out of memory)",
        ),
        ({"signal": 15}, "ranks 0-1 were ended by SIGTERM"),
        ({"signal": 11}, "ranks 0-1 crashed: SIGSEGV"),
    ],
)
def test_equal_ends_of_several_ranks_are_told_of_several(end, headline):
    story = Story(2).begin().at(2).rank(0, "ended", **end).rank(1, "ended", **end).fail()
    assert (story.view.failure.headline, story.view.failure.same) == (headline, (0, 1))


def test_several_ranks_that_end_badly_after_their_cell_are_told_of_several():
    story = Story(2).begin()
    for rank in story.ranks:
        story.rank(rank, "finished", ok=True).rank(rank, "ended", exit_code=3)
    assert story.fail().view.failure.headline == "ranks 0-1 exited with code 3 after their cell had finished"


def test_a_function_is_no_cell():
    story = Story(2, source="# jupyter_ddp.launch(train)\n_function(*_args, **_kwargs)").begin().at(2)
    story.rank(0, "ended", exit_code=1).rank(1, "ended", exit_code=0, by_run=True).fail()
    told = failure_text(story.view)
    assert "rank 0 exited with code 1 without finishing its function" in told
    assert "cell" not in told


@pytest.mark.parametrize(
    ("where", "place"), [("", "cell line 11: raise no"), ("train.py", "train.py line 11: raise no")]
)
def test_the_place_says_what_its_line_is_a_line_of(where, place):
    story = Story(2).begin().error(1, "ValueError", "no", line=11, where=where, source="  raise no").fail()
    assert story.view.failure.place == place
    assert place in failure_text(story.view).split("\n")


def test_what_the_agent_has_to_say_besides_the_cause_is_a_note(story):
    story.begin().error(1, "ValueError", "no").run("ended", "failed", reason="rank 2 could not be ended")
    assert story.view.failure.headline == "rank 1 failed: ValueError: no"
    assert "note: rank 2 could not be ended" in note_lines(story.view)


def test_a_stopped_run_says_by_what(story):
    story.begin().run("ended", "stopped", reason="the notebook's kernel was gone")
    assert status_line(story.view, T0).startswith("stopped: the notebook's kernel was gone · 4 ranks")


def test_late_news_do_not_revive_a_rank(story):
    story.begin().rank(0, "finished", ok=True).rank(0, "running").rank(0, "heard")
    assert states(story)[0] == "finished"


def test_notes_of_ranks_are_said_once(story):
    for rank in (0, 1, 2):
        story.note("a CUDA tensor became a CPU one", rank=rank)
    story.note("payload 1.2 GB", level="warning")
    assert note_lines(story.view) == [
        "note: ranks 0-2: a CUDA tensor became a CPU one",
        "warning: payload 1.2 GB",
    ]


def all_finished(story):
    story.begin()
    for rank in story.ranks:
        story.rank(rank, "finished", ok=True)


@pytest.mark.parametrize(
    ("tell", "status"),
    [
        (lambda s: s, "starting 4 ranks · torchrun · 1.0 s"),
        (lambda s: s.run("queued"), "queued · 4 ranks · torchrun · 1.0 s"),
        (lambda s: s.run("starting"), "starting 4 ranks · torchrun · 1.0 s"),
        (lambda s: s.run("installing"), "installing · 4 ranks · torchrun · 1.0 s"),
        (
            lambda s: s.run("rendezvous").rank(0, "started"),
            "starting, 1 of 4 ranks have connected · torchrun · 1.0 s",
        ),
        (lambda s: s.begin(), "running on 4 ranks · torchrun · 1.0 s"),
        (
            lambda s: s.begin().rank(0, "finished", ok=True),
            "running, 1 of 4 ranks finished · torchrun · 1.0 s",
        ),
        (all_finished, "finishing · 4 ranks · torchrun · 1.0 s"),
        (lambda s: s.begin().error(1, "E", ""), "failing: rank 1 · 4 ranks · torchrun · 1.0 s"),
        (lambda s: s.begin().run("ending", "stopped"), "stopping · 4 ranks · torchrun · 1.0 s"),
        (lambda s: s.succeed(3725), "succeeded on 4 ranks · torchrun · 1 h 2 min"),
        (lambda s: s.run("ended", "stopped", time=T0 + 125), "stopped · 4 ranks · torchrun · 2 min 5 s"),
    ],
)
def test_status_lines(story, tell, status):
    tell(story)
    assert status_line(story.view, T0 + 1) == status


def test_the_status_line_says_what_is_not_usual():
    story = Story(8, nnodes=2, backend="sagemaker", protocol="mpirun", name="big one")
    assert (
        status_line(story.view, T0) == "starting 8 ranks · 2 instances · sagemaker · mpirun · 0.0 s · big one"
    )
