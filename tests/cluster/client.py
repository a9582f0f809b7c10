"""A client of a cluster's router, and what the mock model must answer.

A token id is a pure function of (model, adapter, seed, position), so a test knows every stream's tokens beforehand,
whatever becomes of the worker or the scheduler in between.
"""

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
import grpc.aio
import numpy as np
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from lorrery.service.local.cluster import LocalCluster
from lorrery.service.settings.cluster import Settings
from lorrery.tokenizer.base import FIRST_WORD_ID, NUM_WORDS
from lorrery.tokenizer.file import BuiltinTokenizer
from lorrery.v1 import router_pb2, router_pb2_grpc, types_pb2
from lorrery.vocabulary.endings import FinishReason
from lorrery.worker.device.output import LognormalLength, Sampling, ending, sequence_seed, tokens_between

TIMEOUT_SECONDS = 100.0
"""Longer than any stream of a test lasts, and less than pytest waits."""
PROMPT_TOKEN_ID = 3

_TOKENIZER = BuiltinTokenizer()


@dataclass(frozen=True)
class Ask:
    """One request. Without `ignore_eos` it ends after `true_output_tokens`, or where the length model says.

    With `output` it says what the output is, word for word.
    """

    seed: int
    prompt_tokens: int = 8
    max_new_tokens: int = 16
    adapter_id: str = ""
    ignore_eos: bool = True
    true_output_tokens: int | None = None
    model: str = ""
    output: str | None = None
    priority: int = 0
    cache_salt: str = ""

    def message(self) -> router_pb2.GenerateRequest:
        return router_pb2.GenerateRequest(
            model=self.model,
            token_ids=router_pb2.TokenIds(ids=[PROMPT_TOKEN_ID] * self.prompt_tokens),
            adapter_id=self.adapter_id,
            seed=self.seed,
            sampling=types_pb2.SamplingParams(max_new_tokens=self.max_new_tokens, ignore_eos=self.ignore_eos),
            true_output_tokens=self.true_output_tokens,
            constraint=None if self.output is None else router_pb2.Constraint(text=self.output),
            priority=self.priority,
            cache_salt=self.cache_salt,
        )

    def expected(self, settings: Settings) -> tuple[list[int], int]:
        """Return the token ids and the finish reason that must come."""
        if self.output is not None:
            token_ids = [*_TOKENIZER.encode_stop(self.output), _TOKENIZER.eos_id]
            if len(token_ids) > self.max_new_tokens:
                return token_ids[: self.max_new_tokens], int(FinishReason.LENGTH)
            return token_ids, int(FinishReason.EOS)
        seed = sequence_seed(settings.model, self.adapter_id, self.seed)
        sampling = Sampling(self.seed, self.max_new_tokens, self.ignore_eos, self.true_output_tokens)
        output = settings.worker.output
        lengths = LognormalLength(output.length_median, output.length_sigma)
        end = ending(seed, sampling, self.prompt_tokens, np.empty(0, np.uint32), lengths)
        return tokens_between(seed, 0, end.output_tokens, end).tolist(), int(end.reason)


def mixed_asks(
    count: int, rng: random.Random, *, prompt: tuple[int, int], output: tuple[int, int], adapters: Iterable[str] = ("",)
) -> list[Ask]:
    """Return requests of many kinds; `prompt` and `output` are ranges of token counts, both ends included.

    A third end by EOS at their true length, the rest by their budget; of both kinds a sixth says what its output is.
    """
    names = list(adapters)
    asks: list[Ask] = []
    for _ in range(count):
        max_new_tokens = rng.randint(*output)
        by_eos = rng.random() < 1 / 3
        asks.append(
            Ask(
                seed=rng.getrandbits(64),
                prompt_tokens=rng.randint(*prompt),
                max_new_tokens=max_new_tokens,
                adapter_id=rng.choice(names),
                ignore_eos=not by_eos,
                true_output_tokens=rng.randint(1, max_new_tokens) if by_eos else None,
                output=some_output(rng, max_new_tokens),
            )
        )
    return asks


def some_output(rng: random.Random, max_new_tokens: int) -> str | None:
    """Return what a request says its output is, perhaps more than it may have; None, five times in six: it does not."""
    if rng.random() >= 1 / 6:
        return None
    return text_of(rng.choices(range(FIRST_WORD_ID, FIRST_WORD_ID + NUM_WORDS), k=rng.randint(0, max_new_tokens + 2)))


def error_info(error: grpc.aio.AioRpcError) -> tuple[str, dict[str, str], bool]:
    """Return an error's reason and facts, and whether it says when to try again."""
    status, info = rpc_status.from_call(error), error_details_pb2.ErrorInfo()
    assert status is not None, error
    assert status.details[0].Unpack(info)
    assert info.domain == "lorrery"
    return info.reason, dict(info.metadata), len(status.details) > 1


class Stream:
    """One Generate call, read by a task of its own; `await` it for the end.

    Attributes:
        token_ids: all that have come, in order.
        num_messages: how many messages with tokens they came in.
        text: all that has come.
        finish: of the last message.
        error: what the call ended with, if not well.
    """

    def __init__(self, ask: Ask, call: grpc.aio.UnaryStreamCall) -> None:
        self.ask = ask
        self.call = call
        self.token_ids: list[int] = []
        self.num_messages = 0
        self.text = ""
        self.finish: router_pb2.Finish | None = None
        self.error: grpc.aio.AioRpcError | None = None
        self.cancelled = False
        self._progress = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    def __await__(self):
        return self._task.__await__()

    @property
    def over(self) -> bool:
        return self._task.done()

    def cancel(self) -> None:
        """Cancel the call."""
        self.call.cancel()

    async def at(self, num_tokens: int) -> None:
        """Return once so many tokens have come, or the stream has ended."""
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while len(self.token_ids) < num_tokens and not self.over:
                self._progress.clear()
                await self._progress.wait()

    async def _read(self) -> Self:
        try:
            while isinstance(message := await self.call.read(), router_pb2.GenerateResponse):
                assert self.finish is None, "a message after the last"
                self.token_ids += message.token_ids
                self.num_messages += bool(message.token_ids)
                self.text += message.text
                self.finish = message.finish if message.HasField("finish") else None
                self._progress.set()
        except grpc.aio.AioRpcError as error:
            self.error = error
        except asyncio.CancelledError:
            # grpc.aio raises it for a call that was cancelled, too.
            if not self.call.cancelled():
                raise
            self.cancelled = True
        finally:
            self.call.cancel()
            self._progress.set()
        return self

    def let_go(self) -> None:
        """Forget the call, which is over; what came stays."""
        del self.call, self._task

    def check(self, settings: Settings) -> types_pb2.Usage:
        """Assert that everything asked for has come, once and in order; return the usage."""
        assert self.error is None, f"{self.ask}: {self.error.code()}: {self.error.details()}"
        token_ids, reason = self.ask.expected(settings)
        assert self.token_ids == token_ids, f"{self.ask}: {_first_difference(self.token_ids, token_ids)}"
        assert self.finish is not None, f"{self.ask}: no finish"
        assert self.finish.reason == reason
        usage = self.finish.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (self.ask.prompt_tokens, len(token_ids))
        assert self.text == text_of(token_ids)
        return usage

    def check_so_far(self, settings: Settings) -> None:
        """Assert that what has come is right and in order, of a stream that the test does not see to its end."""
        assert self.error is None, f"{self.ask}: {self.error.code()}: {self.error.details()}"
        expected = self.ask.expected(settings)[0][: len(self.token_ids)]
        assert self.token_ids == expected, f"{self.ask}: {_first_difference(self.token_ids, expected)}"


def text_of(token_ids: list[int]) -> str:
    """Return the text that the built-in vocabulary gives for these."""
    return _TOKENIZER.detokenizer().push(token_ids)


def _first_difference(got: list[int], expected: list[int]) -> str:
    differing = (index for index, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1])
    at = next(differing, min(len(got), len(expected)))
    return f"{len(got)} of {len(expected)} tokens; at {at}: {got[at : at + 4]}, expected {expected[at : at + 4]}"


class Client:
    """Calls one router; `async with`.

    Args:
        address: HOST:PORT.
        options: of the channel.
    """

    def __init__(self, address: str, options: Iterable[tuple[str, int]] = ()) -> None:
        self.address = address
        self.channel = grpc.aio.insecure_channel(
            address, options=[("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0), *options]
        )
        self.stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(self.channel)
        self.streams: list[Stream] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self.streams:
            stream.cancel()
        await asyncio.gather(*(stream._task for stream in self.streams), return_exceptions=True)
        await self.channel.close()

    def call(self, ask: Ask, *, timeout: float = TIMEOUT_SECONDS) -> grpc.aio.UnaryStreamCall:
        """Send a request whose stream the test reads, and cancels, by itself."""
        return self.stub.Generate(ask.message(), timeout=timeout)

    def start(self, ask: Ask, *, timeout: float = TIMEOUT_SECONDS) -> Stream:
        """Send a request; its stream is cancelled at the client's end at the latest."""
        stream = Stream(ask, self.call(ask, timeout=timeout))
        self.streams.append(stream)
        return stream

    async def failure(self, ask: Ask | router_pb2.GenerateRequest) -> tuple[grpc.StatusCode, str]:
        """Send a request that must fail; return status and message."""
        error = await self.error(ask)
        return error.code(), error.details() or ""

    async def error(self, ask: Ask | router_pb2.GenerateRequest) -> grpc.aio.AioRpcError:
        """Send a request that must fail; return how."""
        message = ask.message() if isinstance(ask, Ask) else ask
        call = self.stub.Generate(message, timeout=TIMEOUT_SECONDS)
        try:
            first = await call.read()
        except grpc.aio.AioRpcError as error:
            return error
        finally:
            call.cancel()
        raise AssertionError(f"no error, but {first}")

    async def shards(self) -> list[router_pb2.Shard]:
        """Return the cluster's status."""
        request = router_pb2.GetClusterStatusRequest()
        return list((await self.stub.GetClusterStatus(request, timeout=TIMEOUT_SECONDS)).shards)

    async def adapters(self) -> dict[str, int]:
        """Return the rank of every known adapter."""
        answer = await self.stub.ListAdapters(router_pb2.ListAdaptersRequest(), timeout=TIMEOUT_SECONDS)
        return {adapter.adapter_id: adapter.rank for adapter in answer.adapters}

    async def load_adapter(self, adapter_id: str, rank: int) -> None:
        adapter = types_pb2.Adapter(adapter_id=adapter_id, rank=rank)
        await self.stub.LoadAdapter(router_pb2.LoadAdapterRequest(adapter=adapter), timeout=TIMEOUT_SECONDS)

    async def unload_adapter(self, adapter_id: str) -> None:
        request = router_pb2.UnloadAdapterRequest(adapter_id=adapter_id)
        await self.stub.UnloadAdapter(request, timeout=TIMEOUT_SECONDS)


def client_of(cluster: LocalCluster) -> Client:
    """Return a client of a cluster's router."""
    return Client(cluster.router_address)
