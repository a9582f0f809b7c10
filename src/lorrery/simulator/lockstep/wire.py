"""Conversions between what a virtual cluster shows and protobuf."""

from lorrery.simulator.result import SimulationResult
from lorrery.simulator.virtual_cluster import Observation
from lorrery.v1 import simulation_pb2

__all__ = ["finish_message", "observation_message"]


def observation_message(seen: Observation) -> simulation_pb2.Observation:
    """Return an observation as it travels."""
    return simulation_pb2.Observation(
        at_seconds=seen.at_seconds,
        num_ready=seen.num_ready,
        num_starting=seen.num_starting,
        num_draining=seen.num_draining,
        metrics=dict(seen.metrics),
        done=seen.done,
    )


def finish_message(result: SimulationResult) -> simulation_pb2.FinishResponse:
    """Return what a run came to."""
    counts, scaling = result.counts, result.scaling
    assert scaling is not None
    own = scaling.summary
    return simulation_pb2.FinishResponse(
        num_requests=counts["num_requests"],
        num_completed=counts["num_completed"],
        gpu_hours=own.gpu_hours,
        replicas_mean=own.replicas_mean,
        good_ratio=own.good_ratio,
        num_scalings=own.num_scale_ups + own.num_scale_downs,
    )
