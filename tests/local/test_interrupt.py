"""The notebook's interrupt: Python is left to its clean-up, what does not hear is killed, a second one kills all."""

from __future__ import annotations

import pickle
import signal
import time
from pathlib import Path

from jupyter_ddp.events import RankEvent, RunEvent

LOOP = "import time\nprint('here')\nwhile True: time.sleep(0.05)"


def test_python_hears_and_ends(start, protocol):
    """B50."""
    run = start(LOOP, protocol=protocol)
    run.until_said("here")
    assert run.job.send("interrupt")
    end = run.end()
    assert (end.outcome, end.unfinished) == ("interrupted", (0, 1))
    assert {event.rank for event in run.of(RankEvent, state="heard")} == {0, 1}
    assert {error.type for error in run.errors().values()} == {"KeyboardInterrupt"}
    assert all(end.by_run for end in run.ends().values())
    assert run.text(0) == "here\n"


def test_a_checkpoint_that_is_being_saved_is_not_torn(start, protocol):
    """A rank that has heard has its own time, far longer than the one for those that have not."""
    cell = """
import os, pickle, time
try:
    print("here")
    time.sleep(300)
finally:
    path = os.path.join(os.environ["JUPYTER_DDP_CHECKPOINT_DIR"], os.environ["RANK"])
    with open(path, "wb") as file:
        for part in range(15):
            time.sleep(0.1)
            pickle.dump(part, file)
"""
    run = start(cell, protocol=protocol)
    run.until_said("here")
    run.job.send("interrupt")
    assert run.end().outcome == "interrupted"
    for name in run.rundir.kept_files():
        with Path(name).open("rb") as file:
            assert [pickle.load(file) for _ in range(15)] == list(range(15))
    assert len(run.rundir.kept_files()) == 2


def test_the_time_for_the_clean_up_is_limited(start):
    cell = "import time\ntry:\n    print('here')\n    time.sleep(300)\nfinally:\n    time.sleep(300)"
    run = start(cell, interrupt_grace=1)
    run.until_said("here")
    run.job.send("interrupt")
    assert run.end().outcome == "interrupted"
    assert {end.signal for end in run.ends().values()} == {signal.SIGTERM}


def test_a_second_interrupt_kills(start, protocol):
    cell = "import time\ntry:\n    print('here')\n    time.sleep(300)\nfinally:\n    print('cleaning')\n    time.sleep(300)"
    run = start(cell, protocol=protocol)
    run.until_said("here")
    run.job.send("interrupt")
    run.until_said("cleaning")
    run.job.send("interrupt")
    assert run.end().outcome == "interrupted"
    assert {end.signal for end in run.ends().values()} == {signal.SIGKILL}


def test_ranks_that_ignore_signals_are_killed(start, protocol):
    ignoring = "import signal\nfor s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, signal.SIG_IGN)\n"
    run = start(ignoring + LOOP, protocol=protocol)
    run.until_said("here")
    run.job.send("interrupt")
    assert run.end().outcome == "interrupted"
    assert {end.signal for end in run.ends().values()} == {signal.SIGKILL}


def test_a_rank_that_is_stuck_in_c_gets_sigterm(start):
    """B50: while C code runs no Python does that could hear."""
    cell = """
import collections, itertools, os, time
print("here", flush=True)
if os.environ["RANK"] == "0":
    collections.deque(itertools.repeat(0), maxlen=0)
time.sleep(300)
"""
    run = start(cell)
    run.until_said("here")
    time.sleep(0.2)  # by now it is in C
    run.job.send("interrupt")
    assert run.end().outcome == "interrupted"
    assert run.ends()[0].signal == signal.SIGTERM
    assert run.errors()[1].type == "KeyboardInterrupt"


def test_ranks_in_a_collective_are_freed_or_ended(start, protocol):
    """B50: a rank that waits in gloo hears nothing until its partner goes."""
    cell = """
import os, time, torch.distributed as dist
dist.init_process_group("gloo")
print("here")
if os.environ["RANK"] == "0":
    dist.barrier()
time.sleep(300)
"""
    run = start(cell, protocol=protocol)
    run.until_said("here")
    time.sleep(0.2)
    run.job.send("interrupt")
    assert run.end().outcome == "interrupted"
    assert run.errors()[1].type == "KeyboardInterrupt"


def test_an_interrupt_before_any_rank_is_there_ends_the_start(start):
    """B50: torchrun's own start takes seconds and hears no SIGINT."""
    run = start(LOOP, protocol="torchrun")
    run.until(lambda: run.of(RunEvent, phase="rendezvous"))
    run.job.send("interrupt")
    assert run.end().outcome == "interrupted"


def test_stop_lets_ranks_handle_sigterm(start, protocol):
    cell = """
import signal, sys, time
def leave(*_):
    print("saving")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("here")
while True: time.sleep(0.05)
"""
    run = start(cell, protocol=protocol)
    run.until_said("here")
    run.job.send("stop")
    assert run.end().outcome == "stopped"
    assert "saving" in run.text(0)


def test_an_interrupt_after_the_end_does_nothing(start):
    run = start("print('over')")
    assert run.end().outcome == "succeeded"
    assert not run.job.send("interrupt")
