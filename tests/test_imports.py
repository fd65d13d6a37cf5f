"""Who may import whom. The tables are the law; a new module or a new arrow has to be written into them first."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "jupyter_ddp"
ROOT = Path(__file__).parents[1] / PACKAGE


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# From top to bottom. A module may import what stands below it, and neighbours in its own row as long as nobody goes
# in circles. A package's modules stand where the package stands.
LAYERS = (
    names("testing"),
    names("magics"),
    # what happens in the notebook
    names(
        "capture carrying cell display doctor hints history interrupt lab memory panel preflight run runner settings"
    ),
    # where ranks run, what is on disk, and what is made of it
    names("backends rundir bundles facts locks logend tail transcript travel values result render line"),
    # the view and its parts; command lines
    names("view launchers"),
    # words that all speak
    names("events config words"),
    names("errors"),
)

# What runs on an instance stands beside the layers. Of the notebook's side it gets these, and needs little of others;
RUNTIME_IMPORTS = names("config errors events launchers travel values words")
RUNTIME_NEEDS = names("IPython boto3 botocore cloudpickle matplotlib_inline numpy torch traitlets")
# the notebook's side imports of it only what both sides read and write.
SHARED = names("runtime.process runtime.record runtime.room runtime.wire")
SHARED_WITH = names("backends run rundir testing transcript")

# The pure core: text and values in, text and values out. No files, processes, clocks, environment or threads, so
# these are all the modules that they may import, and all that they may use of os.
PURE = names("view render line config events launchers words errors")
PURE_IMPORTS = names(
    """
    __future__ abc ast base64 bisect codecs collections contextlib copy dataclasses datetime difflib enum fnmatch
    functools hashlib html io itertools json keyword math numbers operator os posixpath re shlex signal string symtable
    textwrap types typing unicodedata warnings
    """
)
PURE_OS = names("PathLike fspath pathsep")

# Modules of others that take long to import, or that not everybody has: only inside functions, only in these places.
HEAVY = {
    "torch": names("runtime travel"),
    "numpy": names("runtime travel"),
    "boto3": names("backends.sagemaker runtime.mailbox"),
    "botocore": names("backends.sagemaker runtime.mailbox"),
    "sagemaker": names("backends.sagemaker"),
    "sagemaker_core": names("backends.sagemaker"),
    "matplotlib": names("runtime"),
    "mpi4py": names(""),
    "pandas": names(""),
}


@dataclass(frozen=True)
class Import:
    """One import statement's target, as the module that has it names it."""

    source: str  # "runtime.worker", "" for the package itself
    target: str  # "events" for our own modules, "os.path" for others
    ours: bool
    lazy: bool  # inside a function
    names: bool  # `from target import …`
    line: int

    def __str__(self) -> str:
        return f"{self.source or '__init__'} (line {self.line}) -> {self.target}"


def part(module: str) -> str:
    """Return the name under which a module stands in the tables: that of its package."""
    return module.partition(".")[0]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip(".")


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def targets(node: ast.Import | ast.ImportFrom, source: str) -> list[str]:
    """Return the dotted names that a statement imports; `from package import module` names the module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        above = (PACKAGE, *source.split("."))
        if MODULES[source].name != "__init__.py":
            above = above[:-1]
        base = ".".join((*above[: len(above) - node.level + 1], *([base] if base else [])))
    names = [f"{base}.{alias.name}" for alias in node.names]
    return [name if name.removeprefix(f"{PACKAGE}.") in MODULES else base for name in names]


def imports_of(source: str) -> list[Import]:
    """Return all imports of a module but those that only a type checker sees."""
    found: list[Import] = []

    def walk(node: ast.AST, *, lazy: bool) -> None:
        if for_types_only(node):
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            for target in targets(node, source):
                ours = part(target) == PACKAGE
                name = target.removeprefix(PACKAGE).lstrip(".") if ours else target
                found.append(Import(source, name, ours, lazy, isinstance(node, ast.ImportFrom), node.lineno))
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            walk(child, lazy=lazy)

    walk(ast.parse(MODULES[source].read_text(encoding="utf-8"), filename=source), lazy=False)
    return found


IMPORTS = [one for source in MODULES for one in imports_of(source)]
OURS = [one for one in IMPORTS if one.ours]


def layer(module: str) -> int:
    for number, row in enumerate(LAYERS):
        if part(module) in row:
            return number
    pytest.fail(f"{module} stands in no table of {Path(__file__).name}")


def listed(wrong: list[Import]) -> str:
    return "\n".join(map(str, wrong))


def test_every_module_stands_in_the_tables():
    known = {"", "runtime"}.union(*LAYERS)
    assert {part(module) for module in MODULES} <= known


def test_imports_go_down():
    wrong = [
        one
        for one in OURS
        if part(one.source) not in ("", "runtime")
        and part(one.target) not in ("", "runtime")
        and layer(one.source) > layer(one.target)
    ]
    assert not wrong, listed(wrong)


def test_nobody_takes_names_from_the_package_itself():
    """They are for users, and are looked up lazily, from the top. `import jupyter_ddp`, for its path, is no such thing."""
    wrong = [one for one in OURS if one.target == "" and one.names]
    assert not wrong, listed(wrong)


def test_nobody_goes_in_circles():
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for one in OURS:
        if one.source != one.target:
            graph[one.source].add(one.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_what_runs_on_an_instance_knows_nothing_of_the_notebook():
    """Neither itself nor through what it imports: these modules are all that is sent there."""
    arrows = defaultdict(set)
    for one in OURS:
        arrows[one.source].add(one.target)
    reached, new = set(), {module for module in MODULES if part(module) == "runtime"}
    while new:
        reached |= new
        new = set().union(*(arrows[module] for module in new)) - reached
    assert {part(module) for module in reached} - {"", "runtime"} <= RUNTIME_IMPORTS


def test_what_runs_on_an_instance_needs_little_there():
    wrong = [
        one
        for one in IMPORTS
        if not one.ours
        and part(one.source) in RUNTIME_IMPORTS | {"runtime"}
        and part(one.target) not in sys.stdlib_module_names | RUNTIME_NEEDS
    ]
    assert not wrong, listed(wrong)


def test_the_notebook_imports_of_the_runtime_only_what_both_sides_share():
    wrong = [
        one
        for one in OURS
        if part(one.target) == "runtime"
        and part(one.source) != "runtime"
        and not (part(one.source) in SHARED_WITH and one.target in SHARED)
    ]
    assert not wrong, listed(wrong)


def test_the_core_is_pure():
    wrong = [
        one
        for one in IMPORTS
        if not one.ours and part(one.source) in PURE and part(one.target) not in PURE_IMPORTS
    ]
    assert not wrong, listed(wrong)


def test_the_core_asks_the_system_nothing():
    used = {
        f"{module} (line {node.lineno}): os.{node.attr}"
        for module, path in MODULES.items()
        if part(module) in PURE
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os" and node.attr not in PURE_OS
    }
    assert not used, "\n".join(used)


def test_the_core_imports_of_this_package_only_the_core():
    wrong = [one for one in OURS if part(one.source) in PURE and part(one.target) not in PURE]
    assert not wrong, listed(wrong)


def test_heavy_modules_are_imported_inside_functions():
    wrong = [one for one in IMPORTS if not one.ours and not one.lazy and part(one.target) in HEAVY]
    assert not wrong, listed(wrong)


def test_heavy_modules_are_imported_where_they_belong():
    wrong = [
        one
        for one in IMPORTS
        if not one.ours
        and part(one.target) in HEAVY
        and not any(one.source.startswith(place) for place in HEAVY[part(one.target)])
    ]
    assert not wrong, listed(wrong)


def test_importing_the_package_loads_next_to_nothing():
    """`import jupyter_ddp` stays cheap for those who import it at the top of a script."""
    program = f"import sys; import {PACKAGE}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    unwanted = {"IPython", "ipywidgets", "traitlets", "cloudpickle", "asyncio", "subprocess", *HEAVY}
    assert not unwanted & {part(module) for module in loaded}
