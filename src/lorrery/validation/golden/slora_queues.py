"""`req_queue` and its five siblings: S-LoRA's queues, against `scheduler.core.queues` in their strict modes.

After each round's events these are compared: every state, every admission test, every batch, every look-ahead and every
drop; for the fair queue also the counters (ours are integers, the original's doubles: to 1e-9 relative), and for the
early-drop queue its averages.

The records cover the queue alone: between rounds they give the number of decode steps, and when to query the queue. So
queue, memory rule and running batch are driven directly here; the ten-step wait of the loop around them is covered by
`router_loop`.
"""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from lorrery.scheduler.core.admission import AdmissionPass, BatchLimits
from lorrery.scheduler.core.memory.base import Check
from lorrery.scheduler.core.memory.peak import PeakMemory
from lorrery.scheduler.core.protocols import Queue
from lorrery.scheduler.core.queues.early_drop import EarlyDrop, SloraOverload
from lorrery.scheduler.core.queues.few_adapters import Cluster, Peft
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.queues.pets import LENGTH_STEP, MAX_PROFILED_TOKENS, MeasuredProfile, Pets
from lorrery.scheduler.core.queues.vtc_fair import INPUT_PRICE, OUTPUT_PRICE, VtcFair
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.validation.golden.kind import Kind, Mismatch, Record, compare, compare_close
from lorrery.vocabulary.units import PS_PER_SECOND


class QueueBench:
    """The queue, the running batch, and the record's names for sequences.

    Args:
        record: with the events.
        queue: under test, in its strict mode.
        keep_refused: as for `PeakMemory`.
    """

    def __init__(self, record: Record, queue: Queue, *, keep_refused: bool = False) -> None:
        config = record["config"]
        self.queue = queue
        self.dropped: list[Sequence] = []
        self.now_ps = 0
        self._lora_ranks: Mapping[str, int] = record["lora_ranks"]
        self._limits = BatchLimits(config["running_max_req_size"], config["batch_max_tokens"])
        self._memory = PeakMemory(config["max_total_tokens"], keep_refused=keep_refused, report_peaks=True)
        self._running = Running()
        self._sequences: dict[str, Sequence] = {}
        self._id_of: dict[int, str] = {}
        for row in record["initial_running"] or ():
            self._resume(*row)

    def apply(self, event: list[Any]) -> None:
        """Apply one event of a round.

        Raises:
            ValueError: unknown event.
        """
        match event:
            case ["append", request_id, adapter, input_len, max_new_tokens]:
                self.queue.append(self._add(request_id, adapter, input_len, max_new_tokens), self.now_ps)
            case ["abort", request_id]:
                self._abort(self._sequences[request_id])
            case ["decode", num_steps]:
                for _ in range(num_steps):
                    self.queue.decoded(self._running, 1)
                    self._running.decode_step += 1
                    self._drop_ended(list(self._running))
            case ["advance", seconds]:
                self.now_ps += round(seconds * PS_PER_SECOND)
            case _:
                raise ValueError(f"no such event: {event}")

    def ask(self) -> dict[str, Any]:
        """Request a batch, prefill it, and return the record's values of the round."""
        before = {
            "running": [self._running_row(sequence) for sequence in self._running] or None,
            "waiting": [self._waiting_row(sequence) for sequence in self.queue],
            "prefetch_ids": self.ids(self.queue.look_ahead(self._limits.max_prompt_tokens)) or None,
            "now": self.now_ps / PS_PER_SECOND,
            "enqueue_time": [sequence.arrived_ps / PS_PER_SECOND for sequence in self.queue],
        }
        checks: list[Check] = []
        admitted: list[Sequence] = []
        self.dropped = []
        if len(self._running) < self._limits.max_sequences:  # as in a replica, which queries no queue beyond that
            trial = self._memory.trial(self._running)
            admission = AdmissionPass(trial, self._limits, cached_tokens=lambda sequence: 0, on_check=checks.append)
            self.dropped = self.queue.admit(admission, self._running, self.now_ps)
            admitted = admission.admitted
        after = {
            "checks": [self._check_row(check) for check in checks],
            "admitted": self.ids(admitted) or None,
            "waiting_after": self.ids(list(self.queue)),
            "deadline_aborted": self.ids(self.dropped),
        }
        for sequence in admitted:
            self._join(sequence)
        self._drop_ended(admitted)  # a running sequence that was cancelled meanwhile stays until its next decode step
        return before | after

    def ids(self, sequences: list[Sequence]) -> list[str]:
        """Return the record's names of sequences."""
        return [self._id_of[sequence.handle] for sequence in sequences]

    def _add(self, request_id: str, adapter_id: str | None, input_len: int, max_new_tokens: int) -> Sequence:
        adapter = None if adapter_id is None else Adapter(adapter_id, self._lora_ranks[adapter_id])
        handle = len(self._sequences)
        sequence = Sequence(handle, input_len, max_new_tokens, arrived_ps=self.now_ps, adapter=adapter)
        self._sequences[request_id] = sequence
        self._id_of[handle] = request_id
        return sequence

    def _resume(
        self, request_id: str, adapter: str | None, input_len: int, max_new_tokens: int, output_len: int, aborted: int
    ) -> None:
        """Put a decoding sequence into the batch, as one that produced its output before and resumes now."""
        sequence = self._add(request_id, adapter, input_len, max_new_tokens)
        sequence.requeue(output_len - 1, self.now_ps)  # joining gives the last one
        sequence.aborted = bool(aborted)
        self._join(sequence)

    def _join(self, sequence: Sequence) -> None:
        self._running.join(sequence)
        self._memory.joined(sequence)

    def _abort(self, sequence: Sequence) -> None:
        if self._running.get(sequence.handle) is not None:
            sequence.aborted = True
        else:
            self.queue.cancel(sequence.handle)

    def _drop_ended(self, stepped: list[Sequence]) -> None:
        decode_step = self._running.decode_step
        for sequence in stepped:
            if sequence.aborted or sequence.finish_step <= decode_step:
                self._running.leave(sequence)
                self._memory.left(sequence)

    def _waiting_row(self, sequence: Sequence) -> list[Any]:
        adapter = sequence.adapter.adapter_id if sequence.adapter is not None else None
        request_id = self._id_of[sequence.handle]
        return [request_id, adapter, sequence.prompt_tokens, sequence.max_new_tokens, int(sequence.aborted)]

    def _running_row(self, sequence: Sequence) -> list[Any]:
        output_tokens = sequence.produced_tokens + sequence.output_tokens_at(self._running.decode_step)
        row = self._waiting_row(sequence)
        return [*row[:-1], output_tokens, row[-1]]

    def _check_row(self, check: Check) -> list[Any]:
        request_id = self._id_of[check.sequence.handle]
        return [request_id, check.peak_tokens, check.adapter_slots, check.num_sequences, int(check.fits)]


def queue_kind(record: Record) -> str | None:
    """Return the name of the queue that a record covers, or None if it covers none."""
    config, rounds = record.get("config"), record.get("rounds")
    if "lora_ranks" not in record or not isinstance(config, Mapping) or not isinstance(rounds, list):
        return None
    for own_field, name in (
        ("profile", "pets_req_queue"),
        ("fair_weights", "vtc_req_queue"),
        ("batch_num_adapters", "cluster_req_queue"),
    ):
        if own_field in config:
            return name
    first_round = rounds[0] if rounds else {}
    for own_field, name in (("enqueue_time", "abort_req_queue"), ("prefetch_ids", "req_queue")):
        if own_field in first_round:
            return name
    return "peft_req_queue"


COUNTER_TOLERANCE = 1e-9


class SloraQueue:
    """A queue that is queried once a round.

    Args:
        name: the queue's, by `queue_kind`.
        make: builds it from a record's configuration.
        keep_refused: as for `PeakMemory`.
    """

    def __init__(self, name: str, make: Callable[[Record], Queue], *, keep_refused: bool = False) -> None:
        self.name = name
        self._make = make
        self._keep_refused = keep_refused

    def detect(self, record: Record) -> bool:
        """Whether the record covers this one of the six queues."""
        return queue_kind(record) == self.name

    def replay(self, record: Record) -> list[Mismatch]:
        """Play the rounds, comparing after each."""
        bench = QueueBench(record, self._make(record["config"]), keep_refused=self._keep_refused)
        found: list[Mismatch] = []
        for number, expected in enumerate(record["rounds"]):
            for event in expected["events"]:
                bench.apply(event)
            got = bench.ask()
            for field, value in expected.items():
                where = f"round {number}, {field}"
                if field == "served":
                    found += _compare_served(where, value, bench.queue)
                elif field == "state":
                    found += compare(where, value, _state(bench.queue))
                elif field != "events":
                    found += compare(where, value, got[field])
        return found


def _compare_served(where: str, expected: Mapping[str, float], queue: Queue) -> list[Mismatch]:
    assert isinstance(queue, VtcFair)
    served = queue.served()
    found = compare(f"adapters of {where}", list(expected), list(served))
    for adapter_id, counter in expected.items():
        got = float(served.get(adapter_id, Fraction(-1)))
        found += compare_close(f"{where}, {adapter_id}", counter, got, COUNTER_TOLERANCE)
    return found


def _state(queue: Queue) -> dict[str, int]:
    assert isinstance(queue, EarlyDrop)
    assert isinstance(queue.overload, SloraOverload)
    overload = queue.overload
    return {
        "approx_req_rate": overload.req_rate,
        "approx_bs": overload.batch_size,
        "last_req_num": overload.last_req_num,
    }


def _vtc_fair(config: Record) -> Queue:
    if (config["input_price"], config["output_price"]) != (INPUT_PRICE, OUTPUT_PRICE):
        raise ValueError(f"the fair queue's prices are {INPUT_PRICE} and {OUTPUT_PRICE}")
    weights = zip(config["adapter_dirs"], config["fair_weights"], strict=False)
    return VtcFair({adapter_id: Fraction(str(weight)) for adapter_id, weight in weights}, strict=True)


def _pets(config: Record) -> Queue:
    profile: Mapping[str, Any] = config["profile"]

    def measured(num_sequences: int, tokens: int, rank: int) -> float | None:
        if num_sequences % 2 or not 2 <= num_sequences <= profile["max_bs"] or tokens % LENGTH_STEP:
            return None
        assert tokens <= MAX_PROFILED_TOKENS
        cost: float = profile["base_s"] + profile["base_s_per_tok"] * num_sequences * tokens
        if rank:
            cost += profile["lora_s"] + profile["lora_s_per_tok_rank"] * num_sequences * tokens * rank
        return cost

    return Pets(MeasuredProfile(measured), strict=True)


SLORA_QUEUES: tuple[Kind, ...] = (
    SloraQueue("req_queue", lambda config: Fifo(strict=True)),
    SloraQueue("vtc_req_queue", _vtc_fair),
    SloraQueue("cluster_req_queue", lambda c: Cluster(c["batch_num_adapters"], strict=True), keep_refused=True),
    SloraQueue("abort_req_queue", lambda config: EarlyDrop(strict=True)),
    SloraQueue("peft_req_queue", lambda config: Peft(strict=True)),
    SloraQueue("pets_req_queue", _pets),
)
