"""Splits a magic line into words, and puts the notebook's values into them.

The line is split as a POSIX shell splits: quotes group, a backslash protects, ``#`` starts a comment where a word
would start. Then, outside single quotes,

- ``{expr}`` is the value of a Python expression of the notebook, with ``!r`` and ``:spec`` as in an f-string;
- ``$name`` and ``${name}`` are the value of a variable;
- ``{{``, ``}}`` and ``$$`` are ``{``, ``}`` and ``$``.

Braces that hold no Python expression stay as they are, and so does a mapping with constant keys: JSON and dicts need no
quoting against expansion, quoted or not. A name that the notebook does not have is an error, never silent text.
"""

from __future__ import annotations

import ast
import re
import shlex
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_OPEN, _CLOSE = "\ue000", "\ue001"  # private use: marks of a place to fill, which shlex takes for letters
_PLACE: Final = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
_SPECIAL: Final = ("$", "{", "}")
_QUOTED: Final = {"'": re.compile(r"'[^']*'"), '"': re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)}
_NAME: Final = re.compile(r"\$(?:\{([^\W\d]\w*)\}|([^\W\d]\w*))")
_CONVERT: Final[dict[str, Callable[[Any], str]]] = {"r": repr, "s": str, "a": ascii}


class Word(str):
    """A word that is one expansion and nothing else: its text, and the value itself in ``value``."""

    __slots__ = ("value",)
    value: Any

    @classmethod
    def of(cls, value: object) -> Word:
        """Return the word of a value."""
        word = cls(value)
        word.value = value
        return word


def split(line: str, namespace: Mapping[str, Any] | None = None) -> list[str]:
    """Return the words of a magic line, expanded in the notebook's namespace; without one, nothing is expanded.

    A word that is a single expansion comes as a `Word`, which keeps the value itself.

    Raises:
        UsageError: A quote is not closed, an expression fails, or a name is not in the notebook.
    """
    scanner = _Scanner(line.replace(_OPEN, "").replace(_CLOSE, ""), namespace)
    try:
        words = shlex.split(scanner.marked(), comments=False, posix=True)
    except ValueError:
        raise UsageError(
            "a quote in the line is not closed: close it, or write \\' for an apostrophe."
        ) from None
    return [scanner.fill(word) for word in words]


class _Scanner:
    """One pass over a line: cuts the comment, puts marks where something is expanded, leaves the rest to shlex."""

    def __init__(self, line: str, namespace: Mapping[str, Any] | None) -> None:
        self.line = line
        self.namespace = namespace
        self.places: list[str] = []

    def marked(self) -> str:
        """Return the line without its comment, with a mark for everything that shlex must not look into."""
        out: list[str] = []
        at, fresh = 0, True  # fresh: a word would start here
        while at < len(self.line):
            char = self.line[at]
            if char == "#" and fresh:
                break
            text, at = self._step(at)
            out.append(text)
            fresh = char.isspace()
        return "".join(out)

    def fill(self, word: str) -> str:
        """Return the word with what its marks stand for."""
        whole = _PLACE.fullmatch(word)
        if whole:
            return self.places[int(whole[1])]
        return _PLACE.sub(lambda found: str(self.places[int(found[1])]), word)

    def _mark(self, text: str) -> str:
        self.places.append(text)
        return f"{_OPEN}{len(self.places) - 1}{_CLOSE}"

    def _step(self, at: int) -> tuple[str, int]:
        line, char = self.line, self.line[at]
        if char == "\\":
            pair = line[at : at + 2]
            return (self._mark(pair[1]) if pair[1:] in _SPECIAL else pair), at + 2
        if char in "'\"":
            quoted = _QUOTED[char].match(line, at)
            if not quoted:
                return line[at:], len(line)  # shlex says that it is not closed
            text = quoted[0]
            plain = char == "'" or self.namespace is None or not any(special in text for special in _SPECIAL)
            return (text if plain else self._mark(self._inside(text[1:-1]))), quoted.end()
        if char in _SPECIAL and self.namespace is not None:
            text, end = self._expand(line, at)
            plain = len(text) == 1 and not isinstance(text, Word)
            return (text if plain else self._mark(text)), end
        return char, at + 1

    def _inside(self, text: str) -> str:
        """Return what double quotes hold, expanded; a `Word` when it is one expansion and nothing else."""
        parts: list[str] = []
        at = 0
        while at < len(text):
            if text[at] == "\\" and text[at + 1 : at + 2] in ('"', "\\", *_SPECIAL):
                part, at = text[at + 1], at + 2
            elif text[at] in _SPECIAL:
                part, at = self._expand(text, at)
            else:
                part, at = text[at], at + 1
            parts.append(part)
        return parts[0] if len(parts) == 1 else "".join(parts)

    def _expand(self, text: str, at: int) -> tuple[str, int]:
        """Return what the ``$``, ``{`` or ``}`` at `at` becomes (itself when it is only text), and where it ends."""
        char = text[at]
        if text.startswith(char * 2, at):
            return char, at + 2
        if char == "$":
            found = _NAME.match(text, at)
            return (self._variable(found[1] or found[2]), found.end()) if found else (char, at + 1)
        end = _group_end(text, at) if char == "{" else None
        group = text[at:end]
        if end is None:
            return char, at + 1
        if _is_mapping(group):
            return group, end
        expression = _expression(group[1:-1])
        return (self._evaluate(group, *expression), end) if expression else (char, at + 1)

    def _variable(self, name: str) -> Word:
        if self.namespace is None or name not in self.namespace:
            how = f"write {{os.environ['{name}']}} for the environment's, $$ for a dollar sign, or single quotes"
            raise UsageError(f"${name}: the notebook has no variable {name}; {how}.")
        try:
            return Word.of(self.namespace[name])
        except Exception as error:  # noqa: BLE001 - the __str__ of the user's object
            raise UsageError(f"${name} cannot be written: {type(error).__name__}: {error}.") from None

    def _evaluate(self, group: str, code: str, convert: str, spec: str) -> Word:
        try:
            value = eval(code, dict(self.namespace or {}))  # noqa: S307 - the user's own expression in the user's line
            if convert:
                value = _CONVERT[convert](value)
            return Word.of(format(value, spec) if spec else value)
        except NameError as error:
            how = "write {{ and }} or single quotes where braces are meant as text"
            raise UsageError(f"{group}: {error} in the notebook; {how}.") from None
        except Exception as error:  # noqa: BLE001 - whatever the user's expression raises
            raise UsageError(f"{group} in the line raised {type(error).__name__}: {error}.") from None


def _group_end(text: str, at: int) -> int | None:
    """Return the end of the brace group that starts at `at`, Python strings in it respected, or None."""
    depth = 0
    token = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[{}]""")
    for found in token.finditer(text, at):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.end()
    return None


def _is_mapping(group: str) -> bool:
    """Whether the group is ``{}``, JSON, or a dict whose keys are constants; ``{x:3}`` formats x."""
    try:
        tree = ast.parse(group, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the latter two: nested too deep
        return False
    return isinstance(tree, ast.Dict) and all(isinstance(key, ast.Constant) for key in tree.keys)


def _expression(content: str) -> tuple[str, str, str] | None:
    """Return (expression, conversion, format spec) of what stands between braces, or None when it is none."""
    cuts = [len(content), *(found.start() for found in re.finditer(":", content))]
    for cut in cuts:
        code, spec = content[:cut], content[cut + 1 :]
        found = re.fullmatch(r"(.*)!([rsa])", code, re.DOTALL)
        convert = found[2] if found else ""
        code = (found[1] if found else code).strip()
        try:
            ast.parse(code, mode="eval")
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue
        return code, convert, spec
    return None
