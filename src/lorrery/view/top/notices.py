"""Detects problems: the rules of docs/orrery.md over the model; the web page has the same rules and limits."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lorrery.view.top.model import NO_TENANT, Model, Tenant

STUCK_SECONDS = 10.0
THRASH_SECONDS = 60.0
SHARE_SECONDS = 30.0
GROWTH_SECONDS = 30.0
RECENT_SECONDS = 10.0
_MANY = 3
"""Notices of one rule that are listed separately; more are merged into one."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A problem.

    Attributes:
        rule: the rule that found it.
        is_bad: whether work is stopped or lost; else it continues, but worse than it could.
        title: the problem, with names and figures.
        why: the rule, so that a reader can check it.
        subject: what it concerns; empty: the whole cluster.
        kind: of the subject.
        many: the text for several subjects together.
    """

    rule: str
    is_bad: bool
    title: str
    why: str
    subject: str = ""
    kind: str = ""
    many: str = ""


def notices(model: Model) -> list[Notice]:
    """Return all notices, bad ones first."""
    if model.started_at is None:
        return []
    found = [notice for rule in _RULES for notice in _merged(list(rule(model)))]
    return sorted(found, key=lambda notice: not notice.is_bad)


def _merged(of_a_rule: Sequence[Notice]) -> Sequence[Notice]:
    if len(of_a_rule) <= _MANY:
        return of_a_rule
    first = of_a_rule[0]
    names = ", ".join(notice.subject for notice in of_a_rule[:_MANY])
    return [Notice(first.rule, first.is_bad, f"{len(of_a_rule)} {first.kind}s ({names}, ...): {first.many}", first.why)]


def _lost_shard(model: Model) -> Iterator[Notice]:
    for shard in model.shards:
        if not shard.connected:
            yield Notice(
                "lost scheduler",
                True,
                f"scheduler {shard.address} is not connected",
                "The router has no stream to this scheduler. Its requests resume when it is back.",
                shard.address,
                "scheduler",
                "not connected",
            )


def _lost_worker(model: Model) -> Iterator[Notice]:
    for worker in model.lost:
        yield Notice(
            "lost worker",
            True,
            f"{worker.name} is gone, since {worker.lost_at or 0:,.0f} s",
            "A worker that was attached and not draining is no longer there. Shown for a minute; its requests are"
            " queued again.",
            worker.name,
            "worker",
            "gone within the last minute",
        )


def _stuck_queue(model: Model) -> Iterator[Notice]:
    for worker in model.workers:
        still = model.at - worker.joined_at
        if worker.waiting and still >= STUCK_SECONDS and worker.state.oldest >= STUCK_SECONDS:
            yield Notice(
                "stuck queue",
                True,
                f"{worker.name} admits nothing: {worker.waiting:,} waiting, the first for {worker.state.oldest:,.0f} s",
                f"Requests wait, the first for {STUCK_SECONDS:g} s or more, and none has joined the batch for"
                f" {STUCK_SECONDS:g} s (now {still:,.0f} s). KV is {worker.kv_ratio:.0%} full,"
                f" {len(worker.running)} run.",
                worker.name,
                "worker",
                "requests wait and nothing is admitted",
            )


def _unplaced(model: Model) -> Iterator[Notice]:
    waited = 0.0 if model.unplaced_since is None else model.at - model.unplaced_since
    if waited >= STUCK_SECONDS:
        yield Notice(
            "no worker",
            True,
            f"{_plural(model.unplaced, 'request')} without a worker for {waited:,.0f} s",
            f"Some request has been without a worker for {STUCK_SECONDS:g} s. Workers attached: {len(model.workers)}.",
        )


def _failed_loads(model: Model) -> Iterator[Notice]:
    failed = [event for event in model.events if event.kind == "load_failed" and model.at - event.at < THRASH_SECONDS]
    if failed:
        yield Notice(
            "failed load",
            True,
            f"{_plural(len(failed), 'adapter load')} failed: {failed[-1].text}",
            f"A load failed within the last {THRASH_SECONDS:g} s.",
        )


def _unfair_tenant(model: Model) -> Iterator[Notice]:
    """Find tenants with less than half of an equal share that want more, while another tenant has more than one."""
    wanting = {name: shares for name, shares in tenant_shares(model).items() if shares[1] > 0}
    if len(wanting) < 2 or model.at - (model.started_at or 0.0) < SHARE_SECONDS:
        return
    equal = 1 / len(wanting)
    most = max(wanting, key=lambda name: wanting[name][0])
    if wanting[most][0] <= equal:
        return
    for name, (share, demand) in wanting.items():
        tenant = model.tenants[name]
        waits = tenant.waiting > 0 and tenant.waitings.mean(SHARE_SECONDS) >= 1
        if waits and name != most and share < 0.5 * min(demand, equal):
            yield Notice(
                "unfair share",
                False,
                f"{tenant_title(tenant)} gets {share:.0%} of the tokens;"
                f" {tenant_title(model.tenants[most])} gets {wanting[most][0]:.0%}",
                f"It waits, and over {SHARE_SECONDS:g} s got less than half of both its part of the requests"
                f" ({demand:.0%}) and an equal share among {len(wanting)} tenants ({equal:.0%}).",
                tenant_title(tenant),
                "tenant",
                "far below their share",
            )


def _thrash(model: Model) -> Iterator[Notice]:
    """Find adapters that were loaded again within a minute of their eviction."""
    again = [(adapter.thrash.growth(THRASH_SECONDS), adapter.name) for adapter in model.adapters.values()]
    for number, name in sorted((one for one in again if one[0] > 0), reverse=True):
        yield Notice(
            "thrash",
            False,
            f"{name} thrashes: loaded again {number:,.0f} x in the last minute",
            f"An adapter was loaded again within {THRASH_SECONDS:g} s of its eviction: more adapters are in use than"
            " fit (max_loras, or the adapters' memory).",
            name,
            "adapter",
            "loaded again within a minute of leaving",
        )


def _growing_queue(model: Model) -> Iterator[Notice]:
    before = model.queue.before(GROWTH_SECONDS)
    if before is None or model.waiting < before + max(10.0, before / 2):
        return
    yield Notice(
        "growing queue",
        False,
        f"the queue grew from {before:,.0f} to {model.waiting:,} in {GROWTH_SECONDS:g} s",
        f"It grew by half, and by 10 or more, in {GROWTH_SECONDS:g} s:"
        f" {model.requests.growth(GROWTH_SECONDS):,.0f} requests came and"
        f" {model.finished.growth(GROWTH_SECONDS):,.0f} ended.",
    )


def _preemption(model: Model) -> Iterator[Notice]:
    for worker in model.workers:
        number = worker.preempted.growth(RECENT_SECONDS)
        if number > 0:
            yield Notice(
                "preemption",
                False,
                f"{worker.name} preempted {_plural(number, 'request')}: KV {worker.kv_ratio:.0%} full",
                f"A running request lost its KV memory to another within the last {RECENT_SECONDS:g} s, and is computed"
                " again.",
                worker.name,
                "worker",
                "preempt requests: KV is full",
            )


def _idle_beside_queue(model: Model) -> Iterator[Notice]:
    busiest = max(model.workers, key=lambda worker: worker.waiting, default=None)
    if busiest is None or not busiest.waiting or busiest.state.oldest < STUCK_SECONDS:
        return
    for worker in model.workers:
        has_work = worker.running or worker.waiting
        if worker.state.state == "ready" and not has_work and model.at - worker.ran_at >= STUCK_SECONDS:
            yield Notice(
                "idle worker",
                False,
                f"{worker.name} is idle, while {busiest.waiting:,} wait at {busiest.name}",
                f"It has run nothing for {STUCK_SECONDS:g} s, while a request has waited as long at another: placement"
                " does not use it.",
                worker.name,
                "worker",
                f"idle, while {busiest.waiting:,} wait at {busiest.name}",
            )


def _refusals(model: Model) -> Iterator[Notice]:
    for tenant in model.tenants.values():
        number = tenant.refused.growth(RECENT_SECONDS)
        if number > 0:
            yield Notice(
                "refusals",
                False,
                f"{tenant_title(tenant)}: {_plural(number, 'request')} refused in {RECENT_SECONDS:g} s",
                f"A request was refused within the last {RECENT_SECONDS:g} s; the events say why.",
                tenant_title(tenant),
                "tenant",
                "had requests refused",
            )


_RULES: Sequence[Callable[[Model], Iterator[Notice]]] = (
    _lost_shard, _lost_worker, _stuck_queue, _unplaced, _failed_loads, _unfair_tenant, _thrash, _growing_queue,
    _preemption, _idle_beside_queue, _refusals,
)  # fmt: skip


def tenant_shares(model: Model) -> dict[str, tuple[float, float]]:
    """Return each tenant's share of the tokens, and of the running and waiting requests, over `SHARE_SECONDS`."""
    tokens = {name: tenant.tokens.growth(SHARE_SECONDS) for name, tenant in model.tenants.items()}
    requests = {
        name: tenant.runnings.mean(SHARE_SECONDS) + tenant.waitings.mean(SHARE_SECONDS)
        for name, tenant in model.tenants.items()
    }
    all_tokens, all_requests = sum(tokens.values()) or 1.0, sum(requests.values()) or 1.0
    return {name: (tokens[name] / all_tokens, requests[name] / all_requests) for name in tokens}


def tenant_title(tenant: Tenant) -> str:
    """Return a tenant's display name."""
    return tenant.name or NO_TENANT


def _plural(number: float, noun: str) -> str:
    return f"{number:,.0f} {noun}{'' if number == 1 else 's'}"
