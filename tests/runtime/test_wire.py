"""Frames: whole messages out of whatever pieces arrive; what is no message does no harm."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_ddp.runtime import wire
from jupyter_ddp.runtime.wire import MAX_FRAME, Decoder, WireError, pack

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.dictionaries(st.text(max_size=4), JSON, max_size=4)


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


@settings(max_examples=40, deadline=None)
@given(st.lists(MESSAGES, max_size=4), st.data())
def test_messages_arrive_as_sent_however_they_are_cut(messages, data):
    stream = b"".join(map(pack, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    decoder = Decoder()
    arrived = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        arrived += decoder.feed(stream[start:end])
    assert arrived == messages


def test_a_frame_is_a_length_and_json():
    """The page's side and other languages rely on it."""
    assert pack({"op": "grün"}) == b"\x00\x00\x00\x0e" + '{"op":"grün"}'.encode()


def test_lone_surrogates_travel():
    assert list(Decoder().feed(pack({"text": "a\udcff"}))) == [{"text": "a\udcff"}]


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b'"x"', b"7", b"{", b"\xff\xfe\x00", b"{}{}", b"[" * 100_000]
)
def test_a_frame_that_is_no_message_is_told_and_passed_over(body):
    stream = pack({"a": 1}) + frame(body) + pack({"b": 2})
    assert list(Decoder().feed(stream)) == [{"a": 1}, None, {"b": 2}]


def test_an_absurd_length_ends_the_connection():
    decoder = Decoder()
    found = decoder.feed(pack({"a": 1}) + b"GET / HTTP/1.1\r\n\r\n")
    assert next(found) == {"a": 1}
    with pytest.raises(WireError, match="claims"):
        next(found)
    with pytest.raises(WireError):  # and it stays ended
        list(decoder.feed(b"more"))


def test_nothing_larger_than_the_limit_is_sent_or_awaited(monkeypatch):
    monkeypatch.setattr(wire, "MAX_FRAME", 20)
    with pytest.raises(WireError, match="too large"):
        pack({"text": "x" * 20})
    largest = {"text": "x" * 9}
    assert list(Decoder().feed(pack(largest))) == [largest]
    with pytest.raises(WireError):
        list(Decoder().feed(struct.pack(">I", 21)))


def test_the_limit_leaves_room_for_large_displays():
    assert MAX_FRAME >= 1 << 20


def test_what_was_not_taken_is_not_lost():
    decoder = Decoder()
    found = decoder.feed(pack({"n": 1}) + pack({"n": 2}))
    assert next(found) == {"n": 1}
    assert list(decoder.feed(pack({"n": 3}))) == [{"n": 2}, {"n": 3}]
    assert list(found) == []


@settings(deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes(data):
    try:
        for message in Decoder().feed(data):
            assert message is None or json.dumps(message)
    except WireError:
        pass
