"""The line discipline, whatever a rank writes and wherever its text is cut."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from jupyter_ddp.view import sgr
from jupyter_ddp.view.terminal import MAX_COLUMN, MAX_LINE, MAX_ROWS, Line, Terminal
from tests.fuzz.profile import fuzz
from tests.fuzz.texts import ANY, STREAMS, cut

LIMITS = st.sampled_from([1, 5, 30, MAX_LINE, None])


def shown(chunks, limit=MAX_LINE):
    terminal = Terminal(0, "stdout", limit)
    lines: list[Line] = []
    for chunk in chunks:
        lines += terminal.feed(chunk)[0]
    return [(line.text, line.open, line.length) for line in lines]


@st.composite
def cut_twice(draw, texts):
    text = draw(texts)
    return draw(cut(text)), draw(st.one_of(cut(text), st.just([text]), st.just(list(text))))


@fuzz(150)
@given(cut_twice(STREAMS), LIMITS)
def test_where_the_text_was_cut_makes_no_difference(cuts, limit):
    one, other = cuts
    assert shown(one, limit) == shown(other, limit)


def reference(text):
    """A terminal for text, ``\\n``, ``\\r`` and ``\\b``, as plainly as it can be said."""
    rows, column = [[]], 0
    for char in text:
        if char == "\n":
            rows.append([])
            column = 0
        elif char == "\r":
            column = 0
        elif char == "\b":
            column = max(0, column - 1)
        else:
            rows[-1][column : column + 1] = [char]
            column += 1
    return ["".join(row) for row in rows]


PRINTABLE = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=6)


@fuzz(150)
@given(cut_twice(st.lists(st.sampled_from("\n\r\b") | PRINTABLE, max_size=40).map("".join)))
def test_a_plain_model_agrees(cuts):
    chunks, other = cuts
    expected = reference("".join(chunks))
    for some in (chunks, other):
        got = [text for text, _, _ in shown(some, None)]
        # The row after the last newline is no line before something was written on it.
        assert got + [""] * (len(expected) - len(got)) == expected
        assert len(expected) - len(got) <= 1


@fuzz(100)
@given(cut_twice(STREAMS), LIMITS)
def test_lines_are_balanced_bounded_and_have_no_other_controls(cuts, limit):
    chunks, _ = cuts
    written = len("".join(chunks)) + MAX_COLUMN * len(chunks)
    for text, _, length in shown(chunks, limit):
        plain = sgr.strip(text)
        assert all(char == "\t" or (char >= " " and not "\x7f" <= char <= "\x9f") for char in plain)
        assert sgr.split_runs(text)[1] == ""
        text.encode()
        assert "\x1b" not in sgr.to_html(text)
        if limit is not None:
            assert len(plain) <= limit + len(f"… ({length} characters)")
            assert bool(length) == (length > limit)
        assert len(plain) <= written * (MAX_COLUMN + 1)


@fuzz(60)
@given(cut_twice(STREAMS), LIMITS)
def test_what_is_told_is_true_at_each_step(cuts, limit):
    """Begun lines come once and in order, changed ones are the terminal's, closed ones never change again."""
    terminal = Terminal(0, "stderr", limit)
    known: dict[int, Line] = {}
    texts: dict[int, str] = {}
    closed: set[int] = set()
    for chunk in cuts[0]:
        before = dict(texts)
        begun, changed = terminal.feed(chunk)
        assert not {id(line) for line in begun} & known.keys()
        known |= {id(line): line for line in begun}
        assert {id(line) for line in changed} <= known.keys()
        texts = {key: line.text for key, line in known.items()}
        differ = {key for key, text in before.items() if texts[key] != text}
        assert differ <= {id(line) for line in changed}
        assert len(terminal.open_lines) <= MAX_ROWS
        open_now = {id(line) for line in terminal.open_lines}
        assert open_now == {key for key, line in known.items() if line.open}
        closed = known.keys() - open_now
    assert terminal.close() == [line for line in known.values() if id(line) not in closed]


@fuzz(40)
@given(st.lists(st.text(ANY, min_size=1, max_size=30), min_size=1, max_size=4), st.sampled_from([1, 7, 4096]))
@example(["\x1b]0;never ends "], 4096)
@example(["\x1b[1;", "\x1bP"], 4096)
@example(["\x1b[31;1ma\x1b[32mb"], 4096)
@example(["a\x1b[999C"], 4096)
def test_memory_is_bounded_however_long_a_rank_repeats_itself(pieces, size):
    terminal = Terminal(0, "stdout", 200)
    text = "".join(pieces)
    text *= 1 + 20_000 // len(text)
    for at in range(0, len(text), max(size, 64)):
        terminal.feed(text[at : at + max(size, 64)])
    held = [
        terminal._pending,
        terminal._string,
        terminal._chars,
        terminal._styles or "",
        *(row.text for row in terminal._rows),
    ]
    assert len(terminal._rows) <= MAX_ROWS
    assert len(terminal._pending) <= 150
    assert len(terminal._string) <= 2
    assert sum(map(len, held)) <= MAX_ROWS * 200 * 80
