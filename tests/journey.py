"""A notebook, a rank and the way between them and back, in two fresh processes: `__main__` matters to pickling.

The notebook is a real IPython shell in a process of its own; the rank is a bare Python that does with the payload what
a worker does. Nothing is launched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

_NOTEBOOK = """
def drive():
    import json, os, subprocess, sys
    from pathlib import Path
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    job = json.loads(Path(sys.argv[1]).read_text())
    run = Path(job["run"])
    sys.path[0] = job["folder"]
    os.chdir(job["folder"])
    config = Config()
    config.HistoryManager.enabled = False
    main = sys.modules["__main__"]
    shell = InteractiveShell.instance(config=config, user_module=main, user_ns=vars(main))
    shell.showtraceback = lambda *args, **kw: None
    result = {"error": None}

    def tell(**facts):
        result.update(facts)
        (run / "result.json").write_text(json.dumps(result))

    for text in job["notebook"]:
        shell.run_cell(text, store_history=True).raise_error()

    from jupyter_ddp.capture import capture
    from jupyter_ddp.cell import compile_cell
    from jupyter_ddp.errors import CaptureError, ValueTravelError
    from jupyter_ddp.values import load_value

    try:
        payload = capture(compile_cell(job["cell"], shell), shell.user_ns, push=job["push"])
    except CaptureError as error:
        tell(error=str(error), guilty=list(error.names))
        return
    report = payload.report
    tell(
        names=list(payload.names), nbytes=payload.nbytes, notes=list(report.notes), table=report.text(),
        how={item.name: item.how for item in report.items}, sizes={item.name: item.nbytes for item in report.items},
    )
    size = payload.write(run / "payload.bin")
    assert size == payload.nbytes, (size, payload.nbytes)
    rank = subprocess.run([sys.executable, job["rank"], sys.argv[1]], cwd="/", capture_output=True, text=True)
    tell(out=rank.stdout, err=rank.stderr)
    pulled, refused = {}, {}
    for name in job["pull"]:
        if (run / name).exists():
            try:
                pulled[name] = load_value(run / name, run)
            except ValueTravelError as error:
                refused[name] = str(error)
    tell(pulled=list(pulled), not_loaded=refused)
    assert not job["after"] or len(pulled) == len(job["pull"]), (rank, refused)
    shell.user_ns["pulled"] = pulled
    shell.run_cell(job["after"]).raise_error()

drive()
"""

_RANK = """
import json, sys, types
from pathlib import Path

job = json.loads(Path(sys.argv[1]).read_text())
run = Path(job["run"])
main = types.ModuleType("__main__")
sys.modules["__main__"] = main
sys.path[0] = ""
from jupyter_ddp.errors import ValueTravelError
from jupyter_ddp.values import read_payload, save_value

loaded = read_payload(run / "payload.bin", 0)
vars(main).update(loaded.namespace)
facts = {"notes": list(loaded.notes), "saved": {}, "not_saved": {}}
try:
    exec(compile(job["cell"], "<cell>", "exec"), vars(main))
    for name in job["pull"]:
        try:
            saved = save_value(run / name, vars(main)[name], name)
            facts["saved"][name] = [saved.size, list(saved.notes)]
        except ValueTravelError as error:
            facts["not_saved"][name] = str(error)
finally:
    (run / "rank.json").write_text(json.dumps(facts))
"""


@dataclass(frozen=True)
class Journey:
    """What became of it. `facts` is what the notebook saw, `rank` what the rank saw."""

    facts: dict[str, Any]
    rank: dict[str, Any]
    run: Path

    @property
    def out(self) -> list[str]:
        """The lines that the rank printed."""
        return str(self.facts["out"]).splitlines()


def travel(
    tmp_path: Path,
    notebook: str | list[str],
    cell: str,
    *,
    pull: tuple[str, ...] = (),
    after: str = "",
    push: tuple[str, ...] | None = None,
    fails: bool = False,
) -> Journey:
    """Run notebook cells, send what ``cell`` reads to a rank, run it there, bring ``pull`` back, run ``after``.

    Args:
        tmp_path: An empty folder; the notebook stands in ``tmp_path / "book"``.
        notebook: Cells that run in the notebook first.
        cell: The distributed cell.
        pull: Names that come back; ``after`` finds them in the dictionary ``pulled``.
        after: A notebook cell that runs at the end; its assertions count.
        push: As of `capture`.
        fails: Whether the rank's cell may raise.
    """
    folder, run = tmp_path / "book", tmp_path / "run"
    folder.mkdir(exist_ok=True)
    run.mkdir(mode=0o700)
    cells = [notebook] if isinstance(notebook, str) else notebook
    scripts = {"notebook.py": _NOTEBOOK, "rank.py": _RANK}
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    job = {
        "run": str(run),
        "folder": str(folder),
        "notebook": cells,
        "cell": cell,
        "pull": pull,
        "after": after,
    }
    job |= {"push": push, "rank": str(tmp_path / "rank.py")}
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "notebook.py"), str(tmp_path / "job.json")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads((run / "result.json").read_text())
    assert fails or facts["error"] or not facts["err"], facts["err"]
    rank = run / "rank.json"
    return Journey(facts, json.loads(rank.read_text()) if rank.exists() else {}, run)
