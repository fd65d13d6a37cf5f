"""A run as HTML that needs no style sheet, no script and no id of ours: for nbconvert, GitHub, plain notebooks. Pure.

Inline styles only help: a sanitiser may take them all away, and what is left still says which rank wrote what, which
lines are stderr and what failed. Rich output that is HTML is put in as it is, as ``display(HTML(…))`` would.
"""

from __future__ import annotations

import base64
from html import escape
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.view import sgr
from jupyter_ddp.view.summary import (
    STATE_WORDS,
    cut_text,
    earlier_text,
    note_lines,
    states_text,
    status_line,
)
from jupyter_ddp.view.terminal import Line
from jupyter_ddp.words import count_text, duration_text, label, ranks_named, signal_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_ddp.view.model import RankView, RunView
    from jupyter_ddp.view.rich_output import DisplayView

FINAL_LINES: Final = 100
"""Lines that the final HTML shows; all kept ones are in text/plain."""
LIVE_LINES: Final = 20
"""Lines that HTML and text/plain have while the run goes on."""
LIVE_DISPLAYS: Final = 4
"""What they have of rich output then: it is sent again and again."""
_ALL: Final = 1_000_000
_MOST_ROWS: Final = 64
_LIVE_ROWS: Final = 16
_MOST_PIXELS: Final = 100_000
_IMAGES: Final = ("image/png", "image/jpeg", "image/gif", "image/webp", "image/bmp")
_TEXTS: Final = ("text/markdown", "text/latex", "text/plain")

_MUTED: Final = "opacity:0.65"
_STDERR: Final = "color:var(--jp-warn-color1,#b26a00)"  # not red: a progress bar is on stderr too
_ERROR: Final = "color:var(--jp-error-color1,#c62828)"
_FONT: Final = "line-height:1.4;font-size:var(--jp-code-font-size,0.93em)"
_PRE: Final = f"margin:0;white-space:pre-wrap;overflow-wrap:anywhere;{_FONT}"
_BOX: Final = "border-left:3px solid var(--jp-error-color1,#c62828);padding:2px 0 2px 12px;margin:10px 0"
_MARKS: Final = {"succeeded": "✓", "failed": "✗", "lost": "✗", "timeout": "✗"}


def html(view: RunView, *, now: float, final: bool) -> str:
    """Return the HTML of a run: status, ranks, the last lines with the rich output at its place, failure, notes."""
    parts = [
        _status(view, now),
        _tag("div", _tag("code", escape(view.line)), _MUTED) if view.line else "",
        _ranks(view, now, final=final),
        *_output(view, final=final),
        _failure(view, final=final),
        _notes(view),
    ]
    return "<div>" + "\n".join(part for part in parts if part) + "</div>"


def _tag(name: str, inner: str, style: str = "") -> str:
    return f'<{name} style="{style}">{inner}</{name}>' if style else f"<{name}>{inner}</{name}>"


def _block(inner: str) -> str:
    """Return preformatted text; the ``code`` in it keeps Lab's and nbconvert's style sheets from another font."""
    return f'<pre style="{_PRE}"><code>{inner}</code></pre>'


def _status(view: RunView, now: float) -> str:
    head, *rest = status_line(view, now).split(" · ")
    mark = (_MARKS.get(view.outcome or "", "■") if view.over else "●") + " "
    bad = view.over and not view.ok and view.outcome not in {"interrupted", "stopped"}
    text = _tag("strong", escape(mark + head), _ERROR if bad else "")
    if rest:
        text += _tag("span", escape(" · " + " · ".join(rest)), _MUTED)
    return _tag("div", text, "margin:0 0 6px")


def _ranks(view: RunView, now: float, *, final: bool) -> str:
    """Return the table of ranks, folded away; of many ranks only those that did not go well."""
    summary = escape(states_text(view))
    most = _MOST_ROWS if final else _LIVE_ROWS
    chosen = view.ranks
    if len(chosen) > most:
        usual = {"finished"} if view.over else {"finished", "running"}
        chosen = [rank for rank in view.ranks if rank.state not in usual][:most]
    if not chosen or (not final and len(view.ranks) > most):
        return _tag("div", summary, _MUTED)
    rows = "".join(_rank_row(rank, now) for rank in chosen)
    left = len(view.ranks) - len(chosen)
    more = _tag("div", f"and {count_text(left, 'rank')} more", _MUTED) if left else ""
    head = "".join(
        _tag("th", word, "text-align:left") for word in ("rank", "state", "time", "lines", "last line")
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<details style="margin:0 0 6px"><summary>{summary}</summary>{table}{more}</details>'


def _rank_row(rank: RankView, now: float) -> str:
    state = STATE_WORDS[rank.state]
    if rank.signal:
        state += f" ({signal_name(rank.signal)})"
    elif rank.exit_code:
        state += f" (code {rank.exit_code})"
    duration = rank.duration
    if duration is None and rank.running is not None and rank.ended is None:
        duration = max(0.0, now - rank.running)
    last = sgr.strip(rank.last.text)[:120] if rank.last is not None else ""
    cells = (
        str(rank.rank),
        state,
        "" if duration is None else duration_text(duration),
        f"{rank.lines:,}",
        last,
    )
    return "<tr>" + "".join(_tag("td", escape(cell), "text-align:left") for cell in cells) + "</tr>"


def _output(view: RunView, *, final: bool) -> Iterator[str]:
    """Yield blocks: lines in ``pre``, and between them what the ranks displayed."""
    earlier, items = view.recent(*((FINAL_LINES, _ALL) if final else (LIVE_LINES, LIVE_DISPLAYS)))
    above = cut_text(view, earlier) if final else earlier_text(earlier)
    pending: list[str] = []
    for item in items:
        if not isinstance(item, Line):
            yield from _pre(pending)
            pending = []
            yield _display(item, view)
            continue
        if earlier:
            yield _tag("div", escape(above), _MUTED)
            earlier = 0
        if not (item.open and not item.text.strip()):
            pending.append(_line(item))
    yield from _pre(pending)
    if earlier:
        yield _tag("div", escape(above), _MUTED)
    shown = {item.order for item in items}
    last = view.failing_lines(lambda line: line.order in shown) if final else []
    if last:
        yield _tag("div", f"last lines of rank {last[0].rank}", _MUTED)
        yield from _pre([_line(line) for line in last])


def _pre(lines: list[str]) -> Iterator[str]:
    if lines:
        yield _block("\n".join(lines))


def _line(line: Line) -> str:
    style = _STDERR if line.stream == "stderr" else _MUTED
    return f"{_tag('span', label(line.rank, line.stream), style)} {sgr.to_html(line.text)}"


def _display(shown: DisplayView, view: RunView) -> str:
    head = _tag("div", escape(ranks_named(shown.ranks)), _MUTED) if view.world_size > 1 else ""
    return _tag("div", head + _rich(shown), "margin:6px 0")


def _rich(shown: DisplayView) -> str:
    """Return the richest form that needs no script."""
    data = shown.data
    if "text/html" in data:
        return _text(data["text/html"])
    if "image/svg+xml" in data:
        encoded = base64.b64encode(_text(data["image/svg+xml"]).encode("utf-8", "replace")).decode()
        return _image("image/svg+xml", encoded, shown)
    for mime in _IMAGES:
        if mime in data:
            return _image(mime, "".join(_text(data[mime]).split()), shown)
    for mime in _TEXTS:
        if mime in data:
            return _block(sgr.to_html(_text(data[mime])))
    return _block(escape(shown.text))


def _text(value: Any) -> str:  # noqa: ANN401 - MIME data of any shape
    if isinstance(value, list):
        return "".join(str(part) for part in value)
    return value if isinstance(value, str) else str(value)


def _image(mime: str, encoded: str, shown: DisplayView) -> str:
    size = shown.metadata.get(mime)
    attributes = ""
    for name in ("width", "height"):
        value = size.get(name) if isinstance(size, dict) else None
        if isinstance(value, int | float) and 0 < value <= _MOST_PIXELS:
            attributes += f' {name}="{value:g}"'
    alt = escape(shown.text.split("\n", 1)[0][:200])
    return f'<img src="data:{mime};base64,{escape(encoded)}" alt="{alt}"{attributes} style="max-width:100%">'


def _failure(view: RunView, *, final: bool) -> str:
    failure = view.failure
    if failure is None:
        return ""
    parts = [_tag("div", _tag("strong", escape(failure.headline), _ERROR))]
    if failure.place:
        place, _, source = failure.place.partition(": ")
        parts.append(_tag("div", escape(place) + (f": <code>{escape(source)}</code>" if source else "")))
    if failure.traceback and final:
        # Folded: the error that the cell raises shows it too, right below.
        what = "traceback" if failure.type and not failure.stacks else "where it was"
        if len(failure.stacks) > 1:
            what = "where they were"
        inner = _tag("summary", what) + _block(sgr.to_html(failure.traceback.strip("\n")))
        parts.append(_tag("details", inner, "margin:6px 0"))
    parts += [_tag("div", escape(text), _MUTED) for text in failure.consequences()]
    return _tag("div", "".join(parts), _BOX)


def _notes(view: RunView) -> str:
    lines = [_tag("div", escape(text), _MUTED) for text in note_lines(view)]
    if view.failure is not None and view.log_dir:
        lines.append(_tag("div", "log: " + escape(view.log_dir), _MUTED))
    return "".join(lines)
