"""Completion of the magic's lines, as a function of texts and in a real shell."""

from __future__ import annotations

import pytest

from jupyter_ddp.config import LaunchConfig
from jupyter_ddp.line.flags import FLAGS
from jupyter_ddp.magics.completion import Surroundings, suggest

AROUND = Surroundings(
    names={"model": 1, "mode": 2, "cfg": LaunchConfig(), "base": {"a": 1}, "_hidden": 3, "In": []},
    cell="%%distributed --pull \nloss = 1\nacc: float = 2\nif loss == 3: pass",
    backends=("local", "sagemaker"),
    runs=lambda: ["ab12cd34", "baseline"],
    environ={"HOME": "/", "HF_TOKEN": "s3cret"},
)


def texts(line):
    found = suggest(line, AROUND)
    return None if found is None else [text for text, _ in found[1]]


def typed(line):
    return suggest(line, AROUND)[0]


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        ("%%distributed --pro", ["--protocol"]),
        ("%%distributed --nproc_", ["--nproc-per-node"]),
        ("%%distributed -p 4 --in", ["--instance-count", "--instance-type", "--init-process-group"]),
        ("%%distributed --protocol ", ["torchrun", "mpirun"]),
        ("%%distributed --protocol m", ["mpirun"]),
        ("%%distributed --protocol=m", ["mpirun"]),
        ("%%distributed --protocol mpirun --pro", []),
        ("%%distributed --env A=1 --en", ["--env"]),
        ("%%distributed -b ", ["local", "sagemaker"]),
        ("%%distributed -p ", ["auto", "gpu", "cpu"]),
        ("%%distributed --init-process-group n", ["nccl"]),
        ("%%distributed --push mod", ["model", "mode"]),
        ("%%distributed --push model,mo", ["model", "mode"]),
        ("%%distributed --push model, mo", ["model", "mode"]),
        ("%%distributed --push=mode", ["model", "mode"]),
        ("%%distributed --out m", ["model", "mode"]),
        ("%%distributed --config ", ["cfg", "base"]),
        ("%%distributed --distribution ", ["base"]),
        ("%%distributed --env H", ["HF_TOKEN", "HOME"]),
        ("%%distributed --pull ", ["loss", "acc", "model", "mode", "cfg", "base"]),
        ("%%distributed --pull loss@", ["loss@all"]),
        ("%%distributed --pull acc,loss@a", ["loss@all"]),
        ("%%distributed --timeout 3", ["30m"]),
        ("%%distributed --name ", []),
        ("%distributed ", ["config", "runs", "stop", "logs", "doctor"]),
        ("%distributed do", ["doctor"]),
        ("%distributed stop ", ["last", "ab12cd34", "baseline"]),
        ("%distributed logs ab", ["ab12cd34"]),
        ("%distributed logs last --", ["--rank"]),
        ("%distributed config pro", ["protocol="]),
        ("%distributed config protocol=", ["torchrun", "mpirun"]),
        ("%distributed config protocol=m", ["mpirun"]),
        ("%distributed config --re", ["--reset"]),
        ("%distributed config -p ", ["auto", "gpu", "cpu"]),
        ("  %distributed ru", ["runs"]),
        ("%%distributed", None),
        ("%distributedx ", None),
        ("print(1)", None),
        ("%%time --pro", None),
    ],
)
def test_what_a_line_may_become(line, choices):
    assert texts(line) == choices


def test_what_is_being_typed_is_what_gets_replaced():
    assert typed("%%distributed --protocol=m") == "m"
    assert typed("%%distributed --push a,mo") == "mo"
    assert typed("%%distributed --pro") == "--pro"


def test_an_empty_place_offers_every_flag_that_is_not_there_yet():
    assert texts("%%distributed -p 4 ") == [flag.long for flag in FLAGS if flag.field != "nproc_per_node"]


def test_values_of_the_environment_are_not_offered():
    assert not any("s3cret" in text for text in texts("%%distributed --env "))
