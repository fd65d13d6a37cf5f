"""What is set in a session: one store, all or nothing, and everybody hears of it."""

from __future__ import annotations

import pytest

from jupyter_ddp.config import LaunchConfig
from jupyter_ddp.errors import ConfigError
from jupyter_ddp.settings import SETTINGS, Settings, configure, current_config


@pytest.fixture(autouse=True)
def _fresh():
    SETTINGS.reset()
    yield
    SETTINGS.reset()


def test_values_are_normalised_and_a_copy():
    settings = Settings()
    settings.set(**{"nproc-per-node": "4"}, timeout="30m")
    assert settings.values == {"nproc_per_node": 4, "timeout": 1800.0}
    settings.values["timeout"] = 0
    assert settings.values["timeout"] == 1800.0


def test_one_impossible_value_and_none_is_set():
    """B76."""
    settings = Settings()
    settings.set(protocol="mpirun")
    for wrong in ({"nproc_per_node": 0}, {"nodes": 3}, {"out": "a", "pull": "a"}):
        with pytest.raises(ConfigError):
            settings.set(name="x", **wrong)
    assert settings.values == {"protocol": "mpirun"}


def test_fields_are_forgotten_one_by_one_or_all():
    settings = Settings()
    settings.set(protocol="mpirun", timeout=3, name="x")
    settings.reset("protocol")
    assert settings.values == {"timeout": 3.0, "name": "x"}
    settings.reset()
    assert settings.values == {}


def test_two_panels_show_the_same():
    """B76."""
    settings, first, second = Settings(), [], []
    end = settings.watch(first.append)
    settings.watch(second.append)
    settings.set(instance_count=2)
    end()
    end()
    settings.reset()
    assert first == [{"instance_count": 2}]
    assert second == [{"instance_count": 2}, {}]


def test_configure_sets_what_runs_take():
    configure(nproc_per_node=3)
    config, origins = current_config()
    assert config == LaunchConfig(nproc_per_node=3)
    assert origins["nproc_per_node"] == "panel"
    assert origins["protocol"] == "default"
