"""`req_queue` and its five siblings: S-LoRA's queues, against `scheduler.core.queues` in their strict modes.

After each round's events these are compared: every state, every admission test, every batch, every look-ahead and every
drop; for the fair queue also the counters (ours are integers, the original's doubles: to 1e-9 relative), and for the
early-drop queue its averages.
"""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from lorrery.scheduler.core.protocols import Queue
from lorrery.scheduler.core.queues.early_drop import EarlyDrop, SloraOverload
from lorrery.scheduler.core.queues.few_adapters import Cluster, Peft
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.queues.pets import LENGTH_STEP, MAX_PROFILED_TOKENS, MeasuredProfile, Pets
from lorrery.scheduler.core.queues.vtc_fair import INPUT_PRICE, OUTPUT_PRICE, VtcFair
from lorrery.validation.golden.kind import Kind, Mismatch, Record, compare, compare_close
from lorrery.validation.golden.queue_bench import QueueBench


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
