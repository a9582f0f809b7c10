"""What observers of a simulation receive: spans of steps, each of one plan on one worker."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from lorrery.scheduler.core.plan import Plan
from lorrery.simulator.request import SimulatedRequest


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


class Observer(Protocol):
    """Receives what runs, in order of time for each worker.

    An observer whose attribute `reads_prompts` is false uses neither the prefills nor the waiting count of spans: then
    several chunks of one long prompt may run in one jump, each still reported as its own span.
    """

    def begin(self, start_ps: int) -> None:
        """Receive the start of the run, the origin of its times."""
        ...

    def ran(self, span: StepSpan) -> None:
        """Receive steps that have ended."""
        ...

    def left(self, worker: str, handle: int) -> None:
        """Receive a sequence that left a worker other than at the end of a step that finished it."""
        ...

    def requeued(self, worker: str, request: SimulatedRequest) -> None:
        """Receive a sequence that lost its place in a worker's batch and waits again."""
        ...

    def lost(self, worker: str) -> None:
        """Receive the loss of a worker; its sequences were reported before."""
        ...
