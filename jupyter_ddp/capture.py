"""Notebook variables as a payload for the ranks.

What a cell reads, or what ``--push`` names, goes into one graph of pickles with everything that it needs: functions
with the globals that they use, classes of the notebook by value, helper modules beside the notebook as source, and
the text of notebook cells for tracebacks. What cannot travel is told all at once, before anything starts.
"""

from __future__ import annotations

import builtins
import difflib
import sys
import time
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.errors import CaptureError
from jupyter_ddp.travel import container, modules, sources
from jupyter_ddp.travel.culprits import find_culprits
from jupyter_ddp.travel.pickling import PayloadPickler
from jupyter_ddp.travel.refusals import HISTORY, RefusedError
from jupyter_ddp.travel.report import CaptureItem, CaptureReport, describe
from jupyter_ddp.travel.shell_names import OWN_NAMES, is_history, is_ranks_own

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from jupyter_ddp.cell import Program

_SEARCH_SECONDS: Final = 1.5


@dataclass(frozen=True, slots=True)
class Payload:
    """Variables on their way to the ranks, still in memory: arrays are not copied before `write`.

    As long as it holds them, a ``bytearray`` among them cannot grow, and no array is given back: see `release`.

    Attributes:
        names: The variables.
        nbytes: Size of the file that `write` makes.
        report: What goes and how big.
        mentions: Modules that it needs, and names in its code.
    """

    names: tuple[str, ...]
    nbytes: int
    report: CaptureReport
    mentions: frozenset[str]
    content: container.Container = field(repr=False)

    def write(self, path: str | os.PathLike[str]) -> int:
        """Write the payload into a new file (mode 0600) and return its size.

        Raises:
            OSError: The file exists, or the disk is full; nothing is left behind.
        """
        return container.write(path, self.content)

    def write_to(self, descriptor: int) -> int:
        """Write the payload into an empty file or ``memfd`` and return its size."""
        return container.write_to(descriptor, self.content)

    def release(self) -> None:
        """Let go of the variables. What remains is what is known about them; it cannot be written any more."""
        container.release(self.content)


def capture(program: Program, namespace: dict[str, Any], *, push: Sequence[str] | None = None) -> Payload:
    """Return the variables that a cell needs, ready to travel. Nothing is written or started.

    Args:
        program: The cell.
        namespace: The notebook's variables (``shell.user_ns``).
        push: Exactly these variables; None: what the cell reads and the notebook has.

    Raises:
        CaptureError: Variables that cannot travel, each with the way to the culprit and the way out; or a name in
            ``push`` that the notebook does not have.
    """
    begin = time.monotonic()
    names = _read_names(program, namespace) if push is None else _pushed_names(push, namespace)
    namespaces = [namespace]
    main = sys.modules.get("__main__")
    if main is not None and vars(main) is not namespace:
        namespaces.append(vars(main))
    pickler = PayloadPickler(namespaces)
    sizes: dict[str, int] = {}
    for name in names:
        try:
            sizes[name] = pickler.add(name, namespace[name])
        except Exception as error:  # noqa: BLE001 - pickling runs user code
            failure = error.with_traceback(None)  # its frames would keep all that was pickled alive
            break
    else:
        failure = None
    if failure is not None:
        raise _explain(names, name, namespace, failure)
    pickler.add("", _definitions(pickler, namespace))
    helpers = modules.collect(pickler.modules)
    head = {
        "python": container.PYTHON,
        "names": list(names),
        "sources": sources.collect(pickler.files),
        "modules": {name: source.to_json() for name, source in helpers.items()},
    }
    content = container.Container(head, pickler.pickles(), pickler.buffers)
    total = container.layout(head, content.pickles, content.buffers)[2]
    items = tuple(
        CaptureItem(name, describe(namespace[name]), sizes[name], _how(pickler, namespace[name], helpers))
        for name in names
    )
    notes = (*pickler.notes, *_stale(helpers))
    report = CaptureReport(items, notes, total, tuple(sorted(helpers)), time.monotonic() - begin)
    used = (modules.used_by(sys.modules[name]) for name in helpers)
    mentions = frozenset(pickler.mentions.union(pickler.modules, *used))
    return Payload(tuple(names), total, report, mentions, content)


def _read_names(program: Program, namespace: dict[str, Any]) -> list[str]:
    names, refused = [], []
    for name in sorted(program.reads):
        if name not in namespace or is_ranks_own(name, namespace):
            continue
        if is_history(name, namespace):
            if name not in program.assigns:
                refused.append(name)
            continue
        names.append(name)
    if refused:
        raise _history_error(refused)
    return names


def _pushed_names(push: Sequence[str], namespace: dict[str, Any]) -> list[str]:
    names = list(dict.fromkeys(push))
    missing = [name for name in names if name not in namespace]
    if missing:
        raise CaptureError("\n".join(_missing(name, namespace) for name in missing), tuple(missing))
    refused = [name for name in names if is_history(name, namespace) or is_ranks_own(name, namespace)]
    if refused:
        raise _history_error(refused)
    return sorted(names)


def _missing(name: str, namespace: Mapping[str, Any]) -> str:
    if hasattr(builtins, name):
        return f"`{name}` is built in: every rank has it."
    if not name.isidentifier():
        return f"`{name}` is no variable: bind it to a name and push that."
    near = difflib.get_close_matches(name, [other for other in namespace if not other.startswith("_")], n=3)
    hint = f" Did you mean {' or '.join(f'`{other}`' for other in near)}?" if near else ""
    return f"the notebook has no variable `{name}`.{hint}"


def _history_error(names: Sequence[str]) -> CaptureError:
    lines = []
    for name in names:
        if name in OWN_NAMES:
            lines.append(f"`{name}` does not travel: every rank has its own.")
        else:
            lines.append(f"`{name}` is {HISTORY.what}, which does not travel. {HISTORY.way_out}")
    return CaptureError("\n".join(lines), tuple(names))


def _definitions(pickler: PayloadPickler, namespace: dict[str, Any]) -> list[tuple[str, Any, str | None]]:
    """Return what ranks need to know of classes and functions by value: token, object, name in ``__main__``.

    With the name a rank finds the class of an object that the cell did not name itself: its own pickling (spawned
    data loader workers, torch.save) looks it up in ``__main__``.
    """
    table = []
    for token, obj in pickler.definitions:
        name = getattr(obj, "__qualname__", "")
        mine = getattr(obj, "__module__", None) == "__main__" and namespace.get(name) is obj
        table.append((token, obj, name if mine else None))
    return table


def _how(pickler: PayloadPickler, value: Any, helpers: Mapping[str, object]) -> str:  # noqa: ANN401 - any object
    if pickler.is_own(value):
        return "import"
    if not isinstance(value, types.ModuleType):
        return "value"
    return "source" if value.__name__ in helpers else "import"


def _stale(helpers: Mapping[str, modules.ModuleSource]) -> list[str]:
    return [
        f"{source.filename} was edited after the notebook imported it: ranks run the file as it is now, the notebook "
        f"does after importlib.reload({name})"
        for name, source in helpers.items()
        if modules.is_stale(name, source)
    ]


def _explain(names: Sequence[str], failed: str, namespace: dict[str, Any], error: Exception) -> CaptureError:
    """Return one error that names every culprit of every variable."""
    end = time.monotonic() + _SEARCH_SECONDS
    lines: list[str] = []
    guilty = []
    for position, name in enumerate(names):
        share = max(end - time.monotonic(), 0) / (len(names) - position)
        culprits = find_culprits(name, namespace[name], until=time.monotonic() + share)
        texts = list(dict.fromkeys(culprit.text() for culprit in culprits))
        if not texts and (name == failed or (name > failed and time.monotonic() < end)):
            texts = _failure(name, namespace, error if name == failed else None)
        lines += [text for text in texts if text not in lines]
        guilty += [name] if texts else []
    if len(guilty) == 1:
        head = f"`{guilty[0]}` cannot travel to the ranks; nothing was started."
    else:
        head = f"{len(guilty)} variables cannot travel to the ranks; nothing was started."
    return CaptureError("\n".join([head, *(f"  {line}" for line in lines)]), tuple(guilty))


def _failure(name: str, namespace: dict[str, Any], error: Exception | None) -> list[str]:
    """Return what pickling one variable on its own says, when there is nothing better to tell."""
    if error is None:
        try:
            PayloadPickler([namespace]).add(name, namespace[name])
        except Exception as own:  # noqa: BLE001 - pickling runs user code
            error = own
        else:
            return []
    reason = str(error) if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}"
    return [f"`{name}` ({describe(namespace[name])}) cannot be pickled: {reason}"]
