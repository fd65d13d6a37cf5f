"""The error tree: as drawn, readable without frames of this package, and fit to travel between processes."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_ddp import errors
from jupyter_ddp.errors import (
    CaptureError,
    CellError,
    ConfigError,
    DistributedError,
    JupyterDDPError,
    LaunchError,
    RunNotFoundError,
    UsageError,
    ValueTravelError,
)

ONE_OF_EACH = [
    JupyterDDPError("a"),
    UsageError("b"),
    ConfigError("timeout", "c"),
    CellError("d", 4),
    CaptureError("e", ("meter", "pg")),
    ValueTravelError("f"),
    LaunchError("g"),
    RunNotFoundError("h"),
    DistributedError("rank 1: ValueError: no", {"any": "result"}),
]
CLASSES = {cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, Exception)}


def drawn() -> dict[str, str]:
    """Return the parent of each error in the drawing at the top of the module."""
    parents: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in errors.__doc__.splitlines():
        if found := re.match(r"    ([│├└─ ]*)([A-Z]\w+Error)\b", line):
            depth = len(found[1])
            while above and above[-1][0] >= depth:
                above.pop()
            parents[found[2]] = above[-1][1] if above else "Exception"
            above.append((depth, found[2]))
    return parents


def test_the_tree_is_as_drawn():
    assert drawn() == {cls.__name__: cls.__base__.__name__ for cls in CLASSES}


def test_there_is_one_of_each():
    assert {type(error) for error in ONE_OF_EACH} == CLASSES


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("travel", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy])
def test_an_error_travels_with_what_it_knows(error, travel):
    """B19: an error with a constructor of its own."""
    arrived = travel(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def last_words(raised: ast.Raise) -> str | None:
    """Return how the text of an error ends that is raised, None when a function or variable has to tell."""
    text = raised.exc.args[-1]
    if isinstance(text, ast.JoinedStr):
        text = text.values[-1]
        if isinstance(text, ast.FormattedValue) and text.conversion != -1:
            return f"{{{ast.unparse(text.value)}!r}}"
    return text.value if isinstance(text, ast.Constant) else None


def test_answers_to_what_was_written_are_sentences():
    """What tells how to write it ends with a full stop; all other errors say what happened, and may become a part of
    a sentence (so do those of backends, which are a `Problem` for ``doctor``).
    """
    found = [
        (f"{path.name}:{node.lineno}", last_words(node))
        for path in Path(errors.__file__).parent.rglob("*.py")
        if path.parent.name != "backends"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        if getattr(node.exc.func, "id", "") in ("UsageError", "ConfigError")
    ]
    assert len(found) > 30
    assert [one for one in found if one[1] is not None and not one[1].endswith(".")] == []


def test_what_they_know():
    assert ConfigError("timeout", "no").field == "timeout"
    assert CellError("no").line is None
    assert CaptureError("no").names == ()
    assert DistributedError("no").result is None


def test_ipython_shows_the_message_alone(tmp_path):
    cell = r"from jupyter_ddp.errors import LaunchError; raise LaunchError('there is no mpirun\ninstall one')"
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--HistoryManager.enabled=False", "--colors=NoColor", "-c", cell],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.stdout.strip().splitlines() == ["LaunchError: there is no mpirun", "install one"]
    assert done.stderr == ""


def test_the_error_of_a_run_is_shown_as_it_was_written():
    message = "rank 1 failed: ValueError: no\n  line 3: raise\n(ranks 0, 2 were stopped)"
    assert DistributedError(message)._render_traceback_() == message.splitlines()


def test_an_error_without_a_message_shows_its_name():
    for cls in CLASSES - {ConfigError}:
        assert cls("")._render_traceback_() == [f"{cls.__name__}: "]
