"""Ports for the rendezvous: free, below the ephemeral range, and not given twice while their run lives."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_ddp.backends import _ports
from jupyter_ddp.errors import LaunchError


@pytest.fixture
def few(monkeypatch, tmp_path):
    """Six ports in all, and a directory for their locks."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(_ports.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    first = next(n for n in range(20_500, 31_000, 7) if all(map(_ports._is_free, range(n, n + 6))))
    monkeypatch.setattr(_ports, "FIRST", first)
    monkeypatch.setattr(_ports, "LAST", first + 6)
    monkeypatch.setattr(_ports, "TRIES", 6)
    return range(first, first + 6)


def close(locks: list[int]) -> None:
    for lock in locks:
        os.close(lock)


def open_descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_ports_are_free_and_below_what_connections_take():
    ports, locks = _ports.reserve(3)
    close(locks)
    assert len(set(ports)) == len(locks) == 3
    assert all(map(_ports._is_free, ports))
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if ephemeral.exists():
        assert max(ports) < int(ephemeral.read_text().split()[0])


def test_a_port_is_not_given_twice_while_its_lock_is_held(few):
    one, locks_one = _ports.reserve(3)
    two, locks_two = _ports.reserve(3)
    assert sorted(one + two) == list(few)
    with pytest.raises(LaunchError, match="no free port"):
        _ports.reserve(1)
    close(locks_one)
    three, locks_three = _ports.reserve(3)
    assert sorted(three) == sorted(one)
    close(locks_two + locks_three)


def test_another_process_keeps_a_port_by_its_lock(few):
    """The run has it: the kernel that reserved it may be gone."""
    ports, locks = _ports.reserve(6)
    code = "import sys; print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=locks[:1], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as run:
        run.stdout.readline()
        close(locks)
        again, locks = _ports.reserve(5)
        assert ports[0] not in again
        close(locks)
        run.stdin.close()
        run.wait()
    again, locks = _ports.reserve(6)
    assert ports[0] in again
    close(locks)


def test_locks_are_not_inherited_unless_handed_on():
    _, locks = _ports.reserve(1)
    assert not os.get_inheritable(locks[0])
    close(locks)


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_port_on_which_somebody_listens_is_not_given(few, family, address):
    """B33."""
    with socket.socket(family) as listener:
        try:
            listener.bind((address, few[2]))
        except OSError:
            pytest.skip(f"there is no {address} here")
        listener.listen()
        assert not _ports._is_free(few[2])
        ports, locks = _ports.reserve(5)
        close(locks)
        assert few[2] not in ports
    assert _ports._is_free(few[2])


def test_nothing_is_kept_when_there_are_too_few(few):
    before = open_descriptors()
    with pytest.raises(LaunchError, match=re.escape(f"{few[0]}")):
        _ports.reserve(7)
    assert open_descriptors() == before
    close(_ports.reserve(6)[1])


def test_the_locks_are_this_users_own(few, tmp_path):
    _, locks = _ports.reserve(1)
    close(locks)
    (directory,) = (tmp_path / "tmp").iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_directory_of_somebody_else_is_refused(few, tmp_path):
    if os.getuid():
        pytest.skip("needs root, to give a directory away")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, -1)
    path = tmp_path / "tmp" / "jupyter_ddp-0-ports"
    path.mkdir()
    os.chown(path, 65534, -1)
    with pytest.raises(LaunchError, match=r"belongs to user 65534.*TMPDIR"):
        _ports.reserve(1)
    path.rmdir()
    path.symlink_to(theirs)
    os.chown(path, 65534, -1, follow_symlinks=False)
    with pytest.raises(LaunchError, match=r"belongs to user 65534"):
        _ports.reserve(1)


def test_no_place_for_locks(few, tmp_path, monkeypatch):
    monkeypatch.setattr(_ports.tempfile, "gettempdir", lambda: str(tmp_path / "not there"))
    with pytest.raises(LaunchError, match="TMPDIR"):
        _ports.reserve(1)
