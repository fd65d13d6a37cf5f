"""From Python: `launch` on real ranks, and what an interrupt does at the awkward moments."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from jupyter_ddp.backends._guarded import LocalJob
from jupyter_ddp.config import LaunchConfig
from jupyter_ddp.errors import DistributedError, LaunchError, RunInterrupt
from jupyter_ddp.events import ErrorEvent, RankEvent, RunEvent
from jupyter_ddp.rundir import RunStore
from jupyter_ddp.runner import _is_inherited, _masked, launch
from jupyter_ddp.runtime.process import table
from jupyter_ddp.settings import SETTINGS
from jupyter_ddp.testing import ScriptedBackend

TWO = LaunchConfig(nproc_per_node=2, protocol="mpirun")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    monkeypatch.setattr(SETTINGS, "run_root", str(tmp_path / "runs"))
    return RunStore(tmp_path / "runs")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)


def stop_agent(store: RunStore, said: Path) -> int:
    """Stop the agent of the only run once both ranks are in their function; return its pid."""
    for rank in range(2):
        wait_for(said / f"here{rank}")
    (run,) = store.list()
    started = next(
        event for event in run.events() if isinstance(event, RunEvent) and event.phase == "starting"
    )
    os.kill(started.detail["pid"], signal.SIGSTOP)
    return started.detail["pid"]


def test_a_function_runs_on_every_rank_and_its_values_come_back(store, capsys):
    factor = 21

    def work(x, *, plus):
        print("hello")
        return x * factor * int(os.environ["RANK"]) + plus

    result = launch(work, 2, plus=1, config=TWO)
    assert result.values == [1, 43]
    assert "[1] hello" in capsys.readouterr().out


def test_a_failure_is_raised_unless_it_is_not_to_be(store):
    def work():
        raise ValueError("boom")

    with pytest.raises(DistributedError, match="ValueError: boom") as caught:
        launch(work, config=TWO)
    assert caught.value.result.failure.same == (0, 1)
    place = caught.value.result.failure.place
    assert place.startswith("test_runner.py line ")
    assert place.endswith(': raise ValueError("boom")')
    assert "cell" not in str(caught.value)
    assert not launch(work, config=TWO, check=False).ok


def test_an_interrupt_before_the_agents_are_there_is_not_lost(store, monkeypatch):
    """B50: it waits for them."""
    begin = LocalJob.launch.__func__

    def begin_and_interrupt(cls, *args):
        job = begin(cls, *args)
        interrupt()
        return job

    monkeypatch.setattr(LocalJob, "launch", classmethod(begin_and_interrupt))
    with pytest.raises(KeyboardInterrupt) as caught:
        launch(lambda: time.sleep(300), config=TWO)
    assert caught.value.result.outcome == "interrupted"


def test_an_agent_that_is_slow_to_hear_costs_no_checkpoint(store, tmp_path):
    """A disk that is busy with a checkpoint makes agents slow: the first interrupt never kills."""

    def work():
        try:
            Path(tmp_path, f"here{os.environ['RANK']}").touch()
            time.sleep(300)
        finally:
            time.sleep(0.3)
            Path(tmp_path, f"saved{os.environ['RANK']}").touch()

    def stop_agent_and_interrupt() -> None:
        agent = stop_agent(store, tmp_path)
        interrupt()
        time.sleep(1.5)
        os.kill(agent, signal.SIGCONT)

    thread = threading.Thread(target=stop_agent_and_interrupt)
    thread.start()
    with pytest.raises(RunInterrupt):
        launch(work, config=TWO)
    thread.join()
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()


def test_an_agent_that_does_not_hear_the_second_interrupt_is_passed_over(store, tmp_path):
    def work():
        Path(tmp_path, f"here{os.environ['RANK']}").touch()
        time.sleep(300)

    def stop_agent_and_interrupt() -> None:
        stop_agent(store, tmp_path)
        interrupt()
        time.sleep(0.2)
        interrupt()

    thread = threading.Thread(target=stop_agent_and_interrupt)
    thread.start()
    with pytest.raises((RunInterrupt, DistributedError)):
        launch(work, config=TWO)
    thread.join()
    (run,) = store.list()
    assert not [process for process in table(run.run_id).values() if process.marked]


def test_a_failure_is_not_hidden_by_an_interrupt_that_came_after_it(store, monkeypatch):
    events = [
        RankEvent(state="running", rank=0, time=1.0),
        ErrorEvent(type="ValueError", message="boom", rank=0, time=2.0),
        RunEvent(phase="ended", outcome="failed", time=3.0),
    ]
    backend = ScriptedBackend(events)
    start = backend.start

    def start_and_interrupt(*args):
        job = start(*args)
        interrupt()
        return job

    monkeypatch.setattr(backend, "start", start_and_interrupt)
    with backend.installed(), pytest.raises(DistributedError, match="boom"):
        launch(print, config=LaunchConfig(backend="scripted", nproc_per_node=1))


def test_an_interrupt_goes_by_the_name_that_front_ends_know():
    assert RunInterrupt.__name__ == "KeyboardInterrupt"
    assert issubclass(RunInterrupt, KeyboardInterrupt)


def test_children_of_the_kernel_keep_their_exit_codes(store):
    """The kernel waits for its own children itself, whatever becomes of a run's."""
    import subprocess

    with subprocess.Popen(["sh", "-c", "exit 3"]) as own:
        time.sleep(0.1)
        with contextlib.suppress(DistributedError):
            launch(lambda: os.kill(os.getppid(), signal.SIGKILL), config=TWO)
        assert own.wait() == 3


def test_a_directory_that_cannot_be_made_is_named(store):
    with pytest.raises(LaunchError, match=r"checkpoints /proc/x/y cannot be made"):
        launch(print, config=TWO.replace(checkpoints="/proc/x/y"))
    assert store.list() == []


def test_secrets_are_stored_nowhere_in_the_clear(store):
    """B106: values of --env are masked in what is kept; what the agents need of them is removed when they have it."""
    launch(print, config=TWO.replace(env={"API_TOKEN": "s3cr3t-value"}))
    (run,) = store.list()
    for path in run.path.rglob("*"):
        if path.is_file():
            assert b"s3cr3t-value" not in path.read_bytes(), path
    assert not (run.path / "spec.json").exists()


@pytest.mark.parametrize(
    "line",
    [
        "%%distributed -e API_KEY=s3cr3t -p 2",
        "%%distributed -e 'API_KEY=s3cr3t' -p 2",
        '%%distributed --env="API_KEY=s3cr3t" -p 2',
        '%%distributed -e \'{"API_KEY": "s3cr3t"}\' -p 2',
    ],
)
def test_the_magic_line_is_stored_without_secrets(line):
    masked = _masked(line, LaunchConfig(env={"API_KEY": "s3cr3t"}))
    assert "s3cr3t" not in masked
    assert masked.startswith("%%distributed")
    assert masked.endswith("-p 2")


def test_a_short_value_is_masked_at_its_name_only():
    assert _masked("%%distributed -p 1 -e N=1", LaunchConfig(env={"N": "1"})) == "%%distributed -p 1 -e N=***"


def test_what_was_inherited_from_elsewhere():
    assert _is_inherited({"protocol": "panel"})
    assert _is_inherited({"env": "line, config BASE"})
    assert not _is_inherited({"protocol": "line", "name": "default"})
