"""Asks one gRPC server for its health, with the standard library alone: the container's health check.

An import of grpcio costs about five times the CPU of this whole program, every few seconds in every container, so this
speaks the little HTTP/2 that one unary call needs (RFC 9113; the header block as RFC 7541 literals). It decodes no
header: a server that answers SERVING sends the reply message, and one that refuses sends none.

Usage: python -I -S healthcheck.py [--tls] [--cert FILE --key FILE] HOST:PORT [SERVICE]
Exit status 0: SERVING. 1: anything else, with the reason in one line.

With --tls, which a certificate implies, the connection is encrypted and the server's own certificate is not looked at:
a process that asks its neighbour on loopback needs no proof of who that is, and a certificate need not name loopback.
"""

import contextlib
import socket
import struct
import sys
import time

TIMEOUT_SECONDS = 2.5
"""For the whole call; less than the 3 s that docker-compose.yml gives the program."""

MAX_MESSAGE_BYTES = 64
"""A health reply has two bytes and the prefix five; whatever says more is no health service."""

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0x0, 0x1, 0x3, 0x4, 0x6, 0x7
ACK, END_STREAM, END_HEADERS, PADDED = 0x1, 0x1, 0x4, 0x8

STATUS_NAMES = {0: "UNKNOWN", 1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}
"""grpc.health.v1.HealthCheckResponse.ServingStatus."""


class UnhealthyError(Exception):
    """The server did not answer SERVING; the message says what it did."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Encode one HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(text: bytes) -> bytes:
    """Encode an HPACK string, shorter than 127 bytes, without Huffman coding."""
    return bytes([len(text)]) + text


def request(authority: str, service: str) -> bytes:
    """Encode everything the client sends: preface, settings, the call's headers and its one message."""
    headers = (
        b"\x83\x86"  # static table 3 and 6: ":method: POST", ":scheme: http"
        + (b"\x04" + literal(b"/grpc.health.v1.Health/Check"))  # 4: ":path"
        + (b"\x01" + literal(authority.encode()))  # 1: ":authority"
        + (b"\x0f\x10" + literal(b"application/grpc"))  # 31: "content-type"; over four bits: 15, then 31 - 15
        + (b"\x00" + literal(b"te") + literal(b"trailers"))
    )
    message = b"\x0a" + literal(service.encode()) if service else b""  # field 1, a string
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(SETTINGS, 0, 0)
        + frame(HEADERS, END_HEADERS, 1, headers)
        + frame(DATA, END_STREAM, 1, struct.pack(">BI", 0, len(message)) + message)
    )


def read_exactly(connection: socket.socket, length: int, deadline: float) -> bytes:
    """Read `length` bytes before `deadline` (seconds of `time.monotonic`)."""
    received = b""
    while len(received) < length:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        piece = connection.recv(length - len(received))
        if not piece:
            raise UnhealthyError("the server closed the connection")
        received += piece
    return received


def status_of(message: bytes) -> int:
    """Decode the status out of a length-prefixed HealthCheckResponse; a missing field is 0, UNKNOWN."""
    if len(message) < 5 or message[0] != 0 or struct.unpack(">I", message[1:5])[0] != len(message) - 5:
        raise UnhealthyError("the reply is not one whole, uncompressed message")
    body = message[5:]
    if body and (len(body) != 2 or body[0] != 0x08):  # field 1, a varint below 128
        raise UnhealthyError("the reply is not a health status")
    return body[1] if body else 0


def encrypted(connection: socket.socket, cert: str, key: str) -> socket.socket:
    """Put TLS on a connection, and show a certificate if there is one.

    Raises:
        UnhealthyError: the server speaks no HTTP/2 over TLS.
        OSError: a file cannot be read, or the server does not take the certificate.
    """
    import ssl  # here: it costs half as much as the rest, and few need it

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if cert:
        context.load_cert_chain(cert, key)
    wrapped = context.wrap_socket(connection)
    if wrapped.selected_alpn_protocol() != "h2":
        raise UnhealthyError("the server does not speak HTTP/2")
    return wrapped


def check(
    address: str,
    service: str = "",
    *,
    tls: bool = False,
    cert: str = "",
    key: str = "",
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> None:
    """Ask for the health of `service`, the empty name meaning the whole server.

    Args:
        address: HOST:PORT.
        service: as the server calls it.
        tls: encrypt the connection.
        cert: PEM file to show to the server; implies `tls`.
        key: PEM file of its private key.
        timeout_seconds: for the whole call.

    Raises:
        UnhealthyError: it is anything but SERVING, or no gRPC server answers.
        OSError: there is no connection, or it broke.
        TimeoutError: no answer in time.
    """
    deadline = time.monotonic() + timeout_seconds
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        plain = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_seconds)
        connection = stack.enter_context(plain)
        if tls or cert:
            connection = stack.enter_context(encrypted(plain, cert, key))
        connection.sendall(request(address, service))
        message = b""
        while True:
            head = read_exactly(connection, 9, deadline)
            length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
            stream = int.from_bytes(head[5:], "big") & 0x7FFFFFFF
            if length > 16384:  # the largest frame that a client allows who does not say otherwise
                raise UnhealthyError("the server does not speak HTTP/2")
            payload = read_exactly(connection, length, deadline)
            if kind == SETTINGS and not flags & ACK:
                connection.sendall(frame(SETTINGS, ACK, 0))
            elif kind == PING and not flags & ACK:
                connection.sendall(frame(PING, ACK, 0, payload))
            elif kind == GOAWAY or (kind == RST_STREAM and stream == 1):
                raise UnhealthyError("the server refused the call")
            elif kind == DATA and stream == 1:
                message += payload[1 : length - payload[0]] if flags & PADDED else payload
                if len(message) > MAX_MESSAGE_BYTES:
                    raise UnhealthyError("the reply is not a health status")
            if kind in (DATA, HEADERS) and stream == 1 and flags & END_STREAM:
                break
    if not message:
        raise UnhealthyError(f"the server answered with an error, not a status, for service {service!r}")
    if (status := status_of(message)) != 1:
        raise UnhealthyError(STATUS_NAMES.get(status, f"status {status}"))


def main(arguments: list[str]) -> int:
    """Run the check and say in one line what is wrong, if anything is."""
    files = {"--cert": "", "--key": ""}
    tls = False
    rest = list(arguments)
    while rest and rest[0].startswith("--"):
        option = rest.pop(0)
        if option == "--tls":
            tls = True
        elif option in files and rest:
            files[option] = rest.pop(0)
        else:
            rest = []
    paired = bool(files["--cert"]) == bool(files["--key"])
    if len(rest) not in (1, 2) or not rest[0].rpartition(":")[2].isdecimal() or not paired:
        print("usage: healthcheck.py [--tls] [--cert FILE --key FILE] HOST:PORT [SERVICE]")
        return 1
    try:
        check(rest[0], rest[1] if len(rest) == 2 else "", tls=tls, cert=files["--cert"], key=files["--key"])
    except (UnhealthyError, OSError) as error:
        print(f"{rest[0]}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
