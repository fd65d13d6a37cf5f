"""Rich output of a rank: IPython's publisher and display hook, as events."""

# mypy: disallow-untyped-calls=False
# (IPython's methods have no annotations)
from __future__ import annotations

import base64
import builtins
import itertools
import json
import os
import time
from typing import TYPE_CHECKING, Any, Final

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher

from jupyter_ddp.events import DisplayEvent

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

INLINE_LIMIT: Final = 256 << 10
"""Bytes of a bundle's JSON up to which it travels in its event; above, in a file."""
WIDGET_VIEW: Final = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE: Final = "application/vnd.jupyter.widget-state+json"


class Outlet:
    """Where a rank's rich output goes.

    Args:
        rank: The rank; names its files.
        run_dir: The run directory.
        put: Takes a finished event.
        is_owner: Whether this process is the rank itself; a forked child's displays become printed text.
    """

    def __init__(
        self,
        rank: int,
        run_dir: Path,
        put: Callable[[DisplayEvent], None],
        is_owner: Callable[[], bool],
    ) -> None:
        self._rank = rank
        self._directory = run_dir
        self._put = put
        self._is_owner = is_owner
        self._numbers = itertools.count()

    def show(
        self,
        action: str,
        data: dict[str, Any],
        metadata: dict[str, Any] | None,
        display_id: str | None = None,
    ) -> None:
        """Send a bundle. A widget cannot live on a rank: its text is sent in its place."""
        if WIDGET_VIEW in data:
            data = {mime: value for mime, value in data.items() if mime not in {WIDGET_VIEW, WIDGET_STATE}}
        if not data:
            return
        if not self._is_owner():
            if action != "update":
                print(data.get("text/plain", ""))  # noqa: T201 - this is the text of a process that has no events
            return
        bundle = {"data": _plain(data), "metadata": _plain(metadata or {})}
        text = json.dumps(bundle)
        if len(text) <= INLINE_LIMIT:
            event = DisplayEvent(action=action, display_id=display_id, time=time.time(), **bundle)
        else:
            event = DisplayEvent(
                action=action, display_id=display_id, time=time.time(), file=self._store(text)
            )
        self._put(event)

    def clear(self, *, wait: bool) -> None:
        """Ask for this rank's output to be cleared, now or with the next one."""
        self._put(DisplayEvent(action="clear", wait=wait, time=time.time()))

    def _store(self, text: str) -> str:
        name = f"displays/{self._rank}-{next(self._numbers)}.json"
        path = self._directory / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        return name


class RankPublisher(DisplayPublisher):
    """``display()``, ``update_display()`` and ``clear_output()`` of a rank."""

    shell: Any

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: object = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_: object,
    ) -> None:
        """Send a bundle to the notebook."""
        del source
        self._validate_data(data, metadata)
        display_id = (transient or {}).get("display_id")
        self.shell.outlet.show("update" if update else "display", data, metadata, display_id)

    def clear_output(self, wait: bool = False) -> None:  # noqa: FBT001, FBT002 - IPython's signature
        """Ask for this rank's output to be cleared."""
        self.shell.outlet.clear(wait=wait)


class RankDisplayHook(DisplayHook):
    """``sys.displayhook`` of a rank; what it is called with is the cell's last expression."""

    shell: Any

    def __call__(self, result: object = None) -> None:
        """Show a value, unless it is None."""
        if result is None:
            return
        data, metadata = self.compute_format_data(result)
        if "_" not in builtins.__dict__:  # gettext's
            self.shell.user_ns["_"] = result
        if data:
            self.shell.outlet.show("result", data, metadata)


def _plain(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a value as plain JSON: bytes in base64, foreign objects as text."""
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or type(value) in {str, int, float, bool}:
        return value
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return str(value)
