"""The operations that a router offers, independent of protocol: gRPC calls and HTTP routes all end here.

An edge parses requests and renders answers; access checks, metrics and errors are shared and live here.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from prometheus_client import CollectorRegistry

from lorrery.router import adapters, faults
from lorrery.router.access import (
    Access,
    ApiKey,
    check_load,
    check_operator,
    taken_back,
    visible_adapters,
    visible_status,
)
from lorrery.router.checks import receive_bytes
from lorrery.router.edges.structured_output.drawing import SharedConstraint
from lorrery.router.faults import Injector
from lorrery.router.generate import Call, Generation, cause_of
from lorrery.router.logprobs import LogprobModel
from lorrery.router.metrics import RouterMetrics
from lorrery.router.peft import AdapterReader
from lorrery.router.placement import Placement
from lorrery.router.reader import RequestReader, encode_chat, encoded, prompt_token_ids, unknown_model
from lorrery.router.timing import Timing
from lorrery.router.tracing import CallTraces, current
from lorrery.router.watching import ClusterWatch, follow
from lorrery.service.errors import (
    InjectedFault,
    Internal,
    InvalidRequest,
    Overloaded,
    Reason,
    RequestError,
    Unattainable,
    Unavailable,
    UnknownName,
)
from lorrery.service.names import quoted
from lorrery.service.network import status
from lorrery.service.settings.cluster import Settings
from lorrery.service.telemetry.log import get_logger
from lorrery.service.telemetry.tracing import Tracer
from lorrery.tokenizer.file import open_tokenizer
from lorrery.v1 import router_pb2, scheduler_pb2, types_pb2
from lorrery.view.frame import checked_hz
from lorrery.vocabulary.endings import MEANINGS

_OUTCOMES = {
    "INVALID_ARGUMENT": "invalid",
    "NOT_FOUND": "not_found",
    "RESOURCE_EXHAUSTED": "overloaded",
    "FAILED_PRECONDITION": "rank_over_limit",
    "UNAUTHENTICATED": "unauthenticated",
    "PERMISSION_DENIED": "denied",
    "UNAVAILABLE": "unavailable",
}

_log = get_logger("router.handler")


class Handler:
    """The operations of a router, which every edge calls.

    Args:
        settings: of the cluster.
        metrics: of the router.
        tracer: receives the spans of requests; None: tracing is off.

    Attributes:
        tokenizer: shared by all clients.
        logprobs: log-probability model of its tokens.
        traces: of the calls that its edges serve.
        access: authenticates callers.
        num_open: open requests.

    Raises:
        SettingsError: the tokenizer or the file of keys cannot be read.
    """

    def __init__(self, settings: Settings, metrics: RouterMetrics, tracer: Tracer | None = None) -> None:
        self.settings = settings
        self.traces = CallTraces(tracer)
        self.tokenizer = open_tokenizer(settings.router.tokenizer, settings.router.vocab_size)
        self.logprobs = LogprobModel(settings.worker.output.mode, self.tokenizer)
        self.access = Access(settings)
        self._metrics = metrics
        metrics.tenants.foresee(self.access.tenants)
        self._placement = Placement(settings, metrics)
        self._cluster_status = adapters.ClusterStatus(self._placement)
        self._injector = Injector(settings, metrics)
        self._generation = Generation(
            self.access,
            RequestReader(settings, self.tokenizer, self.access),
            self.tokenizer,
            self.logprobs,
            self._placement,
            self._injector,
            metrics,
            settings.router.reader_timeout_seconds,
        )
        self._paths = adapters.AdapterPaths(settings, self._placement.log)
        self._adapters = AdapterReader(settings.adapters.max_lora_rank, quirks=settings.router.vllm_quirks)
        self.num_open = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        metrics.watch(
            open_handlers=lambda: self.num_open,
            in_flight=lambda: self._placement.num_in_flight,
            waiting=lambda: self._placement.num_waiting,
        )

    @property
    def receive_bytes(self) -> int:
        """Upper bound on the size of a client's message; follows from the longest prompt."""
        settings = self.settings
        longest_token_bytes, max_stop_bytes = self.tokenizer.longest_token_bytes, settings.router.max_stop_bytes
        return receive_bytes(settings.scheduler.max_req_input_len, longest_token_bytes, max_stop_bytes)

    @property
    def is_ready(self) -> bool:
        """Whether requests can be served: a scheduler is connected, and the router does not drain."""
        return self._placement.any_connected.is_set() and not self._draining

    async def can_serve(self) -> bool:
        """Return whether a request would be served now: `is_ready`, and a worker is attached."""
        return self.is_ready and await self._cluster_status.has_workers()

    async def run(self, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        """Keep the streams to the schedulers until cancelled; ready once the first is up."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._placement.run(), name="placement")
            tasks.create_task(self._generation.cut_stuck_readers(), name="stuck readers")
            tasks.create_task(self._generation.cut_revoked(), name="revoked keys")
            await self._placement.any_connected.wait()
            self._injector.begin()
            await set_ready(True)

    async def drain(self) -> None:
        """Refuse new requests; return when all open ones have ended."""
        self._draining = True
        await self._idle.wait()

    def expect_no_scheduler(self) -> None:
        """Stop requests from waiting for a scheduler, until one connects after all."""
        self._placement.expect_no_scheduler()

    # --- generating -------------------------------------------------------------------------------------------------

    async def generate(
        self,
        message: router_pb2.GenerateRequest,
        caller: Callable[[], ApiKey],
        call: Call,
        constraint: SharedConstraint | None = None,
    ) -> None:
        """Serve one request, and count its outcome.

        Args:
            message: the client's request.
            caller: authenticates the caller; Unauthenticated that it raises is counted too.
            call: receives the output.
            constraint: on the output, in place of the message's, which each of many outputs would copy; None: that.

        Raises:
            RequestError: the request is refused, or fails before its end.
        """
        served = current()
        trace = None if served is None else served.output()
        timing = Timing(self._metrics, "" if served is None else served.exemplar)
        outcome = "failed"
        self.num_open += 1
        self._idle.clear()
        try:
            who = caller()
            self._check_open()
            await self._generation.stream(message, who, call, timing, trace, constraint)
            outcome = "ok"
        except asyncio.CancelledError as error:
            outcome = _cancelled(call, error)
            raise
        except RequestError as error:
            outcome = _outcome(error)
            raise
        except Exception as error:
            _log.exception("generate_failed", request_id=message.request_id)
            raise Internal(str(error)) from error
        finally:
            timing.ended(outcome)
            if trace is not None:
                trace.ended(outcome, sys.exception())
            self.num_open -= 1
            if not self.num_open:
                self._idle.set()

    def _check_open(self) -> None:
        """Check that there is room for one more request; the new one is counted already.

        Raises:
            RequestError: there is no room.
        """
        if self._draining:
            raise Unavailable("the router is draining; ask another", Reason.DRAINING)
        if self.num_open > (limit := self.settings.router.max_open_requests):
            raise Overloaded(
                f"{limit} requests are open; max_open_requests is {limit}; try later",
                Reason.TOO_MANY_OPEN_REQUESTS,
                field="max_open_requests",
                limit=limit,
            )

    # --- adapters and status ----------------------------------------------------------------------------------------
    # These raise RequestError, or pass on the scheduler's grpc.aio.AioRpcError.

    async def list_adapters(self, caller: ApiKey) -> router_pb2.ListAdaptersResponse:
        """List the adapters that any connected shard has and the caller may see."""
        known = await adapters.list_adapters(self._placement, self.settings.model)
        return router_pb2.ListAdaptersResponse(adapters=visible_adapters(caller, known.adapters), model=known.model)

    async def find_adapter(self, caller: ApiKey, adapter_id: str) -> types_pb2.Adapter | None:
        """Return an adapter; None: no connected shard has it, or the caller may not see it."""
        found = await adapters.find_adapter(self._placement, adapter_id)
        return found if caller.may_see(adapter_id) else None

    def unknown_model(self, model: str) -> RequestError:
        """Return the error for a request that names an unknown model."""
        return unknown_model(model, self.settings.served_model_names[0])

    async def adapter_rank(self, caller: ApiKey, adapter_id: str, folder: str, rank: int | None = None) -> int:
        """Return the rank of the adapter that a caller loads.

        Only an operator learns why a folder cannot be loaded; others could explore this machine's file system.

        Args:
            caller: of the load.
            adapter_id: to load.
            folder: of PEFT, on this machine; it is read if it is there. Empty: none.
            rank: replaces the folder's; with `router.mock_adapters` the folder need not be there. None: the folder's.
        """
        check_load(caller, adapter_id)
        mock_rank = rank if self.settings.router.mock_adapters else None
        if mock_rank is not None and not (folder and caller.operator):
            return mock_rank
        if not folder:
            raise InvalidRequest(
                "source_path is empty; give a PEFT folder on the router's machine", field="source_path"
            )
        try:
            found = await self._adapters.read(folder)
        except (UnknownName, InvalidRequest) as error:
            if not caller.operator:
                name = quoted(folder)
                text = f"No adapter found for {name} that can be loaded; an operator's key gets the reason"
                raise UnknownName(text, field="source_path", value=name) from None
            if mock_rank is None or isinstance(error, InvalidRequest):
                raise
            return mock_rank
        return found.rank if rank is None else rank

    async def load_adapter(
        self,
        caller: ApiKey,
        adapter: types_pb2.Adapter,
        when_known: scheduler_pb2.WhenKnown.ValueType = scheduler_pb2.WHEN_KNOWN_UNSPECIFIED,
        path: str = "",
    ) -> None:
        """Register an adapter at every shard; `path`: its folder, for `adapter_path`."""
        check_load(caller, adapter.adapter_id)
        max_lora_rank = self.settings.adapters.max_lora_rank
        models = self.settings.model_names
        version = await adapters.load(self._placement, adapter, max_lora_rank, models, when_known)
        if path:
            self._paths.add(adapter.adapter_id, version, path)

    def adapter_path(self, adapter_id: str) -> str:
        """Return the folder of an adapter, as the settings or its load through this router have it; empty: neither."""
        return self._paths.get(adapter_id)

    async def unload_adapter(self, caller: ApiKey, adapter_id: str) -> None:
        """Unregister an adapter at every shard."""
        check_load(caller, adapter_id)
        await adapters.unload(self._placement, adapter_id, self.settings.model_names)

    async def engine_metrics(self) -> CollectorRegistry | None:
        """Return the current state of the cluster as metrics under other engines' names; None: off."""
        engine = self._metrics.engine
        if engine is None:
            return None
        status = await self._cluster_status.get() if self._placement.any_connected.is_set() else None
        engine.update(self._metrics.output_tokens, status)
        return engine.registry

    async def cluster_status(
        self, caller: ApiKey, *, adapter_figures: bool = False
    ) -> router_pb2.GetClusterStatusResponse:
        """Return the load of every shard, as far as the caller may see it; the figures of adapters to an operator."""
        status = await self._cluster_status.get(adapter_figures=adapter_figures and caller.operator)
        return visible_status(caller, status)

    def kv_events(self, caller: ApiKey, adapter_id: str | None = None) -> AsyncGenerator[scheduler_pb2.KvEvents]:
        """Return the events of all prefix caches merged into one; see `watching.follow`.

        Raises:
            PermissionDenied: the caller is no operator.
            Unavailable: no scheduler is connected.
        """
        check_operator(caller, "follow KV events")
        adapters.connected(self._placement)
        return follow(lambda: self._placement.shards, adapter_id)

    def watch_cluster(self, caller: ApiKey, hz: float) -> ClusterWatch:
        """Return a watch of all schedulers.

        Raises:
            PermissionDenied: the caller is no operator.
            InvalidRequest: the rate is out of range.
        """
        check_operator(caller, "watch the cluster")
        return ClusterWatch(
            lambda: self._placement.shards, checked_hz(hz), lambda: self._injector.active, self._metrics.objectives
        )

    def check_still_valid(self, caller: ApiKey) -> None:
        """Check that the caller's key is still valid.

        Raises:
            Unauthenticated: it has been revoked.
        """
        if not self.access.is_valid(caller):
            raise taken_back(caller)

    # --- the tokenizer ----------------------------------------------------------------------------------------------

    async def prompt_token_ids(
        self, message: router_pb2.GenerateRequest, caller: Callable[[], ApiKey]
    ) -> Sequence[int]:
        """Return the tokens of a request's prompt; a failure is counted as a refused request.

        Raises:
            RequestError: the prompt is empty or too long, or the caller is not authenticated.
        """
        with self._refusals_counted():
            caller()
            return await prompt_token_ids(message, self.tokenizer, 0, self.settings.scheduler.max_req_input_len)

    async def count(self, caller: ApiKey, model: str | None, num_tokens: int) -> None:
        """Count the use of the tokenizer as a prompt, against the rates of the caller's key.

        Args:
            caller: whose key.
            model: the model that it names; None: none.
            num_tokens: of the text.

        Raises:
            RequestError: it is over a rate; counted as a refused request.
        """
        adapter_id = "" if model is None or model in self.settings.model_names else model
        with self._refusals_counted():
            await self._generation.count(caller, adapter_id, num_tokens)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text, which may be longer than a prompt.

        Args:
            text: as a prompt's.
            add_special_tokens: whether to add the tokens that frame a prompt.

        Raises:
            UnicodeEncodeError: it has lone surrogates, which a protobuf message could not have carried.
        """
        text.encode()
        return await encoded(partial(self.tokenizer.encode_prompt, add_special_tokens=add_special_tokens), text)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        caller: Callable[[], ApiKey],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        only_count: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Return the tokens of a conversation, by the chat template; a failure is counted as a refused request.

        Args:
            messages: as for `Tokenizer.chat_prompt`.
            caller: authenticates the caller.
            add_generation_prompt: append the start of the assistant's turn.
            continue_final_message: see `reader.encode_chat`, as for those that follow.
            add_special_tokens: the same.
            only_count: the same.
            variables: further template variables.

        Raises:
            RequestError: the template refuses the conversation, it is too long, or the caller is not authenticated.
        """
        with self._refusals_counted():
            caller()
            return await encode_chat(
                self.tokenizer,
                messages,
                self.settings.scheduler.max_req_input_len,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                add_special_tokens=add_special_tokens,
                only_count=only_count,
                variables=variables,
            )

    def count_tool_parse(self, request_type: str, is_streaming: bool, called: bool) -> None:
        """Count a reading of output for calls of tools; see `EdgeEngine.tool_parsed`."""
        if self._metrics.engine is not None:
            self._metrics.engine.tool_parsed(request_type, is_streaming=is_streaming, called=called)

    def count_refused(self, error: RequestError) -> None:
        """Count a request that an edge has refused itself."""
        self._metrics.request_ended(_outcome(error))

    @contextlib.contextmanager
    def _refusals_counted(self) -> Iterator[None]:
        try:
            yield
        except RequestError as error:
            self.count_refused(error)
            raise

    # --- faults on request ------------------------------------------------------------------------------------------

    async def set_faults(self, caller: ApiKey, rules: Sequence[str], *, add: bool) -> None:
        """Set an operator's fault rules, replacing or adding to the previous ones."""
        check_operator(caller, "set faults")
        await faults.set_faults(self._placement, self._injector, rules, add=add)

    async def list_faults(self, caller: ApiKey) -> router_pb2.ListFaultsResponse:
        """List the fault rules of this router and its schedulers, with the number of times each has applied."""
        check_operator(caller, "list faults")
        return await faults.list_faults(self._placement, self._injector)


def _cancelled(call: Call, error: asyncio.CancelledError) -> str:
    return "ok" if call.complete and not call.aborted else MEANINGS[cause_of(call, error)].at_the_edge


def _outcome(error: RequestError) -> str:
    if isinstance(error, Unattainable):
        return "unattainable"
    if isinstance(error, InjectedFault):
        return "fault"
    if error.reason == Reason.QUOTA_EXCEEDED:  # the tenant's limit; a full queue is the cluster's
        return "over_quota"
    return _OUTCOMES.get(status.grpc_status(error).name, "failed")
