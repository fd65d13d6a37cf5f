"""Fold and render: whatever the logs say, in whatever order, there is a view of it, and a bundle that a notebook can save."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jupyter_ddp.display.pack import printable
from jupyter_ddp.events import (
    DisplayEvent,
    ErrorEvent,
    NoteEvent,
    OutEvent,
    RankEvent,
    RunEvent,
    decode,
    encode,
)
from jupyter_ddp.render import MIME, bundle, failure_text, plain, rank_text
from jupyter_ddp.view import fold, new_view, sgr
from jupyter_ddp.words import label
from tests.fuzz.events import CLASSES, EVENTS, JSON, TEXT, of_class
from tests.fuzz.profile import fuzz
from tests.fuzz.texts import ANY, STREAMS

CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "show": st.none() | st.lists(st.integers(0, 5), max_size=3) | JSON,
        "timeout": JSON,
        "detach": JSON,
    },
)
FACTS = st.fixed_dictionaries(
    {"nnodes": st.sampled_from([1, 2]), "nproc": st.sampled_from([1, 2, 4])},
    optional={
        "id": TEXT,
        "name": st.none() | TEXT,
        "world_size": st.sampled_from([1, 4, 5, 70]) | JSON,
        "created": st.sampled_from([1.7e9, 0, -1.0, 2**63]) | JSON,
        "backend": TEXT,
        "protocol": TEXT,
        "line": st.sampled_from(
            ["", "%%distributed -p 2", "%%distributed <b>", "%%distributed  # setup=a\nb\n"]
        )
        | JSON,
        "source": TEXT | JSON,
        "config": CONFIGS | JSON,
        "kernel_id": JSON,
        "cell_id": JSON,
    },
)
ANY_FACTS = FACTS | st.dictionaries(
    st.sampled_from(
        ["nnodes", "nproc", "world_size", "id", "name", "created", "config", "line", "source", "backend"]
    ),
    JSON,
    max_size=6,
)
STORIES = st.lists(
    EVENTS
    | of_class(OutEvent, text=STREAMS)
    | of_class(RankEvent)
    | of_class(RunEvent)
    | of_class(DisplayEvent, action=st.just("display")),
    max_size=25,
)
TAGS = {
    "div",
    "strong",
    "span",
    "code",
    "pre",
    "details",
    "summary",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "img",
}


def seen(facts, events, cap=8_192):
    """Return the view of events, which have been through a log."""
    view = new_view(facts, log_dir="/runs/<b>", output_cap=cap)
    for event in events:
        back = decode(encode(event))
        if back is not None:
            assert fold(view, back) is view
    return view


def sent(value):
    """Return JSON as it is on its way to a page: without lone surrogates."""
    return json.loads(json.dumps(printable(value), ensure_ascii=False).encode())


class Checked(HTMLParser):
    """Takes HTML in which nothing is but what the renderer has put there."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag in TAGS
        for name, value in attrs:
            assert name in {"style", "src", "alt", "width", "height"}
            assert name != "src" or value.startswith("data:image/")
            assert name != "style" or not set(value) & set("<>\"'\\")
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_comment(self, data):
        raise AssertionError(data)

    handle_decl = handle_pi = unknown_decl = handle_comment


def check(view, final):
    out = bundle(view, now=1.7e9 + 5, final=final, seq=3)
    assert set(out) == {"text/plain", "text/html", MIME}
    sent(out)
    json.dumps(
        {key: value for key, value in out[MIME].items() if key not in {"displays", "run"}}, allow_nan=False
    )
    assert out["text/plain"] == plain(view, now=1.7e9 + 5, final=final)
    assert isinstance(failure_text(view), str)
    return out


@fuzz(150)
@given(ANY_FACTS, STORIES, st.booleans())
def test_any_events_in_any_order_give_a_bundle_that_can_be_saved(facts, events, final):
    view = seen(facts, events)
    check(view, final)
    for rank in view.ranks[:8]:
        assert isinstance(rank_text(view, rank.rank), str)


@fuzz(60)
@given(FACTS, STORIES, st.data())
def test_events_that_come_twice_change_nothing(facts, events, data):
    """Numbered ones by their number, text by its place."""
    numbered = [event for event in events if event.seq > 0]
    once = seen(facts, numbered)
    twice = seen(facts, [event for event in numbered for _ in range(2)])
    for final in (False, True):
        assert check(once, final) == check(twice, final)


@fuzz(100)
@given(FACTS, STORIES)
def test_the_index_says_whose_each_line_is(facts, events):
    view = seen(facts, events)
    out = check(view, final=True)
    lines = out["text/plain"].split("\n")[1:]
    displays = {place["line"]: place["lines"] for place in out[MIME]["displays"] if "line" in place}
    at = 0
    for rank, stream, count in out[MIME]["index"]:
        for line in lines[at : at + count]:
            if stream != 2:
                assert line.startswith(label(rank, "stderr" if stream else "stdout") + " ")
        at += count
    assert at <= len(lines)
    assert all(first >= 1 and first + count - 1 <= at for first, count in displays.items())


NO_HTML = st.dictionaries(
    st.sampled_from(["text/plain", "text/markdown", "image/png", "image/svg+xml", "application/json"]),
    TEXT | JSON,
    max_size=3,
)
HOSTILE = (
    st.sampled_from(
        [
            "<script>alert(1)</script>",
            "</pre></code></div>",
            '"><img src=x onerror=y>',
            "&lt;",
            "<!--",
            "<![CDATA[",
            "'\" onload='",
        ]
    )
    | TEXT
)


@fuzz(100)
@given(
    FACTS,
    st.lists(
        st.one_of(
            of_class(OutEvent, text=HOSTILE, length=st.integers(1, 50)),
            of_class(NoteEvent, text=HOSTILE, level=HOSTILE),
            of_class(
                ErrorEvent, message=HOSTILE, type=HOSTILE, where=HOSTILE, source=HOSTILE, traceback=HOSTILE
            ),
            of_class(RunEvent, reason=HOSTILE),
            of_class(RankEvent, host=HOSTILE),
            of_class(DisplayEvent, data=NO_HTML, file=st.none() | HOSTILE, action=st.just("display")),
        ),
        max_size=12,
    ),
    HOSTILE,
    st.booleans(),
)
def test_no_text_becomes_markup(facts, events, name, final):
    view = seen({**facts, "name": name, "line": name, "backend": name, "protocol": name}, events)
    Checked(check(view, final)["text/html"])


@fuzz(60)
@given(st.text(ANY, max_size=60) | STREAMS)
def test_any_text_is_escaped_html(text):
    Checked(sgr.to_html(text))


@fuzz(40)
@given(FACTS, STORIES, st.integers(1, 40))
def test_what_is_rendered_is_bounded(facts, events, times):
    """However often it is said again, with other numbers: lines by the budget, notes and errors by their own limits."""
    facts["world_size"] = 4
    view = new_view(facts, output_cap=4_096)
    for turn in range(times):
        for place, event in enumerate(events):
            fields = {"seq": 1 + turn * len(events) + place}
            if isinstance(event, OutEvent):
                text = (event.text or "") * 50 + "\n"
                fields |= {
                    "text": text,
                    "length": len(text.encode("utf-8", "replace")),
                    "offset": turn * 10**6,
                }
            elif isinstance(event, DisplayEvent):
                continue
            fold(view, dataclasses.replace(event, **fields))
    assert sum(line.size for line in view.lines) <= 2 * 4_096 + 64 * 1_000
    for final in (False, True):
        out = check(view, final)
        assert len(out["text/plain"]) < 600_000
        assert len(out["text/html"]) < 1_500_000


@fuzz(40)
@given(JSON)
@example({"image/png": {"width": 10**400, "height": float("nan")}})
@example({"image/png": {"width": -1, "height": True}})
def test_displays_of_any_shape(value):
    bundles = [
        ({"text/plain": value, "application/json": value}, {}),
        ({"text/html": value}, {}),
        ({"image/png": value}, {"image/png": value}),
    ]
    if isinstance(value, dict):
        bundles += [({"image/png": ""}, value), (value, {}), (value, value)]
    for data, metadata in bundles:
        view = seen({"world_size": 2}, [DisplayEvent(rank=0, action="display", data=data, metadata=metadata)])
        for final in (False, True):
            check(view, final)


@pytest.mark.parametrize("mime", ["text/plain", "text/html", "image/png", "application/json"])
@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}")])
def test_what_is_read_can_be_shown_however_deep(mime, begin, end):
    """Reading is done close to the bottom of the stack, showing is not."""
    for depth in range(5, 1_000, 45):
        line = f'{{"kind":"display","action":"display","rank":0,"data":{{"{mime}":{begin * depth}1{end * depth}}}}}'
        event = decode(line.encode())
        if event is not None:
            check(fold(new_view({}), event), final=True)


def test_every_kind_is_told_of():
    assert {cls.kind for cls in CLASSES} >= {
        "run",
        "rank",
        "out",
        "display",
        "error",
        "value",
        "note",
        "stacks",
    }
