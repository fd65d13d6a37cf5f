"""Objects on their way, both ways: what arrives is what was sent, shared where it was shared, or a sentence says why not."""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import fractions
import math
import tempfile
import threading
import types
from pathlib import Path

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from jupyter_ddp.capture import capture
from jupyter_ddp.cell import Program
from jupyter_ddp.errors import CaptureError, ValueTravelError
from jupyter_ddp.values import load_value, read_payload, save_value
from tests.fuzz.profile import fuzz
from tests.fuzz.texts import ANY

BOOK = """
import enum, functools, collections
from dataclasses import dataclass, field
from typing import Any
@dataclass
class Point:
    x: Any = None
    y: Any = None
@dataclass(frozen=True)
class Frozen:
    x: Any = None
class Slotted:
    __slots__ = ("x", "y")
    def __init__(self, x=None, y=None): self.x, self.y = x, y
class Child(Point):
    def get(self): return self.x
class Color(enum.Enum):
    RED = 1
    BLUE = "b"
class Flag(enum.Flag):
    A = 1
    B = 2
Pair = collections.namedtuple("Pair", "x y")
def closure(x):
    def inner(): return x
    return inner
def mutual(n): return n if n < 1 else other(n - 1)
def other(n): return mutual(n)
"""


def notebook():
    """Return a namespace whose classes and functions are the notebook's own."""
    space = {"__name__": "__main__"}
    exec(BOOK, space)
    return space


SPACE = notebook()
ON_A_RANK = notebook()
"""Its classes were never sent: this process is both ends, and remembers those of `SPACE` as what ranks have got."""
ARRAYS = npst.arrays(
    npst.scalar_dtypes()
    | npst.unicode_string_dtypes(max_len=3)
    | npst.byte_string_dtypes(max_len=3)
    | npst.array_dtypes(max_size=2),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)


@st.composite
def views(draw):
    """Return an array that may be a view: turned, cut, reversed, broadcast, read-only, big enough to go out of band."""
    array = draw(ARRAYS)
    kind = draw(
        st.sampled_from(["", "T", "F", "reversed", "step", "broadcast", "readonly", "large", "scalar"])
    )
    if kind == "T":
        return array.T
    if kind == "F":
        return np.asfortranarray(array)
    if kind in ("reversed", "step") and array.ndim:
        return array[:: -1 if kind == "reversed" else 2]
    if kind == "broadcast":
        return np.broadcast_to(array, (3, *array.shape))
    if kind == "readonly":
        array.flags.writeable = False
    if kind == "large":
        return np.resize(array, (300, 7)) if array.size else array
    return array[()] if kind == "scalar" and not array.ndim else array


def leaves(space):
    return st.one_of(
        st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers(),
        st.text(ANY, max_size=5) | st.binary(max_size=5) | st.binary(max_size=5).map(bytearray),
        st.sampled_from([2**200, b"x" * 20_000, bytearray(20_000), range(3), slice(1, None, 2), Ellipsis, NotImplemented, int, dict, np.float32, len, math.sin, "".join, math]),
        st.builds(decimal.Decimal, st.integers()) | st.builds(fractions.Fraction, st.integers()) | st.datetimes() | st.timedeltas() | st.just(dt.timezone.utc) | st.uuids(),
        st.frozensets(st.integers() | st.text(max_size=2), max_size=3) | st.sets(st.integers(), max_size=3),
        st.sampled_from([space["Color"].RED, space["Color"].BLUE, space["Flag"].A | space["Flag"].B, space["Point"], space["Color"], space["mutual"], space["Pair"]]),
        views(),
    )  # fmt: skip


KINDS = st.sampled_from(
    [
        "list",
        "tuple",
        "dict",
        "Point",
        "Frozen",
        "Slotted",
        "Child",
        "Pair",
        "closure",
        "lambda",
        "deque",
        "defaultdict",
        "OrderedDict",
        "namespace",
        "method",
        "partial",
        "object array",
    ]
)


def make(kind, x, y, space=SPACE):
    """Return a thing that has two others."""
    if kind in ("Point", "Slotted", "Child", "Pair"):
        return space[kind](x, y)
    if kind == "Frozen":
        return space["Frozen"](x)
    if kind == "object array":
        array = np.empty(2, dtype=object)
        array[0], array[1] = x, y
        return array
    return {
        "list": lambda: [x, y],
        "tuple": lambda: (x, y),
        "dict": lambda: {"x": x, 1: y},
        "closure": lambda: space["closure"](x),
        "lambda": lambda: eval("lambda a=None, *, b=None: a", space, {}),
        "deque": lambda: collections.deque([x, y], maxlen=5),
        "defaultdict": lambda: collections.defaultdict(list, x=x),
        "OrderedDict": lambda: collections.OrderedDict(y=y, x=x),
        "namespace": lambda: types.SimpleNamespace(x=x, y=y),
        "method": lambda: space["Child"](x, y).get,
        "partial": lambda: space["functools"].partial(space["closure"], x),
    }[kind]()


@st.composite
def graphs(draw, space):
    """Return an object in which others are shared, and may have it in turn."""
    things = draw(st.lists(leaves(space), min_size=1, max_size=4))
    for kind in draw(st.lists(KINDS, max_size=6)):
        some = st.integers(0, len(things) - 1)
        things.append(make(kind, things[draw(some)], things[draw(some)], space))
    for one in [thing for thing in things if isinstance(thing, list) or type(thing) is space["Point"]]:
        target = things[draw(st.integers(0, len(things) - 1))]
        if isinstance(one, list):
            one.append(target)
        else:
            one.y = target
    return things[-3:]


def parts(thing):  # noqa: C901, PLR0911 - one branch a kind
    """Return what a thing is but for what it has, and what it has."""
    kind = type(thing)
    if isinstance(thing, np.ndarray):
        if thing.dtype == object:
            return thing.shape, list(thing.ravel())
        # numpy's own pickling may turn the bytes of what is not contiguous to this machine's order
        native = thing.astype(thing.dtype.newbyteorder("="))
        return (native.dtype.descr, native.shape, native.tobytes()), []
    if isinstance(thing, tuple):
        return "tuple", list(thing)
    if kind in (list, collections.deque):
        return getattr(thing, "maxlen", None), list(thing)
    if isinstance(thing, dict):
        return list(map(repr, thing)), [*thing.values(), getattr(thing, "default_factory", None)]
    if isinstance(thing, types.MethodType):
        return thing.__name__, [thing.__self__]
    if isinstance(thing, types.FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or ()]
        return (thing.__name__, thing.__code__.co_code, thing.__code__.co_filename), [
            *cells,
            thing.__defaults__,
            thing.__kwdefaults__,
        ]
    if kind.__name__ == "partial":
        return kind, [thing.func, thing.args, thing.keywords]
    if kind.__name__ == "Slotted":
        return "Slotted", [thing.x, thing.y]
    if kind.__name__ in ("Point", "Frozen", "Child", "SimpleNamespace"):
        return kind.__name__, list(vars(thing).values())
    if kind.__name__ in ("Color", "Flag") or isinstance(thing, type | types.ModuleType):
        return str(thing), []
    if isinstance(thing, frozenset | set):
        return kind, sorted(map(repr, thing))
    return (kind, repr(thing)), []


IDENTITY = (
    list,
    dict,
    collections.deque,
    types.SimpleNamespace,
    types.FunctionType,
    bytearray,
    set,
    np.ndarray,
)


def check_same(sent, arrived):
    """Check that one graph is the other: equal parts, and one object where there was one."""
    todo, partner = [(sent, arrived)], {}
    keep = []
    while todo:
        one, other = todo.pop()
        named = type(one).__name__ in ("Point", "Slotted", "Child", "Frozen")
        if isinstance(one, IDENTITY) or named:
            if id(one) in partner:
                assert partner[id(one)] is other
                continue
            assert not any(other is known for known in partner.values())
            partner[id(one)] = other
        keep.append((one, other))
        assert type(one).__qualname__ == type(other).__qualname__
        (what, has), (there, there_has) = parts(one), parts(other)
        assert what == there
        assert len(has) == len(there_has)
        todo += zip(has, there_has, strict=True)
        if isinstance(other, np.ndarray) and one.flags.writeable:
            assert other.flags.writeable


def to_ranks(value):
    """Return what a rank gets of a notebook's value."""
    space = SPACE | {"value": value}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "payload.bin"
        payload = capture(Program("value", reads=frozenset(["value"])), space)
        assert payload.write(path) == payload.nbytes
        assert payload.report.text()
        return read_payload(path, None, main={"__name__": "__main__"}).namespace["value"]


def to_notebook(value):
    """Return what the notebook gets of a rank's value."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "value.bin"
        assert save_value(path, value, "value").size == path.stat().st_size
        return load_value(path, folder)


@fuzz(60)
@given(graphs(SPACE))
def test_what_a_rank_gets_is_what_the_notebook_has(value):
    check_same(value, to_ranks(value))


@fuzz(60)
@given(graphs(ON_A_RANK))
def test_what_the_notebook_gets_is_what_a_rank_has(value):
    check_same(value, to_notebook(value))


@fuzz(50)
@given(views())
@example(np.zeros((0, 3), "f4"))
@example(np.ma.masked_array([1, 2], [True, False]).data)
@example(np.array([np.datetime64("NaT"), np.datetime64("2020-01-01")]))
def test_arrays_of_any_kind(array):
    for back in (to_ranks(array), to_notebook(array)):
        check_same(array, back)


def generator():
    yield 1


STAYS = st.sampled_from(["lock", "generator", "file", "frame"])


def stays(kind):
    if kind == "lock":
        return threading.Lock()
    if kind == "generator":
        return generator()
    if kind == "frame":
        return next(iter(__import__("sys")._current_frames().values()))
    return open(__file__)  # noqa: PTH123 - it is closed by who asks


@fuzz(40)
@given(st.lists(KINDS, max_size=5), STAYS, st.booleans(), st.booleans())
def test_what_cannot_travel_is_named_wherever_it_hides(kinds, kind, first, back):
    culprit = value = stays(kind)
    for outer in kinds:
        if outer != "lambda":
            x, y = (
                (value, 1)
                if first or outer in ("Frozen", "closure", "defaultdict", "partial")
                else (1, value)
            )
            value = make(outer, x, y, ON_A_RANK if back else SPACE)
    try:
        refused = (
            refusal(to_notebook, ValueTravelError, value) if back else refusal(to_ranks, CaptureError, value)
        )
        assert "value" in refused
    finally:
        getattr(culprit, "close", int)()


def refusal(go, error, value):
    try:
        go(value)
    except error as told:
        return str(told)
    return ""
