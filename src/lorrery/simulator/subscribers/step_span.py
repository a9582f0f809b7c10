"""The facts that only a simulation has: spans of steps, each of one plan on one worker, and the start of the run.

A subscriber with an attribute `reads_prompts` that is false uses neither the prefills nor the waiting count of spans;
if that goes for all, several chunks of one long prompt may run in one jump, each still told as its own span.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lorrery.scheduler.core.plan import Plan


@dataclass(slots=True)
class StepSpan:
    """Consecutive steps of one plan; only the first has the plan's prefills.

    Attributes:
        worker: that ran them.
        plan: of these steps.
        start_ps: when the first began, after any wait for adapters.
        num_steps: number of steps.
        first_ps: duration of the first.
        slope_ps: increase of the duration from each step to the next.
        end_ps: when the last ended.
        num_decodes: sequences that get a token in each step, without the first step's newcomers.
        kv_tokens: in the cache before the first, of all sequences.
        num_waiting: sequences in the worker's queue.
        newcomers: sequences whose prompt ended with the first step and that go on to decode.
        silent: sequences that end with the last step and get no token from it.
        gone: sequences whose clients left during the last step.
    """

    worker: str
    plan: Plan
    start_ps: int
    num_steps: int
    first_ps: int
    slope_ps: int
    end_ps: int
    num_decodes: int
    kv_tokens: int
    num_waiting: int
    newcomers: Sequence[int] = ()
    silent: Collection[int] = ()
    gone: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class RunBegan:
    """The part of a run that counts begins; the warm-up is over."""
