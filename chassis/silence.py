"""Finds out why a gRPC call to an address got no answer: nothing listens there, or something that is not gRPC."""

import asyncio

NOTHING = "nothing answers there"
_CONNECT_SECONDS = 1.0


async def why_silent(target: str) -> str:
    """Return the reason, after trying a TCP connection to the address; takes at most a second.

    Args:
        target: HOST:PORT; other gRPC targets are not examined.
    """
    host, _, port = target.rpartition(":")
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, OverflowError, ValueError):  # TimeoutError is an OSError
        return NOTHING
    writer.close()
    return (
        "something listens there, but does not answer as gRPC does; give the router's gRPC address, and [client_tls] if"
        " and only if it has [server_tls]"
    )
