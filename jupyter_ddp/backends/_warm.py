"""A guard and its zygote kept ready for the next run: ``c.DistributedMagics.warm``.

It serves a run only if nothing has changed that a process reads when it starts or when torch is imported. It lives as
long as this process, and ten minutes at most.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.launchers import read_early
from jupyter_ddp.runtime.wire import pack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TAKEN_LIMIT: Final = 2.0


class Warm:
    """At most one guard that waits.

    Attributes:
        enabled: Whether one shall be kept.
    """

    def __init__(self) -> None:
        self.enabled = False
        self._guard: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._mark: object = None
        self._env: dict[str, str] | None = None

    def renew(self, env: Mapping[str, str] | None = None) -> None:
        """Start one in the background if one shall be kept and there is none.

        Args:
            env: The ranks' environment; by default that of the run before.
        """
        if env is not None:
            self._remember(env)
        if not self.enabled or self._env is None or sys.platform != "linux" or self._lives():
            return
        self.drop()
        ours, theirs = socket.socketpair()
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "jupyter_ddp.runtime.guard", "--wait", str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=self._env,
                start_new_session=True,
            )
        except OSError:
            ours.close()
            return
        finally:
            theirs.close()
        self._line, self._mark = ours, _mark(self._env)

    def take(
        self, env: Mapping[str, str], run_dir: Path, descriptors: Sequence[int]
    ) -> subprocess.Popen[bytes] | None:
        """Hand a run over; return its guard, None if there is none or if it would not be as a new one.

        Args:
            env: The ranks' environment.
            run_dir: The run directory, with its ``spec.json``.
            descriptors: The doorbell, the guard's log, and what else it shall have.
        """
        self._remember(env)
        guard, line = self._guard, self._line
        if guard is None or line is None or not self._lives() or self._mark != _mark(env):
            self.drop()
            return None
        self._guard = self._line = None
        try:
            line.settimeout(_TAKEN_LIMIT)
            handed = {"run_dir": str(run_dir), "descriptors": list(descriptors)}
            socket.send_fds(line, [pack(handed)], list(descriptors))
            taken = bool(line.recv(1))
        except OSError:
            taken = False
        if not taken:
            line.close()
            _bury(guard)
            return None
        line.setblocking(True)
        guard.stdin = os.fdopen(line.detach(), "wb")
        return guard

    def ready(self, env: Mapping[str, str]) -> bool:
        """Tell whether one waits that a run with this environment would be given."""
        return self._lives() and self._mark == _mark(env)

    def drop(self) -> None:
        """Let go of the one that waits: it ends."""
        if self._line is not None:
            self._line.close()
        if self._guard is not None:
            _bury(self._guard)
        self._guard = self._line = None

    def _remember(self, env: Mapping[str, str]) -> None:
        """Keep an environment for the next one, without what only that run was given: it may be a secret."""
        self._env = {
            name: value for name, value in env.items() if os.environ.get(name) == value or read_early(name)
        }

    def _lives(self) -> bool:
        return self._guard is not None and self._guard.poll() is None


def _bury(guard: subprocess.Popen[bytes]) -> None:
    guard.kill()  # its zygote dies with it
    guard.wait()


def _mark(env: Mapping[str, str]) -> object:
    """Return what must be the same for a process that has been started earlier to be as one that is started now."""
    return (
        sys.executable,
        sorted((name, value) for name, value in env.items() if read_early(name)),
        _installed(),
        _inherited(),
    )


def _installed() -> object:
    """Return what changes when torch, or anything beside it, is installed anew."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    home = Path(found.origin)
    with contextlib.suppress(OSError):
        return [(str(path), path.stat().st_mtime_ns) for path in (home, home.parent, home.parent.parent)]
    return None


def _inherited() -> Any:  # noqa: ANN401 - compared, no more
    """Return what a process has from its parent and keeps."""
    import resource

    limits = [resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")]
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    kept = re.findall(r"^(?:Umask|Cpus_allowed|Mems_allowed|Groups|CapEff):.*", status, re.MULTILINE)
    return limits, kept, os.getpriority(os.PRIO_PROCESS, 0)


WARM: Final = Warm()
"""The one of this process."""
