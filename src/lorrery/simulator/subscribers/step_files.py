"""Files of a simulation's steps: every step as CSV, and a trace in Chrome's trace event format.

Perfetto reads the trace too (ui.perfetto.dev). One process per worker: its batches (a slice for each prefill step, one
for each span of decode steps), and counters of running and waiting sequences and of KV tokens. One process "requests":
each request's wait, prefill and decode. Times are picoseconds in the CSV, microseconds of device
time in the trace.

Format: "Trace Event Format" (Google), JSON array form: ph X a slice, C a counter, b and e the ends of an async slice,
i an instant, M a name.
"""

import csv
import json
from collections.abc import Mapping
from typing import TextIO

from lorrery.scheduler.core.facts import Handler
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.simulator.loop.worker import RunBegan, StepSpan

COLUMNS = (
    "worker",
    "step",
    "start_ps",
    "end_ps",
    "step_ps",
    "decode_sequences",
    "prefill_sequences",
    "prefill_tokens",
    "kv_tokens",
    "waiting_sequences",
)


class StepWriter:
    """Writes steps as they end.

    Args:
        file: open for writing with `newline=""`.
    """

    def __init__(self, file: TextIO) -> None:
        self._writer = csv.writer(file, lineterminator="\n")
        self._writer.writerow(COLUMNS)
        self._num_steps: dict[str, int] = {}
        self._start_ps = 0

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """See `Subscriber`."""
        return {RunBegan: self._begin, StepSpan: self._ran}

    def _begin(self, fact: RunBegan, at_ps: int, member: object) -> None:
        self._start_ps = at_ps

    def _ran(self, span: StepSpan, at_ps: int, member: object) -> None:
        """Write these steps."""
        number = self._num_steps.get(span.worker, 0)
        self._num_steps[span.worker] = number + span.num_steps
        prefill_tokens = sum(chunk.new_tokens for chunk in span.plan.prefills)
        at_ps, step_ps, kv_tokens = span.start_ps - self._start_ps, span.first_ps, span.kv_tokens
        for index in range(span.num_steps):
            # Only the first step of a plan has its prefills, and it is then the only one of its span.
            prefills = len(span.plan.prefills) if index == 0 else 0
            self._writer.writerow(
                (
                    span.worker,
                    number + index,
                    at_ps,
                    at_ps + step_ps,
                    step_ps,
                    span.num_decodes,
                    prefills,
                    prefill_tokens if prefills else 0,
                    kv_tokens + index * span.num_decodes,
                    span.num_waiting,
                )
            )
            at_ps += step_ps
            step_ps += span.slope_ps


_PS_PER_US = 1e6
_REQUESTS = 1
_BATCHES = 1


class TraceWriter:
    """Writes a trace as the simulation runs; `close` ends it.

    Args:
        file: open for writing.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._file.write("[\n")
        self._pids: dict[str, int] = {}
        self._any = False
        self._start_ps = 0
        self._write({"ph": "M", "pid": _REQUESTS, "name": "process_name", "args": {"name": "requests"}})

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """See `Subscriber`."""
        return {RunBegan: self._begin, StepSpan: self._ran}

    def _begin(self, fact: RunBegan, at_ps: int, member: object) -> None:
        self._start_ps = at_ps

    def close(self) -> None:
        """Write the end; the file stays open."""
        self._file.write("\n]\n")

    def _ran(self, span: StepSpan, at_ps: int, member: object) -> None:
        """Write a span of steps, and the counters at its beginning."""
        pid = self._pid(span.worker)
        start_us = self._us(span.start_ps)
        prefills = span.plan.prefills
        num_sequences = span.num_decodes + len(prefills)
        prefill_tokens = sum(chunk.new_tokens for chunk in prefills)
        if not num_sequences:
            name = "empty"
        elif not prefills:
            name = f"decode {span.num_decodes}"
        elif span.num_decodes:
            name = f"prefill {prefill_tokens} tokens, decode {span.num_decodes}"
        else:
            name = f"prefill {prefill_tokens} tokens"
        details: dict[str, object] = {
            "steps": span.num_steps,
            "step_ms": round(span.first_ps / 1e9, 6),
            "decoding_sequences": span.num_decodes,
            "kv_tokens": span.kv_tokens,
        }
        if prefills:
            details["prefills"] = {
                str(chunk.sequence.handle): f"{chunk.new_tokens} after {chunk.past_tokens}" for chunk in prefills
            }
        if span.plan.adapter_loads:
            details["adapters"] = [adapter.adapter_id for adapter in span.plan.adapter_loads]
        self._slice(pid, name, start_us, (span.end_ps - span.start_ps) / _PS_PER_US, details)
        for counter, value in (
            ("running sequences", num_sequences),
            ("waiting sequences", span.num_waiting),
            ("KV tokens", span.kv_tokens),
        ):
            self._write({"ph": "C", "pid": pid, "ts": start_us, "name": counter, "args": {"value": value}})

    def ended(self, request: SimulatedRequest) -> None:
        """Write a request's phases."""
        times = [("wait", request.arrived_ps), ("prefill", request.first_admitted_ps)]
        times += [("decode", request.first_token_ps)]
        known = [(name, at_ps) for name, at_ps in times if at_ps is not None]
        ends = [at_ps for _, at_ps in known[1:]] + [request.finished_ps or request.arrived_ps]
        details: dict[str, object] = {
            "prompt_tokens": request.prompt_tokens,
            "cached_tokens": request.first_cached_tokens,
            "outcome": request.outcome,
            "worker": request.worker,
            "adapter": "" if request.adapter is None else request.adapter.adapter_id,
        }
        if request.outcome == "finished":
            details["output_tokens"] = request.output_tokens
        common = {"pid": _REQUESTS, "tid": 1, "cat": "request", "id": request.handle}
        name = f"request {request.handle}"
        begin_us, end_us = self._us(request.arrived_ps), self._us(ends[-1])
        self._write({"ph": "b", **common, "name": name, "ts": begin_us, "args": details})
        for (phase, at_ps), end_ps in zip(known, ends, strict=True):
            self._write({"ph": "b", **common, "name": phase, "ts": self._us(at_ps)})
            self._write({"ph": "e", **common, "name": phase, "ts": self._us(end_ps)})
        self._write({"ph": "e", **common, "name": name, "ts": end_us})

    def _pid(self, worker: str) -> int:
        pid = self._pids.get(worker)
        if pid is None:
            pid = self._pids[worker] = _REQUESTS + 1 + len(self._pids)
            self._write({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": worker}})
            self._write({"ph": "M", "pid": pid, "tid": _BATCHES, "name": "thread_name", "args": {"name": "batches"}})
        return pid

    def _us(self, at_ps: int) -> float:
        return (at_ps - self._start_ps) / _PS_PER_US

    def _slice(self, pid: int, name: str, start_us: float, duration_us: float, details: Mapping[str, object]) -> None:
        self._write(
            {"ph": "X", "pid": pid, "tid": _BATCHES, "name": name, "ts": start_us, "dur": duration_us, "args": details}
        )

    def _write(self, event: Mapping[str, object]) -> None:
        if self._any:
            self._file.write(",\n")
        self._any = True
        self._file.write(json.dumps(event, separators=(",", ":")))
