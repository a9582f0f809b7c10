"""Between the wire (`lorrery.v1`) and the scheduler's own types: messages from and to routers."""

import re
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Many
from fractions import Fraction

from lorrery.scheduler import wire
from lorrery.scheduler.core.quotas import Quota
from lorrery.scheduler.core.refusals import Refusal, RefusalReason, Scope
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.scheduler.messages import Load, ProtocolError, Submit
from lorrery.service.names import quoted, too_long
from lorrery.service.telemetry.output_groups import OutputGroup
from lorrery.service.telemetry.spans import read_trace_context
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.v1 import types_pb2
from lorrery.vocabulary import u32
from lorrery.vocabulary.adapters import AdapterChange, AdapterLog
from lorrery.vocabulary.endings import CancelCause, FinishReason
from lorrery.vocabulary.units import NEVER, PS_PER_SECOND, to_wire

MAX_WEIGHT_CHARACTERS = 100
_WEIGHT = re.compile(r"\d+(\.\d*)?|\d+/0*[1-9]\d*", re.ASCII)
ToRouter = pb.RouteResponse
FinishedMessage = pb.Finished
AdapterChanges = pb.AdapterChanges
REFUSAL_REASON: dict[RefusalReason, pb.RefusalReason.ValueType] = {
    RefusalReason.INVALID: pb.REFUSAL_REASON_INVALID,
    RefusalReason.NEVER_FITS: pb.REFUSAL_REASON_NEVER_FITS,
    RefusalReason.UNKNOWN_ADAPTER: pb.REFUSAL_REASON_UNKNOWN_ADAPTER,
    RefusalReason.QUEUE_FULL: pb.REFUSAL_REASON_QUEUE_FULL,
    RefusalReason.QUOTA_EXCEEDED: pb.REFUSAL_REASON_QUOTA_EXCEEDED,
    RefusalReason.NO_WORKER: pb.REFUSAL_REASON_NO_WORKER,
    RefusalReason.DRAINING: pb.REFUSAL_REASON_DRAINING,
    RefusalReason.SLO_UNATTAINABLE: pb.REFUSAL_REASON_SLO_UNATTAINABLE,
    RefusalReason.ADAPTER_LOAD: pb.REFUSAL_REASON_ADAPTER_LOAD,
    RefusalReason.WORKERS_LOST: pb.REFUSAL_REASON_WORKERS_LOST,
    RefusalReason.INTERNAL: pb.REFUSAL_REASON_INTERNAL,
}


def take(token_ids_u32: bytes, indices: Many[int]) -> bytes:
    """Pick some entries of a u32 array."""
    return u32.pack_array(u32.view(token_ids_u32)[list(indices)])


def read_submit(message: pb.Submit) -> Submit:
    """Read a request.

    Raises:
        ValueError: an array of token ids is cut in the middle of one, a name is too long, or a request with output has
            no prompt or nothing left to do.
    """
    for field, name in (
        ("request_id", message.request_id),
        ("adapter_id", message.adapter_id),
        ("tenant_id", message.tenant_id),
    ):
        if (why := too_long(name)) is not None:
            raise ValueError(f"{field} {why}")
    sampling = message.sampling
    for token_ids_u32 in (
        message.prompt_token_ids_u32,
        sampling.output_token_ids_u32,
        *sampling.stop_sequences_u32,
    ):
        u32.view(token_ids_u32)
    produced = u32.unpack(message.produced_token_ids_u32)
    if produced and (len(produced) >= message.sampling.max_new_tokens or not message.prompt_token_ids_u32):
        raise ValueError(
            f"{len(produced)} of {message.sampling.max_new_tokens} tokens (max_new_tokens) are produced, after a prompt"
            f" of {len(message.prompt_token_ids_u32) // 4}"
        )
    return Submit(
        handle=message.handle,
        request_id=message.request_id,
        adapter_id=message.adapter_id,
        tenant_id=message.tenant_id,
        prompt_token_ids_u32=message.prompt_token_ids_u32,
        max_new_tokens=message.sampling.max_new_tokens,
        sampling=message.sampling,
        produced=produced,
        resumed=message.resumed,
        adapter_rank=message.adapter.rank,
        adapter_version=message.adapter.version,
        quota=_read_quota(message.quota) if message.HasField("quota") else None,
        time_left_ps=message.time_left_ps,
        trace=read_trace_context(message.traceparent, message.tracestate) if message.traceparent else None,
        ignore_eos=message.sampling.ignore_eos,
        priority=message.priority,
        skips_prefix_cache=message.skips_prefix_cache,
        group=OutputGroup(message.group.id, message.group.num_outputs) if message.HasField("group") else None,
        cache_salt=message.cache_salt,
        only_counted_tokens=message.only_counted_tokens if message.HasField("only_counted_tokens") else None,
    )


def read_cancels(message: pb.RouteRequest) -> tuple[list[tuple[int, int | None]], CancelCause]:
    """Read cancels: each handle with the tokens that its request keeps, None if that is not said; and their cause."""
    handles, kept = _whole(message.cancel_handles_u32), _whole(message.cancel_kept_u32)
    cause = CancelCause.of(message.cancel_cause)
    return [(handle, kept[n] if n < len(kept) else None) for n, handle in enumerate(handles)], cause


def _whole(array_u32: bytes) -> "array[int]":
    """Unpack an array up to its last whole entry."""
    return u32.unpack(array_u32[: len(array_u32) // 4 * 4])


def _read_quota(message: pb.Quota) -> Quota:
    return Quota(
        message.key,
        message.requests_per_minute,
        message.tokens_per_minute,
        message.max_running,
        message.max_waiting,
        _read_weight(message.weight) if message.weight else None,
    )


def _read_weight(text: str) -> Fraction:
    """Read a weight. The pattern excludes exponents: `Fraction` would expand one to as many digits in memory."""
    if len(text) > MAX_WEIGHT_CHARACTERS or not _WEIGHT.fullmatch(text) or not (weight := Fraction(text)):
        raise ProtocolError(f"weight is {quoted(text)}; it must be a decimal number or a fraction above 0")
    return weight


def sampling_record(sampling: object) -> dict[str, object]:
    """Return a request's sampling parameters as plain values, for the journal; unset ones are left out."""
    assert isinstance(sampling, pb.Sampling)
    said: dict[str, object] = {"seed": sampling.seed, "max_new_tokens": sampling.max_new_tokens}
    if sampling.ignore_eos:
        said["ignore_eos"] = True
    if sampling.min_new_tokens:
        said["min_new_tokens"] = sampling.min_new_tokens
    if sampling.true_output_tokens:
        said["true_output_tokens"] = sampling.true_output_tokens
    if sampling.HasField("sampler"):
        said["sampler"] = {field.name: getattr(sampling.sampler, field.name) for field in pb.Sampler.DESCRIPTOR.fields}
    if sampling.stop_sequences_u32:
        said["stop_sequences"] = [list(u32.unpack(stop)) for stop in sampling.stop_sequences_u32]
    if sampling.output_token_ids_u32:
        said["output_token_ids"] = list(u32.unpack(sampling.output_token_ids_u32))
    return said


def read_changes(message: pb.AdapterChanges) -> list[AdapterChange]:
    """Read changes of adapters."""
    return [AdapterChange(change.version, change.adapter_id, change.rank) for change in message.changes]


def write_changes(changes: Iterable[AdapterChange], forgotten: int | None = None) -> pb.AdapterChanges:
    """Write changes of adapters; `forgotten`: of the log, if these are the whole of it."""
    return pb.AdapterChanges(
        changes=[pb.AdapterChange(adapter_id=name, version=version, rank=rank) for version, name, rank in changes],
        forgotten=forgotten or 0,
        whole=forgotten is not None,
    )


def scheduler_hello(model: str, time_scale: float, adapters: AdapterLog) -> ToRouter:
    """Write the answer to a router's hello."""
    changes = write_changes(adapters.changes, adapters.forgotten)
    return ToRouter(hello=pb.SchedulerHello(model=model, time_scale=time_scale, adapter_changes=changes))


def adapter_changes(changes: pb.AdapterChanges) -> ToRouter:
    """Write later changes of adapters."""
    return ToRouter(adapter_changes=changes)


def adapter_pinned(handle: int, adapter: Adapter) -> ToRouter:
    """Write the adapter version that a request keeps to its end."""
    return ToRouter(adapter_pinned=pb.AdapterPinned(handle=handle, adapter=wire.write_adapter(adapter)))


def scheduler_load(load: Load) -> ToRouter:
    """Write the scheduler's load."""
    return ToRouter(load=pb.SchedulerLoad(**load._asdict()))


def draining() -> ToRouter:
    """Write that new requests are refused."""
    return ToRouter(draining=pb.SchedulerDraining())


_REFUSAL_SCOPE = {
    Scope.REQUEST: pb.REFUSAL_SCOPE_UNSPECIFIED,
    Scope.TENANT: pb.REFUSAL_SCOPE_TENANT,
    Scope.ALL: pb.REFUSAL_SCOPE_ALL,
}


def refused(handle: int, refusal: Refusal) -> ToRouter:
    """Write that a request ends without further tokens."""
    facts = {name: str(value) for name, value in refusal.facts.items()}
    reason = REFUSAL_REASON[refusal.reason]
    message = pb.Refused(handle=handle, reason=reason, message=refusal.message, facts=facts)
    message.scope = _REFUSAL_SCOPE[refusal.scope]
    if refusal.retry_ps is not None:
        message.retry_ps = min(refusal.retry_ps, NEVER)
    message.retry_step_ps = refusal.retry_step_ps
    return ToRouter(refused=message)


def tokens(
    sent_ps: int, step_ps: int, handles_u32: bytes, token_ids_u32: bytes, finished: list[FinishedMessage]
) -> ToRouter:
    """Write the results of one or more steps for one router."""
    message = ToRouter()
    told = message.tokens  # filled in place: a message made separately would be copied
    told.sent_ps, told.step_ps = to_wire(sent_ps), step_ps
    told.handles_u32, told.token_ids_u32 = handles_u32, token_ids_u32
    if finished:
        told.finished.extend(finished)
    return message


def finished(
    router_handle: int, sequence: Sequence, reason: FinishReason, output_tokens: int, worker_id: str, at_ps: int
) -> FinishedMessage:
    """Write the end of a sequence, as its router knows it."""
    phases = sequence.phases(at_ps)
    admitted_ps = at_ps if sequence.first_admitted_ps is None else min(sequence.first_admitted_ps, at_ps)
    waited_ps = max(0, admitted_ps - sequence.arrived_ps)
    return pb.Finished(
        handle=router_handle,
        reason=types_pb2.FinishReason.ValueType(reason),
        usage=types_pb2.Usage(
            prompt_tokens=sequence.prompt_tokens,
            completion_tokens=output_tokens,
            cached_tokens=sequence.first_cached_tokens,
            queue_seconds=phases.queue_ps / PS_PER_SECOND,
            worker_id=worker_id,
            num_requeues=sequence.num_requeues,
            adapter_load_seconds=phases.adapter_load_ps / PS_PER_SECOND,
            prefill_seconds=phases.prefill_ps / PS_PER_SECOND,
            decode_seconds=phases.decode_ps / PS_PER_SECOND,
            waited_seconds=waited_ps / PS_PER_SECOND,
        ),
    )
