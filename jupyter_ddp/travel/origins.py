"""Who is who: classes and functions of the notebook keep their identity when their instances come back.

The notebook gives each class and function that it sends by value a token. A rank that sends one back, or an instance
of it, sends the token instead of a definition: the notebook gets its own object, ``isinstance`` holds, and no globals
of the rank come along. References are weak: a class that the notebook has let go is not kept alive.
"""

from __future__ import annotations

import contextlib
import sys
import uuid
import weakref
from typing import Any

_by_token: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_tokens: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def token_for(obj: Any) -> str | None:  # noqa: ANN401 - a class or function
    """Return the object's token, a new one if it has none; None for an object that cannot be kept track of."""
    try:
        token = _tokens.get(obj)
        if token is None:
            token = uuid.uuid4().hex
            register(token, obj)
    except TypeError:  # unhashable, or no weak references
        return None
    return token


def register(token: str, obj: Any) -> None:  # noqa: ANN401 - a class or function
    """Let ``token`` stand for an object in this process."""
    with contextlib.suppress(TypeError):
        _tokens[obj] = token
        _by_token[token] = obj


def known_token(obj: Any) -> str | None:  # noqa: ANN401 - a class or function
    """Return the token of an object that came from, or was sent by, a notebook."""
    try:
        return _tokens.get(obj)
    except TypeError:
        return None


def resolve(token: str, qualname: str) -> Any | None:  # noqa: ANN401 - a class or function
    """Return the object that a token stands for here, or None.

    A kernel that started anew and ran its cells again has it under its name in ``__main__``.
    """
    found = _by_token.get(token)
    if found is None and "<locals>" not in qualname:
        found = sys.modules.get("__main__")
        for part in qualname.split("."):
            found = getattr(found, part, None)
    return found
