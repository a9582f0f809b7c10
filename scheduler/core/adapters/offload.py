"""Evicts unused adapters as S-LoRA does, on a GPU that keeps only adapters in use.

It does so when decoding sequences have ended or were cancelled, and after a prefill only if the batch is empty; twice
if the batch became empty (`tests/golden/router_loop.jsonl`).
"""

from lorrery.scheduler.core.adapters.residency import Residency
from lorrery.scheduler.core.checked.base import PolicyErrors
from lorrery.scheduler.core.facts import AdaptersKept, Event
from lorrery.scheduler.core.protocols import Batching
from lorrery.scheduler.core.running import Running


class Offload:
    """See the module; it also calls the way to batch when the batch has become empty.

    Args:
        running: the batch.
        adapters: adapters on the GPU; None: they are not used.
        batching: the way to batch.
        errors: receives what it raises.
    """

    def __init__(self, running: Running, adapters: Residency | None, batching: Batching, errors: PolicyErrors) -> None:
        self._running = running
        self._adapters = None if adapters is None or adapters.options.keep_unused else adapters
        self._batching = batching
        self._errors = errors

    def after_decode(self, at_ps: int) -> list[Event]:
        """Handle sequences that have left after decoding."""
        events: list[Event] = []
        if self._adapters is not None:
            events += self._keep(tuple(sorted(self._running.adapter_keys)), at_ps)
        if not self._running.num:
            events += self.emptied(at_ps)
        return events

    def emptied(self, at_ps: int) -> list[Event]:
        """Handle the departure of the last sequence."""
        try:
            self._batching.emptied(at_ps)
        except Exception as error:
            self._errors.error = error
        return self._keep((), at_ps)

    def _keep(self, adapter_keys: tuple[str, ...], at_ps: int) -> list[Event]:
        if self._adapters is None:
            return []
        self._adapters.keep_only(adapter_keys, at_ps)
        return [AdaptersKept(adapter_keys)]
