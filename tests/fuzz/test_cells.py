"""Cells: any text is a program or gives one error; every name that a program takes from the notebook is found."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from jupyter_ddp.cell import Program, compile_cell
from jupyter_ddp.errors import CellError
from tests.fuzz.profile import fuzz
from tests.fuzz.programs import PROGRAMS, looked_up
from tests.fuzz.texts import ANY, PIECES


@pytest.fixture(scope="module")
def shell():
    config = Config()
    config.HistoryManager.enabled = False
    yield InteractiveShell.instance(config=config)
    InteractiveShell.clear_instance()


def explains(error, source):
    assert str(error).strip()
    assert error.line is None or 1 <= error.line <= source.count("\n") + source.count("\r") + 20


def compiled(source, shell):
    """Return the program of a text, or None where there is an error that says so."""
    try:
        program = compile_cell(source, shell, "%%distributed -p 2")
    except CellError as error:
        explains(error, source)
        return None
    assert isinstance(program, Program)
    assert program.source == source
    assert all(name.isidentifier() for name in program.reads | program.assigns)
    return program


MAGICS = st.sampled_from(
    [
        *("%time x = 1", "%timeit -n 1 f(x)", "%%time\n", "%%time x\n", "%%capture out\n", "%%timeit a\n", "%%bash\necho {x} $y", "%%writefile {p}\n", "!ls {x} $y"),
        *("out = !ls $d", "x = %time f(y)", "%run -i no.py", "%run -i '", "%run -i ''", "%run -i \0", "%run -i ~nobody/x", "%run -i " + "n" * 300, "%run -i ..", "%run -i /", "?x", "x?", "x??", "%%", "%", "!", "!!", "%%!\n"),
        *(",f a b", ";f a b", "/f a", "%load_ext {e}", "get_ipython().run_line_magic('time', 'x')", "get_ipython().run_cell_magic('time', '', 'x +')", "get_ipython().run_line_magic()"),
        *("%time " + "(" * 300, "!{" + "(" * 300 + "}", "!{x!r:>{w}}", "!{", "!}", "!{0}", "!{x", "%%prun -s\n", "%%debug\n", "%%python\nx = ", ">>> x = 1\n... y", "In [1]: x"),
        *("await f()", "async for i in x: pass", "return 1", "yield x", "from __future__ import annotations", "from __future__ import no", "import *", "from x import *", "nonlocal x", "global x"),
        *("eval('x +')", "exec('y = 1')", "df.query('@x')", "eval('" + "(" * 250 + "')", "vars()['k k']", "globals()[1]", "lambda: (yield)", "[x async for x in y]", "class A[T]: x: T", "type X[T] = T"),
        *("def f(): return x", "x = 1", "(" * 250, "[" * 5000, "-" * 3000 + "x", "x" + ".a" * 3000, "f(" * 90 + ")" * 90, "if x:\n" * 3, "\\", "'''", "# -*- coding: latin-7 -*-", "# coding: x", "\ufeffx"),
    ]
)  # fmt: skip
LINES = MAGICS | PIECES | st.text(ANY, max_size=10) | PROGRAMS
JOINTS = st.sampled_from(["\n", "\n", "\n    ", "\r\n", "\r", "; ", "\n\n", "\x0c", ""])
TEXTS = st.lists(st.tuples(JOINTS, LINES), max_size=6).map(lambda parts: "".join(a + b for a, b in parts))


@fuzz(50)
@given(TEXTS)
@example("-" * 100_000 + "x")
@example("x" + "+x" * 20_000)
@example("x" + ".a" * 20_000)
@example("\n".join(f"{' ' * depth}if x:" for depth in range(99)) + " y")
@example("%%time\n%%time\n%%time\nx +")
@example("\0")
@example("\ud800 = 1")
@example("'\ud800'")
@example("%time '\ud800'")
def test_any_text_is_a_program_or_an_error(shell, source):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(source, shell)


@fuzz(25)
@given(PROGRAMS, st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_what_a_program_takes_from_the_notebook_is_found(shell, source, fate):
    program = compiled(source, shell)
    if program is not None:
        # A decorator that calls a function at once, which calls itself: an older one of that name is not sent for it.
        itself = set(re.findall(r"@\w+\n *def (\w+)", source))
        assert looked_up(source, fate) <= program.reads | itself, source
