"""What is refused before anything starts, whoever asks for the run: the magics or `jupyter_ddp.launch`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from jupyter_ddp import backends
from jupyter_ddp.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from jupyter_ddp.config import LaunchConfig

LATER: Final = "comes with a later version"


def preflight(config: LaunchConfig) -> None:
    """Check what a configuration asks for against this version and this kernel.

    Raises:
        UsageError: It asks for something that comes with a later version.
        ConfigError: It takes a variable of the kernel's environment that is not there.
    """
    if config.backend == "sagemaker" and "sagemaker" not in backends.names():
        raise UsageError(f"--backend sagemaker {LATER}: write -b local, or leave it out.")
    if config.distribution is not None:
        raise UsageError(f"--distribution {LATER}: write --protocol, -N and -p, which say the same here.")
    if config.detach:
        raise UsageError(f"--detach {LATER}: leave it out, and the cell shows the run until it is over.")
    missing = [name for name, value in config.env.items() if value is None and name not in os.environ]
    if missing:
        what = (
            f"--env {missing[0]} takes the kernel's value, but the kernel's environment has no {missing[0]}"
        )
        raise ConfigError("env", f"{what}: write --env {missing[0]}=VALUE.")
