"""The record: every byte that a rank wrote is in the log once, in order, as text that is whole."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jupyter_ddp.events import Event, NoteEvent, OutEvent, RunEvent, decode
from jupyter_ddp.runtime import record
from jupyter_ddp.runtime.record import (
    CHUNK,
    FLOOD_BURST,
    FLOOD_RATE,
    TURN,
    LogWriter,
    StreamTail,
    log_path,
    read_text,
    stream_path,
)


class Clock(SimpleNamespace):
    """Stands for the module `time` in `record`: time passes when a test says so."""

    def __init__(self) -> None:
        super().__init__(now=100.0)

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(record, "time", clock)
    return clock


class Record:
    """One rank's stdout and the log that is made of it."""

    def __init__(self, run_dir) -> None:
        self.run_dir = run_dir
        self.log = LogWriter(run_dir, 0, "a")
        self.tail = StreamTail(run_dir, 3, "stdout")
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data
        with stream_path(self.run_dir, 3, "stdout").open("ab") as file:
            file.write(data)

    def drain(self, upto: int | None = None) -> bool:
        return self.tail.drain(self.log, self.tail.size() if upto is None else upto)

    def finish(self) -> list[OutEvent]:
        self.tail.finish(self.log)
        self.log.close()
        return self.events()

    def events(self) -> list[OutEvent]:
        self.log.flush()
        found = events(self.run_dir)
        assert [event.seq for event in found] == list(range(1, len(found) + 1))
        return found


def events(run_dir, node: int = 0) -> list[Event]:
    found = [decode(line) for line in log_path(run_dir, node).read_bytes().split(b"\n")[:-1]]
    assert None not in found
    return found


def check_whole(found: list[OutEvent], data: bytes) -> None:
    """Events of one stream and the file that they tell of say the same."""
    offset = 0
    text = ""
    for event in found:
        assert (event.rank, event.stream, event.offset) == (3, "stdout", offset)
        assert event.length > 0
        own = data[offset : offset + event.length]
        assert event.lines == own.count(b"\n")
        text += own.decode(errors="replace") if event.text is None else event.text
        offset += event.length
    assert offset == len(data)
    assert text == data.decode(errors="replace")


# the log


def test_events_are_numbered_and_written_as_whole_lines(tmp_path, clock):
    log = LogWriter(tmp_path, 2, "a1")
    first = log.add(NoteEvent, text="one")
    second = log.add(NoteEvent, rank=5, at=7.123456, text="two")
    assert log_path(tmp_path, 2).read_bytes() == b""
    assert log.flush()
    assert not log.flush()
    assert events(tmp_path, 2) == [first, second]
    assert first == NoteEvent(attempt="a1", node=2, seq=1, time=100.0, text="one")
    assert second == NoteEvent(attempt="a1", node=2, seq=2, rank=5, time=7.1235, text="two")
    log.close()


def test_many_events_do_not_gather_in_memory(tmp_path):
    log = LogWriter(tmp_path, 0, "a")
    for n in range(100):
        log.add(NoteEvent, text=str(n))
    assert len(events(tmp_path)) > 80
    log.close()
    assert [event.text for event in events(tmp_path)] == [str(n) for n in range(100)]


def test_an_event_that_cannot_be_made_takes_no_number(tmp_path):
    log = LogWriter(tmp_path, 0, "a")
    with pytest.raises(TypeError):
        log.add(NoteEvent, words="unknown field")
    with pytest.raises(TypeError):
        log.add(NoteEvent, text={"a set"})
    assert log.add(NoteEvent, text="good").seq == 1
    log.close()


def test_a_log_is_continued(tmp_path):
    log_path(tmp_path, 0).write_bytes(b'{"kind":"note","seq":1,"text":"a"}\n')
    log = LogWriter(tmp_path, 0, "a", last_seq=1)
    log.add(NoteEvent, text="b")
    log.close()
    assert [(event.seq, event.text) for event in events(tmp_path)] == [(1, "a"), (2, "b")]


# text


def test_text_is_read_up_to_where_it_is_asked_for(tmp_path):
    """What a rank displays comes after what it had printed by then, and before the rest."""
    rank = Record(tmp_path)
    assert not rank.drain()  # no file yet
    rank.write(b"one\ntwo\nthree")
    assert rank.drain(4)
    assert not rank.drain(4)
    assert not rank.drain(2)
    rank.log.add(NoteEvent, text="here")
    assert rank.drain(1_000)
    assert [event.text for event in rank.events()] == ["one\n", "here", "two\nthree"]


def test_characters_written_byte_by_byte_stay_whole(tmp_path):
    """B63."""
    rank = Record(tmp_path)
    for byte in "▌é漢🙂\n".encode():
        rank.write(bytes([byte]))
        rank.drain()
    found = rank.finish()
    assert [event.text for event in found] == ["▌", "é", "漢", "🙂", "\n"]
    check_whole(found, rank.data)


def test_a_character_that_is_not_whole_yet_waits_without_being_counted(tmp_path):
    rank = Record(tmp_path)
    rank.write("ab🙂".encode()[:-1])
    assert rank.drain()
    assert rank.tail.offset == 2
    assert not rank.drain()
    rank.write("🙂".encode()[-1:])
    assert rank.drain()
    assert [event.text for event in rank.finish()] == ["ab", "🙂"]


def test_a_character_that_was_cut_off_by_the_end_is_a_mark(tmp_path):
    rank = Record(tmp_path)
    rank.write("ab漢".encode()[:-1])
    rank.drain()
    found = rank.finish()
    assert [event.text for event in found] == ["ab", "\ufffd"]
    check_whole(found, rank.data)


def test_bytes_that_are_no_text_become_marks(tmp_path):
    """B63."""
    rank = Record(tmp_path)
    rank.write(b"raw \xff\xfe bytes\n")
    rank.drain()
    rank.write(b"still here\n\xed\xa0\x80\xc0\x80\n\x80\x80\x80\x80")
    rank.drain()
    found = rank.finish()
    assert found[0].text == "raw \ufffd\ufffd bytes\n"
    check_whole(found, rank.data)


@pytest.mark.parametrize("lead", range(4))
def test_characters_across_the_edges_of_reads(tmp_path, lead):
    rank = Record(tmp_path)
    rank.write(b"x" * lead + "🙂".encode() * (CHUNK // 2))
    rank.drain()
    found = rank.finish()
    assert len(found) > 1
    assert all("\ufffd" not in event.text for event in found)
    check_whole(found, rank.data)


PIECES = st.lists(st.binary(max_size=6) | st.text("aé漢🙂\n", max_size=3).map(str.encode), max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(PIECES, st.lists(st.booleans(), min_size=12, max_size=12), st.integers(-2, 40))
def test_any_bytes_in_any_pieces(tmp_path_factory, pieces, drains, allowance):
    rank = Record(tmp_path_factory.mktemp("run"))
    rank.tail._allowance = float(allowance)  # so that some are in a flood
    for piece, drain in zip(pieces, drains, strict=False):
        rank.write(piece)
        if drain:
            rank.drain()
    check_whole(rank.finish(), rank.data)


def test_a_rank_that_wrote_nothing_or_has_no_files(tmp_path):
    rank = Record(tmp_path)
    assert rank.tail.size() == 0
    assert rank.finish() == []
    assert Record(tmp_path).finish() == []


# floods


def test_a_flood_goes_without_text_and_ends(tmp_path, clock):
    """B61."""
    rank = Record(tmp_path)
    line = ("grün 🙂 " * 10 + "\n").encode()
    burst = line * (FLOOD_BURST // len(line) + 1_000)
    rank.write(burst)
    rank.drain()
    assert rank.tail._allowance < 0
    rank.write("ü".encode()[:1])
    rank.drain()
    rank.write("ü".encode()[1:] + line * (3 * TURN // len(line)))
    rank.drain()
    clock.now += 2
    rank.write(b"calm again\n")
    rank.drain()
    found = rank.finish()
    with_text = [event.text is not None for event in found]
    assert [key for key, _ in itertools.groupby(with_text)] == [True, False, True]
    assert found[-1].text == "calm again\n"
    assert all(event.length <= TURN for event in found)
    check_whole(found, rank.data)


def test_after_a_long_flood_text_comes_back_as_soon_as_after_a_short_one(tmp_path, clock):
    rank = Record(tmp_path)
    rank.write(b"x" * (FLOOD_BURST + 12 * FLOOD_RATE))
    rank.drain()
    clock.now += 1.5
    rank.write(b"calm\n")
    rank.drain()
    assert rank.finish()[-1].text == "calm\n"


def test_a_steady_stream_below_the_rate_is_no_flood(tmp_path, clock):
    rank = Record(tmp_path)
    for _ in range(12):
        rank.write(b"x" * FLOOD_RATE)
        rank.drain()
        clock.now += 1
    assert all(event.text is not None for event in rank.finish())


# salvage and reading


def test_salvage_goes_on_where_the_log_ends_also_in_a_flood(tmp_path):
    """B51."""
    rank = Record(tmp_path)
    rank.write("one 漢\n".encode()[:-2])  # the character is not whole
    rank.drain()
    rank.log.add(OutEvent, rank=3, stream="stdout", offset=4, length=0)
    rank.log.close()
    rank.write("one 漢\n".encode()[-2:] + b"x" * (FLOOD_BURST + TURN) + b"\nend\n")
    assert record.salvage(tmp_path, 0, range(3, 4), "a", "died")
    *found, ended = events(tmp_path)
    assert ended == RunEvent(
        attempt="a", seq=len(found) + 1, time=ended.time, phase="ended", outcome="lost", reason="died"
    )
    check_whole([event for event in found if event.length], rank.data)
    assert not record.salvage(tmp_path, 0, range(3, 4), "a", "died again")


def test_text_of_a_file(tmp_path):
    (tmp_path / "f").write_bytes(b"ab\xffcd")
    assert read_text(tmp_path / "f") == "ab\ufffdcd"
    assert read_text(tmp_path / "f", 3) == "cd"
    assert read_text(tmp_path / "f", 30) == ""
    assert read_text(tmp_path / "none") == ""
