"""What is refused before anything starts, with the cure in the sentence."""

from __future__ import annotations

import pytest

from jupyter_ddp import backends
from jupyter_ddp.config import LaunchConfig
from jupyter_ddp.errors import ConfigError, UsageError
from jupyter_ddp.preflight import preflight


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"backend": "sagemaker"}, "--backend sagemaker"),
        ({"distribution": {"mpi": {"enabled": True}}}, "--distribution"),
        ({"detach": True}, "--detach"),
    ],
)
def test_what_comes_later_says_so(fields, flag):
    with pytest.raises(UsageError, match=f"^{flag} comes with a later version: .*\\.$"):
        preflight(LaunchConfig(**fields))


def test_a_backend_that_another_package_brings_is_none_of_a_later_version(monkeypatch):
    monkeypatch.setattr(backends, "names", lambda: ["local", "sagemaker"])
    preflight(LaunchConfig(backend="sagemaker"))


def test_a_bare_environment_name_must_be_the_kernels(monkeypatch):
    monkeypatch.setenv("DDP_HERE", "")
    preflight(LaunchConfig(env={"DDP_HERE": None, "DDP_GIVEN": "1"}))
    with pytest.raises(ConfigError, match=r"has no DDP_NOWHERE: write --env DDP_NOWHERE=VALUE\.$") as caught:
        preflight(LaunchConfig(env={"DDP_HERE": None, "DDP_NOWHERE": None}))
    assert caught.value.field == "env"
