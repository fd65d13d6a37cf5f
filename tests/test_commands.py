"""`%distributed` lines: a word, and what belongs to it."""

from __future__ import annotations

import pytest

from jupyter_ddp.errors import ConfigError, UsageError
from jupyter_ddp.line.commands import WORDS, Command, parse_command

NOTEBOOK = {"n": 3, "env": {"A": "1"}, "dist": {"mpi": {"enabled": True}}, "ranks": [0, 2]}


def parse(line):
    return parse_command(line, NOTEBOOK)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("", Command()),
        ("  # nothing", Command()),
        ("help", Command(help=True)),
        ("runs", Command("runs")),
        ("stop", Command("stop")),
        ("stop ab12", Command("stop", run="ab12")),
        ("logs last --rank 3", Command("logs", run="last", rank=3)),
        ("logs --rank=0 'my run'", Command("logs", run="my run", rank=0)),
        ("logs last -r {n}", Command("logs", run="last", rank=3)),
        ("doctor", Command("doctor")),
        ("config", Command("config")),
        ("config --reset", Command("config", reset=True)),
        ("config --reset protocol timeout", Command("config", forget=["protocol", "timeout"])),
        (
            "config nproc_per_node=4 protocol=mpirun",
            Command("config", changes={"nproc_per_node": 4, "protocol": "mpirun"}),
        ),
        ("config nproc-per-node = {n}", Command("config", changes={"nproc_per_node": 3})),
        ("config nnodes= 2", Command("config", changes={"instance_count": 2})),
        (
            "config -p 4 --protocol mpirun",
            Command("config", changes={"nproc_per_node": 4, "protocol": "mpirun"}),
        ),
        (
            "config timeout= protocol=mpirun",
            Command("config", changes={"protocol": "mpirun"}, forget=["timeout"]),
        ),
        ("config timeout=None", Command("config", changes={"timeout": None})),
        ("config push=a, b show={ranks}", Command("config", changes={"push": ("a", "b"), "show": (0, 2)})),
        (
            "config env=env distribution=dist",
            Command("config", changes={"env": {"A": "1"}, "distribution": NOTEBOOK["dist"]}),
        ),
        ('config env=\'{"A": "b c"}\'', Command("config", changes={"env": {"A": "b c"}})),
        ("config env=\"{'A': 'x'}\"", Command("config", changes={"env": {"A": "x"}})),
        ("config env=A=1", Command("config", changes={"env": {"A": "1"}})),
        ("config setup='import torch'", Command("config", changes={"setup": "import torch"})),
        (
            "config name='run 1' start_timeout=10m",
            Command("config", changes={"name": "run 1", "start_timeout": 600.0}),
        ),
    ],
)
def test_what_a_line_asks_for(line, command):
    assert parse(line) == command


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("rusn", "did you mean %distributed runs?"),
        ("status", "did you mean %distributed runs?"),
        ("kill", "did you mean %distributed stop?"),
        ("xyzzy", "the words are config, runs, stop, logs, doctor."),
        ("-p 4", "%distributed config -p 4"),
        ("nproc_per_node=4", "%distributed config nproc_per_node=4"),
        ("logs", "logs last"),
        ("logs last --rank x", "--rank takes a rank's number"),
        ("logs last --tail 3", "has no flag --tail: write %distributed logs ID, or logs ID --rank 0."),
        ("runs now", "has no use for 'now': write %distributed runs."),
        ("doctor now", "has no use for 'now': write %distributed doctor."),
        ("stop a b", "has no use for 'b': write %distributed stop, or stop ID."),
        ("config protocol mpirun", "write %distributed config protocol=mpirun"),
        ("config protokol=mpirun", "did you mean protocol?"),
        ("config protocol=MPIrun", "did you mean mpirun?"),
        ("config --dry-run", "belongs to one cell's line"),
        ("config --config env", "--config belongs"),
        ("config env=nope_nope{", "env"),
    ],
)
def test_what_cannot_be_meant_is_answered_in_a_sentence(line, words):
    with pytest.raises(UsageError) as caught:
        parse(line)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_value_knows_its_field():
    with pytest.raises(ConfigError) as caught:
        parse("config nproc_per_node=0")
    assert caught.value.field == "nproc_per_node"


def test_every_word_is_explained():
    assert all(text and not text.endswith(".") for text in WORDS.values())


def test_a_rank_without_bounds_is_none():
    with pytest.raises(UsageError, match="takes a rank's number"):
        parse_command("logs x --rank " + "9" * 5_000, {})
