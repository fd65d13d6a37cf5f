"""``%%distributed`` and ``%distributed``: they parse, and delegate."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TextIO

from IPython.core import magic_arguments
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand
from traitlets import Bool, Float, Int, Unicode

from jupyter_ddp import backends, doctor, history
from jupyter_ddp.capture import capture
from jupyter_ddp.cell import Program, compile_cell
from jupyter_ddp.errors import JupyterDDPError, RunInterrupt, UsageError
from jupyter_ddp.hints import for_notebook_error
from jupyter_ddp.line import FLAGS, effective, effective_line, parse_cell_line
from jupyter_ddp.line.commands import COMING, WORDS, Command, parse_command
from jupyter_ddp.magics.completion import matcher
from jupyter_ddp.magics.first_line import magic_first
from jupyter_ddp.magics.panel_text import panel_text, values_text
from jupyter_ddp.magics.traits import LaunchTraits
from jupyter_ddp.preflight import LATER, preflight
from jupyter_ddp.rundir import RUN_BYTES, RunStore
from jupyter_ddp.settings import SETTINGS, current_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_ddp.capture import Payload
    from jupyter_ddp.config import LaunchConfig
    from jupyter_ddp.result import DistributedResult

__all__ = ["DistributedMagics", "current_config", "install", "uninstall"]

_DAY: Final = 86_400.0
_LATEST: Final = 5
"""Runs that the panel lists."""
_declare: Any = magic_arguments  # has no types


def _with_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declare the flags for ``%%distributed?``; `jupyter_ddp.line` parses them."""
    for flag in reversed(FLAGS):
        says = flag.metavar and flag.default not in ("none", "off")
        default = f" (default: {flag.default})" if says else ""
        options: dict[str, Any] = {"help": f"{flag.help}{default}".replace("%", "%%"), "default": None}
        options |= {"metavar": flag.metavar} if flag.metavar else {"action": "store_true"}
        function = _declare.argument(*flag.names, **options)(function)
    declared: Callable[..., Any] = _declare.magic_arguments()(function)
    declared.__doc__ = str(declared.__doc__).replace("::\n\n  %distributed ", "%%distributed ", 1)
    return declared


@magics_class
class DistributedMagics(Magics, LaunchTraits):
    """Run a cell on several ranks (``%%distributed``), and look after the runs (``%distributed``)."""

    run_root = Unicode("", help="Where runs are recorded; empty: this user's state directory.").tag(
        config=True
    )
    output_cap = Int(256 * 1024, min=4096, help="Bytes of text that a run keeps in the notebook.").tag(
        config=True
    )
    warm = Bool(
        default_value=False,
        help="Keep a process ready that has imported torch: the next run under torchrun begins at once.",
    ).tag(config=True)
    run_bytes = Int(
        RUN_BYTES,
        min=1 << 20,
        help="Bytes of text that a run keeps on disk; past that the middle of what ranks print is given up.",
    ).tag(config=True)
    keep_runs = Int(100, min=1, help="Runs that are kept on disk.").tag(config=True)
    keep_days = Float(30.0, min=0.0, help="Days for which a run is kept on disk.").tag(config=True)
    keep_bytes = Int(10 * 10**9, min=0, help="Bytes that all runs together may take on disk.").tag(
        config=True
    )

    def __init__(self, shell: Any = None, **kwargs: Any) -> None:  # noqa: ANN401 - an InteractiveShell
        super().__init__(shell, **kwargs)
        self._shell = shell
        self._assigned: frozenset[str] = frozenset()
        self._matcher = matcher(shell, lambda: history.words_for_runs(self.store))

    @property
    def store(self) -> RunStore:
        """Where runs are recorded."""
        return RunStore(self.run_root or None)

    @_with_flags
    @no_var_expand
    @line_cell_magic
    def distributed(self, line: str, cell: str | None = None) -> None:
        """Run the cell on several ranks with torchrun or mpirun, and see every rank live.

        %%distributed -N 2 -p 4 --protocol mpirun --pull loss@all

        {expr} and $name are the notebook's. What the line does not say is taken from --config, else from
        %distributed config, else from c.DistributedMagics, else the default holds. As a line, %distributed shows
        every value and the latest runs; its words are config, runs, stop, logs and doctor.
        """
        if cell is None:
            self._command(parse_command(line, self._shell.user_ns))
        else:
            self._cell(line, cell)

    def _cell(self, line: str, cell: str) -> None:
        shell = self._shell
        invocation = parse_cell_line(line, shell.user_ns)
        if invocation.help:
            _say(self._help())
            return
        config, origins = effective(
            invocation.given,
            invocation.config,
            SETTINGS.values,
            self.changed_fields,
            config_name=invocation.config_name,
        )
        preflight(config)
        program = compile_cell(cell, shell, magic=f"%%distributed {line}".rstrip())
        if program.empty:
            _say("The cell has no code: nothing was started.")
            return
        config = backends.get_backend(config.backend).resolve(config)
        payload = capture(program, shell.user_ns, push=config.push)
        if invocation.dry_run:
            _say(_plan(config, origins, program, payload))
            return
        self._run(program, payload, config, origins)

    def _run(self, program: Program, payload: Payload, config: LaunchConfig, origins: dict[str, str]) -> None:
        from jupyter_ddp.runner import raise_for, run_program

        store = self.store
        assigned = program.assigns - self._shell.user_ns.keys() - {pull.name for pull in config.pull}
        try:
            result = run_program(
                program,
                payload,
                config,
                origins=origins,
                ip=self._shell,
                namespace=self._shell.user_ns,
                store=store,
                output_cap=self.output_cap,
            )
        except RunInterrupt as stop:
            self._leave(config, stop.result, assigned)
            raise
        finally:
            with contextlib.suppress(OSError):
                store.prune(keep=self.keep_runs, max_age=self.keep_days * _DAY, max_bytes=self.keep_bytes)
        self._leave(config, result, assigned)
        raise_for(result)
        wanted = [pull.name for pull in config.pull]
        self._shell.push({name: result.pulled[name] for name in wanted if name in result.pulled})

    def _leave(self, config: LaunchConfig, result: DistributedResult, assigned: frozenset[str]) -> None:
        """Take note of a run that is over, whether it went well or not: of what it left, and of what it did not."""
        self._assigned = assigned
        if config.out:
            self._shell.push({config.out: result})

    def _help(self) -> str:
        words = "\n".join(f"  %distributed {word:<8} {text}" for word, text in WORDS.items())
        return f"{type(self).distributed.__doc__}\n{words}"

    def _command(self, command: Command) -> None:
        if command.help:
            _say(self._help())
            return
        if command.word in COMING:
            raise UsageError(
                f"%distributed {command.word} {LATER}: a run blocks its cell for now, and ■ interrupts it."
            )
        _say(getattr(self, f"_word_{command.word or 'panel'}")(command))

    def _current(self) -> tuple[LaunchConfig, dict[str, str]]:
        return effective({}, None, SETTINGS.values, self.changed_fields)

    def _word_panel(self, _command: Command) -> str:
        config, origins = self._current()
        resolved = None
        with contextlib.suppress(JupyterDDPError):
            resolved = backends.get_backend(config.backend).resolve(config)
        store = self.store
        runs = history.runs_text(store.list(), store.root, time.time(), _LATEST)
        return panel_text(config, origins, resolved, runs)

    def _word_config(self, command: Command) -> str:
        if command.reset:
            SETTINGS.reset()
        if command.forget:
            SETTINGS.reset(*command.forget)
        if command.changes:
            SETTINGS.set(**command.changes)
        config, origins = self._current()
        changed = command.reset or command.forget or command.changes
        return effective_line(config, origins) if changed else values_text(config, origins)

    def _word_runs(self, _command: Command) -> str:
        store = self.store
        return history.runs_text(store.list(), store.root, time.time())

    def _word_stop(self, command: Command) -> str:
        return history.stop(history.to_stop(self.store, command.run))

    def _word_logs(self, command: Command) -> str:
        return history.log_text(self.store.find(str(command.run)), command.rank, self.output_cap)

    def _word_doctor(self, _command: Command) -> str:
        config, _ = self._current()
        return doctor.text(doctor.examine(config, self.store.root, os.environ))

    def after_cell(self, outcome: Any) -> None:  # noqa: ANN401 - an ExecutionResult
        """Say how to get a name that the last distributed cell made; a callback of ``post_run_cell``. Never raises."""
        with contextlib.suppress(Exception):
            hint = for_notebook_error(outcome.error_in_exec, self._assigned - self._shell.user_ns.keys())
            if hint:
                _say(hint, file=sys.stderr)


def _say(text: str, file: TextIO | None = None) -> None:
    print(text, file=file)


def _plan(config: LaunchConfig, origins: dict[str, str], program: Program, payload: Payload) -> str:
    """Return what a dry run prints."""
    backend = backends.get_backend(config.backend)
    findings = [f"{one.level}: {one}" for one in backend.check(config) if one.level != "ok"]
    notes = [f"warn: {text}" for text in program.warnings]
    return "\n".join(
        [
            effective_line(config, origins),
            payload.report.text(),
            backend.plan(config, replace(program, mentions=payload.mentions)),
            *notes,
            *findings,
            "Dry run: nothing was started.",
        ]
    )


def install(shell: Any) -> DistributedMagics:  # noqa: ANN401 - an InteractiveShell
    """Put the magics, their completion, the hint and the input transformer into a shell; once."""
    uninstall(shell)
    magics = DistributedMagics(shell)
    shell.register_magics(magics)
    shell.events.register("post_run_cell", magics.after_cell)
    shell.input_transformers_cleanup.insert(0, magic_first)
    if shell.Completer is not None:
        shell.Completer.custom_matchers.append(magics._matcher)  # noqa: SLF001 - this module's own
    SETTINGS.traits = lambda: magics.changed_fields

    def follow_disk(_change: object = None) -> None:
        SETTINGS.run_root = magics.run_root or None
        SETTINGS.run_bytes = magics.run_bytes

    def follow_warm(_change: object = None) -> None:
        SETTINGS.warm = magics.warm
        backends.keep_warm(on=magics.warm)

    magics.observe(follow_disk, ["run_root", "run_bytes"])
    magics.observe(follow_warm, "warm")
    follow_disk()
    if magics.warm:
        follow_warm()
    return magics


def uninstall(shell: Any) -> None:  # noqa: ANN401 - an InteractiveShell
    """Take out of a shell all that `install` has put into it; nothing happens when there is nothing."""
    manager = shell.magics_manager
    magics = manager.registry.pop(DistributedMagics.__name__, None)
    if magics is None:
        return
    for kind in ("line", "cell"):
        manager.magics[kind].pop("distributed", None)
    with contextlib.suppress(ValueError):
        shell.events.unregister("post_run_cell", magics.after_cell)
    for where, what in (
        (shell.input_transformers_cleanup, magic_first),
        (shell.Completer.custom_matchers if shell.Completer is not None else [], magics._matcher),  # noqa: SLF001
        (shell.configurables, magics),
    ):
        if what in where:
            where.remove(what)
    SETTINGS.traits, SETTINGS.run_root, SETTINGS.run_bytes, SETTINGS.warm = dict, None, None, False
    if magics.warm:
        backends.keep_warm(on=False)
