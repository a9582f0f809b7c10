"""What the engine protocols share: authentication, served names, load, adapters, and the tokenizer's files.

An engine is the whole cluster. With `EnginePort.adapter` it serves that adapter under its own name, for gateways
without support for adapters.
"""

import asyncio
import hashlib
import io
import time
import zipfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import grpc.aio

from lorrery.router.access import ApiKey, check_operator
from lorrery.router.edges.engines.generation import MAX_OUTPUTS, Open, OpenRequests, Write
from lorrery.router.edges.structured_output.drawing import SharedConstraint
from lorrery.router.field_names import Names, named
from lorrery.router.generate import GrpcCall, abort_stream
from lorrery.router.handler import Handler
from lorrery.router.metrics import RouterMetrics
from lorrery.router.settings import EnginePort
from lorrery.service.errors import InvalidRequest, NoKvEvents, NotOffered, RequestError, UnknownName
from lorrery.service.names import quoted
from lorrery.service.network import status
from lorrery.service.network.credentials import authorization, certificate_roles
from lorrery.service.telemetry.series import Throughput
from lorrery.tokenizer.file import SHIPPED
from lorrery.v1 import router_pb2, scheduler_pb2, types_pb2

CHUNK_BYTES = 1 << 20
_NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "added_tokens.json", "tokenizer.model"),
)
"""Files of a tokenizer; its folder may be a model's, which has weights too."""
_YEAR_ZERO = (1980, 1, 1, 0, 0, 0)
"""Fixed time stamp, so that equal files make equal archives."""


def tokenizer_folder(setting: Path | None) -> Path:
    """Return the folder of the tokenizer that `router.tokenizer` names; unset: the shipped one's."""
    if setting is None:
        return SHIPPED.resolve()
    return (setting if setting.is_dir() else setting.parent).resolve()


async def archive(folder: Path) -> bytes:
    """Return a zip archive of a tokenizer's files.

    Raises:
        OSError: a file cannot be read.
    """
    return await asyncio.to_thread(_archive, folder)


def chunks(content: bytes) -> Iterator[tuple[bytes, str]]:
    """Yield an archive in chunks, the last with the SHA-256 of the whole in hexadecimal."""
    for begin in range(0, len(content), CHUNK_BYTES):
        last = begin + CHUNK_BYTES >= len(content)
        yield content[begin : begin + CHUNK_BYTES], hashlib.sha256(content).hexdigest() if last else ""


def _archive(folder: Path) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as files:
        for name in _NAMES:
            path = folder / name
            if path.is_file():
                files.writestr(zipfile.ZipInfo(name, _YEAR_ZERO), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return content.getvalue()


_T = TypeVar("_T")


@dataclass(frozen=True)
class Load:
    """The load of an engine.

    Attributes:
        num_unstarted_tokens: prompt tokens of this port's requests without output.
        tokens_per_second: tokens written by this router to all its clients, per wall second.
    """

    num_running: int
    num_waiting: int
    kv_tokens: int
    max_kv_tokens: int
    max_running: int
    num_unstarted_tokens: int
    tokens_per_second: float

    @property
    def kv_usage(self) -> float:
        """Share of the KV pool in use."""
        return self.kv_tokens / self.max_kv_tokens if self.max_kv_tokens else 0.0


class Engine:
    """The cluster as one inference engine: what the services of all engine protocols call.

    Args:
        handler: of the router.
        metrics: of the router.
        port: settings of this engine.

    Attributes:
        folder: of its tokenizer.
    """

    def __init__(self, handler: Handler, metrics: RouterMetrics, port: EnginePort) -> None:
        self.handler = handler
        self.settings = handler.settings
        self.folder = str(tokenizer_folder(self.settings.router.tokenizer))
        self.instance_id = uuid4().hex
        self._port = port
        self._requests = OpenRequests()
        self._began = time.monotonic()
        self._throughput = Throughput(lambda: metrics.output_tokens)

    @property
    def served_name(self) -> str:
        """The model name that clients use without naming an adapter."""
        return self._port.adapter or self.settings.model

    @property
    def supports_lora(self) -> bool:
        """Whether requests may name an adapter."""
        return not self._port.adapter

    @property
    def max_model_len(self) -> int:
        """Upper bound on prompt plus output, in tokens."""
        return self.settings.scheduler.max_req_total_len

    @property
    def uptime_seconds(self) -> float:
        """Seconds since it was created."""
        return time.monotonic() - self._began

    @property
    def num_open(self) -> int:
        """Number of open requests on this port."""
        return self._requests.num_open

    def caller(self, context: status.Context) -> ApiKey:
        """Authenticate the caller; return its permissions.

        Raises:
            Unauthenticated: no valid key.
        """
        return self.handler.access.caller(authorization(context), certificate_roles(context))

    async def answer(self, context: status.Context, answer: Callable[[ApiKey], Awaitable[_T]]) -> _T:
        """Serve a call that is not a request; errors of a scheduler become its status.

        Raises:
            RequestError: raised by `answer`.
        """
        try:
            return await answer(self.caller(context))
        except grpc.aio.AioRpcError as error:
            await status.pass_on(context, error)

    # --- requests ---------------------------------------------------------------------------------------------------

    def adapter_of(self, *names: str) -> str:
        """Return the adapter that a request names: the first of `names` that is neither empty nor the base model.

        Raises:
            UnknownName: this engine serves one adapter only, and the name is another.
        """
        name = next((name for name in names if name not in ("", self.settings.model)), "")
        if self._port.adapter and name not in ("", self._port.adapter):
            raise UnknownName(
                f"adapter {quoted(name)} is not served here; this port serves {self._port.adapter!r}",
                field="adapter_id",
                value=quoted(name),
            )
        return self._port.adapter or name

    async def generate(
        self,
        context: status.Context,
        method: str,
        message: router_pb2.GenerateRequest,
        n: int,
        write: Write,
        names: Names,
    ) -> None:
        """Serve n outputs of one request, and write their messages; an error becomes the call's status.

        Args:
            context: of the call.
            method: the method called, SERVICE/METHOD.
            message: for one output, with its prompt as token ids; its seed counts up over the outputs.
            n: number of outputs; 0 means one.
            write: takes the messages.
            names: field names for errors.
        """
        try:
            with named(names), self.handler.traces.grpc(context, method):
                await self._generate(context, message, n, write)
        except RequestError as error:
            await abort_stream(context, error)

    async def _generate(
        self, context: status.Context, message: router_pb2.GenerateRequest, n: int, write: Write
    ) -> None:
        if n > MAX_OUTPUTS:
            text = f"n is {n}; at most {MAX_OUTPUTS} outputs of one request; ask for fewer"
            raise InvalidRequest(text, field="n", value=n, limit=MAX_OUTPUTS)
        key = self.caller(context).name
        message.request_id = message.request_id or uuid4().hex
        prompt_tokens = len(message.token_ids.ids)
        if message.HasField("truncate_prompt_tokens"):
            prompt_tokens = min(prompt_tokens, message.truncate_prompt_tokens)
        constraint = SharedConstraint(message.constraint) if message.HasField("constraint") else None
        request = Open(_outputs(message, max(1, n)), prompt_tokens)
        self._requests.add(key, message.request_id, request)
        try:
            await request.run(context, lambda one, call: self._serve(context, one, call, constraint), write)
        finally:
            self._requests.remove(key, message.request_id)

    async def _serve(
        self,
        context: status.Context,
        message: router_pb2.GenerateRequest,
        call: GrpcCall,
        constraint: SharedConstraint | None,
    ) -> None:
        await self.handler.generate(message, lambda: self.caller(context), call, constraint)

    def abort(self, context: status.Context, *request_ids: str) -> int:
        """Abort the caller's requests with these ids; return how many were open.

        Raises:
            Unauthenticated: no valid key.
        """
        return self._requests.abort(self.caller(context).name, request_ids)

    # --- description ------------------------------------------------------------------------------------------------

    async def workers(self, context: status.Context) -> tuple[list[types_pb2.Worker], int]:
        """Return the workers, and the number of requests that wait for one."""
        shards = (await self.answer(context, self.handler.cluster_status)).shards
        return [worker for shard in shards for worker in shard.workers], sum(shard.num_unplaced for shard in shards)

    def why_unhealthy(self) -> str:
        """Return why it cannot serve; empty: it can."""
        if not self.handler.is_ready:
            return "no scheduler is connected, or the router drains"
        return ""

    async def load(self, context: status.Context) -> Load:
        """Return the load.

        Raises:
            PermissionDenied: the caller is no operator.
        """
        check_operator(self.caller(context), "read an engine's load")
        workers, num_unplaced = await self.workers(context)
        return Load(
            num_running=sum(worker.num_running for worker in workers),
            num_waiting=sum(worker.num_waiting for worker in workers) + num_unplaced,
            kv_tokens=sum(worker.kv_tokens for worker in workers),
            max_kv_tokens=sum(worker.max_total_token_num for worker in workers),
            max_running=self.max_running(len(workers)),
            num_unstarted_tokens=self._requests.num_unstarted_tokens,
            tokens_per_second=self._throughput.per_second(),
        )

    def max_running(self, num_workers: int) -> int:
        """Return how many requests can run at once on `num_workers` workers."""
        return num_workers * self.settings.scheduler.max_running

    # --- KV events --------------------------------------------------------------------------------------------------

    async def follow_kv_events(
        self, context: status.Context, write: Callable[[scheduler_pb2.KvEvents], Awaitable[None]]
    ) -> None:
        """Write the events of its prefix cache, without end: those of all workers merged into one.

        An engine that serves one adapter under its name has that adapter's blocks, presented as blocks of a base model.

        Raises:
            NotOffered: KV events are off.
            RequestError: the caller may not follow them, or reads too slowly.
        """
        try:
            async with aclosing(self.handler.kv_events(self.caller(context), self._port.adapter or None)) as following:
                async for events in following:
                    if self._port.adapter:
                        _make_base(events)
                    await write(events)
        except NoKvEvents as error:
            raise NotOffered(str(error), call="SubscribeKvEvents") from None

    async def kv_event_sources(self, context: status.Context) -> list[types_pb2.KvEventSource]:
        """Return the addresses at which its workers publish KV events."""
        workers, _ = await self.workers(context)
        return [worker.kv_events for worker in workers if worker.HasField("kv_events")]

    # --- adapters ---------------------------------------------------------------------------------------------------

    async def list_loras(self, context: status.Context) -> dict[str, int]:
        """Return the adapters that requests may use: their numbers, by name."""
        known = await self.answer(context, self.handler.list_adapters)
        return {one.adapter_id: one.number for one in sorted(known.adapters, key=lambda one: one.adapter_id)}

    async def load_lora(self, context: status.Context, name: str, path: str) -> None:
        """Load an adapter; its rank is read from its folder on this machine.

        Raises:
            RequestError: it cannot be loaded.
        """

        async def load(caller: ApiKey) -> None:
            rank = await self.handler.adapter_rank(caller, name, path)
            await self.handler.load_adapter(caller, types_pb2.Adapter(adapter_id=name, rank=rank), path=path)

        await self.answer(context, load)

    async def unload_lora(self, context: status.Context, name: str) -> None:
        """Unload an adapter.

        Raises:
            RequestError: it is not loaded, or may not be unloaded.
        """
        await self.answer(context, lambda caller: self.handler.unload_adapter(caller, name))


def not_offered(call: str, why: str) -> Any:  # noqa: ANN401  it stands for methods of any generated class
    """Return a handler that refuses a call without meaning for a cluster."""

    async def answer(servicer: object, request: object, context: status.Context) -> None:
        raise NotOffered(f"{call} is not supported here: {why}", call=call)

    return answer


def _outputs(message: router_pb2.GenerateRequest, n: int) -> list[router_pb2.GenerateRequest]:
    if n == 1:
        return [message]
    messages = []
    group_id = uuid4().hex
    for index in range(n):
        one = router_pb2.GenerateRequest()
        one.CopyFrom(message)
        one.request_id = f"{message.request_id}-{index}" if index else message.request_id
        one.group.id, one.group.num_outputs = group_id, n
        if one.HasField("seed"):
            one.seed = (message.seed + index) % 2**64
        messages.append(one)
    return messages


def _make_base(events: scheduler_pb2.KvEvents) -> None:
    for event in events.events:
        if event.HasField("stored"):
            event.stored.ClearField("adapter")
