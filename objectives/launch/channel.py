"""`Channel`: messages between supervisor, fork server and ranks, over a pair of local sockets."""

from __future__ import annotations

import array
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["MAX_FDS", "Channel"]

MAX_FDS = 250
"""Open files that one message may carry (Linux SCM_MAX_FD is 253)."""
_LARGEST_MESSAGE = 1 << 17


class Channel:
    """One end of a connection that keeps messages whole.

    A message is a JSON object; open files can travel with it. Closing one end, or the death of its process, is read as
    None at the other.
    """

    def __init__(self, endpoint: socket.socket) -> None:
        self._endpoint = endpoint

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected ends."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """The end that was handed to this process as an open file."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """For selectors."""
        return self._endpoint.fileno()

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send one message.

        Raises:
            OSError: The other end is gone, or the message is over 128 KiB.
        """
        data = json.dumps(message).encode()
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._endpoint.sendmsg([data], ancillary)

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the other end is gone. Waits."""
        message, _ = self.receive_with_fds()
        return message

    def receive_with_fds(self, max_fds: int = 0) -> tuple[dict[str, Any] | None, list[int]]:
        """The next message and the files that came with it."""
        item_size = array.array("i").itemsize
        try:
            data, ancillary, _, _ = self._endpoint.recvmsg(_LARGEST_MESSAGE, socket.CMSG_SPACE(max_fds * item_size))
        except ConnectionResetError:
            return None, []
        fds: list[int] = []
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % item_size])
                fds.extend(received)
        return (json.loads(data) if data else None), fds

    def detach(self) -> int:
        """Give up the open file without closing it."""
        return self._endpoint.detach()

    def close(self) -> None:
        """Hang up."""
        self._endpoint.close()
