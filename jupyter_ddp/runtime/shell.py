"""The IPython shell of a rank: runs a cell so that it means what it means in a notebook.

The cell is run by `RankShell.run`, not by IPython's ``run_cell``, which would keep a copy of all output, name the code
after a counter, and print errors instead of handing them over. Magics that run code (``%run``, ``%%time``,
``%%capture``) fail the cell when that code fails.
"""

# mypy: disallow-untyped-calls=False
# (IPython's methods have no annotations)
from __future__ import annotations

import ast
import builtins
import contextlib
import getpass
import inspect
import io
import os
import sys
import time
import tokenize
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from IPython.core.error import UsageError
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from IPython.utils import process
from traitlets.config import Config

from jupyter_ddp.runtime.display import Outlet, RankDisplayHook, RankPublisher
from jupyter_ddp.runtime.failure import describe, with_traceback
from jupyter_ddp.runtime.interrupts import is_cancellation
from jupyter_ddp.runtime.source import NOWHERE, leading_blank_lines

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from pathlib import Path
    from types import CodeType

    from jupyter_ddp.runtime.interrupts import Interrupts
    from jupyter_ddp.runtime.source import Source

NO_INPUT: Final = (
    "nobody can answer {} on a rank: ask in a cell of the notebook, the variable then travels to the ranks"
)
NO_INSTALL: Final = (
    "%{0} does nothing good on a rank: all ranks share the notebook's environment. "
    "Run %{0} in a cell without %%distributed, then run this cell again"
)
NO_DEBUGGER: Final = (
    "nobody can talk to a debugger on a rank: print what you want to see, or run the code in the notebook"
)
NESTED: Final = "this cell already runs on every rank: leave out %distributed in it"
_INSTALLERS: Final = ("pip", "conda", "mamba", "micromamba", "uv")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a cell ended.

    Attributes:
        error: What ended it, if anything.
        time: When it ended.
        value: Its last expression's value, None also when it is not to be shown.
    """

    error: BaseException | None = None
    time: float = 0.0
    value: Any = None


class RankShell(InteractiveShell):
    """IPython without history, completion, prompts and somebody who types."""

    outlet: Outlet
    interrupts: Interrupts
    _running = False
    _nested: list[bool]

    # What IPython sets up for people who type.

    def init_virtualenv(self) -> None:
        """Leave ``sys.path`` alone: it is the kernel's."""

    def init_completer(self) -> None:
        """Nobody completes anything here."""

    def enable_gui(self, gui: str | None = None) -> None:
        """Accept any: there is no event loop of a GUI here."""

    @contextlib.contextmanager
    def _tee(self, channel: str) -> Iterator[None]:
        """Keep no copy of the output (IPython 9 does): a rank may print for days."""
        del channel
        yield

    # Running.

    def run(self, text: str, source: Source, *, behind: int = 0) -> Outcome:
        """Run a cell; display its last expression and its figures.

        Args:
            text: The cell, in IPython's syntax.
            source: The file that its code claims to be from; see `source`.
            behind: Lines of that file before the text.
        """
        result = ExecutionResult(types.SimpleNamespace(raw_cell=text, store_history=False, silent=False))
        self.events.trigger("pre_execute")
        self.events.trigger("pre_run_cell", result.info)
        self._running = True
        try:
            with self.builtin_trap, self.display_trap:
                outcome = self._run(text, source, behind + leading_blank_lines(text))
        finally:
            self._running = False
        result.result, result.error_in_exec = outcome.value, outcome.error
        try:
            self.events.trigger("post_execute")
            self.events.trigger("post_run_cell", result)
        except KeyboardInterrupt as error:
            outcome = Outcome(outcome.error or error, time.time(), outcome.value)
        return outcome

    def _run(self, text: str, source: Source, behind: int) -> Outcome:
        try:
            transformed = self.transform_cell(text)
            codes = self._compile(transformed, source, behind)
            coroutine = self._execute(*codes)
            if any(code is not None and code.co_flags & inspect.CO_COROUTINE for code in codes):
                return self._run_async(coroutine)
            return _run_sync(coroutine)
        except BaseException as error:  # noqa: BLE001 - all of them end a cell
            return Outcome(error, time.time())

    def _compile(self, transformed: str, source: Source, behind: int) -> tuple[CodeType, CodeType | None]:
        """Return the code of the cell and, if it is to be shown, of its last expression."""
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if self.autoawait else 0
        try:
            tree = self.compile.ast_parse(transformed, source.filename)
        except SyntaxError as error:
            source.move(error, behind)
            raise
        tree = self.transform_ast(ast.increment_lineno(tree, behind))
        shown = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not _ends_with_semicolon(transformed):
            shown = ast.Expression(tree.body.pop().value)
        compiler: Any = self.compile
        with compiler.extra_flags(flags):
            try:
                code = compiler(tree, source.filename, "exec")
                return code, None if shown is None else compiler(shown, source.filename, "eval")
            except SyntaxError as error:
                source.move(error, 0)
                raise

    async def _execute(self, body: CodeType, last: CodeType | None) -> Outcome:
        before = self.interrupts.count
        try:
            waiting = eval(body, self.user_global_ns, self.user_ns)  # noqa: S307 - this is what we are for
            if body.co_flags & inspect.CO_COROUTINE:
                await waiting
            if last is None:
                return Outcome(time=time.time())
            value = eval(last, self.user_global_ns, self.user_ns)  # noqa: S307
            if last.co_flags & inspect.CO_COROUTINE:
                value = await value
            sys.displayhook(value)
            return Outcome(time=time.time(), value=value)
        except BaseException as error:  # noqa: BLE001
            if self.interrupts.count > before and is_cancellation(error):
                return Outcome(KeyboardInterrupt().with_traceback(error.__traceback__), time.time())
            return Outcome(error, time.time())

    def _run_async(self, coroutine: Coroutine[Any, Any, Outcome]) -> Outcome:
        if self.loop_runner is not self.loop_runner_map["asyncio"][0]:  # %autoawait trio
            outcome: Outcome = self.loop_runner(coroutine)
            return outcome
        from IPython.core.async_helpers import get_asyncio_loop  # imports asyncio

        return self.interrupts.run(get_asyncio_loop(), coroutine)

    # Errors of code that runs inside of the cell.

    def run_cell(self, raw_cell: str, *args: Any, **kwargs: Any) -> ExecutionResult:  # noqa: ANN401
        """Run a cell inside of the cell: for user code as in IPython, for a magic (``%%capture``) errors are raised."""
        by_magic = sys._getframe(1).f_globals.get("__name__", "").startswith("IPython.")  # noqa: SLF001
        self._nested.append(by_magic)
        try:
            result: ExecutionResult = super().run_cell(raw_cell, *args, **kwargs)
        finally:
            self._nested.pop()
        if by_magic or isinstance(result.error_in_exec, KeyboardInterrupt):
            result.raise_error()
        return result

    def showtraceback(self, exc_tuple: Any = None, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Raise the error that a magic wanted to show; print one that IPython goes on after (a bad ``_repr_html_``)."""
        error = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
        if error is None or (self._nested and self._nested[-1]):
            return
        if exc_tuple is None and self._running and not self._nested:
            raise error
        now = time.time()
        print(with_traceback(describe(error, NOWHERE, now), error, NOWHERE).traceback, file=sys.stderr)  # noqa: T201

    def showsyntaxerror(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Do as `showtraceback`."""
        self.showtraceback()

    def safe_execfile(self, fname: Any, *where: Any, **options: Any) -> None:  # noqa: ANN401
        """Run a script for ``%run``; its errors are the cell's."""
        super().safe_execfile(fname, *where, **{**options, "raise_exceptions": True})

    def system(self, cmd: str) -> None:
        """Run ``!cmd`` in a pseudo terminal. An interrupt ends the command and the cell."""
        before = self.interrupts.count
        try:
            code = process.system(self.var_expand(cmd, depth=1))  # type: ignore[attr-defined]  # by platform
        except Exception:
            if (
                self.interrupts.count > before
            ):  # it came while the command was being started, which IPython trips over
                raise KeyboardInterrupt from None
            raise
        self.user_ns["_exit_code"] = code
        if self.interrupts.count > before:
            raise KeyboardInterrupt
        if code and self.system_raise_on_error:
            from subprocess import CalledProcessError

            raise CalledProcessError(code, cmd)


def make_shell(outlet: Outlet, interrupts: Interrupts, ipython_dir: Path) -> RankShell:
    """Make the process's shell, with a fresh module ``__main__`` as the user's namespace."""
    leave = {name: getattr(builtins, name, sys.exit) for name in ("exit", "quit")}
    main = types.ModuleType("__main__")
    config = Config()
    config.HistoryManager.enabled = False
    RankShell.outlet, RankShell.interrupts, RankShell._nested = outlet, interrupts, []  # noqa: SLF001
    shell: RankShell = RankShell.instance(
        config=config,
        ipython_dir=str(ipython_dir),
        user_module=main,
        user_ns=main.__dict__,
        display_pub_class=RankPublisher,
        displayhook_class=RankDisplayHook,
    )
    del shell.user_ns["open"]  # IPython's refuses open(1), which is a script's good right
    shell.user_ns.update(leave)
    for name in _INSTALLERS:
        shell.register_magic_function(_refuse(UsageError, NO_INSTALL.format(name)), "line", name)
    builtins.input = _refuse(EOFError, NO_INPUT.format("input()"))
    getpass.getpass = _refuse(EOFError, NO_INPUT.format("getpass()"))
    if "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = _refuse(EOFError, NO_DEBUGGER)
    shell.register_magic_function(_refuse(UsageError, NESTED), "line_cell", "distributed")
    extensions: Any = shell.extension_manager
    extensions.loaded.add("jupyter_ddp")  # a ``%load_ext`` that was copied along does no harm
    return shell


def _run_sync(coroutine: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Run a coroutine that never waits, without a loop: code that starts one of its own must find none."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome
    raise RuntimeError("a cell without await was waiting")


def _ends_with_semicolon(code: str) -> bool:
    """Tell whether the last token that means anything is ``;``."""
    ignored = {tokenize.ENDMARKER, tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.DEDENT}
    last = ""
    with contextlib.suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type not in ignored:
                last = token.string
    return last == ";"


def _refuse(error: type[Exception], text: str) -> Any:  # noqa: ANN401 - stands for any function
    def refuse(*_: object, **__: object) -> NoReturn:
        raise error(text)

    return refuse
