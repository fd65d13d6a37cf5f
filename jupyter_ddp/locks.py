"""Locks on files that the operating system gives back when their last holder is gone."""

from __future__ import annotations


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Take the lock on an open file without waiting; tell whether it could be had.

    It belongs to the open file: processes that inherit the descriptor hold it too, until the last of them has closed
    it. Windows has no such locks; there nothing runs locally that could hold one, and every lock can be had.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
