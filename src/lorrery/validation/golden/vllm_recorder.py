"""Records what vLLM's scheduler decides: JSON Lines of cases in, records of the kind `vllm_scheduler` out.

`lorrery validate golden --against DIR` runs this file under the interpreter of a vLLM installation, which has no
Lorrery: the file imports vLLM and the standard library only. A case has `id`, `config` and `requests`; its record has
`steps`, `left_waiting` and `prefix_cache` too, and vLLM's version. vLLM's V1 scheduler runs in process, with one group
of full attention and no model: the token of a stream at a position is `token(stream, position)`. A record has

* `config`: vLLM's settings, by vLLM's names; one of the `num_gpu_blocks` is never given out.
* `requests`: in order of arrival, added just before the scheduler is called for `step`. A `prompt` has `own_tokens`,
  after `shared_tokens` of the group `shared`, or after prompt and whole output of the request that it `continues`. The
  output ends after `max_tokens`, or with its token number `eos_at`. `abort_before` and `abort_during`: the client
  leaves just before the scheduler is called for this step, or before the output of that call is processed.
* `steps`: calls of the scheduler. `k`: number, if not the next; `n`: the entry stands for so many equal steps. `sched`:
  `[id, tokens, tokens computed before]` in order, or an id alone for one token after those computed so far. `new`,
  `resumed`, `preempted`, `finished`: what happened in it. `waiting`: ids that wait after it, in order, if changed.
  `deferred`: those of them that were passed over. `loras`, `tokens`, `free`: adapters and tokens of the batch, and free
  blocks after it. `called`: false if aborts left nothing to call the scheduler for.
* `left_waiting`: ids that wait at the end, after three steps with nothing scheduled and nothing to come.
* `prefix_cache`: requests, tokens looked up and tokens found, at first admissions and after preemptions.

With `async_scheduling` the scheduler is one step ahead: the output of a step is processed after the next call.
"""

# mypy: disable-error-code="import-not-found, no-any-return"
# pyright: reportMissingImports=false
# Both: vLLM and torch are installed in that interpreter's environment only.

import json
import os
import sys
import tempfile
import zlib
from array import array
from collections import Counter, deque
from pathlib import Path
from typing import Any, TypeAlias

import torch
from vllm.config import CacheConfig, DeviceConfig, LoRAConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.version import __version__

Case: TypeAlias = dict[str, Any]
"""A line of JSON, or a part of one."""

EOS = 2
MAX_IDLE_STEPS = 3
"""Steps with nothing scheduled, no arrival and no abort to come, after which a case ends; step 0 never counts."""
PREFIX_CACHE = ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")
TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32001,
    "max_position_embeddings": 1 << 20,
    "eos_token_id": EOS,
}
"""A checkpoint's config.json: vLLM's settings need one, its scheduler reads none of it but that it is a text model."""


def token(stream: int, position: int) -> int:
    """Return the token of a stream at an absolute position of a sequence; never the end-of-sequence token."""
    return 10 + (7919 * stream + 10473 * position) % 31991


class Tokens:
    """The prompts and outputs of a case's requests."""

    def __init__(self, requests: list[Case], max_model_len: int) -> None:
        self._requests = requests
        self._max_model_len = max_model_len

    def prompt(self, number: int) -> list[int]:
        """Return a request's prompt: a shared or continued beginning, then its own tokens."""
        prompt = self._requests[number]["prompt"]
        tokens: list[int] = []
        if "continues" in prompt:
            before = prompt["continues"]
            tokens = self.prompt(before)
            tokens += [
                self.output(before, index, len(tokens)) for index in range(self._num_output(before, len(tokens)))
            ]
        elif "shared" in prompt:
            tokens = [token(3 * prompt["shared"], position) for position in range(prompt["shared_tokens"])]
        start = len(tokens)
        return tokens + [token(3 * number + 1, start + position) for position in range(prompt["own_tokens"])]

    def output(self, number: int, index: int, prompt_tokens: int) -> int:
        """Return a request's output token `index`, from 0."""
        ends = index + 1 == self._requests[number].get("eos_at")
        return EOS if ends else token(3 * number + 2, prompt_tokens + index)

    def _num_output(self, number: int, prompt_tokens: int) -> int:
        request = self._requests[number]
        limits = (request["max_tokens"], self._max_model_len - prompt_tokens)
        return min(*limits, request.get("eos_at", request["max_tokens"]))


def make_scheduler(config: Case, model: str) -> Scheduler:
    """Return vLLM's scheduler under a case's `config`."""
    blocks, size = config["num_gpu_blocks"], config["block_size"]
    cache = CacheConfig(block_size=size, enable_prefix_caching=config["enable_prefix_caching"])
    cache.num_gpu_blocks = blocks
    max_loras = config["max_loras"]
    length = config["max_model_len"]
    names = (
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
        "enable_chunked_prefill",
        "policy",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "scheduler_reserve_full_isl",
        "watermark",
        "max_num_active_seqs",
        "async_scheduling",
    )
    settings = VllmConfig(
        model_config=ModelConfig(model, skip_tokenizer_init=True, dtype="float32", max_model_len=length),
        cache_config=cache,
        scheduler_config=SchedulerConfig(is_encoder_decoder=False, **{name: config[name] for name in names}),
        device_config=DeviceConfig("cpu"),
        lora_config=None if max_loras is None else LoRAConfig(max_loras=max_loras, max_cpu_loras=64),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return (AsyncScheduler if config["async_scheduling"] else Scheduler)(
        settings,
        KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        StructuredOutputManager(settings),
        block_size=size,
        log_stats=True,
    )


class Recording:
    """One case, driven step by step."""

    def __init__(self, case: Case, model: str) -> None:
        self._config = case["config"]
        self._requests = case["requests"]
        self._tokens = Tokens(self._requests, self._config["max_model_len"])
        self._scheduler = make_scheduler(self._config, model)
        self._hasher = get_request_block_hasher(self._config["block_size"], sha256)
        self._preempted: list[int] = []
        self._blocks: dict[object, int] = {}  # by hash, in order of their first event
        self._kv_events: list[list[Any]] = []
        self._prefix_cache: Counter[str] = Counter(dict.fromkeys(PREFIX_CACHE, 0))
        self._step_number = 0
        self._scheduler.kv_event_publisher.publish = self._note_kv_events
        self._note_preemptions()

    def run(self) -> Case:
        """Return the case's `steps`, merged, its `left_waiting` and its `prefix_cache`."""
        to_come = deque(self._requests)
        points = ("abort_before", "abort_during")
        last_abort = max(request.get(point, 0) for request in self._requests for point in points)
        in_flight: deque[tuple[SchedulerOutput, set[str]]] = deque()
        steps: list[Case] = []
        step = num_idle = 0
        while num_idle < MAX_IDLE_STEPS:
            if not self._scheduler.get_num_unfinished_requests():
                if not to_come:
                    break
                step = max(step, to_come[0]["step"])
            while to_come and to_come[0]["step"] == step:
                self._add(to_come.popleft())
            entry = self._step(step, in_flight)
            num_idle = 0 if entry["sched"] or to_come or step <= last_abort else num_idle + 1
            steps.append(entry)
            step += 1
        return {
            "steps": merged(steps),
            "left_waiting": self._waiting(),
            "prefix_cache": {name: self._prefix_cache[name] for name in PREFIX_CACHE},
            "kv_events": self._kv_events,
        }

    def _step(self, step: int, in_flight: deque[tuple[SchedulerOutput, set[str]]]) -> Case:
        """Run one step and return its entry, unmerged: `sched` has triples."""
        scheduler = self._scheduler
        self._step_number = step
        self._preempted.clear()
        finished = self._abort("abort_before", step)
        called = scheduler.get_num_unfinished_requests() > 0
        sched: list[list[int]] = []
        new: list[int] = []
        resumed: list[int] = []
        if called:
            waited = {int(request.request_id): request.num_preemptions > 0 for request in scheduler.waiting}
            output = scheduler.schedule()
            self._count_prefix_cache()
            for name, num_tokens in output.num_scheduled_tokens.items():
                number = int(name)
                sched.append([number, num_tokens, scheduler.requests[name].num_computed_tokens - num_tokens])
                if number in waited:
                    (resumed if waited[number] else new).append(number)
            # A request gives a token when nothing of its known tokens is left to compute.
            giving = {name for name in output.num_scheduled_tokens if self._is_complete(name)}
            in_flight.append((output, giving))
            finished += self._abort("abort_during", step)
            while len(in_flight) > self._config["async_scheduling"]:
                finished += self._deliver(*in_flight.popleft())
            if not scheduler.get_num_unfinished_requests():
                while in_flight:
                    finished += self._deliver(*in_flight.popleft())
        return {
            "k": step,
            "sched": sched,
            "new": new,
            "resumed": resumed,
            "preempted": self._preempted[:],
            "finished": finished,
            "waiting": self._waiting(),
            "deferred": sorted(int(request.request_id) for request in scheduler.deferred_waiting),
            "loras": sorted(
                {self._requests[number]["lora"] for number, *_ in sched if "lora" in self._requests[number]}
            ),
            "tokens": sum(num_tokens for _, num_tokens, _ in sched),
            "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "called": called,
        }

    def _add(self, request: Case) -> None:
        number = request["id"]
        parameters = SamplingParams(max_tokens=request["max_tokens"], temperature=0.0)
        parameters.update_from_generation_config({}, EOS)
        lora = request.get("lora")
        self._scheduler.add_request(
            Request(
                str(number),
                self._tokens.prompt(number),
                parameters,
                None,
                arrival_time=float(number),
                lora_request=None if lora is None else LoRARequest(f"adapter-{lora}", lora, "nowhere"),
                priority=request.get("priority", 0),
                cache_salt=request.get("salt"),
                block_hasher=self._hasher,
            )
        )

    def _note_kv_events(self, batch: KVEventBatch) -> None:
        self._kv_events.append([self._step_number, [self._describe(event) for event in batch.events]])

    def _describe(self, event: BlockRemoved | BlockStored) -> list[Any]:
        """Return a KV event with numbers for its hashes: of removed blocks these alone.

        Of stored ones, the numbers, that of the parent, the checksum of the tokens, the adapter and the first block's
        further keys.
        """
        if isinstance(event, BlockRemoved):
            return [self._number(block_hash) for block_hash in event.block_hashes]
        assert isinstance(event, BlockStored), event
        numbers = [self._number(block_hash) for block_hash in event.block_hashes]
        parent = None if event.parent_block_hash is None else self._number(event.parent_block_hash)
        tokens = zlib.crc32(array("I", event.token_ids).tobytes())
        (first, *others), names = event.extra_keys, () if event.lora_name is None else (event.lora_name,)
        assert all((keys or ()) == names for keys in others)
        return [numbers, parent, tokens, event.lora_id, first]

    def _number(self, block_hash: object) -> int:
        return self._blocks.setdefault(block_hash, len(self._blocks))

    def _abort(self, point: str, step: int) -> list[list[Any]]:
        """Abort the requests whose client leaves at this point; return what that finished."""
        finished = []
        for request in self._requests:
            name = str(request["id"])
            if request.get(point) == step and name in self._scheduler.requests:
                self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
                finished.append([request["id"], "abort"])
        return finished

    def _deliver(self, output: SchedulerOutput, giving: set[str]) -> list[list[Any]]:
        """Give the scheduler the output of a step; return what that finished."""
        names = list(output.num_scheduled_tokens)
        sampled = [self._sample(name) if name in giving else [] for name in names]
        positions = {name: index for index, name in enumerate(names)}
        outputs = self._scheduler.update_from_output(output, ModelRunnerOutput(names, positions, sampled))
        return [
            [int(one.request_id), str(one.finish_reason)]
            for client in outputs.values()
            for one in client.outputs
            if one.finish_reason is not None
        ]

    def _sample(self, name: str) -> list[int]:
        request = self._scheduler.requests.get(name)
        if request is None:
            return []  # aborted meanwhile
        return [self._tokens.output(int(name), request.num_output_tokens, request.num_prompt_tokens)]

    def _is_complete(self, name: str) -> bool:
        request = self._scheduler.requests[name]
        return request.num_computed_tokens >= request.num_tokens

    def _waiting(self) -> list[int]:
        return [int(request.request_id) for request in self._scheduler.waiting]

    def _count_prefix_cache(self) -> None:
        stats = self._scheduler.kv_cache_manager.make_prefix_cache_stats()
        for name in PREFIX_CACHE:
            self._prefix_cache[name] += getattr(stats, name)

    def _note_preemptions(self) -> None:
        """Note preempted requests in their order, which the scheduler's own output does not have."""
        preempt = self._scheduler._preempt_request  # noqa: SLF001  the only place that has the order

        def noting(request: Request, *args: object, **options: object) -> None:
            self._preempted.append(int(request.request_id))
            preempt(request, *args, **options)

        self._scheduler._preempt_request = noting  # noqa: SLF001  as above


def merged(steps: list[Case]) -> list[Case]:
    """Return entries as records have them: equal steps in a row are one, values that follow from others absent."""
    entries: list[Case] = []
    computed: dict[int, int] = {}
    waiting: list[int] = []
    last: Case = {"k": -1}
    for step in steps:
        events = any(step[name] for name in ("new", "resumed", "preempted", "finished")) or not step["called"]
        if not events and _repeats(step, last):
            entries[-1]["n"] = entries[-1].get("n", 1) + 1
            entries[-1]["free"] = step["free"]
        else:
            entry: Case = {} if step["k"] == last["k"] + 1 else {"k": step["k"]}
            entry["sched"] = [
                number if (tokens, before) == (1, computed.get(number)) else [number, tokens, before]
                for number, tokens, before in step["sched"]
            ]
            entry |= {name: step[name] for name in ("new", "resumed", "preempted", "finished") if step[name]}
            if step["waiting"] != waiting:
                entry["waiting"] = step["waiting"]
            entry |= {name: step[name] for name in ("deferred", "loras") if step[name]}
            entry |= {"tokens": step["tokens"], "free": step["free"]}
            if not step["called"]:
                entry["called"] = False
            entries.append(entry)
        computed |= {number: before + tokens for number, tokens, before in step["sched"]}
        waiting = step["waiting"]
        last = {**step, "events": events}
    return entries


def _repeats(step: Case, last: Case) -> bool:
    """Return whether a step without events does what the last one did, with its tokens computed."""
    return (
        not last.get("events", True)
        and step["k"] == last["k"] + 1
        and all(step[name] == last[name] for name in ("waiting", "deferred", "loras"))
        and step["sched"] == [[number, tokens, before + tokens] for number, tokens, before in last["sched"]]
    )


def main() -> None:
    """Record the cases of standard input on standard output, one a line; what vLLM prints goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(TINY_MODEL))
        for line in sys.stdin:
            case = json.loads(line)
            head = {"id": case["id"], "kind": "vllm_scheduler", "engine": "vllm", "version": __version__}
            record = {**head, "config": case["config"], "requests": case["requests"], **Recording(case, model).run()}
            print(json.dumps(record, separators=(",", ":")), file=out, flush=True)


if __name__ == "__main__":
    main()
