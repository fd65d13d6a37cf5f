"""Rules for every file that is committed: what it may not name, and what must be there."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import jupyter_ddp

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def committed() -> list[Path]:
    """Return the files that git has or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def lines() -> list[tuple[str, str]]:
    """Return (where, text) of each line of each text file."""
    found = []
    for path in committed():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a picture
            continue
        where = path.relative_to(ROOT)
        found += [(f"{where}:{number}", line) for number, line in enumerate(text.splitlines(), 1)]
    return found


REGISTRIES = ("pypi", "pythonhosted", "npmjs", "yarnpkg", "debian", r"download\.pytorch", "anaconda")

# Patterns are put together from parts, so that this file does not match itself.
FORBIDDEN = {
    "the host of a package registry": rf"\b({'|'.join(REGISTRIES)})" + r"\.(org|com)\b",
    "a path of somebody's machine": r"(?<![\w.])/(root|work|home/(?!me/)\w+)" + r"/",
    "a note to self": r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
    "a merge conflict": r"^(<<<<<<<|>>>>>>>) " + r"\S",
}


@pytest.mark.parametrize("pattern", FORBIDDEN.values(), ids=FORBIDDEN)
def test_no_file_has(pattern):
    wrong = [f"{where}: {text.strip()[:120]}" for where, text in lines() if re.search(pattern, text)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "LICENSE", "docs/architecture.md", ".ci/run"])
def test_what_people_look_for_is_there(name):
    assert (ROOT / name).stat().st_size > 0


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md", "CHANGELOG.md"])
def test_a_link_leads_somewhere(page):
    """To a file of the repository, or to a heading of the page, named as GitHub names it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    headings = [
        re.sub(r"[^\w\- ]", "", title).lower() for title in re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    ]
    places = {f"#{heading.strip().replace(' ', '-')}" for heading in headings}
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in target]
    lost = [
        target
        for target in targets
        if not (
            target in places if target.startswith("#") else (ROOT / page).parent.joinpath(target).is_file()
        )
    ]
    assert not lost


def test_readme_shows_pictures_that_load_quickly():
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(pictures) >= 2
    for picture in pictures:
        assert (ROOT / picture).stat().st_size < 150_000


def test_architecture_speaks_of_modules_that_are_there():
    """The first column of its tables of parts names modules, and `name` with a slash a package."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    package = Path(jupyter_ddp.__file__).parent
    parts = text.partition("\n## The parts\n")[2].partition("\n## On an instance")
    runtime = parts[2].partition("\n**")[0]
    assert runtime
    for where, table in ((package, parts[0]), (package / "runtime", runtime)):
        named = re.findall(r"`([\w/]+)`", "".join(re.findall(r"^\| (`[^|]*)\|", table, re.MULTILINE)))
        assert len(named) > 10
        missing = [
            name
            for name in named
            if not ((where / name).is_dir() if name.endswith("/") else (where / f"{name}.py").is_file())
        ]
        assert not missing


def test_the_licence_is_the_one_that_the_metadata_names():
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_the_package_has_types():
    assert (Path(jupyter_ddp.__file__).with_name("py.typed")).exists()


def test_ci_can_be_run():
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_the_changelog_has_a_place_for_the_next_change():
    assert "\n## [Unreleased]\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] >= ["01_first_steps", "02_train_ddp"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_what_running_it_left(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for cell in notebook["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
        assert cell["metadata"].keys() <= {"tags"}
