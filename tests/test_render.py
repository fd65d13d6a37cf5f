"""A run as text, as HTML and as JSON: what stays in the notebook, and what stands there while it runs."""

from __future__ import annotations

import base64
import html as html_module
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jupyter_ddp.render import MIME, bundle, failure_text, plain
from jupyter_ddp.render.snapshot import FINAL_COLUMNS, LIVE_COLUMNS
from jupyter_ddp.view import new_view
from jupyter_ddp.view.summary import status_line
from jupyter_ddp.words import duration_text, label, ranks_named, ranks_text, size_text, table_text
from tests.story import T0, Story

GOLDEN = Path(__file__).parent / "golden"
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n not really").decode()


class Balance(HTMLParser):
    """Fails on a tag that is closed without being open, or the other way round."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes = [], set(), set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check_html(text):
    parser = Balance()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def text_of(html):
    return html_module.unescape(re.sub(r"<[^>]+>", "", html))


def trained():
    """Four ranks that train, show a figure and a result."""
    story = Story(4).begin().at(1.2)
    for rank in story.ranks:
        story.out(rank, f"epoch 1 \x1b[32mloss {0.5 - rank / 10:.1f}\x1b[0m\n")
        story.out(rank, "\r 50%|##  |", "stderr")
    story.out(2, "\rUserWarning: <careful>\n", "stderr")
    for rank in story.ranks:
        story.show(rank, {"text/plain": "<Figure size 640x480 with 1 Axes>", "image/png": PNG + "\n"})
        story.out(rank, "\r100%|####|\n", "stderr")
    return story


def failed():
    story = trained().at(2)
    trace = 'Traceback (most recent call last):\n  File "<cell>", line 5\n\x1b[31mValueError\x1b[0m: a < b'
    story.error(3, "ValueError", "a < b", line=5, source="    assert_less(a, b)", traceback=trace)
    story.rank(3, "finished", ok=False).rank(3, "ended", exit_code=1)
    return story.note("process 12 (sleep 120) was left behind", level="warning").fail(by_run=(0, 1, 2))


def floating(data, precision=6):
    return json.loads(json.dumps(data), parse_float=lambda number: round(float(number), precision))


@pytest.mark.parametrize(
    ("name", "story", "final"),
    [("running", trained, False), ("succeeded", lambda: trained().succeed(), True), ("failed", failed, True)],
)
def test_golden_bundles(name, story, final):
    """B79: diff-friendly; the page's tests read the same files. UPDATE_GOLDEN=1 writes them anew."""
    told = bundle(story().view, now=T0 + 9, final=final, seq=7)
    path = GOLDEN / f"bundle-{name}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(json.dumps(told, indent=1) + "\n")
    assert floating(told) == floating(json.loads(path.read_text()))


def test_text_is_made_for_people_and_for_grep():
    lines = plain(failed().view, now=T0).split("\n")
    assert lines[0] == "failed: rank 3 · 4 ranks · torchrun · 3.0 s"
    assert "[0] epoch 1 \x1b[32mloss 0.5\x1b[0m" in lines
    assert "[0!] 100%|####|" in lines
    assert "[0-3] <Figure size 640x480 with 1 Axes>" in lines
    assert lines.index("rank 3 failed: ValueError: a < b") > lines.index(
        "[0-3] <Figure size 640x480 with 1 Axes>"
    )
    assert lines[-1] == "log: /runs/abcd1234"


def test_blank_lines_and_tables_keep_their_shape():
    story = Story(2).begin().out(0, "a\n\nb\n").show(1, "   x  y\n0  1  2", action="result").succeed()
    assert plain(story.view, now=T0).split("\n")[1:] == [
        "[0] a",
        "[0] ",
        "[0] b",
        "[1]    x  y",
        "[1] 0  1  2",
    ]


def test_a_cleared_bar_leaves_no_line():
    story = Story(1).begin().out(0, "\r50%\r   \r", "stderr").succeed()
    assert plain(story.view, now=T0) == "succeeded on 1 rank · torchrun · 3.0 s"


def test_the_index_says_whose_the_lines_are():
    story = failed()
    told = bundle(story.view, now=T0, final=True)
    lines = told["text/plain"].split("\n")[1:]
    for rank, stream, count in told[MIME]["index"]:
        mine, lines = lines[:count], lines[count:]
        label = {0: f"[{rank}] ", 1: f"[{rank}!] ", 2: "["}[stream]
        assert all(line.startswith(label) for line in mine)
    assert lines[:2] == ["", "rank 3 failed: ValueError: a < b"]


def test_what_was_cut_is_said_where_it_was_cut():
    """B61"""
    story = Story(1, output_cap=8_000).begin()
    for number in range(500):
        story.out(0, f"line {number} " + "x" * 60 + "\n")
    told = bundle(story.succeed().view, now=T0, final=True)
    lines = told["text/plain"].split("\n")
    (cut,) = (number for number, line in enumerate(lines) if line.startswith("… "))
    assert lines[cut] == f"… {story.view.lines.cut} lines not shown here; the whole log: /runs/abcd1234"
    assert lines[cut - 1].startswith("[0] line ")
    assert [None, 2, 1] in told[MIME]["index"]
    assert told[MIME]["cut"] == story.view.lines.cut
    shown = [line for line in text_of(told["text/html"]).split("\n") if "] line" in line]
    assert len(shown) == 100
    assert f"… {500 - 100} lines not shown here" in told["text/html"]


def test_lines_that_only_stand_further_up_are_no_loss():
    story = Story(1).begin().out(0, "line\n" * 25)
    told = bundle(story.view, now=T0, final=False)
    for mime in ("text/plain", "text/html"):
        assert "… 5 earlier lines" in told[mime]
        assert "not shown" not in told[mime]


def test_a_flood_from_the_first_line_on_is_said_at_the_top():
    story = Story(1).begin()
    story.view.lines.skip(9)
    assert plain(story.view, now=T0).split("\n")[1].startswith("… 9 lines not shown here")
    story.out(0, "end\n")
    assert plain(story.view, now=T0).split("\n")[1].startswith("… 9 lines not shown here")


def test_what_stands_there_while_512_ranks_run_is_small():
    story = Story(512, nnodes=64, name="big run").begin()
    for rank in story.ranks:
        story.out(rank, f"{'x' * 100}\n" * 30)
        story.rank(rank, "running")
    told = bundle(story.view, now=T0 + 100, final=False, displays=False)
    assert len(json.dumps(told[MIME])) < 20_000
    assert len(told["text/plain"]) < 5_000
    assert len(told["text/html"]) < 5_000
    assert "x" * 100 not in json.dumps(told[MIME])


def test_the_snapshot_can_be_read_without_a_kernel():
    story = failed()
    live = bundle(story.view, now=T0 + 2, final=False, seq=41, displays=False)[MIME]
    last = bundle(story.view, now=T0 + 9, final=True, seq=42)[MIME]
    assert json.loads(json.dumps(last)) == json.loads(json.dumps(last))
    assert (live["version"], live["final"], live["seq"]) == (1, False, 41)
    assert tuple(live["columns"]) == LIVE_COLUMNS
    assert tuple(last["columns"]) == FINAL_COLUMNS
    assert "displays" not in live
    assert "index" not in live
    assert [shown["ranks"] for shown in last["displays"]] == [[0, 1, 2, 3]]
    assert last["run"]["kernel"] == "kernel-1"
    assert last["run"]["cell"] == "cell-1"
    assert last["run"]["magic"] == "%%distributed -p 4"
    row = dict(zip(last["columns"], last["ranks"][3], strict=True))
    assert (row["state"], row["exit_code"], row["last"], row["host"]) == ("failed", 1, "100%|####|", "box")
    assert last["failure"]["headline"] == "rank 3 failed: ValueError: a < b"
    assert last["failure"]["followers"] == [0, 1, 2] or last["failure"]["followers"] == (0, 1, 2)
    assert last["phases"]["running"] == 1.0


def test_html_says_everything_without_styles():
    """B79: what a sanitiser leaves."""
    told = bundle(failed().view, now=T0, final=True)["text/html"]
    parser = check_html(told)
    assert parser.tags <= {
        *(
            "div",
            "strong",
            "span",
            "details",
            "summary",
            "table",
            "thead",
            "tbody",
            "tr",
            "th",
            "td",
            "pre",
            "img",
            "code",
        )
    }
    assert parser.attributes <= {"style", "src", "alt"}
    text = text_of(re.sub(r' style="[^"]*"', "", told))
    for line in (
        "✗ failed: rank 3 · 4 ranks · torchrun · 3.0 s",
        "rank 3 failed · ranks 0-2 stopped",
        "[0] epoch 1 loss 0.5",
        "[2!] UserWarning: <careful>",
        "rank 3 failed: ValueError: a < b",
        "cell line 5: assert_less(a, b)",
        "ValueError: a < b",
        "stopped because of it: ranks 0-2",
        "warning: process 12 (sleep 120) was left behind",
        "log: /runs/abcd1234",
    ):
        assert line in text


def test_colours_are_inline():
    told = bundle(failed().view, now=T0, final=True)["text/html"]
    assert '<span style="color:#2e8b4f">loss 0.5</span>' in told


def test_figures_stand_among_the_lines_as_images():
    """B32"""
    told = bundle(failed().view, now=T0, final=False)["text/html"]
    (image,) = re.findall(r"<img [^>]*>", told)
    assert f'src="data:image/png;base64,{PNG}"' in image
    assert 'alt="&lt;Figure size 640x480 with 1 Axes&gt;"' in image
    assert told.index("UserWarning") < told.index("ranks 0-3") < told.index("<img")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"text/html": "<b>bold</b>", "text/plain": "bold"}, "<b>bold</b>"),
        ({"text/html": ["<b>", "bold</b>"]}, "<b>bold</b>"),
        ({"image/svg+xml": "<svg/>", "text/plain": "x"}, 'src="data:image/svg+xml;base64,PHN2Zy8+"'),
        ({"image/jpeg": "AA\nBB", "text/plain": "x"}, 'src="data:image/jpeg;base64,AABB"'),
        ({"image/png": '"><script>', "text/plain": "x"}, "base64,&quot;&gt;&lt;script&gt;"),
        ({"text/markdown": "# a <b>", "text/plain": "x"}, "# a &lt;b&gt;</code></pre>"),
        ({"application/javascript": "alert(1)", "text/plain": "<js>"}, "&lt;js&gt;</code></pre>"),
        ({"application/json": {"a": 1}}, "&lt;application/json&gt;</code></pre>"),
        ({}, "&lt;empty display&gt;</code></pre>"),
    ],
)
def test_the_richest_form_that_needs_no_script(data, expected):
    story = Story(2).begin().show(1, data)
    told = bundle(story.view, now=T0, final=True)["text/html"]
    assert expected in told
    assert "alert(1)" not in told


def test_the_size_of_an_image_is_kept():
    story = (
        Story(1)
        .begin()
        .show(0, {"image/png": PNG}, metadata={"image/png": {"width": 320, "height": 'x" onerror='}})
    )
    (image,) = re.findall(r"<img [^>]*>", bundle(story.view, now=T0, final=True)["text/html"])
    assert ' width="320" style' in image
    assert "onerror" not in image


@pytest.mark.parametrize(
    "width", [10**30, 10**400, -1, 0, math.nan, math.inf, "1", None], ids=lambda value: str(value)[:9]
)
def test_an_impossible_size_of_an_image_is_left_out(width):
    story = (
        Story(1).begin().show(0, {"image/png": PNG}, metadata={"image/png": {"width": width, "height": 7}})
    )
    (image,) = re.findall(r"<img [^>]*>", bundle(story.view, now=T0, final=True)["text/html"])
    assert 'width="' not in image
    assert ' height="7" style' in image


def test_hostile_text_stays_text():
    story = Story(2, name="<script>alert(1)</script>", log_dir="/<i>").begin()
    story.out(0, "<script>alert(1)</script>\n<img src=x onerror=alert(1)>\n")
    story.error(
        1, "<b>E</b>", "</pre><script>alert(1)</script>", source="<i>", line=2, traceback="</pre><script>"
    )
    story.note("<script>").fail()
    told = bundle(story.view, now=T0, final=True)["text/html"]
    assert check_html(told).tags.isdisjoint({"script", "img", "b", "i"})


def test_ranks_are_listed_when_there_are_few_and_summed_up_when_there_are_many():
    few = bundle(Story(2).begin().view, now=T0 + 2, final=False)["text/html"]
    assert few.count("<tr>") == 3
    many = Story(100).begin()
    assert "<table>" not in bundle(many.view, now=T0, final=False)["text/html"]
    many.error(7, "ValueError", "no").fail(by_run=[rank for rank in range(100) if rank != 7])
    told = bundle(many.view, now=T0, final=True)["text/html"]
    assert "rank 7 failed · ranks 0-6, 8-99 stopped" in told
    assert told.count("<tr>") == 1 + 64
    assert "and 36 ranks more" in told


def test_the_last_lines_of_a_failing_rank_are_shown_though_others_have_written_more():
    story = Story(2).begin().out(1, "about to fail\n")
    for number in range(150):
        story.out(0, f"line {number}\n")
    story.error(1, "ValueError", "no").fail(by_run=(0,))
    told = bundle(story.view, now=T0, final=True)
    assert "about to fail" in told["text/html"]
    assert told["text/plain"].count("about to fail") == 1


def test_the_message_of_the_error():
    """B42, B48, B77: what a reader of nbconvert's output sees."""
    assert failure_text(failed().view).split("\n") == [
        "rank 3 failed: ValueError: a < b",
        "cell line 5: assert_less(a, b)",
        "",
        "Traceback (most recent call last):",
        '  File "<cell>", line 5',
        "\x1b[31mValueError\x1b[0m: a < b",
        "",
        "stopped because of it: ranks 0-2",
        "warning: process 12 (sleep 120) was left behind",
        "log: /runs/abcd1234",
    ]


def test_a_run_that_succeeded_has_no_message():
    assert failure_text(trained().succeed().view) == ""


@pytest.mark.parametrize(("ranks", "summary"), [((1,), "where it was"), ((0, 1), "where they were")])
def test_stacks_of_a_timeout_are_no_traceback(ranks, summary):
    story = Story(2).begin().at(6).run("ending", "timeout", unfinished=ranks)
    for rank in ranks:
        story.stacks(rank, 'File "<cell>", line 5')
    told = bundle(story.run("ended", "timeout", unfinished=ranks).view, now=T0, final=True)["text/html"]
    assert f"<summary>{summary}</summary>" in told
    assert "<summary>traceback</summary>" not in told


def test_a_crash_says_where_it_was():
    story = Story(2).begin().stacks(1, 'File "<cell>", line 3').rank(1, "ended", signal=11).fail(by_run=(0,))
    assert "<summary>where it was</summary>" in bundle(story.view, now=T0, final=True)["text/html"]


def test_a_repr_of_megabytes_stays_small_in_every_form():
    view = Story(1).begin().show(0, "x" * 5_000_000, action="result").succeed().view
    for final in (True, False):
        told = bundle(view, now=T0, final=final)
        assert all(len(json.dumps(form)) < 30_000 for form in told.values())
        assert all("… (5000000 characters)" in str(form) for form in told.values())


def test_a_message_of_several_lines_is_whole_even_without_a_traceback():
    story = Story(1).begin().error(0, "ValueError", "first\nsecond").fail()
    assert failure_text(story.view).split("\n")[:2] == ["rank 0 failed: ValueError: first", "second"]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((0, 1, 2, 5), "0-2, 5"),
        ((), ""),
        ((3,), "3"),
        ((5, 4, 4), "4-5"),
        (range(0, 60, 2), "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30 and 14 more"),
    ],
)
def test_ranks_in_words(ranks, text):
    assert ranks_text(ranks) == text


def test_ranks_by_name():
    assert [
        ranks_named((3,)),
        ranks_named(iter([0, 1])),
        ranks_named((0, 1, 4)),
    ] == [
        "rank 3",
        "ranks 0-1",
        "ranks 0-1, 4",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0 s"),
        (3.21, "3.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (125, "2 min 5 s"),
        (3_599.6, "1 h 0 min"),
        (90_000, "25 h 0 min"),
    ],
)
def test_durations_in_words(seconds, text):
    assert duration_text(seconds) == text


def test_sizes_in_words():
    sizes = (12, 3_400, 2_000_000, 128_000_000, 1_200_000_000, 2_000_000_000_000)
    assert [size_text(n) for n in sizes] == ["12 B", "3.4 kB", "2.0 MB", "128 MB", "1.2 GB", "2.0 TB"]


def test_tables_are_aligned():
    assert table_text([("a", "bb"), ("ccc", ""), ("", "d")]).split("\n") == ["a    bb", "ccc", "     d"]


def test_labels_tell_stderr_apart():
    assert [label(3), label(3, "stdout"), label(3, "stderr")] == ["[3]", "[3]", "[3!]"]


def test_the_line_that_holds_is_shown_when_the_cell_does_not_say_it():
    line = "%%distributed -p 2 --protocol mpirun  # from %distributed config: --protocol mpirun"
    story = Story(2, line=line).begin().out(0, "hello\n").succeed()
    told = bundle(story.view, now=T0 + 9, final=True)
    assert told["text/plain"].split("\n")[1:3] == [line, "[0] hello"]
    assert "from %distributed config: --protocol mpirun" in told["text/html"]
    assert told[MIME]["index"] == [[None, 2, 1], [0, 0, 1]]
    assert line not in bundle(Story(2).begin().succeed().view, now=T0 + 9, final=True)["text/plain"]


def test_a_line_that_holds_may_be_several():
    story = (
        Story(2, line="%%distributed  # from c.DistributedMagics: setup=a = 1\nb = 2")
        .begin()
        .out(0, "hello\n")
    )
    told = bundle(story.succeed().view, now=T0 + 9, final=True)
    assert told["text/plain"].split("\n")[2:4] == ["b = 2", "[0] hello"]
    assert told[MIME]["index"] == [[None, 2, 2], [0, 0, 1]]


def test_a_status_line_is_one_line():
    view = new_view({"backend": "a\nb", "protocol": "\ud800", "name": "x\r"})
    assert status_line(view, T0) == "starting 1 rank · torchrun · 0.0 s"
