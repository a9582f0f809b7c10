"""An HTTP server that answers what a test scripts, byte by byte, on a real loopback socket."""

import asyncio
import contextlib
import json

MODELS = [
    {"id": "base", "root": "/models/base", "parent": None, "max_model_len": 4096},
    {"id": "lora-0", "root": "/adapters/0", "parent": "base"},
    {"id": "lora-1", "root": "/adapters/1", "parent": "base"},
]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = "[DONE]"


def chunk(data):
    body = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(body), body)


def error(status, message, **headers):
    body = json.dumps({"error": {"message": message}}).encode()
    lines = "".join(f"{name}: {value}\r\n" for name, value in {"content-length": len(body), **headers}.items())
    return f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode() + body


class FakeServer:
    """What is asked at `/v1/completions` and `/generate_stream` is answered by `script`, see `FakeServer.answer`.

    Attributes:
        requests: (path, headers, body) of each POST.
        num_connections: ever made.
        models: listed; None: 404.
    """

    def __init__(self, models=MODELS, text=" word"):
        self.requests, self.num_connections, self.num_open = [], 0, 0
        self.models, self.text = models, text
        self.script = None
        self.closed = asyncio.Event()

    async def start(self, tls=None):
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0, ssl=tls)
        self.target = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self):
        self._server.close()
        await self._server.wait_closed()

    async def _connection(self, reader, writer):
        self.num_connections += 1
        self.num_open += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = head[0].split()
                headers = dict(line.split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if method == "GET":
                    writer.write(self._models(headers))
                    continue
                self.requests.append((path, headers, json.loads(body)))
                if not await self.answer(reader, writer, json.loads(body)):
                    break
        writer.close()
        self.num_open -= 1
        self.closed.set()

    def _models(self, headers):
        if self.models is None:
            return error(404, "no such route")
        if headers.get("authorization") == "Bearer wrong":
            return error(401, "who are you")
        body = json.dumps({"object": "list", "data": self.models}).encode()
        return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    async def answer(self, reader, writer, body):
        """Answer one request; returns whether the connection lives on."""
        if self.script is not None:
            return await self.script(reader, writer, body)
        total = body["max_tokens"]
        writer.write(HEAD)
        for number in range(total):
            reason = "length" if number + 1 == total else None
            writer.write(chunk({"choices": [{"index": 0, "text": self.text, "finish_reason": reason}]}))
        counts = {"prompt_tokens": 9, "completion_tokens": total, "prompt_tokens_details": {"cached_tokens": 2}}
        writer.write(chunk({"choices": [], "usage": counts}) + chunk(DONE) + b"0\r\n\r\n")
        await writer.drain()
        return True
