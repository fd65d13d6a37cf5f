"""The lines of a log: whatever they say, reading them never raises; what was written is read again."""

from __future__ import annotations

import dataclasses
import json
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_ddp import events
from jupyter_ddp.events import (
    DisplayEvent,
    ErrorEvent,
    Event,
    NoteEvent,
    OutEvent,
    RankEvent,
    RunEvent,
    StacksEvent,
    UnknownEvent,
    ValueEvent,
    decode,
    encode,
    from_json,
    to_json,
)

COMMON = {"attempt": "20260101T000000-ab12", "node": 1, "seq": 7, "rank": 3, "time": 1767225600.25}
ONE_OF_EACH = [
    RunEvent(**COMMON, phase="ended", outcome="timeout", reason="late", unfinished=(0, 3), detail={"pid": 4}),
    RankEvent(
        **COMMON,
        state="ended",
        ok=False,
        pid=12,
        host="h",
        local_rank=0,
        device="cuda:0",
        exit_code=-1,
        signal=11,
        by_run=True,
    ),
    OutEvent(**COMMON, stream="stderr", offset=10, length=6, text="grün\n", lines=1),
    DisplayEvent(
        **COMMON,
        action="update",
        data={"text/plain": "x"},
        metadata={"m": [1]},
        display_id="d",
        wait=True,
        file="f",
    ),
    ErrorEvent(
        **COMMON,
        type="ValueError",
        message="no",
        line=2,
        where="train.py",
        source="raise",
        traceback="Traceback…",
        code=-3,
    ),
    ValueEvent(**COMMON, name="loss", file="values/rank3.loss.bin", size=9, note="on CPU"),
    NoteEvent(**COMMON, text="look", level="warning"),
    StacksEvent(**COMMON, text='File "<cell>", line 2'),
    UnknownEvent(**COMMON),
]
# By annotation: values that JSON can hold and that may not stand in such a field.
WRONG = {
    "str": [None, 1, True, [], {}],
    "bool": [None, 1, "yes"],
    "int": [None, "1", True, 1.5, -1, 2**63, []],
    "float": [None, "1", True, float("nan"), float("inf"), 10**400],
    "dict[str, Any]": [None, [], "x"],
    "tuple[int, ...]": [None, 3, "12", [{}], [1, "2"], [True], [-1]],
}
FIELDS = [(event, f) for event in ONE_OF_EACH for f in dataclasses.fields(event)]


def kind_of(event: Event) -> str:
    return event.kind


def test_there_is_one_of_each():
    assert {type(event) for event in ONE_OF_EACH} == {*events.KINDS.values(), UnknownEvent}
    for event in ONE_OF_EACH:
        unset = {f.name for f in dataclasses.fields(event) if getattr(event, f.name) == f.default}
        assert not unset, f"{event.kind}: the round trip does not try {unset}"


@pytest.mark.parametrize("event", ONE_OF_EACH, ids=kind_of)
def test_what_was_written_is_read_again(event):
    line = encode(event)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line) == event
    assert from_json(to_json(event)) == event


@pytest.mark.parametrize("event", ONE_OF_EACH, ids=kind_of)
def test_fields_that_have_their_default_are_left_out(event):
    needed = {
        f.name: getattr(event, f.name)
        for f in dataclasses.fields(event)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    assert to_json(type(event)(**needed)) == {"kind": event.kind, **needed}


def test_falsehoods_that_say_something_are_kept():
    event = RankEvent(state="finished", rank=0, ok=False, exit_code=0)
    assert to_json(event) == {"kind": "rank", "state": "finished", "rank": 0, "ok": False, "exit_code": 0}
    assert decode(encode(event)) == event


@pytest.mark.parametrize("text", ["\ud800", "a\udcffb\n", "😀\x00\x1b[31m\r\u2028", ""])
def test_any_text_travels(text):
    """B63: what is left of bytes that were no text, and control characters."""
    event = OutEvent(rank=0, stream="stdout", offset=0, length=4, text=text)
    line = encode(event)
    assert decode(line) == event
    assert line.count(b"\n") == 1
    line.decode()  # a reader in another language gets UTF-8


def test_a_kind_that_is_not_known_keeps_its_number():
    event = decode(b'{"kind":"weather","seq":9,"node":1,"rank":2,"time":3,"sun":true}')
    assert event == UnknownEvent(seq=9, node=1, rank=2, time=3)
    assert decode(encode(event)) == event


def test_fields_that_are_not_known_are_dropped():
    assert decode(b'{"kind":"note","text":"x","colour":"red"}') == NoteEvent(text="x")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"null",
        b"[]",
        b"7",
        b'"note"',
        b"{}",
        b'{"kind":7}',
        b'{"kind":null,"text":"x"}',
        b'{"kind":"note"}',  # without what it needs
        b'{"kind":"out","stream":"stdout","offset":0}',
        b'{"kind":"note","text":"to',  # torn
        b'{"kind":"note","text":"a"}{"kind":"note","text":"b"}',  # torn, and written on
        b'\xff\xfe{"kind":"note","text":"x"}',
        b'{"kind":"note","text":"\xff"}',
        b"[" * 100_000,
        b'{"kind":"note","text":' + b"9" * 5_000 + b"}",
        b'{"kind":"display","action":"display","data":{"a":' + b"[" * 300 + b"]" * 300 + b"}}",
    ],
)
def test_lines_that_are_no_event(line):
    assert decode(line) is None


@pytest.mark.parametrize(("event", "field"), FIELDS, ids=[f"{e.kind}-{f.name}" for e, f in FIELDS])
def test_a_field_of_a_wrong_type_spoils_the_event(event, field):
    wanted, _, none = field.type.partition(" | ")
    for wrong in WRONG[wanted]:
        if wrong is None and none:
            continue
        if wrong == -1 and field.name in ("exit_code", "code"):
            continue
        line = json.dumps({**to_json(event), field.name: wrong}).encode()
        assert decode(line) is None, f"{field.name} = {wrong!r}"


def is_of(value: object, hint: object) -> bool:
    if hint is typing.Any:
        return True
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict:
        return isinstance(value, dict)
    if origin is tuple:
        return isinstance(value, tuple) and all(type(one) is int for one in value)
    if args:  # a union
        return any(is_of(value, arg) for arg in args)
    return type(value) in ((int, float) if hint is float else (hint,))


def check(event: Event | None) -> None:
    """What a reader relies on, whatever it was given."""
    if event is None:
        return
    hints = typing.get_type_hints(type(event))
    for field in dataclasses.fields(event):
        assert is_of(getattr(event, field.name), hints[field.name]), field.name
    assert decode(encode(event)) == event


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(line):
    check(decode(line))


NAMES = sorted({f.name for event in ONE_OF_EACH for f in dataclasses.fields(event)})
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.builds(
    lambda kind, values: {"kind": kind, **values},
    st.sampled_from([*events.KINDS, "weather"]),
    st.dictionaries(st.sampled_from(NAMES), JSON, max_size=8),
)


@settings(max_examples=50, deadline=None)
@given(OBJECTS)
def test_any_object(obj):
    check(decode(json.dumps(obj).encode()))


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(ONE_OF_EACH), st.sampled_from(NAMES), JSON)
def test_any_value_in_any_field(event, name, value):
    check(decode(json.dumps({**to_json(event), name: value}).encode()))


@settings(deadline=None)
@given(st.sampled_from(ONE_OF_EACH), st.data())
def test_a_torn_line_is_no_event(event, data):
    line = encode(event)
    assert decode(line[: data.draw(st.integers(0, len(line) - 2))]) is None
