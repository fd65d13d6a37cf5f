"""The peers' environment: ``.venv-bench``, made once, with the extra ``bench``; one that fails stops no other."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:  # pip has one in every environment
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).parents[1]
WHERE = ROOT / ".venv-bench"
PYTHON = WHERE / "bin" / "python"


def wanted() -> list[str]:
    """Return the requirements of the extra ``bench``."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras: dict[str, list[str]] = tomllib.load(file)["project"]["optional-dependencies"]
    return extras["bench"]


def prepare() -> None:
    """Make the environment and install what is missing; tell what could not be installed."""
    if not PYTHON.exists():
        print(f"Making {WHERE.name} for the peers (once)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(WHERE)], check=True)
    (WHERE / ".gitignore").write_text("*\n", encoding="ascii")
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--quiet"]
    for requirement in wanted():
        name = requirement.partition("==")[0].partition(">")[0]
        if version(name) is None:
            print(f"Installing {requirement} into {WHERE.name}", flush=True)
            done = subprocess.run(
                [*pip, "--constraint", str(ROOT / "constraints.txt"), requirement], check=False
            )
            version.cache_clear()
            if done.returncode:
                print(f"{requirement} could not be installed", flush=True)


@cache
def version(name: str) -> str | None:
    """Return the version of a package in the peers' environment, None when it is not there."""
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    if not PYTHON.exists():
        return None
    done = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
