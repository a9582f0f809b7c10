"""The settings of the autoscaler, a rule that determines the number of workers, live and simulated.

Names and defaults are those of Kubernetes' HorizontalPodAutoscaler (`behavior`, `tolerance`, the controller's sync
period) and of KEDA's ScaledObject (`cooldownPeriod`); the algorithm is in `lorrery.autoscaler.rule`.
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from lorrery.autoscaler.figures import COUNTED, METRICS
from lorrery.autoscaler.rule import MOST_REPLICAS, Direction, Rule
from lorrery.chassis.sections import LONGEST_SECONDS, PositiveSeconds, Seconds, Section, named

SHORTEST_SECONDS = 0.1
"""Lower bound on the time between two decisions or scrapes."""

Metric = Annotated[str, named(*METRICS)]
Target = Annotated[float, Field(ge=1e-6, le=1e12)]
Period = Annotated[float, Field(ge=SHORTEST_SECONDS, le=LONGEST_SECONDS)]
Count = Annotated[int, Field(ge=1, le=MOST_REPLICAS)]
Number = Annotated[int, Field(ge=0, le=MOST_REPLICAS)]


class AutoscalerSettings(Section):
    """How many workers there are, by a rule. Off unless `enabled`, which `--autoscale` sets."""

    enabled: bool = Field(default=False, description="scale the workers of `lorrery simulate` and `lorrery up`")
    metric: Metric = Field(
        default="num_requests_waiting",
        description="what the rule looks at: vLLM's series without `vllm:`, `_p50` to `_p99` of a histogram,"
        " `_per_second` of a counter; docs/autoscaling.md lists them",
    )
    target: Target = Field(default=4.0, description="value of the metric to keep; of gauges and rates for each worker")
    metrics: dict[Metric, Target] = Field(
        default={}, description="further metrics with their targets; the one that wants most workers wins"
    )
    min_replicas: Number = Field(
        default=1, description="fewest workers; 0: the last one goes after cooldown_seconds, as with KEDA"
    )
    max_replicas: Count = Field(default=8, description="most workers")
    window_seconds: PositiveSeconds = Field(
        default=120.0, description="device seconds over which rates and percentiles are taken"
    )
    sync_period_seconds: Period = Field(default=15.0, description="device seconds between two decisions")
    scrape_interval_seconds: Seconds = Field(
        default=0.0,
        description="device seconds between two scrapes of the workers, the first half of it after the start; 0: at"
        " each decision",
    )
    metrics_delay_seconds: Seconds = Field(
        default=0.0, description="device seconds until what was scraped is seen: an adapter's cache, a slow query"
    )
    tolerance: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.1, description="share of the target by which the metric may miss it and nothing changes"
    )
    cooldown_seconds: Seconds = Field(
        default=300.0, description="device seconds without anything to do until the last worker goes"
    )
    scale_up_stabilization_seconds: Seconds = Field(
        default=0.0, description="device seconds for which more workers have to be wanted"
    )
    scale_up_pods: Number = Field(default=4, description="most workers that come within a period; 0: as percent says")
    scale_up_percent: Number = Field(
        default=100, description="the same as a share of what there was; the larger of both holds; 0: as pods says"
    )
    scale_up_period_seconds: PositiveSeconds = Field(default=15.0, description="device seconds of that period")
    scale_down_stabilization_seconds: Seconds = Field(
        default=300.0, description="device seconds for which fewer workers have to be enough"
    )
    scale_down_pods: Number = Field(default=0, description="most workers that go within a period; 0: as percent says")
    scale_down_percent: Annotated[int, Field(ge=0, le=100)] = Field(
        default=100, description="the same as a share of what there was; the larger of both holds; 0: as pods says"
    )
    scale_down_period_seconds: PositiveSeconds = Field(default=15.0, description="device seconds of that period")
    start_seconds: Seconds = Field(
        default=20.0,
        description="device seconds until a worker that is started reads its weights: a place for it, the image, the"
        " engine's own start",
    )
    disk_gb_per_second: Annotated[float, Field(ge=0.01, le=1e6)] = Field(
        default=2.0, description="speed at which a worker process reads the weights of all its GPUs"
    )
    ttft_seconds: PositiveSeconds = Field(
        default=2.0, description="service level that is reported: time to the first token"
    )
    tpot_seconds: PositiveSeconds = Field(
        default=0.2, description="service level that is reported: mean time of a further token"
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas is {self.min_replicas}, max_replicas {self.max_replicas}: have no more at least than at"
                " most"
            )
        if not self.min_replicas and "num_requests_waiting" not in (self.metric, *self.metrics):
            raise ValueError(
                "min_replicas is 0, and without a worker no metric but num_requests_waiting shows that one is wanted:"
                " add num_requests_waiting to the metrics, or keep one worker"
            )
        if 0 < self.scrape_interval_seconds < SHORTEST_SECONDS:
            raise ValueError(
                f"scrape_interval_seconds is {self.scrape_interval_seconds:g}: it must be 0, which scrapes at each"
                f" decision, or from {SHORTEST_SECONDS:g} s on"
            )
        if self.metrics_delay_seconds and not self.scrape_interval_seconds:
            raise ValueError(
                f"metrics_delay_seconds is {self.metrics_delay_seconds:g}, and scrape_interval_seconds 0: each decision"
                " would see the scrape of an earlier one; set scrape_interval_seconds too, as to 15, or leave out the"
                " delay"
            )
        if self.metric in self.metrics:
            raise ValueError(f"metric {self.metric} is among the further metrics too; give it one target")
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
