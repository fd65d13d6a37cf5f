"""Neighbours of the field cases: cells of the same kinds that broke something, or that tell the most."""

from __future__ import annotations

import pytest

from tests.book import ONE

pytestmark = [pytest.mark.kernel, pytest.mark.mpi]

BY_NAME = """
from typing import NewType, ParamSpec, TypeVarTuple
Metres = NewType('Metres', int)
P, Ts = ParamSpec('P'), TypeVarTuple('Ts')
class Nothing:
    def __init__(self): self.tag = 4
    def __reduce__(self): return 'MISSING'
MISSING = Nothing()
table = {'missing': MISSING}
"""
CLOSURES = """
def outer():
    a = 1
    def middle():
        b = 2
        def inner(): return a + b + hidden
        return inner
    return middle
hidden = 10
größe, 变量, list = 1, 2, [3]
class Node:
    def __init__(self, parent=None): self.parent = parent; self.children = []
Node.root = Node(); Node.root.children.append(Node(Node.root))
"""


@pytest.mark.parametrize(
    ("notebook_has", "cell", "lines"),
    [
        pytest.param(
            BY_NAME,
            "print(Metres(3), Metres.__supertype__, P.__name__, Ts, table['missing'] is MISSING, MISSING.tag)",
            ["3 <class 'int'> P Ts True 4"],
            id="known-by-name",
        ),
        pytest.param(
            CLOSURES,
            "print(outer()()(), größe, 变量, list, Node.root.children[0].parent is Node.root)",
            ["13 1 2 [3] True"],
            id="closures-and-names",
        ),
        pytest.param(
            "",
            "async def numbers():\n    for i in range(3): yield i\nprint([i async for i in numbers()])\n"
            "import asyncio\nprint(await asyncio.gather(*[asyncio.sleep(0, i) for i in range(2)]))",
            ["[0, 1, 2]", "[0, 1]"],
            id="await",
        ),
        pytest.param(
            "",
            "int = 3; open = 4; str = 5; print = None; Exception = 6; __builtins__ = {}\n'last'",
            ["'last'"],
            id="builtins-shadowed",
        ),
        pytest.param(
            "",
            "import threading, time\ndef late(): time.sleep(0.3); print('late')\n"
            "threading.Thread(target=late).start(); print('end')",
            ["end", "late"],
            id="thread-outlives-the-cell",
        ),
    ],
)
def test_what_a_cell_may_be(book, notebook_has, cell, lines):
    """Of B01 to B30."""
    if notebook_has:
        book.run(notebook_has)
    shown = book.distribute(cell)
    if "list" in notebook_has:
        book.run("del list")
    assert [shown.lines(rank) for rank in range(2)] == [lines, lines]


def test_a_singleton_comes_back_as_the_notebooks_own(book):
    """Of B06."""
    book.run(BY_NAME)
    assert book.distribute("back = [MISSING]", f"{ONE} --pull back").ok
    assert book.run("print(back[0] is MISSING)") == "True\n"


@pytest.mark.parametrize(
    ("cell", "first_line"),
    [
        *(
            (
                f"class Bad(Exception):\n    def __str__(self): raise {end}\nraise Bad()",
                f"rank 0 failed: Bad: (this Bad has no text: its __str__ raised {end})",
            )
            for end in ("SystemExit", "KeyboardInterrupt")
        ),
        (
            "a, b = ValueError('a'), ValueError('b')\na.__cause__, b.__cause__ = b, a\nraise a",
            "rank 0 failed: ValueError: a",
        ),
        ("raise ValueError('l1\\nl2\\x00\\ud800')", "rank 0 failed: ValueError: l1"),
        (
            "import os, time\nprint('x', flush=True)\nraise KeyboardInterrupt('mine')",
            "rank 0 failed: KeyboardInterrupt: mine",
        ),
        ("raise SystemExit(1, 2)", "rank 0 called sys.exit((1, 2))"),
        (
            "import os\nos.execvp('true', ['true'])",
            "rank 0 exited with code 0 without finishing its cell (no Python traceback)",
        ),
        (
            "import sys\nsys.stdout = sys.stderr = None\n1 / 0",
            "rank 0 failed: ZeroDivisionError: division by zero",
        ),
    ],
    ids=["str-exits", "str-interrupts", "cycle", "odd-text", "interrupt", "exit-tuple", "exec", "no-streams"],
)
def test_how_a_cell_may_fail(book, cell, first_line):
    """Of B19, B27, B45."""
    assert book.distribute(cell, ONE).error.split("\n")[0] == first_line


def test_a_forked_child_tells_its_error(book):
    """Of B53: on stderr, as Python does; the rank goes on."""
    shown = book.distribute(
        "import os\npid = os.fork()\nif pid == 0: raise ValueError('in the child')\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
        ONE,
    )
    assert shown.ok
    assert shown.lines(0) == ["1"]
    assert shown.lines(0, "!")[-1] == "ValueError: in the child"
