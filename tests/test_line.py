"""The magic line: how it is split and expanded, what its flags mean, and how what cannot be meant is answered."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_ddp.config import DEFAULTS, LaunchConfig, Pull, format_duration
from jupyter_ddp.config.fields import FIELDS
from jupyter_ddp.errors import ConfigError, UsageError
from jupyter_ddp.launchers import RANK_VARIABLES
from jupyter_ddp.line import FLAGS, effective, effective_line, magic_line, parse_cell_line, split
from jupyter_ddp.line.commands import WORDS, parse_command
from jupyter_ddp.line.expand import Word
from jupyter_ddp.line.flags import BY_NAME, FIELD_ONLY, FOREIGN

NOTEBOOK = {
    "nproc": 4,
    "limit": "30m",
    "none": None,
    "lr": 1e-3,
    "label": "two words",
    "ranks": [0, 2],
    "names": ["a", "b"],
    "env": {"A": "1", "B": "x y"},
    "dist": {"mpi": {"enabled": True}},
    "cfg": LaunchConfig(protocol="mpirun", nproc_per_node=3),
    "base": {"nproc-per-node": 3, "env": {"A": "0", "C": "3"}},
    "options": "-p 2 --protocol mpirun",
}


def parse(line):
    return parse_cell_line(line, NOTEBOOK).given


def refusal(line) -> str:
    with pytest.raises(UsageError) as caught:
        parse_cell_line(line, NOTEBOOK)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", "?")), message
    return message


# Splitting


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-N 2 -p 4", ["-N", "2", "-p", "4"]),
        ("--name 'two words' a\\ b \"c d\"", ["--name", "two words", "a b", "c d"]),
        ("-p 4 # four", ["-p", "4"]),
        ("# only a comment", []),
        ("a#b '#' \"#x\" \\#y #z", ["a#b", "#", "#x", "#y"]),
        ("--env A='x'\"y\"z", ["--env", "A=xyz"]),
        ("'' \"\"", ["", ""]),
        ("  ", []),
        ('"say \\"hi\\" \\\\ \\n"', ['say "hi" \\ \\n']),
    ],
)
def test_the_line_is_split_as_a_posix_shell_splits(line, words):
    assert split(line, {}) == words
    assert split(line) == words


def test_a_quote_that_is_not_closed_is_named():
    assert (
        refusal("--name it's")
        == "a quote in the line is not closed: close it, or write \\' for an apostrophe."
    )
    assert "not closed" in refusal('--name "abc {nproc}')


# Expansion


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-p {nproc} --timeout {limit}", ["-p", "4", "--timeout", "30m"]),
        ("-p $nproc --timeout $limit", ["-p", "4", "--timeout", "30m"]),
        ("{nproc * 2} {nproc*2} x{nproc}y ${nproc}z", ["8", "8", "x4y", "4z"]),
        ("{lr:.0e} {label!r} {'a b'}", ["1e-03", "'two words'", "a b"]),
        ('"run {lr} of $label"', ["run 0.001 of two words"]),
        ("{label} '{label}' '$label'", ["two words", "{label}", "$label"]),
        ("{{nproc}} $$nproc \\$nproc \\{nproc\\}", ["{nproc}", "$nproc", "$nproc", "{nproc}"]),
        ('"{{nproc}} $$nproc \\$nproc"', ["{nproc} $nproc $nproc"]),
        ("cost$ 5$ $5 }x { } {} {a,", ["cost$", "5$", "$5", "}x", "{ }", "{}", "{a,"]),
        ("{env['B']} {dist['mpi']['enabled']}", ["x y", "True"]),
        ("{[n for n in names if n in names]}", ["['a', 'b']"]),
    ],
)
def test_the_notebooks_values_come_into_the_line(line, words):
    assert split(line, NOTEBOOK) == words


@pytest.mark.parametrize(
    "text",
    [
        '{"pytorchddp": {"enabled": true}}',
        '{"mpi": {"enabled": true, "processes_per_host": 4, "custom_mpi_options": "-x A={b}"}}',
        '{"a": null}',
        "{}",
        '{"price": "$name {nproc}"}',
    ],
)
def test_json_is_never_taken_for_an_expression(text):
    assert split(f"--distribution '{text}'", NOTEBOOK)[1] == text
    assert split(f"--distribution {text} -p 4", NOTEBOOK) == ["--distribution", text, "-p", "4"]
    assert parse(f"--distribution {text}")["distribution"] == json.loads(text)


def test_a_python_dict_in_double_quotes_stays_too():
    line = "--distribution \"{'torch_distributed': {'enabled': True}}\""
    assert parse(line)["distribution"] == {"torch_distributed": {"enabled": True}}


def test_a_word_that_is_one_expansion_keeps_the_value():
    names, env, text = split('{names} "$env" x{names}', NOTEBOOK)
    assert isinstance(names, Word)
    assert names.value is NOTEBOOK["names"]
    assert isinstance(env, Word)
    assert env.value is NOTEBOOK["env"]
    assert type(text) is str


def test_what_the_notebook_does_not_have_is_an_error_not_text():
    assert "name 'nprocs' is not defined" in refusal("-p {nprocs}")
    assert "the notebook has no variable HOME" in refusal("--env LIB=$HOME/lib")
    assert "ZeroDivisionError" in refusal("-p {1 // 0}")


def test_expansion_leaves_the_namespace_alone():
    namespace = {"n": 2}
    split("-p {n + sum(i for i in range(n))}", namespace)
    assert namespace == {"n": 2}


def test_marks_of_our_own_in_a_line_do_no_harm():
    assert split("a\ue0000\ue001b {nproc}", NOTEBOOK) == ["a0b", "4"]


@given(st.text(st.characters(exclude_characters="\ue000\ue001", exclude_categories=["Cs"])))
def test_any_text_in_single_quotes_is_itself(text):
    quoted = "'" + text.replace("'", "'\"'\"'") + "'"
    assert split(quoted, {}) == [text]


@given(st.text(alphabet="ab {}$'\"\\#:!=,[]()n", max_size=30))
def test_no_line_breaks_the_splitter(line):
    with contextlib.suppress(UsageError):
        split(line, {"a": 1, "b": "x"})


# Flags


def test_every_flag_has_its_field():
    line = (
        "-b local -N 2 -p 4 --protocol mpirun -t ml.g5.12xlarge --push a,b --pull loss@all,w@3 -o res "
        "-e A=1 -e HOME --show 0-2 --timeout 90s --init-process-group gloo --distribution dist --name 'run 1' --detach --no-fork"
    )
    assert LaunchConfig(**parse(line)) == LaunchConfig(
        instance_count=2,
        nproc_per_node=4,
        protocol="mpirun",
        instance_type="ml.g5.12xlarge",
        push=("a", "b"),
        pull=(Pull("loss", "all"), Pull("w", 3)),
        out="res",
        env={"A": "1", "HOME": None},
        show=(0, 1, 2),
        timeout=90,
        init_process_group="gloo",
        distribution={"mpi": {"enabled": True}},
        name="run 1",
        detach=True,
        fork=False,
    )


def test_the_table_and_the_configuration_agree():
    assert {flag.field for flag in FLAGS if flag.field} | set(FIELD_ONLY) == set(FIELDS)


@pytest.mark.parametrize(
    ("line", "given_"),
    [
        ("--nproc_per_node 4", {"nproc_per_node": 4}),
        ("--nproc-per-node=4", {"nproc_per_node": 4}),
        ("--nproc_per_node=gpu", {"nproc_per_node": "gpu"}),
        ("-p4 -N=2", {"nproc_per_node": 4, "instance_count": 2}),
        ("--nnodes 2", {"instance_count": 2}),
        ("-p 2 -p 4", {"nproc_per_node": 4}),
        ("--push a --no-push", {"push": ()}),
        ("--no-push --push a", {"push": ("a",)}),
        ("--push a, b ,c -p 2", {"push": ("a", "b", "c"), "nproc_per_node": 2}),
        ("--push a, -p 2", {"push": ("a",), "nproc_per_node": 2}),
        ("--pull=loss@all, acc", {"pull": (Pull("loss", "all"), Pull("acc"))}),
        ("--show {ranks}", {"show": (0, 2)}),
        ("--show={ranks}", {"show": (0, 2)}),
        ("--push {names}", {"push": ("a", "b")}),
        ("--push={names}", {"push": ("a", "b")}),
        ("--timeout {none}", {"timeout": None}),
        ("--timeout none", {"timeout": None}),
        ("--detach=false", {"detach": False}),
        ("--no-fork", {"fork": False}),
        ("--no_fork=false", {"fork": True}),
        ("-e A=1 -e A=2 -e B", {"env": {"A": "2", "B": None}}),
        ("--env A=x=y", {"env": {"A": "x=y"}}),
        ("--env 'A=b c'", {"env": {"A": "b c"}}),
        ("--env 'OPTS={\"a\": 1}'", {"env": {"OPTS": '{"a": 1}'}}),
        ("--env A={lr}", {"env": {"A": "0.001"}}),
        ("--env env", {"env": {"A": "1", "B": "x y"}}),
        ("--env {env}", {"env": {"A": "1", "B": "x y"}}),
        ('--env \'{"A": "1", "N": 2}\'', {"env": {"A": "1", "N": "2"}}),
        ("--env env -e A=9", {"env": {"A": "9", "B": "x y"}}),
        ("--env nproc", {"env": {"nproc": None}}),
        ("{options} -N 2", {"nproc_per_node": 2, "protocol": "mpirun", "instance_count": 2}),
        ("", {}),
    ],
)
def test_forms_of_flags(line, given_):
    assert parse(line) == given_


def test_the_flags_of_the_line_itself():
    found = parse_cell_line("--config cfg --dry-run", NOTEBOOK)
    assert (found.config_name, found.config, found.dry_run, found.given) == ("cfg", NOTEBOOK["cfg"], True, {})
    assert parse_cell_line("--config {cfg}", NOTEBOOK).config is NOTEBOOK["cfg"]
    assert parse_cell_line("--help", NOTEBOOK).help


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-n 4", ["-n means ranks to mpirun", "-p 4", "-N 4"]),
        ("-n4", ["-p 4", "-N 4"]),
        ("-np 4", ["-np is not a flag here", "-p 4", "-N 4"]),
        ("-np4", ["-p 4"]),
        ("--num_processes 8", ["-p 8", "-N 8"]),
        ("--num-processes=8", ["-p 8", "-N 8"]),
        ("--backend nccl", ["--init-process-group nccl"]),
        ("-b gloo", ["--init-process-group gloo"]),
        ("--targets 0", ["--show"]),
        ("--noblock", ["a cell blocks"]),
        ("-i ml.g5.xlarge", ["-t"]),
        ("-x FOO", ["--env NAME=VALUE"]),
        ("--master_port 29500", ["leave it out"]),
        ("--proto mpirun", ["did you mean --protocol?"]),
        ("--protocl mpirun", ["did you mean --protocol?"]),
        ("--nproc-per-nod 4", ["did you mean --nproc-per-node?"]),
        ("--proces 3", ["--proces is not a flag here", "-p 3", "-N 3"]),
        ("--nproc_per_machine 3", ["did you mean --nproc-per-node?"]),
        ("--num-process 3", ["-p 3", "-N 3"]),
        ("--word-size 3", ["-p 3", "-N 3"]),
        ("--master-adress x", ["--master-adress is not a flag here", "leave it out"]),
        ("-protocol mpirun", ["did you mean --protocol?"]),
        ("-P 4", ["did you mean -p?"]),
        ("-z", ["%%distributed?"]),
        ("--completely-else", ["%%distributed?"]),
        ("--start-timeout 600", ["%distributed config start_timeout="]),
        ("--sagemaker_options x", ["--config"]),
        ("4", ["-p 4", "-N 4"]),
        ("torchrun", ["--protocol torchrun"]),
        ("sagemaker", ["--backend sagemaker"]),
        ("protocol mpirun", ["--protocol"]),
        ("A=1", ["--env A="]),
        ("–p 4", ["plain hyphens"]),
        ("—protocol mpirun", ["plain hyphens"]),
        ("--name a b", ["quotes"]),
        ("-p", ["-p needs a value"]),
        ("--protocol -p 4", ["--protocol needs a value"]),
        ("-p two", ["-p two was given", "whole number"]),
        ("-p 0", ["-p 0 was given, but the number of ranks", "whole number"]),
        ("--nproc_per_node=0", ["--nproc-per-node 0 was given"]),
        ("-e 1A=x", ["-e has the name '1A'"]),
        ("-b nccl", ["-b nccl was given, but the backend says where"]),
        ("--protocol MPIrun", ["did you mean mpirun?"]),
        ("--timeout soon", ["30m"]),
        ("--no-push=a", ["takes no value"]),
        ("--config nope", ["no variable nope"]),
        ("--config cfgs", ["did you mean cfg?"]),
        ("--config nproc", ["type int", "LaunchConfig or a dict"]),
        ("--distribution dits", ["did you mean dist?"]),
        ("--distribution nproc", ["type int"]),
        ("--distribution '{bad'", ["JSON in single quotes"]),
        ("--push 1a", ["--push 1a was given, but it takes names"]),
    ],
)
def test_what_cannot_be_meant_is_answered_in_a_sentence(line, words):
    message = refusal(line)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", FOREIGN)
def test_flags_of_other_tools_are_answered_each_in_one_sentence(name):
    assert name in refusal(f"{name} 3")
    assert name in refusal(name)


def test_a_wrong_value_knows_its_field():
    with pytest.raises(ConfigError) as caught:
        parse("--show x")
    assert caught.value.field == "show"


def test_env_values_stay_out_of_messages():
    assert "s3cret" not in refusal('--env \'{"A": "s3cret"\'')
    assert "s3cret" not in refusal("--env 'MY-KEY=s3cret'")


# What holds in the end


def test_the_line_wins_over_config_panel_traits_and_default():
    given_ = parse("-p 8")
    panel = {"nproc_per_node": 2, "protocol": "mpirun", "name": "panel"}
    traits = {"name": "traits", "timeout": 60}
    config, origins = effective(
        given_, {"nproc_per_node": 3, "protocol": "torchrun"}, panel, traits, config_name="d"
    )
    assert (config.nproc_per_node, config.protocol, config.name, config.timeout) == (
        8,
        "torchrun",
        "panel",
        60,
    )
    assert [origins[f] for f in ("nproc_per_node", "protocol", "name", "timeout", "backend")] == [
        "line",
        "config d",
        "panel",
        "traits",
        "default",
    ]


def test_a_launch_config_is_a_whole_and_hides_the_panel():
    config, origins = effective(
        {"name": "x"}, NOTEBOOK["cfg"], {"protocol": "torchrun", "timeout": 5}, config_name="cfg"
    )
    assert config == NOTEBOOK["cfg"].replace(name="x")
    assert origins["protocol"] == "config cfg"
    assert origins["timeout"] == "default"


def test_environments_are_merged_by_name():
    config, origins = effective(parse("-e A=1"), NOTEBOOK["base"], {"env": {"P": "9"}}, config_name="base")
    assert config.env == {"P": "9", "A": "1", "C": "3"}
    assert origins["env"] == "line, config base, panel"


def test_values_that_do_not_go_together_are_refused():
    with pytest.raises(ConfigError, match="ranks 0 to 1"):
        effective(parse("--pull loss@3"), None, {"nproc_per_node": 2}, {})


def test_the_effective_line_says_what_came_from_elsewhere():
    config, origins = effective(
        parse("-p 4 -e T=s3cret"), None, {"instance_count": 2, "start_timeout": 600}, {"protocol": "mpirun"}
    )
    line = effective_line(config, origins)
    assert line == (
        "%%distributed -N 2 -p 4 --protocol mpirun -e 'T=***'"
        "  # from %distributed config: -N 2, start_timeout=10m; from c.DistributedMagics: --protocol mpirun"
    )
    assert effective_line(*effective({})) == "%%distributed"


def test_what_auto_comes_to_is_said():
    config, origins = effective({})
    assert (
        effective_line(config.replace(nproc_per_node=2), origins)
        == "%%distributed -p 2  # from this machine: -p 2"
    )


README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def readme_rows(beginning: str) -> list[list[str]]:
    """Return the cells of each row of README's tables whose first cell begins like this."""
    rows = re.findall(rf"^\| {re.escape(beginning)}.* \|$", README, re.MULTILINE)
    return [row.strip("| ").split(" | ") for row in rows]


def test_every_line_of_readme_parses():
    cells = re.findall(r"^%%distributed\b(.*)$", README, re.MULTILINE)
    lines = re.findall(r"^%distributed\b(.*)$", README, re.MULTILINE)
    assert len(cells) > 3
    assert len(lines) > 3
    for line in cells:
        parse_cell_line(line, NOTEBOOK)
    for line in lines:
        parse_command(line, NOTEBOOK)


def test_every_flag_in_the_text_of_readme_is_a_flag():
    """Those that it names as flags of others are answered in one sentence."""
    code = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", README, flags=re.DOTALL))
    used = {name for text in code for name in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}
    others = {"--execute", "--reset", "--rank", "--lr"}  # of nbconvert, of %distributed, of somebody's script
    assert used - others - {"--num_processes"} <= set(BY_NAME)


def test_the_table_of_readme_is_the_table_of_flags():
    table = [
        [f"`{', '.join(flag.names)}{' ' * bool(flag.metavar)}{flag.metavar or ''}`", flag.help, flag.default]
        for flag in FLAGS
    ]
    assert readme_rows("`-") == table


def test_readme_tells_every_word_and_every_field_without_a_flag():
    words = {
        word for row in readme_rows("`%distributed") for word in re.findall(r"`%distributed (\w+)", row[0])
    }
    assert words == set(WORDS)
    fields = {row[0].strip("`"): row[2] for row in readme_rows("`") if row[0].strip("`") in FIELDS}
    assert set(fields) == set(FIELD_ONLY)
    assert {name: fields[name] for name in ("start_timeout", "interrupt_grace")} == {
        name: format_duration(getattr(DEFAULTS, name)) for name in ("start_timeout", "interrupt_grace")
    }


def test_readme_names_every_variable_that_a_rank_finds():
    assert [name for name in RANK_VARIABLES if f"`{name}`" not in README] == []


_NAMES = st.sampled_from(["a", "b1", "_c", "loss", "größe"])
_TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
_CONFIGS = st.builds(
    LaunchConfig,
    instance_count=st.integers(1, 4096),
    nproc_per_node=st.sampled_from(["auto", "gpu", 512]),
    protocol=st.sampled_from(["torchrun", "mpirun"]),
    push=st.none() | st.lists(_NAMES).map(tuple),
    pull=st.dictionaries(_NAMES, st.just("all") | st.integers(0, 500)).map(
        lambda d: tuple(Pull(k, v) for k, v in d.items())
    ),
    out=st.none() | st.just("res"),
    env=st.dictionaries(st.sampled_from(["A", "B_2", "c"]), st.none() | _TEXT),
    show=st.none() | st.sets(st.integers(0, 9)).map(tuple),
    timeout=st.none() | st.floats(1e-6, 1e7),
    init_process_group=st.sampled_from([None, "auto", "nccl"]),
    distribution=st.none() | st.dictionaries(_TEXT, st.booleans() | _TEXT | st.integers() | st.none()),
    name=st.none() | st.sampled_from(["run 1", "it's {x} $y #z", 'a"b\\c', "é–"]),
    detach=st.booleans(),
    fork=st.booleans(),
)


@given(_CONFIGS)
def test_the_line_of_a_configuration_means_that_configuration(config):
    line = magic_line(config).removeprefix("%%distributed")
    assert LaunchConfig(**parse_cell_line(line, {}).given) == config


@pytest.mark.parametrize(
    "line", ["{" + "-" * 100_000 + "1}", "--distribution " + "[" * 100_000, "--pull x@" + "9" * 5_000]
)
def test_what_is_too_deep_or_too_long_for_python_is_refused(line):
    with pytest.raises(UsageError):
        parse_cell_line(line, {})


def test_a_value_that_cannot_be_written():
    class Nameless:
        def __str__(self):
            raise OSError("no")

    with pytest.raises(UsageError, match=r"\$x cannot be written: OSError: no"):
        parse_cell_line("--name $x", {"x": Nameless()})
