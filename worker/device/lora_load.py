"""How large a LoRA adapter is, and how long a GPU takes to load it.

For a projection (in, out) an adapter of rank r has A: in x r and B: r x out, in 16 bits:

    bytes = 2 r L sum(in + out)                        over the adapted projections of the L layers
    load  = t_request + n_copies * 10 us + bytes / (host link bytes/s)               from host memory
    load += bytes / (disk bytes/s)                                                   from disk

with one copy per layer. Sizes agree with S-LoRA's (7B, rank 8, q k v o: 16 MiB); 10 us a copy and 0.3 ms a request are
the usual costs of asynchronous copies (Punica's paper reports about 2 ms for a 7B adapter of rank 16 over PCIe 4.0).
"""

from worker.device.catalogue import Model

BYTES_PER_WEIGHT = 2
REQUEST_SECONDS = 300e-6
COPY_SECONDS = 10e-6
PS_PER_SECOND = 1e12


def adapter_bytes(model: Model, rank: int, target_modules: str) -> int:
    """Return the size of an adapter.

    Args:
        model: what it adapts.
        rank: of every projection.
        target_modules: "qkvo", or "all-linear" for the FFN's projections too.

    Raises:
        KeyError: no such set of projections.
    """
    queries, keys = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    attention = 2 * (model.hidden + queries) + 2 * (model.hidden + keys)
    ffn = (2 + model.gated) * (model.hidden + model.ffn)
    in_and_out = {"qkvo": attention, "all-linear": attention + ffn}[target_modules]
    return BYTES_PER_WEIGHT * rank * model.num_layers * in_and_out


def load_ps(model: Model, size_bytes: int, host_gb_per_second: float, disk_gb_per_second: float | None) -> int:
    """Return how long a load takes, in picoseconds.

    Args:
        model: gives the number of copies.
        size_bytes: of the adapter.
        host_gb_per_second: usable rate from pinned host memory: 24 over PCIe 4.0, 50 over 5.0.
        disk_gb_per_second: where it comes from disk; None: it is in host memory.
    """
    seconds = REQUEST_SECONDS + model.num_layers * COPY_SECONDS + size_bytes / (host_gb_per_second * 1e9)
    if disk_gb_per_second is not None:
        seconds += size_bytes / (disk_gb_per_second * 1e9)
    return round(seconds * PS_PER_SECOND)
