"""What observers of a simulation are told: spans of steps, each of one plan on one worker."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from lorrery.scheduler.core.plan import Plan
from lorrery.simulator.request import SimulatedRequest


@dataclass(slots=True)
class StepSpan:
    """Consecutive steps of one plan; only the first has the plan's prefills.

    Attributes:
        worker: who ran them.
        plan: what they belong to.
        start_ps: when the first began, after any wait for adapters.
        num_steps: how many.
        first_ps: how long the first took.
        slope_ps: how much longer each further one took than the one before.
        end_ps: when the last ended.
        num_decodes: sequences that each step gives a token, newcomers of the first left out.
        kv_tokens: in the cache before the first, of all sequences.
        num_waiting: sequences in the worker's queue.
        newcomers: whose prompt ended with the first step and that go on to decode.
        silent: sequences that end with the last step and get no token from it.
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


class Observer(Protocol):
    """Told of what runs, in order of time for each worker.

    One with an attribute `reads_prompts` that is false does not read of spans what is computed of prompts, nor who
    waits: then pieces of one long prompt may run in one go, each still told of by itself.
    """

    def begin(self, start_ps: int) -> None:
        """Take note that the run begins; its times count from here."""
        ...

    def ran(self, span: StepSpan) -> None:
        """Take note of steps that have ended."""
        ...

    def left(self, worker: str, handle: int) -> None:
        """Take note that a sequence left a worker other than by a step that ended it."""
        ...

    def requeued(self, worker: str, request: SimulatedRequest) -> None:
        """Take note that a sequence lost its place in a worker's batch and waits again."""
        ...

    def lost(self, worker: str) -> None:
        """Take note that a worker has lost all that it had; its sequences have been told of before."""
        ...
