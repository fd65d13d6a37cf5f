"""The line discipline: what one stream of one rank looks like on a terminal, whatever the chunks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_ddp.view import sgr
from jupyter_ddp.view.terminal import MAX_LINE, MAX_ROWS, Line, Terminal

VECTORS = json.loads((Path(__file__).parent / "golden" / "lines.json").read_text())


def lines_of(chunks, limit=MAX_LINE):
    terminal = Terminal(0, "stdout", limit)
    lines: list[Line] = []
    for chunk in chunks:
        begun, _ = terminal.feed(chunk)
        lines += begun
    return lines


def shown(chunks, limit=MAX_LINE):
    return [(line.text, line.open, line.length) for line in lines_of(chunks, limit)]


@pytest.mark.parametrize("cut", ["as given", "whole", "in characters"])
@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_golden_vectors(vector, cut):
    """B59, B65, B70, B73, B90: the same vectors are the law for the page's TypeScript."""
    text = "".join(vector["chunks"])
    chunks = {"as given": vector["chunks"], "whole": [text], "in characters": list(text)}[cut]
    lines = lines_of(chunks, vector.get("limit", MAX_LINE))
    assert [line.text for line in lines] == vector["lines"]
    assert [number for number, line in enumerate(lines) if line.open] == vector["open"]


PIECES = st.one_of(
    st.sampled_from(
        [
            *"\n\n\r\b\t\x00\x07 aé漢🙂\x1b[;m?0123ABKJ\\]P\x9b\x85\x7f",
            *("\x1b[31m", "\x1b[0m", "\x1b[1;44m", "\x1b[38;5;9m", "\x1b[m"),
            *("\x1b[A", "\x1b[2A", "\x1b[B", "\x1b[E", "\x1b[F", "\x1b[5G", "\x1b[2C", "\x1b[3D", "\x1b[99C"),
            *("\x1b[K", "\x1b[1K", "\x1b[2K", "\x1b[J", "\x1b[1J", "\x1b[2J", "\x1b[H", "\x1b[?25l", "\x1b7"),
            *("\x1b]0;title\x07", "\x1b]8;;x\x1b\\", "\x1bPq\n~\x1b\\", "\r\n", "word", "longer words "),
        ]
    ),
    st.text(max_size=12),
)
TEXTS = st.lists(PIECES, max_size=40).map("".join)


@st.composite
def texts_in_two_cuts(draw):
    text = draw(TEXTS)
    places = st.lists(st.integers(0, len(text)), max_size=8).map(sorted)

    def cut(at):
        return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]

    return cut(draw(places)), cut(draw(places))


@settings(max_examples=400, deadline=None)
@given(texts_in_two_cuts(), st.sampled_from([5, MAX_LINE, None]))
def test_how_the_text_was_cut_makes_no_difference(cuts, limit):
    one, other = cuts
    assert shown(one, limit) == shown(other, limit)


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_lines_are_balanced_and_have_no_other_controls(text):
    for line in lines_of([text]):
        plain = sgr.strip(line.text)
        assert all(char == "\t" or (char >= " " and not "\x7f" <= char <= "\x9f") for char in plain)
        _, style = sgr.split_runs(line.text)
        assert style == ""
        line.text.encode()


@given(st.lists(st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=20), max_size=30))
def test_text_without_controls_is_kept_as_it_is(parts):
    text = "\n".join(parts)
    expected = parts[:-1] + [part for part in parts[-1:] if part]
    assert [line.text for line in lines_of([text])] == expected


@given(
    st.lists(
        st.sampled_from(["a", "bc", "\x1b[31m", "\x1b[1m", "\x1b[0m", "\x1b[39m", "\n", "\r"]), max_size=40
    )
)
def test_a_style_means_the_same_at_the_bottom_and_after_the_cursor_has_come_back(pieces):
    text = "".join(pieces)
    lines = lines_of([text])
    again = lines_of([text, "\x1b[A\x1b[B" * 3])
    assert [line.text for line in again] == [line.text for line in lines]


def test_open_lines_are_updated_in_place():
    terminal = Terminal(2, "stderr")
    (line,), _ = terminal.feed("\r10%")
    assert (line.rank, line.stream, line.text, line.open) == (2, "stderr", "10%", True)
    begun, changed = terminal.feed("\r90%")
    assert begun == []
    assert changed == [line]
    assert line.text == "90%"
    terminal.feed("\n")
    assert not line.open


def test_close_leaves_no_line_open():
    terminal = Terminal(0, "stdout")
    (line,), _ = terminal.feed("no newline at end")
    assert terminal.close() == [line]
    assert not line.open


def test_the_cursor_goes_back_only_so_far():
    lines = lines_of(["".join(f"{n}\n" for n in range(200)), "\x1b[500A\rX"])
    changed = [number for number, line in enumerate(lines) if line.text == "X" + str(number)[1:]]
    assert changed == [200 - MAX_ROWS]


def test_a_string_that_never_ends_does_not_swallow_the_run():
    lines = lines_of(["\x1bP" + "x" * 999_999, "x" * 10, "\nhere again\n"])
    assert [line.text for line in lines][-1] == "here again"


def test_a_huge_line_keeps_its_head_and_its_length():
    """B73: 5 MB in one line."""
    chunks = ["A" * 65_536] * 77 + ["\nafter\n"]
    first, after = lines_of(chunks)
    assert first.text == "A" * MAX_LINE + f"… ({65_536 * 77} characters)"
    assert after.text == "after"


def test_lone_surrogates_become_replacement_characters():
    assert [line.text for line in lines_of(["a\ud800b\n"])] == ["a\ufffdb"]


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a <b> & c", "a &lt;b&gt; &amp; c"),
        ("\x1b[31mred\x1b[0m", '<span style="color:#d0453e">red</span>'),
        (
            "\x1b[1;3;4;9mx\x1b[0m",
            '<span style="font-weight:bold;font-style:italic;text-decoration:underline line-through">x</span>',
        ),
        ("\x1b[38;2;1;2;255mx\x1b[0m", '<span style="color:#0102ff">x</span>'),
        (
            "\x1b[38;5;16mx\x1b[0;48;5;255my\x1b[0m",
            '<span style="color:#000000">x</span><span style="background-color:#eeeeee">y</span>',
        ),
        ("\x1b[38;5;21mx\x1b[0m", '<span style="color:#0000ff">x</span>'),
    ],
)
def test_styles_in_html(text, html):
    assert sgr.to_html(text) == html


@given(st.text("0123456789;:", max_size=20), st.text("0123456789;:", max_size=20))
def test_any_style_is_canonical(first, second):
    style = sgr.apply(sgr.apply("", first), second)
    assert sgr.apply("", style) == style
    assert sgr.apply(style, "0") == ""
    sgr.css(style)
