"""Which device is a rank's own, told without importing torch and without touching CUDA."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_GPU: Final = re.compile(r"nvidia\d+")


def own_device(local_rank: int, environ: Mapping[str, str], devices: str = "/dev") -> str:
    """Return ``cuda:<local_rank>`` if CUDA would show this process so many GPUs, else ``cpu``.

    Args:
        local_rank: The rank's number on its instance.
        environ: Its environment; CUDA_VISIBLE_DEVICES counts up to the first name that is none.
        devices: Where the machine's device nodes are.
    """
    try:
        present = sum(_GPU.fullmatch(name) is not None for name in os.listdir(devices))
    except OSError:
        present = 0
    return f"cuda:{local_rank}" if local_rank < _visible(present, environ) else "cpu"


def _visible(present: int, environ: Mapping[str, str]) -> int:
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not present:
        return present
    count = 0
    for word in (part.strip() for part in chosen.split(",")):
        if not word.startswith(("GPU-", "MIG-")) and not (word.isdigit() and int(word) < present):
            break
        count += 1
    return count
