"""Ports for programs that must be told theirs."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Yield ports at which a program can listen, and that the system gives to nobody else meanwhile.

    Each is bound here, without listening, so that no other process gets it for port 0 or for a connection of its own.
    Whoever asks for it by its number gets it, with `SO_REUSEADDR`, as servers do.
    """
    with contextlib.ExitStack() as held:
        ports = []
        for _ in range(count):
            holder = held.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
            ports.append(holder.getsockname()[1])
        yield ports
