"""Between the wire (`lorrery.v1`) and the scheduler's own types: messages from and to workers."""

import json
import math
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import Any, Protocol

from lorrery.scheduler import wire
from lorrery.scheduler.core.front_end import NO_FRONT_END, FrontEndCost
from lorrery.scheduler.core.placements.forecast import Pace
from lorrery.scheduler.core.plan import Idle, Plan, Ran
from lorrery.scheduler.core.prefix_cache.changes import BlockChange, BlocksStored
from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.messages import ProtocolError, StepReport, WorkerHello
from lorrery.service.names import quoted
from lorrery.service.telemetry.spans import TraceContext
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.v1 import types_pb2
from lorrery.vocabulary import u32
from lorrery.vocabulary.endings import FinishReason
from lorrery.vocabulary.units import FAR_PS, NEVER, PS_PER_SECOND, from_wire, to_wire

MAX_DEVICE_SETTINGS = 16_384
MAX_API_SERVERS = 1024
MAX_REQUEST_PS, MAX_TOKEN_PS = 60 * PS_PER_SECOND, PS_PER_SECOND // 100
"""Of a front end's work; far beyond what exists, with every sum still finite."""
"""Most characters of a worker's device settings, which go into the journal."""
NO_HANDLES: frozenset[int] = frozenset()
ToWorker = pb.AttachResponse
KvEvents = pb.KvEvents
EngineCounts = pb.EngineCounts
KvEventSource = types_pb2.KvEventSource
WatchedKvEvents = pb.WatchKvEventsResponse


class Asked(Protocol):
    """What a worker needs of a request besides its sequence."""

    prompt_token_ids_u32: bytes
    sampling: object
    token_ids: "array[int]"

    @property
    def run_context(self) -> TraceContext | None:
        """The parent of the worker's spans; None: they are not kept."""
        ...


def read_worker_hello(message: pb.WorkerHello) -> WorkerHello:
    """Read a worker's announcement.

    Raises:
        ProtocolError: a name is too long, or a number is impossible.
    """
    wire.check_names(
        gpu=message.gpu, model=message.model, step_time_model=message.step_time_model, instance_id=message.instance_id
    )
    if not 0 <= message.heartbeat_seconds < math.inf:
        raise ProtocolError(f"heartbeat_seconds is {message.heartbeat_seconds}; it must be 0 or more, and finite")
    if message.max_total_token_num >= NEVER:
        raise ProtocolError(f"max_total_token_num is {message.max_total_token_num}; it must be below {NEVER}")
    return WorkerHello(
        worker_id=message.worker_id,
        gpu=message.gpu,
        model=message.model,
        tensor_parallel=message.tensor_parallel,
        max_total_token_num=message.max_total_token_num,
        step_time_model=message.step_time_model,
        needs_prompts=message.needs_prompts,
        device=_device_settings(message.device_settings),
        pace=_pace(message),
        front_end=_front_end(message),
    )


def _front_end(message: pb.WorkerHello) -> FrontEndCost:
    if not message.HasField("front_end"):
        return NO_FRONT_END
    said = message.front_end
    cost = FrontEndCost(said.request_ps, said.token_ps, said.servers)
    most = FrontEndCost(MAX_REQUEST_PS, MAX_TOKEN_PS, MAX_API_SERVERS)
    if cost.servers < 1 or any(value > bound for value, bound in zip(cost, most, strict=True)):
        raise ProtocolError(f"front_end is {tuple(cost)}; it must be at most {tuple(most)}, with 1 server or more")
    return cost


def _pace(message: pb.WorkerHello) -> Pace | None:
    """Read a worker's announced step times; None: it announces none."""
    if not message.HasField("pace"):
        return None
    said = message.pace
    pace = Pace(said.base_ps, said.sequence_ps, said.kv_token_ps, said.prompt_token_ps)
    if not pace.base_ps or max(pace) >= NEVER:
        raise ProtocolError(f"pace is {tuple(pace)}; its base_ps must be above 0, and all below {NEVER}")
    return pace


def _device_settings(text: str) -> dict[str, Any]:
    if not text:
        return {}
    if len(text) > MAX_DEVICE_SETTINGS:
        raise ProtocolError(f"device_settings has {len(text)} characters; at most {MAX_DEVICE_SETTINGS} are allowed")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ProtocolError(f"device_settings is {quoted(text)}; a JSON object is expected")
    return content


def read_step(message: pb.StepDone, now_ps: int) -> StepReport:
    """Read one step's outcome; `now_ps` is the device clock.

    Raises:
        ProtocolError: arrays that end in the middle of a number or differ in length from those beside them, or an
            unknown reason of an end.
    """
    handles_u32, token_ids_u32 = message.handles_u32, message.token_ids_u32
    if len(handles_u32) != len(token_ids_u32) or len(handles_u32) % u32.ITEM_BYTES:
        num_tokens = wire.count("handles_u32", handles_u32), wire.count("token_ids_u32", token_ids_u32)
        raise ProtocolError(f"{num_tokens[1]} token_ids_u32 for {num_tokens[0]} handles_u32")
    ended: Many[tuple[int, FinishReason]] = ()
    silent = NO_HANDLES
    if message.finished_handles_u32:
        handles = wire.numbers("finished_handles_u32", message.finished_handles_u32)
        reasons = [FinishReason.of(n) for n in wire.numbers("finish_reasons_u32", message.finish_reasons_u32)]
        if len(handles) != len(reasons) or FinishReason.UNSPECIFIED in reasons:
            raise ProtocolError(f"finish_reasons_u32 {reasons[:8]} for {len(handles)} finished_handles_u32")
        ended = list(zip(handles, reasons, strict=True))
        silent = frozenset(handles).difference(u32.unpack(handles_u32))
    start_ps, end_ps = from_wire(message.start_ps, now_ps), from_wire(message.end_ps, now_ps)
    ran = Ran(1, end_ps, ended, silent, end_ps - start_ps)
    return StepReport(message.plan_id, start_ps, ran, handles_u32, token_ids_u32, message.hand_back)


def welcome(time_scale: float, sent_ps: int, faults_from_ps: int, sent_unix_ns: int = 0) -> ToWorker:
    """Write the answer to a worker's hello."""
    faults_from_ps = max(faults_from_ps, sent_ps - FAR_PS)  # a fault begins and ends before that, or not at all
    return ToWorker(
        welcome=pb.WorkerWelcome(
            time_scale=time_scale,
            sent_ps=to_wire(sent_ps),
            faults_from_ps=to_wire(faults_from_ps),
            sent_unix_ns=sent_unix_ns,
        )
    )


def heartbeat_answer(number: int, sent_ps: int, engine: EngineCounts | None = None) -> ToWorker:
    """Write the answer to a heartbeat, with the figures of its replica that the worker shows."""
    return ToWorker(heartbeat_answer=pb.HeartbeatAnswer(number=number, sent_ps=to_wire(sent_ps), engine=engine))


def worker_faults(rules: Iterable[str], *, add: bool, from_ps: int | None, sent_ps: int) -> ToWorker:
    """Write an operator's faults of a worker.

    Args:
        rules: a text each.
        add: whether those that it was sent before stay active.
        from_ps: start of their times; None: when the worker takes them.
        sent_ps: now.
    """
    faults = pb.WorkerFaults(rules=rules, add=add)
    if from_ps is not None:
        faults.from_ps = to_wire(max(from_ps, sent_ps - FAR_PS))
    return ToWorker(faults=faults)


def kv_events(changes: Iterable[BlockChange], block_size: int = 0, *, cleared: bool = False) -> KvEvents:
    """Write changes of a prefix cache.

    Args:
        changes: in order.
        block_size: tokens in a block; needed for stored blocks only.
        cleared: whether everything in it was removed before these changes.
    """
    message = pb.KvEvents(block_size=block_size)
    if cleared:
        message.events.add().cleared.SetInParent()
    for change in changes:
        event = message.events.add()
        if not isinstance(change, BlocksStored):
            event.removed.block_hashes.extend(change.hashes)
            continue
        stored = event.stored
        stored.block_hashes.extend(change.hashes)
        if change.parent_hash is not None:
            stored.parent_block_hash = change.parent_hash
        stored.token_ids_u32 = u32.pack(array("I", b"".join(change.keys)))
        if change.adapter is not None:
            stored.adapter.CopyFrom(wire.write_adapter(change.adapter))
        stored.cache_salt = change.cache_salt
    return message


def worker_kv_events(events: KvEvents) -> ToWorker:
    """Write changes of a worker's own prefix cache."""
    return ToWorker(kv_events=events)


def watched_kv_events(worker_id: str, events: KvEvents) -> WatchedKvEvents:
    """Write changes of a prefix cache for a watcher."""
    return WatchedKvEvents(worker_id=worker_id, events=events)


def interrupt(plan_id: int, at_ps: int) -> ToWorker:
    """Write that a plan has to end at the first boundary at or after a time."""
    return ToWorker(interrupt=pb.Interrupt(plan_id=plan_id, at_ps=to_wire(at_ps)))


def write_plan(
    plan: Plan,
    plan_id: int,
    sent_ps: int,
    asked: Callable[[int], Asked],
    needs_prompts: bool,
    engine: EngineCounts | None = None,
) -> ToWorker:
    """Write a plan.

    Args:
        plan: of the replica.
        plan_id: its number on the stream.
        sent_ps: now.
        asked: returns the request of a handle.
        needs_prompts: whether the worker needs prompts.
        engine: figures of its replica that the worker shows.
    """
    chunks = plan.prefills
    message = pb.Plan(
        plan_id=plan_id,
        start_ps=to_wire(plan.at_ps),
        sent_ps=to_wire(sent_ps),
        max_steps=plan.max_steps,
        until_ps=None if plan.until_ps is None else to_wire(min(plan.until_ps, sent_ps + FAR_PS)),
        joins=[_join(sequence, asked(sequence.handle), needs_prompts) for sequence in plan.joins],
        decode=plan.decode,
        hold=plan.hold,
        wait_ps=plan.wait_ps,
        adapter_loads=[wire.write_adapter(adapter) for adapter in (*plan.adapter_loads, *plan.adapter_prefetches)],
        adapter_evictions=plan.adapter_evictions,
        engine=engine,
    )
    if plan.leaves:
        message.leaves_u32 = u32.pack(sequence.handle for sequence in plan.leaves)
    if chunks:
        message.prefill_handles_u32 = u32.pack(chunk.sequence.handle for chunk in chunks)
        message.prefill_new_tokens_u32 = u32.pack(chunk.new_tokens for chunk in chunks)
        message.prefill_past_tokens_u32 = u32.pack(chunk.past_tokens for chunk in chunks)
        message.prefill_samples_u32 = u32.pack(chunk.samples for chunk in chunks)
    return ToWorker(plan=message)


def write_leaves(idle: Idle, plan_id: int, at_ps: int, sent_ps: int) -> ToWorker:
    """Write a plan without steps, which only says what to forget; the worker does not answer it."""
    return ToWorker(
        plan=pb.Plan(
            plan_id=plan_id,
            start_ps=to_wire(at_ps),
            sent_ps=to_wire(sent_ps),
            leaves_u32=u32.pack(sequence.handle for sequence in idle.leaves),
            adapter_evictions=idle.adapter_evictions,
        )
    )


def _join(sequence: Sequence, asked: Asked, needs_prompts: bool) -> pb.Join:
    join = pb.Join(
        handle=sequence.handle,
        prompt_tokens=sequence.prompt_tokens,
        prompt_token_ids_u32=asked.prompt_token_ids_u32 if needs_prompts else b"",
        produced_token_ids_u32=u32.pack(asked.token_ids),
        adapter=wire.write_adapter(sequence.adapter) if sequence.adapter is not None else None,
    )
    assert isinstance(asked.sampling, pb.Sampling)
    join.sampling.CopyFrom(asked.sampling)
    if (context := asked.run_context) is not None:
        join.traceparent, join.tracestate = context.traceparent, context.state
    return join
