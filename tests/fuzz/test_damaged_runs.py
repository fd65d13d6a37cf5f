"""Damaged run directories: listing, finding, printing and reading them raise nothing that is not documented."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from jupyter_ddp import history
from jupyter_ddp.errors import ConfigError, RunNotFoundError, ValueTravelError
from jupyter_ddp.events import DisplayEvent, OutEvent, RankEvent, RunEvent, ValueEvent, encode
from jupyter_ddp.logend import log_state
from jupyter_ddp.run import Run
from jupyter_ddp.rundir import RunDirectory, RunStore
from jupyter_ddp.values import load_value
from tests.fuzz.events import EVENTS, JSON, TEXT, of_class
from tests.fuzz.profile import fuzz
from tests.fuzz.texts import ANY

NAMES = [
    "run.json",
    "node-0.jsonl",
    "node-1.jsonl",
    "rank0.stdout",
    "rank0.stderr",
    "rank1.stdout",
    "agent.json",
    "guard.log",
    "agent-0.log",
    "alive",
    "payload.bin",
]
FILES = st.sampled_from(
    [
        "values/rank0.x.bin",
        "values/",
        ".",
        "..",
        "/etc/passwd",
        "values/\0",
        "\ud800",
        "v" * 5000,
        "displays/0-1.json",
        "run.json",
    ]
)
EVENTS_ON_DISK = st.lists(
    EVENTS
    | of_class(OutEvent, rank=st.integers(0, 2), attempt=st.just("a1"))
    | of_class(RunEvent, phase=st.sampled_from(["running", "ending", "ended"]))
    | of_class(RankEvent, rank=st.integers(0, 1), attempt=st.just("a1"))
    | of_class(ValueEvent, rank=st.just(0), name=st.sampled_from(["x", ""]), file=FILES)
    | of_class(DisplayEvent, rank=st.just(0), file=FILES, action=st.just("display")),
    max_size=8,
).map(lambda events: b"".join(map(encode, events)))
SOME_FACTS = [
    "id",
    "attempt",
    "name",
    "created",
    "backend",
    "protocol",
    "nnodes",
    "nproc",
    "world_size",
    "config",
    "checkpoints",
    "sent",
    "line",
    "source",
    "pid",
    "kernel_id",
]
VALUES = JSON | st.sampled_from(
    [
        2,
        2**31,
        2**62,
        -1,
        1.5,
        "2",
        "a\0b",
        "x" * 5000,
        {"pull": "x,y@all", "show": [1]},
        {"pull": 5, "show": "q", "timeout": []},
        1e300,
    ]
)
FACTS = st.dictionaries(st.sampled_from(SOME_FACTS), VALUES, max_size=8)
GOOD = {
    "id": "0badcafe",
    "created": 1.7e9,
    "nnodes": 1,
    "nproc": 2,
    "world_size": 2,
    "attempt": "a1",
    "config": {"pull": ["x", "y@all"]},
}
CONTENTS = st.one_of(
    st.none(),  # it is not there
    st.just("a directory"),
    st.just("a link to itself"),
    st.binary(max_size=40),
    EVENTS_ON_DISK,
    FACTS.map(lambda facts: json.dumps(facts).encode()),
    FACTS.map(lambda facts: json.dumps({**GOOD, **facts}).encode()),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.sampled_from(
        [
            b"",
            b"{",
            b"[]",
            b'{"sockets": [1]}',
            b'{"sockets": ["/no/such"]}',
            b"[" * 100_000,
            b"\xff\xfe\x00",
            b"text\n" * 30,
            b"JDDP\x01" + b"\0" * 60,
        ]
    ),
)
USUAL = {"run.json": json.dumps(GOOD).encode(), "rank0.stdout": b"hello\nw\xc3", "node-0.jsonl": None}


@contextmanager
def store_of(*runs):
    """Write run directories; give their store."""
    root = Path(tempfile.mkdtemp(prefix="ddp-damaged-"))
    try:
        for number, files in enumerate(runs):
            directory = root / f"0badcaf{number}"
            directory.mkdir(mode=0o700)
            for name, content in files.items():
                path = directory / name
                if content == "a directory":
                    path.mkdir()
                elif content == "a link to itself":
                    path.symlink_to(path)
                elif content is not None:
                    path.write_bytes(content)
        yield RunStore(root)
    finally:
        shutil.rmtree(root)


def look_at(store, rank):
    """Do all that one can do with runs that are over."""
    found = store.list()
    assert isinstance(history.runs_text(found, store.root, time.time()), str)
    assert all(isinstance(word, str) for word in history.words_for_runs(store))
    assert history.alive(store) == []
    for run in found:
        assert history.attach(run.run_id, store.root).id == run.run_id
        assert not log_state(run).alive
        assert isinstance(run.kept_files(), list)
        with suppress(RunNotFoundError) if rank else nullcontext():
            assert isinstance(history.log_text(run, rank, 2_000), str)
        assert history.stop(run).startswith(f"Run {run.run_id} is over")
        read(Run(run))


def read(run):
    assert run.id in repr(run)
    assert run.name is None or isinstance(run.name, str)
    assert isinstance(run.status, str)
    result = run.result(timeout=20)
    assert not result.ok or result.outcome == "succeeded"
    assert run.id in run.log_dir
    assert isinstance(repr(result), str)
    assert isinstance(result._repr_html_(), str)
    assert isinstance(result.text(), str)
    assert isinstance(run.pulled(), tuple)
    for one in result.ranks[:3]:
        assert isinstance(one.text + one.stdout + one.stderr, str)
    for what in ("x", "x@1", "x@all"):
        with suppress(ValueTravelError):
            assert run.pull(what) is None
    with suppress(ConfigError):  # there is no such backend
        assert run.stop() is False
    run.close()


DAMAGED = st.dictionaries(st.sampled_from(NAMES), CONTENTS, min_size=1, max_size=6)


@fuzz(120)
@given(DAMAGED, DAMAGED, st.sampled_from([None, 0, 1, 7]))
def test_whatever_is_in_a_run_directory(one, other, rank):
    with store_of({**USUAL, **one}, other) as store:
        look_at(store, rank)


@fuzz(60)
@given(EVENTS_ON_DISK, st.integers(0, 200), st.sampled_from([None, 0]))
def test_whatever_a_log_says_and_wherever_it_ends(log, cut, rank):
    with store_of({**USUAL, "node-0.jsonl": log[: max(0, len(log) - cut)]}) as store:
        look_at(store, rank)


@fuzz(60)
@given(FACTS)
@example({"nnodes": 2**62, "nproc": "2"})
@example({"created": 10**400, "world_size": [2]})
@example({"checkpoints": "a\0b"})
@example({"checkpoints": "x" * 5000, "config": {"pull": 5}})
def test_whatever_the_facts_are(facts):
    with store_of({**USUAL, "run.json": json.dumps({**GOOD, **facts}).encode()}) as store:
        look_at(store, 1)


@fuzz(60)
@given(st.text(ANY, max_size=12) | TEXT | st.sampled_from(["0bad", "last", "", "0badcaf0"]))
def test_any_word_finds_a_run_or_says_that_there_is_none(word):
    with store_of(USUAL, USUAL) as store:
        with suppress(RunNotFoundError):
            assert isinstance(store.find(word), RunDirectory)
        with suppress(RunNotFoundError):
            assert history.to_stop(store, word).run_id.startswith("0badcaf")


def container(head, pickles=b"\x80\x05N."):
    text = json.dumps(head).encode()
    sizes = b"".join(size.to_bytes(8, "little") for size in (0, len(text), len(pickles)))
    return b"JDDP\x01\x00\x00\x00" + sizes + text + pickles


@fuzz(80)
@given(
    st.binary(max_size=120) | JSON.map(container),
    st.sampled_from(["v.bin", "..", "v.bin/x", "a\0b", "\ud800", "n" * 300, "/"]),
)
@example(b"", "v.bin")
def test_a_value_file_gives_a_value_or_a_sentence(content, name):
    with store_of({"v.bin": content}) as store:
        directory = store.root / "0badcaf0"
        with suppress(ValueTravelError):
            assert load_value(os.path.join(directory, name), directory) is None  # noqa: PTH118 - names that Path would change
