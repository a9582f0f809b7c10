"""Bodies made to hurt: what a refused one costs a router is bounded by its size, and nothing stands still meanwhile."""

import asyncio
from collections.abc import Callable, Mapping

import pytest

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.client import Client
from tests.cluster.http_client import exchange, status_of
from tests.hostile.watch import MEGABYTE, watched

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

MOST_TIMES = 5
SMALL = 16 * MEGABYTE
"""What the memory of a body may be in any case: of what is parsed before the first error."""
MOST_GAP_SECONDS = 0.25
LARGE, MEDIUM = 20_000_000, 3_300_000

MODEL = b'"model": "Llama-3-8B", "max_tokens": 5'
FIELDS: Mapping[str, bytes] = {
    "/v1/completions": b"prompt",
    "/v1/chat/completions": b"messages",
    "/v1/responses": b"input",
    "/v1/messages": b"messages",
    "/v1/messages/count_tokens": b"messages",
    "/tokenize": b"messages",
    "/detokenize": b"tokens",
    "/generate": b"inputs",
    "/v1/load_lora_adapter": b"lora_name",
}
"""JSON routes of each kind, and the field of each that is the longest."""
CONVERSATIONS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize")


def array(*elements: bytes) -> Callable[[bytes, int], bytes]:
    """Return what makes a body with an array of these elements in turn in its field."""
    return lambda field, size: b"{%b, %b: [%b]}" % (MODEL, _quoted(field), _repeated(b",".join(elements), size))


def text(repeated: bytes, before: bytes = b"") -> Callable[[bytes, int], bytes]:
    """Return what makes a body with a long text in its field."""
    return lambda field, size: b'{%b, %b: "%b%b"}' % (MODEL, _quoted(field), before, repeated * (size // len(repeated)))


def beside(name: bytes, begin: bytes, element: bytes, end: bytes) -> Callable[[bytes, int], bytes]:
    """Return what makes a body with a further long field, and a short one."""
    return lambda field, size: (
        b'{%b, %b: "hello", %b: %b%b%b}' % (MODEL, _quoted(field), _quoted(name), begin, _repeated(element, size), end)
    )


def members(field: bytes, size: int) -> bytes:
    """Return an object with as many members as possible."""
    return b"{%b, %b: {%b}}" % (MODEL, _quoted(field), b",".join(b'"%x":{}' % at for at in range(size // 11)))


def deep(field: bytes, size: int) -> bytes:
    """Return arrays in arrays, again and again."""
    nested = b"[" * 50 + b"1,2" + b"]" * 50
    return b"{%b, %b: [%b]}" % (MODEL, _quoted(field), _repeated(nested, size))


def _repeated(element: bytes, size: int) -> bytes:
    return ((element + b",") * (size // (len(element) + 1)))[:-1]


def _quoted(name: bytes) -> bytes:
    return b'"%b"' % name


TURN = b'{"role":"user","content":""}'
CALL = (
    b'{"role":"assistant","content":"","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"%b"}}]}'
    % (b"[[],[],[],[]],"[:-1] * 20)
)
ATTACKS: Mapping[str, Callable[[bytes, int], bytes]] = {
    "empty objects": array(b"{}"),
    "empty arrays": array(b"[]"),
    "empty texts": array(b'""'),
    "nulls": array(b"null"),
    "small numbers": array(b"1"),
    "numbers": array(b"300", b"9999", b"70000"),
    "long numbers": array(b"9" * 4000),
    "long fractions": array(b"0." + b"9" * 40_000),
    "prompts": array(b"[1,2,3]", b"[]"),
    "empty messages": array(TURN),
    "messages": array(b'{"role":"user","content":[{"type":"text","text":"hi"}]}'),
    "typed messages": array(b'{"type":"message","role":"user","content":[{"type":"input_text","text":"hi"}]}'),
    "calls of tools": array(CALL),
    "nested arrays": deep,
    "members": members,
    "unknown field": beside(b"unknown", b"[", b"{}", b"]"),
    "tools": beside(b"tools", b"[", b'{"type":"function","function":{"name":"f","parameters":{}}}', b"]"),
    "arguments": beside(b"vllm_xargs", b"{", b'"a":{}', b"}"),
    "bias": beside(b"logit_bias", b"{", b'"1":"x"', b"}"),
    "forbidden tokens": beside(b"stop_token_ids", b"[", b"12345", b"]"),
    "backslashes": text(rb"\\"),
    "escaped characters": text(rb"\u0061"),
    "halves of surrogate pairs": text(rb"\ud800"),
    "surrogate pairs": text(rb"\ud83d\ude00"),
    "quotation marks": text(rb"\""),
    "wide text": text(b"a", "\U0001f600".encode()),
    "narrow text": text(b"a b "),
    "brackets in a text": text(b"[{,"),
}


async def _sent(cluster: LocalCluster, path: str, body: bytes) -> bytes:
    return await exchange(cluster, "POST", path, body)


@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_refused_body_costs_a_small_multiple_of_its_size(
    attacked: Client, shared_cluster: LocalCluster, attack: str
) -> None:
    first = list(ATTACKS).index(attack)
    paths = [
        path for at, path in enumerate(FIELDS) if at % 3 == first % 3
    ]  # by turns, since the whole table takes minutes
    bodies = {path: ATTACKS[attack](FIELDS[path], LARGE) for path in paths}
    async with watched(shared_cluster.processes["router"]) as watch:
        for path, body in bodies.items():
            answer = await _sent(shared_cluster, path, body)
            assert status_of(answer) in (400, 413), (path, answer[:1000])
            assert len(answer) < 2000
        figures = await watch.figures(within_seconds=30, left_bytes=SMALL)
    print(attack, figures)
    assert figures.peak_bytes <= MOST_TIMES * LARGE
    assert figures.gap_seconds <= MOST_GAP_SECONDS
    assert figures.left_bytes <= SMALL


@pytest.mark.parametrize(
    "attack", ["empty messages", "calls of tools", "members", "surrogate pairs", "quotation marks"]
)
async def test_so_do_four_at_once(attacked: Client, shared_cluster: LocalCluster, attack: str) -> None:
    paths = ("/v1/completions", *CONVERSATIONS)
    size = LARGE if attack.endswith(("text", "pairs")) else MEDIUM
    bodies = [ATTACKS[attack](FIELDS[path], size) for path in paths]
    async with watched(shared_cluster.processes["router"]) as watch:
        for path, body in zip(paths, bodies, strict=True):
            answers = await asyncio.gather(*[_sent(shared_cluster, path, body) for _ in range(4)])
            assert {status_of(answer) for answer in answers} <= {400, 413}, (path, answers[0][:1000])
        figures = await watch.figures(within_seconds=30, left_bytes=SMALL)
    print(attack, figures)
    assert figures.peak_bytes <= 4 * max(SMALL, MOST_TIMES * size)
    assert figures.gap_seconds <= MOST_GAP_SECONDS
    assert figures.left_bytes <= SMALL
