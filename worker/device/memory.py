"""What fits in a GPU's memory: weights, KV cache, adapters.

    usable    = u * memory - 2 GB per GPU          u = 0.9, engines' usual default; activations and graphs
    KV tokens = (usable - weights - adapters) / (2 L kv d bytes)          over all GPUs of a replica

Figures are over all GPUs of one replica; an adapter's bytes are counted once.
"""

from fractions import Fraction

from lorrery.worker.device.architecture import Model, Precision, check_split, held_experts
from lorrery.worker.device.errors import CatalogueError
from lorrery.worker.device.hardware import Gpu

USED = Fraction(9, 10)
"""Share of the memory that engines use unless told otherwise."""
_ACTIVATION_BYTES = 2 * 10**9

SIXTEEN_BITS = Precision()


def weight_bytes(model: Model, precision: Precision = SIXTEEN_BITS, expert_parallel: int = 1) -> int:
    """Return the bytes of a model's weights; the embedding and the head are in 16 bits whatever the precision.

    Where groups of GPUs hold unequal numbers of experts, every group is counted as the fullest: the KV cache is the
    same size on all.
    """
    spare = held_experts(model.num_experts, expert_parallel) * expert_parallel - model.num_experts
    parameters = model.layer_parameters + model.num_layers * spare * model.expert_parameters
    return round(parameters * precision.weight_bytes) + 2 * model.embedding_parameters


def kv_bytes_per_token(model: Model, tensor_parallel: int = 1, precision: Precision = SIXTEEN_BITS) -> int:
    """Return the KV cache bytes of one token over all GPUs: keys and values.

    With more GPUs than KV heads each GPU holds a whole head, so heads are stored more than once.
    """
    heads_held = max(model.num_kv_heads, tensor_parallel)
    return 2 * model.num_layers * heads_held * model.head_size * precision.kv_bytes


def kv_pool_tokens(
    gpu: Gpu,
    model: Model,
    tensor_parallel: int = 1,
    precision: Precision = SIXTEEN_BITS,
    adapter_bytes: int = 0,
    used: Fraction = USED,
    expert_parallel: int = 1,
) -> int:
    """Return how many tokens of KV cache fit beside the weights.

    Args:
        gpu: each of the replica's GPUs.
        model: what it serves.
        tensor_parallel: number of GPUs.
        precision: of weights and cache.
        adapter_bytes: memory set aside for adapters.
        used: share of the memory that may be used.
        expert_parallel: groups of GPUs among which experts are dealt.

    Raises:
        CatalogueError: the weights do not fit (the message shows the sum), or the degree does not divide the model.
    """
    check_split(model, tensor_parallel, expert_parallel)
    weights = weight_bytes(model, precision, expert_parallel)
    memory = round(gpu.memory_gb * 10**9) * tensor_parallel
    left = memory * used.numerator // used.denominator - _ACTIVATION_BYTES * tensor_parallel - weights - adapter_bytes
    tokens = left // kv_bytes_per_token(model, tensor_parallel, precision)
    if tokens < 1:
        adapters = f" - {adapter_bytes / 1e9:.1f} GB of adapters" if adapter_bytes else ""
        raise CatalogueError(
            f"{model.name} does not fit on {tensor_parallel} x {gpu.name}:"
            f" {float(used):g} x {gpu.memory_gb:g} GB x {tensor_parallel} - 2 GB x {tensor_parallel}"
            f" - {weights / 1e9:.1f} GB of weights{adapters} = {left / 1e9:.1f} GB for the KV cache"
        )
    return tokens
