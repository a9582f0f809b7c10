"""Journals of live clusters in virtual time: random runs in many ways to batch, and their lines."""

import json
import random
from pathlib import Path
from typing import Any

from lorrery.service.settings.cluster import load
from lorrery.simulator.replay.journal import read_journal
from lorrery.simulator.replay.parts import Replayed, parts_of
from lorrery.simulator.replay.replay import replay
from lorrery.tokenizer.file import SHIPPED
from lorrery.vocabulary.adapters import AdapterFigures
from tests.simulator.virtual_cluster import play
from tests.virtual.clock import virtual_time

Lines = list[dict[str, Any]]

COMMON = (
    "model='Llama-2-7B'",
    "worker.gpu='A10G'",
    "adapters.registry=[{id='a', rank=8, count=3}, {id='big', rank=64}]",
    "scheduler.max_req_total_len=400",
    "scheduler.max_req_input_len=300",
)
WAYS = {
    "req_queue slora_loop": (),
    "req_queue slora_loop strict": ("scheduler.strict=true",),
    "req_queue prefetch": ("scheduler.prefetch=true", "adapters.max_loras=2"),
    "fcfs continuous loads": ("scheduler.policy='fcfs'", "adapters.max_loras=2", "adapters.max_cpu_loras=2"),
    "fcfs blocking": ("scheduler.policy='fcfs'", "adapters.loading='blocking'", "adapters.max_loras=2"),
    "fcfs failing loads": ("scheduler.policy='fcfs'", "adapters.load_failure_ratio=0.6", "adapters.max_loras=2"),
    "mixed": ("scheduler.policy='fcfs'", "scheduler.batching='mixed'", "scheduler.max_num_seqs=5"),
    "chunked paged": (
        "scheduler.policy='fcfs'",
        "scheduler.batching='chunked'",
        "scheduler.max_num_batched_tokens=64",
        "scheduler.memory='paged'",
        "scheduler.max_total_token_num=800",
    ),
    "chunked blocks": (
        "scheduler.policy='fcfs'",
        "scheduler.batching='chunked'",
        "scheduler.max_num_batched_tokens=64",
        "scheduler.memory='paged'",
        "scheduler.max_total_token_num=800",
        "scheduler.prefix_cache={kind='blocks', share_within_plan=true}",
    ),
    "static": ("scheduler.policy='fcfs'", "scheduler.batching='static'", "scheduler.max_num_seqs=4"),
    "llm_mock": (
        "scheduler.policy='fcfs'",
        "scheduler.batching='llm_mock'",
        "scheduler.memory='none'",
        "scheduler.max_num_seqs=4",
        "worker.step_time='llm-mock'",
        "worker.output.length_model='llm-mock'",
    ),
    "vllm": ("engine='vllm'", "adapters.max_loras=2", "scheduler.max_total_token_num=900"),
    "priority": ("scheduler.policy='priority'", "scheduler.max_num_seqs=3", "adapters.max_loras=2"),
    "sglang": ("engine='sglang'", "scheduler.max_num_batched_tokens=64", "scheduler.max_total_token_num=900"),
    "prefill_first": (
        "engine='sglang-0.5'",
        "scheduler.policy='fcfs'",
        "scheduler.batching='prefill_first'",
        "scheduler.memory='paged'",
        "scheduler.prefix_cache.kind='blocks'",
        "scheduler.max_num_batched_tokens=64",
        "scheduler.max_total_token_num=900",
    ),
    "sglang preempts": (
        "engine='sglang'",
        "scheduler.max_total_token_num=500",
        "scheduler.sglang={schedule_conservativeness=0.01, enable_mixed_chunk=true, retract_decode_steps=1}",
        "adapters.max_loras=3",
    ),
    "trtllm": ("engine='trtllm'", "scheduler.max_num_batched_tokens=64", "scheduler.max_total_token_num=900"),
    "vtc_fair": ("scheduler.policy='vtc_fair'", "scheduler.running_max_req_size=4"),
    "abort": ("scheduler.policy='abort'", "scheduler.first_token_slo_seconds=0.8", "scheduler.running_max_req_size=3"),
    "cluster": ("scheduler.policy='cluster'", "scheduler.batch_num_adapters=2"),
    "peft": ("scheduler.policy='peft'",),
    "pets": ("scheduler.policy='pets'", "scheduler.running_max_req_size=6"),
    "logits": ("scheduler.policy='fcfs'", "worker.output.mode='logits'", "worker.output.length_median=20"),
    "spelt": (
        "scheduler.policy='fcfs'",
        "scheduler.prefix_cache={kind='blocks'}",
        f"router.tokenizer='{SHIPPED}'",
        "worker.output.mode='logits'",
    ),
    "echo": ("scheduler.policy='fcfs'", "worker.output.mode='echo'", "scheduler.placement='power_of_two'"),
}


def run(way: str, seed: int, folder: Path, num_requests: int = 40) -> Path:
    """Let a random scenario happen; return its journal."""
    return run_settings(WAYS[way], f"{way} {seed}", folder, num_requests)


def run_settings(ways: tuple[str, ...], seed: str, folder: Path, num_requests: int = 40) -> Path:
    """As `run`, with other settings."""
    return run_live(ways, seed, folder, num_requests)[0]


def run_live(
    ways: tuple[str, ...], seed: str, folder: Path, num_requests: int = 40, *, cuts: bool = False
) -> tuple[Path, dict[str, AdapterFigures]]:
    """As `run`, with other settings; return the journal, and the figures of the adapters once all workers are gone.

    With `cuts`, routers end some outputs at stop strings, and some requests skip the prefix cache.
    """
    settings = load(None, [*COMMON, *ways, f"scheduler.journal='{folder / 'journal.jsonl'}'"])
    rng = random.Random(seed)
    path = settings.scheduler.journal
    assert path is not None
    with virtual_time(rng) as loop:
        cluster = loop.run_until_complete(play(settings, rng, num_requests=num_requests, cuts=cuts))
    return path, cluster.metrics.tally.read([], 0)


def replayed(path: Path) -> Replayed:
    journal = read_journal(path)
    return replay(journal, parts_of(journal, path))


def read_lines(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(folder: Path, lines: Lines) -> Path:
    path = folder / "tampered.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
