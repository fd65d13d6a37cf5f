"""Run directories: found again, alive or not, completed when their agents died, read while they grow."""

from __future__ import annotations

import itertools
import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jupyter_ddp import rundir
from jupyter_ddp.errors import LaunchError, RunNotFoundError
from jupyter_ddp.events import DisplayEvent, NoteEvent, OutEvent, RunEvent, encode
from jupyter_ddp.rundir import FLOOD_TEXT, EventReader, RunDirectory, RunStore
from jupyter_ddp.runtime.record import log_path, stream_path

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no runs on Windows")


@pytest.fixture
def store(tmp_path) -> RunStore:
    return RunStore(tmp_path / "runs")


def new_run(store: RunStore, **facts: object) -> RunDirectory:
    run = store.create()
    values = {"version": 1, "id": run.run_id, "nnodes": 1, "nproc": 1, "attempt": "a", "created": time.time()}
    run.write_json("run.json", {**values, **facts})
    return run


def renamed(run: RunDirectory, run_id: str) -> RunDirectory:
    return RunDirectory(run.path.rename(run.path.with_name(run_id)))


def write(run: RunDirectory, *events: object, node: int = 0) -> None:
    with log_path(run.path, node).open("ab") as log:
        for event in events:
            log.write(event if isinstance(event, bytes) else encode(event))


def note(seq: int, text: str = "", **common: object) -> NoteEvent:
    return NoteEvent(attempt="a", seq=seq, text=text or f"n{seq}", **common)


# where runs are


def test_a_new_run_is_for_this_user_only(store):
    old = os.umask(0)
    try:
        run = store.create()
        run.write_json("spec.json", {"secret": "\ud800"})
    finally:
        os.umask(old)
    for path, mode in ((run.path, 0o700), (store.root, 0o700), (run.path / "spec.json", 0o600)):
        assert stat.S_IMODE(path.stat().st_mode) == mode
    assert len(run.run_id) == 8
    assert int(run.run_id, 16) >= 0
    assert sorted(path.name for path in run.path.iterdir()) == ["spec.json"]
    assert json.loads((run.path / "spec.json").read_text()) == {"secret": "\ud800"}


def test_runs_are_below_the_state_directory_unless_told_otherwise():
    assert RunStore().root == Path(os.environ["XDG_STATE_HOME"]) / "jupyter_ddp" / "runs"
    assert RunStore("~/elsewhere").root == Path.home() / "elsewhere"


def test_two_runs_never_share_a_directory(store, monkeypatch):
    ids = iter(["0000000a", "0000000a", "0000000b"])
    monkeypatch.setattr(rundir.secrets, "token_hex", lambda _n: next(ids))
    assert [store.create().run_id, store.create().run_id] == ["0000000a", "0000000b"]


def test_a_root_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match=r"run_root"):
        RunStore(tmp_path / "file").create()
    with pytest.raises(LaunchError, match=r"run_root"):
        RunStore(tmp_path / "file" / "runs").create()


def test_a_root_of_somebody_else_is_refused(tmp_path):
    if os.getuid():
        pytest.skip("needs root, to give a directory away")
    root = tmp_path / "runs"
    root.mkdir()
    os.chown(root, 65534, -1)
    with pytest.raises(LaunchError, match=r"belongs to user 65534.*run_root"):
        RunStore(root).create()
    assert not list(root.iterdir())


# finding runs


def test_no_runs_at_all(store):
    assert store.list() == []
    with pytest.raises(RunNotFoundError, match="no runs yet"):
        store.find("last")


def test_the_newest_come_first(store):
    old, new, middle = (new_run(store, created=created) for created in (1.0, 3.0, 2.0))
    assert [run.run_id for run in store.list()] == [new.run_id, middle.run_id, old.run_id]
    assert store.find("last").run_id == new.run_id


def test_what_is_no_run_is_not_listed(store, tmp_path):
    """Nor pruned: the root may be a directory with other things in it."""
    run = new_run(store)
    for name in ("abc", "0123456789", "ABCDEF01", "notes"):
        (store.root / name).mkdir()
        (store.root / name / "run.json").write_text("{}")
    (store.root / "01234567").mkdir()  # not yet, or half made
    (tmp_path / "aaaaaaaa").mkdir()
    (tmp_path / "aaaaaaaa" / "run.json").write_text("{}")
    (store.root / "aaaaaaaa").symlink_to(tmp_path / "aaaaaaaa")
    assert [found.run_id for found in store.list()] == [run.run_id]


@pytest.mark.parametrize("facts", ["", "[]", "{", '{"created": null}', '{"created": "x"}'])
def test_a_run_whose_facts_are_damaged_is_listed_last(store, facts):
    good = new_run(store)
    bad = new_run(store)
    (bad.path / "run.json").write_text(facts)
    assert [run.run_id for run in store.list()] == [good.run_id, bad.run_id]
    assert isinstance(bad.facts(), dict)


def test_a_run_is_found_by_id_beginning_and_name(store):
    one = renamed(new_run(store, name="train", created=1.0), "aaaa1111")
    two = renamed(new_run(store, name="train", created=2.0), "aabb2222")
    three = renamed(new_run(store, name="aaaa1111", created=3.0), "cccc3333")
    four = renamed(new_run(store, name="aa", created=4.0), "dddd4444")
    expected = {
        "aaaa1111": one,  # an id before a name
        "aaaa": one,
        "aab": two,
        "train": two,  # the newest of that name
        "c": three,
        "aa": four,  # a name before a beginning
        "last": four,
    }
    assert {word: store.find(word).run_id for word in expected} == {
        word: run.run_id for word, run in expected.items()
    }


def test_what_fits_several_or_none_is_refused_with_what_there_is(store):
    for run_id in ("aaaa1111", "aabb2222"):
        renamed(new_run(store), run_id)
    with pytest.raises(
        RunNotFoundError, match=r"'aa' fits several runs: (aaaa1111, aabb2222|aabb2222, aaaa1111)"
    ):
        store.find("aa")
    for word in ("zz", "", "aaaa11112"):
        with pytest.raises(RunNotFoundError, match=r"aaaa1111"):
            store.find(word)


# life

HOLDER = "import sys; print('ready', flush=True); sys.stdin.read()"


def test_a_run_lives_while_its_lock_is_held(store):
    run = new_run(store)
    assert not run.is_alive()  # nobody ever took it
    descriptor = run.lock()
    assert run.is_alive()
    assert RunDirectory(run.path).is_alive()
    with pytest.raises(LaunchError, match=run.run_id):
        run.lock()
    os.close(descriptor)
    assert not run.is_alive()
    os.close(run.lock())


def test_whoever_inherits_the_lock_keeps_the_run_alive(store):
    """The kernel hands it to the guard; a kill -9 gives it back."""
    run = new_run(store)
    descriptor = run.lock()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        pass_fds=[descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        holder.stdout.readline()
        os.close(descriptor)
        assert run.is_alive()
        holder.kill()
        holder.wait()
        assert not run.is_alive()


def test_a_child_that_did_not_get_the_lock_does_not_keep_it(store):
    run = new_run(store)
    descriptor = run.lock()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        os.close(descriptor)
        assert not run.is_alive()


def test_looking_does_not_disturb(store):
    """Who asks whether a run lives holds its lock for a moment; who takes the lock then must not be refused."""
    run = new_run(store)
    os.close(run.lock())
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            run.is_alive()

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            os.close(run.lock())
    finally:
        over.set()
        for thread in threads:
            thread.join()


# pruning


def test_pruning_keeps_the_newest(store):
    runs = [new_run(store, created=time.time() - age) for age in range(5)]
    assert store.prune(keep=2, max_age=1e9, max_bytes=1 << 40) == 3
    assert [run.run_id for run in store.list()] == [run.run_id for run in runs[:2]]
    assert store.prune(keep=2, max_age=1e9, max_bytes=1 << 40) == 0


def test_pruning_removes_what_is_too_old(store):
    old, new = (new_run(store, created=time.time() - age) for age in (1_000, 10))
    assert store.prune(keep=9, max_age=100, max_bytes=1 << 40) == 1
    assert not old.path.exists()
    assert new.path.exists()


def test_pruning_removes_the_oldest_until_the_rest_is_small_enough(store):
    runs = [new_run(store, created=time.time() - age) for age in range(4)]
    for run in runs:
        (run.path / "values").mkdir()
        (run.path / "values" / "big").write_bytes(bytes(100_000))
    assert store.prune(keep=9, max_age=1e9, max_bytes=250_000) == 2
    assert [run.path.exists() for run in runs] == [True, True, False, False]
    assert (
        store.prune(keep=9, max_age=1e9, max_bytes=1) == 1
    )  # the last run stays: it is what is being looked at
    assert [run.path.exists() for run in runs] == [True, False, False, False]


def test_pruning_spares_the_living(store):
    runs = [new_run(store, created=age) for age in range(3)]
    descriptor = runs[0].lock()
    assert store.prune(keep=0, max_age=1, max_bytes=0) == 2
    assert [run.path.exists() for run in runs] == [True, False, False]
    os.close(descriptor)
    assert store.prune(keep=0, max_age=1, max_bytes=0) == 1


def test_pruning_follows_no_link(store, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").write_text("x")
    run = new_run(store, created=1.0)
    (run.path / "linked").symlink_to(tmp_path / "data")
    assert store.prune(keep=0, max_age=1, max_bytes=0) == 1
    assert (tmp_path / "data" / "precious").read_text() == "x"


# salvage


def test_a_run_whose_agents_died_is_completed(store):
    """B51."""
    run = new_run(store, nnodes=2, nproc=2)
    write(
        run, note(1), OutEvent(attempt="a", seq=2, rank=0, stream="stdout", offset=0, length=4, text="one\n")
    )
    for rank in range(4):
        stream_path(run.path, rank, "stdout").write_text("one\ntwo\n")
    stream_path(run.path, 1, "stderr").write_bytes("grün\n\xc3".encode("latin-1"))
    assert run.salvage("the agent was killed")
    texts: dict[tuple[int, str], str] = {}
    for event in run.events():
        if isinstance(event, OutEvent):
            key = (event.rank, event.stream)
            texts[key] = texts.get(key, "") + event.text
    assert texts == {**{(r, "stdout"): "one\ntwo\n" for r in range(4)}, (1, "stderr"): "gr\ufffdn\n\ufffd"}
    for node in range(2):
        mine = [event for event in run.events() if event.node == node]
        assert [event.seq for event in mine] == list(range(1, len(mine) + 1))
        assert isinstance(mine[-1], RunEvent)
        assert (mine[-1].outcome, mine[-1].reason) == ("lost", "the agent was killed")
        assert mine[-1].attempt == "a"


def test_salvage_is_done_once(store):
    run = new_run(store)
    assert run.salvage("first")
    before = log_path(run.path, 0).read_bytes()
    assert not run.salvage("second")
    assert log_path(run.path, 0).read_bytes() == before


def test_a_log_that_ended_is_left_alone(store):
    run = new_run(store)
    write(run, RunEvent(attempt="a", seq=1, phase="ended", outcome="succeeded"))
    stream_path(run.path, 0, "stdout").write_text("late")
    before = log_path(run.path, 0).read_bytes()
    assert not run.salvage("x")
    assert log_path(run.path, 0).read_bytes() == before


def test_a_torn_last_line_is_ended_and_told_again(store):
    run = new_run(store)
    stream_path(run.path, 0, "stdout").write_text("one\ntwo\n")
    torn = encode(OutEvent(attempt="a", seq=2, rank=0, stream="stdout", offset=4, length=4, text="two\n"))
    write(
        run,
        OutEvent(attempt="a", seq=1, rank=0, stream="stdout", offset=0, length=4, text="one\n"),
        torn[:-9],
    )
    assert run.salvage("x")
    assert [(event.seq, getattr(event, "text", None)) for event in run.events()] == [
        (1, "one\n"),
        (2, "two\n"),
        (3, None),
    ]


def test_a_living_run_is_not_salvaged(store):
    run = new_run(store)
    descriptor = run.lock()
    assert not run.salvage("x")
    assert not log_path(run.path, 0).exists()
    os.close(descriptor)
    assert run.salvage("x")


def test_nothing_is_salvaged_of_a_directory_that_is_gone(store):
    run = new_run(store)
    store.prune(keep=0, max_age=0, max_bytes=0)
    assert not run.salvage("x")
    assert run.events() == []
    assert run.text(0) == ""
    assert not run.is_alive()


# reading


def test_a_log_is_read_as_it_grows(store):
    run = new_run(store)
    reader = EventReader(run)
    assert reader.read() == []
    write(run, note(1))
    assert reader.read() == [note(1)]
    assert reader.read() == []
    line = encode(note(2, "ü" * 50))
    for byte in line[:-1]:
        write(run, bytes([byte]))
        assert reader.read() == []
    write(run, line[-1:], note(3))
    assert reader.read() == [note(2, "ü" * 50), note(3)]
    assert EventReader(run).read() == [note(1), note(2, "ü" * 50), note(3)]


def test_a_reader_may_come_before_the_run(store):
    run = store.create()
    reader = EventReader(run)
    assert reader.read() == []
    run.write_json("run.json", {"nnodes": 2})
    assert reader.read() == []
    write(run, note(1, node=1), node=1)
    assert reader.read() == [note(1, node=1)]
    write(run, note(1))
    assert reader.read() == [note(1)]


def test_lines_that_are_no_events_are_passed_over(store):
    run = new_run(store)
    junk = b"x" * 300 + b"\n"
    write(run, b"\n", b"torn{\n", junk * 8_000, note(1), b"[1]\n", note(2))
    assert run.events() == [note(1), note(2)]


def test_a_line_of_many_megabytes(store):
    run = new_run(store)
    write(run, note(1, "x" * 5_000_000), note(2))
    assert [(event.seq, len(event.text)) for event in run.events()] == [(1, 5_000_000), (2, 2)]


def test_the_logs_of_several_instances_are_merged_by_time(store):
    run = new_run(store, nnodes=2)
    write(run, note(1, "a", time=1.0), note(2, "d", time=4.0))
    write(run, note(1, "b", node=1, time=2.0), note(2, "c", node=1, time=3.0), node=1)
    assert [event.text for event in run.events()] == list("abcd")


def test_the_order_of_a_log_is_kept_also_when_times_go_back(store):
    """B68: a display has the time at which it was shown, the text before it the time at which it was logged."""
    run = new_run(store, nnodes=2)
    out = OutEvent(attempt="a", seq=1, rank=0, time=10.0, stream="stdout", offset=0, length=2, text="a\n")
    shown = DisplayEvent(attempt="a", seq=2, rank=0, time=9.99, action="display")
    write(run, out, shown, note(3, time=9.98))
    write(run, note(1, node=1, time=9.0), note(2, node=1, time=11.0), node=1)
    assert [(event.node, event.seq) for event in run.events()] == [(1, 1), (0, 1), (0, 2), (0, 3), (1, 2)]


def test_the_whole_text_of_a_rank(store):
    run = new_run(store)
    stream_path(run.path, 0, "stdout").write_bytes(b"a\r\nb\xff")
    assert run.text(0) == "a\r\nb\ufffd"
    assert run.text(0, "stderr") == ""


# floods: events without text


def flood(data: bytes, **changes: object) -> OutEvent:
    values = {"rank": 0, "stream": "stdout", "offset": 0, "length": len(data), "lines": data.count(b"\n")}
    return OutEvent(attempt="a", seq=5, time=1.0, **{**values, **changes})


def read_flood(store: RunStore, data: bytes, event: OutEvent) -> list[OutEvent]:
    run = new_run(store)
    stream_path(run.path, 0, "stdout").write_bytes(data)
    write(run, event)
    reader = EventReader(run)
    return reader.read()


def check_pieces(pieces: list[OutEvent], whole: OutEvent) -> None:
    assert pieces[0].offset == whole.offset
    assert sum(piece.length for piece in pieces) == whole.length
    assert sum(piece.lines for piece in pieces) == whole.lines
    assert [piece.seq for piece in pieces] == [whole.seq, 0][: len(pieces)]
    for before, after in itertools.pairwise(pieces):
        assert after.offset == before.offset + before.length


def test_a_short_one_gets_all_of_its_text(store):
    data = "grün\nblau".encode()
    (event,) = read_flood(store, data, flood(data))
    assert event.text == "grün\nblau"
    check_pieces([event], flood(data))


def test_a_long_one_is_counted_and_gets_the_end_of_its_text(store):
    """B61."""
    data = b"".join(b"line %06d\n" % n for n in range(20_000))
    counted, end = pieces = read_flood(store, data, flood(data))
    check_pieces(pieces, flood(data))
    assert counted.text is None
    assert end.text.startswith("line ")
    assert end.text.endswith("line 019999\n")
    assert FLOOD_TEXT - 20 < end.length <= FLOOD_TEXT
    assert end.lines == end.text.count("\n")


@pytest.mark.parametrize("data", ["€" * 60_000, "x" * 100_000 + "\n", "😀" * 40_000 + "\n"])
def test_an_endless_line_ends_with_whole_characters(store, data):
    """B73."""
    data = data.encode()
    counted, end = pieces = read_flood(store, data, flood(data))
    check_pieces(pieces, flood(data))
    assert counted.length > 0
    assert "\ufffd" not in end.text
    assert end.length > FLOOD_TEXT - 4


def test_only_its_own_part_of_the_file(store):
    data = b"before\n" + b"mine\n" * 3 + b"after\n"
    (event,) = read_flood(store, data, flood(b"mine\n" * 3, offset=7))
    assert (event.text, event.offset, event.lines) == ("mine\n" * 3, 7, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"length": 1_000, "lines": 9},  # more than the file has
        {"offset": 2**63 - 1, "length": 5},
        {"length": 0},
        {"rank": None},
        {"rank": 7},
        {"stream": "../../etc/passwd"},
    ],
)
def test_text_that_is_not_there_leaves_the_event_as_it_was(store, changes):
    event = flood(b"text\n", **changes)
    assert read_flood(store, b"text\n", event) == [event]


def test_files_that_ranks_left_on_purpose_are_never_pruned(store):
    """They are results, and listed as such; only what was recorded of the run goes."""
    run = new_run(store, created=1.0)
    (run.path / "model").mkdir()
    (run.path / "model" / "weights.bin").write_bytes(b"w" * 1000)
    log_path(run.path, 0).write_bytes(b"x" * 1000)
    (run.path / "values").mkdir()
    new_run(store)
    assert store.prune(keep=1, max_age=1e9, max_bytes=1 << 40) == 1
    assert sorted(path.name for path in run.path.iterdir()) == ["model", "run.json"]
    assert run.kept_files() == [str(run.path / "model" / "weights.bin")]
    assert store.prune(keep=1, max_age=1e9, max_bytes=1 << 40) == 0


def test_pruning_can_be_limited_to_now_and_then(store):
    for _ in range(3):
        new_run(store)
    assert store.prune(keep=1, max_age=1e9, max_bytes=1 << 40, every=600) == 2
    new_run(store)
    assert store.prune(keep=1, max_age=1e9, max_bytes=1 << 40, every=600) == 0


def test_checkpoints_in_a_directory_of_the_users_are_listed_if_they_are_new(store, tmp_path):
    own = tmp_path / "checkpoints"
    own.mkdir()
    (own / "old.pt").touch()
    os.utime(own / "old.pt", (1, 1))
    run = new_run(store, checkpoints=str(own))
    (own / "new.pt").touch()
    assert run.kept_files() == [str(own / "new.pt")]


def test_reading_leaves_no_descriptor_open(store):
    run = new_run(store)
    log_path(run.path, 0).write_bytes(encode(NoteEvent(seq=1, text="hello")))
    before = len(list(Path("/proc/self/fd").iterdir()))
    readers = [EventReader(run) for _ in range(20)]
    assert all(reader.read() for reader in readers)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_variables_are_dropped_when_they_are_big(store):
    run = new_run(store)
    run.payload.write_bytes(b"x" * 100)
    run.drop_payload(above=100)
    assert run.payload.exists()
    run.drop_payload(above=99)
    assert not run.payload.exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nnodes", "2"),
        ("nnodes", 2**62),
        ("nnodes", None),
        ("created", "yesterday"),
        ("created", 10**400),
        ("created", True),
        ("name", "a\nb"),
        ("checkpoints", "a\0b"),
        ("config", {"pull": 5, "show": "q", "instance_count": 2}),
    ],
)
def test_facts_that_cannot_be_meant_are_left_out(store, field, value):
    run = new_run(store, backend="local", **{field: value})
    facts = run.facts()
    assert facts["backend"] == "local"
    assert facts.get(field, {"instance_count": 2}) == {"instance_count": 2}
    assert run.nodes() == 1
    assert isinstance(run.created, float)
    assert run.kept_files() == []
    assert run.salvage("gone") is True


@pytest.mark.parametrize("text", ["", "[]", "7", "[" * 100_000, "{"])
def test_facts_that_are_none(store, text):
    run = new_run(store)
    (run.path / "run.json").write_text(text)
    assert run.facts() == {}
    assert (run.nodes(), run.created) == (1, 0.0)


def test_a_log_that_cannot_be_completed_stays_as_it_is(store):
    run = new_run(store)
    log_path(run.path, 0).mkdir()
    assert run.salvage("gone") is False
    assert run.events() == []


def test_a_file_of_checkpoints_with_an_impossible_name(store):
    assert new_run(store, checkpoints="x" * 5_000).kept_files() == []
