"""Where ranks run. A backend starts a run and fills its run directory; everything else reads that directory.

Backends are found by name, without importing them before they are used: the built-in ones below, and those that other
packages register under the entry point group ``jupyter_ddp.backends``.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from jupyter_ddp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_ddp.cell import Program
    from jupyter_ddp.config import LaunchConfig
    from jupyter_ddp.rundir import RunDirectory

BUILT_IN: Final = {"local": "jupyter_ddp.backends.local:LocalBackend"}
GROUP: Final = "jupyter_ddp.backends"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that would make a run fail, or that the user should know before it.

    Attributes:
        level: ``fail`` (a run will not be started), ``warn`` or ``ok``.
        text: What was found, in a sentence.
        remedy: What to do, "" when there is nothing to do.
    """

    level: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.text}: {self.remedy}" if self.remedy else self.text


@runtime_checkable
class Job(Protocol):
    """A run that was started. It fills the run directory by itself; nobody has to call anything for that."""

    def poll(self) -> str | None:
        """Return None while the job may still write events, else a sentence about how it ended."""

    def send(self, command: str) -> bool:
        """Have the run ``interrupt``, ``kill``, ``stop`` or ``stacks``; tell whether the command arrived."""

    def kill(self) -> None:
        """End the run by force: nobody answered."""

    def describe(self) -> str:
        """Return where the job runs, for people."""

    def fileno(self) -> int | None:
        """Return a descriptor that is readable when there is news, or None: then the reader looks now and then."""

    def wait_gone(self) -> None:
        """Wait (bounded) until nothing of a run that ended without a word is left, and see to it."""

    def close(self, *, over: bool) -> None:
        """Let go of the job: end what only lives as long as this object, unless the run is over anyway."""


@runtime_checkable
class Backend(Protocol):
    """A place where ranks run."""

    name: str

    def check(self, config: LaunchConfig) -> list[Problem]:
        """Return what is wrong or remarkable, without starting or billing anything."""

    def resolve(self, config: LaunchConfig) -> LaunchConfig:
        """Return the configuration with ``nproc_per_node`` as the number that it will be.

        Raises:
            ConfigError: The number cannot be had here.
        """

    def plan(self, config: LaunchConfig, program: Program) -> str:
        """Return what would be started: the exact command line or request, secrets masked."""

    def start(self, config: LaunchConfig, program: Program, rundir: RunDirectory) -> Job:
        """Start a run whose directory has its facts and its payload; who keeps the run alive takes over its lock.

        The payload is the file `RunDirectory.payload`. A backend with a true attribute ``takes_descriptor`` asks
        `RunDirectory.open_payload`: then a large one needs no name.

        Raises:
            LaunchError: It cannot be started; nothing was.
        """

    def attach(self, rundir: RunDirectory) -> Job:
        """Return the job of a run that somebody else has started."""


_registered: dict[str, Callable[[], Backend]] = {}


def register(name: str, factory: Callable[[], Backend] | None) -> None:
    """Add a backend of this process under a name, or remove it again with None. Packages use the entry point."""
    if factory is None:
        _registered.pop(name, None)
    else:
        _registered[name] = factory


def forks(config: LaunchConfig, program: Program) -> bool:
    """Tell whether a run's ranks are forked, so that `keep_warm` would have them begin earlier."""
    why_not = getattr(get_backend(config.backend), "why_not_forked", None)
    return why_not is not None and not why_not(config, program)


def keep_warm(*, on: bool) -> None:
    """Keep a process ready for the next local run, or let go of it."""
    local: Any = get_backend("local")
    local.keep_warm(on=on)


def names() -> list[str]:
    """Return the names of all backends."""
    return sorted({*BUILT_IN, *_registered, *(point.name for point in entry_points(group=GROUP))})


def get_backend(name: str) -> Backend:
    """Return the backend of this name.

    Raises:
        ConfigError: There is none.
    """
    if name in _registered:
        return _registered[name]()
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        backend: Any = getattr(importlib.import_module(module), attribute)()
        return backend  # type: ignore[no-any-return]
    for point in entry_points(group=GROUP, name=name):
        return point.load()()  # type: ignore[no-any-return]
    near = difflib.get_close_matches(name, names(), 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names())}"
    raise ConfigError("backend", f"there is no backend {name!r}; {hint}")
