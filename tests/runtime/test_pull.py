"""What a rank leaves for the notebook comes as it is or not at all, and the run says so where somebody wanted it."""

from __future__ import annotations

import sys

import pytest

from jupyter_ddp.events import NoteEvent, ValueEvent
from jupyter_ddp.runtime import pull
from jupyter_ddp.values import load_value
from tests.runtime.fakeagent import FakeAgent

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no ranks on Windows")

LOCK = """
import threading
class Holder:
    def __init__(self): self.lock = threading.Lock()
    def __repr__(self): return "a text"
"""


@pytest.fixture
def run_dir(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


class Saved:
    """What a `Saver` told."""

    def __init__(self, run_dir, **namespace):
        self.run_dir = run_dir
        self.events = []
        self.saver = pull.Saver(run_dir, 3, self.events.append, namespace)

    @property
    def event(self):
        (event,) = self.events
        return event

    @property
    def value(self):
        return load_value(self.run_dir / self.event.file, self.run_dir)


def test_values_come_back_also_of_a_failed_cell(run_dir):
    source = "loss = 0.5\nwho = {'rank': 0}\nraise ValueError"
    with FakeAgent(run_dir) as agent:
        agent.run(source, pull=[["loss", "all"], ["who", 0], ["late", 0], ["loss", 1]])
        values = {event.name: event for event in agent.events(ValueEvent)}
        assert set(values) == {"loss", "who"}
        assert values["loss"].file == "values/rank0.loss.bin"
        assert load_value(run_dir / values["who"].file, run_dir) == {"rank": 0}
        ops = [frame.get("event", frame)["kind" if "event" in frame else "op"] for frame in agent.frames]
        assert ops.index("error") < ops.index("value") < ops.index("done")


def test_a_value_that_does_not_come_is_one_note_that_names_it(run_dir):
    source = f"{LOCK}\nheld = [Holder()]"
    with FakeAgent(run_dir) as agent:
        assert agent.run(source, pull=[["held", 0], ["nothing", "all"], ["other", 1]]) == 0
        held, nothing = agent.events(ValueEvent)
        assert (held.name, held.file, nothing.name, nothing.file) == ("held", None, "nothing", None)
        assert held.note.startswith("held did not come back: `held[0].lock` is a lock. Create it inside")
        assert nothing.note == "nothing did not come back: this rank has no such variable after the cell"


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("source", ["[1, {'a': 2}]", "value = list(range(500_000))\nvalue"])
def test_the_last_value_comes_back(run_dir, source, returns):
    """Not its text, also when it is large."""
    with FakeAgent(run_dir) as agent:
        assert agent.run(source, returns=returns) == 0
        (event,) = agent.events(ValueEvent)
        assert (event.name, event.file, event.note) == ("", "values/rank0._.bin", "")
        value = load_value(run_dir / event.file, run_dir)
        assert value == ([1, {"a": 2}] if source[0] == "[" else list(range(500_000)))


@pytest.mark.parametrize("returns", [False, True])
def test_a_last_value_that_cannot_travel_never_becomes_its_text(run_dir, returns):
    """For a cell's last expression, which has been shown, that is all; what a function returns was wanted."""
    with FakeAgent(run_dir) as agent:
        assert agent.run(f"{LOCK}\nHolder()", returns=returns) == 0
        told = [(event.name, event.file, event.note[:60]) for event in agent.events(ValueEvent)]
        note = "the function's value did not come back: `value.lock` is a lock"[:60]
        assert told == ([("", None, note)] if returns else [])
        assert agent.events(NoteEvent) == []
        assert not (run_dir / "values" / "rank0._.bin").exists()


def test_a_cells_last_value_above_the_limit_is_named_and_not_kept(run_dir):
    big = bytearray(pull.LAST_LIMIT + 1)
    saved = Saved(run_dir, _=big, weights=big)
    saved.saver.save_last(big)
    assert (type(saved.event), saved.event.level) == (NoteEvent, "info")
    what = "the value of the cell's last expression did not come back (it is larger than 8.0 MB): "
    assert saved.event.text == what + "--pull weights brings it"
    saved = Saved(run_dir)
    saved.saver.save_last(big)
    assert saved.event.text == what + "assign it to a variable; --pull NAME then brings it"
    assert list((run_dir / "values").iterdir()) == []


def test_a_large_last_value_that_is_pulled_by_name_is_no_note(run_dir):
    big = bytes(pull.LAST_LIMIT + 1)
    saved = Saved(run_dir, weights=big)
    saved.saver.save([["weights", "all"]], must_exist=True)
    saved.saver.save_last(big)
    assert saved.event.name == "weights"
    assert saved.value == big


def test_a_large_model_at_the_end_of_a_cell_is_no_note(run_dir):
    torch = pytest.importorskip("torch")
    saved = Saved(run_dir)
    saved.saver.save_last(torch.nn.Linear(1500, 1500))
    assert saved.events == []


def test_what_a_function_returns_comes_up_to_a_generous_limit(run_dir, monkeypatch):
    big = bytes(pull.LAST_LIMIT + 1)
    saved = Saved(run_dir)
    saved.saver.save_returned(big)
    assert saved.value == big
    monkeypatch.setattr(pull, "RETURN_LIMIT", pull.LAST_LIMIT)
    saved = Saved(run_dir)
    saved.saver.save_returned(big)
    assert (type(saved.event), saved.event.file) == (ValueEvent, None)
    assert saved.event.note == (
        "the function's value did not come back: it is larger than 8.0 MB; return less, or write it to a file"
    )
    assert list((run_dir / "values").iterdir()) == []
