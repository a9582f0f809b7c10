"""Finds the fewest replicas that serve a workload within a service level.

Each trial is a whole simulated run, so few are made. The first guess is the throughput of one replica kept busy; it is
simulated too, and cheap, with the requests of one replica instead of all. From there the search goes in steps of 1, 2,
4 ... (with many replicas: from a sixteenth of the guess on) until one number meets the level and one misses it, then by
bisection until the two are neighbours. It assumes that any number above one that meets the level meets it too, and
stops where every request fails, the first of an idle cluster included.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from lorrery.loadgen.options import LoadOptions
from lorrery.scheduler.core.adapters.loads import AdapterCosts, Tier
from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.slora_loop import MAX_WAIT_STEPS
from lorrery.scheduler.core.policies import batch_limits, batching_name
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter
from lorrery.service.settings.cluster import Settings, changed
from lorrery.service.settings.sections import LONGEST_SECONDS
from lorrery.simulator.options import SimulationOptions
from lorrery.simulator.run import SimulatedRun
from lorrery.vocabulary.units import LAST_SECONDS, NEVER, PS_PER_SECOND
from lorrery.worker.device.capacity import Loads, Room, Workload
from lorrery.worker.device.catalogue.architecture import Model
from lorrery.worker.device.closed_loop import PromptTurns, Turns

__all__ = [
    "TURNS",
    "Trial",
    "Watch",
    "adapter_costs",
    "adapter_loads",
    "busy_rate",
    "fewest",
    "room_of",
    "search",
    "try_replicas",
    "turns_of",
]

BUSY_STREAMS = 1_000
"""Streams that keep a replica busy: more would only make the run longer."""
BUSY_ROUNDS, BUSY_REQUESTS = 4, 200
"""Requests of such a run: per stream, and in total at least."""
LETS_ALL_WAIT: dict[str, object] = {
    "scheduler.max_waiting_requests_per_tenant": None,
    "scheduler.deadline_admission": False,
    "scheduler.start_within_seconds": None,
    "scheduler.first_token_slo_seconds": LONGEST_SECONDS,
}
"""For a run that begins with all its streams at once: no request may be refused or dropped."""

OF_LOAD = {"DEADLINE_EXCEEDED", "UNAVAILABLE"}
"""Statuses with which even the first request of an idle cluster may fail because of those that follow."""

Watch = Callable[[int], None]
"""Called with the number of replicas of each trial before it runs."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulated run, and whether it met the level.

    Attributes:
        num_replicas: that served it.
        ttft_p99: seconds from arrival to first token, waiting included; None if no request completed.
        tpot_p99: seconds per further token, likewise.
        num_failed: requests that were refused, dropped or timed out.
        met: whether it met the level; a failed request counts as a miss.
        failure: how most of them failed, and the first message; empty if none did.
        in_vain: whether every request failed, and would on any number of replicas.
    """

    num_replicas: int
    ttft_p99: float | None
    tpot_p99: float | None
    num_failed: int
    met: bool
    failure: str = ""
    in_vain: bool = False


def busy_rate(settings: Settings, options: LoadOptions, streams: int) -> tuple[float, float]:
    """Simulate a replica that is never idle; return its requests per second and their TPOT p99 in seconds.

    Limits on the number of waiting requests and on waiting time are lifted for this run.

    Args:
        settings: of the cluster.
        options: the workload; its rate and number of requests are ignored.
        streams: most concurrent requests; `BUSY_STREAMS` are enough.

    Raises:
        LorreryError: as `SimulatedRun.run`.
    """
    least = len(settings.router.schedulers)
    streams = min(streams, BUSY_STREAMS) * least
    settings = changed(settings, {"worker.gpus": 1, "scheduler.max_waiting_requests": streams, **LETS_ALL_WAIT})
    num_requests = max(BUSY_ROUNDS * streams, BUSY_REQUESTS)
    closed = replace(
        options, rate=LoadOptions().rate, concurrency=streams, num_requests=num_requests, timeout=LAST_SECONDS
    )
    summary = SimulatedRun(settings, closed, SimulationOptions(workers=least)).run().summary
    return summary.requests_per_second / least, summary.tpot_ms.p99 / 1e3


def try_replicas(
    settings: Settings,
    options: LoadOptions,
    *,
    ttft: float | None,
    tpot: float | None,
    guess: int,
    watch: Watch = lambda _num_replicas: None,
) -> list[Trial]:
    """Simulate a workload on clusters of several sizes, until the smallest that meets a level at p99 is known.

    Args:
        settings: of the cluster.
        options: the workload.
        ttft: seconds from arrival to first token; None: no limit.
        tpot: seconds per further token; None: no limit.
        guess: replicas to begin with; the search ends at four times as many, or 16 more.
        watch: called before each trial.

    Raises:
        LorreryError: as `SimulatedRun.run`.
    """
    settings = changed(settings, {"worker.gpus": 1})  # one worker process per replica

    def run(num_replicas: int) -> Trial:
        watch(num_replicas)
        report = SimulatedRun(settings, options, SimulationOptions(workers=num_replicas)).run()
        summary = report.summary
        failure, *_ = *report.failures, ""
        if not summary.num_completed:
            in_vain = OF_LOAD.isdisjoint(summary.by_status)
            return Trial(num_replicas, None, None, summary.num_failed, met=False, failure=failure, in_vain=in_vain)
        first, further = summary.from_intended.ttft_ms.p99 / 1e3, summary.tpot_ms.p99 / 1e3
        met = summary.num_completed == summary.num_requests and not (
            (ttft is not None and first > ttft) or (tpot is not None and further > tpot)
        )
        return Trial(num_replicas, first, further, summary.num_failed, met, failure)

    least = len(settings.router.schedulers)  # each scheduler needs a worker
    guess = max(guess, least)
    return search(run, guess, least, max(4 * guess, guess + 16))


def search(run: Callable[[int], Trial], first: int, least: int, most: int) -> list[Trial]:
    """Try numbers of replicas until the smallest that meets the level is known; return the trials in order.

    Args:
        run: runs a trial with a number of replicas.
        first: where to begin, from `least` to `most`.
        least: the smallest possible number.
        most: the largest number to try. If it misses, or a trial was in vain, no number meets the level.
    """
    trials = [run(first)]
    met = first if trials[0].met else most + 1
    missed = least - 1 if trials[0].met else first
    step = max(first // 16, 1)
    while missed + 1 < met and not trials[-1].in_vain:
        if missed < least:
            number = max(met - step, least)
        elif met > most:
            number = min(missed + step, most)
        else:
            number = (missed + met) // 2
        step *= 2
        trials.append(run(number))
        if trials[-1].met:
            met = number
        else:
            missed = number
    return trials


def fewest(trials: list[Trial]) -> int | None:
    """Return the smallest number of replicas that met the level; None if none did."""
    return min((trial.num_replicas for trial in trials if trial.met), default=None)


Row = Callable[[ReplicaSettings, BatchLimits], PromptTurns]

TURNS: dict[str, Row] = {
    "slora_loop": lambda s, limits: PromptTurns(Turns.SPACED, limits.max_prompt_tokens, decode_steps=MAX_WAIT_STEPS),
    "continuous": lambda s, limits: PromptTurns(Turns.FIRST, limits.max_prompt_tokens),
    "mixed": lambda s, limits: PromptTurns(Turns.BESIDE, limits.max_prompt_tokens),
    "chunked": lambda s, limits: PromptTurns(Turns.BESIDE, s.step_tokens, in_pieces=True),
    "prefill_first": lambda s, limits: PromptTurns(Turns.FIRST, s.step_tokens, in_pieces=True),
    "vllm": lambda s, limits: PromptTurns(
        Turns.BESIDE, s.step_tokens, in_pieces=s.enable_chunked_prefill, ahead=s.async_scheduling
    ),
    "sglang": lambda s, limits: PromptTurns(
        Turns.BESIDE if s.sglang.chunked and s.sglang.enable_mixed_chunk else Turns.FIRST,
        s.step_tokens if s.sglang.chunked else s.sglang.max_prefill_tokens,
        in_pieces=s.sglang.chunked,
    ),
    "static": lambda s, limits: PromptTurns(Turns.ROUNDS, limits.max_prompt_tokens),
    "llm_mock": lambda s, limits: PromptTurns(Turns.BESIDE, NEVER),
}
"""Ways to batch, by their names in `scheduler.core.policies`; one from a plug-in counts as `continuous`."""

_NO_LOADS = Loads()
_PAGED = {"paged", "on_demand", "no_evict", "estimated"}


def turns_of(replica: ReplicaSettings) -> PromptTurns:
    """Return how its prompts and decodes share steps."""
    return TURNS.get(batching_name(replica), TURNS["continuous"])(replica, batch_limits(replica))


def adapter_costs(settings: Settings, model: Model) -> AdapterCosts:
    """Return the costs of a model's adapters under these settings, the same live and simulated."""
    own = settings.adapters
    return AdapterCosts(model, own.target_modules, own.host_gb_per_second, own.disk_gb_per_second)


def adapter_loads(settings: Settings, model: Model, work: Workload) -> tuple[int | None, Loads]:
    """Return the number of adapter places on the GPU (None: enough for all), and the load cost of the others.

    All adapters are equally likely: of N adapters, with L places on the GPU and H in host memory, 1 - L/N of the
    requests wait for a load, and 1 - H/N for one from disk.
    """
    own, num_adapters = settings.adapters, work.num_adapters
    if settings.scheduler.strict or own.max_loras is None or num_adapters <= own.max_loras:
        return None, _NO_LOADS
    costs = adapter_costs(settings, model)
    num_loaded = num_adapters - own.max_loras
    in_host = num_adapters if own.host_places is None else max(own.host_places, own.max_loras)
    from_disk = max(0, num_adapters - in_host) / num_loaded
    load_ps = sum(
        count
        * (
            (1 - from_disk) * costs.load_ps(Adapter("", rank), Tier.HOST)
            + from_disk * costs.load_ps(Adapter("", rank), Tier.DISK)
        )
        for rank, count in work.adapters_of_rank.items()
    )
    mean_seconds = load_ps / num_adapters / PS_PER_SECOND
    return own.max_loras, Loads(num_loaded / num_adapters, mean_seconds, own.loading == "blocking")


def room_of(replica: ReplicaSettings, adapter_places: int | None = None, loads: Loads = _NO_LOADS) -> Room:
    """Return how much a replica holds."""
    return Room(
        replica.max_total_token_num,
        replica.block_size if replica.memory in _PAGED else None,
        batch_limits(replica).max_sequences,
        adapter_places,
        loads,
    )
