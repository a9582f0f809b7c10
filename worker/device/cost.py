"""The parts of a step's time that a step-time model can distinguish; they add up to the step exactly."""

from dataclasses import dataclass

PARTS = ("compute", "memory", "kernel", "attention", "all_reduce", "lora", "host", "whole")


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step's time in picoseconds by part, and its work.

    Attributes:
        compute: arithmetic of the linear layers and the head, as far as it takes the time, not memory.
        memory: their memory traffic, likewise; elementwise kernels too.
        kernel: constants per kernel of those.
        attention: attention kernels.
        all_reduce: sums over the GPUs of the replica.
        lora: adapters.
        host: the CPU.
        whole: the whole step, for a model without parts.
        flops: floating-point operations of one GPU, a multiplication and an addition as two.
        num_bytes: memory traffic of one GPU: weights, activations of linear layers, KV cache, adapters.
    """

    compute: int = 0
    memory: int = 0
    kernel: int = 0
    attention: int = 0
    all_reduce: int = 0
    lora: int = 0
    host: int = 0
    whole: int = 0
    flops: float = 0.0
    num_bytes: float = 0.0

    @property
    def total_ps(self) -> int:
        """The step's duration."""
        linear = self.compute + self.memory + self.kernel
        return linear + self.attention + self.all_reduce + self.lora + self.host + self.whole
