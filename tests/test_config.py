"""LaunchConfig: what its fields take, what they hold, and how a wrong value is answered."""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import itertools
import json
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_ddp.config import (
    FIELDS,
    LaunchConfig,
    Pull,
    field_name,
    format_duration,
    normalise,
    parse_duration,
    parse_pull,
    parse_ranks,
)
from jupyter_ddp.errors import ConfigError, UsageError


def refusal(**fields) -> str:
    with pytest.raises(ConfigError) as caught:
        LaunchConfig(**fields)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", "?"))
    assert caught.value.field == next(iter(fields))
    return message


def test_the_defaults_are_those_of_the_design():
    config = LaunchConfig()
    assert (config.backend, config.instance_count, config.nproc_per_node) == ("local", 1, "auto")
    assert (config.protocol, config.push, config.pull, config.out) == ("torchrun", None, (), None)
    assert (config.env, config.show, config.timeout, config.init_process_group) == ({}, None, None, None)
    assert (config.start_timeout, config.interrupt_grace, config.detach) == (300.0, 30.0, False)
    assert config.fork


def test_every_field_has_a_rule_and_every_rule_a_field():
    assert tuple(f.name for f in dataclasses.fields(LaunchConfig)) == FIELDS


def test_the_forms_that_people_write_become_one_normal_form():
    config = LaunchConfig(
        instance_count="2",
        nproc_per_node="4",
        push="a, b,a",
        pull="loss, w@3,acc@all",
        env=["A=1=2", "HOME"],
        show="0,2-3",
        timeout="90s",
        init_process_group="gloo",
        detach="true",
    )
    assert (config.instance_count, config.nproc_per_node) == (2, 4)
    assert config.push == ("a", "b")
    assert config.pull == (Pull("loss"), Pull("w", 3), Pull("acc", "all"))
    assert config.env == {"A": "1=2", "HOME": None}
    assert config.show == (0, 2, 3)
    assert config.timeout == 90.0
    assert config.detach is True


@pytest.mark.parametrize("value", [0, -1, 1.5, "two", 10**6, True, None, "", [2], "1e2", "2 3"])
@pytest.mark.parametrize("field", ["instance_count", "nproc_per_node"])
def test_counts_that_cannot_be_meant_are_refused_in_a_sentence(field, value):
    """B76."""
    message = refusal(**{field: value})
    assert message.startswith(f"{field} is {value!r}, but the number of ")
    assert "whole number from 1 to" in message


def test_numpy_integers_count_and_numpy_booleans_do_not():
    np = pytest.importorskip("numpy")
    assert type(LaunchConfig(nproc_per_node=np.int64(4)).nproc_per_node) is int
    refusal(nproc_per_node=np.bool_(True))
    refusal(protocol=np.array(["torchrun"]))
    refusal(timeout=np.zeros(3))


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"protocol": "MPIrun"}, "did you mean mpirun?"),
        ({"protocol": ""}, "write torchrun or mpirun"),
        ({"protocol": "mpi"}, "did you mean mpirun?"),
        ({"nproc_per_node": "gpus"}, "did you mean gpu?"),
        ({"backend": "Local"}, "did you mean local?"),
        ({"backend": "nccl"}, "--init-process-group nccl"),
        ({"backend": "gloo"}, "--init-process-group gloo"),
        ({"backend": "mpi"}, "--protocol mpirun"),
        ({"instance_type": "g5.12xlarge"}, "write ml.g5.12xlarge"),
        ({"instance_type": "big"}, "ml.g5.12xlarge"),
        ({"push": "a,1b"}, "push is '1b'"),
        ({"push": "class"}, "names of variables"),
        ({"pull": "loss@last"}, "loss@all"),
        ({"pull": "loss@-1"}, "NAME@RANK"),
        ({"pull": "a,a@3"}, "a@all"),
        ({"pull": [3]}, "names of variables"),
        ({"out": "my result"}, "one variable's name"),
        ({"env": "1A=2"}, "--env NAME=VALUE"),
        ({"env": {"A": ["x"]}}, "values are texts"),
        ({"env": {"A": True}}, "values are texts"),
        ({"env": "RANK=3"}, "leave it out"),
        ({"env": {"JUPYTER_DDP_RUN": "x"}}, "leave it out"),
        ({"show": "0-x"}, "write 0, 0,3, 0-3 or all"),
        ({"show": "3-1"}, "write 1-3"),
        ({"show": "0-99999"}, "the highest is 65535"),
        ({"show": ""}, "ranks are numbers"),
        ({"show": True}, "ranks are numbers"),
        ({"timeout": "soon"}, "90s, 30m, 8h or 2d"),
        ({"timeout": 0}, "above 0"),
        ({"timeout": -3}, "above 0"),
        ({"timeout": float("nan")}, "above 0"),
        ({"timeout": float("inf")}, "above 0"),
        ({"timeout": 10**400}, "above 0"),
        ({"timeout": True}, "above 0"),
        ({"init_process_group": "ncll"}, "did you mean nccl?"),
        ({"init_process_group": True}, "write auto or nccl or gloo"),
        ({"distribution": "mpi"}, "a notebook variable's name or quoted JSON"),
        ({"distribution": {1: 2}}, "texts as keys"),
        ({"distribution": {"a": object()}}, "JSON"),
        ({"name": ""}, "1 to 80 printable"),
        ({"name": "a\nb"}, "printable"),
        ({"name": "-p"}, "does not start with -"),
        ({"name": "last"}, "the latest run"),
        ({"name": "x" * 81}, "80"),
        ({"detach": "maybe"}, "write True or False"),
        ({"detach": 1}, "write True or False"),
        ({"inputs": {"tr ain": "s3://b/k"}}, "channel"),
        ({"inputs": {"train": 3}}, "channel"),
        ({"checkpoints": 3}, "text"),
        ({"setup": 3}, "text"),
        ({"start_timeout": None}, "duration"),
        ({"interrupt_grace": "-1"}, "duration"),
        ({"sagemaker_options": "x"}, "dict"),
    ],
)
def test_a_wrong_value_is_answered_with_what_to_write(fields, hint):
    """B76."""
    assert hint in refusal(**fields)


def test_a_refusal_never_shows_the_value_of_an_environment_variable():
    assert "s3cret" not in refusal(env={"TOKEN": ["s3cret"]})
    assert "s3cret" not in refusal(env={"TOKEN": "s3cret\0"})
    assert "s3cret" not in refusal(env="MY-TOKEN=s3cret")


def test_a_long_value_is_cut_in_the_sentence():
    assert len(refusal(protocol="x" * 10_000)) < 300


def test_names_that_collide_are_refused():
    with pytest.raises(ConfigError, match="binds the same name"):
        LaunchConfig(out="loss", pull="loss")


def test_ranks_are_checked_as_soon_as_the_world_size_is_known():
    LaunchConfig(pull="loss@7", show="7", instance_count=2, nproc_per_node=4)
    with pytest.raises(ConfigError, match="pull is loss@8, but the run has ranks 0 to 7"):
        LaunchConfig(pull="loss@8", instance_count=2, nproc_per_node=4)
    late = LaunchConfig(show="1")
    with pytest.raises(ConfigError, match="show is 1, but the run has rank 0 only"):
        late.check_ranks(1)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("30m", 1800),
        ("8h", 28800),
        ("2d", 172800),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("45", 45),
        (0.5, 0.5),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds
    assert parse_duration(format_duration(seconds)) == seconds


def test_a_timedelta_is_a_duration_and_none_is_no_limit():
    assert LaunchConfig(timeout=dt.timedelta(minutes=2)).timeout == 120
    assert LaunchConfig(timeout="none").timeout is None
    assert LaunchConfig(interrupt_grace=0).interrupt_grace == 0


@given(st.floats(min_value=1e-9, max_value=3e7))
def test_every_duration_survives_its_text(seconds):
    assert parse_duration(format_duration(seconds)) == seconds


def test_ranks_and_pulls_take_iterables_too():
    assert parse_ranks([3, "0-1", 3]) == (0, 1, 3)
    assert parse_ranks(range(2)) == (0, 1)
    assert parse_pull([Pull("a"), "b@all"]) == (Pull("a"), Pull("b", "all"))
    assert [str(p) for p in parse_pull("a@0,b@2,c@all,a")] == ["a", "b@2", "c@all"]
    assert LaunchConfig(show="none").show == ()
    assert LaunchConfig(push="").push == ()


def test_the_config_is_frozen_and_keeps_copies_of_what_it_got():
    env = {"A": "1"}
    config = LaunchConfig(env=env)
    env["A"] = "2"
    assert config.env == {"A": "1"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.protocol = "mpirun"


def test_replace_changes_fields_by_any_spelling_and_validates():
    config = LaunchConfig().replace(**{"nproc-per-node": 2}, nnodes=3)
    assert (config.nproc_per_node, config.instance_count) == (2, 3)
    with pytest.raises(ConfigError, match="did you mean protocol"):
        config.replace(protokol="mpirun")
    with pytest.raises(ConfigError):
        config.replace(protocol="slurm")


def test_unknown_fields_are_answered_with_the_nearest():
    assert field_name("--nproc-per-node") == "nproc_per_node"
    with pytest.raises(UsageError, match="did you mean instance_count"):
        normalise("instance_cuont", 2)
    with pytest.raises(ConfigError, match="did you mean timeout"):
        LaunchConfig().replace(time_out=3)


FULL = LaunchConfig(
    instance_count=2,
    nproc_per_node=4,
    protocol="mpirun",
    push="a",
    pull="b@all",
    out="res",
    env={"T": "s3cret", "H": None},
    show="0",
    timeout="8h",
    distribution={"mpi": {"enabled": True}},
    name="run é",
    inputs={"train": "s3://b/k"},
    setup="import torch",
)


def test_json_round_trip_and_masking():
    text = json.dumps(FULL.to_json())
    assert LaunchConfig.from_json(json.loads(text)) == FULL
    masked = FULL.to_json(mask_env=True)
    assert masked["env"] == {"T": "***", "H": None}
    assert "s3cret" not in json.dumps(masked)
    assert LaunchConfig.from_json({"protocol": "mpirun", "of_the_future": 1}).protocol == "mpirun"


def test_configs_pickle_and_copy():
    assert pickle.loads(pickle.dumps(FULL)) == FULL
    assert copy.deepcopy(FULL) == FULL


def test_the_module_needs_the_standard_library_only():
    code = "import sys; import jupyter_ddp.config; print(sorted({m.split('.')[0] for m in sys.modules} & {'IPython', 'torch', 'traitlets', 'cloudpickle'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


NESTED = []
for _ in range(3_000):
    NESTED = [NESTED]


class Nameless:
    def __repr__(self):
        raise OSError("no")

    __str__ = __repr__


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pull", "x@" + "9" * 5_000),
        ("show", range(10**12)),
        ("show", [10**5_000]),
        ("show", itertools.count()),
        ("timeout", 10**5_000),
        ("nproc_per_node", 10**5_000),
        ("protocol", 10**5_000),
        ("distribution", {"a": NESTED}),
        ("protocol", Nameless()),
        ("show", [Nameless()]),
        ("name", Nameless()),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else type(value).__name__,
)
def test_values_without_bounds_are_refused(field, value):
    with pytest.raises(ConfigError):
        normalise(field, value)
