"""The kinds of golden records: the short ones, and all in one tuple. A record belongs to at most one of them."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from lorrery.loadgen.workload.slora import draw, slora_summary
from lorrery.router.sampling import read_sampling
from lorrery.scheduler.core.prefix_cache import StaticTrie
from lorrery.scheduler.core.refusals import Limits, check_lengths
from lorrery.service.errors import InvalidRequest
from lorrery.validation.golden.kind import Kind, Mismatch, Record, compare, compare_close
from lorrery.validation.golden.llmmock_scheduler import LlmMockScheduler
from lorrery.validation.golden.router_loop import QUEUES, SloraRouterLoop
from lorrery.validation.golden.sglang_scheduler import SglangScheduler
from lorrery.validation.golden.slora_queues import SLORA_QUEUES
from lorrery.validation.golden.vllm_scheduler import VllmScheduler
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.batch import Batch, PrefillChunk
from lorrery.worker.device.constant import LlmMock
from lorrery.worker.device.output import LlmMockLength


class TraceGenerateRequests:
    """One drawn workload."""

    name = "trace_generate_requests"

    def detect(self, record: Record) -> bool:
        """Whether the record has the parameters of a workload and its arrays."""
        return record.keys() >= {"params", "n", "adapter_index", "input_len", "output_len", "req_time"}

    def replay(self, record: Record) -> list[Mismatch]:
        """Draw the workload and compare every number."""
        params = dict(record["params"])
        for name in ("input_range", "output_range"):
            low, high = params[name]
            params[name] = (low, high)
        draws = draw(**params)
        found = compare("n", record["n"], len(draws.req_time))
        for name in ("adapter_index", "input_len", "output_len", "req_time"):
            found += compare(name, record[name], getattr(draws, name).tolist())
        return found


class SamplingParameters:
    """Parameters from a client, and the result: a message, or the effective values."""

    name = "sampling_params"

    def detect(self, record: Record) -> bool:
        """Whether the record has parameters, and an error or effective values."""
        return record.keys() >= {"input", "error"} and (record["error"] is not None or "effective" in record)

    def replay(self, record: Record) -> list[Mismatch]:
        """Read the parameters as the router does."""
        try:
            params = read_sampling(record["input"])
        except InvalidRequest as error:
            return compare("error", record["error"], str(error))
        found = compare("error", record["error"], None)
        effective = params.effective()
        for name, expected in record.get("effective", {}).items():
            found += compare(f"effective {name}", expected, effective.get(name))
        return found


class LlmMockTrie:
    """llm-mock's pruned prompt trie, against `scheduler.core.prefix_cache.StaticTrie`.

    Builds the cache from the record's prompts, then runs the record's queries. Where llm-mock's own rule leaves the
    last places to chance (`tie_ambiguous`), only what every correct trie has in common is compared: the number of
    prompts through each kept token, not the tokens themselves.
    """

    name = "llmmock_trie"

    def detect(self, record: Record) -> bool:
        """Whether the record has prompts and the edges kept of them."""
        return record.keys() >= {"prompts", "max_edges", "kept_edges", "queries", "tie_ambiguous"}

    def replay(self, record: Record) -> list[Mismatch]:
        """Build, prune and query."""
        prompts = record["prompts"]
        trie = StaticTrie.build(prompts, record["max_edges"])
        found = compare("edges_before_prune", record["edges_before_prune"], StaticTrie.build(prompts).num_tokens)
        if record["tie_ambiguous"]:
            expected_counts = _counts_of(record["kept_edges"], prompts)
            return found + compare("counts of kept_edges", expected_counts, _counts_of(trie.paths(), prompts))
        found += compare("kept_edges", record["kept_edges"], trie.paths())
        for index, (token_ids, first_missing) in enumerate(record["queries"]):
            found += compare(f"query {index} {token_ids}", first_missing, trie.match(token_ids, None))
        return found


def _counts_of(paths: Iterable[Sequence[int]], prompts: Iterable[Sequence[int]]) -> list[int]:
    """Count the prompts through each path, highest count first."""
    through = Counter(tuple(prompt[:depth]) for prompt in prompts for depth in range(1, len(prompt) + 1))
    return sorted((through[tuple(path)] for path in paths), reverse=True)


SUMMARY_TOLERANCE = 1e-9


class RunExpMetrics:
    """S-LoRA's summary of a benchmark run, against `loadgen.workload.slora_summary`: times, and the figures of them.

    Compared to 1e-9 relative: the figures are means of some dozen doubles, whose last bits depend on the order of sums.
    """

    name = "run_exp_metrics"

    def detect(self, record: Record) -> bool:
        """Whether the record has per-request times and their summary."""
        return record.keys() >= {"per_request", "benchmark_time", "req_rate", "result"}

    def replay(self, record: Record) -> list[Mismatch]:
        """Summarise the run and compare every figure in the record."""
        summary = slora_summary(
            [[math.nan if one is None else one for one in row] for row in record["per_request"]],
            record["benchmark_time"],
            req_rate=record["req_rate"],
            warmup_time=record["warmup_time"],
            warmup_num=record["warmup_num"],
        )
        found: list[Mismatch] = []
        for name, expected in record["result"].items():
            got = getattr(summary, name)
            if expected is None or got is None:
                found += compare(name, expected, got)
            else:
                found += compare_close(name, expected, got, SUMMARY_TOLERANCE)
        return found


STEP_TIME_TOLERANCE = 1e-6


class LlmMockStepTime:
    """llm-mock's step-time formula, against `worker.device.constant`: one batch, and the duration of its step.

    Ours counts integer picoseconds and rounds its cost coefficient once, by 6.4e-8 of it.
    """

    name = "llmmock_step_time"

    def detect(self, record: Record) -> bool:
        """Whether the record has a batch and its time."""
        return record.keys() >= {"tasks", "step_time_s"}

    def replay(self, record: Record) -> list[Mismatch]:
        """Time the batch; if it has decodes only, also as the first step of a segment."""
        prefills: list[PrefillChunk] = []
        decode_kv_tokens: list[int] = []
        for length, first_new in record["tasks"]:
            # The original has no decodes: a decode is a sequence with one new token.
            if length - first_new == 1:
                decode_kv_tokens.append(first_new)
            else:
                prefills.append(PrefillChunk(length - first_new, first_new, samples=True))
        num_decodes, kv_tokens, max_kv_tokens = (
            len(decode_kv_tokens),
            sum(decode_kv_tokens),
            max(decode_kv_tokens, default=0),
        )
        model = LlmMock()
        times = {"step_time_s": model.step_ps(Batch(tuple(prefills), num_decodes, kv_tokens, max_kv_tokens))}
        if not prefills:
            segment = model.decode_segment(num_decodes, kv_tokens, max_kv_tokens)
            if segment is not None:
                times["step_time_s as a segment"] = segment.step_ps(0)
        found: list[Mismatch] = []
        for where, step_ps in times.items():
            found += compare_close(where, record["step_time_s"], step_ps / PS_PER_SECOND, STEP_TIME_TOLERANCE)
        return found


class LlmMockDecodeLength:
    """Lengths of a prompt and its answer."""

    name = "llmmock_decode_length"

    def detect(self, record: Record) -> bool:
        """Whether the record has the two lengths and at most a name in addition."""
        return record.keys() - {"id"} == {"prompt_len", "decode_length"}

    def replay(self, record: Record) -> list[Mismatch]:
        """Draw from the length model and compare."""
        end = LlmMockLength().draw(seed=0, prompt_tokens=record["prompt_len"])
        return compare("decode_length", record["decode_length"], end.output_tokens)


class LengthLimits:
    """A request accepted or refused by its lengths, with S-LoRA's message."""

    name = "length_limits"

    def detect(self, record: Record) -> bool:
        """Whether the record carries limits and lengths."""
        return record.keys() >= {"max_req_input_len", "max_req_total_len", "prompt_tokens", "max_new_tokens", "error"}

    def replay(self, record: Record) -> list[Mismatch]:
        """Check the lengths and compare the message."""
        limits = Limits(record["max_req_input_len"], record["max_req_total_len"], record["max_total_token_num"])
        error = check_lengths(record["prompt_tokens"], record["max_new_tokens"], limits)
        return compare("error", record["error"], error)


KINDS: tuple[Kind, ...] = (
    *SLORA_QUEUES,
    *(SloraRouterLoop(policy) for policy in QUEUES),
    SamplingParameters(),
    LengthLimits(),
    TraceGenerateRequests(),
    RunExpMetrics(),
    LlmMockTrie(),
    LlmMockStepTime(),
    LlmMockDecodeLength(),
    LlmMockScheduler(),
    SglangScheduler(),
    VllmScheduler(),
)
