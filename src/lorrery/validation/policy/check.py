"""Checks a policy as `lorrery validate policy` does: interface, any order of events, and jumps against steps."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from lorrery.scheduler.core.checked.base import SequenceError
from lorrery.scheduler.core.placements.table import Placement
from lorrery.scheduler.core.queues.base import is_asked_every_step
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.messages import WorkerHello
from lorrery.scheduler.plugins import in_words
from lorrery.scheduler.replicas import ReplicaFactory
from lorrery.service.settings.cluster import Settings
from lorrery.validation.policy.cases import Case, Cases
from lorrery.validation.policy.fault import PolicyFault
from lorrery.validation.policy.jumps import check_jumps
from lorrery.validation.policy.machine import Machine
from lorrery.validation.policy.returns import NeverReturnedError, until_stuck

_POOL_TOKENS = 1_000
NUM_ORDERS = 3
"""Orders in which each case is played, before it is run by steps and by jumps."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a check.

    Attributes:
        num_cases: that were run, each in drawn order and by steps against jumps.
        every_step: whether the policy must be queried before every step.
        case: the case that failed; None: all passed.
        fault: description of the failure, in lines.
    """

    num_cases: int
    every_step: bool
    case: Case | None = None
    fault: str = ""


def check_policy(
    settings: Settings, *, seed: int, seconds: float, watch: Callable[[int], None] = lambda number: None
) -> Verdict:
    """Try a policy until a fault is found or the time is up.

    Args:
        settings: name the policy, its options and its environment.
        seed: of all draws.
        seconds: wall-clock limit; at least one case is run.
        watch: called with each case's number before it runs.

    Raises:
        SettingsError: no such policy, or not a policy.
    """
    factory = ReplicaFactory(settings)
    hello = WorkerHello(
        "worker-0", settings.worker.gpu, settings.model, 1, _POOL_TOKENS, "roofline", needs_prompts=False
    )
    base = replace(factory.replica_settings(hello), prefix_cache="none")

    def make_replica(chosen: ReplicaSettings) -> Replica:
        return factory.replica(chosen)

    cases = Cases(seed, base, dict(settings.scheduler), make_replica)
    every_step = is_asked_every_step(factory.replica(base).queue)
    end = time.monotonic() + seconds
    number = 0
    while not number or time.monotonic() < end:
        watch(number)
        case = cases.draw(number)
        number += 1
        fault = _fault_in(case, cases)
        if fault is not None:
            return Verdict(number, every_step, case, fault)
    return Verdict(number, every_step)


def placements_of(settings: Settings) -> Callable[[np.random.Generator], Placement]:
    """Return the constructor of the placement in these settings, which takes a generator.

    Raises:
        SettingsError: no such placement, or not a placement.
    """
    factory = ReplicaFactory(settings)
    factory.placement()  # raises now if the class is not a placement
    return factory.placement


def _fault_in(case: Case, cases: Cases) -> str | None:
    def play() -> None:
        for order in range(NUM_ORDERS):
            Machine(case, cases, order).play()
        check_jumps(case, cases)

    try:
        until_stuck(play)
    except (PolicyFault, NeverReturnedError) as fault:
        return str(fault)
    except SequenceError as error:
        return f"raised {in_words(error.error)}"
    except KeyboardInterrupt:  # of a person, where this is called from Python
        raise
    except BaseException as error:  # raised by the policy, or by the core that cannot go on after it
        return f"raised {in_words(error)}"
    return None
