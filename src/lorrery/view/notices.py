"""What is wrong: rules over the model, each with its limits in its text, so that a reader can check it.

Page and terminal show the same notices; docs/monitoring.md lists the rules. All seconds are device seconds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from lorrery.view.figures import THRASH_SECONDS, Adapter, Tenant, Worker
from lorrery.view.model import SHARE_SECONDS, Model

Severity = Literal["bad", "warn"]
"""Bad: work is stopped or lost; warn: it continues, but worse than it could."""
STUCK_SECONDS = 10.0
GROWTH_SECONDS = 30.0
RECENT_SECONDS = 10.0
_MANY = 3
"""Notices of one rule that are listed separately; more are merged into one."""
_LONGEST_NAME, _LONGEST_OF_MANY = 32, 20
"""Characters of a name in a title."""


class Subject(msgspec.Struct, array_like=True, frozen=True):
    """What a notice concerns; `key` is that of the model, of a scheduler its address."""

    kind: Literal["scheduler", "worker", "adapter", "tenant"]
    key: str | None
    name: str


class Notice(msgspec.Struct, frozen=True):
    """A problem.

    Attributes:
        rule: the rule that found it.
        title: the problem, with names and figures.
        why: the rule, so that a reader can check it.
        subjects: what it concerns; empty: the whole cluster.
    """

    rule: str
    severity: Severity
    title: str
    why: str
    subjects: list[Subject] = []


@dataclass(frozen=True, slots=True)
class _Finding:
    """What a rule finds of one subject, or of the cluster; `many` is the title for several subjects together."""

    title: str
    why: str
    subject: Subject | None = None
    many: str = ""


def notices(model: Model) -> list[Notice]:
    """Return all notices, bad ones first, each in the order of the rules."""
    if model.started_at is None:
        return []
    return [notice for rule, severity, find in _RULES for notice in _notices(rule, severity, list(find(model)))]


def _notices(rule: str, severity: Severity, findings: Sequence[_Finding]) -> list[Notice]:
    subjects = [one.subject for one in findings if one.subject is not None]
    if len(subjects) <= _MANY:
        return [
            Notice(rule, severity, one.title, one.why, [] if one.subject is None else [one.subject]) for one in findings
        ]
    first = findings[0]
    names = ", ".join(short(subject.name, _LONGEST_OF_MANY) for subject in subjects[:_MANY])
    title = f"{len(subjects):,} {subjects[0].kind}s ({names}, ...): {first.many}"
    return [Notice(rule, severity, title, first.why, subjects)]


def short(name: str, longest: int = _LONGEST_NAME) -> str:
    """Return a name, cut to so many characters with an ellipsis."""
    return name if len(name) <= longest else f"{name[: longest - 3]}..."


def clock(at: float) -> str:
    """Return device seconds as minutes and seconds, from an hour with the hours: 2:05, 1:02:05."""
    hours, seconds = divmod(max(0, int(at)), 3600)
    return f"{hours}:{seconds // 60:02d}:{seconds % 60:02d}" if hours else f"{seconds // 60}:{seconds % 60:02d}"


def _plural(number: float, noun: str) -> str:
    return f"{number:,.0f} {noun}{'' if number == 1 else 's'}"


def _of_worker(worker: Worker) -> Subject:
    return Subject("worker", worker.key, worker.name)


def _of_adapter(adapter: Adapter) -> Subject:
    return Subject("adapter", adapter.key, adapter.name)


def _of_tenant(tenant: Tenant) -> Subject:
    return Subject("tenant", tenant.key, tenant.name)


def _lost_schedulers(model: Model) -> Iterator[_Finding]:
    for shard in model.shards:
        if not shard.connected:
            yield _Finding(
                f"scheduler {shard.address} is not connected",
                "The router has no stream to this scheduler. Its requests resume when it is back.",
                Subject("scheduler", shard.address, shard.address),
                "not connected",
            )


def _lost_workers(model: Model) -> Iterator[_Finding]:
    for worker in model.lost:
        yield _Finding(
            f"{short(worker.name)} is gone, since {clock(worker.lost_at or 0.0)}",
            "A worker that was attached and not draining is no longer there. Shown for a minute; its requests are"
            " queued again.",
            _of_worker(worker),
            "gone within the last minute",
        )


def _stuck_queues(model: Model) -> Iterator[_Finding]:
    for worker in model.workers:
        still, oldest = model.at - worker.joined_at, worker.state.oldest
        if worker.waiting and still >= STUCK_SECONDS and oldest >= STUCK_SECONDS:
            yield _Finding(
                f"{short(worker.name)} admits nothing: {worker.waiting:,} waiting, the first for {oldest:,.0f} s",
                f"Requests wait, the first for {STUCK_SECONDS:g} s or more, and none has joined the batch for"
                f" {STUCK_SECONDS:g} s (now {still:,.0f} s). KV is {worker.kv_ratio:.0%} full,"
                f" {len(worker.running):,} run.",
                _of_worker(worker),
                "requests wait and nothing is admitted",
            )


def _unplaced(model: Model) -> Iterator[_Finding]:
    """Find that some request has been without a worker for long."""
    waited = 0.0 if model.unplaced_since is None else model.at - model.unplaced_since
    if waited >= STUCK_SECONDS:
        yield _Finding(
            f"{_plural(model.unplaced, 'request')} without a worker for {waited:,.0f} s",
            f"Some request has been without a worker for {STUCK_SECONDS:g} s. Workers attached: {len(model.workers)}.",
        )


def _failed_loads(model: Model) -> Iterator[_Finding]:
    failed = [event for event in model.events if event.kind == "load_failed" and model.at - event.at < THRASH_SECONDS]
    if failed:
        yield _Finding(
            f"{_plural(len(failed), 'adapter load')} failed: {failed[-1].text}",
            f"A load failed within the last {THRASH_SECONDS:g} s.",
        )


def _unfair_shares(model: Model) -> Iterator[_Finding]:
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
            yield _Finding(
                f"{short(tenant.name)} gets {share.tokens:.0%} of the tokens;"
                f" {short(model.tenants[most].name)} gets {wanting[most].tokens:.0%}",
                f"It waits, and over {SHARE_SECONDS:g} s got less than half of both its part of the requests"
                f" ({share.demand:.0%}) and an equal share among {len(wanting)} tenants ({equal:.0%}).",
                _of_tenant(tenant),
                "far below their share",
            )


def _thrash(model: Model) -> Iterator[_Finding]:
    """Find adapters that were loaded again within a minute of their eviction."""
    again = [(number, one.name, one) for one in model.adapters.values() if (number := one.recent_thrash)]
    for number, _, adapter in sorted(again, key=lambda one: one[:2], reverse=True):
        yield _Finding(
            f"{short(adapter.name)} thrashes: loaded again {_plural(number, 'time')} in the last minute",
            f"An adapter was loaded again within {THRASH_SECONDS:g} s of its eviction: more adapters are in use than"
            " fit (max_loras, or the adapters' memory).",
            _of_adapter(adapter),
            "loaded again within a minute of leaving",
        )


def _growing_queue(model: Model) -> Iterator[_Finding]:
    before = model.queue.before(GROWTH_SECONDS)
    if before is None or model.waiting < before + max(10.0, before / 2):
        return
    yield _Finding(
        f"the queue grew from {before:,.0f} to {model.waiting:,} in {GROWTH_SECONDS:g} s",
        f"It grew by half, and by 10 or more, in {GROWTH_SECONDS:g} s:"
        f" {model.requests.growth(GROWTH_SECONDS):,.0f} requests came and"
        f" {model.finished.growth(GROWTH_SECONDS):,.0f} ended.",
    )


def _preemptions(model: Model) -> Iterator[_Finding]:
    for worker in model.workers:
        number = worker.preempted.growth(RECENT_SECONDS)
        if number > 0:
            yield _Finding(
                f"{short(worker.name)} preempted {_plural(number, 'request')}: KV {worker.kv_ratio:.0%} full",
                f"A running request lost its KV memory to another within the last {RECENT_SECONDS:g} s, and is computed"
                " again.",
                _of_worker(worker),
                "preempt requests: KV is full",
            )


def _idle_beside_queue(model: Model) -> Iterator[_Finding]:
    busiest = max(model.workers, key=lambda worker: worker.waiting, default=None)
    if busiest is None or not busiest.waiting or busiest.state.oldest < STUCK_SECONDS:
        return
    idle = f"idle, while {busiest.waiting:,} wait at {short(busiest.name)}"
    for worker in model.workers:
        has_work = worker.running or worker.waiting
        if worker.state.state == "ready" and not has_work and model.at - worker.ran_at >= STUCK_SECONDS:
            yield _Finding(
                f"{short(worker.name)} is {idle}",
                f"It has run nothing for {STUCK_SECONDS:g} s, while a request has waited as long at another: placement"
                " does not use it.",
                _of_worker(worker),
                idle,
            )


def _refusals(model: Model) -> Iterator[_Finding]:
    for tenant in model.tenants.values():
        number = tenant.refused.growth(RECENT_SECONDS)
        if number > 0:
            yield _Finding(
                f"{short(tenant.name)}: {_plural(number, 'request')} refused in {RECENT_SECONDS:g} s",
                f"A request was refused within the last {RECENT_SECONDS:g} s; the events say why.",
                _of_tenant(tenant),
                "had requests refused",
            )


_RULES: Sequence[tuple[str, Severity, Callable[[Model], Iterator[_Finding]]]] = (
    ("lost scheduler", "bad", _lost_schedulers),
    ("lost worker", "bad", _lost_workers),
    ("stuck queue", "bad", _stuck_queues),
    ("no worker", "bad", _unplaced),
    ("failed load", "bad", _failed_loads),
    ("unfair share", "warn", _unfair_shares),
    ("thrash", "warn", _thrash),
    ("growing queue", "warn", _growing_queue),
    ("preemption", "warn", _preemptions),
    ("idle worker", "warn", _idle_beside_queue),
    ("refusals", "warn", _refusals),
)
"""The bad ones first."""
