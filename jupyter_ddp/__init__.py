"""Run a notebook cell on several ranks with torchrun or mpirun, and see every rank live.

``%load_ext jupyter_ddp`` brings ``%%distributed`` and ``%distributed``; the names below are for Python. They are loaded
when they are first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jupyter_ddp.config import LaunchConfig, Pull
    from jupyter_ddp.errors import (
        CaptureError,
        CellError,
        ConfigError,
        DistributedError,
        JupyterDDPError,
        LaunchError,
        RunNotFoundError,
        UsageError,
        ValueTravelError,
    )
    from jupyter_ddp.history import attach, runs
    from jupyter_ddp.result import DistributedResult, RankResult
    from jupyter_ddp.run import Run
    from jupyter_ddp.runner import launch
    from jupyter_ddp.settings import configure
    from jupyter_ddp.view import RankFailure

__all__ = [
    "CaptureError",
    "CellError",
    "ConfigError",
    "DistributedError",
    "DistributedResult",
    "JupyterDDPError",
    "LaunchConfig",
    "LaunchError",
    "Pull",
    "RankFailure",
    "RankResult",
    "Run",
    "RunNotFoundError",
    "UsageError",
    "ValueTravelError",
    "attach",
    "configure",
    "launch",
    "load_ipython_extension",
    "runs",
    "unload_ipython_extension",
]

_HOMES = {
    "LaunchConfig": "config",
    "Pull": "config",
    "DistributedResult": "result",
    "RankResult": "result",
    "RankFailure": "view",
    "Run": "run",
    "attach": "history",
    "runs": "history",
    "configure": "settings",
    "launch": "runner",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    home = _HOMES.get(name) or ("errors" if name in __all__ and name.endswith("Error") else None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(ipython: Any) -> None:  # noqa: ANN401 - an InteractiveShell
    """Register ``%%distributed`` and what belongs to it; ``%load_ext jupyter_ddp`` calls this."""
    importlib.import_module(f"{__name__}.magics").install(ipython)


def unload_ipython_extension(ipython: Any) -> None:  # noqa: ANN401 - an InteractiveShell
    """Take all of it out of the shell again; ``%unload_ext jupyter_ddp`` calls this."""
    importlib.import_module(f"{__name__}.magics").uninstall(ipython)
