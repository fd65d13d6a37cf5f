"""What ranks write arrives whole, in order, and numbered by one hand."""

from __future__ import annotations

from jupyter_ddp.events import DisplayEvent, OutEvent, RankEvent, RunEvent, UnknownEvent


def in_order(run, rank: int = 0) -> list[str]:
    """Return what a rank printed and displayed, in the order of the log."""
    found = []
    for event in run.events:
        if event.rank == rank and isinstance(event, OutEvent):
            found.append(event.text)
        elif event.rank == rank and isinstance(event, DisplayEvent):
            found.append(event.data["text/plain"])
    return found


def test_streams_and_displays_keep_their_order(start):
    """B68: out 1 < err 1 < the display < out 2."""
    cell = """
import sys
from IPython.display import display
for i in range(20):
    print("out", i)
    print("err", i, file=sys.stderr)
    display({"text/plain": f"display {i}"}, raw=True)
"""
    run = start(cell)
    assert run.end().outcome == "succeeded", run.errors()
    expected = [word for i in range(20) for word in (f"out {i}\n", f"err {i}\n", f"display {i}")]
    assert "".join(in_order(run)) == "".join(expected)


def test_python_c_and_subprocesses_keep_their_order(start, protocol):
    """B66."""
    cell = """
import ctypes, os
libc = ctypes.CDLL(None)
print("py 1"); libc.puts(b"c 1"); libc.fflush(None)
ctypes.PyDLL(None).printf(b"1" * 100_000); libc.fflush(None)
os.system("echo; echo sh 1"); print("py 2")
pid = os.fork()
if pid == 0:
    print("forked", flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print("end", end="")
"""
    run = start(cell, protocol=protocol)
    assert run.end().outcome == "succeeded", run.errors()
    for rank in range(2):
        assert run.text(rank) == "py 1\nc 1\n" + "1" * 100_000 + "\nsh 1\npy 2\nforked\nend"


def test_bytes_that_are_no_text_and_characters_in_pieces(start, protocol):
    """B63."""
    cell = """
import os, time
os.write(1, b"raw \\xff\\xfe bytes\\n")
for b in "▌é漢🙂\\n".encode():
    os.write(1, bytes([b])); time.sleep(0.01)
print("still here")
"""
    run = start(cell, protocol=protocol)
    assert run.end().outcome == "succeeded", run.errors()
    assert run.text(1) == "raw \ufffd\ufffd bytes\n▌é漢🙂\nstill here\n"


def test_partial_lines_come_before_their_end(start):
    """B65."""
    run = start("import time\nprint('alpha ', end='')\nwhile True: time.sleep(0.05)")
    run.until_said("alpha ")
    assert run.job.send("kill")
    run.end()
    assert run.text(0) == "alpha "


def test_text_that_looks_like_our_own_is_text(start):
    """B70."""
    lines = [
        "[1,0]<stdout>:fake",
        '{"kind":"error","rank":0,"type":"fake"}',
        '{"op":"done","ok":false}',
        "\x1e{json}",
    ]
    run = start(f"import os\nfor line in {lines!r}: print(line)\nos.write(1, b'\\0\\0\\0\\x02{{}}\\n')")
    assert run.end().outcome == "succeeded"
    assert run.text(0) == "\n".join(lines) + "\n\0\0\0\x02{}\n"
    assert run.errors() == {}


def test_frames_are_not_torn_by_signals_and_big_displays(start):
    """Exceptions that signal handlers raise fall anywhere, also into sending; every frame is whole all the same."""
    cell = """
import os, random, signal, threading, time
from IPython.display import display
class Now(Exception): pass
armed = False
def raise_now(*_):
    global armed
    if armed:
        armed = False
        raise Now
signal.signal(signal.SIGUSR1, raise_now)
stop = threading.Event()
def fire():
    while not stop.is_set():
        os.kill(os.getpid(), signal.SIGUSR1); time.sleep(random.uniform(0.002, 0.03))
thread = threading.Thread(target=fire)
thread.start()
shown = hits = 0
while shown < 60:
    try:
        armed = True
        display({"text/plain": "x" * (200_000 if shown % 3 else 400_000)}, raw=True)
        print("line")
        armed = False
        shown += 1
    except Now:
        hits += 1
        time.sleep(0.003)
stop.set()
thread.join()
print("hits", hits > 0)
"""
    run = start(cell, nproc_per_node=1)
    assert run.end().outcome == "succeeded", run.errors()
    assert run.text(0).endswith("hits True\n")
    assert "not understood" not in run.notes()
    assert "could not be sent" not in run.notes()
    sizes = {len(event.data.get("text/plain", "")) for event in run.of(DisplayEvent)} - {0}
    assert sizes <= {200_000, 400_000}
    assert len(run.of(DisplayEvent)) >= 60


def test_one_hand_numbers_the_events_of_each_instance(start):
    run = start("import sys\nfor i in range(500): print(i); print(i, file=sys.stderr)", instance_count=2)
    assert run.end().outcome == "succeeded"
    for node in range(2):
        seqs = [event.seq for event in run.events if event.node == node and event.seq]
        assert seqs == list(range(1, len(seqs) + 1))
    assert not run.of(UnknownEvent)
    assert all(event.rank // 2 == event.node for event in run.of(RankEvent))


def test_a_flood_is_whole_on_disk_and_complete_in_the_log(start):
    """B61: past a megabyte a second the log refers to the ranks' files; every byte is accounted for."""
    run = start("for i in range(150_000): print(f'line {i} ' + 'x' * 60)")
    assert run.end().outcome == "succeeded"
    expected = "".join(f"line {i} " + "x" * 60 + "\n" for i in range(150_000))
    for rank in range(2):
        assert run.rundir.text(rank) == expected
        out = sorted(run.of(OutEvent, rank=rank), key=lambda event: event.offset)
        reached = 0
        for event in out:
            assert event.offset == reached
            reached += event.length
        assert reached == len(expected)
        assert sum(event.lines for event in out) == 150_000
        assert out[-1].text is not None


def test_phases_are_told(start):
    run = start("print(1)")
    run.end()
    phases = [event.phase for event in run.of(RunEvent)]
    assert phases == ["starting", "rendezvous", "running", "ended"]
