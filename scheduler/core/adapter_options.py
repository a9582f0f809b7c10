"""The rules by which a worker keeps adapters."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """Rules of residency.

    Attributes:
        max_loras: places on the GPU; None: see `max_slots`.
        max_slots: where `max_loras` is None: pool slots that adapters on the GPU may have together; one alone may have
            more. None: only the sequences that use them bound them, as in strict S-LoRA, which keeps no others.
        max_cpu_loras: places in host memory; None: all that were ever read.
        max_concurrent_loads: loads under way at once.
        max_load_attempts: how often a load is tried.
        blocking: let the prefill step wait for the load, not the sequence in the queue.
        keep_unused: keep what nobody uses until its place is needed.
    """

    max_loras: int | None = None
    max_slots: int | None = None
    max_cpu_loras: int | None = None
    max_concurrent_loads: int = 4
    max_load_attempts: int = 3
    blocking: bool = False
    keep_unused: bool = True


DEFAULT = AdapterOptions()
