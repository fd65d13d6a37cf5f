"""What was set in this session for all following runs: one store behind the panel, the magic and `configure`.

Whoever shows or changes these values does it here, so two panels, ``%distributed config`` and Python agree. A run takes
its values when it starts; a change afterwards does not touch it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from jupyter_ddp.config import LaunchConfig, field_name, normalise
from jupyter_ddp.line.effective import effective

Watcher = Callable[[dict[str, Any]], None]


class Settings:
    """Values of `LaunchConfig` fields that hold for the following runs, until they are reset or the kernel ends.

    Attributes:
        since: When it was made: no run of this process is older.
        run_root: Where runs are recorded; None for the default. The magics' trait sets it.
        traits: Returns the fields that traits of the magics set.
        run_bytes: Bytes that a run's text may take on disk; None for the default. The magics' trait sets it.
        warm: Whether a process is kept ready for the next run; None once that has been suggested. The magics' trait
            sets it.
    """

    def __init__(self) -> None:
        self.since = time.time()
        self.run_root: str | None = None
        self.run_bytes: int | None = None
        self.warm: bool | None = False
        self.traits: Callable[[], dict[str, Any]] = dict
        self._values: dict[str, Any] = {}
        self._watchers: list[Watcher] = []

    @property
    def values(self) -> dict[str, Any]:
        """The fields that are set, normalised; a copy."""
        return dict(self._values)

    def set(self, **fields: object) -> None:
        """Set some fields. All or nothing: one impossible value, and none is set.

        Raises:
            ConfigError: A field is unknown, a value impossible, or two of them do not go together.
        """
        changed = {name: normalise(name, value) for name, value in _by_field(fields).items()}
        values = {**self._values, **changed}
        LaunchConfig(**values)
        self._values = values
        self._tell()

    def reset(self, *names: str) -> None:
        """Forget some fields, or all when none is named.

        Raises:
            ConfigError: There is no such field.
        """
        fields = [field_name(name) for name in names]
        self._values = {key: value for key, value in self._values.items() if fields and key not in fields}
        self._tell()

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Call `watcher` with all values after each change; return what ends that."""
        self._watchers.append(watcher)

        def end() -> None:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

        return end

    def _tell(self) -> None:
        for watcher in list(self._watchers):
            watcher(self.values)


def _by_field(fields: dict[str, object]) -> dict[str, object]:
    return {field_name(key): value for key, value in fields.items()}


SETTINGS: Final = Settings()
"""The store of this process."""


def current_config() -> tuple[LaunchConfig, dict[str, str]]:
    """Return the configuration of a run that says nothing itself, and where each field's value comes from.

    Raises:
        ConfigError: What was set here and what traits say do not go together.
    """
    return effective({}, None, SETTINGS.values, SETTINGS.traits())


def configure(**fields: object) -> None:
    """Set fields for all following runs of this session, as ``%distributed config`` and the panel do.

    ``configure(nproc_per_node=4, protocol="mpirun")``. All or nothing.

    Raises:
        ConfigError: A field is unknown, or a value impossible.
    """
    SETTINGS.set(**fields)
