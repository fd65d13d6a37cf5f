"""Stacks of stuck and crashed ranks, cut down to the user's frames."""

from __future__ import annotations

from jupyter_ddp.runtime.stacks import clean

OURS = """Thread 0x00007f1d1d3886c0 [jupyter_ddp-flush] (most recent call first):
  File "/env/jupyter_ddp/runtime/streams.py", line 121 in _flush_trailing
  File "/usr/lib/python3.11/threading.py", line 982 in run
"""
CELL = """Current thread 0x00007fbd86c81c40 (most recent call first):
  File "/env/torch/distributed/distributed_c10d.py", line 4888 in barrier
  File "<distributed cell>", line 3 in <module>
  File "/env/IPython/core/interactiveshell.py", line 3699 in run_code
  File "/env/jupyter_ddp/runtime/shell.py", line 80 in run
  File "<frozen runpy>", line 88 in _run_code
"""
WORKER = """Thread 0x00007f1d1d3886c1 (most recent call first):
  File "/home/me/loader.py", line 7 in fetch
"""
SOURCE = ["%%distributed -p 2", "import torch.distributed as dist", "dist.barrier()  # stuck"]


def test_a_call_that_nobody_wrote_is_not_shown():
    call = CELL.replace("<distributed cell>", "<distributed call>")
    assert clean(call, SOURCE) == (
        "running thread, most recent call first:\n"
        '  File "/env/torch/distributed/distributed_c10d.py", line 4888 in barrier\n'
    )


def test_only_the_users_threads_and_frames_are_left_with_the_cells_text():
    assert clean(f"{OURS}\n{CELL}\n{WORKER}", SOURCE) == (
        "running thread, most recent call first:\n"
        '  File "/env/torch/distributed/distributed_c10d.py", line 4888 in barrier\n'
        '  File "<distributed cell>", line 3 in <module>\n'
        "    dist.barrier()  # stuck\n"
        "\n"
        "another thread, most recent call first:\n"
        '  File "/home/me/loader.py", line 7 in fetch\n'
    )


def test_the_head_of_a_crash_stays():
    text = clean(f"Fatal Python error: Segmentation fault\n\n{OURS}\n{CELL}")
    assert text.startswith("Fatal Python error: Segmentation fault\n\nrunning thread")
    assert "_flush_trailing" not in text


def test_a_line_that_the_cell_does_not_have_is_no_error():
    assert "line 3" in clean(CELL, SOURCE[:1])


def test_a_text_of_another_form_comes_back_as_it_is():
    assert clean("no stacks here\n") == "no stacks here\n"
    assert clean("") == ""


def test_a_frame_that_calls_itself_is_counted():
    inner = '  File "<distributed cell>", line 3 in dive\n'
    text = clean(
        "Current thread 0x1 (most recent call first):\n" + 98 * inner + "  ...\n\nExtension modules: a, b\n",
        SOURCE,
    )
    assert text.count("dive") == 1
    assert text.endswith("[the frame above 97 more times]\n  ...\n")
