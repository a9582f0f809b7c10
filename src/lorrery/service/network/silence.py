"""Finds out why a gRPC call to an address got no answer: nothing listens there, or something that is not gRPC.

gRPC hides the cause from a call that waits for a connection: such a call ends with DEADLINE_EXCEEDED. One that does not
wait fails with the error of the last attempt to connect, such as that of a TLS handshake.
"""

import asyncio

import grpc
import grpc.aio

NOTHING = "nothing answers there"
_CONNECT_SECONDS = 1.0
_ATTEMPT_SECONDS = 1.0
_CHECK = "/grpc.health.v1.Health/Check"
_BEFORE_CAUSE = "last error: "


async def why_silent(target: str, channel: grpc.aio.Channel, other_cure: str = "") -> str:
    """Return the reason, after trying a TCP connection to the address and a call; takes at most two seconds.

    Args:
        target: HOST:PORT, or `dns:///HOST:PORT`; other gRPC targets are not examined.
        channel: to the target; the call that got no answer was made on it.
        other_cure: what else to try where something listens; empty: nothing.
    """
    host, _, port = target.removeprefix("dns:///").rpartition(":")
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, OverflowError, ValueError):  # TimeoutError is an OSError
        return NOTHING
    writer.close()
    cause = await _last_error(channel)
    return (
        "something listens there, but does not answer as gRPC does; give the router's gRPC address, and [client_tls] if"
        f" and only if it has [server_tls]{other_cure and f', or {other_cure}'}{cause and f'; gRPC says: {cause}'}"
    )


async def _last_error(channel: grpc.aio.Channel) -> str:
    """Return why the channel's last attempt to connect failed; empty: it is connected, or still tries."""
    call = channel.unary_unary(_CHECK, bytes, bytes)(b"", timeout=_ATTEMPT_SECONDS)
    try:
        await call
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        return details.partition(_BEFORE_CAUSE)[2] or details if error.code() is grpc.StatusCode.UNAVAILABLE else ""
    finally:
        call.cancel()
    return ""
