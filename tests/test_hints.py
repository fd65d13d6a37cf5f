"""Hints: one sentence about an error whose cure is certain, and silence otherwise."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest

from jupyter_ddp import hints
from jupyter_ddp.cell import NOTEBOOK_LAUNCHER
from jupyter_ddp.hints import Facts, for_error, for_notebook_error
from jupyter_ddp.line import parse_cell_line
from jupyter_ddp.view.summary import note_lines
from tests.story import Story

NOTEBOOK = {"rates": [1], "_": 3, "In": [], "get_ipython": None}


def hint(type_, message, **facts) -> str:
    found = for_error(Facts(type=type_, message=message, names=NOTEBOOK, **facts))
    assert len(found) <= 1
    text = found[0] if found else ""
    assert "\n" not in text
    assert not text or text.endswith(".")
    return text


@pytest.mark.parametrize(
    ("push", "sent", "words"),
    [
        (("a", "b"), ("a", "b"), "write --push a,b,rates to add it."),
        ((), (), "write --push rates instead of --no-push."),
        (None, ("a", "b"), "write --push a,b,rates to add it."),  # --push sends nothing but what it names
        (None, (), "write --push rates."),
        (None, None, "write --push with it and all others that the cell uses"),
    ],
)
def test_a_name_that_the_notebook_has_is_pushed_without_losing_others(push, sent, words):
    assert words in hint("NameError", "name 'rates' is not defined", push=push, sent=sent)


@pytest.mark.parametrize("name", ["nowhere", "_", "In", "get_ipython"])
def test_a_name_that_cannot_be_pushed_gives_no_hint(name):
    assert hint("NameError", f"name '{name}' is not defined") == ""


def test_a_local_variable_without_a_value_is_no_missing_push():
    assert (
        hint(
            "UnboundLocalError",
            "cannot access local variable 'rates' where it is not associated with a value",
        )
        == ""
    )


@pytest.mark.parametrize(
    ("type_", "message", "facts", "words"),
    [
        (
            "ValueError",
            "Default process group has not been initialized, please make sure to call init_process_group.",
            {},
            "--init-process-group auto",
        ),
        (
            "ValueError",
            "trying to initialize the default process group twice!",
            {"process_group": "gloo"},
            "--init-process-group gloo has already made",
        ),
        (
            "ValueError",
            "ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
            {},
            'init_process_group("gloo")',
        ),
        (
            "ValueError",
            "ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
            {"process_group": "nccl"},
            "--init-process-group gloo",
        ),
        (
            "RuntimeError",
            "x",
            {"traceback": "  notebook_launcher(train, num_processes=2)"},
            "call the function itself",
        ),
        (
            "DistNetworkError",
            "The server socket has failed to listen … port: 29500 … code: -98, name: EADDRINUSE, message: address already in use",
            {},
            "MASTER_PORT",
        ),
        ("OSError", "[Errno 98] Address already in use", {}, "MASTER_PORT"),
    ],
)
def test_known_errors_have_known_cures(type_, message, facts, words):
    assert words in hint(type_, message, **facts)


@pytest.mark.parametrize(
    ("type_", "message"),
    [
        ("ValueError", "loss became nan"),
        ("ValueError", "trying to initialize the default process group twice!"),
        ("EOFError", "nobody can answer input() on a rank: ask in a cell of the notebook"),
        ("EOFError", "EOF when reading a line"),
        ("EOFError", "Compressed file ended before the end-of-stream marker was reached"),
        ("ModuleNotFoundError", "No module named 'surely_nowhere_at_all'"),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB"),
        ("", ""),
    ],
)
def test_nothing_is_said_when_nothing_is_certain(type_, message):
    assert hint(type_, message) == ""


def test_a_module_that_the_notebook_finds_is_named_with_its_directory(tmp_path, monkeypatch):
    folder = tmp_path / "my modules"
    (folder / "package_here").mkdir(parents=True)
    (folder / "onlyhere.py").write_text("x = 1")
    (folder / "package_here" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    for name in ("onlyhere", "package_here"):
        text = hint("ModuleNotFoundError", f"No module named '{name}'")
        assert f"finds {name} in {folder}, " in text
        flag = re.search("write (--env .*), or", text)[1]
        assert parse_cell_line(flag, {}).given["env"] == {"PYTHONPATH": str(folder)}
    assert "onlyhere" not in sys.modules


def test_what_a_package_lacks_is_not_looked_for_elsewhere(tmp_path, monkeypatch):
    """The rank has found the package: its directory is on the path."""
    (tmp_path / "package_there").mkdir()
    (tmp_path / "package_there" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert hint("ModuleNotFoundError", "No module named 'package_there.sub'") == ""


def test_memory_that_the_notebook_itself_holds_is_named(monkeypatch):
    class Cuda:
        is_initialized = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 2)
        memory_reserved = staticmethod(lambda number: [3 << 30, 0][number])

    class Torch:
        cuda = Cuda

    monkeypatch.setitem(sys.modules, "torch", Torch)
    text = hint("OutOfMemoryError", "CUDA out of memory.")
    assert "3.0 GiB of GPU 0:" in text
    assert "GPU 1" not in text


def test_the_hints_of_a_run_come_from_its_first_cause():
    failure = SimpleNamespace(type="NameError", message="name 'rates' is not defined", traceback="")
    view = SimpleNamespace(failure=failure, facts={"config": {"push": ["a"]}}, unit="cell")
    assert hints.for_failure(view, NOTEBOOK) == (
        "rates is a variable of the notebook that was not sent to the ranks: write --push a,rates to add it.",
    )
    view.facts = {"config": {"push": None}, "sent": ["a", "b"]}
    assert "write --push a,b,rates to add it." in hints.for_failure(view, NOTEBOOK)[0]
    view.unit = "function"
    assert hints.for_failure(view, NOTEBOOK) == ()  # there is no line on which a flag could be written
    view.failure = None
    assert hints.for_failure(view, NOTEBOOK) == ()


def test_what_the_text_of_a_cell_has_shown_is_not_said_again():
    story = Story(2).begin().note(NOTEBOOK_LAUNCHER)
    story.error(0, "RuntimeError", "no", traceback="in notebook_launcher").fail()
    for text in hints.for_failure(story.view, {}):
        story.note(text)
    assert len(note_lines(story.view)) == 1


def name_error(code):
    try:
        exec(code, {})
    except NameError as error:
        return error


def test_a_name_that_the_ranks_made_is_pulled():
    text = for_notebook_error(name_error("loss"), {"loss"})
    assert text.startswith("loss was assigned on the ranks")
    assert "--pull loss " in text
    assert "--pull loss@all" in text
    assert for_notebook_error(NameError("name 'loss' is not defined"), ["loss"]) == text


def test_other_errors_of_the_notebook_give_no_hint():
    assert for_notebook_error(name_error("lost"), {"loss"}) is None
    assert for_notebook_error(name_error("def f():\n  print(loss); loss = 1\nf()"), {"loss"}) is None
    assert for_notebook_error(ValueError("name 'loss' is not defined"), {"loss"}) is None
    assert for_notebook_error(None, {"loss"}) is None


def test_a_data_loader_without_shared_memory():
    inner = "Caught RuntimeError in DataLoader worker process 0.\nRuntimeError: unable to write to file </torch_7_2>: "
    assert "shared memory, /dev/shm, is full" in hint("RuntimeError", inner + "No space left on device (28)")
    bus = "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    assert "num_workers=0" in hint("RuntimeError", bus + "shared memory. (insufficient shared memory (shm))")
    assert not hint("RuntimeError", "unable to write to file </data/x>: Permission denied")


def test_a_limit_of_threads_is_named():
    assert "(ulimit -u" in hint("RuntimeError", "while the rank was made ready: can't start new thread")
    assert not hint("RuntimeError", "can't start")
