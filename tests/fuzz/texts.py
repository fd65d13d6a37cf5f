"""Text as processes really write it, and as nobody should."""

from __future__ import annotations

from hypothesis import strategies as st

ANY = st.characters()  # with surrogates and controls
SEQUENCES = [
    *("\x1b[31m", "\x1b[0m", "\x1b[1;44m", "\x1b[38;5;9m", "\x1b[38;2;1;2;3m", "\x1b[4:3m", "\x1b[m", "\x1b[1"),
    *("\x1b[A", "\x1b[2A", "\x1b[B", "\x1b[E", "\x1b[F", "\x1b[5G", "\x1b[2C", "\x1b[3D", "\x1b[999C", "\x1b[99999999C"),
    *("\x1b[K", "\x1b[1K", "\x1b[2K", "\x1b[J", "\x1b[1J", "\x1b[2J", "\x1b[3J", "\x1b[9K", "\x1b[H", "\x1b[?25l"),
    *("\x1b]0;title\x07", "\x1b]8;;x\x1b\\", "\x1b]0;no end", "\x1bPq\n~\x1b\\", "\x1b_x\x9c", "\x1bX", "\x1b^\x18"),
    *("\x1b", "\x1b[", "\x1b[0;", "\x1b[ q", "\x1b7", "\x1bc", "\x1b(B", "\x9b31m", "\x9d", "\x1b[0<1m", "\x1b[=1m"),
    *("\r\n", "\r", "\b", "\b\b\b", "\t", "\n", "\n\n\n", "\x0b", "\x0c", "\x00", "\x07", "\x7f", "\x85", "\u2028"),
    *("e\u0301", "漢字", "👩‍👩‍👧", "\u200b", "\ufeff", "\u202e", "\ud800", "\udcff", "\ud83d\ude42", "\U0010ffff"),
    *(" ", "word", "longer words ", "100%|██████|", "\r 50%|███   | 1/2 [00:01<?, ?it/s]", "… (12 characters)", "<b>&amp;"),
    "\x1b[" + "1;" * 70 + "m",
    "\x1b[" + " " * 20 + "m",
    "x" * 50,
]  # fmt: skip
PIECES = st.one_of(st.sampled_from(SEQUENCES), st.text(ANY, max_size=8))
STREAMS = st.lists(PIECES, max_size=40).map("".join)


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    """Cut a text anywhere."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=10)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
