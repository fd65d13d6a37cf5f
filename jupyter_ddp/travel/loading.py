"""What objects need to know while they are rebuilt: on which device, in whose namespace, from which run."""

from __future__ import annotations

import contextlib
import sys
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(slots=True)
class Loading:
    """One load.

    Attributes:
        local_rank: Whose accelerator CUDA tensors go to; None keeps them on the CPU.
        main: Globals of functions that come from the notebook; None means those of ``__main__``.
        definition: Last resort for a notebook object that this process does not know, by token.
        notes: Sentences for the user; each once.
    """

    local_rank: int | None = None
    main: dict[str, Any] | None = None
    definition: Callable[[str], Any] | None = None
    notes: dict[str, None] = field(default_factory=dict)

    def namespace(self) -> dict[str, Any]:
        """Return the globals of the notebook's functions."""
        return vars(sys.modules["__main__"]) if self.main is None else self.main


_current: ContextVar[Loading | None] = ContextVar("jupyter_ddp_loading", default=None)


def current() -> Loading:
    """Return the load under way, or a default one."""
    return _current.get() or Loading()


@contextlib.contextmanager
def loading(load: Loading) -> Iterator[Loading]:
    """Make ``load`` the one under way."""
    token = _current.set(load)
    try:
        yield load
    finally:
        _current.reset(token)
