"""What an adapter costs on the base model, by the device's figures: slots of the KV pool, and time to load."""

from dataclasses import dataclass, field

from lorrery.scheduler.core.adapter_loads import Tier
from lorrery.scheduler.core.sequence import Adapter
from lorrery.worker.device.architecture import Model
from lorrery.worker.device.lora import Targets, adapter_bytes, load_ps
from lorrery.worker.device.memory import kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class AdapterCosts:
    """Costs of the adapters of one base model.

    Attributes:
        model: the base model.
        target_modules: the projections that adapters change: "qkvo" or "all-linear".
        host_gb_per_second: rate from pinned host memory.
        disk_gb_per_second: rate from disk.

    Raises:
        CatalogueError: by every method, if such adapters of this model are not modelled.
    """

    model: Model
    target_modules: Targets
    host_gb_per_second: float
    disk_gb_per_second: float
    _load_ps: dict[tuple[int, bool], int] = field(default_factory=dict, repr=False, compare=False)
    """By rank, and whether from disk: placements ask for it at each request, of each worker that they consider."""

    def size_bytes(self, rank: int) -> int:
        """Return the size of an adapter."""
        return adapter_bytes(self.model, rank, self.target_modules)

    def exact_slots(self, rank: int) -> int:
        """Return the number of tokens whose KV takes as much memory as the adapter, rounded up."""
        return -(-self.size_bytes(rank) // kv_bytes_per_token(self.model))

    def load_ps(self, adapter: Adapter, tier: Tier) -> int:
        """Return how long a load from a tier takes, in picoseconds."""
        from_disk = tier is Tier.DISK
        known = self._load_ps.get((adapter.rank, from_disk))
        if known is None:
            size, disk = self.size_bytes(adapter.rank), self.disk_gb_per_second if from_disk else None
            known = load_ps(self.model, size, self.host_gb_per_second, disk)
            self._load_ps[adapter.rank, from_disk] = known
        return known
