"""The default process group around a cell: made before it if asked for, destroyed after it if it was left."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

from jupyter_ddp.runtime.link import start_quiet_thread


def initialise(backend: str) -> None:
    """Make the default process group; ``auto`` is nccl where there are GPUs, else gloo.

    With nccl the current device is the rank's own, ``cuda:LOCAL_RANK``.

    Raises:
        ImportError: There is no torch.
        Exception: What ``torch.distributed`` raises.
    """
    import torch  # only ranks that ask for it
    from torch import distributed

    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group(backend)


def is_left_over() -> bool:
    """Tell whether a default process group exists. Never imports torch."""
    distributed = sys.modules.get("torch.distributed")
    with contextlib.suppress(Exception):
        return bool(distributed and distributed.is_available() and distributed.is_initialized())
    return False


def destroy(limit: float) -> bool:
    """Destroy the default process group quietly, if there is one; tell whether none is left after `limit` seconds.

    Its peers may be gone, and then it can block; the thread that does it is left behind.
    """
    if not is_left_over():
        return True
    done = threading.Event()

    def work() -> None:
        with contextlib.suppress(Exception):
            sys.modules["torch.distributed"].destroy_process_group()
        done.set()

    start_quiet_thread(work, "jupyter_ddp-destroy")
    return done.wait(limit)
