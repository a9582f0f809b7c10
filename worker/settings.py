"""The settings of a worker: its mock GPU, what it answers, and where its scheduler is."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lorrery.chassis.sections import Address, Count, Name, PositiveSeconds, Seconds, Section


class OutputSettings(Section):
    """What the mock model answers."""

    mode: Literal["random", "echo"] = Field(
        default="random", description="what tokens say: drawn at random from the request's seed, or the prompt again"
    )
    length_model: Literal["lognormal", "llm-mock"] = Field(
        default="lognormal", description="where EOS falls if the request gives no true length and EOS is not ignored"
    )
    # Azure's 2023 conversation trace: p50 129, mean 211 tokens, so sigma = sqrt(2 ln(211 / 129)).
    length_median: PositiveSeconds = Field(default=129.0, description="lognormal: median output, in tokens")
    length_sigma: Seconds = Field(
        default=0.99, description="lognormal: standard deviation of the logarithm of the output's tokens"
    )


class LoraSettings(Section):
    """How the engine computes adapters; docs/step-time.md says what each costs."""

    padding: Literal["none", "batch", "max_lora_rank"] = Field(
        default="none", description="rank that kernels run at: each adapter's, the batch's largest, the deployment's"
    )
    launch_us: Annotated[float, Field(ge=0)] = Field(
        default=5.0, description="microseconds per kernel, two per projection; 1 to 2 inside a CUDA graph"
    )
    sharded: bool = Field(default=False, description="tensor parallelism cuts both matrices of an adapter")


class WorkerSettings(Section):
    """The mock GPU, and how its worker finds its scheduler."""

    name: Name | None = Field(
        default=None,
        description="in usage, metrics, logs and faults, another for each worker; unset: HOST-PID",
    )
    scheduler: Address = Field(default="127.0.0.1:50052", description="scheduler to attach to, HOST:PORT")
    listen: Address = Field(
        default="127.0.0.1:0", description="gRPC health checks only, HOST:PORT; port 0 takes a free one"
    )
    metrics: Address = Field(
        default="127.0.0.1:0", description="where Prometheus reads metrics, HOST:PORT; port 0 takes a free one"
    )

    gpu: str = Field(default="A100-80-SXM", description="GPU, by its name in the catalogue")
    tensor_parallel: Count = Field(default=1, description="GPUs of one worker")
    step_time: Literal["roofline", "naive-roofline", "llm-mock", "table", "fitted"] = Field(
        default="roofline", description="what says how long a step takes; docs/step-time.md describes each model"
    )
    profile: Path | None = Field(
        default=None, description="table: CSV of measured batches; fitted: CSV of an engine's steps"
    )
    engine: str = Field(default="present-day", description="the CPU's share of a step, and which kernels run")
    weight_dtype: Literal["float16", "bfloat16", "fp8", "int8", "int4"] = Field(
        default="bfloat16", description="number format of the base model's weights"
    )
    kv_dtype: Literal["float16", "bfloat16", "fp8"] = Field(
        default="bfloat16", description="number format of the KV cache"
    )
    lora: LoraSettings = LoraSettings()
    startup_seconds: Seconds = Field(default=0.0, description="device seconds until the weights are loaded")
    output: OutputSettings = OutputSettings()

    heartbeat_seconds: Annotated[float, Field(ge=0.01, allow_inf_nan=False)] = Field(
        default=1.0,
        description="time between two signs of life to the scheduler; at most half of scheduler.worker_timeout_seconds",
    )
    drain_seconds: Seconds = Field(default=30.0, description="after SIGTERM: time for running sequences to end")

    @model_validator(mode="after")
    def _has_profile(self) -> Self:
        if self.step_time in ("table", "fitted") and self.profile is None:
            raise ValueError(f"step_time = {self.step_time!r} needs profile")
        return self
