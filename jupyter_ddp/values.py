"""Values in files: what a rank reads at its start, what it leaves for the notebook, and how that is loaded.

The format of the file is drawn in `jupyter_ddp.travel.container`. This module runs on ranks too, so it imports
nothing but the standard library and cloudpickle; torch and numpy come when a value needs them.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.errors import ValueTravelError
from jupyter_ddp.travel import container, modules, origins, sources
from jupyter_ddp.travel.culprits import find_culprits
from jupyter_ddp.travel.loading import Loading, loading
from jupyter_ddp.travel.pickling import TooLargeError, ValuePickler, unpickle
from jupyter_ddp.travel.rebuild import NotHereError
from jupyter_ddp.travel.refusals import RefusedError
from jupyter_ddp.travel.report import describe

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_TEST_LOAD_BELOW: Final = 1 << 20
_MAP_ABOVE: Final = 64 << 20
_SEARCH_SECONDS: Final = 1.0
_VALUE: Final = "the value"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a payload held: the variables, and sentences about what became of them on the way."""

    namespace: dict[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A value in a file: its size in bytes, and sentences about what changed on the way."""

    size: int
    notes: tuple[str, ...]


def read_payload(
    path: str | os.PathLike[str] | int, local_rank: int | None, *, main: dict[str, Any] | None = None
) -> Loaded:
    """Return the variables in a payload, on a rank.

    Functions of the notebook get ``main`` as their globals, and what they use is put there; the caller puts the
    variables there. The text of notebook cells is registered for tracebacks, helper modules become importable.

    Args:
        path: The payload, which may be unlinked afterwards; or a descriptor of it, which is closed.
        local_rank: CUDA tensors go to ``cuda:<local_rank>`` where there is one; None keeps them on the CPU.
        main: The namespace in which the cell will run; None: that of the module ``__main__``, which must be
            in place.

    Raises:
        ValueTravelError: The file is torn, is of another Python, or a variable cannot be rebuilt; it is named.
        OSError: The file cannot be read.
    """
    content = _open(path)
    names = [str(name) for name in content.head["names"]]
    modules.install(content.head["modules"])
    sources.register(content.head["sources"], replace=True)
    load = Loading(local_rank=local_rank, main=main)
    namespace: dict[str, Any] = {}
    with loading(load):
        values = _values(content, [*names, "the notebook's definitions"])
        for name in names:
            namespace[name] = next(values)
        for token, obj, name in next(values):
            origins.register(token, obj)
            if name is not None:
                load.namespace().setdefault(name, obj)
    return Loaded(namespace, tuple(load.notes))


def save_value(
    path: str | os.PathLike[str],
    value: Any,  # noqa: ANN401 - any object
    name: str = "",
    *,
    limit: int | None = None,
    explain: bool = True,
) -> SavedValue:
    """Write a value that a rank leaves for the notebook into a new file (mode 0600).

    CUDA tensors come as CPU copies and a DDP-wrapped model as its ``.module``, each with a note. Classes of the
    notebook stay the notebook's own. Values up to 1 MiB are loaded once to see that they can be.

    Args:
        path: The file.
        value: The value.
        name: The variable that has it, "" for none; messages and notes name it.
        limit: Bytes above which it is not written; what is too large costs about the time of pickling so many.
        explain: Whether to look, for up to a second, for what in it cannot travel.

    Raises:
        TooLargeError: It is larger than `limit`.
        ValueTravelError: The value cannot travel; the message names what in it, and the way out.
        OSError: The file exists, or the disk is full.
    """
    if limit is not None and _known_size(value) > limit:
        raise TooLargeError(limit)
    pickler = ValuePickler(limit)
    try:
        pickler.add(name, value)
    except TooLargeError:
        raise
    except Exception as error:  # noqa: BLE001 - pickling runs user code
        raise ValueTravelError(_reason(name, value, error.with_traceback(None), explain=explain)) from None
    names = [name or _VALUE]
    head = {
        "python": container.PYTHON,
        "names": names,
        "sources": sources.collect(pickler.files),
        "modules": {},
    }
    content = container.Container(head, pickler.pickles(), pickler.buffers)
    size = container.write(path, content)
    if size <= _TEST_LOAD_BELOW:
        try:
            next(_values(container.read(path, map_above=_MAP_ABOVE), names))
        except BaseException:
            Path(path).unlink()
            raise
    return SavedValue(size, tuple(pickler.notes))


def load_value(path: str | os.PathLike[str], run_dir: str | os.PathLike[str]) -> Any:  # noqa: ANN401 - any object
    """Return a value that a rank left, in the notebook.

    Unpickling runs code, so only files of a run directory that nobody else can write are loaded.

    Raises:
        ValueTravelError: The run directory is not this user's or not 0700, the file is outside of it or torn, or the
            value cannot be rebuilt.
    """
    _check_ours(Path(path), Path(run_dir))
    try:
        content = _open(path, map_above=_MAP_ABOVE)
    except OSError as error:  # it has just been removed
        message = f"{path} cannot be read: {error}"
        raise ValueTravelError(message) from None
    payload = Path(run_dir) / "payload.bin"

    def definition(token: str) -> Any | None:  # noqa: ANN401 - a class or function
        """Take a definition from the run's own payload: this kernel is not the one that started the run."""
        if payload.is_file():
            read_payload(payload, None, main={"__name__": "__main__"})
        return origins.resolve(token, "<locals>")

    sources.register(content.head["sources"], replace=False)
    with loading(Loading(definition=definition)):
        return next(_values(content, content.head["names"]))


def _open(path: str | os.PathLike[str] | int, *, map_above: int = 0) -> container.Container:
    try:
        content = container.read(path, map_above=map_above)
    except container.ContainerError as error:
        message = str(error) if isinstance(path, int) else f"{os.fspath(path)}: {error}"
        raise ValueTravelError(message) from None
    written = content.head.get("python")
    if written != container.PYTHON:
        message = (
            f"written by Python {written}, read by Python {container.PYTHON}: both ends need the same version"
        )
        raise ValueTravelError(message)
    return content


def _values(content: container.Container, names: Sequence[str]) -> Iterator[Any]:
    """Yield one value a name.

    Raises:
        ValueTravelError: A value cannot be rebuilt.
    """
    values = unpickle(content.pickles, content.buffers)
    for name in names:
        try:
            value = next(values)
        except NotHereError as error:
            message = f"{name} cannot be loaded: {error}"
            raise ValueTravelError(message) from None
        except Exception as error:
            message = f"{name} cannot be loaded: {type(error).__name__}: {error}"
            raise ValueTravelError(message) from error
        yield value


def _known_size(value: Any) -> int:  # noqa: ANN401 - any object
    """Return the bytes that a value says it has, without pickling it: arrays and tensors do; 0 for others."""
    size: Any = 0
    with contextlib.suppress(Exception):  # an attribute of the user's
        size = value.nbytes
    return size if isinstance(size, int) else 0


def _reason(name: str, value: Any, error: Exception, *, explain: bool) -> str:  # noqa: ANN401 - any object
    until = time.monotonic() + _SEARCH_SECONDS
    if explain and (found := find_culprits(name or "value", value, until=until)):
        return "; ".join(dict.fromkeys(culprit.text() for culprit in found))
    if isinstance(error, RefusedError):
        return str(error)
    return f"a {describe(value)} cannot be pickled: {type(error).__name__}: {error}"


def _check_ours(path: Path, run_dir: Path) -> None:
    try:
        facts = run_dir.lstat()
        real = path.resolve()
        inside = run_dir.resolve() in real.parents and real.is_file()
        owner = real.stat().st_uid if inside else -1
    except (OSError, ValueError) as error:  # a name that cannot be, or somebody removes the run
        message = f"{path} cannot be read: {error}"
        raise ValueTravelError(message) from None
    me = os.geteuid() if hasattr(os, "geteuid") else facts.st_uid  # Windows: a home is its user's
    shared = os.name == "posix" and facts.st_mode & 0o077
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != me or shared:
        message = f"{run_dir} is not a directory that only you can use (0700): its values are not loaded"
        raise ValueTravelError(message)
    if not inside or owner != me:
        message = f"{path} is not a file of yours in {run_dir}: it is not loaded"
        raise ValueTravelError(message)
