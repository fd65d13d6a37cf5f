# ruff: noqa: D102, N815 - one method a node, named as ast names them
"""Which notebook names a piece of Python reads and assigns: an order-aware walk over its syntax tree.

A name is *read* when it may be looked up in the notebook before the code has certainly assigned it. When in doubt
(assigned in one branch, in a loop that may not turn, in a function that is called later) it is a read: a name too many
costs bytes, a name too few is a NameError on every rank. Whether a name exists in the notebook is not asked here.

Bodies of functions and methods run later. What they read counts from the first mention of the function or class, so
functions that call each other, defined in any order, need nothing from the notebook.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jupyter_ddp.cell.syntax import arguments, globals_of, is_shell, leaves, names_bound_in, parse, turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Magic = Callable[["NameWalk", str, tuple[str, ...]], None]

_AT_NAME = re.compile(r"@\s*([A-Za-z_]\w*)")
_NAMESPACES = frozenset({"globals", "locals", "vars"})
_EVALUATES = frozenset({"eval", "exec"})


@dataclass(slots=True)
class _Loop:
    """What is bound wherever a loop is left, and wherever a turn of it ends early."""

    breaks: list[set[str]] = field(default_factory=list)
    turns: list[set[str]] = field(default_factory=list)


@dataclass
class NameWalk(ast.NodeVisitor):
    """One walk; feed it modules with `run`, then read `reads` and `assigns`.

    Attributes:
        magic: Called for ``get_ipython().<method>("…", …)`` with the walk, the method's name and the literal arguments.
        reads: Names that may come from the notebook.
        assigns: Names that the code may bind at its top level.
        calls: Names of functions that the code calls, as written (the last part of a dotted name).
    """

    magic: Magic
    reads: set[str] = field(default_factory=set)
    assigns: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    _bound: set[str] = field(default_factory=set)
    _locals: list[set[str]] = field(default_factory=list)
    _later: dict[str, set[str]] = field(default_factory=dict)
    _loops: list[_Loop] = field(default_factory=list)

    def run(self, tree: ast.AST) -> None:
        """Walk a whole module in the order in which it runs."""
        self.follow(tree)
        for name in list(self._later):  # defined here and called from who knows where
            self._mention(name)

    def follow(self, tree: ast.AST) -> None:
        """Walk code that runs now, as a part of what is walked."""
        self._all(getattr(tree, "body", [tree]))

    def read(self, names: Iterable[str]) -> None:
        """Note that the code looks up these names now."""
        for name in set(names):
            if not self._is_bound(name):
                self.reads.add(name)
            self._mention(name)

    def _mention(self, name: str) -> None:
        """From here on a function or class of the cell may be called: what its body reads is read."""
        self.read(self._later.pop(name, ()))

    def assign(self, names: Iterable[str]) -> None:
        """Note that the code has certainly bound these names."""
        for name in names:
            if self._locals:
                self._locals[-1].add(name)
            else:
                self._bound.add(name)
                self.assigns.add(name)

    def isolated(self, tree: ast.AST) -> None:
        """Walk code that runs now but whose assignments do not stay (``%timeit``)."""
        inner = NameWalk(self.magic, _bound=set(self._bound), _later=self._later)
        inner.follow(tree)
        self.read(inner.reads)
        self.calls |= inner.calls

    # -- statements ---------------------------------------------------------------------------------------------

    def visit(self, node: ast.AST | None) -> None:
        """Walk a node, if there is one."""
        if node is not None:
            super().visit(node)

    def _all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            self.visit(node)

    def _branches(self, *blocks: list[ast.stmt]) -> None:
        """Walk blocks of which one runs: what all that go on bind is bound afterwards."""
        before = set(self._bound)
        ends: list[set[str]] = []
        for block in blocks:
            self._bound = set(before)
            self._all(block)
            if not leaves(block):
                ends.append(self._bound)
        self._bound = set.intersection(*ends) if ends else before

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._branches(node.body, node.orelse)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        before = set(self._bound)
        self.visit(node.target)
        self._loop(node, None if turns(node.iter) else before)

    visit_AsyncFor = visit_For

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
        self._loop(node, None if endless else set(self._bound), endless=endless)

    def _loop(
        self, node: ast.For | ast.AsyncFor | ast.While, unturned: set[str] | None, *, endless: bool = False
    ) -> None:
        """Walk body and ``else`` of a loop: afterwards is bound what is on every way out of it.

        `unturned` is what is bound if it does not turn at all, None if it certainly does.
        """
        before = set(self._bound)
        loop = _Loop()
        self._loops.append(loop)
        self._all(node.body)
        self._loops.pop()
        ends = loop.turns if leaves(node.body) else [*loop.turns, self._bound]
        ends = [] if endless else ends if unturned is None else [*ends, unturned]
        self._bound = set.intersection(*ends) if ends else before
        self._all(node.orelse)
        exits = [*loop.breaks, self._bound] if ends and not leaves(node.orelse) else loop.breaks
        self._bound = set.intersection(*exits) if exits else before

    def visit_Break(self, _: ast.Break) -> None:
        self._loops[-1].breaks.append(set(self._bound))

    def visit_Continue(self, _: ast.Continue) -> None:
        self._loops[-1].turns.append(set(self._bound))

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        before = set(self._bound)
        swallows = False
        for item in node.items:
            self.visit(item.context_expr)
            self.visit(item.optional_vars)
            swallows |= "suppress" in ast.dump(item.context_expr) or "raises" in ast.dump(item.context_expr)
        self._all(node.body)
        if swallows:
            self._bound = before

    visit_AsyncWith = visit_With

    def visit_Try(self, node: ast.Try) -> None:
        before = set(self._bound)
        self._all(node.body)
        self._all(node.orelse)
        ends = [] if leaves(node.orelse or node.body) else [self._bound]
        for handler in node.handlers:
            self._bound = set(before)
            self.visit(handler.type)
            self.assign([handler.name] if handler.name else [])
            self._all(handler.body)
            self._bound.discard(handler.name or "")
            if not leaves(handler.body):
                ends.append(self._bound)
        after = set.intersection(*ends) if ends else before
        self._bound = set(before)  # `finally` may run after nothing of the body did
        self._all(node.finalbody)
        self._bound |= after

    visit_TryStar = visit_Try

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        before = set(self._bound)
        for case in node.cases:
            self._bound = set(before)
            self.visit(case.pattern)
            self.visit(case.guard)
            self._all(case.body)
        self._bound = before

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self.visit(node.pattern)
        self.assign([node.name] if node.name else [])

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        self.assign([node.name] if node.name else [])

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self._all([*node.keys, *node.patterns])
        self.assign([node.rest] if node.rest else [])

    def visit_Assign(self, node: ast.Assign) -> None:
        self._all([node.value, *node.targets])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.read([node.target.id])
        self._all([node.value, node.target])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._all([node.annotation, node.value])
        if node.value is not None or not isinstance(node.target, ast.Name):
            self.visit(node.target)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        whole = isinstance(node, ast.Import)
        self.assign(
            alias.asname or (alias.name.split(".")[0] if whole else alias.name)
            for alias in node.names
            if alias.name != "*"
        )

    visit_ImportFrom = visit_Import

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        params = {param.name for param in getattr(node, "type_params", [])}
        self._all(node.decorator_list)
        self._locals.append(params)
        self._all([*node.bases, *(keyword.value for keyword in node.keywords)])
        outer, self._later = self._later, {}
        self._all(node.body)
        methods, self._later = self._later, outer
        self._locals.pop()
        self._define(node.name, set().union(*methods.values()), at_once=bool(node.decorator_list))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._all(node.decorator_list)
        self._define(node.name, self._function(node), at_once=bool(node.decorator_list))

    def _define(self, name: str, needs: set[str], *, at_once: bool) -> None:
        """Bind a function or class; a decorator may call it at once."""
        self.assign([name])
        self._later.setdefault(name, set()).update(needs)
        if at_once:
            self._mention(name)

    visit_AsyncFunctionDef = visit_FunctionDef

    # -- expressions --------------------------------------------------------------------------------------------

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.assign([node.id])
            return
        self.read([node.id])
        if isinstance(node.ctx, ast.Del):
            self._bound.discard(node.id)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        kept, self._locals = self._locals, []  # it binds outside of comprehensions
        self.assign([node.target.id])
        self._locals = kept

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.read(self._function(node))  # an expression may call it at once

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        self.visit(node.generators[0].iter)
        before = set(self._bound)
        self._locals.append(set())
        for position, generator in enumerate(node.generators):
            if position:
                self.visit(generator.iter)
            self.visit(generator.target)
            self._all(generator.ifs)
        self._all([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt])
        self._locals.pop()
        self._bound = before  # it may not turn

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        self._maybe(node.values[1:])

    def visit_Compare(self, node: ast.Compare) -> None:
        self._all([node.left, node.comparators[0]])
        self._maybe(node.comparators[1:])

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self._maybe([node.body])
        self._maybe([node.orelse])

    def _maybe(self, nodes: Iterable[ast.AST]) -> None:
        before = set(self._bound)
        self._all(nodes)
        self._bound = before

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if (
            isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Name)
            and node.value.func.id in _NAMESPACES
            and isinstance(node.slice, ast.Constant)
            and isinstance(node.slice.value, str)
        ):
            self.read([node.slice.value])
        self._all([node.value, node.slice])

    def visit_Call(self, node: ast.Call) -> None:
        self._all(ast.iter_child_nodes(node))
        self.read(self._hidden(node))

    def _hidden(self, node: ast.Call) -> set[str]:
        """Return names that a call reads out of its string literals; run magics, which may also bind."""
        function = node.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        self.calls.add(name)
        texts = [
            part.value
            for part in ast.walk(node)
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        if isinstance(function, ast.Attribute):
            if is_shell(function.value):
                literal = tuple(arg.value for arg in node.args if isinstance(arg, ast.Constant))
                self.magic(self, name, tuple(text for text in literal if isinstance(text, str)))
                return set()
            if name in {"query", "eval"}:
                found = {match for text in texts for match in _AT_NAME.findall(text)}
                pandas = isinstance(function.value, ast.Name) and function.value.id in {"pd", "pandas"}
                return found | (names_in(texts) if pandas else set())
            return set()
        return names_in(texts[:1]) if name in _EVALUATES else set()

    # -- functions ----------------------------------------------------------------------------------------------

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
        """Read what a function's statement reads, and return what its body will."""
        params = {param.name for param in getattr(node, "type_params", [])}
        self._locals.append(params)
        self._all([*node.args.defaults, *node.args.kw_defaults])
        if not isinstance(node, ast.Lambda):
            self._all(argument.annotation for argument in arguments(node.args))
            self.visit(node.returns)
        self._locals.pop()
        needs, binds = globals_of(node)
        inside = NameWalk(self.magic)
        for part in node.body if isinstance(node.body, list) else [node.body]:
            for call in ast.walk(part):
                if isinstance(call, ast.Call):
                    inside.read(inside._hidden(call))
        self.calls |= inside.calls
        # a lambda sees the names of a comprehension around it; a method does not see those of its class
        scope = set().union(*self._locals) if isinstance(node, ast.Lambda) else set()
        self.assigns |= binds
        return (needs | (inside.reads - names_bound_in(node))) - scope

    def _is_bound(self, name: str) -> bool:
        return name in self._bound or any(name in scope for scope in self._locals)


def names_in(texts: Iterable[str]) -> set[str]:
    """Return the names that pieces of Python read; text that is not Python reads none."""
    found: set[str] = set()
    for text in texts:
        tree = parse(text.strip())
        if tree is not None:
            walk = NameWalk(lambda *_: None)
            walk.run(tree)
            found |= walk.reads
    return found
