"""The settings of the autoscaler, a rule that determines the number of workers, live and simulated.

Names and defaults are those of Kubernetes' HorizontalPodAutoscaler (`behavior`, `tolerance`, the controller's sync
period) and of KEDA's ScaledObject (`cooldownPeriod`); the algorithm is in `lorrery.scheduler.core.autoscaling`.
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from lorrery.scheduler.core.autoscaling import COUNTED, METRICS, MOST_REPLICAS, Direction, Rule
from lorrery.service.settings.sections import LONGEST_SECONDS, PositiveSeconds, Seconds, Section, named

SHORTEST_SECONDS = 0.1
"""Lower bound on the time between two decisions or scrapes."""

Metric = Annotated[str, named(*METRICS)]
Target = Annotated[float, Field(ge=1e-6, le=1e12)]
Period = Annotated[float, Field(ge=SHORTEST_SECONDS, le=LONGEST_SECONDS)]
Count = Annotated[int, Field(ge=1, le=MOST_REPLICAS)]
Number = Annotated[int, Field(ge=0, le=MOST_REPLICAS)]


class AutoscalerSettings(Section):
    """Rule that sets the number of workers. Off unless `enabled`, which `--autoscale` sets."""

    enabled: bool = Field(default=False, description="scale the workers of `lorrery simulate` and `lorrery up`")
    metric: Metric = Field(
        default="num_requests_waiting",
        description="metric that drives scaling: a vLLM series without `vllm:`; with `_p50` to `_p99` a percentile of"
        " a histogram, with `_per_second` the rate of a counter; docs/capacity.md lists them",
    )
    target: Target = Field(default=4.0, description="target value of the metric; per worker for gauges and rates")
    metrics: dict[Metric, Target] = Field(
        default={}, description="further metrics with their targets; the one that asks for the most workers decides"
    )
    min_replicas: Number = Field(
        default=1, description="minimum workers; 0: the last one is removed after cooldown_seconds, as with KEDA"
    )
    max_replicas: Count = Field(default=8, description="maximum workers")
    window_seconds: PositiveSeconds = Field(
        default=120.0, description="device seconds over which rates and percentiles are computed"
    )
    sync_period_seconds: Period = Field(default=15.0, description="device seconds between two decisions")
    scrape_interval_seconds: Seconds = Field(
        default=0.0,
        description="device seconds between two scrapes of the workers, the first after half an interval; 0: scrape at"
        " each decision",
    )
    metrics_delay_seconds: Seconds = Field(
        default=0.0,
        description="device seconds until a scraped value is available to the rule, as with an adapter's cache or"
        " a slow query",
    )
    tolerance: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.1, description="relative deviation of the metric from its target that triggers no change"
    )
    cooldown_seconds: Seconds = Field(
        default=300.0, description="device seconds without load after which the last worker is removed"
    )
    scale_up_stabilization_seconds: Seconds = Field(
        default=0.0, description="device seconds for which more workers must be wanted before any are added"
    )
    scale_up_pods: Number = Field(
        default=4, description="maximum workers added within a period; 0: only the percentage applies"
    )
    scale_up_percent: Number = Field(
        default=100,
        description="maximum workers added within a period, in per cent of those at its start; the larger of both"
        " limits applies; 0: only the number applies",
    )
    scale_up_period_seconds: PositiveSeconds = Field(default=15.0, description="device seconds of that period")
    scale_down_stabilization_seconds: Seconds = Field(
        default=300.0, description="device seconds for which fewer workers must suffice before any are removed"
    )
    scale_down_pods: Number = Field(
        default=0, description="maximum workers removed within a period; 0: only the percentage applies"
    )
    scale_down_percent: Annotated[int, Field(ge=0, le=100)] = Field(
        default=100,
        description="maximum workers removed within a period, in per cent of those at its start; the larger of"
        " both limits applies; 0: only the number applies",
    )
    scale_down_period_seconds: PositiveSeconds = Field(default=15.0, description="device seconds of that period")
    start_seconds: Seconds = Field(
        default=20.0,
        description="device seconds from starting a worker until it reads its weights: scheduling, pulling the image,"
        " the engine's own start",
    )
    disk_gb_per_second: Annotated[float, Field(ge=0.01, le=1e6)] = Field(
        default=2.0, description="speed in GB/s at which a worker process reads the weights of all its GPUs"
    )
    ttft_seconds: PositiveSeconds = Field(default=2.0, description="TTFT objective for the report")
    tpot_seconds: PositiveSeconds = Field(default=0.2, description="TPOT objective for the report")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas is {self.min_replicas}, max_replicas {self.max_replicas}; min_replicas must not exceed"
                " max_replicas"
            )
        if not self.min_replicas and "num_requests_waiting" not in (self.metric, *self.metrics):
            raise ValueError(
                "min_replicas is 0, and without a worker only num_requests_waiting shows that one is needed: add it to"
                " the metrics, or keep one worker"
            )
        if 0 < self.scrape_interval_seconds < SHORTEST_SECONDS:
            raise ValueError(
                f"scrape_interval_seconds is {self.scrape_interval_seconds:g}: it must be 0, to scrape at each"
                f" decision, or at least {SHORTEST_SECONDS:g} s"
            )
        if self.metrics_delay_seconds and not self.scrape_interval_seconds:
            raise ValueError(
                f"metrics_delay_seconds is {self.metrics_delay_seconds:g}, and scrape_interval_seconds 0: each decision"
                " would see the scrape of an earlier one; also set scrape_interval_seconds, for example to 15, or leave"
                " out the delay"
            )
        if self.metric in self.metrics:
            raise ValueError(f"metric {self.metric} is also in metrics; give it one target")
        return self

    @property
    def targets(self) -> dict[str, float]:
        """Metric -> target value per worker."""
        return {self.metric: self.target, **self.metrics}

    def rule(self, workers_per_replica: int = 1) -> Rule:
        """Return the rule for processes that host `workers_per_replica` workers each."""
        return Rule(
            targets={
                name: value * (workers_per_replica if name in COUNTED else 1) for name, value in self.targets.items()
            },
            min_replicas=self.min_replicas,
            max_replicas=self.max_replicas,
            tolerance=self.tolerance,
            scale_up=Direction(
                self.scale_up_stabilization_seconds,
                self.scale_up_pods,
                self.scale_up_percent,
                self.scale_up_period_seconds,
            ),
            scale_down=Direction(
                self.scale_down_stabilization_seconds,
                self.scale_down_pods,
                self.scale_down_percent,
                self.scale_down_period_seconds,
            ),
            cooldown_seconds=self.cooldown_seconds,
        )

    def start_up_seconds(self, weight_bytes: int) -> float:
        """Return the device seconds from a worker's start to its first plan; `weight_bytes`: of all its GPUs."""
        return self.start_seconds + weight_bytes / (self.disk_gb_per_second * 1e9)
