"""A real ipykernel, driven as a front end drives it: what arrives, in which cell, and how an interrupt ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebook import Notebook, live_text, outputs, says, states, texts, until_gone

pytestmark = pytest.mark.kernel
MIME = "application/vnd.jupyter-ddp.run+json"
MAGIC = "%%distributed -p 2 --protocol mpirun"
LOOP = f"{MAGIC}\nimport time\nprint('here')\nwhile True: time.sleep(0.05)"


@pytest.fixture
def notebook(tmp_path: Path):
    opened = Notebook(tmp_path)
    yield opened
    opened.close()


def test_a_run_is_one_output_with_the_text_of_every_rank(notebook):
    messages = notebook.run(f"{MAGIC}\nimport os\nprint('hello from', os.environ['RANK'])")
    shown = outputs(messages)
    assert len(shown) == 1
    (bundle,) = shown.values()
    assert set(bundle) == {"text/plain", "text/html", MIME}
    assert "[0] hello from 0" in bundle["text/plain"]
    assert "[1] hello from 1" in bundle["text/plain"]
    assert bundle["text/plain"].startswith("succeeded on 2 ranks · mpirun")
    assert texts(messages) == ""


def test_lines_arrive_while_the_cell_runs(notebook):
    """B69: without flush=True, each once."""
    request = notebook.send(f"{MAGIC}\nimport time\nfor i in range(3): print('tick', i); time.sleep(0.4)")
    messages = notebook.messages(request, until=says("tick 0"))
    assert not any("tick 2" in live_text(message) for message in messages)
    messages += notebook.messages(request)
    text = "".join(map(live_text, messages))
    assert [text.count(f"tick {i}\n") for i in range(3)] == [2, 2, 2]


def test_output_stays_in_its_own_cell(notebook):
    """B31, B72: three cells queued at once are three clean runs, one after the other."""
    requests = [notebook.send(f"{MAGIC}\nprint('cell {name}')") for name in "abc"]
    for name, request in zip("abc", requests, strict=True):
        (bundle,) = outputs(notebook.messages(request)).values()
        lines = bundle["text/plain"].splitlines()[1:]
        assert sorted(lines) == [f"[0] cell {name}", f"[1] cell {name}"]
    assert len(notebook.store.list()) == 3


def test_variables_of_the_notebook_are_changed_only_when_asked_for(notebook):
    """B28: also after a failed run."""
    notebook.run("x = 1")
    notebook.run(f"{MAGIC}\nx = 2\ny = 3")
    assert texts(notebook.run("print(x, 'y' in globals())")) == "1 False\n"
    notebook.run(f"{MAGIC} --pull y@all --out r\nx = 2\ny = 3\n1 / 0")
    assert texts(notebook.run("print(x, 'y' in globals(), r.ok)")) == "1 False False\n"
    notebook.run(f"{MAGIC} --pull y@all,x\nimport os\nx = 2\ny = int(os.environ['RANK'])")
    assert texts(notebook.run("print(x, y)")) == "2 [0, 1]\n"


def test_a_failing_rank_fails_the_cell(notebook):
    """B77: what nbconvert, papermill and "run all" look at."""
    request = notebook.send(
        f"{MAGIC}\nimport os\nif os.environ['RANK'] == '1':\n    raise ValueError('boom')"
    )
    error = next(m["content"] for m in notebook.messages(request) if m["msg_type"] == "error")
    assert error["ename"] == "DistributedError"
    assert error["evalue"].startswith(
        "rank 1 failed: ValueError: boom\ncell line 4: raise ValueError('boom')"
    )
    assert notebook.reply(request)["status"] == "error"
    frames = [line for line in error["traceback"] if line.lstrip().startswith("File ")]
    assert frames == ['  File "<distributed cell>", line 4, in <module>']


def test_an_interrupt_ends_the_run_and_the_cell(notebook):
    """B50: the output so far is kept, nothing is left, the next run works."""
    request = notebook.send(LOOP)
    messages = notebook.messages(request, until=states("[0] here", "[1] here"))
    notebook.manager.interrupt_kernel()
    messages += notebook.messages(request)
    assert notebook.reply(request)["ename"] == "KeyboardInterrupt"
    (bundle,) = outputs(messages).values()
    assert bundle["text/plain"].startswith("interrupted")
    assert "[0] here" in bundle["text/plain"]
    assert "Traceback" not in bundle["text/plain"]
    until_gone(notebook.only_run())
    assert "[1] again" in next(iter(outputs(notebook.run(f"{MAGIC}\nprint('again')")).values()))["text/plain"]


def test_a_second_interrupt_kills(notebook):
    cell = f"{MAGIC}\nimport time\ntry:\n    print('here')\n    time.sleep(300)\nfinally:\n    print('cleaning'); time.sleep(300)"
    request = notebook.send(cell)
    notebook.messages(request, until=states("[0] here", "[1] here"))
    notebook.manager.interrupt_kernel()
    notebook.messages(request, until=states("interrupt again to kill", "[0] cleaning", "[1] cleaning"))
    notebook.manager.interrupt_kernel()
    notebook.messages(request)
    assert notebook.reply(request)["ename"] == "KeyboardInterrupt"
    until_gone(notebook.only_run())


def test_a_restarted_kernel_leaves_no_ranks(notebook):
    """B51."""
    request = notebook.send(LOOP)
    notebook.messages(request, until=says("here"))
    run = notebook.only_run()
    notebook.manager.restart_kernel(now=True)
    until_gone(run)


def test_a_killed_kernel_leaves_no_ranks(notebook):
    """B51."""
    request = notebook.send(LOOP)
    notebook.messages(request, until=says("here"))
    run = notebook.only_run()
    notebook.manager.provisioner.process.kill()
    until_gone(run)


def test_flags_are_completed(notebook):
    code = "%%distributed --proto"
    request = notebook.client.complete(code, len(code))
    assert "--protocol" in notebook.reply(request)["matches"]


def test_the_extension_can_be_unloaded_and_loaded_again(notebook):
    notebook.run("%unload_ext jupyter_ddp")
    request = notebook.send("%distributed runs")
    assert "not found" in texts(notebook.messages(request)) + str(notebook.reply(request))
    notebook.run("%load_ext jupyter_ddp")
    assert "No runs yet" in texts(notebook.run("%distributed runs"))
