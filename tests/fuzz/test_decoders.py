"""Logs and frames: whatever the bytes, what is whole is read, what is not does no harm to what comes after."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from jupyter_ddp import events
from jupyter_ddp.events import Event, UnknownEvent, decode, encode, from_json, to_json
from jupyter_ddp.rundir import EventReader, RunDirectory
from jupyter_ddp.runtime.wire import Decoder, WireError, pack
from tests.fuzz.events import CLASSES, EVENTS, JSON, is_finite, of_class
from tests.fuzz.profile import fuzz
from tests.fuzz.texts import ANY

NAMES = sorted({f.name for cls in CLASSES for f in dataclasses.fields(cls)})
DEEP = [
    "[" * 990 + "]" * 990,
    "[" * 100_000,
    '{"a":' * 990 + "1" + "}" * 990,
    '{"kind":"display","action":"display","data":' + '{"a":' * 400 + "1" + "}" * 402,
]
FOREIGN = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([text.encode() for text in DEEP]),
    st.sampled_from(
        [
            b'{"kind":"note","text":' + b"9" * 5000 + b"}",
            b"NaN",
            b'{"kind":"note","text":"a","time":NaN}',
            b"\xff\xfe[\x00]\x00",
        ]
    ),
    JSON.map(lambda value: json.dumps(value).encode()),
).filter(lambda line: b"\n" not in line)
OBJECTS = st.builds(
    lambda kind, fields: {"kind": kind, **fields},
    st.sampled_from([*events.KINDS, "a kind to come", "", "unknown"]) | JSON,
    st.dictionaries(st.sampled_from(NAMES) | st.text(ANY, max_size=5), JSON, max_size=8),
)


def said(value):
    """Return a value as JSON says it: halves of a surrogate pair that meet are a character; there is one zero."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if isinstance(value, float):
        return value + 0.0
    if isinstance(value, dict):
        return {said(key): said(one) for key, one in value.items()}
    return [said(one) for one in value] if isinstance(value, list | tuple) else value


def same(one: Event | None, other: Event | None) -> bool:
    """Equality for which NaN in free JSON is equal to itself."""
    if one is None or other is None:
        return one is other
    return type(one) is type(other) and repr(said(dataclasses.asdict(one))) == repr(
        said(dataclasses.asdict(other))
    )


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.kind)
def test_every_event_is_read_as_it_was_written(cls):
    @fuzz(25)
    @given(of_class(cls))
    def check(event):
        line = encode(event)
        assert line.count(b"\n") == 1
        line.decode()
        back = decode(line)
        assert same(back, event)
        assert same(decode(encode(back)), back)
        assert same(from_json(to_json(event)), event)

    check()


@fuzz(100)
@given(OBJECTS)
def test_any_object_is_an_event_or_nothing(obj):
    event = from_json(obj)
    known = isinstance(obj["kind"], str)
    if not known:
        assert event is None
    elif event is not None:
        assert isinstance(event, events.KINDS.get(obj["kind"], UnknownEvent))
        assert same(decode(encode(event)), event)


@fuzz(60)
@given(st.lists(EVENTS | FOREIGN, max_size=8), st.data())
def test_good_lines_are_read_after_bad_ones_doubled_and_in_any_order(parts, data):
    parts = data.draw(st.permutations(parts + parts[:2]))
    lines = [encode(part) if isinstance(part, Event) else part + b"\n" for part in parts]
    found = [decode(line) for line in b"".join(lines).split(b"\n")[:-1]]
    for part, event in zip(parts, found, strict=True):
        if isinstance(part, Event):
            assert same(event, part)
        elif event is not None:
            assert isinstance(event, Event)


@fuzz(60)
@given(EVENTS, st.integers(0, 10_000), st.binary(max_size=4))
def test_a_torn_line_is_no_event_and_spoils_no_other(event, at, junk):
    line = encode(event)
    at %= len(line) - 1
    assert decode(line[:at]) is None
    decode(line[:at] + junk + line[at:])


@fuzz(40)
@given(events=st.lists(EVENTS | FOREIGN, max_size=8), cuts=st.lists(st.integers(0, 3000), max_size=6))
def test_a_log_is_read_as_it_grows(tmp_path_factory, events, cuts):
    """Each whole line once, wherever the file ended when somebody looked."""
    run = RunDirectory(tmp_path_factory.mktemp("run"))
    (run.path / "run.json").write_text('{"nnodes": 1}')
    whole = b"".join(encode(part) if isinstance(part, Event) else part + b"\n" for part in events)
    reader, found, start = EventReader(run), [], 0
    with (run.path / "node-0.jsonl").open("ab", buffering=0) as log:
        for stop in [*sorted(cut for cut in cuts if cut < len(whole)), len(whole)]:
            log.write(whole[start:stop])
            found += reader.read()
            start = stop
    expected = [event for line in whole.split(b"\n") if (event := decode(line))]
    assert [repr(event) for event in found] == [repr(event) for event in expected]


MESSAGES = st.dictionaries(st.text(ANY, max_size=4), JSON, max_size=4).filter(is_finite)


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@fuzz(60)
@given(st.lists(MESSAGES | FOREIGN, max_size=6), st.lists(st.integers(0, 5000), max_size=8))
def test_frames_arrive_whole_and_in_order_among_bad_ones(parts, cuts):
    stream = b"".join(pack(part) if isinstance(part, dict) else frame(part) for part in parts)
    places = sorted(cut for cut in cuts if cut <= len(stream))
    decoder, arrived = Decoder(), []
    for start, stop in zip([0, *places], [*places, len(stream)], strict=True):
        arrived += decoder.feed(stream[start:stop])
    assert len(arrived) == len(parts)
    for part, message in zip(parts, arrived, strict=True):
        assert message == part if isinstance(part, dict) else message is None or isinstance(message, dict)
    assert not decoder._buffer


@fuzz(60)
@given(st.lists(st.binary(max_size=30) | MESSAGES.map(pack), max_size=6))
@example([b"\x00\x00\x00\x04null"])
@example([b"\xff\xff\xff\xff"])
def test_any_bytes_give_messages_or_the_end_of_the_connection(pieces):
    decoder = Decoder()
    try:
        for piece in pieces:
            for message in decoder.feed(piece):
                assert message is None or isinstance(message, dict)
    except WireError:
        with pytest.raises(WireError):
            list(decoder.feed(b"more"))


@fuzz(40)
@given(JSON)
def test_what_is_packed_is_utf8_and_comes_back(value):
    assume(is_finite(value))
    body = pack({"value": value})[4:]
    body.decode()
    assert list(Decoder().feed(frame(body))) == [{"value": value}]
