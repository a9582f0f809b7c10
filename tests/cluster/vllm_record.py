"""Records of vLLM's scheduler (`tests/golden/vllm_*.jsonl`) as a live cluster can be asked for them.

* Without async scheduling the call for a step is at its start: a request comes during the step before.
* With it that call is at the start of the step before: a request comes during the one before that.
* A call at an idle engine is at the request itself, so it can be for one request only. Those of the first call come
  before there is a worker.

A `call` is a number of the record.
"""

from lorrery.scheduler.subscribers.record import Record
from lorrery.validation.golden.vllm_scheduler import expected_steps, token_at
from tests.cluster.live_record import MODEL, Arrival, LiveRecord, RecordedAsk, Step, output_of

ADAPTER_RANK = 1


class VllmRecord(LiveRecord):
    """A record, and what a live cluster must make of it."""

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self._rows: list[Record] = record["requests"]
        self._calls: list[tuple[int, int, bool]] = []  # number, steps before it, whether it schedules something
        self.why_not = self._why_not(record)
        if not self.why_not:
            for row in self._rows:
                self.asks[row["id"]] = self._ask(row)
            self._read_steps(record)
            self._read_arrivals()
            if "kv_events" in record:
                self.kv_events = [self._kv_events(events) for _, events in record["kv_events"]]

    def _why_not(self, record: Record) -> str:
        if any("abort_before" in row or "abort_during" in row for row in self._rows):
            return "a client's abort cannot be timed"
        if record["left_waiting"]:
            return "a request waits for ever"
        return ""

    # --- what is asked ----------------------------------------------------------------------------------------------

    def overrides(self) -> tuple[str, ...]:
        """Return the settings, as for `--set`: the preset's, and those of the record."""
        config = self.config
        longest = max([ask.prompt_tokens + ask.max_new_tokens for ask in self.asks.values()])
        num_adapters = max([row.get("lora", 0) for row in self._rows])
        return (
            "engine='vllm-0.32'",
            f"model='{MODEL}'",
            "worker.step_time='constant'",
            "worker.api_server_count=0",  # the record is the scheduler's own, without a front end
            *(["scheduler.policy='priority'"] if config["policy"] == "priority" else []),
            f"scheduler.max_num_seqs={config['max_num_seqs']}",
            f"scheduler.max_num_batched_tokens={config['max_num_batched_tokens']}",
            *([] if (active := config["max_num_active_seqs"]) is None else [f"scheduler.max_num_active_seqs={active}"]),
            f"scheduler.block_size={config['block_size']}",
            f"scheduler.max_total_token_num={(config['num_gpu_blocks'] - 1) * config['block_size']}",
            f"scheduler.max_req_input_len={longest - 1}",
            f"scheduler.max_req_total_len={longest}",
            f"scheduler.watermark={config['watermark']}",
            "scheduler.refuse_never_fits=false",
            *([] if config["enable_prefix_caching"] else ["scheduler.prefix_cache={kind='none'}"]),
            *(
                f"scheduler.{name}={str(config[name]).lower()}"
                for name in (
                    "enable_chunked_prefill",
                    "long_prefill_token_threshold",
                    "long_prefill_token_threshold_adaptive",
                    "scheduler_reserve_full_isl",
                    "async_scheduling",
                )
            ),
            *([] if config["max_loras"] is None else [f"adapters.max_loras={config['max_loras']}"]),
            f"adapters.registry=[{{id='lora', rank={ADAPTER_RANK}, count={num_adapters + 1}}}]",
            "adapters.host_gb_per_second=1e6",  # loads take next to no time
            "adapters.disk_gb_per_second=1e6",
        )

    def _ask(self, row: Record) -> RecordedAsk:
        prompt, number = self._prompt(row), row["id"]
        most = min(row["max_tokens"], self.config["max_model_len"] - len(prompt))
        eos_at = row.get("eos_at")
        return RecordedAsk(
            seed=number,
            prompt_tokens=len(prompt),
            max_new_tokens=most,
            adapter_id=f"lora-{row['lora']}" if "lora" in row else "",
            ignore_eos=eos_at is None or eos_at > most,
            true_output_tokens=eos_at,
            priority=row.get("priority", 0),
            cache_salt=row.get("salt", ""),
            name=str(number),
            prompt_token_ids=tuple(prompt),
        )

    def _kv_events(self, events: list[Record]) -> list[object]:
        """Return a batch as `told_of` would; adapter number n has the name lora-n, of which there is a lora-0."""
        batch: list[object] = []
        for event in events:
            if len(event) == 1:
                batch += event
                continue
            hashes, parent, _, lora, keys = event
            keys = (keys or [])[lora is not None :]
            adapter = (0, "") if lora is None else (lora + 1, f"lora-{lora}")
            num_tokens = self.config["block_size"] * len(hashes)
            salt = keys[0] if keys else ""
            batch.append((hashes, parent, num_tokens, *adapter, salt))
        return batch

    def _prompt(self, row: Record) -> list[int]:
        """Return a prompt; what continues an earlier request has the tokens that this one really gets."""
        number, prompt = row["id"], row["prompt"]
        tokens: list[int] = []
        if "continues" in prompt:
            earlier = self.asks[prompt["continues"]]
            tokens += [*earlier.prompt_token_ids, *output_of(earlier)]
        tokens += [token_at(3 * prompt["shared"], position) for position in range(prompt.get("shared_tokens", 0))]
        end = len(tokens) + prompt["own_tokens"]
        return tokens + [token_at(3 * number + 1, position) for position in range(len(tokens), end)]

    # --- what must come of it ---------------------------------------------------------------------------------------

    def _read_steps(self, record: Record) -> None:
        known = {number: len(ask.prompt_token_ids) for number, ask in self.asks.items()}
        left = {number: len(output_of(ask)) for number, ask in self.asks.items()}
        step = Step()
        for call, expected in expected_steps(record):
            step.preempted += [request for request in expected["preempted"] if left[request]]
            step.admitted += _in_order(expected["sched"], {*expected["new"], *expected["resumed"]})
            self._calls.append((call, len(self.steps), bool(expected["sched"])))
            for request, tokens, before in expected["sched"]:
                if not left[request]:
                    continue
                step.sched[request] = tokens, before
                if before + tokens == known[request]:
                    step.tokens.add(request)
                    known[request] += 1
                    left[request] -= 1
            if expected["sched"]:
                self.steps.append(step)
                step = Step()
        assert not any(left.values())

    def _read_arrivals(self) -> None:
        sees = self._sees()
        for row in self._rows:
            call, number = row["step"], row["id"]
            own, earlier = sees.get(call), sees.get(call - 1)
            if own is None:
                self.why_not = "a call that did not take place"
                return
            step, idle = own
            if not idle and (earlier is None or earlier[0] >= step):
                self.why_not = "requests between two calls at one time"
                return
            if idle and step and any(one.idle and one.step == step for one in self.arrivals):
                self.why_not = "several requests at an idle engine"
                return
            self.arrivals.append(Arrival(number, step if idle else step - 1, idle))
        self._order_arrivals()

    def _sees(self) -> dict[int, tuple[int, bool]]:
        """Return for each call the step at whose start it sees what has come, and whether the engine is idle there."""
        sees: dict[int, tuple[int, bool]] = {}
        calls = {number: (step, schedules) for number, step, schedules in self._calls}
        for number, step, _ in self._calls:
            before, before_that = calls.get(number - 1), calls.get(number - 2)
            if before is not None and before[1]:
                sees[number] = step - int(self.config["async_scheduling"]), False
            else:  # nothing runs, or with async scheduling one step that nothing could be scheduled behind
                runs = self.config["async_scheduling"] and before and before_that and before_that[1]
                sees[number] = step, not runs
        return sees


def _in_order(sched: list[list[int]], admitted: set[int]) -> list[int]:
    return [row[0] for row in sched if row[0] in admitted]
