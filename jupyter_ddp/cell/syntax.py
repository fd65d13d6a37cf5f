"""Facts about pieces of Python syntax that the walk over names asks for. Pure functions."""

from __future__ import annotations

import ast
import symtable
import warnings
from typing import Final

_FLAGS: Final = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def compile_python(text: str) -> ast.Module:
    """Return the syntax tree of a piece of Python that compiles; top-level ``await`` is allowed.

    Raises:
        SyntaxError: It does not compile (or another error of `compile`).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks show the compiler's warnings
        tree = compile(text, "<cell>", "exec", _FLAGS | ast.PyCF_ONLY_AST, dont_inherit=True)
        compile(tree, "<cell>", "exec", _FLAGS, dont_inherit=True)
    assert isinstance(tree, ast.Module)  # noqa: S101 - what ONLY_AST gives
    return tree


def parse(text: str) -> ast.Module | None:
    """Return the syntax tree of a piece of Python, or None when it is none."""
    try:
        return compile_python(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def leaves(block: list[ast.stmt]) -> bool:
    """Whether a block never goes on to what follows it."""
    return bool(block) and isinstance(block[-1], (ast.Raise, ast.Return, ast.Continue, ast.Break))


def turns(iterable: ast.expr) -> bool:
    """Whether a loop over this certainly turns once: ``range(3)``, a literal with elements."""
    if isinstance(iterable, (ast.List, ast.Tuple, ast.Set)):
        return any(not isinstance(element, ast.Starred) for element in iterable.elts)
    return (
        isinstance(iterable, ast.Call)
        and isinstance(iterable.func, ast.Name)
        and iterable.func.id == "range"
        and len(iterable.args) == 1
        and isinstance(iterable.args[0], ast.Constant)
        and isinstance(iterable.args[0].value, int)
        and iterable.args[0].value > 0
    )


def is_shell(node: ast.expr) -> bool:
    """Whether an expression is ``get_ipython()``, as transformed magics have it."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "get_ipython"


def arguments(args: ast.arguments) -> list[ast.arg]:
    """Return all arguments of a function in one list."""
    rest = [arg for arg in (args.vararg, args.kwarg) if arg is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *rest]


def names_bound_in(node: ast.AST) -> set[str]:
    """Return names that some scope in a function binds."""
    bound = {
        part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }
    return bound | {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}


def globals_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> tuple[set[str], set[str]]:
    """Return the global names that a function's body looks up, and those that it binds (``global x``)."""
    statement = ast.Expr(node) if isinstance(node, ast.Lambda) else node
    text = ast.unparse(ast.fix_missing_locations(ast.Module([statement], [])))
    needs: set[str] = set()
    binds: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tables = list(symtable.symtable(text, "<cell>", "exec").get_children())
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_global():
                needs.add(symbol.get_name())  # also one that it binds: ``x += 1`` counts as a binding
                if symbol.is_declared_global() and symbol.is_assigned():
                    binds.add(symbol.get_name())
    return needs, binds
