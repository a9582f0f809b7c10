"""Malformed things for a port, by the thousand: `python -m tests.hostile.malformed HOST:PORT SECONDS` says how many.

Each goes over a connection of its own, as bytes. A gRPC port gets them too, since a peer may send any of them there.
"""

import asyncio
import itertools
import struct
import sys
import time

_WIDE = b"\xff\xfe\xc3\x28 \xe2\x82"
_HOST = b"Host: 127.0.0.1\r\n"
_JSON = b"Content-Type: application/json\r\n"
_CHAT = b"POST /v1/chat/completions HTTP/1.1\r\n" + _HOST + _JSON
_COMPLETION = b'{"model":"Llama-3-8B","prompt":"x","max_tokens":1}'
_USUAL = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":authority", b"x"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
)
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


METHODS = (
    b"/lorrery.v1.RouterService/Generate",
    b"/lorrery.v1.SchedulerService/Route",
    b"/lorrery.v1.SchedulerService/Attach",
    b"/lorrery.v1.SchedulerService/RegisterAdapter",
    b"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    b"/grpc.health.v1.Health/Check",
    b"/no/such",
    b"/\xff",
)


def _post(body: bytes, path: bytes = b"/v1/completions", more: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\n%b%b%bContent-Length: %d\r\n\r\n%b" % (path, _HOST, _JSON, more, len(body), body)


def _get(path: bytes, more: bytes = b"") -> bytes:
    return b"GET %b HTTP/1.1\r\n%b%b\r\n" % (path, _HOST, more)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def _call(path: bytes, message: bytes, *headers: tuple[bytes, bytes]) -> bytes:
    """Return a gRPC call as bytes, with a message that need not be one."""
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"x"),
        (b"te", b"trailers"),
    ]
    head = b"".join(_literal(*field) for field in (*fields, (b"content-type", b"application/grpc"), *headers))
    return _frame(1, 4, 1, head) + _frame(0, 1, 1, struct.pack(">BI", 0, len(message)) + message)


def _repeated(stream: int) -> bytes:
    """Return one of many calls on a connection, of which all but the first name the same long header by a number."""
    long = b"\x40\x01x\x7f\xa1\x1e" + b"\xff" * 4_000 if stream == 1 else b"\xbe"
    head = b"".join(_literal(*field) for field in ((b":path", METHODS[0]), *_USUAL)) + long
    return _frame(1, 5, stream, head)


NAMES = (b"authorization", b"x-request-id", b"priority", b"accept", b"traceparent", b"content-type", b"origin", b"host")
HTTP = (
    *(_post(_COMPLETION, more=b"%b: Bearer %b\r\n" % (name, _WIDE)) for name in NAMES),
    *(_get(path, b"%b: %b\r\n" % (name, _WIDE)) for name in NAMES for path in (b"/v1/models", b"/metrics", b"/events")),
    _get(b"/v1/models", b"x-\xff\xfe: y\r\n"),
    _get(b"/" + _WIDE.replace(b" ", b"")),
    _get(b"/%ff%fe%00/../%c3%28?%ff=%fe&name[]=%ff"),
    _get(b"/metrics?name[]=%ff&" + b"name[]=x&" * 500),
    _get(b"/events?hz=%ff"),
    _get(b"/record?from=%ff&to=nan"),
    _get(b"http://[/metrics"),
    _get(b"//[x/metrics?"),
    _post(_WIDE),
    _post(b'{"model":"\xff","prompt":"\\ud800"}'),
    _post(b'{"model":"\\ud800","prompt":"\\ud800","user":"\\udfff"}'),
    _post(b'{"model":"\\u0000","prompt":["\\ud800"],"stop":"\\ud800"}'),
    _post(b'{"lora_name":"\\ud800","lora_path":"/\\ud800\\u0000"}', b"/v1/load_lora_adapter"),
    _post(b'{"lora_name":"x","lora_path":"' + b"/" * 60_000 + b'"}', b"/v1/load_lora_adapter"),
    _post(b"[" * 5_000),
    _post(b"1e999999"),
    _CHAT + b"Transfer-Encoding: \xff\r\n\r\n",
    _CHAT + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    _CHAT + b"Content-Length: -1\r\n\r\n",
    _CHAT + b"Content-Length: 9" + b"9" * 400 + b"\r\n\r\n",
    _CHAT + b"Content-Length: 10\r\n\r\nx",
    _get(b"/", b"Range: bytes=\xff-\r\n"),
    _get(b"/", b"Range: bytes=9-1,-,5\r\nIf-Range: \xff\r\n"),
    _get(b"/", b"If-Modified-Since: \xff\r\n"),
    _get(b"/" + b"x" * 70_000),
    _get(b"/", b"a: b\r\n" * 20_000),
    b"CONNECT x:1 HTTP/1.1\r\n\r\n",
    b"\xff" * 200 + b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,  # the beginning of a TLS handshake
)
HTTP2 = (
    *(_PREFACE + _frame(4, 0, 0, b"") + _call(path, _WIDE) for path in METHODS),
    *(_PREFACE + _frame(4, 0, 0, b"") + _call(path, b"") for path in METHODS),
    *(_PREFACE + _frame(4, 0, 0, b"") + _call(path, b"\x0a\x02\xff\xff") for path in METHODS),
    *(_PREFACE + _frame(4, 0, 0, b"") + _call(METHODS[0], b"", (name, _WIDE)) for name in (*NAMES, b"grpc-timeout")),
    # A long value that is no UTF-8, which the header table repeats in two bytes.
    _PREFACE + _frame(4, 0, 0, b"") + b"".join(_repeated(stream) for stream in range(1, 200, 2)),
    _PREFACE + b"\xff" * 300,
    _PREFACE + _frame(4, 0, 0, b"\xff" * 5),
    _PREFACE + _frame(9, 0, 0, b"x"),
    _PREFACE + _frame(4, 0, 0, b"") + _frame(1, 4, 2, b"\xff" * 50),
    _PREFACE + _frame(4, 0, 0, b"") + _frame(0, 0, 7, b"x" * 50),
    _PREFACE + _frame(4, 0, 0, b"") + _frame(8, 0, 0, b"\x00" * 4),
)
ALL = (*HTTP, *HTTP2)


async def flood(address: str, seconds: float, width: int = 8) -> int:
    """Send each in turn, `width` at once, for `seconds`; return how many were sent."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    num_sent = 0

    async def send(turns: "itertools.count[int]") -> None:
        nonlocal num_sent
        for turn in turns:
            if time.monotonic() > end and num_sent >= 3 * len(ALL):
                return
            try:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(ALL[turn % len(ALL)])
                async with asyncio.timeout(0.05):
                    await reader.read(1 << 16)
            except (OSError, TimeoutError):
                pass
            writer.transport.abort()
            num_sent += 1

    turns = itertools.count()
    await asyncio.gather(*(send(turns) for _ in range(width)))
    return num_sent


if __name__ == "__main__":
    print(asyncio.run(flood(sys.argv[1], float(sys.argv[2]))))
