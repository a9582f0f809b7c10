"""Converts between wire messages and the worker's own records."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from lorrery.service.telemetry.spans import TraceContext, read_trace_context
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.vocabulary import u32
from lorrery.vocabulary.adapters import adapter_key
from lorrery.vocabulary.units import from_wire, to_wire
from lorrery.worker.device.answers import Answers
from lorrery.worker.device.batch import PrefillWork
from lorrery.worker.device.deployment import FrontEndCost
from lorrery.worker.device.output import GREEDY, Sampler, Sampling
from lorrery.worker.device.rows import DeviceSequence
from lorrery.worker.device.steptime import Pace
from lorrery.worker.pacer import Plan, StepReport


def hello(
    *,
    worker_id: str,
    gpu: str,
    model: str,
    tensor_parallel: int,
    kv_pool_tokens: int,
    step_time_model: str,
    needs_prompts: bool,
    instance_id: str,
    heartbeat_seconds: float,
    device_settings: Mapping[str, Any],
    pace: Pace,
    front_end: FrontEndCost,
) -> pb.AttachRequest:
    """Return the stream's first message."""
    return pb.AttachRequest(
        hello=pb.WorkerHello(
            worker_id=worker_id,
            gpu=gpu,
            model=model,
            tensor_parallel=tensor_parallel,
            max_total_token_num=kv_pool_tokens,
            step_time_model=step_time_model,
            needs_prompts=needs_prompts,
            instance_id=instance_id,
            heartbeat_seconds=heartbeat_seconds,
            device_settings=json.dumps(device_settings),
            pace=pb.Pace(**pace._asdict()),
            front_end=pb.FrontEnd(**front_end._asdict()),
        )
    )


DRAINING = pb.AttachRequest(draining=pb.WorkerDraining())


def faults_taken(from_ps: int) -> pb.AttachRequest:
    """Return the message that says from when an operator's faults apply."""
    return pb.AttachRequest(faults_taken=pb.FaultsTaken(from_ps=to_wire(from_ps)))


def heartbeat(number: int, progress: tuple[int, int] | None) -> pb.AttachRequest:
    """Return a heartbeat; `progress` is the id of the plan that runs and the end of its current step."""
    if progress is None:
        return pb.AttachRequest(heartbeat=pb.Heartbeat(number=number))
    plan_id, step_end_ps = progress
    beat = pb.Heartbeat(number=number, plan_id=plan_id, step_end_ps=to_wire(step_end_ps))
    return pb.AttachRequest(heartbeat=beat)


def step_done(report: StepReport) -> pb.AttachRequest:
    """Return the message that reports one step's outcome."""
    outcome = report.outcome
    message = pb.AttachRequest()
    step = message.step  # filled in place: assigning a separate message would copy it
    step.plan_id = report.plan_id
    step.start_ps, step.end_ps = to_wire(report.start_ps), to_wire(report.end_ps)
    step.handles_u32, step.token_ids_u32 = u32.pack_array(outcome.handles), u32.pack_array(outcome.token_ids)
    if report.hand_back:
        step.hand_back = True
    if outcome.finished:
        step.finished_handles_u32 = u32.pack(handle for handle, _ in outcome.finished)
        step.finish_reasons_u32 = u32.pack(reason for _, reason in outcome.finished)
    return message


def read_plan(message: pb.Plan, answers: Answers, now_ps: int) -> Plan:
    """Return the plan, with the output of each joining sequence determined; `now_ps` is the device time.

    Raises:
        ValueError: arrays of different lengths or not a multiple of four bytes, or an impossible sequence.
    """
    columns = (
        u32.view(message.prefill_handles_u32),
        u32.view(message.prefill_new_tokens_u32),
        u32.view(message.prefill_past_tokens_u32),
        u32.view(message.prefill_samples_u32),
    )
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"plan {message.plan_id}: prefill arrays of {[len(column) for column in columns]} elements")
    return Plan(
        plan_id=message.plan_id,
        start_ps=from_wire(message.start_ps, now_ps),
        max_steps=message.max_steps,
        until_ps=from_wire(message.until_ps, now_ps) if message.HasField("until_ps") else None,
        joins=tuple(_read_joins(message.joins, answers)),
        leaves=tuple(u32.view(message.leaves_u32).tolist()),
        prefills=tuple(
            PrefillWork(handle, new_tokens, past_tokens, bool(samples))
            for handle, new_tokens, past_tokens, samples in zip(*(c.tolist() for c in columns), strict=True)
        ),
        decode=message.decode,
        hold=message.hold,
        wait_ps=message.wait_ps,
        adapter_loads=tuple(adapter_key(adapter.adapter_id, adapter.version) for adapter in message.adapter_loads),
        adapter_evictions=tuple(message.adapter_evictions),
    )


def parents(message: pb.Plan) -> list[tuple[int, TraceContext]]:
    """Return the parent spans of a plan's joins as (handle, context); sequences without a trace are left out."""
    return [
        (join.handle, context)
        for join in message.joins
        if join.traceparent and (context := read_trace_context(join.traceparent, join.tracestate)) is not None
    ]


def _read_joins(joins: Iterable[pb.Join], answers: Answers) -> Iterable[DeviceSequence]:
    for join in joins:
        asked = join.sampling
        sampling = Sampling(
            seed=asked.seed,
            max_new_tokens=asked.max_new_tokens,
            ignore_eos=asked.ignore_eos,
            true_output_tokens=asked.true_output_tokens or None,
            stop_sequences=tuple(
                tuple(stop) for stop in (u32.view(s).tolist() for s in asked.stop_sequences_u32) if stop
            ),
            min_new_tokens=asked.min_new_tokens,
            sampler=_sampler(asked),
            output_token_ids=tuple(u32.view(asked.output_token_ids_u32).tolist()),
        )
        adapter = join.adapter
        yield answers.sequence(
            join.handle,
            join.prompt_tokens,
            u32.view(join.prompt_token_ids_u32),
            u32.view(join.produced_token_ids_u32),
            sampling,
            adapter.adapter_id,
            adapter_key(adapter.adapter_id, adapter.version),
            adapter.rank,
        )


def _sampler(asked: pb.Sampling) -> Sampler:
    if not asked.HasField("sampler"):
        return GREEDY
    said = asked.sampler
    return Sampler.of(
        presence_penalty=said.presence_penalty,
        frequency_penalty=said.frequency_penalty,
        temperature=said.temperature,
        top_p=said.top_p,
        top_k=said.top_k,
    )
