"""The cases of the fuzz corpus, drawn by number: a cluster, a workload, and what goes wrong.

A case is a function of its number: cluster (policy, way to batch, memory, cache, adapters, step-time model, placement,
workers, schedulers), workload (open or closed loop) and what goes wrong (cancels, deadlines, lost and slow workers,
loads that fail).
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.scheduler.core.acceptance import ClusterRules
from lorrery.scheduler.core.build import why_excluded
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.placements.worker_table import FEW
from lorrery.scheduler.core.policies import BATCHINGS, MEMORIES, QUEUES, batching_name
from lorrery.scheduler.core.queues.early_drop import PREFILL_ALLOWANCE_PS
from lorrery.scheduler.core.queues.pets import DeviceProfile
from lorrery.scheduler.core.replica_settings import ReplicaSettings, SglangRules
from lorrery.scheduler.core.sequence import Adapter
from lorrery.service.faults.kinds import (
    FREEZE_WORKER,
    LOAD_FAILURE,
    LOAD_KINDS,
    SLOW_LOAD,
    SLOW_WORKER,
    WORKER_LOSS,
    Fault,
)
from lorrery.vocabulary.units import NEVER
from lorrery.worker.device.profile import ProfileRow, read_profile
from lorrery.worker.device.steps import read_steps
from lorrery.worker.device.steptime import STEP_TIME_MODELS, StepTimeModel
from tests.worker.device.known import deployment

PS = 10**12
_OF_ENGINE = {"sglang": "estimated", "vllm": "on_demand"}
IN_PIECES = ("chunked", "prefill_first", "sglang", "vllm")
OF_SGLANG = ("fcfs_tail", "lpm")
LAST_PS = 500 * PS
"""No case lasts so long."""
MANY_SHARE = 0.05
"""Of cases with so many workers that placements read columns (`core.placements.worker_table`)."""
ADAPTERS = {f"a{n}": Adapter(f"a{n}", 4 << n) for n in range(4)}
MODEL = "Llama-2-7B"

_PROFILE = """phase,batch_size,kv_len,prefill_chunk,prefill_kv_prefix,step_ms
decode,1,0,,,9
decode,1,800,,,10
decode,8,0,,,11
decode,8,800,,,17
prefill,1,,16,0,12
prefill,1,,400,0,55
prefill,1,,16,200,13
prefill,1,,400,200,60
"""
_STEPS = """step_ms,prefill_tokens,decode_seqs,decode_kv_tokens,prefill_attn_pairs
9.5,0,1,100,0
11,0,4,900,0
12.5,0,8,3000,0
15,40,0,0,800
35,200,0,0,30000
60,400,0,0,80000
"""


@cache
def step_time_model(name: str) -> StepTimeModel:
    """Build a model on an A10G; with a `launch` engine its first steps are bound by the CPU, and have a kink."""
    kind, _, engine = name.partition(" ")
    more: dict[str, Any] = {}
    if kind == "table":
        rows: list[ProfileRow] = read_profile(_PROFILE.splitlines())
        more["profile"] = rows
    elif kind == "fitted":
        more["steps"] = read_steps(_STEPS.splitlines())
    made = deployment("A10G", MODEL, engine="present-day", **more)
    if engine == "launch":
        made = replace(made, engine=replace(made.engine, launch_ms=0.9))
    return STEP_TIME_MODELS[kind](made)


MODELS = (*STEP_TIME_MODELS, "roofline launch")


@dataclass(frozen=True)
class Case:
    """One case of the corpus."""

    number: int
    replica: ReplicaSettings
    model: str
    placement: str
    num_workers: int
    num_shards: int
    loads: bool
    trie: bool
    workload: list[WorkloadRequest]
    num_clients: int | None
    cancels: list[tuple[int, int]]
    timeout_ps: int | None
    faults: list[Fault]
    rules: ClusterRules

    @property
    def title(self) -> str:
        """What it is about."""
        own = self.replica
        words = [own.policy, batching_name(own), own.memory, self.model, self.placement]
        words += ["strict"] * own.strict + [own.prefix_cache] * (own.prefix_cache != "none") + ["trie"] * self.trie
        words += ["prefetch"] * own.prefetch + ["loads"] * self.loads + [fault.kind for fault in self.faults]
        words += ["deadlines"] * self.rules.deadline_admission
        return f"case {self.number}: {' '.join(words)}"


def draw_case(number: int) -> Case:
    """Draw a case; numbers that follow each other walk through policies, ways to batch and models evenly."""
    rng = np.random.default_rng([2026, number])

    def one_of(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    policies, batchings = sorted(QUEUES), sorted(BATCHINGS)
    while True:
        policy, batching = policies[number % len(policies)], batchings[number // len(policies) % len(batchings)]
        if policy != "fcfs" and batching == "llm_mock":
            policy = "fcfs"
        if policy in OF_SGLANG or batching == "sglang":  # these go together only
            policy, batching = policy if policy in OF_SGLANG else one_of(*OF_SGLANG), "sglang"
        if policy == "pets" and batching in IN_PIECES:
            batching = "mixed"
        strict = policy != "fcfs" and batching == "slora_loop" and rng.random() < 0.3
        settings = dict.fromkeys(name for row in QUEUES.values() for name in row.own_settings) | {
            "policy": policy,
            "batching": batching,
            "strict": strict,
            "memory": "peak" if strict else _OF_ENGINE.get(batching) or one_of(*MEMORIES),
            "prefetch": bool(rng.random() < 0.2),
            "batch_num_adapters": 2 if policy == "cluster" else None,
            "fair_weights": {"a1": 1.5} if policy == "vtc_fair" else {},
        }
        if why_excluded(settings) is None:
            break
    cached = one_of("none", "blocks", "trie") if settings["memory"] != "none" else one_of("none", "trie")
    if batching == "sglang":
        cached = "none" if cached == "none" else "radix"
    loads = bool(rng.random() < 0.5)
    num_shards = int(one_of(1, 1, 1, 2))
    num_workers = num_shards * int(one_of(1, 1, 2, 3))
    if (own := np.random.default_rng([2027, number])).random() < MANY_SHARE:
        num_shards, num_workers = 1, int(own.integers(FEW + 1, FEW + 6))
    model = MODELS[number % len(MODELS)]
    seqs = int(rng.integers(2, 9))
    paged = settings["memory"] in ("paged", "no_evict", "estimated", "on_demand")
    # Strict S-LoRA takes in what never fits, and then waits for good; with 450 everything fits.
    pool = int(rng.integers(300, 500) if paged else rng.integers(450 if strict else 330, 900))
    replica = ReplicaSettings(
        policy=policy,
        batching=batching,
        strict=strict,
        memory=str(settings["memory"]),
        prefetch=bool(settings["prefetch"]),
        max_total_token_num=pool,
        max_req_total_len=240,
        block_size=int(one_of(4, 16)) if batching != "sglang" else int(one_of(1, 4)),
        watermark=float(one_of(0.0, 0.05)),
        prefix_cache=cached if cached in ("blocks", "radix") else "none",
        share_within_plan=bool(rng.random() < 0.5),
        running_max_req_size=seqs,
        batch_max_tokens=int(rng.integers(240, 500)),
        max_num_seqs=seqs,
        max_num_batched_tokens=int(rng.integers(seqs + 8, 80))
        if batching in IN_PIECES
        else int(rng.integers(250, 500)),
        fair_weights={"a1": Fraction(3, 2)} if policy == "vtc_fair" else {},
        batch_num_adapters=2 if policy == "cluster" else 1,
        first_token_slo_ps=PREFILL_ALLOWANCE_PS + int(rng.integers(1, 20)) * PS // 10,
        profile=_profile() if policy == "pets" else None,
        max_loras=(int(rng.integers(1, 4)) if loads and not strict else None, None)[number % 4 == 3],
        max_overtakes=(None, 2, 0)[number % 3],
        look_ahead=(16, 3, 0)[number // 3 % 3],
        max_cpu_loras=int(rng.integers(1, 4)) if loads else None,
        max_concurrent_loads=int(rng.integers(1, 3)),
        blocking_loads=bool(rng.random() < 0.3),
        min_computed_tokens=0 if model == "llm-mock" else 1,
        async_scheduling=bool(number & 1),
        long_prefill_token_threshold=(0, 16)[number // 2 & 1],
        max_num_active_seqs=(None, seqs - 1)[number // 4 & 1],
        scheduler_reserve_full_isl=bool(number // 8 & 1),
    )
    may_pin = replica.max_loras is None or replica.max_loras > 1  # with one place only, no other would have any
    replica = replace(replica, sglang=_sglang_rules(number, may_pin=may_pin))
    return _with_load(number, rng, replica, model, num_workers, num_shards, loads, cached == "trie")


def _sglang_rules(number: int, *, may_pin: bool) -> SglangRules:
    rng = np.random.default_rng([2028, number])
    return SglangRules(
        max_prefill_tokens=int(rng.choice([100, 16384])),
        chunked=bool(rng.random() < 0.7),
        enable_mixed_chunk=bool(rng.random() < 0.4),
        schedule_conservativeness=float(rng.choice([0.05, 0.3, 1.0])),
        new_token_ratio_decay_steps=int(rng.choice([10, 600])),
        retract_decode_steps=int(rng.choice([1, 20])),
        prefill_max_requests=2 if rng.random() < 0.2 else None,
        prefill_decode_interval=int(rng.choice([0, 0, 0, 1, 8])),
        lora_drain_wait_threshold=int(rng.choice([0, 0, PS // 20, PS])),
        pinned_loras=frozenset({"a2"}) if rng.random() < 0.2 and may_pin else frozenset(),
        overlap=bool(rng.random() < 0.6),
    )


@cache
def _profile() -> DeviceProfile:
    made = deployment("A10G", MODEL, engine="present-day")
    return DeviceProfile(step_time_model("roofline"), made.gpu, made.model, 1)


def _with_load(
    number: int,
    rng: np.random.Generator,
    replica: ReplicaSettings,
    model: str,
    num_workers: int,
    num_shards: int,
    loads: bool,
    trie: bool,
) -> Case:
    num_requests = int(rng.integers(4, 22)) * (3 if num_workers > FEW else 1)
    gaps = rng.choice([0.0, 0.0, 0.004, 0.03, 0.25, 1.5], num_requests)
    names = [None, *ADAPTERS]
    workload = []
    for index, at in enumerate(np.cumsum(gaps).tolist()):
        prompt = int(rng.integers(1, 120))
        # Prompts of one hash id begin alike.
        hash_ids = (int(rng.integers(0, 3)),) if rng.random() < 0.8 else None
        output = int(rng.integers(1, 50)) if rng.random() < 0.8 else 1
        adapter = names[int(rng.integers(len(names)))]
        workload.append(WorkloadRequest(index, at, prompt, output, adapter, "", hash_ids))
    end = float(gaps.sum()) + 1.0
    # In strict peft a cancelled request at the head stays there, and all that use other adapters wait for good.
    patient = replica.strict and replica.policy == "peft"
    cancels = (
        []
        if patient
        else [(int(rng.random() * end * PS), int(rng.integers(num_requests))) for _ in range(int(rng.integers(0, 4)))]
    )
    faults: list[Fault] = []
    if rng.random() < 0.25:
        until = int(rng.random() * 2 * end * PS)
        at = min(int(rng.random() * end * PS), until)
        worker = f"worker-{int(rng.integers(num_workers))}"
        kind = (WORKER_LOSS, SLOW_WORKER, FREEZE_WORKER, LOAD_FAILURE, SLOW_LOAD)[int(rng.integers(5))]
        factor = (Fraction(2), Fraction(3, 2), Fraction(1, 3))[int(rng.integers(3))]
        more = {"first": 2} if number % 2 else {"share": Fraction(2, 3)}
        on = "" if kind in LOAD_KINDS and number % 3 else worker
        faults.append(Fault(kind, kind, at, until, on, factor=factor, **(more if kind in LOAD_KINDS else {})))
    return Case(
        number=number,
        replica=replica,
        model=model,
        placement=sorted(PLACEMENTS)[int(rng.integers(len(PLACEMENTS)))],
        num_workers=num_workers,
        num_shards=num_shards,
        loads=loads,
        trie=trie,
        workload=workload,
        num_clients=int(rng.integers(1, 6)) if rng.random() < 0.2 else None,
        cancels=cancels,
        timeout_ps=int(rng.integers(1, 60)) * PS // 10 if rng.random() < 0.3 and not patient else None,
        faults=faults,
        rules=_rules(number, patient=patient),
    )


def _rules(number: int, *, patient: bool) -> ClusterRules:
    has_deadlines = number % 3 == 1 and not patient
    return ClusterRules(
        worker_wait_seconds=1,
        max_waiting_requests_per_tenant=3 if number % 10 == 7 else NEVER,
        deadline_admission=has_deadlines,
        start_within_seconds=(None, 0.1, 0.6)[number // 3 % 3] if has_deadlines else None,
    )
