"""The rules by which a worker keeps adapters."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """Rules of residency.

    Attributes:
        max_loras: places on the GPU; None: see `max_slots`.
        max_slots: if `max_loras` is None: pool slots for all adapters on the GPU together; a single one may exceed it.
            None: bounded only by the sequences that use them, as in strict S-LoRA, which keeps no others.
        max_cpu_loras: places in host memory; None: all that were ever read.
        max_concurrent_loads: loads that run at once.
        max_load_attempts: how often a load is tried.
        blocking: the prefill step waits for the load, instead of the sequence in the queue.
        keep_unused: keep unused adapters until their place is needed.
        keep_unloaded: likewise those that no new request can name.
    """

    max_loras: int | None = None
    max_slots: int | None = None
    max_cpu_loras: int | None = None
    max_concurrent_loads: int = 4
    max_load_attempts: int = 3
    blocking: bool = False
    keep_unused: bool = True
    keep_unloaded: bool = False


DEFAULT = AdapterOptions()
