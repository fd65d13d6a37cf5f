"""Events as logs could hold them: right ones, wrong ones, and JSON that is no event."""

from __future__ import annotations

import dataclasses
import math
import typing

from hypothesis import strategies as st

from jupyter_ddp import events
from jupyter_ddp.events import Event
from tests.fuzz.texts import ANY, STREAMS

LARGE = 2**63 - 1
TEXT = st.text(ANY, max_size=10) | STREAMS
WHOLE = st.sampled_from([0, 1, 2, 3, 4, 100, 2**31, 2**62, LARGE]) | st.integers(0, 8)
SIGNED = WHOLE | st.integers(-300, 300) | st.just(-LARGE)
TIME = st.floats(-9e18, 9e18) | st.sampled_from([0.0, 0.5, -1.0, 1.7e9, 1.7e9 + 1, 1e12, 10**17])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, -(2**63), 10**400, 10**4299])
    | st.floats()
    | st.text(ANY, max_size=8)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(ANY, max_size=6), inner, max_size=4),
    max_leaves=10,
)
MIMES = [
    "text/plain",
    "text/html",
    "text/markdown",
    "text/latex",
    "image/png",
    "image/svg+xml",
    "application/json",
    "",
]
BUNDLES = st.dictionaries(st.sampled_from(MIMES), TEXT | st.lists(TEXT, max_size=3) | JSON, max_size=4)
SIZES = st.dictionaries(st.sampled_from(["width", "height", "<b>"]), JSON, max_size=2)
METADATA = st.dictionaries(st.sampled_from(MIMES), SIZES | JSON, max_size=2)

BY_NAME: dict[str, st.SearchStrategy[typing.Any]] = {
    "attempt": st.sampled_from(["", "a1", "a1", "a1", "a2"]),
    "node": st.sampled_from([0, 0, 0, 1, 2, 65_535, LARGE]),
    "rank": st.none() | st.sampled_from([0, 1, 2, 3, 3, LARGE]),
    "time": TIME,
    "phase": st.sampled_from([*events.PHASES, "a phase to come", "\x1b[31m"]),
    "outcome": st.none() | st.sampled_from([*events.OUTCOMES, "", "an outcome to come"]),
    "state": st.sampled_from(["started", "running", "heard", "finished", "ended", "a state to come"]),
    "stream": st.sampled_from(["stdout", "stderr", "stdin", ""]),
    "action": st.sampled_from(["display", "update", "result", "clear", "an action to come"]),
    "display_id": st.none() | st.sampled_from(["d", "e", ""]),
    "type": st.sampled_from(["ValueError", "KeyboardInterrupt", "SystemExit", ""]) | TEXT,
    "level": st.sampled_from(["info", "warning", "<b>"]),
    "unfinished": st.lists(st.sampled_from([0, 1, 3, 7, LARGE]), max_size=3).map(tuple),
    "exit_code": st.none() | SIGNED,
    "code": SIGNED,
    "signal": st.none() | st.sampled_from([0, 9, 11, 15, 77, LARGE]),
    "data": BUNDLES,
    "metadata": METADATA,
}
"""What makes a field interesting; others are filled by their type."""
BY_TYPE: dict[typing.Any, st.SearchStrategy[typing.Any]] = {
    str: TEXT,
    bool: st.booleans(),
    int: WHOLE,
    float: TIME,
    dict[str, typing.Any]: st.dictionaries(st.text(ANY, max_size=6), JSON, max_size=3),
    tuple[int, ...]: st.lists(WHOLE, max_size=3).map(tuple),
}


def _of_field(name: str, hint: typing.Any) -> st.SearchStrategy[typing.Any]:
    if name in BY_NAME:
        return BY_NAME[name]
    options = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)
    return st.one_of([st.none() if option is type(None) else BY_TYPE[option] for option in options])


def of_class(cls: type[Event], **fixed: st.SearchStrategy[typing.Any]) -> st.SearchStrategy[Event]:
    """Events of one class, made from its fields."""
    hints = typing.get_type_hints(cls)
    return st.builds(
        cls, **{f.name: _of_field(f.name, hints[f.name]) for f in dataclasses.fields(cls)} | fixed
    )


CLASSES = [*events.KINDS.values(), events.UnknownEvent]
EVENTS = st.one_of([of_class(cls) for cls in CLASSES])


def is_finite(value: object) -> bool:
    """Whether JSON of every language can say it."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    return not isinstance(value, list) or all(map(is_finite, value))
