"""Every error that jupyter_ddp raises.

::

    JupyterDDPError
    ├── UsageError            a magic line or an argument that cannot be meant
    │   └── ConfigError       a field of a LaunchConfig has an impossible value
    ├── CellError             the cell does not compile
    ├── CaptureError          variables that cannot travel to the ranks
    ├── ValueTravelError      a value that cannot come back from a rank
    ├── LaunchError           this machine cannot start the run; nothing was started
    ├── RunNotFoundError      no run, or more than one, has this id or name
    └── DistributedError      a run ended badly; ``.result`` says how
    KeyboardInterrupt
    └── RunInterrupt          a run was interrupted and is over; ``.result`` has what it left

Each message says what happened, to which rank or variable, and what to do. In a notebook the errors show
their message alone: frames of this package would only hide it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jupyter_ddp.result import DistributedResult


class JupyterDDPError(Exception):
    """The root of the tree: catch this to catch every error of this package."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows instead of a traceback."""
        return f"{type(self).__name__}: {self}".splitlines()


class UsageError(JupyterDDPError):
    """A magic line or an argument that cannot be meant; nothing was started."""


class ConfigError(UsageError):
    """A field of a `LaunchConfig` has an impossible value.

    Attributes:
        field: The field's name, as in `LaunchConfig`.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str]]:
        return type(self), (self.field, str(self))


class CellError(JupyterDDPError):
    """The cell does not compile; nothing was started.

    Attributes:
        line: The cell's line, where the magic line is line 1, or None.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line

    def __reduce__(self) -> tuple[type[CellError], tuple[str, int | None]]:
        return type(self), (str(self), self.line)


class CaptureError(JupyterDDPError):
    """Variables that cannot travel to the ranks, all named at once; nothing was started.

    Attributes:
        names: The variables' names.
    """

    def __init__(self, message: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names = names

    def __reduce__(self) -> tuple[type[CaptureError], tuple[str, tuple[str, ...]]]:
        return type(self), (str(self), self.names)


class ValueTravelError(JupyterDDPError):
    """A value that cannot come back from a rank; becomes a note of the run, never its failure."""


class LaunchError(JupyterDDPError):
    """This machine cannot start the run (a missing launcher, torch, a bad directory); nothing was started."""


class RunNotFoundError(JupyterDDPError):
    """No run, or more than one, has this id or name."""


class DistributedError(JupyterDDPError):
    """A run ended badly: a rank failed, the launcher failed or the time was up.

    The message has the first cause on top: rank, type, text, the cell's line, and the traceback without frames
    of launchers or of this package.

    Attributes:
        result: The whole `DistributedResult`, with what every rank left.
    """

    def __init__(self, message: str, result: DistributedResult | None = None) -> None:
        super().__init__(message)
        self.result = result

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines() or super()._render_traceback_()

    def __reduce__(self) -> tuple[type[DistributedError], tuple[str, DistributedResult | None]]:
        return type(self), (str(self), self.result)


class RunInterrupt(KeyboardInterrupt):
    """The run was interrupted; its ranks have ended, and what they said is on the screen.

    Front ends, and what drives notebooks, look for a KeyboardInterrupt by name: this one goes by that name too.

    Attributes:
        result: The `DistributedResult` of what there was.
    """

    def __init__(self, result: DistributedResult) -> None:
        super().__init__(f"run {result.run_id} was interrupted")
        self.result = result

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]

    def __reduce__(self) -> tuple[type[RunInterrupt], tuple[DistributedResult]]:
        return type(self), (self.result,)


RunInterrupt.__name__ = "KeyboardInterrupt"
