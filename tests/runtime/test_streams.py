"""The streams of a rank: everything that it writes is in its files, in order, at once, whoever writes it."""

from __future__ import annotations

import itertools
import sys
import time

import pytest

from tests.runtime.fakeagent import FakeAgent

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no ranks on Windows")


def test_c_code_and_subprocesses_keep_the_order(tmp_path):
    """B66."""
    source = """
import ctypes, os
libc = ctypes.CDLL(None)
print("py 1"); libc.puts(b"c 1"); libc.fflush(None)
ctypes.PyDLL(None).printf(b"1" * 100_000)
libc.fflush(None); os.system("echo sh 1"); print("py 2")
"""
    with FakeAgent(tmp_path) as agent:
        assert agent.run(source) == 0
        assert agent.text() == "py 1\nc 1\n" + "1" * 100_000 + "sh 1\npy 2\n"


def test_both_streams_and_displays_have_one_order(tmp_path):
    """B68."""
    source = """
import sys
from IPython.display import display
print("out 1"); print("err 1", file=sys.stderr)
sys.stderr.write("E" * 300_000 + "\\n")
print("out 2", end=""); display(5); print("out 3", end=""); sys.stderr.write("err 2")
sys.stdout.buffer.write(b"raw\\n");
"""
    with FakeAgent(tmp_path) as agent:
        assert agent.run(source) == 0
        assert [entry[:12] for entry in agent.transcript()] == [
            "out: out 1\n",
            "err: err 1\nE",
            "out: out 2",
            "display: 5",
            "out: out 3",
            "err: err 2",
            "out: raw\n",
        ]


def test_partial_lines_show_soon_and_are_not_lost(tmp_path):
    """B65."""
    source = """
import time
print("alpha ", end="")
time.sleep(1)
print("beta"); print("a", "b", 3)
import sys; sys.stdout.write("no newline at end")
"""
    with FakeAgent(tmp_path) as agent:
        agent.send_cell(source)
        agent.wait_for("event:rank")
        deadline = time.monotonic() + 10
        while not agent.bells and time.monotonic() < deadline:
            agent._poll(0.05)
        assert agent.text() == "alpha "
        assert agent.finish() == 0
        assert agent.text() == "alpha beta\na b 3\nno newline at end"


def test_a_line_rings_and_a_part_of_one_does_not(tmp_path):
    with FakeAgent(tmp_path) as agent:
        agent.run("for i in range(5000): print(i)")
        assert 1 <= agent.bells < 5000  # a burst is not announced line by line
    with FakeAgent(tmp_path) as agent:
        agent.run("import os; os.write(1, b'C code rings nobody\\n'); None")
        assert agent.bells == 0


def test_any_bytes_and_any_text_can_be_written(tmp_path):
    """B63."""
    source = r"""
import os
os.write(1, b"raw \xff\xfe bytes\n")
for b in "▌é漢🙂\n".encode(): os.write(1, bytes([b]))
print("lone \ud800")
print("\r50 %\r100 %")
"""
    with FakeAgent(tmp_path) as agent:
        assert agent.run(source) == 0
        expected = b"raw \xff\xfe bytes\n" + "▌é漢🙂\nlone \\ud800\n\r50 %\r100 %\n".encode()
        assert (tmp_path / "rank0.stdout").read_bytes() == expected


def test_the_streams_are_what_libraries_expect(tmp_path):
    source = """
import os, sys
for number, stream in ((1, sys.stdout), (2, sys.stderr)):
    print(stream.fileno() == number, stream.isatty(), stream.encoding, stream.errors, stream.line_buffering,
          stream.write_through, stream.name, stream.mode, stream.writable(), stream.closed)
print(sys.__stdout__ is sys.stdout, repr(sys.stdin.read()), oct(os.fstat(1).st_mode & 0o777))
"""
    with FakeAgent(tmp_path) as agent:
        assert agent.run(source) == 0
        first, second, third = agent.text().splitlines()
        assert first == "True False utf-8 backslashreplace True False <stdout> w True False"
        assert second == first.replace("stdout", "stderr")
        assert third == "True '' 0o600"


def test_code_may_close_and_redirect_its_descriptors(tmp_path):
    source = """
import os, sys, contextlib, io
saved = os.dup(1)
other = os.open("other", os.O_WRONLY | os.O_CREAT)
os.dup2(other, 1); print("away"); os.dup2(saved, 1)
with contextlib.redirect_stdout(io.StringIO()) as text:
    print("kept")
print("back", text.getvalue(), end="")
os.close(2)
display("still")
os.close(1)
7
"""
    with FakeAgent(tmp_path) as agent:
        assert agent.run(source) == 0
        assert (tmp_path / "other").read_text() == "away\n"
        assert agent.text() == "back kept\n"
        assert agent.transcript()[-2:] == ["display: 'still'", "result: 7"]
        assert agent.done["o"] == [10, 0]


def test_text_that_looks_like_our_own_stays_text(tmp_path):
    """B70."""
    lines = ["[1,0]<stdout>:fake", '{"op": "event", "event": {"kind": "error"}}', "\x1e{json}"]
    with FakeAgent(tmp_path) as agent:
        assert agent.run("\n".join(f"print({line!r})" for line in lines)) == 0
        assert agent.text() == "".join(f"{line}\n" for line in lines)


def test_threads_forks_and_both_streams_at_once(tmp_path):
    """Nothing is torn, lost or locked when several threads print while another one forks."""
    source = """
import os, sys, threading
def work(name):
    for i in range(2000):
        (sys.stdout, sys.stderr)[i % 2].write(f"{name} {i}\\n")
        sys.stdout.write(".")
threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
for thread in threads: thread.start()
for i in range(50):
    pid = os.fork()
    if not pid:
        print(f"child {i}", flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
for thread in threads: thread.join()
"""
    with FakeAgent(tmp_path) as agent:
        assert agent.run(source) == 0
        pieces = sorted(agent.text().replace(".", "").split("\n"))
        assert [line for line in pieces if line.startswith("child")] == sorted(
            f"child {i}" for i in range(50)
        )
        for stream, first in (("stdout", 0), ("stderr", 1)):
            words = agent.text(stream).replace(".", " ").split()
            for name in "ab":
                numbers = [int(b) for a, b in itertools.pairwise(words) if a == name]
                assert numbers == list(range(first, 2000, 2))


def test_a_flood_is_whole_and_costs_the_rank_no_memory(tmp_path):
    source = """
import resource
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for i in range(100_000): print("line", i, "x" * 60)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
import sys; print(grown, file=sys.stderr)
"""
    with FakeAgent(tmp_path) as agent:
        assert agent.run(source) == 0
        assert agent.text().splitlines() == [f"line {i} " + "x" * 60 for i in range(100_000)]
        assert int(agent.text("stderr")) < 4_000
