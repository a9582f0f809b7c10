"""Step time from first principles: the duration of every kernel follows from its arithmetic and its memory traffic.

Fitted to published kernel measurements (`data/gpus.toml`). The kernels' formulas are in `kernels`, `attention` and
`lora`; put together, for L layers:

    gpu step = L (linear + attention + 2 allreduce + t_layer) + head + lora
    step     = max(gpu step, L (t_launch + t_lora if any adapter)) + c0 + c1 * sampling sequences
               + c_prefill if there is any prefill + c_token * prompt tokens
             and at least t_event / API servers * sampling sequences: the front end sends each its token

Integer arithmetic: four coefficients are rounded to picoseconds once: the part that depends on (n, samples) alone, the
time per decode KV token, the time per half token of prefill tile length, and a batch's adapters.
"""

from functools import lru_cache
from typing import Final

from lorrery.vocabulary.units import NEVER, PS_PER_SECOND, picoseconds
from lorrery.worker.device.attention import AttentionKernels, Heads
from lorrery.worker.device.batch import NO_LORA, Batch, LoraWork, Segment, StepCost
from lorrery.worker.device.catalogue.architecture import Shard
from lorrery.worker.device.deployment import EAGER_LAUNCH_US, EAGER_LORA_LAUNCH_US, Deployment, eager_launches
from lorrery.worker.device.kernels import LinearKernels
from lorrery.worker.device.lora import FLOPS_SHARE, LoraCost
from lorrery.worker.device.moe import expert_kernels

_PS_PER_MS: Final = 10**9


class Roofline:
    """The formulas above for one deployment.

    Raises:
        CatalogueError: the degree does not divide the model, or its adapters are not modelled.
    """

    name = "roofline"

    def __init__(self, deployment: Deployment) -> None:
        gpu, model, degree, fit = deployment.gpu, deployment.model, deployment.tensor_parallel, deployment.fit
        engine, precision = deployment.engine, deployment.precision
        self._layers, self._head = model.num_layers, engine.head
        link, groups = deployment.link, deployment.expert_parallel
        shard = Shard.of(model, degree, groups)
        experts = expert_kernels(deployment)
        self._linear = LinearKernels(gpu, fit, link, model, degree, shard, precision, engine, experts)
        heads = Heads.of(model, shard, precision)
        self._attention = AttentionKernels(gpu, fit, heads, model.num_layers, engine, model.window_layers, model.window)
        self.reads_decode_lengths = self._attention.reads_decode_lengths
        self._lora, self._prefill_lora = (
            LoraCost(gpu, model, degree, deployment.lora, share, link=link, expert_parallel=groups)
            for share in (FLOPS_SHARE, engine.prefill_lora_flops)
        )
        launch_ms, lora_launch_ms = engine.launch_ms, engine.lora_launch_ms
        if deployment.enforce_eager and not launch_ms:  # engines of 2023 know no graphs
            launch_ms = eager_launches(model, degree) * EAGER_LAUNCH_US / 1000
            lora_launch_ms = self._lora.num_launches * EAGER_LORA_LAUNCH_US / 1000
        self._launch_ps = round(model.num_layers * launch_ms * _PS_PER_MS)
        self._layer_seconds = engine.layer_us * 1e-6
        self._lora_launch_ps = round(model.num_layers * lora_launch_ms * _PS_PER_MS)
        servers = deployment.api_servers
        self._event_ps = round(engine.event_ms * _PS_PER_MS / servers) if servers else 0
        self._host_step_ps = round(engine.step_ms * _PS_PER_MS)
        self._host_sequence_ps = round(engine.sequence_ms * _PS_PER_MS)
        self._host_prefill_ps = round(engine.prefill_ms * _PS_PER_MS)
        self._host_token_ps = round(engine.prefill_token_ms * _PS_PER_MS)
        # The same few sizes recur step after step.
        self._size_ps = lru_cache(maxsize=4096)(self._compute_size_ps)
        self._size_cost = lru_cache(maxsize=4096)(self._compute_size_cost)
        self._decodes_ps = lru_cache(maxsize=4096)(self._compute_decodes_ps)
        self._token_ps, self._longest_ps = self._attention.kv_token_ps, self._attention.longest_token_ps

    def step_ps(self, batch: Batch) -> int:
        """Return the step's duration; only the host's part if the batch is empty."""
        num_tokens, num_samples = _sizes(batch)
        host_ps = self._host_ps(batch, num_tokens, num_samples)
        floor_ps = max(self._floor_ps(batch.lora), self._event_ps * num_samples - host_ps)
        return max(self._gpu_ps(batch, num_tokens, num_samples), floor_ps) + host_ps

    def piece_ends_ps(self, first: Batch, max_steps: int, duration_ps: int | None) -> list[int]:
        """Return the end times of steps that compute one prompt, chunk by chunk; see `StepTimeModel`.

        Only attention differs between the steps.
        """
        num_tokens, num_samples = _sizes(first)
        host_ps = self._host_ps(first, num_tokens, num_samples)
        floor_ps = max(self._floor_ps(first.lora), self._event_ps * num_samples - host_ps)
        alike_ps = self._size_ps(num_tokens, num_samples)
        if first.lora.num_adapters:
            alike_ps += self._lora_ps(first.lora, True)
        attention, num_decodes = self._attention, first.num_decodes
        grown = 1 if num_decodes else 0
        kv_tokens, longest = first.decode_kv_tokens, first.max_decode_kv_tokens
        piece = first.prefills[0]
        new_tokens, past_tokens = piece.new_tokens, piece.past_tokens
        ends_ps: list[int] = []
        end_ps = 0
        while len(ends_ps) < max_steps and (duration_ps is None or not ends_ps or end_ps < duration_ps):
            gpu_ps = alike_ps + attention.piece_ps(new_tokens, past_tokens, num_decodes, kv_tokens, longest)
            end_ps += max(gpu_ps, floor_ps) + host_ps
            ends_ps.append(end_ps)
            past_tokens += new_tokens
            kv_tokens += num_decodes
            longest += grown
        return ends_ps

    def gpu_step_ps(self, batch: Batch) -> int:
        """Return the GPU's busy time in the step; 0 if the batch is empty."""
        return self._gpu_ps(batch, *_sizes(batch))

    def _floor_ps(self, lora: LoraWork) -> int:
        """Return the CPU's time to launch a step's kernels."""
        return self._launch_ps + self._lora_launch_ps if lora.num_adapters else self._launch_ps

    def _gpu_ps(self, batch: Batch, num_tokens: int, num_samples: int) -> int:
        if not num_tokens:
            return 0
        if batch.prefills:
            gpu_ps = self._size_ps(num_tokens, num_samples) + self._attention.batch_ps(batch)
        else:
            lengths_ps = batch.decode_kv_tokens * self._token_ps + batch.max_decode_kv_tokens * self._longest_ps
            gpu_ps = self._decodes_ps(num_tokens) + lengths_ps
        return gpu_ps + self._lora_ps(batch.lora, bool(batch.prefills)) if batch.lora.num_adapters else gpu_ps

    def step_cost(self, batch: Batch) -> StepCost:
        """Return the step's duration by part; waiting for the CPU to launch kernels counts as host time."""
        num_tokens, num_samples = _sizes(batch)
        host_ps = self._host_ps(batch, num_tokens, num_samples)
        if not num_tokens:
            return StepCost(host=max(0, self._launch_ps) + host_ps)
        sizes = self._size_cost(num_tokens, num_samples)
        attention_ps = self._attention.batch_ps(batch)
        lora_ps = self._lora_ps(batch.lora, bool(batch.prefills))
        gpu_ps = sizes.total_ps + attention_ps + lora_ps
        attention_flops, attention_bytes = self._attention.work(batch)
        _, lora_flops, lora_bytes = self._lora.step(batch.lora)
        return StepCost(
            compute=sizes.compute,
            memory=sizes.memory,
            kernel=sizes.kernel,
            attention=attention_ps,
            all_reduce=sizes.all_reduce,
            lora=lora_ps,
            host=max(gpu_ps, self._floor_ps(batch.lora), self._event_ps * num_samples - host_ps) - gpu_ps + host_ps,
            flops=sizes.flops + attention_flops + lora_flops,
            num_bytes=sizes.num_bytes + attention_bytes + lora_bytes,
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
        """Return the times of consecutive decode steps, to the last that kernel launches bound if they do the first."""
        if not num_decodes:
            return Segment(self._launch_ps + self._host_step_ps, 0)
        token_ps, longest_ps = self._token_ps, self._longest_ps
        gpu_ps = self._decodes_ps(num_decodes) + kv_tokens * token_ps + max_kv_tokens * longest_ps
        if lora.num_adapters:
            gpu_ps += self._lora_ps(lora, False)
        slope_ps = (num_decodes - num_held) * token_ps + (longest_ps if longest_grows else 0)
        host_ps = self._host_step_ps + self._host_sequence_ps * num_decodes
        floor_ps = max(self._floor_ps(lora), self._event_ps * num_decodes - host_ps)
        if gpu_ps >= floor_ps:
            return Segment(gpu_ps + host_ps, slope_ps)
        return Segment(floor_ps + host_ps, 0, (floor_ps - gpu_ps) // slope_ps + 1 if slope_ps else NEVER)

    def linear_seconds(self, num_tokens: int) -> float:
        """Return the time of all layers without attention and all-reduce."""
        return self._layers * self._linear.layer(num_tokens).seconds

    def attention_seconds(self, batch: Batch) -> float:
        """Return the time of all layers' attention."""
        return self._attention.batch_ps(batch) / PS_PER_SECOND

    def _host_ps(self, batch: Batch, num_tokens: int, num_samples: int) -> int:
        host_ps = self._host_step_ps + self._host_sequence_ps * num_samples
        if not batch.prefills:
            return host_ps
        return host_ps + self._host_prefill_ps + self._host_token_ps * (num_tokens - batch.num_decodes)

    def _compute_size_ps(self, num_tokens: int, num_samples: int) -> int:
        """Return the time that depends on the counts of tokens and samples alone: linear layers, all-reduces, head."""
        layer = self._linear.layer(num_tokens).seconds + 2 * self._linear.all_reduce_seconds(num_tokens)
        layer += self._layer_seconds
        head = self._linear.head(num_samples).seconds if self._head else 0.0
        return picoseconds(self._layers * layer + head)

    def _compute_decodes_ps(self, num_decodes: int) -> int:
        """Return the time of a step of decodes alone, without the part that depends on their lengths."""
        return self._size_ps(num_decodes, num_decodes) + self._attention.decode_ps(num_decodes, 0, 0)

    def _compute_size_cost(self, num_tokens: int, num_samples: int) -> StepCost:
        """Return `_size_ps` by part; the largest part takes the rounding error."""
        times = self._linear.head(num_samples if self._head else 0)
        times.add(self._linear.layer(num_tokens), self._layers)
        all_reduce_ps = picoseconds(2 * self._layers * self._linear.all_reduce_seconds(num_tokens))
        kernel_ps = picoseconds(times.constant + self._layers * self._layer_seconds)
        both_ps = self._size_ps(num_tokens, num_samples) - all_reduce_ps - kernel_ps
        compute_ps = min(picoseconds(times.compute), both_ps)
        return StepCost(
            compute=compute_ps,
            memory=both_ps - compute_ps,
            kernel=kernel_ps,
            all_reduce=all_reduce_ps,
            flops=times.flops,
            num_bytes=times.num_bytes,
        )

    def _lora_ps(self, lora: LoraWork, prefills: bool) -> int:
        return picoseconds((self._prefill_lora if prefills else self._lora).step(lora, prefills)[0])


def _sizes(batch: Batch) -> tuple[int, int]:
    """Return the step's tokens, and the number of its sequences that get one."""
    num_tokens = num_samples = batch.num_decodes
    for chunk in batch.prefills:
        num_tokens += chunk.new_tokens
        num_samples += chunk.samples
    return num_tokens, num_samples
