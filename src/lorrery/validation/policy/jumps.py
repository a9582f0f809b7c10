"""Checks that a policy decides the same when queried only as often as it requires, and before every step.

Skipping steps makes a simulation fast and lets a worker run on without its scheduler; it is correct only if the policy
would have made no other decision meanwhile.
"""

from lorrery.scheduler.core.queues.base import is_asked_every_step
from lorrery.validation.policy.cases import Case, Cases
from lorrery.validation.policy.drive import Entry, Log, jump, step_by_step
from lorrery.validation.policy.fault import PolicyFault, seconds
from lorrery.validation.policy.watch import Watched, watch

_VERBS = {
    "admitted": "let request {} in",
    "first": "gave request {} its first token",
    "finished": "ended request {}",
    "cancelled": "cancelled request {}",
    "dropped": "dropped request {}",
    "preempted": "preempted request {}",
}


def check_jumps(case: Case, cases: Cases) -> None:
    """Run a case both ways.

    Raises:
        PolicyFault: the runs diverge; says where, and what the queue had answered before.
    """
    one, other = cases.make_replica(case.settings), cases.make_replica(case.settings)
    world, again = case.world.anew(), case.world.anew()
    watch(one, world.sequences)
    stepped = step_by_step(one, world)
    watched = watch(other, again.sequences)
    jumped = jump(other, again)
    if stepped == jumped:
        return
    at = next(
        (index for index, (a, b) in enumerate(zip(stepped, jumped, strict=False)) if a != b),
        min(len(stepped), len(jumped)),
    )
    raise PolicyFault(_tell(stepped, jumped, at, case, watched, is_asked_every_step(other.queue)))


def _tell(stepped: Log, jumped: Log, at: int, case: Case, watched: Watched, every_step: bool) -> str:
    asked, unasked = stepped[at : at + 1], jumped[at : at + 1]
    at_ps = min(entry[1] for entry in (*asked, *unasked))
    lines = [
        f"asked before every step the queue {_what(asked)}; asked only when it said, it {_what(unasked)}",
    ]
    if every_step:
        lines.append("made twice alike it decides differently: does it draw at random, or keep state in its class?")
        return "\n".join(lines)
    said = watched.last("holds_for", at_ps + 1)
    if said is not None:
        lines.append(
            f"`holds_for` had promised at {seconds(said.at_ps)} that nothing would change for {said.value} steps"
        )
    since_ps = said.at_ps if said is not None else 0
    promised = watched.last("arrivals_matter", at_ps + 1)
    arrived = [s.handle for when, s, _ in case.world.arrivals if since_ps <= when <= at_ps]
    if promised is not None and not promised.value and arrived:
        lines.append(
            f"`arrivals_matter` had promised at {seconds(promised.at_ps)} that an arrival changes nothing; request"
            f" {arrived[-1]} arrived at {seconds(case.world.arrivals[arrived[-1]][0])}"
        )
    elif (wakes := watched.last("wakes_at_ps", at_ps + 1)) is not None and wakes.value is None:
        lines.append("`wakes_at_ps` had said that time alone changes nothing")
    if len(lines) == 1:
        lines.append("`decoded` is told of several steps at once: does it count them all?")
    return "\n".join(lines)


def _what(entries: list[Entry]) -> str:
    if not entries:
        return "did nothing more"
    kind, at_ps, who = entries[0][:3]
    return f"{_VERBS.get(str(kind), f'{kind} {{}}').format(who)} at {seconds(at_ps)}"
