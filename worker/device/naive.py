"""The back-of-the-envelope roofline: the larger of arithmetic and memory traffic, at the data sheet's peaks.

    compute = (2 P n + 2 V h s + 4 L q d sum_i c_i (p_i + c_i / 2) + lora) / (T F)
    memory  = (w P' + 2 V h + sum_i (p_i + c_i) * KV bytes per token + lora) / (T B)
    step    = max(compute, memory)

P are the layers' weights that a token uses, P' those that are read, n = sum c_i tokens, s sequences that get a token.
No constants, no kernels, no CPU: a lower bound that real steps miss by 10 % where they are large, and by a factor where
they are small. It serves as a baseline for comparison.

Integer arithmetic: compute and memory are sums of coefficients each rounded once: for (n, s), for a pair of tokens in
attention, for a token of KV cache, and for a batch's adapters.
"""

from functools import lru_cache

from lorrery.vocabulary.units import NEVER, PS_PER_SECOND
from lorrery.worker.device.batch import NO_LORA, Batch, LoraWork, Segment, StepCost
from lorrery.worker.device.catalogue.architecture import check_split
from lorrery.worker.device.deployment import Deployment, kv_bytes_per_token
from lorrery.worker.device.kernels import compute_type
from lorrery.worker.device.lora import LoraCost


class NaiveRoofline:
    """The formulas above for one deployment.

    Raises:
        CatalogueError: the degree does not divide the model, or its adapters are not modelled.
    """

    name = "naive-roofline"
    reads_decode_lengths = False

    def __init__(self, deployment: Deployment) -> None:
        model, degree, precision = deployment.model, deployment.tensor_parallel, deployment.precision
        check_split(model, degree, deployment.expert_parallel)
        self._model, self._precision = model, precision
        tflops, _ = compute_type(deployment.gpu, precision.weight_type)
        self._flops_per_second = tflops * 1e12 * degree
        self._bytes_per_second = deployment.gpu.gb_per_second * 1e9 * degree
        self._kv_token_bytes = kv_bytes_per_token(model, degree, precision)
        self._pair_flops = 4 * model.full_layers * model.num_heads * model.head_size
        self._kv_token_ps = _ps(self._kv_token_bytes / self._bytes_per_second)
        self._half_pair_ps = _ps(self._pair_flops / self._flops_per_second / 2)
        self._lora = LoraCost(
            deployment.gpu, model, degree, deployment.lora, expert_parallel=deployment.expert_parallel
        )
        self._degree = degree
        self._size_ps = lru_cache(maxsize=4096)(self._compute_size_ps)

    def step_ps(self, batch: Batch) -> int:
        """Return the step's duration; 0 if the batch is empty."""
        return max(self._both_ps(batch))

    def step_cost(self, batch: Batch) -> StepCost:
        """Return the step's duration as its bound, compute or memory; its work is exact."""
        compute_ps, memory_ps = self._both_ps(batch)
        num_tokens, num_samples, half_pairs, kv_tokens = _sizes(batch)
        flops, num_bytes = self._work(num_tokens, num_samples) if num_tokens else (0.0, 0.0)
        _, lora_flops, lora_bytes = self._lora.step(batch.lora)
        return StepCost(
            compute=compute_ps if compute_ps > memory_ps else 0,
            memory=0 if compute_ps > memory_ps else memory_ps,
            flops=(flops + half_pairs / 2 * self._pair_flops) / self._degree + lora_flops,
            num_bytes=(num_bytes + kv_tokens * self._kv_token_bytes) / self._degree + lora_bytes,
        )

    def decode_segment(
        self,
        num_decodes: int,
        kv_tokens: int,
        max_kv_tokens: int,
        lora: LoraWork = NO_LORA,
        *,
        num_held: int = 0,
        longest_grows: bool = True,
    ) -> Segment | None:
        """Return the times of consecutive decode steps, to the last before the bound changes."""
        del longest_grows
        compute_ps, memory_ps = self._both_ps(Batch((), num_decodes, kv_tokens, max_kv_tokens, lora))
        num_growing = num_decodes - num_held
        compute_slope = num_growing * 2 * self._half_pair_ps
        memory_slope = num_growing * self._kv_token_ps
        if compute_ps > memory_ps or (compute_ps == memory_ps and compute_slope >= memory_slope):
            return _until_overtaken(compute_ps, compute_slope, memory_ps, memory_slope)
        return _until_overtaken(memory_ps, memory_slope, compute_ps, compute_slope)

    def linear_seconds(self, num_tokens: int) -> float:
        """Return the time of all layers without attention."""
        flops, num_bytes = self._work(num_tokens, 0)
        return max(flops / self._flops_per_second, num_bytes / self._bytes_per_second)

    def _both_ps(self, batch: Batch) -> tuple[int, int]:
        """Return the times of arithmetic and of memory traffic."""
        num_tokens, num_samples, half_pairs, kv_tokens = _sizes(batch)
        if not num_tokens:
            return 0, 0
        compute_ps, memory_ps = self._size_ps(num_tokens, num_samples)
        lora_compute_ps, lora_memory_ps = self._lora_ps(batch.lora)
        return (
            compute_ps + half_pairs * self._half_pair_ps + lora_compute_ps,
            memory_ps + kv_tokens * self._kv_token_ps + lora_memory_ps,
        )

    def _work(self, num_tokens: int, num_samples: int) -> tuple[float, float]:
        """Return (FLOP, bytes) of the part that depends on the counts of tokens and samples alone."""
        model = self._model
        flops = 2.0 * model.active_layer_parameters * num_tokens + 2.0 * model.head_parameters * num_samples
        read: float = model.layer_parameters
        others = 0
        if model.num_experts > 1:
            per_expert = model.num_layers * model.expert_parameters
            others = model.layer_parameters - model.num_experts * per_expert
            read -= (model.num_experts - model.distinct_experts(num_tokens)) * per_expert
        weights = self._precision
        num_bytes = weights.expert_bytes * read + (weights.weight_bytes - weights.expert_bytes) * others
        return flops, num_bytes + 2.0 * model.head_parameters if num_samples else num_bytes

    def _compute_size_ps(self, num_tokens: int, num_samples: int) -> tuple[int, int]:
        flops, num_bytes = self._work(num_tokens, num_samples)
        return _ps(flops / self._flops_per_second), _ps(num_bytes / self._bytes_per_second)

    def _lora_ps(self, lora: LoraWork) -> tuple[int, int]:
        if not lora.num_adapters:
            return 0, 0
        _, flops, num_bytes = self._lora.step(lora)  # of one GPU
        return (
            _ps(flops * self._degree / self._flops_per_second),
            _ps(num_bytes * self._degree / self._bytes_per_second),
        )


def _sizes(batch: Batch) -> tuple[int, int, int, int]:
    """Return tokens, samples, half pairs of tokens in attention, and tokens of KV cache read or written."""
    num_tokens = num_samples = batch.num_decodes
    half_pairs = 2 * batch.decode_kv_tokens + batch.num_decodes
    kv_tokens = batch.decode_kv_tokens + batch.num_decodes
    for chunk in batch.prefills:
        num_tokens += chunk.new_tokens
        num_samples += chunk.samples
        half_pairs += chunk.new_tokens * (2 * chunk.past_tokens + chunk.new_tokens)
        kv_tokens += chunk.past_tokens + chunk.new_tokens
    return num_tokens, num_samples, half_pairs, kv_tokens


def _ps(seconds: float) -> int:
    return round(seconds * PS_PER_SECOND)


def _until_overtaken(base_ps: int, slope_ps: int, other_ps: int, other_slope: int) -> Segment:
    """Return the segment of the larger of two lines, to the last step at which it is."""
    gain = other_slope - slope_ps
    return Segment(base_ps, slope_ps, (base_ps - other_ps) // gain + 1 if gain > 0 else NEVER)
