"""Why candidates made the same decisions, from what was counted in their runs; and what else a reader must know.

A reason is given only where the counts prove it: a queue has no choice if everything that waits enters together, one
worker leaves a placement none, and requests of one adapter leave none to what is fair between adapters.
"""

from collections.abc import Iterator, Sequence

from lorrery.simulator.arena.comparison import Comparison, Contestant

__all__ = ["notes_on", "why_equal"]

_IN_ORDER = {"req_queue", "fcfs", "fcfs_tail"}
"""Policies whose rule is the order of arrival."""
_OF_ADAPTERS = {"vtc_fair", "cluster", "peft"}
_NO_CHOICE = "had no choice: whenever requests entered a batch, all that waited at the worker did"


def why_equal(equal: Sequence[Contestant]) -> str:
    """Return why these candidates' figures are equal, as far as it is known.

    Args:
        equal: two or more, with equal digests of their decisions.
    """
    first = equal[0]
    num_admissions, num_choices = _total(first, "num_admissions"), _total(first, "num_choices")
    seeds = f" under all {len(first.rounds)} seeds" if len(first.rounds) > 1 else ""
    same = (
        f"{_listed([one.name for one in equal])} made the same decisions{seeds}: {num_admissions:,} admissions of the"
        " same requests at the same times, on the same workers"
    )
    found = [same]
    differing = {part for part in first.parts if len({one.parts[part] for one in equal}) > 1}
    if "policy" in differing:
        found.append(_why_same_order(equal, num_choices))
    if "limits" in differing:
        limits = "; ".join(dict.fromkeys(one.parts["limits"] for one in equal))
        most = max(first.values("most_running"))
        found.append(f"their limits differ ({limits}) to no effect: at most {most:,.0f} ran on a worker")
    if "placement" in differing:
        alone = max(first.values("num_workers")) == 1
        found.append(
            "there is one worker, so a placement has no choice"
            if alone
            else "their placements chose the same worker for each request"
        )
    if others := [part for part in ("batching", "memory", "prefix cache") if part in differing]:
        kinds = (f"{part} ({', '.join(dict.fromkeys(one.parts[part] for one in equal))})" for part in others)
        found.append(f"their {' and '.join(kinds)} came to the same steps under this load")
    if not differing:
        settings = ", ".join(dict.fromkeys(text for one in equal for text in one.candidate.overrides))
        found.append(f"what they differ in ({settings}) had no effect on this load (docs/settings.md says when it has)")
    return ". ".join(text[0].upper() + text[1:] if place else text for place, text in enumerate(found)) + "."


def _why_same_order(equal: Sequence[Contestant], num_choices: int) -> str:
    first = equal[0]
    if not num_choices:
        most = max(first.values("most_waiting"))
        return (
            f"their queues {_NO_CHOICE} (at most {most:,.0f}), so the order in which a queue tries them did not matter"
        )
    num_past = _total(first, "num_out_of_order")
    text = f"at {num_choices:,} decisions some requests had to wait, and they chose the same each time, " + (
        f"{num_past:,} times past one that had come first (such as one that waits for its adapter)"
        if num_past
        else "those that had come first"
    )
    policies = dict.fromkeys(one.parts["policy"] for one in equal)
    reasons = [reason for policy in policies if (reason := _why_in_order(policy, first))]
    return f"{text}: {'; '.join(reasons)}" if reasons else text


def _why_in_order(policy: str, one: Contestant) -> str:
    """Return why a policy goes by arrival here; empty if that is not known."""
    if policy in _IN_ORDER:
        return f"{policy} goes by arrival"
    if policy == "priority" and max(one.values("num_priorities")) == 1:
        return "priority goes by arrival among requests of one priority, and all have the same"
    if policy in _OF_ADAPTERS and max(one.values("num_owners")) == 1:
        return f"{policy} tells only adapters (or tenants) apart, and there is one"
    if policy == "lpm" and one.parts["prefix cache"] == "none":
        return "lpm goes by cached prefixes, and there is no prefix cache"
    return ""


def notes_on(found: Comparison) -> Iterator[str]:
    """Yield what the figures must be read with."""
    ran = found.ran
    if ran and len(found.seeds) == 1:
        yield "one seed: figures have no interval, and differences are of these requests alone"
    for one in ran[1:]:
        if one.values("workload_digest") != ran[0].values("workload_digest"):
            yield (
                f"{one.name} did not have the same requests as {ran[0].name}, as its settings skip or change some:"
                " differences are of the requests, too"
            )
    given = [text for one in ran for text in one.candidate.overrides]
    if len({one.parts["policy"] for one in ran}) > 1:
        for part in ("batching", "limits"):
            kinds = dict.fromkeys(one.parts[part].partition(",")[0] for one in ran)
            if len(kinds) > 1 and not any(text.startswith(f"scheduler.{part}=") for text in given):
                yield (
                    f"the policies differ in {part} too ({', '.join(kinds)}), each as its original does: figures are of"
                    f" all that differs; --set scheduler.{part}=NAME compares queues alone"
                )
    for one in ran:
        for warning in one.warnings:
            yield f"{one.name}: {warning}"


def _total(one: Contestant, figure: str) -> int:
    return round(sum(one.values(figure)))


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
