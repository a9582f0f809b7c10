"""`req_queue`: S-LoRA's admission rule, against `scheduler.core.queues.req_queue` in its strict mode.

The record is about the queue alone: between its rounds it says how many decode steps run, and when to ask. So the queue
and the running batch are driven directly here; the ten-step wait of the loop around them is `router_loop`'s matter.
Compared are every state, every admission test, every batch and every look-ahead.
"""

from collections.abc import Mapping
from typing import Any

from cli.golden.kind import Mismatch, Record, compare
from cli.golden.queues import queue_kind
from scheduler.core.queues.req_queue import Check, ReqQueue
from scheduler.core.running import Running
from scheduler.core.sequence import Adapter, Sequence


class SloraReqQueue:
    """A queue that is asked once a round, and the batch that decodes beside it."""

    name = "req_queue"

    def detect(self, record: Record) -> bool:
        """Whether the record is about this one of the six queues."""
        return queue_kind(record) == self.name

    def replay(self, record: Record) -> list[Mismatch]:
        """Play the rounds, comparing after each."""
        bench = _Bench(record)
        found: list[Mismatch] = []
        for number, expected in enumerate(record["rounds"]):
            for event in expected["events"]:
                bench.apply(event)
            for field, got in bench.ask().items():
                found += compare(f"round {number}, {field}", expected[field], got)
        return found


class _Bench:
    """The queue, the running batch, and the record's names for sequences."""

    def __init__(self, record: Record) -> None:
        config = record["config"]
        self._lora_ranks: Mapping[str, int] = record["lora_ranks"]
        self._checks: list[Check] = []
        self._queue = ReqQueue(
            max_total_token_num=config["max_total_tokens"],
            batch_max_tokens=config["batch_max_tokens"],
            running_max_req_size=config["running_max_req_size"],
            strict=True,
            on_check=self._checks.append,
        )
        self._running = Running()
        self._sequences: dict[str, Sequence] = {}
        self._id_of: dict[int, str] = {}
        for row in record["initial_running"] or ():
            self._resume(*row)

    def apply(self, event: list[Any]) -> None:
        """Apply one event of a round.

        Raises:
            ValueError: there is no such event.
        """
        match event:
            case ["append", request_id, adapter, input_len, max_new_tokens]:
                self._queue.append(self._add(request_id, adapter, input_len, max_new_tokens), at_ps=0)
            case ["abort", request_id]:
                self._abort(self._sequences[request_id])
            case ["decode", num_steps]:
                for _ in range(num_steps):
                    self._running.advance(1)
                    self._drop_ended(list(self._running))
            case _:
                raise ValueError(f"no such event: {event}")

    def ask(self) -> dict[str, Any]:
        """Ask for a batch, prefill it, and return what the record says of the round."""
        self._checks.clear()
        before = {
            "running": [self._running_row(sequence) for sequence in self._running] or None,
            "waiting": [self._waiting_row(sequence) for sequence in self._queue],
            "prefetch_ids": self._ids(self._queue.next_batch()) or None,
        }
        admitted = self._queue.admit(self._running, at_ps=0)
        after = {
            "checks": [self._check_row(check) for check in self._checks],
            "admitted": self._ids(admitted) or None,
            "waiting_after": self._ids(list(self._queue)),
        }
        for sequence in admitted:
            self._running.join(sequence)
        self._drop_ended(admitted)  # a running one that was cancelled meanwhile stays until its next decode step
        return before | after

    def _add(self, request_id: str, adapter_id: str | None, input_len: int, max_new_tokens: int) -> Sequence:
        adapter = None if adapter_id is None else Adapter(adapter_id, self._lora_ranks[adapter_id])
        handle = len(self._sequences)
        sequence = Sequence(handle, input_len, max_new_tokens, adapter=adapter)
        self._sequences[request_id] = sequence
        self._id_of[handle] = request_id
        return sequence

    def _resume(
        self, request_id: str, adapter: str | None, input_len: int, max_new_tokens: int, output_len: int, aborted: int
    ) -> None:
        """Put a sequence that already decodes into the batch, as one that made its output before and goes on now."""
        sequence = self._add(request_id, adapter, input_len, max_new_tokens)
        sequence.produced_tokens = output_len - 1  # joining gives the last one
        sequence.aborted = bool(aborted)
        self._running.join(sequence)

    def _abort(self, sequence: Sequence) -> None:
        if sequence.handle in self._running:
            sequence.aborted = True
        else:
            self._queue.cancel(sequence.handle)

    def _drop_ended(self, stepped: list[Sequence]) -> None:
        decode_step = self._running.decode_step
        for sequence in stepped:
            if sequence.aborted or sequence.finish_step <= decode_step:
                self._running.leave(sequence)

    def _ids(self, sequences: list[Sequence]) -> list[str]:
        return [self._id_of[sequence.handle] for sequence in sequences]

    def _waiting_row(self, sequence: Sequence) -> list[Any]:
        adapter = sequence.adapter.adapter_id if sequence.adapter is not None else None
        request_id = self._id_of[sequence.handle]
        return [request_id, adapter, sequence.prompt_tokens, sequence.max_new_tokens, int(sequence.aborted)]

    def _running_row(self, sequence: Sequence) -> list[Any]:
        output_tokens = sequence.produced_tokens + sequence.output_tokens(self._running.decode_step)
        row = self._waiting_row(sequence)
        return [*row[:-1], output_tokens, row[-1]]

    def _check_row(self, check: Check) -> list[Any]:
        request_id = self._id_of[check.sequence.handle]
        return [request_id, check.peak_tokens, check.adapter_slots, check.num_sequences, int(check.passed)]
