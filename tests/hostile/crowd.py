"""Crowds at a port of HTTP: `python -m tests.hostile.crowd KIND HOST:PORT SECONDS`."""

import asyncio
import contextlib
import itertools
import sys
import time

_GET = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"
_BIG = b"x" * 60_000
KINDS = {
    "silent": (b"", b""),
    "slow": (_GET, b"a: b\r\n"),
    "many headers": (_GET, b"a: " + _BIG + b"\r\n"),
    "long line": (b"GET /", _BIG),
    "endless body": (_GET + b"Content-Length: 99999999999\r\n\r\n", _BIG),
    "unread answers": ((_GET + b"\r\n") * 100, (_GET + b"\r\n") * 100),
    "requests": (_GET + b"\r\n", b""),
    "queries": (b"GET /metrics?" + b"name[]=process_open_fds&" * 2_000 + b" HTTP/1.1\r\n\r\n", b""),
    "no requests": (b"\x00\xff\n" * 1_000, b"\x00\xff\n" * 1_000),
}
"""What each connection sends first, and then again and again."""
_FAST = ("requests", "queries", "no requests", "many headers", "long line", "endless body")


async def crowd(kind: str, address: str, seconds: float) -> int:
    """Keep hundreds of connections open for `seconds`, a new one for each that is closed; return how many it took."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    num_opened = 0

    async def one() -> None:
        nonlocal num_opened
        while time.monotonic() < end:
            with contextlib.suppress(OSError, TimeoutError):
                reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 16)
                num_opened += 1
                try:
                    for part in itertools.chain(KINDS[kind][:1], itertools.repeat(KINDS[kind][1])):
                        if time.monotonic() > end or reader.at_eof() or writer.transport.is_closing():
                            break
                        writer.write(part)
                        async with asyncio.timeout(2):
                            await writer.drain()
                        if kind in ("requests", "queries"):
                            async with asyncio.timeout(2):
                                await reader.read(1 << 16)
                            break
                        await asyncio.sleep(0 if kind in _FAST else 0.3)
                finally:
                    writer.transport.abort()
            await asyncio.sleep(0.01)

    await asyncio.gather(*(one() for _ in range(20 if kind in _FAST else 500)))
    return num_opened


if __name__ == "__main__":
    print(asyncio.run(crowd(sys.argv[1], sys.argv[2], float(sys.argv[3]))))
