"""Displays that were too big for the log: their bundles are files of the run directory."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from jupyter_ddp.events import is_object
from jupyter_ddp.words import size_text

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_ddp.events import DisplayEvent

MOST_BYTES: Final = 16_000_000
"""A bundle above this stays a file that is only named."""


def load_bundle(event: DisplayEvent, run_dir: Path) -> DisplayEvent:
    """Return a display event with the bundle that its ``file`` has. Never raises: what cannot be read is named.

    To be called before `view.fold`, which reads no files.
    """
    if event.file is None:
        return event
    path = run_dir / event.file
    try:
        if not path.resolve().is_relative_to(run_dir.resolve()):
            raise ValueError("outside the run directory")
        size = path.stat().st_size
        if size > MOST_BYTES:
            return replace(event, data={"text/plain": f"<display of {size_text(size)} in {event.file}>"})
        bundle = json.loads(path.read_bytes())
        data, metadata = bundle["data"], bundle.get("metadata") or {}
        if not (is_object(data) and is_object(metadata)):
            raise ValueError("no MIME bundle")
        return replace(event, data=data, metadata=metadata, file=None)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return replace(event, data={"text/plain": f"<display that cannot be read: {event.file}>"})
