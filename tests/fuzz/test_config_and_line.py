"""Configurations and lines: any value, flag or line gives what was meant or one sentence; what was written is read again."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import shlex
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from jupyter_ddp.config import DEFAULTS, FIELDS, LaunchConfig, Pull, field_name, normalise
from jupyter_ddp.config.fields import switch
from jupyter_ddp.errors import ConfigError, UsageError
from jupyter_ddp.line import FLAGS, effective, effective_line, magic_line, parse_cell_line, split
from jupyter_ddp.line.commands import WORDS, parse_command
from jupyter_ddp.line.flags import BY_NAME, FOREIGN, answer
from tests.fuzz.events import JSON
from tests.fuzz.profile import fuzz
from tests.fuzz.texts import ANY, PIECES

NUMBERS = st.sampled_from([0, 1, 2, 4, 300, 2**31, 10**400, -1, 0.5, 1e300, float("nan"), float("inf"), True])
WRITTEN = st.sampled_from(
    [
        *("", "1", "2", "auto", "gpu", "cpu", "none", "None", "all", "off", "on", "true", "0,2-3", "3-1", "0-99999", "9" * 30, "-1", "1e3", "²", "٣"),
        *("90s", "1h30m", "1e400", "nan", "inf", "30 m", ".5m", "a,b", "a, b", ",", "loss@all", "loss@3", "@", "a@", "a@٣", "x@" + "9" * 5000, "class", "last"),
        *("torchrun", "mpirun", "mpi", "nccl", "gloo", "local", "sagemaker", "ml.g5.12xlarge", "A=1", "A", "=", "RANK=0", '{"a": 1}', "{'a': 1}", "{}", "{1: 2}", "d", "cfg"),
        *("[1, 2]", "(1,)", "[" * 300, "-" * 200 + "1", "(" * 3000, "{x}", "$x", "${x}", "$nope", "{nope}", "{1/0}", "{x!r}", "{x:>5}", "{{", "}}", "#", "\\", "'", '"', "–p", "\0", "\ud800"),
    ]
)  # fmt: skip
VALUES = st.one_of(
    JSON,
    WRITTEN,
    NUMBERS,
    st.text(ANY, max_size=6),
    st.binary(max_size=3),
    st.sampled_from(
        [
            dt.timedelta(seconds=5),
            dt.timedelta.max,
            Path("/a"),
            Pull("a", 1),
            Pull("a b", 0),
            object(),
            {"a": {1}},
            {1: 2},
            [[1]],
            range(3),
            range(10**12),
            {"A": None},
            {"A": 1.5},
            iter([1]),
            1j,
            b"a",
        ]
    ),
    st.dictionaries(st.text(ANY, max_size=4), JSON | st.text(ANY, max_size=4), max_size=3),
    st.lists(WRITTEN | NUMBERS, max_size=3),
)


def sentence(error):
    assert str(error).strip()


@fuzz(400)
@given(st.sampled_from(FIELDS), VALUES)
@example("pull", "x@" + "9" * 5_000)
@example("show", range(10**12))
@example("show", [10**5_000])
@example("timeout", 10**5_000)
@example("protocol", 10**5_000)
@example("push", itertools.count())
def test_any_value_of_any_field_is_normalised_once_or_refused(name, value):
    try:
        normal = normalise(name, value)
    except ConfigError as error:
        sentence(error)
        return
    assert normalise(name, normal) == normal
    config = make(name, normal)
    if config is not None:
        told = json.loads(json.dumps(config.to_json()))
        assert LaunchConfig.from_json(told) == config
        assert isinstance(repr(config), str)


def make(name, value):
    try:
        return LaunchConfig(**{name: value})
    except ConfigError as error:  # it needs other fields to fit
        sentence(error)
        return None


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True).filter(lambda name: name.isidentifier())
PLAIN = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)
RIGHT = {
    "instance_count": st.integers(1, 4096),
    "nproc_per_node": st.integers(1, 1024) | st.sampled_from(["auto", "gpu", "cpu"]),
    "protocol": st.sampled_from(["torchrun", "mpirun"]),
    "instance_type": st.none() | st.just("ml.g5.12xlarge"),
    "push": st.none() | st.lists(NAMES, max_size=3),
    "pull": st.lists(st.builds(Pull, NAMES, st.just("all") | st.integers(0, 3)), max_size=3),
    "out": st.none() | NAMES,
    "env": st.dictionaries(
        NAMES,
        st.none()
        | PLAIN
        | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8),
        max_size=3,
    ),
    "show": st.none() | st.lists(st.integers(0, 9), max_size=4),
    "timeout": st.none() | st.floats(1e-9, 366 * 86400.0) | st.integers(1, 10**6),
    "init_process_group": st.none() | st.sampled_from(["auto", "nccl", "gloo"]),
    "distribution": st.none()
    | st.dictionaries(
        PLAIN,
        JSON.filter(lambda value: "nan" not in repr(value).lower() and "inf" not in repr(value)),
        max_size=2,
    ),
    "name": st.none() | PLAIN,
    "detach": st.booleans(),
    "fork": st.booleans(),
    "inputs": st.dictionaries(NAMES, PLAIN, max_size=2),
    "checkpoints": st.none() | PLAIN,
    "setup": st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    "start_timeout": st.floats(1e-9, 366 * 86400.0),
    "interrupt_grace": st.floats(0, 366 * 86400.0),
}
CONFIGS = st.fixed_dictionaries({}, optional=RIGHT)


def config_of(fields):
    try:
        return LaunchConfig(**fields)
    except ConfigError as error:
        sentence(error)
        return None


@fuzz(250)
@given(CONFIGS)
@example({"timeout": 1e-05})
@example({"timeout": 86400.00000000001})
@example({"env": {"A": "$x {y} # 'z' \\"}, "name": "{x}", "push": [], "show": []})
def test_a_configuration_is_its_json_and_its_line(fields):
    config = config_of(fields)
    assume(config is not None)
    assert LaunchConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert config.replace() == config
    line = magic_line(config)
    assert line.startswith("%%distributed")
    flagged = {flag.field for flag in FLAGS}
    wanted = config.replace(**{name: getattr(DEFAULTS, name) for name in FIELDS if name not in flagged})
    parsed, origins = effective(parse_cell_line(line.removeprefix("%%distributed"), {"x": 1, "y": 2}).given)
    assert parsed == wanted
    assert magic_line(parsed) == line
    shown = effective_line(config, dict.fromkeys(FIELDS, "panel"))
    assert set(origins) == set(FIELDS)
    hidden = [
        value
        for value in config.env.values()
        if value and len(value) > 6 and value not in line.replace(shlex.quote(value), "")
    ]
    assert not any(
        value in shown
        for value in hidden
        if value not in magic_line(config.replace(env={})) and value not in config.setup
    )


FLAG = st.sampled_from(
    [
        *BY_NAME,
        *FOREIGN,
        "-P",
        "--Protocol",
        "--nproc_per_node",
        "-h",
        "--help",
        "--",
        "-",
        "-p2",
        "-N=2",
        "--pul",
        "--sagemaker-options",
        "-protocol",
        "-\u00b2",
    ]
)
WORD = FLAG | WRITTEN | NAMES | PIECES
LINES = st.one_of(
    st.lists(
        WORD | st.builds("{}={}".format, FLAG, WRITTEN) | st.builds("{} {}".format, FLAG, WRITTEN), max_size=6
    ).map(" ".join),
    st.text(ANY, max_size=30),
    st.text(st.sampled_from("{}$'\"\\#!:= -abx1,[]()\n"), max_size=25),
)
SPACE = {
    "x": 1,
    "a": "b c",
    "d": {"A": "1"},
    "cfg": LaunchConfig(),
    "flags": "-p 2",
    "ranks": [0, 1],
    "none": None,
    "long": "-p " * 50,
    "deep": "--env {deep}",
}


@fuzz(400)
@given(LINES)
@example("-p {flags}")
@example("{flags} {flags}")
@example("--timeout " + "9" * 5000)
@example("--env " + "[" * 5000)
@example("--distribution " + "-" * 5000)
@example("{" * 3000)
@example("{" + "(" * 3000 + "}")
@example("{" + "-" * 100_000 + "1}")
@example("{'" + "a:" * 300 + "'!r:" + ":" * 30 + "}")
def test_any_line_is_understood_or_refused(line):
    try:
        found = parse_cell_line(line, SPACE)
        config, _ = effective(found.given, found.config, config_name=found.config_name)
    except UsageError as error:
        sentence(error)
        return
    assert parse_cell_line(magic_line(config).removeprefix("%%distributed"), {}).help is False


@fuzz(300)
@given(st.sampled_from([*WORDS, "attach", "detach", "", "stat"]), LINES)
@example("config", "timeout=" + "9" * 5000)
@example("logs", "x --rank " + "9" * 5000)
@example("logs", "x --rank \u00b2")
@example("config", "name=a\nb")
def test_any_command_is_understood_or_refused(word, line):
    try:
        parse_command(f"{word} {line}", SPACE)
    except UsageError as error:
        sentence(error)


@fuzz(150)
@given(st.text(ANY, max_size=20) | FLAG, WRITTEN)
def test_any_unknown_name_gets_an_answer(name, value):
    sentence(answer(name, value))
    with pytest.raises(ConfigError):
        field_name("no such " + name)
    with pytest.raises(ConfigError):
        switch("detach", "x" + name)


@fuzz(100)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ue000\ue001"), max_size=8),
        max_size=5,
    )
)
def test_quoted_words_are_what_they_were(words):
    line = " ".join(map(shlex.quote, words))
    assert split(line, {}) == words
    assert split(line) == words
