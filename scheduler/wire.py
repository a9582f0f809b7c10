"""Between the wire (`lorrery.v1`) and the core: the only place of the scheduler that knows both."""

from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many

import numpy as np
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.v1 import types_pb2

from scheduler.core.plan import EndReason, Plan, Ran
from scheduler.core.sequence import Adapter, Sequence
from scheduler.live import Live

FINISH_REASON: dict[EndReason, types_pb2.FinishReason.ValueType] = {
    EndReason.EOS: types_pb2.FINISH_REASON_EOS,
    EndReason.STOP: types_pb2.FINISH_REASON_STOP,
    EndReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    EndReason.ABORTED: types_pb2.FINISH_REASON_ABORTED,
}
END_REASON: dict[int, EndReason] = {number: reason for reason, number in FINISH_REASON.items()}

PS_PER_SECOND = 1e12


def u32_array(data: bytes) -> "array[int]":
    """Read a little-endian u32 array."""
    numbers = array("I")
    numbers.frombytes(np.frombuffer(data, "<u4").astype(np.uint32, copy=False).tobytes())
    return numbers


def u32_bytes(numbers: Iterable[int]) -> bytes:
    """Write a little-endian u32 array."""
    return np.array(list(numbers), "<u4").tobytes()


def sequence_from_submit(submit: pb.Submit, handle: int, adapter: Adapter | None, at_ps: int) -> Sequence:
    """Make the core's view of a request."""
    return Sequence(
        handle=handle,
        prompt_tokens=len(submit.prompt_token_ids_u32) // 4,
        max_new_tokens=submit.sampling.max_new_tokens,
        arrived_ps=at_ps,
        adapter=adapter,
        tenant_id=submit.tenant_id,
        prompt_token_ids=u32_array(submit.prompt_token_ids_u32),
        produced_tokens=len(submit.produced_token_ids_u32) // 4,
    )


def adapter_from(message: types_pb2.Adapter) -> Adapter:
    """Read an adapter."""
    return Adapter(message.adapter_id, message.rank)


def adapter_to(adapter: Adapter) -> types_pb2.Adapter:
    """Write an adapter."""
    return types_pb2.Adapter(adapter_id=adapter.adapter_id, rank=adapter.rank)


def plan_to(plan: Plan, plan_id: int, sent_ps: int, live: Callable[[int], Live], needs_prompts: bool) -> pb.Plan:
    """Write a plan; `live` finds the request behind a handle."""
    chunks = plan.prefills
    message = pb.Plan(
        plan_id=plan_id,
        start_ps=plan.at_ps,
        sent_ps=sent_ps,
        max_steps=plan.max_steps,
        until_ps=plan.until_ps,
        joins=[_join_to(sequence, live(sequence.handle), needs_prompts) for sequence in plan.joins],
        decode=plan.decode,
        adapter_loads=[adapter_to(adapter) for adapter in (*plan.adapter_loads, *plan.adapter_prefetches)],
        adapter_evictions=plan.adapter_evictions,
    )
    if plan.leaves:
        message.leaves_u32 = u32_bytes(sequence.handle for sequence in plan.leaves)
    if chunks:
        message.prefill_handles_u32 = u32_bytes(chunk.sequence.handle for chunk in chunks)
        message.prefill_new_tokens_u32 = u32_bytes(chunk.new_tokens for chunk in chunks)
        message.prefill_past_tokens_u32 = u32_bytes(chunk.past_tokens for chunk in chunks)
        message.prefill_samples_u32 = u32_bytes(chunk.samples for chunk in chunks)
    return message


def _join_to(sequence: Sequence, live: Live, needs_prompts: bool) -> pb.Join:
    return pb.Join(
        handle=sequence.handle,
        prompt_tokens=sequence.prompt_tokens,
        prompt_token_ids_u32=live.prompt_token_ids_u32 if needs_prompts else b"",
        produced_token_ids_u32=u32_bytes(live.token_ids),
        sampling=live.sampling,
        adapter=adapter_to(sequence.adapter) if sequence.adapter is not None else None,
    )


def ran_from(step: pb.StepDone) -> Ran:
    """Read one step's outcome."""
    if not step.finished_handles_u32:
        return Ran(1, step.end_ps)
    handles = u32_array(step.finished_handles_u32)
    reasons = u32_array(step.finish_reasons_u32)
    return Ran(1, step.end_ps, [(handle, END_REASON[reason]) for handle, reason in zip(handles, reasons, strict=True)])


def finished_to(live: Live, reason: EndReason, output_tokens: int, worker_id: str) -> pb.Finished:
    """Write the end of a sequence, as its router knows it."""
    return pb.Finished(
        handle=live.router_handle,
        reason=FINISH_REASON[reason],
        usage=types_pb2.Usage(
            prompt_tokens=live.sequence.prompt_tokens,
            completion_tokens=output_tokens,
            cached_tokens=live.cached_tokens or 0,
            queue_seconds=(live.queue_ps or 0) / PS_PER_SECOND,
            worker_id=worker_id,
            num_requeues=live.sequence.num_requeues,
        ),
    )


def take(token_ids_u32: bytes, indices: Many[int]) -> bytes:
    """Pick some entries of a u32 array."""
    return np.frombuffer(token_ids_u32, "<u4")[list(indices)].tobytes()
