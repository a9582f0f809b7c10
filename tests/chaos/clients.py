"""The clients: closed loops of requests of many kinds, of several tenants, over all routers.

Each loop draws from a generator of its own, so that the same seed sends the same requests in each loop; which are open
at once is the machine's doing. What each one ended with is judged in `verdicts`.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import grpc
import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from lorrery.service.network.credentials import bearer
from lorrery.v1 import router_pb2
from tests.chaos.plan import ADAPTERS
from tests.cluster.client import Ask, Client, Stream, some_output

TIMEOUT_SECONDS = 150.0
"""No stream takes so long, whatever happens: one that does has been forgotten somewhere."""
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 512))
SLOW_PAUSE_SECONDS = 8.0
RECONNECT = (("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 1000))
LISTED = ("", "", "", "lora-0", "lora-1", "lora-2", "lora-3")


class Kind(StrEnum):
    """What a client does, or asks for."""

    PLAIN = "plain"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    SLOW = "slow"
    TOO_LONG = "too long"
    UNKNOWN_ADAPTER = "unknown adapter"
    WRONG_KEY = "wrong key"
    FORBIDDEN = "forbidden"
    STALLED = "stalled"
    CUT = "cut"
    REFUSED = "refused"


_SHARES = {
    Kind.PLAIN: 68,
    Kind.CANCELLED: 14,
    Kind.DEADLINE: 3,
    Kind.SLOW: 1,
    Kind.TOO_LONG: 2,
    Kind.UNKNOWN_ADAPTER: 2,
    Kind.WRONG_KEY: 1,
    Kind.FORBIDDEN: 1,
    Kind.STALLED: 3,
    Kind.CUT: 3,
    Kind.REFUSED: 2,
}

_KEYS = {"acme": 5, "beta": 4, "few": 2, "narrow": 3}
"""Keys by how many of the loops use each."""


@dataclass(slots=True)
class Outcome:
    """How one request ended.

    Attributes:
        key: whose.
        router: that was asked.
        began: `time.monotonic()`; `ended` likewise.
        code: `OK`, a gRPC status, or `CANCELLED` where the client itself cancelled.
        reason: of the ErrorInfo; empty: there is none.
        stream: with all that came.
        cut_after: tokens after which it was to be cut.
    """

    kind: Kind
    key: str
    router: str
    began: float
    ended: float
    code: str
    reason: str
    detail: str
    stream: Stream
    cut_after: int = 0

    def __str__(self) -> str:
        """Return a line about it."""
        return (
            f"{self.kind} of {self.key} through {self.router}, {self.ended - self.began:.1f} s: {self.code}"
            f" {self.reason} {self.detail!r} after {len(self.stream.token_ids)} tokens; {self.stream.ask}"
        )


@dataclass(slots=True)
class Crowd:
    """All the loops.

    Args:
        addresses: of the routers, by name; they may come and go.
        seed: of all that is asked.
        num_loops: requests that are open at once, as long as none waits.
    """

    addresses: dict[str, str]
    seed: int
    num_loops: int
    outcomes: list[Outcome] = field(default_factory=list)
    stopping: bool = False

    async def run(self) -> None:
        """Send until `stopping`, and return when every stream has ended."""
        keys = [key for key, weight in _KEYS.items() for _ in range(weight)]
        async with asyncio.TaskGroup() as tasks:
            for number in range(self.num_loops):
                key = keys[number % len(keys)]
                tasks.create_task(self._loop(random.Random(f"crowd/{self.seed}/{number}"), key), name=f"loop {number}")

    async def _loop(self, rng: random.Random, key: str) -> None:
        clients: dict[str, Client] = {}
        try:
            await asyncio.sleep(rng.uniform(0, 2))  # not all in one moment
            while not self.stopping:
                kind = rng.choices(list(_SHARES), list(_SHARES.values()))[0]
                ask, router = _ask(rng, kind), rng.choice(list(self.addresses))
                address = self.addresses[router]
                if address not in clients:
                    clients[address] = Client(address, RECONNECT)
                await self._send(rng, kind, key, ask, router, clients[address])
        finally:
            for client in clients.values():
                await client.channel.close()

    async def _send(
        self, rng: random.Random, kind: Kind, key: str, ask: Ask, router: str, client: Client, tries: int = 0
    ) -> None:
        outcome = await (
            self._slow(kind, key, ask, router, client.address)
            if kind is Kind.SLOW
            else _once(rng, kind, key, ask, router, client)
        )
        self.outcomes.append(outcome)
        if outcome.code == "OK" or kind in (Kind.CANCELLED, Kind.DEADLINE):
            return
        # As a client does: wait, and where its router has gone ask another for the same.
        await asyncio.sleep(rng.uniform(1.0, 4.0) if outcome.reason == "QUOTA_EXCEEDED" else rng.uniform(0.3, 1.0))
        if outcome.code == "UNAVAILABLE" and kind is Kind.PLAIN and tries < 3 and not self.stopping:
            others = [name for name in self.addresses if name != router]
            another = rng.choice(others)
            async with Client(self.addresses[another], RECONNECT) as other:
                await self._send(rng, kind, key, ask, another, other, tries + 1)

    async def _slow(self, kind: Kind, key: str, ask: Ask, router: str, address: str) -> Outcome:
        """Read a little, then nothing for a while, then the rest; by a connection with a small window."""
        async with Client(address, SMALL_WINDOW) as client:
            began = time.monotonic()
            call = client.stub.Generate(ask.message(), timeout=TIMEOUT_SECONDS, metadata=bearer(_secret(key)))
            stream = Stream(ask, _Dawdling(call, SLOW_PAUSE_SECONDS))
            await stream
            return _outcome(kind, key, router, began, stream)


class _Dawdling:
    """A call whose reader pauses once, after a few messages."""

    def __init__(self, call: grpc.aio.UnaryStreamCall, seconds: float) -> None:
        self._call, self._seconds, self._num_read = call, seconds, 0

    async def read(self) -> object:
        self._num_read += 1
        if self._num_read == 4:
            await asyncio.sleep(self._seconds)
        return await self._call.read()

    def cancel(self) -> bool:
        return self._call.cancel()

    def cancelled(self) -> bool:
        return self._call.cancelled()


def _ask(rng: random.Random, kind: Kind) -> Ask:
    # Half of all prompts are one of a few lengths, so that they find each other's blocks.
    prompt_tokens = rng.choice((100, 200, 400)) if rng.random() < 0.5 else rng.randint(1, 400)
    max_new_tokens = rng.randint(1, 60) if rng.random() < 0.7 else rng.randint(60, 300)
    adapter_id = rng.choice((*LISTED, ADAPTERS[0], rng.choice(ADAPTERS)))
    seed = rng.getrandbits(64)
    match kind:
        case Kind.SLOW:
            max_new_tokens = 1000
        case Kind.TOO_LONG:
            return Ask(seed, rng.choice((1025, 5000, 100_000)), 4)
        case Kind.UNKNOWN_ADAPTER:
            return Ask(seed, 8, 4, "x-none")
        case Kind.FORBIDDEN:
            return Ask(seed, 8, 4, "big")
        case _:
            pass
    by_eos = rng.random() < 1 / 3
    true_output_tokens = rng.randint(1, max_new_tokens) if by_eos else None
    output = None if kind is Kind.SLOW else some_output(rng, max_new_tokens)
    return Ask(seed, prompt_tokens, max_new_tokens, adapter_id, not by_eos, true_output_tokens, output=output)


async def _once(rng: random.Random, kind: Kind, key: str, ask: Ask, router: str, client: Client) -> Outcome:
    metadata = bearer(_secret(key))
    timeout, cut_after = TIMEOUT_SECONDS, 0
    match kind:
        case Kind.DEADLINE:
            timeout = rng.uniform(0.01, 3.0)
        case Kind.WRONG_KEY:
            metadata = bearer("no-such-secret")
        case Kind.FORBIDDEN:
            metadata = bearer(_secret("beta"))
        case Kind.STALLED:
            fault = f"stall,after={rng.randint(1, 20)},seconds={rng.uniform(0.05, 0.5):.3f}"
            metadata = (*metadata, ("lorrery-fault", rng.choice((fault, "delay,seconds=0.2"))))
        case Kind.CUT:
            cut_after = rng.randint(1, 20)
            metadata = (*metadata, ("lorrery-fault", f"cut,after={cut_after},status=DATA_LOSS"))
        case Kind.REFUSED:
            metadata = (*metadata, ("lorrery-fault", "refuse,status=ABORTED"))
        case _:
            pass
    began = time.monotonic()
    stream = Stream(ask, client.stub.Generate(ask.message(), timeout=timeout, metadata=metadata))
    if kind is Kind.CANCELLED:
        await _cancel_some_time(rng, stream)
    await stream
    return _outcome(kind, key, router, began, stream, cut_after)


async def _cancel_some_time(rng: random.Random, stream: Stream) -> None:
    """Cancel at once, after some time, or with some token; a stream may be over by then."""
    how = rng.randrange(3)
    if how == 1:
        await asyncio.sleep(rng.uniform(0.0, 2.0))
    elif how == 2:
        tokens = rng.randint(1, 40)
        try:
            async with asyncio.timeout(20):
                await stream.at(tokens)
        except TimeoutError:  # its router or its scheduler stands still
            pass
    stream.cancel()


def _secret(key: str) -> str:
    return f"{key}-secret"


def _outcome(kind: Kind, key: str, router: str, began: float, stream: Stream, cut_after: int = 0) -> Outcome:
    code, reason, detail = "OK", "", ""
    if stream.cancelled:
        code = grpc.StatusCode.CANCELLED.name
    elif stream.error is not None:
        code, detail = stream.error.code().name, stream.error.details() or ""
        reason = _reason(stream.error)
    elif stream.finish is None:
        code = "NO_FINISH"
    stream.let_go()  # of some ten thousand
    return Outcome(kind, key, router, began, time.monotonic(), code, reason, detail, stream, cut_after)


def _reason(error: grpc.aio.AioRpcError) -> str:
    try:
        status, info = rpc_status.from_call(error), error_details_pb2.ErrorInfo()
    except ValueError:  # the deadline passed while the router's own status came in
        return ""
    if status is None or not status.details or not status.details[0].Unpack(info):
        return ""
    return info.reason


def listed_adapters(answer: router_pb2.ListAdaptersResponse) -> dict[str, int]:
    """Return the rank of every adapter that a router lists."""
    return {adapter.adapter_id: adapter.rank for adapter in answer.adapters}


def slowest(outcomes: Sequence[Outcome]) -> float:
    """Return the longest time that a stream took."""
    return max((outcome.ended - outcome.began for outcome in outcomes), default=0.0)
