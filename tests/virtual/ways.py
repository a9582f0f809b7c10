"""The clusters that play in virtual time: each way to batch, to place and to refuse that services have a part in."""

from functools import cache
from pathlib import Path

from lorrery.service.settings.cluster import Settings, load

_KEYS = Path(__file__).with_name("keys.toml")

COMMON = (
    "model='Llama-2-7B'",
    "worker.gpu='A10G'",
    "worker.heartbeat_seconds=0.5",
    "worker.drain_seconds=3",
    "scheduler.worker_timeout_seconds=2",
    "scheduler.worker_wait_seconds=6",
    "scheduler.router_timeout_seconds=3",
    "scheduler.drain_seconds=3",
    "scheduler.max_req_total_len=400",
    "scheduler.max_req_input_len=300",
    "router.http=",
    "router.resume_timeout_seconds=8",
    "router.reader_timeout_seconds=3",
    "router.drain_seconds=3",
    "adapters.registry=[{id='a', rank=8, count=3}, {id='big', rank=64}]",
)
_VLLM = (
    "scheduler.policy='fcfs'",
    "scheduler.batching='vllm'",
    "scheduler.max_num_batched_tokens=64",
    "scheduler.max_num_seqs=4",
    "scheduler.memory='on_demand'",
    "scheduler.max_total_token_num=640",
    "scheduler.prefix_cache={kind='blocks', share_within_plan=true}",
    "adapters.loading='blocking'",
    "adapters.max_loras=2",
)
"""The rules of the preset `vllm-0.32`, in little memory."""
WAYS: dict[str, tuple[str, ...]] = {
    "req_queue": (),
    "req_queue strict": ("scheduler.strict=true",),
    "fcfs": ("scheduler.policy='fcfs'", "scheduler.max_num_seqs=3"),
    "fcfs loads": ("scheduler.policy='fcfs'", "adapters.max_loras=2", "adapters.load_failure_ratio=0.2"),
    "mixed": ("scheduler.policy='fcfs'", "scheduler.batching='mixed'", "scheduler.max_num_seqs=4"),
    "chunked blocks": (
        "scheduler.policy='fcfs'",
        "scheduler.batching='chunked'",
        "scheduler.max_num_batched_tokens=64",
        "scheduler.memory='paged'",
        "scheduler.max_total_token_num=640",
        "scheduler.prefix_cache={kind='blocks'}",
    ),
    "sglang preempts": (
        "scheduler.policy='fcfs_tail'",
        "scheduler.batching='sglang'",
        "scheduler.max_num_batched_tokens=64",
        "scheduler.memory='estimated'",
        "scheduler.block_size=1",
        "scheduler.max_total_token_num=450",
        "scheduler.prefix_cache={kind='radix'}",
        "scheduler.sglang={schedule_conservativeness=0.01, enable_mixed_chunk=true, retract_decode_steps=1}",
        "adapters.max_loras=3",
    ),
    "vllm": (*_VLLM, "scheduler.async_scheduling=false"),
    "vllm async": (*_VLLM, "scheduler.async_scheduling=true"),
    "static": ("scheduler.policy='fcfs'", "scheduler.batching='static'", "scheduler.max_num_seqs=3"),
    "vtc_fair": ("scheduler.policy='vtc_fair'", "scheduler.running_max_req_size=4"),
    "two choices": ("scheduler.policy='fcfs'", "scheduler.placement='power_of_two'", "scheduler.max_num_seqs=2"),
    "keys": ("scheduler.policy='fcfs'", "scheduler.max_num_seqs=2", f"router.keys='{_KEYS}'"),
}
LISTED = ("", "a-0", "a-1", "a-2", "big")
LATE = ("late-1", "late-2")
KEYS = ("few", "metered", "operator")
"""API keys of the way "keys": what each may do stands in `keys.toml`."""


@cache
def settings_of(way: str, kind: str, name: str, others: tuple[str, ...]) -> Settings:
    """Return a process's settings; `others`: whom it dials."""
    own: tuple[str, ...] = ()
    if kind == "router":
        own = (f"router.schedulers={list(others)}",)
    elif kind == "worker":
        own = (f"worker.name='{name}'", f"worker.scheduler='{others[0]}'")
    return load(None, [*COMMON, *WAYS[way], *own])
