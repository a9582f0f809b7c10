"""Every conversion between protobuf messages and the router's own types.

Arrays of token ids and handles travel as little-endian unsigned 32-bit `bytes`: one copy, where a repeated field costs
a Python object per element.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lorrery.router.access import ApiKey
from lorrery.router.logprobs import TokenLogprobs
from lorrery.router.request import Finish, Request, Usage
from lorrery.router.sampling import SamplingParams, read_sampling
from lorrery.service.errors import (
    Internal,
    InvalidRequest,
    NeverFits,
    Overloaded,
    RankOverLimit,
    Reason,
    RequestError,
    Unattainable,
    Unavailable,
    UnknownName,
)
from lorrery.service.telemetry.output_groups import OutputGroup
from lorrery.service.telemetry.spans import TraceContext
from lorrery.v1 import router_pb2, scheduler_pb2, types_pb2
from lorrery.vocabulary import u32
from lorrery.vocabulary.adapters import AdapterChange, AdapterLog
from lorrery.vocabulary.endings import CancelCause, FinishReason
from lorrery.vocabulary.units import PS_PER_SECOND

_REFUSALS: dict[int, tuple[type[RequestError], Reason]] = {
    scheduler_pb2.REFUSAL_REASON_INVALID: (InvalidRequest, Reason.INVALID_VALUE),
    scheduler_pb2.REFUSAL_REASON_NEVER_FITS: (NeverFits, Reason.NEVER_FITS),
    scheduler_pb2.REFUSAL_REASON_UNKNOWN_ADAPTER: (UnknownName, Reason.UNKNOWN_ADAPTER),
    scheduler_pb2.REFUSAL_REASON_QUEUE_FULL: (Overloaded, Reason.QUEUE_FULL),
    scheduler_pb2.REFUSAL_REASON_SLO_UNATTAINABLE: (Unattainable, Reason.SLO_UNATTAINABLE),
    scheduler_pb2.REFUSAL_REASON_RANK_OVER_LIMIT: (RankOverLimit, Reason.RANK_OVER_LIMIT),
    scheduler_pb2.REFUSAL_REASON_NO_WORKER: (Unavailable, Reason.NO_WORKER),
    scheduler_pb2.REFUSAL_REASON_DRAINING: (Unavailable, Reason.DRAINING),
    scheduler_pb2.REFUSAL_REASON_ADAPTER_LOAD: (Unavailable, Reason.ADAPTER_LOAD),
    scheduler_pb2.REFUSAL_REASON_WORKERS_LOST: (Internal, Reason.WORKERS_LOST),
    scheduler_pb2.REFUSAL_REASON_QUOTA_EXCEEDED: (Overloaded, Reason.QUOTA_EXCEEDED),
    scheduler_pb2.REFUSAL_REASON_INTERNAL: (Internal, Reason.INTERNAL),
}
Message = router_pb2.GenerateResponse
"""A message to a client."""

_SLO_UNATTAINABLE = "SLO_UNATTAINABLE"


@dataclass(frozen=True, slots=True)
class TokensFrame:
    """The output of one or more steps; `handles[i]` belongs to `token_ids[i]`.

    Attributes:
        sent_ps: in wire encoding (`vocabulary.units`).
    """

    sent_ps: int
    step_ps: int
    handles: "array[int]"
    token_ids: "array[int]"
    finished: Sequence[tuple[int, Finish]]


@dataclass(frozen=True, slots=True)
class SchedulerHello:
    """A scheduler's answer to the router's hello."""

    model: str
    time_scale: float
    changes: Sequence[AdapterChange] = ()
    forgotten: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """The end of a request without (further) tokens.

    Attributes:
        draining: another shard may take it.
        holds_for_tenant: other requests of its tenant would be refused too.
        holds_for_all: all other requests would be refused too.
        retry_step_seconds: increment of the retry delay from one of those requests to the next.
    """

    handle: int
    error: RequestError
    draining: bool
    holds_for_tenant: bool = False
    holds_for_all: bool = False
    retry_step_seconds: float = 0.0


class ProtocolError(Exception):
    """A peer violated the protocol."""


# --- clients -----------------------------------------------------------------


def sampling_params(message: types_pb2.SamplingParams) -> SamplingParams:
    """Return the client's parameters, normalised and checked; unset fields take S-LoRA's defaults.

    Raises:
        InvalidRequest: a value out of range.
    """
    given: dict[str, object] = {field.name: value for field, value in message.ListFields()}
    if "stop_sequences" in given:
        given["stop_sequences"] = list(message.stop_sequences)
    if "stop_token_ids" in given:
        given["stop_token_ids"] = tuple(dict.fromkeys(message.stop_token_ids))
    return read_sampling(given)


def generate_response(token_ids: Sequence[int], text: str) -> router_pb2.GenerateResponse:
    """Return a message of a stream that continues."""
    message = router_pb2.GenerateResponse()  # set field by field, which takes a third less time than keyword arguments
    message.token_ids.extend(token_ids)
    message.text = text
    return message


def add_logprobs(message: router_pb2.GenerateResponse, logprobs: Iterable[TokenLogprobs]) -> None:
    """Add the log-probabilities of its tokens to a message."""
    for one in logprobs:
        message.logprobs.add(
            logprob=one.logprob, top_token_ids=one.top_token_ids, top_logprobs=one.top_logprobs, rank=one.rank
        )


def last_response(token_ids: Sequence[int], text: str, finish: Finish) -> router_pb2.GenerateResponse:
    """Return the last message of a stream."""
    usage = finish.usage
    return router_pb2.GenerateResponse(
        token_ids=token_ids,
        text=text,
        finish=router_pb2.Finish(
            reason=types_pb2.FinishReason.ValueType(finish.reason),
            usage=types_pb2.Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                queue_seconds=usage.queue_seconds,
                worker_id=usage.worker_id,
                num_requeues=usage.num_requeues,
                adapter_load_seconds=usage.adapter_load_seconds,
                prefill_seconds=usage.prefill_seconds,
                decode_seconds=usage.decode_seconds,
                waited_seconds=usage.waited_seconds,
            ),
            stop_sequence=finish.stop_sequence,
        ),
    )


def read_group(message: router_pb2.GenerateRequest) -> OutputGroup | None:
    """Return the group of outputs that a client's message belongs to; None: it is alone."""
    return OutputGroup(message.group.id, message.group.num_outputs) if message.HasField("group") else None


def adapter_messages(adapters: Iterable[types_pb2.Adapter]) -> list[types_pb2.Adapter]:
    """Return adapters as clients see them, without their versions."""
    return [types_pb2.Adapter(adapter_id=one.adapter_id, rank=one.rank, number=one.number) for one in adapters]


def shard_status(address: str, connected: bool, status: scheduler_pb2.GetStatusResponse | None) -> router_pb2.Shard:
    """Return one scheduler as shown to clients; without `status` only its address is known."""
    if status is None:
        return router_pb2.Shard(address=address, connected=connected)
    return router_pb2.Shard(
        address=address,
        connected=connected,
        model=status.model,
        time_scale=status.time_scale,
        max_req_input_len=status.max_req_input_len,
        max_req_total_len=status.max_req_total_len,
        num_unplaced=status.num_unplaced,
        workers=status.workers,
        adapter_figures=status.adapter_figures if status.HasField("adapter_figures") else None,
    )


# --- schedulers --------------------------------------------------------------


def router_hello(router_id: str, adapters: AdapterLog, *, wants_load: bool = False) -> scheduler_pb2.RouteRequest:
    """Return the first message of a Route stream."""
    return scheduler_pb2.RouteRequest(
        hello=scheduler_pb2.RouterHello(router_id=router_id, adapter_changes=_whole(adapters), wants_load=wants_load)
    )


def whole_log(adapters: AdapterLog) -> scheduler_pb2.RouteRequest:
    """Return the message with the whole log of loads and unloads at run time."""
    return scheduler_pb2.RouteRequest(adapter_changes=_whole(adapters))


def adapter_changes(changes: Iterable[AdapterChange]) -> scheduler_pb2.RouteRequest:
    """Return the message with some of these changes."""
    return scheduler_pb2.RouteRequest(adapter_changes=scheduler_pb2.AdapterChanges(changes=_write_changes(changes)))


def _whole(adapters: AdapterLog) -> scheduler_pb2.AdapterChanges:
    changes = _write_changes(adapters.changes)
    return scheduler_pb2.AdapterChanges(changes=changes, forgotten=adapters.forgotten, whole=True)


def _write_changes(changes: Iterable[AdapterChange]) -> list[scheduler_pb2.AdapterChange]:
    return [scheduler_pb2.AdapterChange(adapter_id=name, version=version, rank=rank) for version, name, rank in changes]


def read_changes(message: scheduler_pb2.AdapterChanges) -> list[AdapterChange]:
    """Return the adapter changes in a message."""
    return [AdapterChange(change.version, change.adapter_id, change.rank) for change in message.changes]


def adapter_change(adapter: types_pb2.Adapter) -> AdapterChange | None:
    """Return the change that loaded an adapter; None: it was not loaded at run time."""
    return AdapterChange(adapter.version, adapter.adapter_id, adapter.rank) if adapter.version else None


def submit(
    handle: int,
    request: Request,
    produced_token_ids: "array[int]",
    *,
    resumed: bool,
    adapter: AdapterChange | None = None,
    time_left_ps: int = 0,
    trace: TraceContext | None = None,
) -> scheduler_pb2.RouteRequest:
    """Return the message that submits a request, or the rest of it.

    Args:
        handle: new on this stream.
        request: the request.
        produced_token_ids: tokens received so far.
        resumed: whether it was submitted before.
        adapter: the change that loaded its adapter.
        time_left_ps: time until its client's deadline; 0: none.
        trace: its span.
    """
    group = request.group
    return scheduler_pb2.RouteRequest(
        submit=scheduler_pb2.Submit(
            handle=handle,
            request_id=request.request_id,
            adapter_id=request.adapter_id,
            tenant_id=request.tenant_id,
            prompt_token_ids_u32=request.prompt_token_ids_u32,
            produced_token_ids_u32=u32.pack(produced_token_ids),
            resumed=resumed,
            adapter=None
            if adapter is None
            else types_pb2.Adapter(adapter_id=adapter.adapter_id, rank=adapter.rank, version=adapter.version),
            quota=None if request.key is None else quota(request.key),
            time_left_ps=time_left_ps,
            traceparent="" if trace is None else trace.traceparent,
            tracestate="" if trace is None else trace.state,
            priority=request.priority,
            skips_prefix_cache=request.skips_prefix_cache,
            group=None if group is None else types_pb2.OutputGroup(id=group.group_id, num_outputs=group.num_outputs),
            cache_salt=request.cache_salt,
            only_counted_tokens=request.only_counted_tokens,
            sampling=scheduler_pb2.Sampling(
                sampler=_sampler(request.sampling),
                seed=request.seed,
                max_new_tokens=request.sampling.max_new_tokens,
                min_new_tokens=request.sampling.min_new_tokens,
                ignore_eos=request.sampling.ignore_eos,
                true_output_tokens=request.true_output_tokens,
                output_token_ids_u32=request.output_token_ids_u32,
                stop_sequences_u32=[u32.pack(sequence) for sequence in request.stop_token_sequences],
            ),
        )
    )


def _sampler(sampling: SamplingParams) -> scheduler_pb2.Sampler | None:
    """Return the sampler settings; None: S-LoRA's defaults, which are not sent."""
    if sampling.top_k == 1 and not sampling.presence_penalty and not sampling.frequency_penalty:
        return None
    return scheduler_pb2.Sampler(
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(0, sampling.top_k),
    )


def quota(key: ApiKey) -> scheduler_pb2.Quota:
    """Return the quota that a scheduler enforces for a key."""
    return scheduler_pb2.Quota(
        key=key.name,
        requests_per_minute=key.requests_per_minute or 0,
        tokens_per_minute=key.tokens_per_minute or 0,
        max_running=key.max_running or 0,
        max_waiting=key.max_waiting or 0,
        weight="" if key.weight == 1 else str(key.weight),
    )


class Cancel(NamedTuple):
    """The cancel of a request.

    Attributes:
        handle: the request's.
        cause: why.
        kept_tokens: output that its client has.
    """

    handle: int
    cause: CancelCause
    kept_tokens: int


def cancels(listed: Sequence[Cancel]) -> list[scheduler_pb2.RouteRequest]:
    """Return messages that cancel requests, one for each cause."""
    return [
        scheduler_pb2.RouteRequest(
            cancel_handles_u32=u32.pack(one.handle for one in listed if one.cause is cause),
            cancel_kept_u32=u32.pack(one.kept_tokens for one in listed if one.cause is cause),
            cancel_cause=scheduler_pb2.CancelCause.ValueType(cause),
        )
        for cause in dict.fromkeys(one.cause for one in listed)
    ]


def scheduler_hello(message: object) -> SchedulerHello:
    """Parse a scheduler's first message.

    Raises:
        ProtocolError: it is another message or the end of the stream, or its time scale is not positive.
    """
    if not isinstance(message, scheduler_pb2.RouteResponse) or not message.hello.time_scale > 0:
        raise ProtocolError("a scheduler's first message must be SchedulerHello with a positive time_scale")
    hello = message.hello
    changes = hello.adapter_changes
    return SchedulerHello(hello.model, hello.time_scale, read_changes(changes), changes.forgotten)


def tokens_frame(tokens: scheduler_pb2.Tokens) -> TokensFrame:
    """Parse one frame of tokens.

    Raises:
        ProtocolError: its arrays differ in length.
    """
    try:
        handles, token_ids = u32.unpack(tokens.handles_u32), u32.unpack(tokens.token_ids_u32)
    except ValueError as error:
        raise ProtocolError(str(error)) from None
    if len(handles) != len(token_ids):
        raise ProtocolError(f"{len(handles)} handles beside {len(token_ids)} tokens")
    finished = [(done.handle, _finish(done)) for done in tokens.finished] if tokens.finished else ()
    return TokensFrame(tokens.sent_ps, tokens.step_ps, handles, token_ids, finished)


def refusal(refused: scheduler_pb2.Refused, time_scale: float = 1.0) -> Refusal:
    """Return a refusal as the error that the client will see.

    Args:
        refused: the scheduler's message.
        time_scale: wall seconds per device second of that scheduler.
    """
    kind, reason = _REFUSALS.get(refused.reason, (Internal, Reason.INTERNAL))
    message = refused.message or scheduler_pb2.RefusalReason.Name(refused.reason)
    if kind is Unattainable and _SLO_UNATTAINABLE not in message:
        message = f"{_SLO_UNATTAINABLE}: {message}"
    retry_seconds = refused.retry_ps / PS_PER_SECOND * time_scale if refused.HasField("retry_ps") else None
    error = kind(message, reason, retry_seconds, **refused.facts)
    return Refusal(
        refused.handle,
        error,
        refused.reason == scheduler_pb2.REFUSAL_REASON_DRAINING,
        refused.scope == scheduler_pb2.REFUSAL_SCOPE_TENANT,
        refused.scope == scheduler_pb2.REFUSAL_SCOPE_ALL,
        refused.retry_step_ps / PS_PER_SECOND * time_scale,
    )


def _finish(done: scheduler_pb2.Finished) -> Finish:
    usage = done.usage
    return Finish(
        FinishReason.of(done.reason),
        Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            queue_seconds=usage.queue_seconds,
            worker_id=usage.worker_id,
            num_requeues=usage.num_requeues,
            adapter_load_seconds=usage.adapter_load_seconds,
            prefill_seconds=usage.prefill_seconds,
            decode_seconds=usage.decode_seconds,
            waited_seconds=usage.waited_seconds,
        ),
    )
