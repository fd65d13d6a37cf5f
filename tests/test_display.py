"""How a run is published while it goes on: how often, how much, in what order; in a notebook and in a terminal."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_ddp import display
from jupyter_ddp.bundles import load_bundle
from jupyter_ddp.display import NotebookPublisher, TerminalPublisher
from jupyter_ddp.display.pack import BURST, BYTES, MOST_PENDING, RATE, Packer, printable
from jupyter_ddp.events import DisplayEvent, NoteEvent, OutEvent
from jupyter_ddp.render import MIME
from tests.story import T0, Story


class Page:
    """What a page would have received, with the time of each."""

    def __init__(self, *, kernel=True):
        self.now = T0
        self.outputs, self.messages, self.opened = [], [], []
        self.publisher = NotebookPublisher(
            display=self._display, comm=self._comm if kernel else lambda *_: None, clock=lambda: self.now
        )

    def _display(self, data):
        self.update(data, raw=True)
        return self

    def update(self, data, *, raw):
        assert raw
        json.dumps(data).encode()
        self.outputs.append((self.now, data))

    def _comm(self, comm_id, data):
        self.opened.append((comm_id, data))
        return self

    def send(self, data):
        json.dumps(data, ensure_ascii=False).encode()
        self.messages.append((self.now, data))

    @property
    def entries(self):
        return [entry for _, message in self.messages for entry in message.get("e", [])]

    @property
    def last(self):
        return self.outputs[-1][1]


class Watched:
    """A story that is published as it is told."""

    def __init__(self, world_size=2, **page):
        self.story = Story(world_size)
        self.page = Page(**page)
        self._fed = 0
        self.page.publisher.start(self.story.view)

    def feed(self):
        events, self._fed = self.story.events[self._fed :], len(self.story.events)
        self.page.publisher.feed(self.story.view, events, self.page.now)

    def wait(self, seconds, step=None):
        """Let time pass; feed whenever the publisher wants it, or after each step."""
        end = self.page.now + seconds
        while self.page.now < end:
            due = self.page.publisher.due(self.page.now)
            assert due is not None
            assert due >= 0
            self.page.now = min(end, self.page.now + max(min(due, step or due), 0.001))
            self.feed()

    def finish(self):
        self.feed()
        self.page.publisher.finish(self.story.view, self.page.now)


@pytest.fixture
def watched():
    return Watched()


# -- the output


def test_the_first_output_comes_at_once_and_the_final_one_once(watched):
    assert len(watched.page.outputs) == 1
    watched.story.begin().out(0, "hello\n").succeed()
    watched.finish()
    finals = [data for _, data in watched.page.outputs if data[MIME]["final"]]
    assert finals == [watched.page.last]
    assert "[0] hello" in watched.page.last["text/plain"]


def test_outputs_come_less_often_with_time(watched):
    watched.story.begin()
    watched.wait(0.5)
    counts = []
    for seconds in (9, 100, 100):
        before, end = len(watched.page.outputs), watched.page.now + seconds
        while watched.page.now < end:
            watched.story.out(0, "x\n")
            watched.feed()
            watched.page.now += 0.05
        counts.append((len(watched.page.outputs) - before) / seconds)
    assert counts[0] <= 5
    assert counts[0] > 3
    assert 0.5 < counts[1] <= 1.05
    assert 0.05 < counts[2] < 0.35


def test_what_matters_comes_at_once(watched):
    watched.story.begin()
    watched.wait(300)
    before = len(watched.page.outputs)
    watched.story.error(1, "ValueError", "no")
    watched.feed()
    watched.wait(0.06)
    assert len(watched.page.outputs) == before + 1
    assert "rank 1 failed: ValueError: no" in watched.page.last["text/plain"]


def test_many_changes_at_once_are_one_output(watched):
    watched.wait(1)
    before = len(watched.page.outputs)
    for rank in (0, 1):
        for state in ("started", "running"):
            watched.story.rank(rank, state)
            watched.feed()
            watched.page.now += 0.001
    watched.wait(0.1)
    assert len(watched.page.outputs) - before <= 2


def test_big_outputs_come_slowly(watched):
    watched.story.begin().show(0, {"image/png": "A" * 1_000_000})
    watched.feed()
    watched.wait(0.3)
    before = len(watched.page.outputs)
    end = watched.page.now + 9
    while watched.page.now < end:
        watched.story.out(0, "x\n")
        watched.feed()
        watched.page.now += 0.05
    assert len(watched.page.outputs) - before <= 9 * 500_000 / 1_000_000 + 1


def test_figures_are_not_sent_again_and_again_when_only_lines_come(watched):
    watched.story.begin().show(0, {"image/png": "A" * 250_000})
    watched.feed()
    watched.wait(1)
    before, end = len(watched.page.outputs), watched.page.now + 20
    while watched.page.now < end:
        watched.story.out(0, "x\n")
        watched.feed()
        watched.page.now += 0.05
    again = [data for _, data in watched.page.outputs[before:]]
    assert len(again) <= 20 * 50_000 / 250_000 + 1
    assert all("A" * 250_000 in data["text/html"] for data in again), "a figure must not vanish meanwhile"


def test_figures_that_change_are_shown_as_they_change(watched):
    watched.story.begin().show(0, {"image/png": ""}, display_id="d")
    watched.feed()
    watched.wait(1)
    before = len(watched.page.outputs)
    for number in range(9):
        picture = {"image/png": str(number) + "A" * 100_000}
        watched.story.show(0, picture, action="update", display_id="d")
        watched.feed()
        watched.page.now += 1
    assert len(watched.page.outputs) - before >= 8


def test_what_matters_waits_no_more_than_a_second_for_big_figures(watched):
    watched.story.begin().show(0, {"image/png": "A" * 10_000_000})
    watched.feed()
    watched.wait(0.3)
    assert "image/png" in watched.page.last["text/html"]
    watched.story.rank(1, "finished", ok=True)
    watched.feed()
    watched.wait(1)
    assert "running, 1 of 2 ranks finished" in watched.page.last["text/plain"]
    watched.story.succeed()
    watched.finish()
    assert "A" * 10_000_000 in watched.page.last["text/html"]


def test_the_time_goes_on_when_nothing_happens(watched):
    watched.story.begin()
    watched.wait(0.5)
    before = watched.page.last["text/plain"]
    watched.wait(3)
    assert watched.page.last["text/plain"] != before


def test_a_clock_that_is_set_back_does_not_stop_it(watched):
    watched.story.begin().out(0, "one\n")
    watched.wait(1)
    watched.page.now -= 3_600
    watched.story.out(0, "two\n")
    watched.feed()
    watched.wait(11)
    assert "[0] two" in watched.page.last["text/plain"]


def test_rich_output_is_in_the_json_when_it_changed_and_in_the_end(watched):
    watched.story.begin().show(0, "figure")
    watched.wait(0.3)
    watched.story.out(0, "x\n")
    watched.wait(0.5)
    watched.story.succeed()
    watched.finish()
    have = ["displays" in data[MIME] and len(data[MIME]["displays"]) for _, data in watched.page.outputs]
    assert have[1] == have[-1] == 1
    assert have[2] is False


# -- live messages


def test_the_comm_has_the_id_of_the_run(watched):
    ((comm_id, data),) = watched.page.opened
    assert comm_id == "jupyter_ddp.run:abcd1234"
    assert watched.page.outputs[0][1][MIME]["seq"] == data["seq"]


def test_events_are_packed_by_rank(watched):
    for rank, text, stream in (
        (0, "a\n", "stdout"),
        (1, "b\n", "stdout"),
        (0, "c\n", "stdout"),
        (0, "d\n", "stderr"),
    ):
        watched.story.out(rank, text, stream)
    watched.story.note("careful").out(0, "e\n")
    watched.feed()
    first, second, third, note, last = watched.page.entries
    assert [first, second, third, last] == [
        [0, 0, "a\nc\n"],
        [1, 0, "b\n"],
        [0, 1, "d\n"],
        [0, 0, "e\n"],
    ] or ([first, second, third] == [[0, 0, "a\nc\n"], [1, 0, "b\n"], [0, 1, "d\n"]])
    assert note["kind"] == "note"
    assert note["text"] == "careful"


def test_lines_that_come_seldom_go_at_once(watched):
    for number in range(20):
        watched.page.now += 0.1
        watched.story.out(0, f"{number}\n")
        watched.feed()
    assert [(round(at - T0, 1), message["e"]) for at, message in watched.page.messages] == [
        (round(0.1 * (n + 1), 1), [[0, 0, f"{n}\n"]]) for n in range(20)
    ]


def test_messages_have_a_rate_and_lose_nothing_below_it(watched):
    for number in range(5_000):
        watched.story.out(number % 2, f"line {number}\n")
        watched.feed()
        watched.page.now += 0.0005
    watched.wait(0.1)
    assert len(watched.page.messages) <= BURST + RATE * 2.6 + 1
    assert sum(entry[2].count("\n") for entry in watched.page.entries) == 5_000


def test_messages_are_numbered_without_a_gap_and_outputs_say_how_far(watched):
    for number in range(200):
        watched.story.out(0, f"{number}\n")
        watched.feed()
        watched.page.now += 0.01
    watched.finish()
    seqs = [message["seq"] for _, message in watched.page.messages]
    start = watched.page.opened[0][1]["seq"]
    assert seqs == list(range(start + 1, start + 1 + len(seqs)))
    assert watched.page.last[MIME]["seq"] == seqs[-1]


def test_numbers_go_on_when_the_run_is_attached_again(watched):
    watched.story.out(0, "x\n")
    watched.feed()
    again = Watched()
    again.page.now = watched.page.now + 1
    again.page.publisher.start(again.story.view)
    assert again.page.opened[-1][1]["seq"] > watched.page.messages[-1][1]["seq"]


def test_too_many_bytes_are_counted_not_sent(watched):
    """B61"""
    for _ in range(100):
        watched.story.out(0, "x" * 99_999 + "\n")
        watched.feed()
        watched.page.now += 0.02
    watched.wait(0.1)
    sent = sum(len(json.dumps(message)) for _, message in watched.page.messages)
    skipped = sum(message.get("skip", 0) for _, message in watched.page.messages)
    assert sent <= BYTES * 3.2
    assert skipped > 50
    assert skipped + sum(entry[2].count("\n") for entry in watched.page.entries) == 100


def test_what_waits_is_bounded():
    packer = Packer(0.0)
    for _ in range(BURST):
        packer.add(NoteEvent(text="x"))
        packer.message(0.0)
    for number in range(50):
        packer.add(OutEvent(rank=0, stream="stdout", offset=number, length=1, text="y" * 100_000))
    assert len(json.dumps(packer.message(1.0))) < MOST_PENDING


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 0.5), st.integers(0, 3), st.text(max_size=30)), max_size=60))
def test_nothing_is_lost_when_there_is_room(moments):
    packer = Packer(0.0)
    now, told, got = 0.0, dict.fromkeys(range(4), ""), dict.fromkeys(range(4), "")
    messages = []
    for pause, rank, text in moments:
        now += pause
        told[rank] += text
        packer.add(OutEvent(rank=rank, stream="stdout", offset=0, length=1, text=text))
        messages.append(packer.message(now))
        due = packer.due(now)
        assert due is None or due <= 1 / RATE
    messages.append(packer.message(now, last=True))
    for message in filter(None, messages):
        assert "skip" not in message
        for rank, _, text in message["e"]:
            got[rank] += text
    assert got == told


def test_big_bundles_come_with_the_output_alone(watched):
    watched.story.show(0, {"image/png": "A" * 300_000}).show(0, {"text/plain": "small"})
    watched.feed()
    big, small = watched.page.entries
    assert (big["data"], big["later"]) == ({}, True)
    assert small["data"] == {"text/plain": "small"}


def test_without_a_kernel_there_are_no_messages():
    watched = Watched(kernel=False)
    watched.story.begin().out(0, "hello\n").succeed()
    watched.feed()
    assert watched.page.publisher.due(watched.page.now) is not None
    watched.finish()
    assert watched.page.messages == []
    assert "[0] hello" in watched.page.last["text/plain"]


def test_text_that_utf8_cannot_say_is_replaced(watched):
    watched.story.note("bad \ud800").error(0, "E", "worse \udfff").show(0, {"text/plain": "\ud800"})
    watched.finish()
    assert "bad ?" in watched.page.last["text/plain"]
    json.dumps(watched.page.messages, ensure_ascii=False).encode()


def test_what_utf8_can_say_is_left_alone():
    data = {"a": ["é🙂", 1, None]}
    assert printable(data) is data


# -- bundles in files

DEEP = json.loads("[" * 300 + "]" * 300)


@pytest.mark.parametrize(
    ("content", "data"),
    [
        ({"data": {"text/plain": "x"}, "metadata": {"a": 1}}, {"text/plain": "x"}),
        ({"data": 1}, {"text/plain": "<display that cannot be read: displays/0-1.json>"}),
        ([], {"text/plain": "<display that cannot be read: displays/0-1.json>"}),
        ({"data": {"a": DEEP}}, {"text/plain": "<display that cannot be read: displays/0-1.json>"}),
        (None, {"text/plain": "<display that cannot be read: displays/0-1.json>"}),
    ],
)
def test_bundles_in_files(tmp_path, content, data):
    (tmp_path / "displays").mkdir()
    if content is not None:
        (tmp_path / "displays" / "0-1.json").write_text(json.dumps(content))
    event = DisplayEvent(rank=0, action="display", file="displays/0-1.json")
    assert load_bundle(event, tmp_path).data == data


def test_bundles_outside_the_run_are_not_read(tmp_path):
    (tmp_path / "secret.json").write_text('{"data": {"text/plain": "secret"}}')
    (tmp_path / "run").mkdir()
    event = load_bundle(DisplayEvent(rank=0, action="display", file="../secret.json"), tmp_path / "run")
    assert "secret" not in event.data["text/plain"].replace("secret.json", "")


# -- in a terminal


class Watching(Watched):
    def __init__(self, **facts):
        self.story = Story(**facts)
        self.out = io.StringIO()
        self.page = self
        self.now = T0 + 1
        self.publisher = TerminalPublisher(out=self.out, clock=lambda: self.now)
        self._fed = 0
        self.publisher.start(self.story.view)

    @property
    def lines(self):
        return self.out.getvalue().split("\n")[:-1]


def test_lines_are_printed_as_they_come():
    watched = Watching(world_size=2)
    watched.story.begin().out(0, "one\n").out(1, "careful\n", "stderr").out(1, "op")
    watched.feed()
    assert watched.publisher.due(watched.now) is None
    assert watched.lines == ["[0] one", "[1!] careful"]
    watched.story.out(1, "en\n").show(0, "42", action="result").succeed()
    watched.finish()
    assert watched.lines[2:] == ["[1] open", "[0] 42", "succeeded on 2 ranks · torchrun · 3.0 s"]


def test_what_the_run_does_is_said_when_nothing_else_is_to_be_seen():
    watched = Watching(world_size=2)
    watched.feed()
    assert (watched.publisher.due(watched.now), watched.lines) == (2.0, [])
    watched.now += 2
    watched.feed()
    watched.now += 1
    watched.story.begin()
    watched.feed()
    assert watched.lines == ["starting 2 ranks · torchrun · 3.0 s"]
    watched.now += 1
    watched.feed()
    assert watched.lines[1:] == ["running on 2 ranks · torchrun · 5.0 s"]
    assert watched.publisher.due(watched.now) is None
    watched.story.out(0, "one\n").succeed(6)
    watched.finish()
    assert watched.lines[2:] == ["[0] one", "succeeded on 2 ranks · torchrun · 6.0 s"]


def test_no_line_of_a_rank_stands_before_the_news_that_it_runs():
    watched = Watching(world_size=2)
    watched.now += 2
    watched.feed()
    watched.story.out(1, "early\n").begin()
    watched.feed()
    watched.now += 10
    watched.feed()
    assert watched.lines == ["starting 2 ranks · torchrun · 3.0 s", "[1] early"]


def test_an_end_is_said_at_once():
    watched = Watching(world_size=2)
    watched.story.begin().run("ending", "stopped").rank(0, "heard")
    watched.feed()
    assert watched.lines == ["rank 0 is cleaning up (interrupt again to kill) · 2 ranks · torchrun · 1.0 s"]


@pytest.mark.parametrize(
    ("message", "lines"),
    [
        ("", ["[1!] KeyboardInterrupt"]),
        ("no", ["[1!] KeyboardInterrupt: no"]),
        ("no\nnever", ["[1!] KeyboardInterrupt: no", "[1!] never"]),
    ],
)
def test_an_error_is_its_type_and_its_text_with_a_label_before_each_line(message, lines):
    watched = Watching(world_size=2)
    watched.story.begin().error(1, "KeyboardInterrupt", message)
    watched.feed()
    assert watched.lines == lines


def test_an_error_stands_below_what_its_rank_has_written():
    watched = Watching(world_size=2)
    watched.story.begin().out(1, "before\n").error(1, "ValueError", "no").out(1, "after\n")
    watched.feed()
    assert watched.lines[0] == "[1] before"


def test_a_bar_is_printed_once():
    """B59"""
    watched = Watching(world_size=1)
    for percent in range(0, 101, 5):
        watched.story.out(0, f"\r{percent}%", "stderr")
        watched.feed()
    watched.story.out(0, "\n", "stderr").out(0, "no newline")
    watched.finish()
    assert [line for line in watched.lines if line.startswith("[0")] == ["[0!] 100%", "[0] no newline"]


def test_only_the_ranks_asked_for_are_printed():
    watched = Watching(world_size=2, config={"show": [1]})
    watched.story.out(0, "zero\n").out(1, "one\n").show(0, "figure")
    watched.finish()
    assert [line for line in watched.lines if line.startswith("[")] == ["[1] one"]


def test_lines_of_a_flood_that_are_left_out_are_counted_where_they_would_stand():
    watched = Watching(world_size=2)
    watched.story.out(0, "first\n")
    flood = {"rank": 0, "stream": "stdout", "text": None, "lines": 20_000}
    for _ in range(2):  # the log may be read twice
        watched.story.tell(OutEvent, **flood, offset=6, length=1_000_000)
    watched.story.out(1, "other\n")
    watched.feed()
    watched.story.tell(OutEvent, rank=0, stream="stdout", offset=1_000_006, length=4, text="end\n")
    watched.story.tell(OutEvent, **flood, offset=1_000_010, length=1_000_000)
    watched.finish()
    cut = "… 20,000 lines not shown here; the whole log: /runs/abcd1234"
    assert [line for line in watched.lines if line.startswith("[")] == [
        "[0] first",
        f"[0] {cut}",
        "[1] other",
        "[0] end",
        f"[0] {cut}",
    ]


def test_a_failing_rank_is_shown_though_others_were_asked_for():
    watched = Watching(world_size=2, config={"show": [0]})
    watched.story.begin().out(0, "zero\n").out(1, "about to fail\n").out(1, "op", "stderr")
    watched.story.error(1, "ValueError", "no").fail(by_run=(0,))
    watched.finish()
    at = watched.lines.index("last lines of rank 1:")
    assert watched.lines[at + 1 : at + 3] == ["[1] about to fail", "[1!] op"]
    assert watched.lines[-1].startswith("failed: rank 1")


def test_a_failing_rank_that_was_shown_is_not_shown_twice():
    watched = Watching(world_size=2)
    watched.story.begin().out(1, "about to fail\n").error(1, "ValueError", "no").fail(by_run=(0,))
    watched.finish()
    assert watched.lines.count("[1] about to fail") == 1


def test_a_repr_of_megabytes_is_cut_in_a_terminal():
    watched = Watching(world_size=1)
    watched.story.show(0, "x" * 5_000_000, action="result").show(0, {"text/plain": ["a\n", "b\n"]})
    watched.finish()
    assert "[0] " + "x" * 20_000 + "… (5000000 characters)" in watched.lines
    assert watched.lines[-3:-1] == ["[0] a", "[0] b"]


def test_doubled_text_is_printed_once():
    watched = Watching(world_size=1)
    watched.story.out(0, "one\n")
    watched.story.events += watched.story.events
    watched.finish()
    assert watched.lines.count("[0] one") == 1


def test_a_terminal_that_cannot_say_it_gets_a_question_mark():
    raw = io.BytesIO()
    watched = Watching(world_size=1)
    watched.publisher = TerminalPublisher(out=io.TextIOWrapper(raw, encoding="ascii"), clock=lambda: T0)
    watched.publisher.start(watched.story.view)
    watched.story.out(0, "é漢\n")
    watched.finish()
    assert b"[0] ??\n" in raw.getvalue()


def test_without_ipython_a_terminal_shows_the_run():
    assert isinstance(display.publisher(), TerminalPublisher)


@pytest.mark.kernel
def test_a_real_kernel_carries_it(tmp_path):
    """One output, updated in place, and messages under the run's own comm id."""
    code = textwrap.dedent(
        """
        import sys, time
        sys.path.insert(0, {root!r})
        from tests.story import Story
        from jupyter_ddp.display import publisher
        story, shown = Story(2), publisher()
        shown.start(story.view)
        told = len(story.events)
        story.begin().out(0, "hello\\n").show(1, "figure")
        shown.feed(story.view, story.events, time.time())
        story.succeed()
        shown.finish(story.view, time.time())
        del shown
        import gc; gc.collect()
        """
    ).format(root=str(__import__("pathlib").Path(__file__).parents[1]))
    script = textwrap.dedent(
        """
        import json, sys
        from jupyter_client.manager import start_new_kernel
        manager, client = start_new_kernel()
        seen = []
        client.execute_interactive(sys.argv[1], timeout=60, output_hook=lambda m: seen.append([m["msg_type"], m["content"]]))
        client.stop_channels(); manager.shutdown_kernel(now=True)
        print(json.dumps(seen))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    seen = json.loads(done.stdout.splitlines()[-1])
    kinds = [kind for kind, _ in seen]
    assert "error" not in kinds
    assert kinds.count("display_data") == 1
    assert kinds.count("update_display_data") >= 1
    assert {"comm_open", "comm_close"}.isdisjoint(kinds), (
        "front ends that do not know the target would complain"
    )
    messages = [content for kind, content in seen if kind == "comm_msg"]
    assert {message["comm_id"] for message in messages} == {"jupyter_ddp.run:abcd1234"}
    entries = [entry for message in messages for entry in message["data"]["e"]]
    assert [0, 0, "hello\n"] in entries
    final = [content for kind, content in seen if kind == "update_display_data"][-1]
    assert final["data"][MIME]["final"]
