"""What a cell reads from the notebook, and how one that does not compile is answered."""

from __future__ import annotations

import contextlib

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from jupyter_ddp.cell import compile_cell
from jupyter_ddp.errors import CellError


@pytest.fixture(scope="module")
def shell():
    config = Config()
    config.HistoryManager.enabled = False
    yield InteractiveShell.instance(config=config)
    InteractiveShell.clear_instance()


READS = [
    # order
    ("x = 1\nprint(x, y)", "print y"),
    ("x += 1", "x"),
    ("del x", "x"),
    ("x = 1\ndel x\nx", "x"),
    ("x: int\nx", "int x"),
    ("(y := a)\ny", "a"),
    ("a, (b, *c) = v\na, b, c", "v"),
    ("import os.path, numpy as np\nfrom m import z\nos, np, z", ""),
    ("d[i] = o.attr", "d i o"),
    # one branch binds: a read; both: none
    ("if t:\n    b = 1\nb", "t b"),
    ("if t:\n    b = 1\nelse:\n    b = 2\nb", "t"),
    ("if t:\n    b = 1\nelse:\n    raise E\nb", "t E"),
    ("for i in xs:\n    last = i\nlast", "xs last"),
    ("for i in range(3):\n    last = i\nlast, i", "range"),
    ("while True:\n    v = 1\n    break\nv", ""),
    # a loop is left, or a turn of it ends, before all of its body ran
    ("while True:\n    if t:\n        break\n    v = 1\nv", "t v"),
    ("while True:\n    if t:\n        v = 1\n        break\nv", "t"),
    ("while True:\n    try:\n        v = f()\n        break\n    except E:\n        continue\nv", "f E"),
    ("for i in range(3):\n    if t:\n        continue\n    v = 1\nv, i", "range t v"),
    ("for i in range(3):\n    if t:\n        break\n    v = 1\nelse:\n    w = 1\nv, w", "range t v w"),
    ("for i in xs:\n    if t:\n        break\nelse:\n    v = 1\nv", "xs t v"),
    ("for i in xs:\n    v = 1\n    break\nelse:\n    v = 2\nv", "xs"),
    ("while n:\n    pass\nelse:\n    v = 1\nv", "n"),
    ("[(v := i) for i in xs]\nv", "xs v"),
    ("a < b < (v := 1)\nv", "a b v"),
    ("while n:\n    v = 1\nv", "n v"),
    ("try:\n    import a\nexcept ImportError:\n    a = None\na", "ImportError"),
    ("try:\n    a = f()\nexcept E as e:\n    print(e)\na", "f E print a"),
    ("try:\n    pass\nfinally:\n    a = 1\na", ""),
    ("with open(p) as fh:\n    d = fh.read()\nd", "open p"),
    ("with suppress(E):\n    d = 1\nd", "suppress E d"),
    (
        "match m:\n    case {'k': z, **r}:\n        z, r\n    case [h, *t]:\n        h, t\n    case C(q) as w if w:\n        q",
        "m C",
    ),
    ("t and (w := 1)\nw", "t w"),
    # scopes
    ("[w * k for w in ws if w > t]", "k ws t"),
    ("{k: v for k, v in d.items()}", "d"),
    ("[x for x in xs for y in x if y in zs]", "xs zs"),
    ("[lambda: i + j for i in q]", "q j"),
    ("g = lambda v, s=d: v * s * u", "d u"),
    ("f'{n:>{w}} {x!r}'", "n w x"),
    ("@deco(o)\ndef f(a: T = dflt) -> R:\n    return a + z", "deco o T dflt R z"),
    ("class A(B, metaclass=M):\n    z = 1\n    y = z\n    def m(self): return z2 + self.z\nA()", "B M z2"),
    ("class A:\n    z = 1\n    def m(self): return z\nA()", "z"),
    ("def f():\n    def g():\n        return deep\n    return g\nf()()", "deep"),
    ("def f():\n    x = 1\n    def g():\n        nonlocal x\n        x += 1\n    return g\nf()", ""),
    ("def f():\n    global n\n    n += 1\nf()", "n"),
    ("def f():\n    class C:\n        a = b\n    return C\nf()", "b"),
    # functions run later: what they read may have been bound by then
    ("def f(): return g(z)\ndef g(q): return q\nf()", "z"),
    ("def train(): return loader\nloader = make(1)\ntrain()", "make"),
    ("def train(): return loader\ntrain()\nloader = 1", "loader"),
    ("def a(): return b()\ndef b(): return c\na()\nc = 1", "c"),
    ("class T:\n    def run(self): return conf\nconf = 1\nT().run()", ""),
    # await
    ("await go(z)", "go z"),
    ("[await f(i) for i in y]", "f y"),
    ("async with s() as c:\n    async for i in c:\n        print(i)", "s print"),
    # names in strings
    ("df.query('a > @thr and b < @lim.x')", "df thr lim"),
    ("df.eval(f'c = a + @off')", "df off"),
    ("pd.eval('df1 + df2')", "pd df1 df2"),
    ("eval('a + b')", "eval a b"),
    ("globals()['k']", "globals k"),
    # magics
    ("%%time\nq = net(x)\nprint(q)", "net x print"),
    ("%%time\nq = 1\nq", ""),
    ("%%capture out\nprint(a)", "print a"),
    ("%%timeit -n 1 s = setup()\ns + b", "setup b s"),
    ("%timeit -n 10 -r3 f(x)", "f x"),
    ("%time u = f(2)\nu", "f"),
    ("%prun -l 5 train(net)", "train net"),
    ("!echo {a + b} $c ${d} '{}'", "a b c d"),
    ("files = !ls {d}\nfiles", "d"),
    ("%env A={lr}", "lr"),
    ("%run train.py --lr $lr --n {n}", "lr n"),
    ("%matplotlib inline", ""),
    ("%%bash\necho $HOME {x}", ""),
    ("%%unknown {n}\nx + y", "n x y"),
    ("net?", "net"),
    ("def f(n):\n    !sleep {n} {m}\nf(1)", "m"),
]


@pytest.mark.parametrize(("source", "reads"), READS)
def test_names_that_a_cell_reads(shell, source, reads):
    assert compile_cell(source, shell).reads - {"get_ipython"} == set(reads.split())


@pytest.mark.parametrize(
    ("source", "assigns"),
    [
        ("x = 1\nif x:\n    y = 2\nfor i in x:\n    import a.b\n", "x y i a"),
        ("def f():\n    global g\n    g = 1\n    local = 2\nclass C: inner = 1", "f g C"),
        ("%time u = 1\nfiles = !ls", "u files"),
        ("%timeit w = 1", ""),
        ("[x for x in y]\nd[k] = 1", ""),
    ],
)
def test_names_that_a_cell_assigns(shell, source, assigns):
    assert compile_cell(source, shell).assigns == set(assigns.split())


def test_a_script_that_runs_among_the_cells_names(shell, tmp_path):
    (tmp_path / "part.py").write_text("result = scale(base)\n")
    program = compile_cell(f"base = 1\n%run -i {tmp_path}/part\nresult", shell)
    assert program.reads - {"get_ipython"} == {"scale"}
    assert compile_cell(f"%run {tmp_path}/part.py", shell).reads == {"get_ipython"}


@pytest.mark.parametrize("source", ["", "\n\n", "# nothing\n   # here"])
def test_a_cell_with_nothing_to_run(shell, source):
    """B30"""
    assert compile_cell(source, shell).empty


def test_a_cell_with_something_to_run(shell):
    program = compile_cell("'text'", shell, magic="%%distributed -p 2")
    assert not program.empty
    assert (program.source, program.magic) == ("'text'", "%%distributed -p 2")


@pytest.mark.parametrize(
    ("source", "line", "message"),
    [
        (
            "for i in range(3)\n    print(i)",
            2,
            "SyntaxError in line 2 of the cell: expected ':'\n    for i in range(3)\n                     ^",
        ),
        (
            "\n\nreturn 3",
            4,
            "SyntaxError in line 4 of the cell: 'return' outside function\n    return 3\n    ^",
        ),
        ("x = 1\n  y = 2", 3, "IndentationError in line 3 of the cell: unexpected indent\n    y = 2"),
        (
            "%time x\nprint(",
            3,
            "SyntaxError in line 3 of the cell: '(' was never closed\n    print(\n         ^",
        ),
        (
            "%%time\nx = 1\nreturn",
            4,
            "SyntaxError in line 4 of the cell: 'return' outside function\n    return",
        ),
        (
            "def f():\n    nonlocal x",
            3,
            "SyntaxError in line 3 of the cell: no binding for nonlocal 'x' found",
        ),
    ],
)
def test_a_cell_that_does_not_compile(shell, source, line, message):
    """B30: one error with the cell's line; the magic line is line 1."""
    with pytest.raises(CellError) as caught:
        compile_cell(source, shell)
    assert str(caught.value).startswith(message)
    assert caught.value.line == line


def test_text_that_python_refuses_otherwise(shell):
    with pytest.raises(CellError, match=r"the cell does not compile|SyntaxError"):
        compile_cell("x = '\0'", shell)


def test_the_compilers_warnings_do_not_get_in_the_way(shell):
    assert compile_cell("x is 1", shell).reads == {"x"}


def test_what_cannot_work_on_ranks_is_said(shell):
    (launcher,) = compile_cell(
        "from accelerate import notebook_launcher\nnotebook_launcher(f, num_processes=2)", shell
    ).warnings
    assert "already runs on every rank" in launcher
    assert compile_cell("name = input('?')", shell).warnings == ()  # the rank says it, where it happens


@pytest.mark.parametrize(
    "source",
    [
        "z = " + "a + " * 2_000 + "b",
        "z = a" + ".x" * 900 + "(b)",
        "if a:\n    z = 1\n" + "elif b:\n    z = 2\n" * 700,
    ],
    ids=["sum", "attributes", "elif"],
)
def test_what_nests_deeper_than_a_walk_can_follow_still_has_its_names(shell, source):
    """Python runs such a cell, or says itself that it cannot."""
    try:
        program = compile_cell(source, shell)
    except CellError as error:
        assert "the cell does not compile" in str(error)  # noqa: PT017 - a Python that cannot
        return
    assert program.reads >= {"a", "b"}
    assert program.assigns == {"z"}


def test_the_body_of_a_magic_that_nests_too_deep(shell):
    with contextlib.suppress(CellError):
        assert compile_cell("%%time\n" + "-" * 100_000 + "1", shell).reads == {"get_ipython"}


def test_a_long_line_of_a_magic_that_is_no_python(shell):
    """It takes no longer than its first words."""
    assert compile_cell("%timeit " + "a b " * 500 + "\nc", shell).reads - {"get_ipython"} == {"c"}
