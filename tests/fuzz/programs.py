"""Small programs of all kinds of statements, and a namespace that notes which names they look up when they run."""

from __future__ import annotations

import ast
import builtins
import contextlib

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "c", "d"])
FUNCTIONS = st.sampled_from(["f", "g"])
ITERABLES = st.sampled_from(["range(2)", "(1, 2)", "[]", "range(0)", "a", "b"])
TESTS = st.sampled_from(["True", "1", "a", "b", "0"])
ERRORS = st.sampled_from(["Exception", "KeyError", "(KeyError, ValueError)"])


@st.composite
def expressions(draw, depth=2):
    name = draw(NAMES)
    if depth == 0:
        return draw(st.sampled_from([name, name, "1", "x"]))
    one, two, three = (draw(expressions(below)) for below in (depth - 1, 0, 0))
    return draw(
        st.sampled_from(
            [
                *(f"({one} + {two})", f"{name}({one})", f"{name}({one}, k={two})", f"{name}.attr", f"{name}[{one}]"),
                *(f"[{one} for {name} in {two} if {three}]", f"{{{one}: {two} for x in {three}}}", f"sum({one} for x in {two})"),
                *(f"(lambda x: {one})", f"(lambda x=1, y={one}: {two})()", f"({name} := {one})", f"[({name} := x) for x in {two}]"),
                *(f"({one} and {two})", f"({one} or {two})", f"({one} if {two} else {three})", f"({one} < {two} < {three})"),
                *(f"f'{{{name}!r:>{{{name}}}}}'", f"(not {one})", f"[{one}, *{two}]", f"[(lambda: {one}) for {name} in {two}]", "f()", "g()", f"f({one})"),
            ]
        )
    )  # fmt: skip


def indented(lines):
    return ["    " + line for line in lines]


@st.composite
def blocks(draw, depth, *, loop=False, function=False):
    """Some statements as lines."""
    lines = []
    for _ in range(draw(st.integers(1, 3))):
        lines += draw(statements(depth, loop=loop, function=function))
    return lines


@st.composite
def statements(draw, depth, *, loop=False, function=False):
    name, other, value = (
        draw(NAMES),
        draw(NAMES),
        draw(expressions(depth=draw(st.sampled_from([0, 1, 1, 2])))),
    )
    simple = [
        *(f"{name} = {value}", f"{name} = {other} = {value}", f"({name}, {other}) = {value}, 1", f"{name} += {value}"),
        *(f"{name}: {other} = {value}", f"{name}: {other}", f"del {name}", value, f"{name}", "pass", "raise KeyError(1)", f"assert {value}"),
        *(f"import math as {name}", f"from math import pi as {name}", f"{name}.attr = {value}", f"{name}[{other}] = {value}", f"for {name} in {value}: tick()"),
        *(["break", "continue"] if loop else []),
        *([f"return {value}", f"global {name}; {name} = {value}"] if function else []),
    ]  # fmt: skip
    if depth == 0 or draw(st.booleans()):
        return [draw(st.sampled_from(simple))]
    block = blocks(depth - 1, loop=loop, function=function)
    plain = blocks(depth - 1, function=function)
    turning = blocks(depth - 1, loop=True, function=function)
    kind = draw(st.sampled_from(["if", "for", "while", "with", "try", "finally", "def", "class", "match"]))
    more = ["else:", *indented(draw(block))] if draw(st.booleans()) else []
    if kind == "if":
        return [f"if {value}:", *indented(draw(block)), *more]
    if kind in ("for", "while"):
        head = (
            f"for {name} in {draw(ITERABLES | st.just(value))}:"
            if kind == "for"
            else f"while {draw(TESTS | st.just(value))}:"
        )
        return [head, "    tick()", *indented(draw(turning)), *more]
    if kind == "with":
        manager = draw(st.sampled_from([f"{other}", f"{other} as {name}", "suppress(KeyError)"]))
        return [f"with {manager}:", *indented(draw(block))]
    if kind in ("try", "finally"):
        lines = ["try:", *indented(draw(block))]
        for _ in range(draw(st.integers(0 if kind == "finally" else 1, 2))):
            caught = draw(ERRORS)
            lines += [
                f"except {caught}{draw(st.sampled_from(['', f' as {name}']))}:",
                *indented(draw(block)),
            ]
        lines += more if "except" in "".join(lines) else []
        return lines + (["finally:", *indented(draw(plain))] if kind == "finally" else [])
    if kind == "def":
        head = draw(
            st.sampled_from([f"({name}=1)", f"({name}={other}, *args, **kw)", "()", f"(x: {name} = 1)"])
        )
        decorator = [f"@{other}"] if draw(st.booleans()) else []
        return [
            *decorator,
            f"def {draw(FUNCTIONS)}{head}:",
            "    tick()",
            *indented(draw(blocks(depth - 1, function=True))),
        ]
    if kind == "class":
        methods = ["    def m(self):", *indented(indented(draw(blocks(depth - 1, function=True))))]
        body = [f"    {other} = {name}", f"    {name} = {draw(NAMES)}"]
        return [
            f"class {name}({other if draw(st.booleans()) else ''}):",
            *draw(st.permutations([methods, body]))[0],
        ]
    cases = draw(
        st.lists(
            st.sampled_from(
                [
                    f"case [{name}, *{other}]:",
                    f"case {{'k': {name}, **rest}} if {other}:",
                    f"case 1 as {name}:",
                ]
            ),
            max_size=2,
        )
    )
    lines = [line for case in cases for line in [case, *indented(draw(block))]]
    return [f"match {value}:", *indented([*lines, f"case {name}:", *indented(draw(block))])]


PROGRAMS = blocks(2).map("\n".join)


class EnoughError(BaseException):
    """The program has run for long enough."""


class World(dict):
    """Builtins that have every name, and note which of them were looked up. `fate` decides what happens."""

    def __init__(self, fate):
        super().__init__(vars(builtins), tick=self.tick, suppress=contextlib.suppress)
        self.fate, self.turns, self.looked = fate, 0, set()

    def __getitem__(self, name):
        self.looked.add(name)
        return super().__getitem__(name)

    def __missing__(self, name):
        return Thing(self)

    def tick(self):
        self.turns += 1
        if self.turns > 60:
            raise EnoughError

    def next(self):
        self.tick()
        return self.fate[self.turns % len(self.fate)]


class Thing:
    """Does whatever a program asks of it."""

    def __init__(self, world):
        self.world = world

    def __call__(self, *args, **kwargs):
        if self.world.next() == 0:
            raise KeyError("fate")
        for called in args:
            if type(called) is type(indented):
                return called()
        return self

    def __getattr__(self, name):
        if name != "attr":
            raise AttributeError(name)
        return self

    def _self(self, *_):
        return self

    __add__ = __radd__ = __iadd__ = __getitem__ = __lt__ = __gt__ = __enter__ = _self

    def __setitem__(self, key, value):
        pass

    def __bool__(self):
        return self.world.next() % 2 == 1

    def __iter__(self):
        return iter([self] * (self.world.next() % 3))

    def __format__(self, spec):
        return ""

    def __repr__(self):
        return "1"

    def __exit__(self, *_):
        return False


def looked_up(source, fate):
    """Run a program; return the names that it took from the notebook."""
    world = World(fate)
    with contextlib.suppress(Exception, EnoughError):
        exec(compile(source, "<cell>", "exec"), {"__builtins__": world, "__name__": "__main__"})
    return world.looked - set(dir(builtins)) - set(_deleted(source))


def _deleted(source):
    """Names that the program unbinds: what it looks up later is nobody's."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del):
            yield node.id
