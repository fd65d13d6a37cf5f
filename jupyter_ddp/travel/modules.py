"""Helper modules beside the notebook travel as their source.

A module whose file lies in neither the standard library nor site-packages may not be importable on a rank: the
kernel has changed its directory, or the rank is on another machine. Its source travels, with that of the modules that
it uses, and ranks import it from there under its own name and file name: ``import helpers`` in the cell, a class
pickled by name and ``inspect.getsource`` all mean the same module. What runs is the file as it is at launch; the
state of the module in the kernel does not travel.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import site
import sys
import sysconfig
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_ddp.travel import sources

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_SUFFIXES = (".py", ".pyw")


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """The source of a module; that of a package without ``__init__.py`` is empty."""

    source: str
    filename: str
    package: bool

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {"source": self.source, "filename": self.filename, "package": self.package}


def is_helper(name: str) -> bool:
    """Whether a loaded module has to travel as source."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if (
        not isinstance(file, str)
        or not file.endswith(_SUFFIXES)
        or name.partition(".")[0] in {"__main__", "jupyter_ddp"}
    ):
        return False
    path = Path(file).resolve()
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return path.is_file() and not any(path.is_relative_to(folder) for folder in _installed())


@functools.cache
def _installed() -> tuple[Path, ...]:
    paths = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths.update(site.getsitepackages())
    paths.add(site.getusersitepackages())
    return tuple(Path(path).resolve() for path in paths if path)


def collect(names: Iterable[str]) -> dict[str, ModuleSource]:
    """Return the sources of the helpers among ``names`` and of all helpers that they use, packages included."""
    found: dict[str, ModuleSource] = {}
    todo = [name for name in names if is_helper(name)]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        module = sys.modules[name]
        found[name] = _source(module)
        parent = name.rpartition(".")[0]
        related = {parent, *used_by(module)} - {""}
        for above in _namespace_packages(parent):
            found.setdefault(
                above, ModuleSource("", str(Path(sys.modules[above].__path__[0], "__init__.py")), True)
            )
        if found[name].package:  # its loaded submodules: what `pkg.sub` finds in the kernel
            related |= {other for other in list(sys.modules) if other.startswith(f"{name}.")}
        todo += [other for other in related if other not in found and is_helper(other)]
    return found


def _namespace_packages(name: str) -> Iterator[str]:
    """Yield the packages without a file from ``name`` up."""
    while name:
        module = sys.modules.get(name)
        if getattr(module, "__file__", None) is None and list(getattr(module, "__path__", ())):
            yield name
        name = name.rpartition(".")[0]


def _source(module: types.ModuleType) -> ModuleSource:
    filename = str(module.__file__)
    text = importlib.util.decode_source(Path(filename).read_bytes())
    return ModuleSource(text, filename, hasattr(module, "__path__"))


def used_by(module: types.ModuleType) -> set[str]:
    """Return the names of the modules that a module has values of."""
    used = set()
    for value in list(vars(module).values()):
        name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str) and name != module.__name__:
            used.add(name)
    return used


def is_stale(name: str, source: ModuleSource) -> bool:
    """Whether the file says something else than the functions that the kernel has: edited, and not reloaded."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = compile(source.source, source.filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return True
    module = sys.modules[name]
    now = {const.co_name: const for const in code.co_consts if isinstance(const, types.CodeType)}
    for value in list(vars(module).values()):
        if (
            isinstance(value, types.FunctionType)
            and value.__module__ == name
            and value.__code__.co_name in now
        ):
            if value.__qualname__ == value.__code__.co_name and _meaning(value.__code__) != _meaning(
                now[value.__name__]
            ):
                return True
        elif isinstance(value, type) and value.__module__ == name and value.__name__ in now:
            methods = {c.co_name: c for c in now[value.__name__].co_consts if isinstance(c, types.CodeType)}
            for method in vars(value).values():
                if not isinstance(method, types.FunctionType) or method.__module__ != name:
                    continue
                other = methods.get(method.__code__.co_name)
                if other is not None and _meaning(method.__code__) != _meaning(other):
                    return True
    return False


def _meaning(code: types.CodeType) -> tuple[Any, ...]:
    """Return what a code object does, whatever its line numbers."""
    consts = tuple(_meaning(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, consts


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from the source that travelled, under its own file name."""

    def __init__(self, name: str, source: ModuleSource) -> None:
        super().__init__(name, source.filename)
        self._source = source.source

    def get_data(self, path: str | os.PathLike[str]) -> bytes:
        if os.fspath(path) == self.path:
            return self._source.encode()
        return super().get_data(os.fspath(path))

    def path_stats(self, path: str | os.PathLike[str]) -> Mapping[str, Any]:
        raise OSError(path)  # no byte-code cache: it belongs to a file that may be another by now

    def get_source(self, fullname: str) -> str:
        del fullname
        return self._source


class HelperFinder:
    """Finds the helper modules that came with the payload, before anything of the same name elsewhere."""

    def __init__(self) -> None:
        self.sources: dict[str, ModuleSource] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a helper module, None for every other module."""
        del path, target
        source = self.sources.get(name)
        if source is None:
            return None
        locations = [str(Path(source.filename).parent)] if source.package else None
        return importlib.util.spec_from_file_location(
            name, source.filename, loader=_Loader(name, source), submodule_search_locations=locations
        )


_finder = HelperFinder()


def install(helpers: Mapping[str, Mapping[str, Any]]) -> None:
    """Make helper modules importable in this process, as `collect` found them in the notebook's."""
    if not helpers:
        return
    for name, fields in helpers.items():
        source = ModuleSource(str(fields["source"]), str(fields["filename"]), bool(fields["package"]))
        _finder.sources[name] = source
        sources.register({source.filename: source.source}, replace=True)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
