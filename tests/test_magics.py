"""The magics in a real shell. Ranks are played here; tests/local/ runs real ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets import TraitError
from traitlets.config import Config

import jupyter_ddp
from jupyter_ddp.config.fields import FIELDS
from jupyter_ddp.errors import CellError, ConfigError, DistributedError, LaunchError, RunInterrupt, UsageError
from jupyter_ddp.magics import DistributedMagics
from jupyter_ddp.rundir import RunStore
from jupyter_ddp.settings import SETTINGS
from jupyter_ddp.testing import ScriptedBackend


@pytest.fixture
def shell(tmp_path):
    config = Config()
    config.HistoryManager.enabled = False
    config.DistributedMagics.run_root = str(tmp_path / "runs")
    shell = InteractiveShell(config=config)
    shell.run_line_magic("load_ext", "jupyter_ddp")
    yield shell
    shell.run_line_magic("unload_ext", "jupyter_ddp")
    SETTINGS.reset()
    shell.configurables.clear()


@pytest.fixture
def magics(shell):
    return shell.magics_manager.registry["DistributedMagics"]


class Runs(list):
    """What was handed to `run_program`, and what it answers."""

    def __init__(self):
        self.pulled = {}
        self.error = None
        self.interrupted = self.refused = False

    def run_program(self, program, payload, config, **more):
        if self.refused:
            raise LaunchError("there is no mpirun")
        self.append(types.SimpleNamespace(program=program, payload=payload, config=config, **more))
        result = types.SimpleNamespace(
            run_id="0a", ok=self.error is None, pulled=self.pulled, message=self.error
        )
        if self.interrupted:
            raise RunInterrupt(result)
        return result

    def raise_for(self, result):
        if not result.ok:
            raise DistributedError(result.message, result)


@pytest.fixture
def runs(monkeypatch):
    """Stand in for the module that starts runs."""
    runs = Runs()
    fake = types.ModuleType("jupyter_ddp.runner")
    fake.run_program, fake.raise_for = runs.run_program, runs.raise_for
    monkeypatch.setitem(sys.modules, "jupyter_ddp.runner", fake)
    return runs


def run(shell, cell):
    """Run a cell as a front end does; raise what it raised."""
    outcome = shell.run_cell(cell)
    outcome.raise_error()
    return outcome


# The cell


def test_a_cell_becomes_a_run(shell, runs):
    run(shell, "rate = 3\nunused = 4")
    run(shell, "%%distributed -p 3 --protocol mpirun  # three\nprint(rate)\ny = rate")
    (one,) = runs
    assert (one.config.nproc_per_node, one.config.protocol) == (3, "mpirun")
    assert one.program.source == "print(rate)\ny = rate\n"
    assert one.program.magic == "%%distributed -p 3 --protocol mpirun  # three"
    assert one.payload.names == ("rate",)
    assert one.origins["protocol"] == "line"
    assert one.namespace is shell.user_ns
    assert one.output_cap == 256 * 1024


def test_variables_of_the_cell_stay_on_the_ranks(shell, runs):
    """B28."""
    run(shell, "x = 1")
    run(shell, "%%distributed\nx = 2\ny = 3")
    assert shell.user_ns["x"] == 1
    assert "y" not in shell.user_ns
    runs.error = "rank 0 failed"
    with pytest.raises(DistributedError):
        run(shell, "%%distributed\nx = 2\ny = 3")
    assert shell.user_ns["x"] == 1
    assert "y" not in shell.user_ns


def test_pull_and_out_bind_names(shell, runs, capsys):
    """B28."""
    runs.pulled = {"loss": 0.5, "acc": [1, 2], "not_asked_for": 9}
    run(shell, "%%distributed --pull loss,acc@all,gone --out res\nloss = 1")
    assert shell.user_ns["loss"] == 0.5
    assert shell.user_ns["acc"] == [1, 2]
    assert shell.user_ns["res"].ok
    assert {"not_asked_for", "gone"}.isdisjoint(shell.user_ns)
    assert capsys.readouterr() == ("", "")  # that `gone` did not come is a note of the run


def test_a_failed_run_raises_and_binds_its_result_only(shell, runs):
    runs.error, runs.pulled = "rank 1 failed: ValueError: no", {"loss": 1}
    with pytest.raises(DistributedError, match="rank 1 failed") as caught:
        run(shell, "%%distributed --pull loss --out res\nloss = 1")
    assert shell.user_ns["res"] is caught.value.result
    assert "loss" not in shell.user_ns


def test_an_interrupt_ends_the_cell_as_an_interrupt(shell, runs):
    runs.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        run(shell, "%%distributed --out res\n1")
    assert "res" in shell.user_ns


@pytest.mark.parametrize("body", ["", "\n\n", "# only a comment\n", "\n   # and\n#this"])
def test_a_cell_without_code_starts_nothing(shell, runs, capsys, body):
    """B30."""
    run(shell, f"%%distributed -p 2\n{body}")
    assert runs == []
    assert capsys.readouterr().out == "The cell has no code: nothing was started.\n"


def test_a_syntax_error_names_the_cells_line_and_starts_nothing(shell, runs):
    """B30."""
    with pytest.raises(CellError) as caught:
        run(shell, "%%distributed\nfor i in range(3)\n    print(i)")
    assert caught.value.line == 2
    assert runs == []


@pytest.mark.parametrize("line", ["-p two", "-p 0", "--protocol MPIrun", "-n 4", "--nope", "--backend nccl"])
def test_a_line_that_cannot_be_meant_starts_nothing(shell, runs, line):
    """B76."""
    with pytest.raises(UsageError):
        run(shell, f"%%distributed {line}\nprint(1)")
    assert runs == []


def test_what_is_refused_before_anything_starts(shell, runs):
    """Before the cell is compiled: tests/test_preflight.py has what that is."""
    with pytest.raises(UsageError, match="--detach comes with a later version"):
        run(shell, "%%distributed --detach\nprint(")
    assert runs == []


def test_an_unknown_backend_is_answered_with_the_nearest(shell, runs):
    with pytest.raises(ConfigError, match="did you mean local"):
        run(shell, "%%distributed -b loca\n1")


def test_a_bare_environment_name_must_be_the_kernels(shell, runs, monkeypatch):
    monkeypatch.setenv("DDP_HERE", "1")
    run(shell, "%%distributed --env DDP_HERE\n1")
    assert runs[0].config.env == {"DDP_HERE": None}
    with pytest.raises(ConfigError, match="write --env DDP_NOWHERE=VALUE"):
        run(shell, "%%distributed --env DDP_NOWHERE\n1")


def test_parameters_of_papermill_come_into_the_line(shell, runs):
    """B77."""
    run(shell, 'nproc = 3\nlimit = "30m"\nlabel = "two words"')
    run(shell, "%%distributed -p {nproc} --timeout {limit} --name $label --env 'RAW={nproc}'\n1")
    config = runs[0].config
    assert (config.nproc_per_node, config.timeout, config.name) == (3, 1800, "two words")
    assert config.env == {"RAW": "{nproc}"}


def test_a_config_of_the_notebook(shell, runs):
    run(
        shell, "from jupyter_ddp import LaunchConfig\ncfg = LaunchConfig(nproc_per_node=3, protocol='mpirun')"
    )
    run(shell, "%%distributed --config cfg --protocol torchrun\n1")
    assert (runs[0].config.nproc_per_node, runs[0].config.protocol) == (3, "torchrun")
    assert runs[0].origins["nproc_per_node"] == "config cfg"


def test_exactly_these_variables_are_pushed(shell, runs):
    run(shell, "a, b, c = 1, 2, 3")
    run(shell, "%%distributed --push a, b\nc")
    run(shell, "%%distributed --no-push\na")
    assert [set(one.payload.names) for one in runs] == [{"a", "b"}, set()]


def test_the_line_counts_as_a_magics_line_even_below_comments(shell, runs):
    run(shell, "# what this cell does\n\n#%% and more\n%%distributed -p 3\nprint(1)\n")
    assert runs[0].config.nproc_per_node == 3
    assert runs[0].program.source.splitlines()[3] == "print(1)"  # line 5 of the cell, as the user sees it
    with pytest.raises(CellError) as caught:
        run(shell, "\n# note\n%%distributed\n1 +\n")
    assert caught.value.line == 4


def test_other_cells_are_left_alone(shell):
    run(shell, "# a comment\nz = 1\ntext = '''\n%%distributed\n'''")
    assert shell.user_ns["text"] == "\n%%distributed\n"
    run(shell, "#c\n\nw = 2")
    assert shell.user_ns["w"] == 2


def test_help_shows_every_flag_and_starts_nothing(shell, runs, capsys):
    run(shell, "%%distributed --help\nprint(1)")
    text = capsys.readouterr().out
    assert runs == []
    assert "--nproc-per-node" in text
    assert "doctor" in text
    assert "--init-process-group" in shell.find_magic("distributed", "cell").__doc__


# Dry run


def test_a_dry_run_says_what_would_happen(shell, runs, capsys, tmp_path):
    run(shell, "rate = 3")
    run(shell, "%%distributed -p 3 --dry-run --env TOKEN=s3cret\nprint(rate)")
    text = capsys.readouterr().out
    assert runs == []
    assert not (tmp_path / "runs").exists()
    assert "%%distributed -p 3 -e 'TOKEN=***'" in text
    assert "rate" in text
    assert "torch.distributed.run" in text
    assert (
        "ranks are forked after one import of torch" in text or "every rank is a program of its own" in text
    )
    assert text.endswith("Dry run: nothing was started.\n")
    assert "s3cret" not in text


def test_a_dry_run_says_why_ranks_are_not_forked(shell, capsys):
    run(shell, "%%distributed --no-fork --dry-run\npass")
    assert "every rank is a program of its own: --no-fork was given" in capsys.readouterr().out
    run(shell, "%%distributed --dry-run\nimport os\nos.environ['OMP_NUM_THREADS'] = '4'")
    assert "every rank is a program of its own" in capsys.readouterr().out
    run(shell, "%%distributed --protocol mpirun --dry-run\npass")
    assert "a program of its own: neither the cell nor its variables name torch" in capsys.readouterr().out
    shell.user_ns["helper"] = eval("lambda: torch.ones(3)", shell.user_ns)
    run(shell, "%%distributed --protocol mpirun --dry-run\nhelper()")
    assert "a program of its own: neither" not in capsys.readouterr().out


# Values from elsewhere


def test_every_field_has_a_trait(magics):
    assert set(FIELDS) <= set(type(magics).class_trait_names(config=True))


def test_traits_stand_above_the_default_and_below_the_panel(shell, runs, magics):
    magics.protocol = "mpirun"
    magics.timeout = "30m"
    assert magics.timeout == 1800.0
    run(shell, "%distributed config timeout=5m")
    run(shell, "%%distributed\n1")
    assert (runs[0].config.protocol, runs[0].config.timeout) == ("mpirun", 300.0)
    assert (runs[0].origins["protocol"], runs[0].origins["timeout"]) == ("traits", "panel")


def test_the_config_magic_sets_traits(shell, magics, capsys):
    run(shell, "%config DistributedMagics.nproc_per_node = 3")
    assert magics.nproc_per_node == 3
    with pytest.raises(TraitError, match="did you mean mpirun"):
        magics.protocol = "MPIrun"
    capsys.readouterr()
    run(shell, "%config DistributedMagics")
    text = capsys.readouterr().out
    assert "DistributedMagics.init_process_group" in text
    assert "Current: 3" in text


def test_traits_come_from_configuration_files_and_command_lines(tmp_path):
    config = Config()
    config.HistoryManager.enabled = False
    config.DistributedMagics.nproc_per_node = "3"
    config.DistributedMagics.env = {"A": "1"}
    shell = InteractiveShell(config=config)
    jupyter_ddp.load_ipython_extension(shell)
    magics = shell.magics_manager.registry["DistributedMagics"]
    assert magics.nproc_per_node == 3
    assert magics.env == {"A": "1"}
    jupyter_ddp.unload_ipython_extension(shell)


def test_configure_and_the_word_config_are_the_same(shell, runs, capsys):
    jupyter_ddp.configure(nproc_per_node=3)
    run(shell, "%distributed config protocol=mpirun")
    assert (
        capsys.readouterr().out
        == "%%distributed -p 3 --protocol mpirun  # from %distributed config: -p 3, --protocol mpirun\n"
    )
    run(shell, "%%distributed\n1")
    assert (runs[0].config.nproc_per_node, runs[0].config.protocol) == (3, "mpirun")
    run(shell, "%distributed config --reset")
    assert SETTINGS.values == {}


def test_config_alone_lists_values_and_their_origin(shell, capsys):
    run(shell, '%distributed config timeout=90s env=\'{"TOKEN": "s3cret"}\'')
    capsys.readouterr()
    run(shell, "%distributed config")
    text = capsys.readouterr().out
    rows = {line.split()[0]: re.split("  +", line) for line in text.splitlines()}
    assert set(FIELDS) < rows.keys()
    assert rows["timeout"] == ["timeout", "--timeout", "90s", "%distributed config"]
    assert rows["protocol"] == ["protocol", "--protocol", "torchrun", "default"]
    assert "s3cret" not in text


def test_a_wrong_value_changes_nothing(shell):
    """B76."""
    run(shell, "%distributed config -p 3")
    for wrong in ("nproc_per_node=0", "protocol=MPIrun", "instance_count=1.5", "instance_count=1000000"):
        with pytest.raises(ConfigError):
            run(shell, f"%distributed config {wrong}")
    assert SETTINGS.values == {"nproc_per_node": 3}


# Words


def test_the_panel_as_text(shell, capsys):
    run(shell, "%distributed config -N 2 -p 3")
    capsys.readouterr()
    run(shell, "%distributed")
    text = capsys.readouterr().out
    assert "total: 2 instances x 3 = 6 ranks, by torchrun" in text
    assert "line:  %%distributed -N 2 -p 3  # from %distributed config: -N 2, -p 3" in text
    assert "No runs yet" in text


def record(root, *, name=None, ended=None, phase="running"):
    """Write a run as its agent leaves it."""
    found = RunStore(root).create()
    facts = {
        "version": 1,
        "id": found.run_id,
        "name": name,
        "created": 1000.0,
        "backend": "local",
        "protocol": "torchrun",
    }
    found.write_json(
        "run.json",
        {**facts, "nnodes": 1, "nproc": 2, "world_size": 2, "pid": 7, "attempt": "a", "config": {}},
    )
    (found.path / "rank0.stdout").write_text("zero\n")
    (found.path / "rank1.stdout").write_text("one\n")
    events = [
        {"kind": "run", "seq": 1, "time": 1001.0, "phase": phase},
        {
            "kind": "out",
            "seq": 2,
            "time": 1002.0,
            "rank": 0,
            "stream": "stdout",
            "offset": 0,
            "length": 5,
            "text": "zero\n",
        },
        {
            "kind": "out",
            "seq": 3,
            "time": 1002.0,
            "rank": 1,
            "stream": "stdout",
            "offset": 0,
            "length": 4,
            "text": "one\n",
        },
    ]
    if ended:
        events.append({"kind": "run", "seq": 4, "time": 1005.0, "phase": "ended", "outcome": ended})
    text = "".join(json.dumps({"attempt": "a", "node": 0, **event}) + "\n" for event in events)
    (found.path / "node-0.jsonl").write_text(text)
    return found


def test_runs_are_listed_with_their_state(shell, capsys, tmp_path):
    done = record(tmp_path / "runs", name="base", ended="failed")
    lost = record(tmp_path / "runs")
    alive = record(tmp_path / "runs")
    lock = alive.lock()
    run(shell, "%distributed runs")
    os.close(lock)
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["id"].split() == ["id", "name", "state", "protocol", "ranks", "started", "duration", "where"]
    assert "base" in lines[done.run_id]
    assert " failed " in lines[done.run_id]
    assert " 5.0 s " in lines[done.run_id]
    assert " lost " in lines[lost.run_id]
    assert " running " in lines[alive.run_id]


def test_logs_are_printed_whole_or_by_rank(shell, capsys, tmp_path):
    found = record(tmp_path / "runs", ended="succeeded")
    run(shell, f"%distributed logs {found.run_id[:6]}")
    assert capsys.readouterr().out == "[0] zero\n[1] one\n"
    run(shell, "%distributed logs last --rank 1")
    assert capsys.readouterr().out == "one\n"
    with pytest.raises(jupyter_ddp.RunNotFoundError, match="ranks 0 to 1"):
        run(shell, "%distributed logs last --rank 2")


def test_long_logs_are_cut_at_a_line_and_say_where_they_are(shell, magics, capsys, tmp_path):
    found = record(tmp_path / "runs", ended="succeeded")
    (found.path / "rank0.stdout").write_text("zero\n" + "x" * 99 + "\n" + "y\n" * 3000)
    magics.output_cap = 4096
    run(shell, "%distributed logs last --rank 0")
    text = capsys.readouterr().out
    assert str(found.path) in text
    assert "zero" not in text
    assert len(text) < 4500


def test_stop_means_the_only_run_that_lives(shell, tmp_path):
    done = record(tmp_path / "runs", ended="succeeded")
    with pytest.raises(jupyter_ddp.RunNotFoundError, match="no run is alive"):
        run(shell, "%distributed stop")
    one, two = record(tmp_path / "runs"), record(tmp_path / "runs")
    locks = [one.lock(), two.lock()]
    with pytest.raises(jupyter_ddp.RunNotFoundError, match="several runs are alive"):
        run(shell, "%distributed stop")
    os.close(locks[1])
    with pytest.raises(jupyter_ddp.JupyterDDPError, match="does not answer: end process 7,"):
        run(shell, "%distributed stop")
    os.close(locks[0])
    assert done.run_id != one.run_id


def test_stopping_what_is_over_says_so(shell, capsys, tmp_path):
    found = record(tmp_path / "runs", ended="succeeded")
    run(shell, "%distributed stop last")
    assert capsys.readouterr().out == f"Run {found.run_id} is over: succeeded.\n"


@pytest.mark.parametrize("word", ["attach last", "detach last"])
def test_words_of_later_versions_say_so(shell, word):
    with pytest.raises(UsageError, match="comes with a later version"):
        run(shell, f"%distributed {word}")


def test_doctor_looks_at_this_machine(shell, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")
    run(shell, "%distributed doctor")
    text = capsys.readouterr().out
    assert f"Python {sys.version.split()[0]}" in text
    assert "torch" in text
    assert "mpirun" in text
    assert str(tmp_path / "runs") in text
    assert "OMPI_COMM_WORLD_SIZE" in text
    assert (
        "ranks are forked after one import of torch" in text or "every rank is a program of its own" in text
    )
    assert text.splitlines()[-1].startswith(("Runs can start", "A run would not start"))
    assert not (tmp_path / "runs").exists()


def test_doctor_shows_what_a_backend_finds(shell, capsys):
    from jupyter_ddp.backends import Problem

    with ScriptedBackend(problems=[Problem("fail", "no power", "plug it in")]).installed():
        run(shell, "%distributed config backend=scripted")
        run(shell, "%distributed doctor")
    assert "FAIL  no power: plug it in" in capsys.readouterr().out


# Hints


def test_a_name_that_the_last_cell_made_is_hinted_at(shell, runs, capsys):
    run(shell, "%%distributed\nloss = 1")
    outcome = shell.run_cell("print(loss)")
    assert isinstance(outcome.error_in_exec, NameError)
    assert "--pull loss" in capsys.readouterr().err
    shell.run_cell("print(lost)")
    assert "--pull" not in capsys.readouterr().err


@pytest.mark.parametrize("how", ["failed", "interrupted"])
def test_a_run_that_ended_badly_made_its_names_too(shell, runs, capsys, how):
    runs.error, runs.interrupted = how, how == "interrupted"
    shell.run_cell("%%distributed\nloss = 1\n1/0")
    capsys.readouterr()
    shell.run_cell("print(loss)")
    assert "--pull loss" in capsys.readouterr().err


def test_a_run_that_did_not_start_has_made_nothing(shell, runs, capsys):
    run(shell, "%%distributed\nloss = 1")
    runs.refused = True
    shell.run_cell("%%distributed\nzz = 1")
    capsys.readouterr()
    shell.run_cell("print(zz)")
    assert "--pull" not in capsys.readouterr().err
    shell.run_cell("print(loss)")  # the last one that ran
    assert "--pull loss" in capsys.readouterr().err


# In and out


def test_unloading_takes_everything_out(shell, magics):
    shell.run_line_magic("unload_ext", "jupyter_ddp")
    assert shell.find_cell_magic("distributed") is None
    assert shell.find_line_magic("distributed") is None
    assert magics not in shell.configurables
    assert not any(
        "distributed" in getattr(m, "matcher_identifier", "") for m in shell.Completer.custom_matchers
    )
    assert not any(t.__module__.startswith("jupyter_ddp") for t in shell.input_transformers_cleanup)
    assert magics.after_cell not in shell.events.callbacks["post_run_cell"]
    shell.run_line_magic("load_ext", "jupyter_ddp")
    assert shell.find_cell_magic("distributed") is not None


def test_loading_twice_is_loading_once(shell):
    jupyter_ddp.load_ipython_extension(shell)
    names = [t.__module__ for t in shell.input_transformers_cleanup]
    assert names.count("jupyter_ddp.magics.first_line") == 1
    assert sum(isinstance(one, DistributedMagics) for one in shell.configurables) == 1


def test_the_shells_completer_knows_the_line(shell):
    from IPython.core.completer import provisionalcompleter

    def complete(code):
        with provisionalcompleter():
            return [one.text for one in shell.Completer.completions(code, len(code))]

    assert complete("%%distributed --protocol mp") == ["mpirun"]
    assert complete("%%distributed --nproc") == ["--nproc-per-node"]
    assert complete("%%distributed --backend lo") == ["local"]
    assert complete("%distributed doc") == ["doctor"]


# The package


def test_public_names_are_there_and_lazy():
    assert all(getattr(jupyter_ddp, name) is not None for name in jupyter_ddp.__all__)
    assert set(jupyter_ddp.__all__) <= set(dir(jupyter_ddp))
    with pytest.raises(AttributeError, match="nowhere"):
        _ = jupyter_ddp.nowhere


def test_launch_is_a_function_whatever_was_imported_before():
    program = "import jupyter_ddp, jupyter_ddp.magics; from jupyter_ddp import launch; launch.__call__; jupyter_ddp.launch.__call__"
    subprocess.run([sys.executable, "-c", program], check=True)
