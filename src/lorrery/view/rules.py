"""The rules of what is wrong, over the model, each with its limits in its text, so that a reader can check it.

Page and terminal show the same notices; docs/monitoring.md lists the rules. Each alert of Prometheus has a rule here
that holds whenever the alert's expression does, with the same limits (tests/view/test_alerts.py), as far back as the
frames reach: `RULES` says which. A rule does not wait as long as an alert does before it fires, and most of them have
a quicker limit as well. All seconds are device seconds.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from statistics import median

from lorrery.view.figures import ALERT_SECONDS, STEP_SECONDS, THRASH_SECONDS, Adapter, Pace, Tenant, Worker
from lorrery.view.model import SHARE_SECONDS, Model
from lorrery.view.notices import Finding, Notice, Severity, Subject, notices_of, plural, short, span
from lorrery.vocabulary.objectives import BUDGETS, BURNS, LAG_BUDGET, LAG_SECONDS, MEANINGS

STUCK_SECONDS = 10.0
GROWTH_SECONDS = 30.0
RECENT_SECONDS = 10.0
SILENT_SECONDS = 60.0
"""No token for so long while requests wait; also how long the backlog must have lasted, and how far back its trend, and
the mean use of a KV pool, must be known."""
SLOW_RATIO = 2.0
"""A worker is slow whose steps take more than this many times as long as its peers'."""
LATE_RATIO = 0.02
FULL_RATIO = 0.9
PREEMPTION_RATIO = 0.2
THRASH_RATIO, THRASH_LOADS_PER_SECOND = 0.3, 0.1
REFUSED_RATIO = 0.1
STARVED_SECONDS, STARVED_RATIO = 1.0, 5.0
_MAX_PEERS = 16
"""Workers that one is compared with, at most."""


def _of_worker(worker: Worker) -> Subject:
    return Subject("worker", worker.key, worker.name)


def _of_adapter(adapter: Adapter) -> Subject:
    return Subject("adapter", adapter.key, adapter.name)


def _of_tenant(tenant: Tenant) -> Subject:
    return Subject("tenant", tenant.key, tenant.name)


def _lost_schedulers(model: Model) -> Iterator[Finding]:
    for shard in model.shards:
        if not shard.connected:
            yield Finding(
                f"scheduler {shard.address} is not connected",
                "The router has no stream to this scheduler. Its requests resume when it is back.",
                Subject("scheduler", shard.address, shard.address),
                "not connected",
            )


def _lost_workers(model: Model) -> Iterator[Finding]:
    for worker in model.lost:
        yield Finding(
            f"{short(worker.name)} has been gone for {span(model.at - (worker.lost_at or 0.0))}",
            "A worker that was attached and not draining is no longer there; its requests are queued again. Shown until"
            " a worker of that name is back, another with a KV pool of that size attaches, or you dismiss it.",
            _of_worker(worker),
            "gone, and neither back nor replaced",
        )


def _returned_workers(model: Model) -> Iterator[Finding]:
    still = sum(model.at - (worker.lost_at or 0.0) < ALERT_SECONDS for worker in model.lost)
    number = model.past["workers_lost"].growth(ALERT_SECONDS) - still
    if number > 0:
        yield Finding(
            f"{plural(number, 'worker')} lost in the last {span(ALERT_SECONDS)}, and back or replaced since",
            f"A worker was lost without draining within {span(ALERT_SECONDS)}; its requests were computed again. The"
            " events say which.",
        )


def _stuck_queues(model: Model) -> Iterator[Finding]:
    for worker in model.workers:
        still, oldest = model.at - worker.joined_at, worker.state.oldest
        if worker.waiting and still >= STUCK_SECONDS and oldest >= STUCK_SECONDS:
            yield Finding(
                f"{short(worker.name)} admits nothing: {worker.waiting:,} waiting, the first for {oldest:,.0f} s",
                f"Requests wait, the first for {STUCK_SECONDS:g} s or more, and none has joined the batch for"
                f" {STUCK_SECONDS:g} s (now {still:,.0f} s). KV is {worker.kv_ratio:.0%} full,"
                f" {len(worker.running):,} run.",
                _of_worker(worker),
                "requests wait and nothing is admitted",
            )


def _stalled_workers(model: Model) -> Iterator[Finding]:
    """Find workers that have a batch and end no step."""
    for worker in model.workers:
        still = model.at - worker.progressed_at
        if worker.running and still >= max(STUCK_SECONDS, 10 * worker.state.step):
            yield Finding(
                f"{short(worker.name)} stands still: {len(worker.running):,} run, and no step has ended for"
                f" {span(still)}",
                f"It has a batch, and has ended no step for {STUCK_SECONDS:g} s and ten times its last step: it hangs."
                " The scheduler gives it up after worker_timeout_seconds.",
                _of_worker(worker),
                "have a batch and end no step",
            )


def _silence(model: Model) -> Iterator[Finding]:
    known = model.at - (model.started_at or 0.0)
    if model.waiting and known >= SILENT_SECONDS and not model.tokens.growth(SILENT_SECONDS):
        yield Finding(
            f"{plural(model.waiting, 'request')} waiting, and no token for {span(SILENT_SECONDS)}",
            f"Requests wait and no worker has produced a token for {span(SILENT_SECONDS)}.",
        )


def _not_ready(model: Model) -> Iterator[Finding]:
    waited = 0.0 if model.not_ready_since is None else model.at - model.not_ready_since
    if waited >= STUCK_SECONDS:
        yield Finding(
            f"no worker has been ready for {span(waited)}",
            f"No worker is attached and not draining, for {STUCK_SECONDS:g} s. Requests wait for worker_wait_seconds,"
            " and are then refused.",
        )


def _missed_objectives(model: Model, *, bad: bool) -> Iterator[Finding]:
    """Find objectives whose error budget is used up too fast; each at the highest of the rates that it exceeds."""
    for name, budget in BUDGETS.items():
        for rate, seconds, is_bad in BURNS:
            counted, missed = _counts(model, name, seconds)
            if counted and missed / counted > rate * budget:
                if is_bad == bad:
                    yield Finding(
                        f"{missed / counted:.0%} of {plural(counted, 'request')} missed the objective {name!r} in"
                        f" {span(min(seconds, model.at - (model.started_at or 0.0)))}",
                        f"The objective is that {1 - budget:.0%} are {MEANINGS[name]}. More than {rate:g} times the"
                        f" other {budget:.0%} missed it, over up to {span(seconds)}.",
                    )
                break


def _counts(model: Model, name: str, seconds: float) -> tuple[float, float]:
    """Return what an objective covered in the last seconds, and what of it missed it."""
    if name not in model.objectives:
        return 0.0, 0.0
    counted, missed = model.objectives[name]
    return counted.growth(seconds), missed.growth(seconds)


def _slow_workers(model: Model) -> Iterator[Finding]:
    """Find workers whose decode steps take much longer than those of workers of the same kind."""
    paces = [(worker, pace) for worker in model.workers if (pace := worker.pace(model.at)) is not None]
    for worker, own in paces:
        peers = [pace for other, pace in paces if other is not worker and other.kind == worker.kind]
        peers = list(islice(peers, 0, None, -(-len(peers) // _MAX_PEERS))) if peers else []
        ratio = median([own.times_slower(peer) for peer in peers]) if peers else 0.0
        if ratio > SLOW_RATIO:
            step, batch, context = (median([getattr(peer, name) for peer in peers]) for name in Pace.__slots__)
            yield Finding(
                f"{short(worker.name)} is {ratio:.1f} times slower than its peers: {own.step * 1e3:.3g} ms a step,"
                f" theirs {step * 1e3:.3g} ms",
                f"The median of its decode steps over {STEP_SECONDS:g} s is more than {SLOW_RATIO:g} times that of the"
                f" other {worker.state.gpu} ({len(peers)} compared), longer steps for a larger batch or more context"
                f" allowed in proportion. It decodes {plural(own.batch, 'request')} with {own.context:,.0f} tokens,"
                f" they {batch:,.0f} with {context:,.0f}.",
                _of_worker(worker),
                f"more than {SLOW_RATIO:g} times slower than their peers",
            )


def _late_workers(model: Model) -> Iterator[Finding]:
    for worker in model.workers:
        busy, late = (one.growth(ALERT_SECONDS) for one in (worker.busy_since, worker.late))
        if busy and late / busy > LATE_RATIO:
            yield Finding(
                f"{short(worker.name)} is behind its pace by {late / busy:.0%}",
                f"Over up to {span(ALERT_SECONDS)} it stood idle between steps, although it had a plan, for more than"
                f" {LATE_RATIO:.0%} of its step time: the machine is short of CPU, and latencies are not the GPU's.",
                _of_worker(worker),
                "behind their pace: the machine is short of CPU",
            )


def _faults(model: Model) -> Iterator[Finding]:
    why = (
        "Injected on request, with all that follows. `lorrery faults list` shows all, `lorrery faults clear` ends them."
    )
    rules = [one.rule if one.met is None else f"{one.rule} ({plural(one.met, 'time')} so far)" for one in model.faults]
    if len(rules) > 3:
        yield Finding(f"{len(rules)} faults are on: {'; '.join(rules[:3])}; ...", why)
    else:
        yield from (Finding(f"a fault is on: {rule}", why) for rule in rules)


def _lagging_router(model: Model) -> Iterator[Finding]:
    counted, late = _counts(model, "lag", ALERT_SECONDS)
    if counted and late / counted > LAG_BUDGET:
        yield Finding(
            f"{late / counted:.0%} of the token frames waited for the router",
            f"More than {LAG_BUDGET:.0%} of them waited longer than {LAG_SECONDS:g} s for its event loop, over up to"
            f" {span(ALERT_SECONDS)}: it is short of CPU.",
        )


def _full_pools(model: Model) -> Iterator[Finding]:
    for worker in model.workers:
        mean = worker.kv_ratios.mean(ALERT_SECONDS)
        if worker.kv_ratios.seconds >= SILENT_SECONDS and mean > FULL_RATIO and worker.waitings.least > 0:
            yield Finding(
                f"{short(worker.name)} is short of KV memory: {mean:.0%} full, {worker.waiting:,} waiting",
                f"Over {span(worker.kv_ratios.seconds)} its KV pool was more than {FULL_RATIO:.0%} full in the mean,"
                " and requests waited for it all the time.",
                _of_worker(worker),
                "short of KV memory while requests wait",
            )


def _starved_tenants(model: Model) -> Iterator[Finding]:
    """Find tenants whose requests waited far longer than the mean request."""
    of_tenant = [
        (tenant, tenant.queued.growth(ALERT_SECONDS), tenant.ended.growth(ALERT_SECONDS))
        for tenant in model.tenants.values()
    ]
    number = sum(ended for _, _, ended in of_tenant)
    mean = sum(queued for _, queued, _ in of_tenant) / number if number else 0.0
    for tenant, queued, ended in of_tenant:
        if ended and queued / ended > max(STARVED_SECONDS, STARVED_RATIO * mean):
            yield Finding(
                f"{short(tenant.name)} waits {queued / ended:.1f} s, the mean request {mean:.1f} s",
                f"Its requests that ended in the last {span(ALERT_SECONDS)} had waited for more than"
                f" {STARVED_SECONDS:g} s, and {STARVED_RATIO:g} times as long as the mean of all, for their batch.",
                _of_tenant(tenant),
                f"wait more than {STARVED_RATIO:g} times as long as the mean request",
            )


def _unplaced(model: Model) -> Iterator[Finding]:
    """Find that some request has been without a worker for long."""
    waited = 0.0 if model.unplaced_since is None else model.at - model.unplaced_since
    if waited >= STUCK_SECONDS:
        yield Finding(
            f"{plural(model.unplaced, 'request')} without a worker for {waited:,.0f} s",
            f"Some request has been without a worker for {STUCK_SECONDS:g} s. Workers attached: {len(model.workers)}.",
        )


def _failed_loads(model: Model) -> Iterator[Finding]:
    failed = [event for event in model.failures if model.at - event.at < ALERT_SECONDS]
    if failed:
        yield Finding(
            f"{plural(len(failed), 'adapter load')} failed: {failed[-1].text}",
            f"A load failed within the last {span(ALERT_SECONDS)}.",
        )


def _unfair_shares(model: Model) -> Iterator[Finding]:
    """Find tenants with less than half of an equal share that want more, while another tenant has more than one."""
    wanting = {key: share for key, share in model.shares().items() if share.demand > 0}
    if len(wanting) < 2 or model.at - (model.started_at or 0.0) < SHARE_SECONDS:
        return
    equal = 1 / len(wanting)
    most = max(wanting, key=lambda key: wanting[key].tokens)
    if wanting[most].tokens <= equal:
        return
    for key, share in wanting.items():
        tenant = model.tenants[key]
        waits = tenant.waiting > 0 and tenant.waitings.mean(SHARE_SECONDS) >= 1
        if waits and key != most and share.tokens < 0.5 * min(share.demand, equal):
            yield Finding(
                f"{short(tenant.name)} gets {share.tokens:.0%} of the tokens;"
                f" {short(model.tenants[most].name)} gets {wanting[most].tokens:.0%}",
                f"It waits, and over {SHARE_SECONDS:g} s got less than half of both its part of the requests"
                f" ({share.demand:.0%}) and an equal share among {len(wanting)} tenants ({equal:.0%}).",
                _of_tenant(tenant),
                "far below their share",
            )


def _thrash(model: Model) -> Iterator[Finding]:
    """Find adapters that were loaded again within a minute of their eviction."""
    again = [(number, one.name, one) for one in model.adapters.values() if (number := one.recent_thrash)]
    for number, _, adapter in sorted(again, key=lambda one: one[:2], reverse=True):
        yield Finding(
            f"{short(adapter.name)} thrashes: loaded again {plural(number, 'time')} in the last minute",
            f"An adapter was loaded again within {THRASH_SECONDS:g} s of its eviction: more adapters are in use than"
            " fit (max_loras, or the adapters' memory).",
            _of_adapter(adapter),
            "loaded again within a minute of leaving",
        )


def _thrashing_cluster(model: Model) -> Iterator[Finding]:
    loads, again = (model.past[name].growth(ALERT_SECONDS) for name in ("loads", "thrash"))
    known = min(ALERT_SECONDS, model.at - (model.started_at or 0.0))
    if loads and again / loads > THRASH_RATIO and loads / known > THRASH_LOADS_PER_SECOND:
        yield Finding(
            f"{again / loads:.0%} of {plural(loads, 'adapter load')} brought back one that had just left",
            f"More than {THRASH_RATIO:.0%} of the loads of up to {span(ALERT_SECONDS)} were of adapters evicted less"
            f" than {THRASH_SECONDS:g} s before, at more than {THRASH_LOADS_PER_SECOND:g} loads a second.",
        )


def _backlog(model: Model) -> Iterator[Finding]:
    lasted = 0.0 if model.backlog_since is None else model.at - model.backlog_since
    if lasted >= SILENT_SECONDS and model.backlog.slope > 0:
        yield Finding(
            f"more wait than run, {model.waiting:,} against {model.running:,}, and the queue grows",
            f"For {span(SILENT_SECONDS)} more requests have been waiting than running, and over up to"
            f" {span(ALERT_SECONDS)} their number grew.",
        )


def _growing_queue(model: Model) -> Iterator[Finding]:
    before = model.queue.before(GROWTH_SECONDS)
    if before is None or model.waiting < before + max(10.0, before / 2):
        return
    yield Finding(
        f"the queue grew from {before:,.0f} to {model.waiting:,} in {GROWTH_SECONDS:g} s",
        f"It grew by half, and by 10 or more, in {GROWTH_SECONDS:g} s:"
        f" {model.requests.growth(GROWTH_SECONDS):,.0f} requests came and"
        f" {model.finished.growth(GROWTH_SECONDS):,.0f} ended.",
    )


def _preemptions(model: Model) -> Iterator[Finding]:
    for worker in model.workers:
        number = worker.preempted.growth(RECENT_SECONDS)
        if number > 0:
            yield Finding(
                f"{short(worker.name)} preempted {plural(number, 'request')}: KV {worker.kv_ratio:.0%} full",
                f"A running request lost its KV memory to another within the last {RECENT_SECONDS:g} s, and is computed"
                " again.",
                _of_worker(worker),
                "preempt requests: KV is full",
            )


def _many_preemptions(model: Model) -> Iterator[Finding]:
    ended, preempted = (model.past[name].growth(ALERT_SECONDS) for name in ("finished", "preempted"))
    if preempted > PREEMPTION_RATIO * ended:
        yield Finding(
            f"{plural(preempted, 'preemption')}, {plural(ended, 'request')} finished in {span(ALERT_SECONDS)}",
            f"More than {PREEMPTION_RATIO:g} preemptions for each request: sequences outgrow the KV pools, and work is"
            " done twice.",
        )


def _idle_beside_queue(model: Model) -> Iterator[Finding]:
    busiest = max(model.workers, key=lambda worker: worker.waiting, default=None)
    if busiest is None or not busiest.waiting or busiest.state.oldest < STUCK_SECONDS:
        return
    idle = f"idle, while {busiest.waiting:,} wait at {short(busiest.name)}"
    for worker in model.workers:
        has_work = worker.running or worker.waiting
        if worker.state.state == "ready" and not has_work and model.at - worker.ran_at >= STUCK_SECONDS:
            yield Finding(
                f"{short(worker.name)} is {idle}",
                f"It has run nothing for {STUCK_SECONDS:g} s, while a request has waited as long at another: placement"
                " does not use it.",
                _of_worker(worker),
                idle,
            )


def _refusals(model: Model) -> Iterator[Finding]:
    for tenant in model.tenants.values():
        number = tenant.refused.growth(RECENT_SECONDS)
        refused, ended = tenant.refused.growth(ALERT_SECONDS), tenant.ended.growth(ALERT_SECONDS)
        if not number and refused > REFUSED_RATIO * (refused + ended):
            yield Finding(
                f"{short(tenant.name)}: {refused / (refused + ended):.0%} of its requests refused in"
                f" {span(ALERT_SECONDS)}",
                f"More than {REFUSED_RATIO:.0%} of its requests in the last {span(ALERT_SECONDS)} were refused; the"
                " events say why.",
                _of_tenant(tenant),
                "had requests refused",
            )
        elif number > 0:
            yield Finding(
                f"{short(tenant.name)}: {plural(number, 'request')} refused in {RECENT_SECONDS:g} s",
                f"A request was refused within the last {RECENT_SECONDS:g} s; the events say why.",
                _of_tenant(tenant),
                "had requests refused",
            )


_Rule = Callable[[Model], Iterator[Finding]]
RULES: Sequence[tuple[str, Severity, _Rule, tuple[str, ...]]] = (
    ("lost scheduler", "bad", _lost_schedulers, ("LorreryNoScheduler", "LorreryTargetDown")),
    ("lost worker", "bad", _lost_workers, ("LorreryWorkerLost", "LorreryTargetDown")),
    ("no worker", "bad", _not_ready, ("LorreryNoWorkers",)),
    ("no worker", "bad", _unplaced, ()),
    ("stalled worker", "bad", _stalled_workers, ()),
    ("stuck queue", "bad", _stuck_queues, ()),
    ("stuck queue", "bad", _silence, ("LorreryQueueStuck",)),
    ("error budget", "bad", partial(_missed_objectives, bad=True), ("LorreryErrorBudgetBurn",)),
    ("failed load", "bad", _failed_loads, ("LorreryAdapterLoadsFail",)),
    ("missed objective", "warn", partial(_missed_objectives, bad=False), ("LorreryErrorBudgetBurn",)),
    ("slow worker", "warn", _slow_workers, ("LorrerySlowWorker",)),
    ("late worker", "warn", _late_workers, ("LorreryBehindPace",)),
    ("fault", "warn", _faults, ()),
    ("returned worker", "warn", _returned_workers, ("LorreryWorkerLost",)),
    ("unfair share", "warn", _unfair_shares, ()),
    ("starved tenant", "warn", _starved_tenants, ("LorreryTenantStarved",)),
    ("thrash", "warn", _thrash, ()),
    ("thrash", "warn", _thrashing_cluster, ("LorreryAdapterThrash",)),
    ("growing queue", "warn", _growing_queue, ()),
    ("growing queue", "warn", _backlog, ("LorreryQueueGrows",)),
    ("full KV", "warn", _full_pools, ("LorreryKvPressure",)),
    ("preemption", "warn", _preemptions, ()),
    ("preemption", "warn", _many_preemptions, ("LorreryPreemptions",)),
    ("idle worker", "warn", _idle_beside_queue, ()),
    ("refusals", "warn", _refusals, ("LorreryTenantRefused",)),
    ("lagging router", "warn", _lagging_router, ("LorreryRouterLags",)),
)
"""Name, severity, what it finds, and the alerts that it stands for. The bad ones first. Of several with the same name
the first that finds something is used."""
UNSEEN_ALERTS = {
    "LorreryNoRouter": "frames come from a router; without one, page and terminal say that there is no cluster",
    "LorreryFileDescriptors": "a matter of each process on its machine, which frames do not show",
}
"""Alerts that no rule stands for, and why."""


def notices(model: Model) -> list[Notice]:
    """Return all notices, bad ones first, each in the order of the rules."""
    if model.started_at is None:
        return []
    found: dict[str, list[Notice]] = {}
    for name, severity, find, _ in RULES:
        if name not in found and (findings := list(find(model))):
            found[name] = notices_of(name, severity, findings)
    return [notice for notices in found.values() for notice in notices]


def rules_of_alerts() -> dict[str, set[str]]:
    """Return the names of the rules that stand for each alert."""
    found: dict[str, set[str]] = {}
    for rule, _, _, alerts in RULES:
        for alert in alerts:
            found.setdefault(alert, set()).add(rule)
    return found
