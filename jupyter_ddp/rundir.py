"""Run directories: where a run is recorded, how it is found again, and whether it lives.

A run lives while the lock on ``<run>/alive`` cannot be had: its guard and agents hold it, and the operating system
gives it back when the last of them is gone, however that came about. Nothing else is asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import operator
import os
import re
import secrets
import shutil
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import platformdirs

from jupyter_ddp.errors import LaunchError, RunNotFoundError
from jupyter_ddp.events import Event, OutEvent, decode
from jupyter_ddp.facts import read_facts
from jupyter_ddp.locks import try_lock
from jupyter_ddp.runtime.record import STREAMS, log_path, salvage, stream_path
from jupyter_ddp.runtime.room import spans

if TYPE_CHECKING:
    from collections.abc import Iterator

LAST: Final = "last"
READ_SIZE: Final = 1 << 20
FLOOD_TEXT: Final = 64 << 10
_RUN_ID: Final = re.compile(r"[0-9a-f]{8}")
_CONTINUATIONS: Final = bytes(range(0x80, 0xC0))  # of UTF-8 characters that began before
LAST_LINES: Final = 12
RUN_BYTES: Final = 4 * 10**9
"""Bytes that the text of a run may take on disk, if nothing else is set."""
RECORD_SIZE: Final = 64 << 10
RECORD_FILES: Final = 32
"""Bytes and files that must be left where a run is to be recorded."""
KEPT: Final = ("model", "output", "checkpoints")
"""Directories of a run whose files are results."""
PAYLOAD_KEPT: Final = 16 << 20
"""Bytes of variables up to which a run keeps them: another kernel finds the notebook's classes in them."""


def default_root() -> Path:
    """Return where runs are recorded unless ``c.DistributedMagics.run_root`` says otherwise."""
    return platformdirs.user_state_path("jupyter_ddp") / "runs"


def new_attempt() -> str:
    """Return the name of a new attempt: the time in UTC, and four hexadecimal digits."""
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + "-" + secrets.token_hex(2)


class RunDirectory:
    """One run on disk.

    Attributes:
        path: The directory, 0700 and this user's.
        carried: A descriptor of the notebook's variables on their way to the ranks, if they are in no file that has a
            name. `let_go` closes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.carried: int | None = None
        self._held: int | None = None

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    @property
    def run_id(self) -> str:
        """The run's id, eight hexadecimal digits."""
        return self.path.name

    @property
    def payload(self) -> Path:
        """Where the notebook's variables are on their way to the ranks, if they have a name."""
        return self.path / "payload.bin"

    def open_payload(self) -> int | None:
        """Return a new descriptor of the notebook's variables, for reading; None: there are none."""
        if self.carried is not None:
            return os.dup(self.carried)
        try:
            return os.open(self.payload, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None

    def facts(self) -> dict[str, Any]:
        """Return ``run.json``: what was started, by whom, when; of a damaged one what can be read."""
        return read_facts(self.path / "run.json")

    @property
    def created(self) -> float:
        """When it was made (seconds since the epoch), 0 if that is not known."""
        return float(self.facts().get("created", 0.0))

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write a file of the run directory whole, readable by this user only."""
        temporary = self.path / f".{name}.new"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
        temporary.replace(self.path / name)

    def lock(self) -> int:
        """Take the run's lock; return the descriptor that holds it. Hand it to who keeps the run alive.

        Raises:
            LaunchError: The lock is taken: the run lives.
        """
        descriptor = os.open(self.path / "alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        while not try_lock(descriptor):
            if not try_lock(descriptor, shared=True):
                os.close(descriptor)
                raise LaunchError(f"the run {self.run_id} is alive: its lock is taken")
            time.sleep(0.001)  # somebody is just looking (`is_alive`)
        return descriptor

    def hold(self) -> int:
        """Take the run's lock, if this object has not got it yet, and keep it until `let_go`; return its descriptor.

        Who starts a run holds it from before its facts are on disk until those have it who keep the run alive:
        otherwise somebody else could take the run for dead in between, and complete its log.

        Raises:
            LaunchError: Somebody else has it.
        """
        if self._held is None:
            self._held = self.lock()
        return self._held

    def let_go(self) -> None:
        """Give up what this object holds, lock and variables; others that inherited the descriptors keep theirs."""
        if self.carried is not None:
            os.close(self.carried)
            self.carried = None
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def is_alive(self) -> bool:
        """Tell whether somebody still keeps this run."""
        try:
            descriptor = os.open(self.path / "alive", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return not try_lock(descriptor, shared=True)
        finally:
            os.close(descriptor)

    def nodes(self) -> int:
        """Return the number of instances."""
        nodes: int = self.facts().get("nnodes", 1)
        return nodes

    def salvage(self, reason: str) -> bool:
        """Complete the logs of a run whose agents died; tell whether there was anything to do.

        Idempotent, safe to call at any time: nothing happens while the run lives or when it ended as it should. What
        the disk does not take (it is full, or not ours) stays undone.
        """
        try:
            descriptor = self.lock()
        except (LaunchError, OSError):
            return False
        try:
            facts = self.facts()
            nproc, attempt = facts.get("nproc", 0), facts.get("attempt", "")
            ranks = [range(node * nproc, (node + 1) * nproc) for node in range(self.nodes())]
            done = [salvage(self.path, node, members, attempt, reason) for node, members in enumerate(ranks)]
            return any(done)
        except OSError:  # the disk is full, or the directory has been removed
            return False
        finally:
            os.close(descriptor)

    def last_words(self) -> str:
        """Return the end of what guard and agents wrote on their standard error, "" when that is nothing."""
        texts = []
        for path in [self.path / "guard.log", *sorted(self.path.glob("agent-*.log"))]:
            with contextlib.suppress(OSError):
                texts += path.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join(texts[-LAST_LINES:])

    def events(self) -> list[Event]:
        """Return every event that the logs have now: each instance's in the order of its log, all together by time.

        Inside a log the time may go back: what a rank showed is logged after the text that came before it, with the
        time at which it was shown.
        """
        reader = EventReader(self)
        latest: dict[int, float] = {}
        found: list[tuple[float, Event]] = []
        while batch := reader.read():
            for event in batch:
                latest[event.node] = max(event.time, latest.get(event.node, event.time))
                found.append((latest[event.node], event))
        return [event for _, event in sorted(found, key=operator.itemgetter(0))]

    def kept_files(self) -> list[str]:
        """Return the paths of what ranks left in SM_MODEL_DIR, SM_OUTPUT_DATA_DIR and the directory of checkpoints.

        Of a directory of checkpoints that the user has named, the files that are newer than the run.
        """
        found = [path for name in KEPT for path, _ in _files(self.path / name)]
        named = self.facts().get("checkpoints")
        if named is not None:
            created = self.created
            found += [path for path, changed in _files(Path(named)) if changed >= created]
        return sorted(found)

    def drop_payload(self, above: int) -> None:
        """Remove the notebook's variables, if they have more bytes than `above`."""
        with contextlib.suppress(OSError):
            if self.payload.stat().st_size > above:
                self.payload.unlink()

    def has_record(self) -> bool:
        """Tell whether there is more of this run than its facts and files that its ranks left on purpose.

        One that nobody can look into (it has just been removed) counts as if there were.
        """
        try:
            others = any(path.name not in (*KEPT, "run.json") for path in self.path.iterdir())
        except OSError:
            return True
        return others or not self.kept_files()

    def remove_record(self) -> None:
        """Remove the run, or all but its facts and the files that its ranks left on purpose, if there are any."""
        if not self.kept_files():
            shutil.rmtree(self.path, ignore_errors=True)
            return
        for entry in list(os.scandir(self.path)):
            if entry.is_dir(follow_symlinks=False) and entry.name not in KEPT:
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name not in (*KEPT, "run.json"):
                with contextlib.suppress(OSError):
                    Path(entry.path).unlink()

    def text(self, rank: int, stream: str = "stdout") -> str:
        """Return everything that a rank wrote to a stream, as it wrote it; what was given up is missing."""
        try:
            with stream_path(self.path, rank, stream).open("rb") as file:
                parts = []
                for start, stop, there in spans(file.fileno(), 0, os.fstat(file.fileno()).st_size):
                    file.seek(start)
                    parts.append(file.read(stop - start) if there else b"")
            return b"".join(parts).decode(errors="replace")
        except OSError:
            return ""


class EventReader:
    """Reads the logs of a run as they grow.

    A line that is not whole yet is left for the next time. Events of a flood come without text: the end of it is
    fetched from the rank's file here, and the rest counted.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._logs: list[_LogTail] | None = None

    def read(self) -> list[Event]:
        """Return what is new, at most about a megabyte of each log; [] when there is nothing."""
        if self._logs is None:
            if not _is_there(self._run.path / "run.json"):
                return []
            self._logs = [_LogTail(log_path(self._run.path, node)) for node in range(self._run.nodes())]
        found: list[Event] = []
        while not found and (lines := [line for log in self._logs for line in log.lines()]):
            for event in filter(None, map(decode, lines)):
                found += (
                    self._with_text(event) if isinstance(event, OutEvent) and event.text is None else [event]
                )
        return found

    def _with_text(self, event: OutEvent) -> list[OutEvent]:
        """Return a flood's event as two: what is only counted, and the end, with its text."""
        stop = event.offset + event.length
        start = max(event.offset, stop - FLOOD_TEXT)
        data = self._bytes(event, start, stop)
        if not data:
            return [event]
        if start > event.offset:
            begin = _first_whole(data)
            data, start = data[begin:], start + begin
        lines = data.count(b"\n")
        text = data.decode(errors="replace")
        end = dataclasses.replace(event, offset=start, length=len(data), lines=lines, text=text)
        if start == event.offset:
            return [end]
        counted = dataclasses.replace(event, length=start - event.offset, lines=max(0, event.lines - lines))
        return [
            counted,
            dataclasses.replace(end, seq=0),
        ]  # the second half of one event has no number of its own

    def _bytes(self, event: OutEvent, start: int, stop: int) -> bytes:
        """Return a part of a rank's file, nothing if it is not there as a whole."""
        if event.rank is None or event.stream not in STREAMS:
            return b""
        try:
            with stream_path(self._run.path, event.rank, event.stream).open("rb") as file:
                if not all(there for _, _, there in spans(file.fileno(), start, stop)):
                    return b""
                file.seek(start)
                data = file.read(stop - start)
        except (OSError, OverflowError):
            return b""
        return data if len(data) == stop - start else b""


def _first_whole(data: bytes) -> int:
    """Return where the first whole line begins, or the first whole character if there is no line before the end."""
    newline = data.find(b"\n", 0, -1)
    return newline + 1 if newline >= 0 else 3 - len(data[:3].lstrip(_CONTINUATIONS))


class _LogTail:
    """Whole lines of one growing file. It is open only while it is read: readers come and go, and are forgotten."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def lines(self) -> list[bytes]:
        """Return the lines that are new, at most about a megabyte of them."""
        lines: list[bytes] = []
        while not lines:
            try:
                with self._path.open("rb", buffering=0) as file:
                    file.seek(self._offset)
                    data = file.read(READ_SIZE)
            except OSError:
                return []
            if not data:
                return []
            self._offset += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


class RunStore:
    """All runs of this user below one directory.

    Args:
        root: The directory; made when the first run is.
    """

    def __init__(self, root: Path | str | None = None) -> None:
        self.root = Path(root).expanduser() if root else default_root()

    def create(self) -> RunDirectory:
        """Make the directory of a new run, for this user's eyes only.

        Raises:
            LaunchError: The directory cannot be made, or belongs to somebody else.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if (owner := self.root.stat().st_uid) != os.getuid():
                raise LaunchError(
                    f"the directory of runs {self.root} belongs to user {owner}: set c.DistributedMagics.run_root"
                )
            while True:
                path = self.root / secrets.token_hex(4)
                with contextlib.suppress(FileExistsError):
                    path.mkdir(mode=0o700)
                    break
        except OSError as error:
            raise LaunchError(
                f"no run directory can be made below {self.root} ({error.strerror}): set c.DistributedMagics.run_root"
            ) from error
        if not _has_room(path):
            path.rmdir()
            raise LaunchError(
                f"there is no room to record a run in {self.root}: "
                "free space there, or set c.DistributedMagics.run_root"
            )
        return RunDirectory(path)

    def list(self) -> list[RunDirectory]:
        """Return all runs, the newest first."""
        try:
            with os.scandir(self.root) as entries:
                names = [
                    e.name for e in entries if _RUN_ID.fullmatch(e.name) and e.is_dir(follow_symlinks=False)
                ]
        except OSError:
            return []
        runs = [RunDirectory(self.root / name) for name in names if _is_there(self.root / name / "run.json")]
        return sorted(runs, key=lambda run: run.created, reverse=True)

    def find(self, word: str) -> RunDirectory:
        """Return the run with this id, this name (the newest of several) or this unique beginning of its id.

        ``last`` is the newest of all.

        Raises:
            RunNotFoundError: There is none, or the beginning fits several.
        """
        runs = self.list()
        if not runs:
            raise RunNotFoundError("there are no runs yet")
        if word == LAST:
            return runs[0]
        by_id = [run for run in runs if run.run_id == word]
        if exact := by_id or [run for run in runs if run.facts().get("name") == word]:
            return exact[0]
        fitting = [run for run in runs if run.run_id.startswith(word)] if word else []
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            ids = ", ".join(run.run_id for run in fitting)
            raise RunNotFoundError(f"{word!r} fits several runs: {ids}")
        ids = ", ".join(run.run_id for run in runs[:5])
        raise RunNotFoundError(f"no run has the id or name {word!r}; the newest are {ids}")

    def prune(self, *, keep: int, max_age: float, max_bytes: int, every: float = 0.0) -> int:
        """Remove what old runs that are over have recorded; return of how many.

        Files that ranks left on purpose (`KEPT`) are the user's: they stay, and with them what ``run.json`` says of the
        run. They are not counted either.

        Args:
            keep: Of at most this many the record stays.
            max_age: Older ones go (seconds).
            max_bytes: The oldest go until all together have no more bytes than this; never the newest.
            every: Nothing is done when it was done within so many seconds.
        """
        done = self.root / ".pruned"
        with contextlib.suppress(OSError):
            if time.time() - done.stat().st_mtime < every:
                return 0
        pruned = total = 0
        for number, run in enumerate(run for run in self.list() if run.has_record()):
            total += _size(run.path)
            too_old = time.time() - run.created > max_age
            if (number >= keep or too_old or (total > max_bytes and number > 0)) and not run.is_alive():
                run.remove_record()
                pruned += 1
        with contextlib.suppress(OSError):
            done.touch(mode=0o600)
        return pruned


def _is_there(path: Path) -> bool:
    """Tell whether this user can see a file. `Path.exists` raises where a directory is somebody else's."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def _files(directory: Path) -> Iterator[tuple[str, float]]:
    """Yield the files below a directory, each with the time of its last change. They may go meanwhile."""
    for folder, _, names in os.walk(directory):
        for path in (Path(folder) / name for name in names):
            with contextlib.suppress(OSError):
                facts = path.stat()
                if stat.S_ISREG(facts.st_mode):
                    yield str(path), facts.st_mtime


def _has_room(path: Path) -> bool:
    """Tell whether the record of the smallest run would have space."""
    found = os.statvfs(path)
    files_left = found.f_favail if found.f_files else RECORD_FILES  # some file systems do not count them
    return found.f_bavail * found.f_frsize >= RECORD_SIZE and files_left >= RECORD_FILES


def _size(path: Path) -> int:
    """Return the bytes of a run's record."""
    total = 0
    for directory, below, names in os.walk(path):
        if directory == str(path):
            below[:] = [name for name in below if name not in KEPT]
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(directory) / name).lstat().st_size
    return total
