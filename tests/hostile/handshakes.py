"""Connections of TLS made to hurt: `python -m tests.hostile.handshakes KIND HOST:PORT SECONDS`.

Prints how many it made. A client's first message is made once and sent on every connection, so that the server, which
answers it with a signature, pays far more than this process.
"""

import contextlib
import os
import selectors
import socket
import ssl
import sys
import threading
import time

HELD = ("silent", "begun", "held")
"""Kinds that leave a connection open until the server closes it."""
NUM_HELD, NUM_OTHERS = 3_000, 500
"""Connections at a time."""
THREADS = 8


def client() -> ssl.SSLContext:
    """Return the context of a client that verifies nothing."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def hello() -> bytes:
    """Return a client's first message."""
    written = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        client().wrap_bio(ssl.MemoryBIO(), written, server_hostname="localhost").do_handshake()
    return written.read()


MESSAGES = {
    "silent": b"",
    "begun": hello()[:100],
    "held": hello(),
    "answered": hello(),  # and closed at the answer
    "garbage": os.urandom(4096),
}
KINDS = (*MESSAGES, "completed")


def send_and_close(kind: str, address: tuple[str, int], end: float) -> int:
    """Send a message on one connection after another, and close each once the server answers or closes it."""
    message, most, made = MESSAGES[kind], NUM_HELD if kind in HELD else NUM_OTHERS, 0
    with selectors.DefaultSelector() as selector:
        while time.monotonic() < end:
            while len(selector.get_map()) < most:
                one = socket.socket()
                one.setblocking(False)
                one.connect_ex(address)
                selector.register(one, selectors.EVENT_WRITE)
            for key, events in selector.select(0.1):
                one = key.fileobj
                assert isinstance(one, socket.socket)
                try:
                    if events & selectors.EVENT_WRITE:
                        one.send(message)
                        made += 1
                        selector.modify(one, selectors.EVENT_READ)
                        continue
                    if one.recv(1 << 16) and kind in HELD:
                        continue
                except OSError:  # refused, or reset
                    pass
                selector.unregister(one)
                one.close()
    return made


def complete(address: tuple[str, int], end: float) -> int:
    """Complete one handshake after another, and close each connection at once."""
    made, context = [0] * THREADS, client()

    def run(index: int) -> None:
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(address, 10) as plain:
                context.wrap_socket(plain, server_hostname="localhost").close()
                made[index] += 1

    threads = [threading.Thread(target=run, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(made)


if __name__ == "__main__":
    kind, (host, _, port), seconds = sys.argv[1], sys.argv[2].rpartition(":"), float(sys.argv[3])
    where, end = (host, int(port)), time.monotonic() + seconds
    print(complete(where, end) if kind == "completed" else send_and_close(kind, where, end))
