"""What clients do in a run: they ask, read slowly or stop reading, cancel, lose their connection, change adapters."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from lorrery.service.network.credentials import bearer
from lorrery.service.settings.cluster import Settings
from lorrery.v1 import router_pb2, router_pb2_grpc, types_pb2
from lorrery.vocabulary.endings import FinishReason
from tests.cluster.client import Ask, text_of
from tests.virtual.clock import Host
from tests.virtual.network import Call, Channel, Network
from tests.virtual.processes import Process
from tests.virtual.ways import KEYS, LATE, LISTED


class Expected:
    """What must come of a request that nothing ends early.

    Attributes:
        token_ids: all of them.
        text: of them, up to the stop string.
        reason: why they end there.
    """

    def __init__(self, ask: Ask, settings: Settings, stop_at: float | None, stop_characters: int) -> None:
        self.token_ids, self.reason = ask.expected(settings)
        self.text = text_of(self.token_ids)
        self.stop = ""
        if stop_at is not None and len(self.text) >= stop_characters:
            self._stop(round(stop_at * (len(self.text) - stop_characters)), stop_characters)

    def _stop(self, at: int, characters: int) -> None:
        """End at a stop string that stands in the text."""
        stop = self.text[at : at + characters].strip()
        if not stop:
            return
        self.stop, at = stop, self.text.index(stop)
        num_tokens = next(
            n for n in range(len(self.token_ids) + 1) if len(text_of(self.token_ids[:n])) >= at + len(stop)
        )
        self.token_ids, self.text, self.reason = self.token_ids[:num_tokens], self.text[:at], int(FinishReason.STOP)


class Request:
    """One request of a client, and what came of it."""

    def __init__(self, number: object, ask: Ask, expected: Expected, call: Call, note: Callable[..., None]) -> None:
        self.number, self.ask, self.expected, self.call, self.note = number, ask, expected, call, note
        self.call_id = f"request-{number}"
        self.key = ""
        self.token_ids: list[int] = []
        self.text = ""
        self.finish: router_pb2.Finish | None = None
        self.error: grpc.aio.AioRpcError | None = None
        self.slow_seconds = 0.0
        self.cancelled = False
        self.cut = False
        self.has_deadline = False
        self.over = False

    async def read(self) -> None:
        """Read it to its end."""
        try:
            while isinstance(message := await self.call.read(), router_pb2.GenerateResponse):
                assert self.finish is None, "a message after the last"
                self.token_ids += message.token_ids
                self.text += message.text
                self.finish = message.finish if message.HasField("finish") else None
                if self.slow_seconds:
                    await asyncio.sleep(self.slow_seconds)
        except grpc.aio.AioRpcError as error:
            self.error = error
        except asyncio.CancelledError:
            if not self.cancelled:
                raise
        finally:
            self.over = True
            how = "" if self.error is None else f"{self.error.code().name} {self.error.details()}"
            self.note("client has the end of", self.number, self.token_ids, how)


class Clients:
    """All clients of a run, on one host.

    Args:
        host: theirs.
        network: to the routers.
        rng: of the run.
        settings: of the cluster.
        note: puts a line into the timeline.

    Attributes:
        calm: whether nothing goes wrong, so that no connection breaks.
        late: whether there are adapters that come and go.
        requests: all that were sent.
    """

    def __init__(
        self, host: Host, network: Network, rng: random.Random, settings: Settings, note: Callable[..., None]
    ) -> None:
        self.host = host
        self.calm = False
        self.late = False
        self.requests: list[Request] = []
        self._network, self._rng, self._settings, self._note = network, rng, settings, note
        self._has_keys = settings.router.keys is not None

    def ask_something(self, number: int, routers: list[Process], later: Callable[..., None]) -> None:
        """Send a request of some kind, and perhaps think better of it."""
        rng = self._rng
        most = rng.choice([1, 3, rng.randint(2, 40), rng.randint(2, rng.choice([20, 40, 120]))])
        by_eos = rng.random() < 0.3
        ask = Ask(
            seed=rng.getrandbits(64),
            prompt_tokens=rng.choice([1, rng.randint(1, 60), rng.randint(1, 200)]),
            max_new_tokens=most,
            adapter_id=rng.choice(LATE) if self.late and rng.random() < 0.5 else rng.choice(LISTED),
            ignore_eos=not by_eos,
            true_output_tokens=rng.randint(1, most) if by_eos else None,
        )
        key = rng.choice(KEYS) if self._has_keys else ""
        stop_at = rng.random() if rng.random() < 0.15 else None
        request = self.ask(ask, rng.choice(routers), rng.random(), number, key=key, stop_at=stop_at)
        if rng.random() < 0.15:
            later(rng.random() * rng.choice([0.05, 1.0]), self.cancel, request)
        elif not self.calm and rng.random() < 0.05:
            later(rng.random(), self.cut, request)

    def ask(
        self,
        ask: Ask,
        router: Process,
        way: float = 1.0,
        number: object = "probe",
        *,
        key: str = "operator",
        stop_at: float | None = None,
    ) -> Request:
        """Ask a router; `way`: how the client reads; `stop_at`: where in its text a stop string is taken from."""
        rng = self._rng
        slow = way < 0.1
        stub = router_pb2_grpc.RouterServiceStub(Channel(self._network, router.name, 2 if slow else 256))
        deadline = 0.5 if 0.1 <= way < 0.15 else None
        expected = Expected(ask, self._settings, stop_at, rng.randint(2, 9) if stop_at is not None else 0)
        message = ask.message()
        message.request_id = f"request-{number}"
        if expected.stop:
            message.sampling.stop_sequences.append(expected.stop)
        self._note("client asks", number, router.name, ask, key, repr(expected.stop))

        def begin() -> Request:
            # A router that has just begun listens before it serves; a client waits for that.
            call = stub.Generate(message, timeout=deadline, wait_for_ready=True, metadata=self._metadata(key))
            request = Request(number, ask, expected, call, self._note)
            request.key = key
            request.has_deadline = deadline is not None
            request.slow_seconds = rng.choice([0.05, 0.3, 5.0]) if slow else 0.0
            self.host.run(request.read())
            return request

        request: Request = self.host.call(begin)
        self.requests.append(request)
        return request

    def _metadata(self, key: str) -> Any:
        return bearer(key) if self._has_keys else ()

    def cancel(self, request: Request) -> None:
        """Let a client go."""
        if not request.over and not request.cancelled:
            self._note("client cancels", request.number)
            request.cancelled = True
            request.call.cancel()

    def cut(self, request: Request) -> None:
        """Break a client's connection."""
        self._note("a client's connection breaks", request.number)
        request.cut = True
        request.call.cut(self._rng.random(), self._rng.random())

    def change_adapter(self, routers: list[Process]) -> None:
        """Load or unload an adapter."""
        rng = self._rng
        router, name, rank = rng.choice(routers), rng.choice(LATE), rng.choice([0, 8, 16])
        self._note("client loads" if rank else "client unloads", name, rank, router.name)
        stub = router_pb2_grpc.RouterServiceStub(Channel(self._network, router.name))
        metadata = self._metadata("operator")

        async def change() -> None:
            try:
                if rank:
                    adapter = types_pb2.Adapter(adapter_id=name, rank=rank)
                    load = router_pb2.LoadAdapterRequest(adapter=adapter)
                    await stub.LoadAdapter(load, timeout=10.0, metadata=metadata)
                else:
                    unload = router_pb2.UnloadAdapterRequest(adapter_id=name)
                    await stub.UnloadAdapter(unload, timeout=10.0, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                self._note("refused:", name, rank, error.code().name, error.details())

        self.host.run(change())

    @property
    def all_over(self) -> bool:
        """Whether every stream has ended."""
        return all(request.over for request in self.requests)
