"""A cell on a rank means what it means in a notebook; its failures are told as text, once at once and once in full."""

from __future__ import annotations

import base64
import json
import sys

import pytest

from jupyter_ddp.events import DisplayEvent, ErrorEvent, ValueEvent
from jupyter_ddp.values import load_value
from tests.runtime.fakeagent import FakeAgent

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no ranks on Windows")


def test_magics_shell_lines_and_await(tmp_path):
    """B25."""
    source = """

!echo from-shell
%env FOO=bar
import os, asyncio
files = !ls /
%timeit -n1 -r1 sum(range(10))
word = "expanded"
!echo {word} $word
async def later(): return 5
print(os.environ.get("FOO"), len(files) > 0, await later(), [i async for i in agen()] if False else "")
%cd -q /
print(os.getcwd(), open(0).read() == "")
"""
    with FakeAgent(tmp_path) as agent:
        assert agent.run(source) == 0, agent.error
        text = agent.text().replace("\r\n", "\n").splitlines()
        assert text[:2] == ["from-shell", "env: FOO=bar"]
        assert "per loop" in text[2]
        assert text[3:] == ["expanded expanded", "bar True 5 ", "/ True"]


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{'a': 1}", "{'a': 1}"),
        ("5; # silent", None),
        ("x = 3\nx  # shown; really", "3"),
        ("(1,\n 2) ;\n\n# the end", None),
        ("None", None),
        ("x = 4", None),
        ("%time 6", "6"),
        ("%%time\nx = 1\n7", "7"),
        ("%%time\n7;", None),
        ("import asyncio\nawait asyncio.sleep(0, 8)", "8"),
        ("for i in range(3): i", None),
        ("5;  # five\n\n", None),
        ("x = 1; 5", "5"),
        ("'a;'", "'a;'"),
    ],
)
def test_the_last_expression_is_shown(tmp_path, source, shown):
    """B24."""
    with FakeAgent(tmp_path) as agent:
        assert agent.run(source) == 0
        results = [
            event.data["text/plain"] for event in agent.events(DisplayEvent) if event.action == "result"
        ]
        assert results == ([shown] if shown else [])
        assert [event.name for event in agent.events(ValueEvent)] == ([""] if shown else [])


def test_displays_and_figures(tmp_path):
    """B32, B60: figures by show() and at the end of the cell; widgets as their text; bytes in base64; order kept."""
    source = """
import matplotlib, matplotlib.pyplot as plt
from IPython.display import HTML, clear_output, display
plt.plot([1, 2]); plt.show()
handle = display(HTML("<b>1</b>"), display_id="bar")
handle.update(HTML("<b>2</b>"))
clear_output(wait=True)
import ipywidgets
display(ipywidgets.IntSlider(3))
display({"application/x": b"\\x00\\xff", "text/plain": "raw"}, raw=True)
display(HTML("x" * 300_000))
print("text")
plt.plot([3, 4])
"""
    with FakeAgent(tmp_path) as agent:
        assert agent.run(source) == 0, agent.error
        events = agent.events(DisplayEvent)
        assert [event.action for event in events] == [
            *("display", "display", "update", "clear", "display", "display", "display", "result", "display"),
        ]
        assert base64.b64decode(events[0].data["image/png"]).startswith(b"\x89PNG")
        assert [event.display_id for event in events[1:3]] == ["bar", "bar"]
        assert events[3].wait is True
        assert list(events[4].data) == ["text/plain"]
        assert events[5].data["application/x"] == "AP8="
        assert (events[6].data, events[6].file) == ({}, "displays/0-0.json")
        stored = tmp_path / "displays" / "0-0.json"
        assert json.loads(stored.read_text())["data"]["text/html"] == "x" * 300_000
        assert stored.stat().st_mode & 0o777 == 0o600
        assert "image/png" in events[8].data
        shown = [entry.split(":")[0] for entry in agent.transcript()]
        assert shown[-3:] == ["out", "result", "display"]


def test_progress_bars_are_text(tmp_path):
    """B59, B60."""
    source = """
from tqdm.auto import tqdm
from tqdm.notebook import tqdm as ntqdm, trange
for _ in tqdm(range(3)): pass
for _ in ntqdm(range(3)): pass
for _ in trange(3): pass
"""
    with FakeAgent(tmp_path) as agent:
        assert agent.run(source) == 0, agent.error
        assert agent.text("stderr").count("3/3") == 3
        assert "warn" not in agent.text("stderr").lower()
        assert agent.events(DisplayEvent) == []


def test_an_error_is_told_at_once_and_then_in_full(tmp_path):
    """B19: by cell line, without frames of ours or IPython's, whatever the exception does."""
    (tmp_path / "mylib.py").write_text("def call(f):\n    return f()\n")
    source = """
import mylib
class BadBatch(Exception):
    def __init__(self, idx, reason): super().__init__(f"{idx}: {reason}")
def step():
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise BadBatch(17, "nan loss") from error
print("x")
mylib.call(step)
"""
    with FakeAgent(tmp_path) as agent:
        assert agent.run(source, sys_path=[str(tmp_path), *filter(None, sys.path)]) == 1
        first, second = agent.events(ErrorEvent)
        for event in (first, second):
            assert (event.type, event.message, event.line, event.code) == ("BadBatch", "17: nan loss", 10, 1)
            assert event.source == 'raise BadBatch(17, "nan loss") from error'
        assert first.traceback == ""
        assert 0 < first.time == second.time
        lines = [line.strip() for line in second.traceback.splitlines() if "^" not in line]
        assert lines == [
            "Traceback (most recent call last):",
            'File "<distributed cell>", line 8, in step',
            "1 / 0",
            *(["~~^~~"] if "~~^~~" in lines else []),
            "ZeroDivisionError: division by zero",
            "",
            "The above exception was the direct cause of the following exception:",
            "",
            "Traceback (most recent call last):",
            'File "<distributed cell>", line 12, in <module>',
            "mylib.call(step)",
            f'File "{tmp_path}/mylib.py", line 2, in call',
            "return f()",
            'File "<distributed cell>", line 10, in step',
            'raise BadBatch(17, "nan loss") from error',
            "BadBatch: 17: nan loss",
        ]
        assert agent.text("stderr") == ""


@pytest.mark.parametrize(
    ("source", "kind", "message", "line"),
    [
        (
            "class E(Exception):\n    def __str__(self): raise OSError\nraise E",
            "E",
            "__str__ raised OSError",
            4,
        ),
        ("import this_module_is_missing", "ModuleNotFoundError", "No module named", 2),
        ("x = 1\n\n%%time\n", "UsageError", "%%time", 4),
        ("x = 1\nreturn 5", "SyntaxError", "'return' outside function", 3),
        ("\n\nfor i in 3\n    pass", "SyntaxError", "expected ':'", 4),
        ("\n%%time\nx = 1\nx / 0", "ZeroDivisionError", "division by zero", 5),
        ("%%capture out\n1/0", "ZeroDivisionError", "division by zero", 2),
        ("%no_such_magic", "UsageError", "no_such_magic", 2),
        ("%%bash\nexit 3", "CalledProcessError", "exit status 3", 2),
        ("%run missing.py", "Exception", "missing.py", 2),
        ("x = 1\n%pip install something", "UsageError", "%pip", 3),
        ("x = input('name?')", "EOFError", "input()", 2),
        ("import getpass\ngetpass.getpass()", "EOFError", "getpass()", 3),
        ("def f(): f()\nf()", "RecursionError", "maximum recursion", 2),
        ("import asyncio\nawait asyncio.wait_for(asyncio.sleep(9), 0.01)", "TimeoutError", "", 3),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", "", 2),
        ("raise ExceptionGroup('two', [ValueError(1)])", "ExceptionGroup", "two", 2),
    ],
)
def test_kinds_of_errors(tmp_path, source, kind, message, line):
    """B30, B48 and others: type, message and cell line are right, and nothing of ours is in the traceback."""
    if "Group" in kind and sys.version_info < (3, 11):
        return
    with FakeAgent(tmp_path) as agent:
        assert agent.run(source) != 0
        assert (agent.error.type, agent.error.line) == (kind, line), agent.error.traceback
        assert message in agent.error.message
        assert "jupyter_ddp/" not in agent.error.traceback
        assert "IPython/" not in agent.error.traceback
        assert agent.done["ok"] is False


def test_run_is_the_scripts_command_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import argparse, sys\n"
        "parser = argparse.ArgumentParser(); parser.add_argument('--lr', type=float)\n"
        "print(parser.parse_args().lr, __name__, sys.argv[1:], __file__.endswith('train.py'))\n"
        "done = True\n"
        "sys.exit(0)\n",
    )
    with FakeAgent(tmp_path) as agent:
        assert agent.run("%run train.py --lr 1e-3\nprint('on')") == 0, agent.error
        assert agent.text() == "0.001 __main__ ['--lr', '1e-3'] True\non\n"
    with FakeAgent(tmp_path) as agent:
        assert agent.run("%run train.py --wrong") == 2
        assert "unrecognized arguments" in agent.text("stderr")
    script.write_text("def f():\n    raise ValueError('in the script')\nf()\n")
    with FakeAgent(tmp_path) as agent:
        assert agent.run("%run train.py\nprint('not reached')") == 1
        assert "not reached" not in agent.text()
        assert (agent.error.message, agent.error.line) == ("in the script", 2)
        assert f'File "{script}", line 2, in f' in agent.error.traceback
    script.write_text("def f(:\n")
    with FakeAgent(tmp_path) as agent:
        assert agent.run("%run train.py") == 1
        assert agent.error.type == "SyntaxError"
        assert f'File "{script}", line 1' in agent.error.traceback
        assert "def f(:" in agent.error.traceback


def test_code_finds_its_own_source(tmp_path):
    """B08."""
    source = """
import inspect, torch
def bump(x: torch.Tensor): return x + 1
print(torch.jit.script(bump)(torch.ones(1)).item())
print(inspect.getsource(bump).splitlines()[0])
class Tiny(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        return x + 2
print(torch.jit.script(Tiny())(torch.ones(1)).item())
"""
    with FakeAgent(tmp_path) as agent:
        assert agent.run(source) == 0, agent.error
        assert agent.text() == "2.0\ndef bump(x: torch.Tensor): return x + 1\n3.0\n"


def test_a_cell_that_shows_an_error_goes_on(tmp_path):
    """What a notebook would only show does not fail the rank."""
    source = """
from IPython.display import display
class Odd:
    def _repr_html_(self): raise ValueError("no html")
    def __repr__(self): return "odd"
display(Odd())
result = get_ipython().run_cell("1/0")
print(type(result.error_in_exec).__name__)
"""
    with FakeAgent(tmp_path) as agent:
        assert agent.run(source) == 0, agent.error
        assert agent.text() == "ZeroDivisionError\n"
        assert "no html" in agent.text("stderr")
        assert "division by zero" in agent.text("stderr")
        assert agent.events(DisplayEvent)[0].data == {"text/plain": "odd"}


def test_values_come_back_also_of_a_failed_cell(tmp_path):
    tmp_path.chmod(0o700)
    source = "loss = 0.5\nwho = {'rank': 0}\nraise ValueError"
    with FakeAgent(tmp_path) as agent:
        agent.run(source, pull=[["loss", "all"], ["who", 0], ["late", 0], ["loss", 1]])
        values = {event.name: event for event in agent.events(ValueEvent)}
        assert set(values) == {"loss", "who"}
        assert values["loss"].file == "values/rank0.loss.bin"
        assert load_value(tmp_path / values["who"].file, tmp_path) == {"rank": 0}
        ops = [frame.get("event", frame)["kind" if "event" in frame else "op"] for frame in agent.frames]
        assert ops.index("error") < ops.index("value") < ops.index("done")
