"""Objects of which every process has its own: they travel by name.

``from os import environ`` binds the notebook's environment to a name of the notebook. A copy of it on a rank would
have the kernel's ``RANK``, and what the cell sets there would reach nobody; the same holds for ``sys.path``, for the
generators behind ``from random import shuffle`` and ``from numpy.random import rand``, and for the settings of
matplotlib. They are state of a module, which stays where it is.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any, Final

_NAMES: Final = (
    "os.environ",
    "os.environb",
    "sys.argv",
    "sys.meta_path",
    "sys.modules",
    "sys.path",
    "sys.path_hooks",
    "sys.path_importer_cache",
    "sys.warnoptions",
    "random._inst",
    "numpy.random.mtrand._rand",
    "torch.default_generator",
    "matplotlib.rcParams",
)


@dataclass(frozen=True, slots=True)
class Own:
    """Stands for such an object in a pickle."""

    module: str
    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _own, (self.module, self.name)


def own_objects() -> dict[int, Own]:
    """Return what stands for the objects that this process has, by their identity. Nothing is imported."""
    found = {}
    for path in _NAMES:
        module, _, name = path.rpartition(".")
        obj = getattr(sys.modules.get(module), name, None)
        if obj is not None:
            found[id(obj)] = Own(module, name)
    return found


def _own(module: str, name: str) -> Any:  # noqa: ANN401 - what the process has
    return getattr(importlib.import_module(module), name)
