"""How evenly tenants are served while they compete, from the times of their requests.

Service is what VTC charges (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each prompt token 1
at the request's first admission, each output token 2 as it comes, here evenly from the first to the last.

    gap     the largest difference between the service of two tenants within any interval in which both had requests
            waiting all the time, which VTC's theorem bounds; in tokens, at 512 times between first and last arrival
    jain    Jain's index (sum x)^2 / (n * sum x^2) with x = service until the last arrival / max-min fair share of it

The max-min fair share is that of the same total, if nobody gets more than was asked for and what one leaves goes to the
others in equal parts. So jain is 1 if every tenant got that, whatever each asked for; a service at which all get their
requests served in time is fair. Tenants are `tenant_id` or, if no request has one, adapters.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.workload.summary import jain_index

__all__ = ["Served", "jain_of_shares", "service_gap"]

Floats = npt.NDArray[np.float64]

OUTPUT_PRICE = 2.0
_TIMES = 512
_MOST_TENANTS = 50
"""Whose pairs are looked at, those that asked for most."""


class Served(NamedTuple):
    """What one request asked for and got; times in picoseconds, None: it did not get there.

    Attributes:
        asked_tokens: of output, as many as it would get at its end.
        is_good: whether it kept the service level.
    """

    arrived_ps: int
    admitted_ps: int | None
    first_token_ps: int | None
    end_ps: int
    prompt_tokens: int
    asked_tokens: int
    output_tokens: int
    is_good: bool = False


def service_gap(tenants: Mapping[str, Sequence[Served]]) -> float:
    """Return the gap; 0 if no two tenants ever had requests waiting at a time."""
    most = sorted(tenants.values(), key=_asked, reverse=True)[:_MOST_TENANTS]
    arrivals = [one.arrived_ps for own in most for one in own]
    if len(most) < 2:
        return 0.0
    at = np.linspace(min(arrivals), max(arrivals), _TIMES)
    service = np.array([_service(own, at) for own in most])
    waiting = np.array([_is_waiting(own, at) for own in most])
    gap = 0.0
    for one in range(len(most)):
        for other in range(one):
            both = np.flatnonzero(waiting[one] & waiting[other])
            if not len(both):
                continue
            difference = (service[one] - service[other])[both]
            begins = np.concatenate(([0], np.flatnonzero(np.diff(both) > 1) + 1))
            spread = np.maximum.reduceat(difference, begins) - np.minimum.reduceat(difference, begins)
            gap = max(gap, float(spread.max()))
    return gap


def jain_of_shares(tenants: Mapping[str, Sequence[Served]]) -> float:
    """Return Jain's index of the tenants' service over their max-min fair shares; 1 if nothing was served."""
    end = np.array([max(one.arrived_ps for own in tenants.values() for one in own)], np.float64)
    service = np.array([float(_service(own, end)[0]) for own in tenants.values()])
    asked = np.array([_asked(own) for own in tenants.values()])
    fair = _fair_shares(asked, float(service.sum()))
    return jain_index(service[fair > 0] / fair[fair > 0])


def _asked(own: Sequence[Served]) -> float:
    return float(sum(one.prompt_tokens + OUTPUT_PRICE * one.asked_tokens for one in own))


def _fair_shares(asked: Floats, total: float) -> Floats:
    """Divide a total in equal parts, except that nobody gets more than was asked for."""
    found, left = np.zeros(len(asked)), total
    for rank, place in enumerate(np.argsort(asked)):
        found[place] = min(asked[place], left / (len(asked) - rank))
        left -= found[place]
    return found


def _service(own: Sequence[Served], at: Floats) -> Floats:
    """Return the service of a tenant until each of some times."""
    admitted = sorted((one.admitted_ps, one.prompt_tokens) for one in own if one.admitted_ps is not None)
    when = np.array([time for time, _ in admitted], np.float64)
    prompts = np.concatenate(([0.0], np.cumsum([tokens for _, tokens in admitted])))
    found: Floats = prompts[np.searchsorted(when, at, "right")]
    given = [(one.first_token_ps, one.end_ps, one.output_tokens) for one in own if one.first_token_ps is not None]
    if given:
        first, last, tokens = np.array(given, np.float64).T
        rates = OUTPUT_PRICE * tokens / np.maximum(last - first, 1.0)
        ends = np.concatenate((first, np.maximum(last, first + 1.0)))
        changes = np.concatenate((rates, -rates))
        order = np.argsort(ends, kind="stable")
        ends, slopes = ends[order], np.cumsum(changes[order])
        outputs = np.concatenate(([0.0], np.cumsum(slopes[:-1] * np.diff(ends))))
        found = found + np.interp(at, ends, outputs)
    return found


def _is_waiting(own: Sequence[Served], at: Floats) -> npt.NDArray[np.bool_]:
    """Return at which of some times a request of the tenant waits for its first admission."""
    arrived = np.sort([one.arrived_ps for one in own])
    left = np.sort([one.end_ps if one.admitted_ps is None else one.admitted_ps for one in own])
    waiting: npt.NDArray[np.bool_] = np.searchsorted(arrived, at, "right") > np.searchsorted(left, at, "right")
    return waiting
