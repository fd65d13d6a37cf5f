"""The agent of an instance: parent of its launcher, writer of its log, the ear and the hand of the run there.

One loop, one thread, no waiting but in the selector. What happens is decided by the `Conductor` of agent 0, whose
orders every agent carries out (`_order_*`).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import time
import traceback
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.events import NoteEvent, RunEvent
from jupyter_ddp.runtime.conductor import Conductor
from jupyter_ddp.runtime.launcher import Launcher
from jupyter_ddp.runtime.links import Channel, Listener, Uplink
from jupyter_ddp.runtime.process import Process, descendants, kill_all, table
from jupyter_ddp.runtime.ranks import Ranks, holds_cells
from jupyter_ddp.runtime.record import LogWriter
from jupyter_ddp.runtime.room import FULL
from jupyter_ddp.runtime.wire import WireError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

HEAR_LIMIT: Final = 0.4
"""Seconds in which a rank's Python must have heard the interrupt."""
EXIT_LIMIT: Final = 2.0
"""Seconds after an interrupt in which a rank whose cell is over must have ended."""
STACKS_TIME: Final = 0.3
LAUNCHER_GRACE: Final = 3.0
LEFTOVER_GRACE: Final = 0.1
COMMANDS: Final = frozenset({"interrupt", "kill", "stop", "stacks"})
"""What clients may ask for."""


class Agent:
    """Runs one instance of a run until it is over.

    Args:
        spec: What to run: ``spec.json`` of the run directory, which `backends.local` writes.
        node: This instance's number.
        run_dir: The run directory.
        life: A descriptor at whose end of file the run has lost its owner.
        doorbell: A descriptor that gets a byte whenever the log has grown.
        zygote: Where a torchrun can be had that is forked, if there is such a place.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        node: int,
        run_dir: Path,
        *,
        life: int,
        doorbell: int,
        zygote: socket.socket | None = None,
    ) -> None:
        self._spec = spec
        self._node = node
        self._doorbell = doorbell
        self._guard = os.getppid()
        self._log = LogWriter(run_dir, node, spec["attempt"])
        self._selector = selectors.DefaultSelector()
        self._ranks = Ranks(spec, node, run_dir, self._log, report=self._up, read=self._read)
        self._launcher = Launcher(spec, node, run_dir, zygote=zygote, selector=self._selector)
        self._listener = Listener(
            spec["sockets"][node], self._selector, on_ready=self._read, on_bell=self._ranks.ring
        )
        self._peers: dict[int, Channel] = {}
        self._awaited = set(range(1, spec["nnodes"]))
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._reports: deque[dict[str, Any]] = deque()
        self._launch_try = 0
        self._told_full = False
        self._orphan = self._released = self._leaving = self._went_well = False
        self._selector.register(life, selectors.EVENT_READ, lambda _mask: self._orphaned())
        self._catch_signals()
        now = time.monotonic()
        self._join_by = now + spec["start_timeout"]
        self._conductor: Conductor | None = None
        self._uplink: Uplink | None = None
        if node != 0:
            self._uplink = Uplink(spec["sockets"][0], node, self._selector, self._read)
            return
        self._conductor = Conductor(
            nnodes=spec["nnodes"],
            nproc=spec["nproc"],
            timeout=spec["timeout"],
            start_timeout=spec["start_timeout"],
            interrupt_grace=spec["interrupt_grace"],
            order=self._give,
            now=now,
            launch_tries=len(spec["master_ports"]),
            hold=holds_cells(spec),
        )

    def run(self) -> None:
        """Work until the run is over and nothing of it is left on this instance."""
        self._log.add(RunEvent, phase="starting", detail={"pid": os.getpid()})
        self._up(op="joined", node=self._node)
        while not self._leaving:
            for key, mask in self._selector.select(self._patience()):
                key.data(mask)
            if self._orphan:
                self._end_with_owner()
            now = time.monotonic()
            self._join(now)
            self._ranks.look(now)
            self._fire(now)
            self._watch_launcher()
            self._conduct()
            self._publish()
        self._listener.close()
        self._tidy()

    # the loop's parts

    def _patience(self) -> float:
        now = time.monotonic()
        times = [self._ranks.next_at(now), *(at for at, _ in self._timers)]
        if self._conductor is not None and (at := self._conductor.next_at()) is not None:
            times.append(at)
        return max(0.0, min(times) - now)

    def _catch_signals(self) -> None:
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._orphaned())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._selector.register(read, selectors.EVENT_READ, lambda _mask: os.read(read, 4096))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + seconds, action))

    def _fire(self, now: float) -> None:
        for entry in [entry for entry in self._timers if entry[0] <= now]:
            self._timers.remove(entry)
            entry[1]()

    def _publish(self) -> None:
        if self._log.full and not self._told_full:
            self._told_full = True
            self._log.add(NoteEvent, level="warning", text=FULL)
        if self._log.flush():
            # Full: it is ringing already. Broken: whether that ends the run is told by `life`.
            with contextlib.suppress(OSError):
                os.write(self._doorbell, b".")

    # connections

    def _read(self, channel: Channel) -> None:
        try:
            for message in channel.receive():
                if message is None or not self._understands(channel, message):
                    text = "a message was not understood"
                    self._log.add(NoteEvent, rank=channel.rank, level="warning", text=text)
        except WireError as error:
            text = f"a connection was closed: {error}"
            self._log.add(NoteEvent, rank=channel.rank, level="warning", text=text)
        if channel.closed and channel.role == "agent":
            self._lost_agent(channel.node or 0)

    def _understands(self, channel: Channel, message: dict[str, Any]) -> bool:
        """Take in a message; a field that is missing or of a wrong type must not end the agent."""
        try:
            self._on_message(channel, message)
        except (LookupError, TypeError, ValueError, AttributeError):
            traceback.print_exc()  # in the agent's own log
            return False
        return True

    def _on_message(self, channel: Channel, message: dict[str, Any]) -> None:
        if not channel.role:
            self._hello(channel, message)
        elif channel.role in ("rank", "stub"):
            self._ranks.receive(channel, message)
        elif channel.role == "client":
            if message.get("op") in COMMANDS:
                self._up(op=message["op"])
        elif self._node == 0:
            self._up(**message)
        else:
            self._obey(message)

    def _hello(self, channel: Channel, message: dict[str, Any]) -> None:
        role = str(message.get("role", "")) if message.get("op") == "hello" else ""
        if role == "agent" and self._node == 0 and message["node"] in self._awaited:
            self._awaited.discard(message["node"])
            channel.node = message["node"]
            self._peers[message["node"]] = channel
        elif role == "agent":
            role = ""
        if role in ("agent", "client") or (role in ("rank", "stub") and self._ranks.hello(channel, message)):
            channel.role = role
        else:
            channel.close()

    def _up(self, **message: Any) -> None:  # noqa: ANN401 - JSON
        """Report to agent 0; its conductor hears it when what is being done now is done."""
        if self._uplink is not None:
            self._uplink.send(message)
        else:
            self._reports.append(message)

    def _conduct(self) -> None:
        if self._conductor is None:
            return
        while self._reports:
            report = self._reports.popleft()
            try:
                self._conductor.report(report, time.monotonic())
            except (LookupError, TypeError, ValueError):
                traceback.print_exc()  # in the agent's own log
                self._log.add(NoteEvent, level="warning", text="a report was not understood")
        self._conductor.tick(time.monotonic())
        if self._reports:
            self._conduct()

    def _give(self, order: dict[str, Any]) -> None:
        """Agent 0: give an order to everyone."""
        for peer in self._peers.values():
            peer.send(order)
        self._obey(order)

    def _obey(self, order: dict[str, Any]) -> None:
        handler = getattr(self, f"_order_{order.get('op')}", None)
        if handler is not None:
            handler(order)

    # orders

    def _order_launch(self, order: dict[str, Any]) -> None:
        self._launch_try = order["try"]
        error = self._launcher.start(self._launch_try)
        if error:
            self._up(op="launcher", node=self._node, text=error)
        elif self._launcher.command:
            self._tell_launch()

    def _tell_launch(self) -> None:
        detail = {"command": self._launcher.command, "why_exec": self._launcher.why_exec}
        self._log.add(RunEvent, phase="rendezvous", detail=detail)

    def _order_begin(self, _order: dict[str, Any]) -> None:
        self._ranks.begin()

    def _order_interrupt(self, order: dict[str, Any]) -> None:
        self._log.add(RunEvent, phase="ending", outcome="interrupted")
        self._ranks.interrupt()
        self._after(HEAR_LIMIT, lambda: self._ranks.signal_unheard(signal.SIGTERM))
        self._after(2 * HEAR_LIMIT, lambda: self._ranks.signal_unheard(signal.SIGKILL))
        self._after(EXIT_LIMIT, lambda: self._ranks.signal_finished(signal.SIGTERM))
        self._after(EXIT_LIMIT + HEAR_LIMIT, lambda: self._ranks.signal_finished(signal.SIGKILL))
        self._after(order["grace"], lambda: self._end_ranks(HEAR_LIMIT))

    def _order_kill(self, _order: dict[str, Any]) -> None:
        self._kill_everything()

    def _order_abort(self, order: dict[str, Any]) -> None:
        self._log.add(RunEvent, phase="ending", **_verdict(order))
        self._end_ranks(order["grace"])

    def _end_ranks(self, grace: float) -> None:
        """SIGTERM to the ranks, and SIGKILL to everything after `grace` seconds."""
        if self._ranks.terminate():
            self._after(grace, self._kill_everything)
        else:
            self._kill_everything()  # what has not connected cannot be asked

    def _kill_everything(self) -> None:
        if not self._released:
            self._ranks.ending = True
            kill_all(self._spec["run_id"])
            self._ranks.all_killed()

    def _order_stacks(self, _order: dict[str, Any]) -> None:
        begin = self._ranks.ask_for_stacks()
        self._after(STACKS_TIME, lambda: self._ranks.add_stacks(begin))

    def _order_release(self, order: dict[str, Any]) -> None:
        """All ranks of all instances have ended: let the launcher go, and close the log."""
        self._released = True
        self._went_well = order["outcome"] == "succeeded"
        self._ranks.release()
        self._end_leftovers(tell=order["outcome"] == "succeeded")
        self._ranks.finish()
        verdict = _verdict(order)
        if order["outcome"] == "failed" and (reason := self._told_by_launcher()):
            verdict |= {"outcome": "lost", "reason": reason}
        self._end_of_log(**verdict)
        self._up(op="flushed", node=self._node)

    def _told_by_launcher(self) -> str:
        return self._launcher.abort_text() or self._launcher.last_words(self._ranks.mute())

    def _order_exit(self, _order: dict[str, Any]) -> None:
        self._leaving = True

    # ends

    def _watch_launcher(self) -> None:
        self._report_launcher(self._launcher.watch())
        if self._launcher.refused and not (self._released or self._ranks.ending):
            error = self._launcher.fall_back()
            if error:
                self._up(op="launcher", node=self._node, text=error)
            else:
                self._tell_launch()

    def _report_launcher(self, ended: dict[str, Any] | None) -> None:
        if ended and not (self._released or self._ranks.ending):
            self._up(op="launcher", node=self._node, **ended)

    def _end_leftovers(self, *, tell: bool) -> None:
        """End what ranks left running, and say what it was; what is just about to end gets the time to do so."""
        end = time.monotonic() + (LEFTOVER_GRACE if tell else 0)
        while (left := self._leftovers()) and time.monotonic() < end:
            time.sleep(0.01)
            self._launcher.watch()
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
        if left and tell:
            names = ", ".join(sorted({process.name for process in left}))
            text = f"ranks left processes running; they were ended: {names}"
            self._log.add(NoteEvent, level="warning", text=text)

    def _leftovers(self) -> list[Process]:
        processes = table()
        launcher, nurse = self._launcher.pid, self._launcher.nurse
        spared = {launcher} | descendants(processes, launcher) if launcher else set()
        roots = (os.getpid(), nurse) if nurse else (os.getpid(),)
        return [processes[pid] for pid in descendants(processes, *roots) - spared]

    def _end_of_log(self, outcome: str, reason: str = "", unfinished: tuple[int, ...] = ()) -> None:
        self._log.add(RunEvent, phase="ended", outcome=outcome, reason=reason, unfinished=unfinished)
        self._publish()

    def _orphaned(self) -> None:
        self._orphan = True

    def _end_with_owner(self) -> None:
        """The owner of the run is gone: so is the run, at once."""
        self._kill_everything()
        if not self._released:
            self._ranks.finish()
            guarded = os.getppid() == self._guard
            reason = "the notebook's kernel was gone" if guarded else "the guard of the run was killed"
            self._end_of_log("stopped" if guarded else "lost", reason)
        if os.getppid() != self._guard:  # who else would; mpirun's files lie there too
            shutil.rmtree(os.path.dirname(self._spec["sockets"][self._node]), ignore_errors=True)
        os._exit(0)

    def _join(self, now: float) -> None:
        if self._uplink is not None and not self._uplink.try_join() and now >= self._join_by:
            self._lost_agent(0)

    def _lost_agent(self, node: int) -> None:
        if self._leaving:
            return
        if self._node == 0:
            if self._peers.pop(node, None) is not None:
                text = f"the agent of instance {node} is gone, and its ranks with it"
                self._up(op="lost", node=node, text=text)
            return
        self._kill_everything()
        if not self._released:
            self._released = True
            self._ranks.finish()
            self._end_of_log("lost", "the agent of instance 0 is gone")
        self._leaving = True

    def _tidy(self) -> None:
        """Leave nothing behind. The notebook does not wait for this: after a good end the launcher has its time."""
        end = time.monotonic() + LAUNCHER_GRACE
        while self._launcher.pid and time.monotonic() < end and self._went_well:
            time.sleep(0.01)
            self._launcher.watch()
        kill_all(self._spec["run_id"])
        self._log.close()


def _verdict(order: dict[str, Any]) -> dict[str, Any]:
    return {
        "outcome": order["outcome"],
        "reason": order["reason"],
        "unfinished": tuple(order["unfinished"]),
    }
