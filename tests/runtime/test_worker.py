"""The worker with a fake agent: hello, order, exit codes, signals, deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from jupyter_ddp.events import DisplayEvent, ErrorEvent, RankEvent
from jupyter_ddp.runtime.process import is_alive
from tests.runtime.fakeagent import FakeAgent

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no ranks on Windows")


def wait_until(condition, limit=15.0):
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_cell_is_told_from_hello_to_exit(tmp_path):
    with FakeAgent(tmp_path, rank=1, size=2) as agent:
        code = agent.run("print('in', __name__)")
        stub, rank = agent.wait_for("hello:stub"), agent.wait_for("hello:rank")
        assert stub["pid"] == agent.worker.pid
        assert (rank["rank"], rank["local_rank"], rank["pid"] != stub["pid"]) == (1, 0, True)
        assert agent.events(RankEvent)[0].state == "running"
        assert agent.done == {"op": "done", "ok": True, "n": 0, "o": [len("in __main__\n"), 0]}
        ops = [frame["op"] for frame in agent.frames]
        assert ops.index("event") < ops.index("done") < ops.index("exit")
        exit_frame = agent.wait_for("exit")
        assert (exit_frame["rank"], exit_frame["code"], exit_frame["signal"], code) == (1, 0, None, 0)
        assert agent.text() == "in __main__\n"
        assert agent.log() == ""


def called(tmp_path, function):
    """Return the error of a call as `jupyter_ddp.launch` has it made, of a function of this text."""
    (tmp_path / "train.py").write_text(function)
    source = "_function(*_args, **_kwargs)"
    setup = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from train import f as _function\n_args, _kwargs = (1,), {{}}"
    with FakeAgent(tmp_path) as agent:
        agent.run(source, magic="# jupyter_ddp.launch(f)", returns=True, setup=setup)
        return agent.error


def test_an_error_of_a_called_function_has_its_place_there(tmp_path):
    error = called(tmp_path, "import json\ndef g(x): json.loads('')\n\ndef f(x):\n    g(x)\n")
    assert (error.line, error.where, error.source) == (2, "train.py", "def g(x): json.loads('')")
    assert error.traceback.startswith(
        f'Traceback (most recent call last):\n  File "{tmp_path}/train.py", line 5, in f\n    g(x)\n'
    )
    assert "_function" not in error.traceback
    assert "cell" not in error.traceback


def test_a_function_without_a_file_is_named_itself(tmp_path):
    text = "exec(compile('def f(x):\\n  raise ValueError(x)', '<ipython-input-3>', 'exec'))"
    error = called(tmp_path, text)
    assert (error.line, error.where) == (2, "f()")


def test_a_function_that_could_not_be_called_has_no_place(tmp_path):
    error = called(tmp_path, "def f(): pass\n")
    assert error.message.endswith("takes 0 positional arguments but 1 was given")
    assert (error.line, error.where, error.traceback) == (None, "", "")


def test_a_rank_has_the_launchers_variables_and_not_ours(tmp_path):
    """B109."""
    source = """
import os
print(*(os.environ[n] for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK",
                                "MASTER_ADDR", "MASTER_PORT", "JUPYTER_DDP_RUN", "A")))
print(*(os.getenv("JUPYTER_DDP_" + n) for n in ("SOCKETS", "NPROC", "MASTER")), os.getenv("B"))
"""
    with FakeAgent(tmp_path, rank=1, size=2, environ={"B": "gone"}) as agent:
        agent.run(source, env={"A": "set", "B": None})
        assert agent.text().splitlines() == ["1 0 2 1 1 127.0.0.1 29599 0123abcd set", "None None None None"]


def test_the_cell_runs_where_the_kernel_is(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "helpers.py").write_text("def halve(x): return x / 2")
    source = "import os, sys, helpers\nprint(os.path.basename(os.getcwd()), sys.argv, helpers.halve(8), sys.path[0] == SELF)"
    with FakeAgent(tmp_path) as agent:
        path = [str(tmp_path), *(entry for entry in sys.path if entry)]
        agent.run(source.replace("SELF", repr(str(tmp_path))), cwd=str(tmp_path / "work"), sys_path=path)
        assert agent.text() == "work ['<cell>'] 4.0 True\n"


@pytest.mark.parametrize(
    ("source", "ok", "exit_code", "kind", "message"),
    [
        ("import sys\nsys.exit()", True, 0, None, None),
        ("exit(0)", True, 0, None, None),
        ("import sys\nsys.exit(3)", False, 3, "SystemExit", "3"),
        ("import sys\nsys.exit(256)", False, 1, "SystemExit", "256"),
        ("import sys\nsys.exit('bad data')", False, 1, "SystemExit", "bad data"),
        ("class Soft(Exception): errno = 0\nraise Soft('no')", False, 1, "Soft", "no"),
    ],
)
def test_ends_of_a_cell(tmp_path, source, ok, exit_code, kind, message):
    """B27, B86."""
    with FakeAgent(tmp_path) as agent:
        assert agent.run("print('before')\n" + source) == exit_code
        assert agent.text() == "before\n"
        assert agent.done["ok"] is ok
        errors = agent.events(ErrorEvent)
        assert [(error.type, error.message, error.code) for error in errors[-1:]] == (
            [(kind, message, exit_code)] if kind else []
        )


def test_a_rank_that_ends_by_itself_is_told_exactly(tmp_path):
    """B45: a cell that is not finished has no ``done``, and its last words are kept."""
    with FakeAgent(tmp_path) as agent:
        assert agent.run("import os\nprint('last words')\nos._exit(3)") == 3
        assert not [frame for frame in agent.frames if frame["op"] == "done"]
        assert agent.text() == "last words\n"


def test_a_crash_leaves_its_stack(tmp_path):
    """B46."""
    with FakeAgent(tmp_path) as agent:
        assert agent.run("import ctypes\nprint('x', flush=True)\nctypes.string_at(0)") == 128 + signal.SIGSEGV
        frame = agent.wait_for("exit")
        assert (frame["code"], frame["signal"]) == (None, signal.SIGSEGV)
        assert '"<distributed cell>", line 4' in (tmp_path / "rank0.fault").read_text()


def test_the_stub_holds_its_exit_until_it_is_released(tmp_path):
    with FakeAgent(tmp_path) as agent:
        agent.send_cell("raise SystemExit(9)")
        agent.wait_for("exit")
        time.sleep(0.3)
        assert agent.worker.poll() is None
        agent.send("stub", {"op": "release"})
        assert agent.worker.wait(10) == 9


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_the_stub_forwards_signals(tmp_path, signum):
    with FakeAgent(tmp_path) as agent:
        agent.send_cell("import time\nprint('up', flush=True)\ntime.sleep(60)")
        agent.wait_for("event:rank")
        wait_until(agent.text)
        os.kill(agent.worker.pid, signum)
        assert agent.finish() == 128 + signum
        assert agent.wait_for("exit")["signal"] == signum


def test_the_rank_dies_with_its_stub(tmp_path):
    with FakeAgent(tmp_path) as agent:
        agent.send_cell("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)")
        pid = agent.wait_for("hello:rank")["pid"]
        agent.wait_for("event:rank")
        agent.worker.kill()
        wait_until(lambda: not is_alive(pid))


@pytest.mark.parametrize("prepare", ["", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
def test_a_rank_whose_agent_is_gone_ends(tmp_path, prepare):
    with FakeAgent(tmp_path) as agent:
        agent.send_cell(f"{prepare}\nimport time\nprint('up')\ntime.sleep(600)")
        wait_until(lambda: (tmp_path / "rank0.stdout").exists() and agent.text())
        agent.vanish()
        assert agent.worker.wait(20) == (75 if prepare else 128 + signal.SIGTERM)


def test_a_worker_without_agent_or_launcher_says_so(tmp_path):
    command = [sys.executable, "-m", "jupyter_ddp.runtime.worker"]
    environ = {
        **os.environ,
        "JUPYTER_DDP_SOCKETS": str(tmp_path / "none"),
        "JUPYTER_DDP_NPROC": "1",
        "JUPYTER_DDP_MASTER": "127.0.0.1:1",
    }
    assert b"neither torchrun nor mpirun" in subprocess.run(command, env=environ, capture_output=True).stderr
    environ |= {"PMI_RANK": "0", "PMI_SIZE": "1"}
    ended = subprocess.run(command, env=environ, capture_output=True)
    assert (ended.returncode, b"cannot reach the agent" in ended.stderr) == (75, True)


@pytest.mark.parametrize(
    "wait",
    [
        "time.sleep(60)",
        "while True: pass",
        "await asyncio.sleep(60)",
        "asyncio.run(asyncio.sleep(60))",
        "!sleep 60",
    ],
)
def test_an_interrupt_is_heard_and_ends_the_cell(tmp_path, wait):
    """B50: with the user's own clean-up, and a short traceback."""
    source = f"import asyncio, time\ntry:\n    print('up')\n    {wait}\nfinally:\n    print('saved')"
    with FakeAgent(tmp_path) as agent:
        agent.send_cell(source)
        wait_until(lambda: (tmp_path / "rank0.stdout").exists() and "up" in agent.text())
        time.sleep(0.3)
        agent.signal(signal.SIGINT)
        assert agent.finish() == 130
        ops = [frame["op"] for frame in agent.frames]
        assert ops.index("heard") < ops.index("done")
        assert (agent.error.type, agent.error.code, agent.error.line) == ("KeyboardInterrupt", 130, 5)
        assert agent.error.traceback.startswith("Traceback")
        assert "During handling" not in agent.error.traceback
        assert agent.done["ok"] is False
        assert agent.text().endswith("saved\n")


def test_an_interrupt_while_no_cell_runs_is_nothing(tmp_path):
    with FakeAgent(tmp_path) as agent:
        agent.wait_for("hello:rank")
        agent.signal(signal.SIGINT)
        time.sleep(0.2)
        agent.signal(signal.SIGINT)
        assert agent.run("print('still here')") == 0
        assert "heard" not in [frame["op"] for frame in agent.frames]


def test_a_rank_that_stays_runs_cell_after_cell(tmp_path):
    with FakeAgent(tmp_path) as agent:
        agent.send_cell("x = 1\ndef f(): raise ValueError(x)", last=False)
        agent.hear("done")
        agent.send_cell("\nf()", last=False, n=1)
        assert agent.hear("done")["ok"] is False
        agent.send_cell("print(x + 1)", last=False, n=2)
        assert agent.hear("done") == {"op": "done", "ok": True, "n": 2, "o": [2, 0]}
        assert '<distributed cell>", line 3, in f\n    def f()' in agent.error.traceback
        assert '<distributed cell 2>", line 3, in <module>\n    f()' in agent.error.traceback
        assert agent.error.line == 3
        agent.send("rank", {"op": "exit"})
        assert agent.finish() == 0


def test_the_interpreters_end_is_the_usual_one(tmp_path):
    source = """
import atexit, threading, time
atexit.register(print, "at exit")
def work():
    time.sleep(0.3)
    print("thread", len(name))
name = "kept"
threading.Thread(target=work).start()
"""
    with FakeAgent(tmp_path) as agent:
        assert agent.run(source) == 0
        assert agent.text() == "thread 4\nat exit\n"
        assert agent.done["o"] == [0, 0]


def test_a_thread_that_keeps_the_rank_is_named(tmp_path):
    source = """
import os, threading, time
def work():
    while not os.path.exists("go"): time.sleep(0.01)
    print("worked")
threading.Thread(target=work, name="loader").start()
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""
    with FakeAgent(tmp_path) as agent:
        agent.send_cell(source)
        note = agent.wait_for("event:note")
        assert note["event"]["text"] == "its cell is over, but these threads keep it alive: loader"
        assert agent.done["ok"] is True
        (tmp_path / "go").touch()
        assert agent.finish() == 0
        assert agent.text() == "worked\n"


@pytest.mark.parametrize("package", ["IPython", "traitlets"])
def test_a_rank_that_cannot_be_made_ready_says_why(tmp_path, package):
    """A broken environment: the streams are the run's before anything that may be broken is imported."""
    broken = tmp_path / "broken" / package
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("print('half')\nfrom os import nothing_of_that_name\n")
    with FakeAgent(tmp_path, environ={"PYTHONPATH": str(tmp_path / "broken")}) as agent:
        assert agent.run("print('never')") == 1
        assert agent.text() == "half\n"
        assert agent.error.type == "ImportError"
        assert agent.error.message.startswith(
            "while the rank was made ready: cannot import name 'nothing_of_"
        )
        assert f'File "{broken}/__init__.py", line 2' in agent.error.traceback
        assert agent.done["ok"] is False
        assert agent.log() == ""


def test_files_that_cannot_be_made_are_told_too(tmp_path):
    (tmp_path / "rank0.stderr").mkdir()
    with FakeAgent(tmp_path) as agent:
        assert agent.run("print('never')") == 1
        assert agent.error.type == "IsADirectoryError"
        assert agent.done == {"op": "done", "ok": False, "n": 0, "o": [0, 0]}


def test_a_rank_tells_its_device(tmp_path):
    with FakeAgent(tmp_path) as agent:
        assert agent.run("", env={"CUDA_VISIBLE_DEVICES": ""}) == 0
        assert [(event.state, event.device) for event in agent.events(RankEvent)] == [("running", "cpu")]


def test_a_forked_child_is_not_the_rank(tmp_path):
    """Its text is kept; it has no frames, also when it runs out of the cell's end."""
    source = """
import os, multiprocessing
from IPython.display import display, HTML
print("half", end="")
pid = os.fork()
if pid == 0:
    print("child")
    display(HTML("x"))
else:
    os.waitpid(pid, 0)
    worker = multiprocessing.get_context("fork").Process(target=print, args=("process",))
    worker.start(); worker.join()
    print("parent", worker.exitcode)
"""
    with FakeAgent(tmp_path) as agent:
        assert agent.run(source) == 0
        assert agent.text() == "halfchild\n<IPython.core.display.HTML object>\nprocess\nparent 0\n"
        assert [frame["op"] for frame in agent.frames].count("done") == 1
        assert agent.events(DisplayEvent) == []


def test_classes_of_the_cell_reach_spawned_processes(tmp_path):
    """B16."""
    source = """
import multiprocessing
class Count:
    def __getitem__(self, i): return twice(i)
def twice(i): return 2 * i
context = multiprocessing.get_context("spawn")
with context.Pool(1) as pool:
    print(pool.map(Count().__getitem__, [1, 2]))
"""
    with FakeAgent(tmp_path) as agent:
        assert agent.run(source) == 0, agent.error
        assert agent.text() == "[2, 4]\n"


def test_the_setup_runs_first_and_its_errors_say_so(tmp_path):
    with FakeAgent(tmp_path) as agent:
        assert agent.run("print(a)", setup="a = 5\n%env SETUP=1") == 0
        assert agent.text() == "env: SETUP=1\n5\n"
        assert agent.events(RankEvent)[0].state == "running"
    with FakeAgent(tmp_path) as agent:
        assert agent.run("print('never')", setup="\n1/0") == 1
        assert (agent.error.type, agent.error.message) == (
            "ZeroDivisionError",
            "in the setup code: division by zero",
        )
        assert agent.error.line is None
        assert '"<distributed setup>", line 2' in agent.error.traceback
        assert agent.events(RankEvent) == []
        assert agent.done["ok"] is False


def test_stacks_on_demand(tmp_path):
    from jupyter_ddp.runtime.streams import STACKS_SIGNAL

    with FakeAgent(tmp_path) as agent:
        agent.send_cell("import time\ndef wait():\n    print('up')\n    time.sleep(60)\nwait()")
        wait_until(lambda: (tmp_path / "rank0.stdout").exists() and agent.text())
        agent.signal(STACKS_SIGNAL)
        stacks = tmp_path / "rank0.stacks"
        wait_until(lambda: '"<distributed cell>", line 5 in wait' in stacks.read_text())
        agent.signal(signal.SIGTERM)
        assert agent.finish() == 128 + signal.SIGTERM


def test_a_process_group_is_made_and_destroyed(tmp_path):
    """B56."""
    source = "import torch.distributed as dist\nprint(dist.get_backend(), dist.get_world_size())"
    with FakeAgent(tmp_path, environ={"CUDA_VISIBLE_DEVICES": ""}) as agent:
        assert agent.run(source, init_process_group="auto") == 0
        assert agent.text() == "gloo 1\n"
        assert agent.text("stderr") == ""


def test_a_group_that_cannot_be_destroyed_does_not_hold_the_rank(tmp_path):
    """B56: its peers are gone."""
    source = """
import atexit, sys, time, types
stuck = sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")
stuck.is_available = stuck.is_initialized = lambda: True
stuck.destroy_process_group = lambda: time.sleep(600)
atexit.register(print, "at exit")
"""
    with FakeAgent(tmp_path) as agent:
        assert agent.run(source) == 0
        assert agent.text() == "at exit\n"
