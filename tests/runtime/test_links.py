"""Connections of an agent: real sockets, messages in order and whole, nobody can block or break the agent."""

from __future__ import annotations

import os
import selectors
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from jupyter_ddp.runtime import links
from jupyter_ddp.runtime.links import Channel, Listener, Uplink, same_user
from jupyter_ddp.runtime.wire import Decoder, WireError, pack

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no Unix sockets on Windows")


class Ear:
    """The part of an agent that listens: collects messages, by channel in the order of their coming."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.heard: list[tuple[Channel, Any]] = []
        self.bells: list[int] = []
        self.errors: list[WireError] = []

    def on_ready(self, channel: Channel) -> None:
        try:
            for message in channel.receive():
                self.heard.append((channel, message))
        except WireError as error:
            self.errors.append(error)

    def turn(self, timeout: float = 0.0) -> bool:
        ready = self.selector.select(timeout)
        for key, mask in ready:
            key.data(mask)
        return bool(ready)

    def until(self, condition) -> None:
        for _ in range(10_000):
            if condition():
                return
            self.turn(1.0)
        pytest.fail("it did not come")

    def settle(self) -> None:
        while self.turn():
            pass

    @property
    def messages(self) -> list[Any]:
        return [message for _, message in self.heard]


@pytest.fixture
def ear():
    ear = Ear()
    yield ear
    for key in list(ear.selector.get_map().values()):
        key.fileobj.close()
    ear.selector.close()


@pytest.fixture
def pair(ear):
    """A channel and the plain socket of its peer."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    channel = Channel(ours, ear.selector, ear.on_ready)
    yield channel, theirs
    theirs.close()
    channel.close()


@pytest.fixture
def place():
    """A short path for sockets: they have 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="jddp-") as directory:
        yield f"{directory}/0"


# channels


def test_messages_come_in_order(ear, pair):
    channel, peer = pair
    for n in range(200):
        peer.sendall(pack({"n": n}))
        if n % 3 == 0:
            ear.settle()
    ear.settle()
    assert ear.messages == [{"n": n} for n in range(200)]
    assert all(found is channel for found, _ in ear.heard)


def test_a_message_may_come_in_pieces(ear, pair):
    _, peer = pair
    for byte in pack({"text": "grün"}):
        assert ear.messages == []
        peer.sendall(bytes([byte]))
        ear.settle()
    assert ear.messages == [{"text": "grün"}]


def test_a_slow_reader_gets_everything_and_holds_nobody_up(ear, pair):
    channel, peer = pair
    large = [{"n": n, "text": chr(97 + n) * 3_000_000} for n in range(3)]
    for message in [*large, {"n": "last"}]:
        channel.send(message)  # returns although nobody reads
    assert not ear.messages
    decoder = Decoder()
    got: list[Any] = []
    while len(got) < 4:
        ear.turn()
        got += decoder.feed(peer.recv(70_000))
    assert got == [*large, {"n": "last"}]
    ear.settle()
    assert not ear.turn()  # nothing left to send: the selector is not kept busy


def test_descriptors_come_with_their_messages_to_a_slow_reader_too(ear, pair):
    channel, peer = pair
    read, write = os.pipe()
    channel.send({"text": "x" * 3_000_000})
    channel.send({"with": "pipe", "text": "y" * 1_000_000}, write)
    channel.send({"without": "pipe"})
    os.close(write)
    decoder = Decoder()
    got: list[Any] = []
    arrived: list[tuple[int, int]] = []
    while len(got) < 3:
        ear.turn()
        data, descriptors, _, _ = socket.recv_fds(peer, 70_000, 4)
        arrived += [(descriptor, len(got)) for descriptor in descriptors]
        got += decoder.feed(data)
    ((descriptor, behind),) = arrived
    assert behind <= 1  # not after its message
    os.write(descriptor, b"hello")
    assert os.read(read, 9) == b"hello"
    os.close(descriptor)
    assert os.read(read, 9) == b""  # no copy is left
    os.close(read)


def test_descriptors_that_were_not_sent_are_closed_with_the_channel(ear, pair):
    channel, _ = pair
    read, write = os.pipe()
    channel.send({"text": "x" * 3_000_000})
    channel.send({"with": "pipe"}, write)
    channel.close()
    channel.send({"with": "pipe"}, write)
    os.close(write)
    assert os.read(read, 9) == b""
    os.close(read)


def test_it_is_heard_while_it_has_much_to_say(ear, pair):
    channel, peer = pair
    channel.send({"text": "x" * 3_000_000})
    peer.sendall(pack({"op": "interrupt"}))
    ear.settle()
    assert ear.messages == [{"op": "interrupt"}]
    assert not channel.closed


def test_a_frame_that_is_no_message_is_told(ear, pair):
    """A frame that does not parse is never the end of the agent."""
    channel, peer = pair
    peer.sendall(pack({"a": 1}) + struct.pack(">I", 2) + b"[]" + pack({"b": 2}))
    ear.settle()
    assert ear.messages == [{"a": 1}, None, {"b": 2}]
    assert not channel.closed


def test_a_peer_that_speaks_something_else_is_cut_off(ear, pair):
    channel, peer = pair
    peer.sendall(pack({"a": 1}) + b"\xff" * 50)
    ear.settle()
    assert ear.messages == [{"a": 1}]
    assert len(ear.errors) == 1
    assert channel.closed
    assert peer.recv(10) == b""


def test_what_was_sent_before_the_end_of_file_still_comes(ear, pair):
    channel, peer = pair
    peer.sendall(pack({"op": "done"}) + pack({"op": "half"})[:-1])
    peer.close()
    ear.settle()
    assert ear.messages == [{"op": "done"}]
    assert channel.closed
    assert list(channel.receive()) == []


def test_sending_to_a_peer_that_is_gone_is_no_error(ear, pair):
    channel, peer = pair
    peer.close()
    for _ in range(3):
        channel.send({"text": "x" * 1_000_000})
    assert not channel.closed  # the end of file tells it
    ear.settle()
    assert channel.closed
    channel.send({"op": "release"})
    channel.close()


def test_nothing_comes_from_a_channel_that_was_closed_meanwhile(ear):
    """Who said something wrong is not heard any more, whatever came with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    heard = []

    def refuse(channel: Channel) -> None:
        for message in channel.receive():
            heard.append(message)
            channel.close()

    Channel(ours, ear.selector, refuse)
    theirs.sendall(pack({"op": "wrong"}) + pack({"op": "hello", "role": "client"}))
    ear.settle()
    assert heard == [{"op": "wrong"}]
    theirs.close()


def test_one_who_never_stops_talking_leaves_others_their_turn(ear, pair, monkeypatch):
    """An interrupt gets through a flood of frames."""
    channel, peer = pair
    monkeypatch.setattr(links, "RECEIVE_SIZE", 1_000)
    said = []

    def more(channel: Channel) -> None:
        for message in channel.receive():
            said.append(message)
            peer.sendall(pack({"text": "x" * 2_000}))

    channel._on_ready = more
    peer.sendall(pack({"text": "x" * 2_000}))
    ear.turn(1.0)  # comes back
    assert 1 < len(said) <= links.RECEIVE_TURNS


def test_reading_a_channel_while_it_is_being_read_keeps_the_order(ear):
    """The agent reads a rank's frames before it reads more of its files, also in the middle of such a frame."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    heard = []

    def read(channel: Channel) -> None:
        for message in channel.receive():
            heard.append(message["n"])
            if message["n"] == 0:
                theirs.sendall(pack({"n": 2}))
                read(channel)

    channel = Channel(ours, ear.selector, read)
    theirs.sendall(pack({"n": 0}) + pack({"n": 1}))
    ear.settle()
    assert heard == [0, 1, 2]
    channel.close()
    theirs.close()


# the listener


def test_everybody_who_connects_has_a_channel(ear, place):
    listener = Listener(place, ear.selector, on_ready=ear.on_ready, on_bell=ear.bells.append)
    peers = []
    for n in range(20):
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(place)
        peer.sendall(pack({"n": n}))
        peers.append(peer)
    ear.settle()
    assert sorted(message["n"] for message in ear.messages) == list(range(20))
    assert len({id(channel) for channel, _ in ear.heard}) == 20
    for channel, message in ear.heard:
        channel.send({"you": message["n"]})
    for n, peer in enumerate(peers):
        assert list(Decoder().feed(peer.recv(100))) == [{"you": n}]
        peer.close()
    listener.close()


def test_the_doorbell_rings_once_for_many_rings(ear, place):
    listener = Listener(place, ear.selector, on_ready=ear.on_ready, on_bell=ear.bells.append)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
        for word in (b"3", b"3", b"17", b"", b"x", b"-1", b"\xb2", b"9" * 100, b"3"):
            bell.sendto(word, f"{place}.bell")
    ear.settle()
    assert {3, 17} <= set(ear.bells)
    assert len(ear.bells) == len(set(ear.bells)) == 3
    listener.close()


def test_a_listener_leaves_no_names_behind(ear, place):
    listener = Listener(place, ear.selector, on_ready=ear.on_ready, on_bell=ear.bells.append)
    assert sorted(path.name for path in Path(place).parent.iterdir()) == ["0", "0.bell"]
    listener.close()
    assert not list(Path(place).parent.iterdir())
    assert not ear.selector.get_map()


def test_the_peers_user_is_checked():
    if sys.platform != "linux":
        pytest.skip("needs Linux")
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    assert same_user(ours)
    ours.close()
    theirs.close()


def test_another_user_is_turned_away(ear, place):
    if sys.platform != "linux" or os.getuid():
        pytest.skip("needs root, to be somebody else")
    Path(place).parent.chmod(0o755)
    listener = Listener(place, ear.selector, on_ready=ear.on_ready, on_bell=ear.bells.append)
    Path(place).chmod(0o777)
    code = f"""
import os, socket
os.setuid(65534)
peer = socket.socket(socket.AF_UNIX)
peer.connect({place!r})
print("connected", flush=True)
print(peer.recv(10))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout.readline() == "connected\n"
        ear.settle()
        assert stranger.stdout.readline() == "b''\n"
    assert len(ear.selector.get_map()) == 2  # the listener's own
    listener.close()


# the way to agent 0


def test_messages_to_agent_0_wait_until_it_is_there(ear, place):
    uplink = Uplink(place, 2, ear.selector, ear.on_ready)
    for n in range(3):
        uplink.send({"n": n})
        assert not uplink.try_join()
    listener = Listener(place, ear.selector, on_ready=ear.on_ready, on_bell=ear.bells.append)
    assert uplink.try_join()
    assert uplink.try_join()
    uplink.send({"n": 3})
    ear.until(lambda: len(ear.heard) == 5)
    assert ear.messages == [{"op": "hello", "role": "agent", "node": 2}, *({"n": n} for n in range(4))]
    assert len({id(channel) for channel, _ in ear.heard}) == 1
    listener.close()


def test_orders_come_down_and_the_end_is_told(ear, place):
    listener = Listener(place, ear.selector, on_ready=ear.on_ready, on_bell=ear.bells.append)
    uplink = Uplink(place, 1, ear.selector, ear.on_ready)
    assert uplink.try_join()
    ear.until(lambda: ear.heard)
    down, _ = ear.heard.pop()
    down.send({"op": "launch"})
    ear.until(lambda: ear.heard)
    channel, message = ear.heard.pop()
    assert channel is uplink.channel
    assert (channel.role, channel.node, message) == ("agent", 0, {"op": "launch"})
    down.close()
    ear.until(lambda: channel.closed)
    uplink.send({"op": "flushed"})  # into the void
    listener.close()
