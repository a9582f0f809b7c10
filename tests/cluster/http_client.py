"""HTTP to a cluster's router: OpenAI's own client, and bare sockets where bytes matter."""

import asyncio
import json
from typing import Any

from openai import AsyncOpenAI

from lorrery.service.local.cluster import LocalCluster
from lorrery.tokenizer.file import BuiltinTokenizer
from tests.cluster.client import PROMPT_TOKEN_ID, TIMEOUT_SECONDS, Ask

PROMPT = [PROMPT_TOKEN_ID] * 8


def openai_client(cluster: LocalCluster) -> AsyncOpenAI:
    """Return OpenAI's client of a cluster, which tries nothing twice; use it with `async with`."""
    return AsyncOpenAI(
        base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_SECONDS
    )


def text_of(cluster: LocalCluster, ask: Ask) -> str:
    """Return the text that must come."""
    token_ids, _ = ask.expected(cluster.settings)
    return BuiltinTokenizer().detokenizer().push(token_ids)


async def exchange(
    cluster: LocalCluster, method: str, path: str, body: object = None, *headers: str, version: str = "1.1"
) -> bytes:
    """Return everything that the edge sends to one request, as bytes, until it closes the connection."""
    host, _, port = cluster.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"{method} {path} HTTP/{version}",
        "host: localhost",
        "connection: close",
        f"content-length: {len(content)}",
    ]
    lines += ["content-type: application/json", *headers]
    writer.write("\r\n".join([*lines, "", ""]).encode() + content)
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            return await reader.read()
    finally:
        writer.close()


def unchunked(answer: bytes) -> bytes:
    """Return the body of an answer whose length was not known."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


def status_of(answer: bytes) -> int:
    """Return the status of an answer."""
    return int(answer.split(b" ", 2)[1])


def json_of(answer: bytes) -> Any:
    """Return the body of an answer."""
    return json.loads(answer.partition(b"\r\n\r\n")[2])
