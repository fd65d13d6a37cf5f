"""Libraries that would not work on a rank as they are, adapted.

- multiprocessing with *spawn* pickles a class or function of ``__main__`` by name, and its processes have another
  ``__main__`` (a notebook has no file that they could run). Here such objects travel by value, so that a DataLoader
  with a dataset from the notebook works with spawn too.
- ``tqdm.notebook`` shows a widget, whose other half would have to live in the notebook. Here it is the text bar.
- matplotlib draws its figures as a notebook's kernel does, unless the user chose a backend.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import multiprocessing.reduction
import os
import pickle
import sys
import types
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

TEXT_BAR_MODULE: Final = "tqdm.notebook"
INLINE_BACKEND: Final = "module://matplotlib_inline.backend_inline"


def adapt_libraries() -> None:
    """Adapt them, imported or not; call it once."""
    reduction: Any = multiprocessing.reduction.ForkingPickler
    reduction.reducer_override = _reduce_main_by_value
    sys.meta_path.insert(0, _TextBarFinder())
    os.environ.setdefault("MPLBACKEND", INLINE_BACKEND)


def _reduce_main_by_value(_pickler: object, obj: Any) -> Any:  # noqa: ANN401 - pickle's protocol
    if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
        import cloudpickle

        return pickle.loads, (cloudpickle.dumps(obj),)
    return NotImplemented


class _TextBarFinder(importlib.abc.MetaPathFinder):
    """Finds ``tqdm.notebook``, if there is a tqdm: it is imported before its submodules are looked for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of our module, or None for all others."""
        del path, target
        return importlib.util.spec_from_loader(fullname, _TextBars()) if fullname == TEXT_BAR_MODULE else None


class _TextBars(importlib.abc.Loader):
    """``tqdm.notebook`` made of ``tqdm.std``."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Give the module the public names of the real one."""
        std = importlib.import_module("tqdm.std")
        names = {"tqdm": std.tqdm, "tqdm_notebook": std.tqdm, "trange": std.trange, "tnrange": std.trange}
        vars(module).update(names, __all__=list(names))
