"""Records of SGLang's scheduler (`tests/golden/sglang_scheduler.jsonl`) as a live cluster can be asked for them.

An iteration sees what has come before it: during the step before, or, if the engine is idle, the one request that it
begins with. With `overlap` it does not know yet what that step's output is: a request that has ended may take part once
more, and one that is preempted makes its newest token again.
"""

from collections.abc import Mapping
from typing import Any

from lorrery.scheduler.subscribers.record import Record
from lorrery.validation.golden.sglang_scheduler import OUTPUTS, iterations
from lorrery.validation.golden.vllm_scheduler import token_at
from tests.cluster.live_record import MODEL, Arrival, LiveRecord, RecordedAsk, Step, output_of

SAME = (
    "max_prefill_tokens",
    "enable_mixed_chunk",
    "schedule_conservativeness",
    "init_new_token_ratio",
    "min_new_token_ratio_factor",
    "new_token_ratio_decay_steps",
    "retract_decode_steps",
    "clip_max_new_tokens",
    "in_batch_check_threshold",
    "in_batch_deprioritize_threshold",
    "overlap",
)
"""Settings whose names a record has too."""


class SglangRecord(LiveRecord):
    """A record, and what a live cluster must make of it."""

    def __init__(self, record: Record, step_seconds: float) -> None:
        super().__init__(record)
        self._step_seconds = step_seconds
        self._rows: dict[int, list[Any]] = {row[0]: row for row in record["requests"]}
        if record["tie_ambiguous"]:
            self.why_not = "a tie was decided by chance"
            return
        for number in self._rows:
            self._ask(number)
        self._read_iterations(record)
        if not self.why_not:
            self._order_arrivals()

    def overrides(self) -> tuple[str, ...]:
        """Return the settings, as for `--set`: the preset's, and those of the record."""
        config = self.config
        longest = max([ask.prompt_tokens + ask.max_new_tokens for ask in self.asks.values()])
        # A request joins in the middle of a step, and the record counts from the next one.
        waits = config["lora_drain_wait_threshold"]
        drain_seconds = (waits + 0.75) * self._step_seconds if waits else 0.0
        registry = ", ".join([f"{{id='{name}', rank=1}}" for name in config["adapters"]])
        return (
            "engine='sglang-0.5.23'",
            f"model='{MODEL}'",
            "worker.step_time='constant'",
            "worker.api_server_count=0",  # the record is the scheduler's own, without a front end
            f"scheduler.policy='{'lpm' if config['schedule_policy'] == 'lpm' else 'fcfs_tail'}'",
            f"scheduler.max_num_seqs={config['max_running_requests']}",
            f"scheduler.block_size={config['page_size']}",
            f"scheduler.max_total_token_num={config['max_total_tokens']}",
            f"scheduler.max_req_input_len={longest - 1}",
            f"scheduler.max_req_total_len={longest}",
            *([] if config["radix_cache"] else ["scheduler.prefix_cache={kind='none'}"]),
            f"scheduler.sglang.chunked={_toml(config['chunked_prefill_size'] is not None)}",
            f"scheduler.max_num_batched_tokens={config['chunked_prefill_size'] or config['max_prefill_tokens']}",
            f"scheduler.sglang.prefill_decode_interval={config['prefill_decode_interval'] or 0}",
            *(
                [f"scheduler.sglang.prefill_max_requests={config['prefill_max_requests']}"]
                if config["prefill_max_requests"]
                else []
            ),
            f"scheduler.sglang.lora_drain_wait_seconds={drain_seconds}",
            f"scheduler.sglang.pinned_loras={config['pinned_loras']}",
            *(f"scheduler.sglang.{name}={_toml(config[name])}" for name in SAME),
            *([] if config["max_loras_per_batch"] is None else [f"adapters.max_loras={config['max_loras_per_batch']}"]),
            f"adapters.registry=[{registry}]",
            "adapters.host_gb_per_second=1e6",  # loads take next to no time
            "adapters.disk_gb_per_second=1e6",
        )

    def _ask(self, number: int) -> RecordedAsk:
        if number not in self.asks:
            _, _, prompt, _, most, eos_at, ignores, adapter = self._rows[number]
            tokens = [self._token(part, position) for part, at, num in prompt for position in range(at, at + num)]
            stops = eos_at and not ignores and eos_at <= most
            self.asks[number] = RecordedAsk(
                seed=number,
                prompt_tokens=len(tokens),
                max_new_tokens=most,
                adapter_id=adapter or "",
                ignore_eos=bool(ignores),
                true_output_tokens=eos_at if stops else most + 1,
                name=str(number),
                prompt_token_ids=tuple(tokens),
            )
        return self.asks[number]

    def _token(self, segment: int, position: int) -> int:
        """Return a token; what continues an earlier request has those that this one really gets, but for its end."""
        if segment >= OUTPUTS:
            earlier = self._ask(segment - OUTPUTS)
            if position + 1 != earlier.true_output_tokens:
                return output_of(earlier)[position]
        return token_at(segment, position)

    def _read_iterations(self, record: Record) -> None:
        known = {number: ask.prompt_tokens for number, ask in self.asks.items()}
        left = {number: len(output_of(ask)) for number, ask in self.asks.items()}
        coming = sorted(record["requests"], key=lambda row: row[1])
        in_prefill: set[int] = set()
        here: set[int] = set()
        idle, step = True, Step()
        unseen: set[int] = set()  # who has got a token that the next iteration does not know
        for number, row in enumerate(iterations(record)):
            come = [request[0] for request in coming if request[1] == number]
            here |= set(come)
            if row["k"] == "idle":
                if any(left[request] for request in here):
                    self.why_not = "a pass that runs nothing though requests wait"
                    return
                idle, unseen = True, set()
                continue
            num_steps = len(self.steps)
            if idle and num_steps and len(come) > 1:
                self.why_not = "several requests at an idle engine"
                return
            self.arrivals += [Arrival(request, num_steps if idle else num_steps - 1, idle) for request in come]
            for request in row["retracted"]:
                step.preempted.append(request)
                in_prefill.discard(request)
                known[request] -= request in unseen
                left[request] += request in unseen
            step.admitted += [request for request, _, _ in row["x"] if request not in in_prefill]
            _compute(row, step, known, left, in_prefill)
            self.steps.append(step)
            unseen = step.tokens if self.config["overlap"] else set()
            idle, step = False, Step()
        assert not any(left.values())


def _compute(
    row: Mapping[str, Any], step: Step, known: dict[int, int], left: dict[int, int], in_prefill: set[int]
) -> None:
    """Note what an iteration computes, for those that have not ended."""
    for request, before, tokens in row["x"]:
        step.sched[request] = tokens, before
        (in_prefill.discard if before + tokens == known[request] else in_prefill.add)(request)
    step.sched |= {request: (1, known[request] - 1) for request in row["d"] if left[request]}
    for request in step.sched.keys() - in_prefill:
        step.tokens.add(request)
        known[request] += 1
        left[request] -= 1


def _toml(value: object) -> str:
    return str(value).lower()
