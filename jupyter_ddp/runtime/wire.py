"""Frames on the sockets of an instance: a four-byte length (big endian), then that many bytes of JSON.

Who speaks what is in `docs/architecture.md`. Frames of a rank are sent by one thread only, which no Python signal
handler can interrupt: a frame cannot be torn by an exception.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.errors import JupyterDDPError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_FRAME: Final = 64 << 20
_HEAD: Final = struct.Struct(">I")


class WireError(JupyterDDPError):
    """The peer does not speak this protocol; its connection is of no further use."""


def pack(message: dict[str, Any]) -> bytes:
    """Return the frame of a message.

    Raises:
        WireError: The message is larger than `MAX_FRAME`.
    """
    try:
        body = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # lone surrogates
        body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME:
        raise WireError(f"a frame of {len(body)} bytes is too large")
    return _HEAD.pack(len(body)) + body


class Decoder:
    """Splits what arrives on one connection into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any] | None]:
        """Yield the messages that `data` completes; None stands for a frame that is not a JSON object.

        Raises:
            WireError: A length is absurd: this is not our protocol.
        """
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._buffer)
            if size > MAX_FRAME:
                raise WireError(f"a frame claims {size} bytes")
            end = _HEAD.size + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEAD.size : end])
            del self._buffer[:end]
            try:
                message = json.loads(body)
            except (ValueError, RecursionError):
                message = None
            yield message if isinstance(message, dict) else None
