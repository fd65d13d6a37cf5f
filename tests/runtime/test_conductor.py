"""Who decides: what all agents report and the time that passes, in; orders that all follow, out. Nothing runs here."""

from __future__ import annotations

from typing import Any

import pytest

from jupyter_ddp.runtime.conductor import (
    END_LIMIT,
    FAILURE_GRACE,
    FLUSH_LIMIT,
    LINGER,
    STACKS_WAIT,
    STOP_GRACE,
    Conductor,
)

GRACE = 30.0


class Run:
    """A conductor, what it has ordered, and a clock that a test moves."""

    def __init__(
        self, nnodes: int = 1, nproc: int = 2, *, timeout: float | None = None, **values: Any
    ) -> None:
        self.orders: list[dict[str, Any]] = []
        self.now = 1_000.0
        self.nodes, self.ranks = range(nnodes), range(nnodes * nproc)
        self.conductor = Conductor(
            nnodes=nnodes,
            nproc=nproc,
            timeout=timeout,
            start_timeout=300.0,
            interrupt_grace=GRACE,
            order=self.orders.append,
            now=self.now,
            **values,
        )

    def say(self, op: str, **values: Any) -> None:
        self.conductor.report({"op": op, **values}, self.now)

    def all_say(self, op: str, **values: Any) -> None:
        for rank in self.ranks:
            self.say(op, rank=rank, **values)

    def join(self) -> None:
        for node in self.nodes:
            self.say("joined", node=node)

    def started(self) -> Run:
        """Come to the point at which every rank runs the cell."""
        self.join()
        self.all_say("connected")
        self.all_say("running")
        assert self.taken() == ["launch"]
        return self

    def end(self, *ranks: int) -> None:
        for rank in ranks:
            self.say("finished", rank=rank, ok=True)
            self.say("ended", rank=rank)

    def fail(self, rank: int, *, ended: bool = True) -> None:
        self.say("failed", rank=rank)
        self.say("finished", rank=rank, ok=False)
        if ended:
            self.say("ended", rank=rank)

    def flush(self) -> None:
        for node in self.nodes:
            self.say("flushed", node=node)

    def wait(self, seconds: float) -> None:
        """Let time pass as an agent does: it wakes when the conductor wants it."""
        end = self.now + seconds
        while (at := self.conductor.next_at()) is not None and at <= end:
            assert at > self.now or self.now == at, "it wants to be woken in the past"
            self.now = max(self.now, at)
            before = (at, len(self.orders))
            self.conductor.tick(self.now)
            assert (self.conductor.next_at(), len(self.orders)) != before, "it wakes for nothing"
        self.now = end

    def taken(self) -> list[str]:
        """Return the orders' names since the last call, and forget them; the last one stays in `last`."""
        names = [order["op"] for order in self.orders]
        self.last = self.orders[-1] if self.orders else {}
        self.orders.clear()
        return names

    def verdict(self) -> tuple[str, str, list[int]]:
        return self.last["outcome"], self.last["reason"], self.last["unfinished"]


# a run that goes well


@pytest.mark.parametrize(("nnodes", "nproc"), [(1, 1), (1, 4), (3, 2)])
def test_a_run_from_beginning_to_end(nnodes, nproc):
    run = Run(nnodes, nproc)
    run.join()
    assert run.orders == [{"op": "launch", "try": 0}]
    run.all_say("connected")
    run.all_say("running")
    run.wait(100_000)
    run.all_say("finished", ok=True)
    assert run.taken() == ["launch"]
    run.all_say("ended")
    assert run.taken() == ["release"]
    assert run.verdict() == ("succeeded", "", [])
    run.flush()
    assert run.taken() == ["exit"]
    assert run.conductor.next_at() is None


def test_ranks_that_are_held_begin_when_all_have_connected():
    orders = []
    conductor = Conductor(
        nnodes=2,
        nproc=1,
        timeout=None,
        start_timeout=60,
        interrupt_grace=30,
        order=orders.append,
        now=0.0,
        hold=True,
    )
    for node in range(2):
        conductor.report({"op": "joined", "node": node}, 1.0)
    conductor.report({"op": "connected", "rank": 0}, 2.0)
    assert [order["op"] for order in orders] == ["launch"]
    conductor.report({"op": "connected", "rank": 1}, 3.0)
    assert [order["op"] for order in orders] == ["launch", "begin"]


def test_nothing_starts_before_all_agents_are_there():
    run = Run(3)
    run.say("joined", node=2)
    run.say("joined", node=0)
    assert run.taken() == []
    run.say("joined", node=1)
    assert run.taken() == ["launch"]
    run.say("joined", node=1)
    assert run.taken() == []


def test_a_rank_that_is_early_does_not_let_the_launcher_go():
    run = Run(2, 2).started()
    run.end(0, 1, 2)
    run.wait(100_000)
    assert run.taken() == []
    run.end(3)
    assert run.taken() == ["release"]


def test_all_flush_before_anybody_leaves():
    run = Run(2).started()
    run.end(*run.ranks)
    assert run.taken() == ["release"]
    run.say("flushed", node=1)
    run.say("flushed", node=1)
    run.wait(FLUSH_LIMIT / 2)
    assert run.taken() == []
    run.say("flushed", node=0)
    assert run.taken() == ["exit"]


def test_flushing_has_a_limit():
    run = Run(2).started()
    run.end(*run.ranks)
    run.say("flushed", node=0)
    run.wait(FLUSH_LIMIT)
    assert run.taken() == ["release", "exit"]


# failures


def test_others_may_tell_their_own_error_before_they_are_stopped():
    """B42, B48."""
    run = Run(nproc=4).started()
    run.fail(1)
    run.wait(LINGER / 2)
    run.fail(2)
    assert run.taken() == []
    run.wait(LINGER / 2)
    assert run.taken() == ["abort"]
    assert run.last == {
        "op": "abort",
        "grace": FAILURE_GRACE,
        "outcome": "failed",
        "reason": "",
        "unfinished": [0, 1, 2, 3],
    }
    run.say("ended", rank=0)
    run.say("ended", rank=3)
    assert run.taken() == ["release"]
    assert run.verdict()[0] == "failed"
    run.flush()
    assert run.taken() == ["exit"]


def test_when_all_have_failed_nobody_has_to_be_stopped():
    """B48. Each ends by its own exit code, at once."""
    run = Run(nproc=3).started()
    for rank in run.ranks:
        run.fail(rank)
    assert run.taken() == ["release"]
    assert run.verdict()[0] == "failed"


def test_a_rank_that_failed_may_end_by_itself():
    """Its exit code is its own, not that of our signal, as long as it does not take too long."""
    run = Run(nproc=1).started()
    run.fail(0, ended=False)
    run.wait(LINGER * 0.9)
    assert run.taken() == []
    run.say("ended", rank=0)
    assert run.taken() == ["release"]


def test_a_rank_that_failed_and_hangs_is_stopped():
    run = Run(nproc=1).started()
    run.fail(0, ended=False)
    run.wait(LINGER)
    assert run.taken() == ["abort"]


def test_a_rank_that_ends_without_having_finished_is_a_failure():
    """B45, B46: the agent says `failed` for it."""
    run = Run(nproc=2).started()
    run.say("failed", rank=1)
    run.say("ended", rank=1)
    run.wait(LINGER)
    run.say("ended", rank=0)
    assert run.taken() == ["abort", "release"]
    assert run.verdict()[0] == "failed"


def test_a_failure_before_all_have_connected_is_one_too():
    run = Run(nproc=2)
    run.join()
    run.say("connected", rank=0)
    run.say("failed", rank=0)
    run.say("ended", rank=0)
    run.wait(LINGER)
    assert run.taken() == ["launch", "abort"]
    run.say("ended", rank=1)
    assert run.taken() == ["release"]
    run.wait(1_000)
    assert run.taken() == ["exit"]
    assert run.conductor.next_at() is None


def test_a_failure_says_what_it_was_told():
    run = Run().started()
    run.say("failed", text="the payload cannot be read")
    run.wait(LINGER)
    assert run.taken() == ["abort"]
    assert run.verdict() == ("failed", "the payload cannot be read", [0, 1])


def test_an_agent_that_never_tells_the_end_of_its_ranks_does_not_hold_the_run():
    run = Run(2, 2).started()
    run.fail(0)
    run.say("ended", rank=1)
    run.say("ended", rank=3)
    run.wait(LINGER + FAILURE_GRACE + END_LIMIT)
    assert run.taken() == ["abort", "release"]
    assert run.verdict()[:2] == ("failed", "rank 2 could not be ended")


# interrupts


def test_an_interrupt_is_passed_on_and_waited_for():
    """B50."""
    run = Run().started()
    run.say("interrupt")
    assert run.orders == [{"op": "interrupt", "grace": GRACE}]
    run.wait(GRACE)  # ranks are cleaning up
    assert run.taken() == ["interrupt"]
    run.fail(0)
    run.fail(1)
    assert run.taken() == ["release"]
    assert run.verdict() == ("interrupted", "", [0, 1])


def test_it_names_those_who_had_not_finished():
    run = Run(nproc=3).started()
    run.end(1)
    run.say("interrupt")
    run.end(0, 2)
    run.taken()
    assert run.verdict() == ("interrupted", "", [0, 2])


def test_a_second_interrupt_kills():
    run = Run().started()
    run.say("interrupt")
    run.say("interrupt")
    assert run.taken() == ["interrupt", "kill"]
    run.all_say("ended")
    assert run.taken() == ["release"]
    assert run.verdict()[0] == "interrupted"


def test_an_interrupt_of_a_run_that_is_failing_kills():
    run = Run().started()
    run.say("failed", rank=0)
    run.say("interrupt")
    run.wait(LINGER)
    assert run.taken() == ["kill"]
    run.all_say("ended")
    assert run.taken() == ["release"]
    assert run.verdict()[0] == "failed"


def test_an_interrupt_before_all_ranks_are_there_ends_the_start():
    run = Run()
    run.join()
    run.say("connected", rank=0)
    run.say("interrupt")
    assert run.taken() == ["launch", "abort"]
    assert run.last["grace"] == LINGER
    assert run.verdict() == ("interrupted", "", [0, 1])
    run.all_say("ended")
    assert run.taken() == ["release"]


def test_an_interrupt_before_all_agents_are_there():
    """Ranks of an agent that never came are not waited for, and neither is its log."""
    run = Run(2, 1)
    run.say("joined", node=0)
    run.say("interrupt")
    assert run.taken() == ["abort"]
    run.say("ended", rank=0)
    assert run.taken() == ["release"]
    run.say("flushed", node=0)
    assert run.taken() == ["exit"]


def test_an_interrupt_stops_the_time_limit():
    run = Run(timeout=10).started()
    run.wait(9)
    run.say("interrupt")
    run.wait(GRACE)
    assert run.taken() == ["interrupt"]


def test_ranks_that_survive_an_interrupt_do_not_hold_the_run_for_ever():
    run = Run().started()
    run.say("interrupt")
    run.wait(GRACE + END_LIMIT)
    assert run.taken() == ["interrupt", "release"]
    assert run.verdict()[1] == "ranks 0, 1 could not be ended"


# stop, kill, stacks


@pytest.mark.parametrize(
    ("message", "grace", "reason"),
    [({}, STOP_GRACE, "it was stopped"), ({"grace": 120, "text": "no heartbeat"}, 120.0, "no heartbeat")],
)
def test_a_run_can_be_stopped(message, grace, reason):
    run = Run().started()
    run.say("stop", **message)
    assert run.taken() == ["abort"]
    assert run.last["grace"] == grace
    assert run.verdict() == ("stopped", reason, [0, 1])


def test_stop_does_not_wait_for_a_clean_up_that_an_interrupt_began():
    run = Run().started()
    run.say("interrupt")
    run.say("stop")
    run.say("stop")
    assert run.taken() == ["interrupt", "abort"]
    assert run.last["grace"] == STOP_GRACE
    assert run.verdict()[0] == "interrupted"


def test_a_run_can_be_killed():
    run = Run().started()
    run.end(1)
    run.say("kill")
    assert run.taken() == ["kill"]
    run.say("ended", rank=0)
    assert run.taken() == ["release"]
    assert run.verdict() == ("stopped", "it was killed", [0])


def test_a_run_can_be_killed_before_all_agents_are_there():
    run = Run(2, 1)
    run.say("joined", node=0)
    run.say("kill")
    run.say("ended", rank=0)
    assert run.taken() == ["kill", "release"]


def test_a_kill_that_nobody_answers_ends_the_run_too():
    run = Run().started()
    run.say("kill")
    run.wait(END_LIMIT)
    assert run.taken() == ["kill", "release"]
    assert run.verdict() == ("stopped", "it was killed; ranks 0, 1 could not be ended", [0, 1])


def test_stacks_may_be_asked_for_at_any_time():
    run = Run()
    run.say("stacks")
    assert run.taken() == ["stacks"]
    run.started()
    run.say("stacks")
    run.say("stacks")
    assert run.taken() == ["stacks", "stacks"]
    run.end(*run.ranks)
    assert run.taken() == ["release"]


# limits of time


def test_at_the_time_limit_stacks_are_taken_before_ranks_are_stopped():
    """B54."""
    run = Run(nproc=3, timeout=60).started()
    run.end(1)
    run.wait(60)
    assert run.taken() == ["stacks"]
    run.wait(STACKS_WAIT)
    assert run.taken() == ["abort"]
    assert run.verdict() == ("timeout", "the time limit of 60 s was up", [0, 2])
    run.say("ended", rank=0)
    run.say("ended", rank=2)
    assert run.taken() == ["release"]
    assert run.verdict()[0] == "timeout"


def test_the_time_counts_from_the_first_rank_that_runs_the_cell():
    run = Run(timeout=60)
    run.join()
    run.wait(100)
    run.all_say("connected")
    run.wait(100)
    run.say("running", rank=1)
    run.wait(59)
    run.say("running", rank=0)
    assert run.taken() == ["launch"]
    run.wait(1)
    assert run.taken() == ["stacks"]


def test_a_run_that_ends_in_time_has_no_limit_any_more():
    run = Run(timeout=60).started()
    run.wait(59)
    run.end(*run.ranks)
    run.wait(1_000)
    assert run.taken() == ["release", "exit"]
    assert "timeout" not in str(run.last)


def test_a_failure_while_stacks_are_taken_is_the_outcome():
    run = Run(timeout=60).started()
    run.wait(60)
    run.say("failed", rank=0)
    run.wait(STACKS_WAIT)
    assert run.taken() == ["stacks", "abort"]
    assert run.verdict()[0] == "failed"


def test_ranks_that_do_not_start_in_time_are_named():
    run = Run(nproc=4)
    run.join()
    run.say("connected", rank=0)
    run.say("connected", rank=2)
    run.wait(300)
    assert run.taken() == ["launch", "abort"]
    assert run.verdict() == ("lost", "ranks 1, 3 did not start within 300 s", [0, 1, 2, 3])


def test_a_single_rank_that_does_not_start():
    run = Run(nproc=2)
    run.join()
    run.say("connected", rank=0)
    run.wait(300)
    run.taken()
    assert run.verdict()[1] == "rank 1 did not start within 300 s"


def test_instances_that_do_not_join_in_time_are_named_and_not_waited_for():
    run = Run(3, 1)
    run.say("joined", node=1)
    run.wait(300)
    assert run.taken() == ["abort"]
    assert run.verdict()[:2] == ("lost", "instances 0, 2 did not join within 300 s")
    run.say("ended", rank=1)
    assert run.taken() == ["release"]
    run.say("flushed", node=1)
    assert run.taken() == ["exit"]


def test_once_all_are_there_they_may_take_their_time():
    run = Run()
    run.join()
    run.all_say("connected")
    run.wait(100_000)
    assert run.taken() == ["launch"]


# launchers


def test_a_launcher_that_ends_before_its_ranks_ends_the_run():
    """B57."""
    run = Run().started()
    run.say("launcher", node=0, text="torchrun was killed by SIGKILL", **{"try": 0, "port_taken": False})
    assert run.taken() == ["abort"]
    assert run.verdict() == ("lost", "torchrun was killed by SIGKILL", [0, 1])


def test_ranks_that_die_with_their_launcher_are_not_the_cause():
    run = Run().started()
    run.say("failed", rank=1)
    run.say("ended", rank=1)
    run.say("launcher", node=0, text="mpirun ended with code 3", **{"try": 0, "port_taken": False})
    assert run.taken() == ["abort"]
    assert run.verdict()[:2] == ("lost", "mpirun ended with code 3")


@pytest.mark.parametrize("cause", ["interrupt", "stop", "kill"])
def test_a_launcher_that_ends_when_the_run_is_ended_says_nothing_new(cause):
    run = Run().started()
    run.say(cause)
    run.taken()
    run.say("launcher", node=0, text="mpirun ended", **{"try": 0, "port_taken": False})
    assert run.taken() == []
    run.all_say("ended")
    run.taken()
    assert run.last["outcome"] == {"interrupt": "interrupted"}.get(cause, "stopped")


def test_a_launcher_that_cannot_be_started():
    run = Run()
    run.join()
    run.say("launcher", node=0, text="torchrun could not be started: no such file")
    assert run.taken() == ["launch", "abort"]
    assert run.verdict()[:2] == ("lost", "torchrun could not be started: no such file")


def taken_port(number: int, node: int = 0) -> dict[str, Any]:
    return {"node": node, "text": "address in use", "try": number, "port_taken": True}


def test_a_port_that_is_taken_is_exchanged_three_tries_in_all():
    """B33."""
    run = Run()
    run.join()
    run.say("launcher", **taken_port(0))
    run.say("launcher", **taken_port(1))
    assert [order["try"] for order in run.orders] == [0, 1, 2]
    assert run.taken() == ["launch"] * 3
    run.say("launcher", **taken_port(2))
    assert run.taken() == ["abort"]
    assert run.verdict()[:2] == ("lost", "address in use")


def test_the_last_port_may_be_the_good_one():
    run = Run()
    run.join()
    run.say("launcher", **taken_port(0))
    run.say("launcher", **taken_port(1))
    run.taken()
    run.all_say("connected")
    run.end(*run.ranks)
    assert run.taken() == ["release"]
    assert run.verdict()[0] == "succeeded"


def test_the_launchers_of_one_try_count_once():
    """Several instances see the same port taken, one of them late: the try that runs is not disturbed."""
    run = Run(2, 1)
    run.join()
    run.say("launcher", **taken_port(0))
    run.say("launcher", **taken_port(0, node=1))
    assert run.taken() == ["launch", "launch"]
    assert run.last["try"] == 1
    run.say("launcher", node=1, text="lost its peer", **{"try": 0, "port_taken": False})
    assert run.taken() == []


def test_a_launch_is_not_repeated_once_a_rank_has_started():
    """The address in use is then the cell's own affair."""
    run = Run()
    run.join()
    run.say("connected", rank=0)
    run.say("launcher", **taken_port(0))
    assert run.taken() == ["launch", "abort"]


def test_a_launch_is_not_repeated_when_the_run_is_ending():
    run = Run()
    run.join()
    run.say("interrupt")
    run.say("launcher", **taken_port(0))
    assert run.taken() == ["launch", "abort"]
    assert run.verdict()[0] == "interrupted"


# agents


def test_a_lost_agent_ends_the_run():
    run = Run(2, 2).started()
    run.say("lost", node=1, text="the agent of instance 1 is gone")
    assert run.taken() == ["abort"]
    assert run.verdict() == ("lost", "the agent of instance 1 is gone", [0, 1, 2, 3])
    run.say("ended", rank=0)
    run.say("ended", rank=1)
    assert run.taken() == ["release"]
    run.say("flushed", node=0)
    assert run.taken() == ["exit"]


def test_an_agent_that_is_lost_before_the_start():
    run = Run(3, 1)
    run.say("joined", node=0)
    run.say("joined", node=1)
    run.say("lost", node=1, text="gone")
    run.say("joined", node=2)  # late: nothing is launched any more
    run.say("ended", rank=0)
    assert run.taken() == ["abort", "release"]
    assert run.verdict()[:2] == ("lost", "gone")
    run.say("flushed", node=0)
    assert run.taken() == ["exit"]


def test_an_agent_that_is_lost_while_it_flushes_is_not_waited_for():
    run = Run(2, 1).started()
    run.end(0, 1)
    run.say("flushed", node=0)
    run.say("lost", node=1, text="gone")
    assert run.taken() == ["release", "exit"]


def test_an_agent_that_is_lost_while_the_run_is_interrupted():
    run = Run(2, 1).started()
    run.say("interrupt")
    run.say("lost", node=1, text="gone")
    run.say("ended", rank=0)
    assert run.taken() == ["interrupt", "release"]
    assert run.verdict()[0] == "interrupted"


# words


LATE = [
    {"op": "failed", "rank": 0},
    {"op": "running", "rank": 0},
    {"op": "ended", "rank": 0},
    {"op": "launcher", "node": 0, "text": "t", "try": 0, "port_taken": True},
    {"op": "lost", "node": 0, "text": "t"},
    {"op": "interrupt"},
    {"op": "kill"},
    {"op": "stop"},
    {"op": "stacks"},
    {"op": "joined", "node": 0},
]


@pytest.mark.parametrize("message", LATE, ids=lambda message: message["op"])
@pytest.mark.parametrize("flushed", [False, True])
def test_after_the_end_nothing_changes_it(message, flushed):
    run = Run(timeout=5, nnodes=2, nproc=1).started()
    run.end(*run.ranks)
    run.say("flushed", node=0)
    if flushed:
        run.say("flushed", node=1)
    assert run.taken()[0] == "release"
    run.say(**message)
    assert run.taken() == []
    run.wait(1_000)
    assert run.taken() == ([] if flushed else ["exit"])


@pytest.mark.parametrize(
    "message", [{}, {"op": None}, {"op": "dance"}, {"op": ["kill"]}, {"op": ""}, {"op": "tick"}]
)
def test_words_that_are_not_known_are_ignored(message):
    run = Run().started()
    run.conductor.report(message, run.now)
    assert run.taken() == []


def test_each_is_told_once_however_often_it_is_reported():
    run = Run().started()
    for _ in range(3):
        run.fail(0)
    run.wait(LINGER)
    for _ in range(3):
        run.say("ended", rank=1)
    for _ in range(3):
        run.flush()
    assert run.taken() == ["abort", "release", "exit"]
