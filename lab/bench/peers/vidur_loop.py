"""Vidur's event loop (package `vidur`) as a peer: its own scheduler, entities and events, without its forests.

Its trained predictor of execution times is replaced by the bare loop's straight line: the tables for it are not in the
package, and the look-up would only add cost. Metrics are off. The CPU time is the process's, of `Simulator.run`;
creating the requests and the simulator is excluded.
"""

import contextlib
import importlib
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Protocol


class _Batch(Protocol):
    num_q_tokens: Sequence[int]
    num_kv_tokens: Sequence[int]


class StraightLine:
    """Predictor of times for Vidur: a step's cost is linear in its tokens, its sequences and their cached tokens."""

    cost: dict[str, int]
    """In picoseconds: the fields of lab/bench/bare_sim.py's `BareCost`."""

    def __init__(self, **_configs: object) -> None:
        pass

    def get_execution_time(self, batch: "_Batch", _pipeline_stage: int) -> SimpleNamespace:
        """Return the time of a step, in seconds."""
        cost = self.cost
        new_tokens, num_requests = sum(batch.num_q_tokens), len(batch.num_q_tokens)
        if new_tokens > num_requests:
            step_ps = cost["prefill_ps"] + cost["prompt_token_ps"] * new_tokens
        else:
            cached = sum(batch.num_kv_tokens)
            step_ps = cost["decode_ps"] + cost["sequence_ps"] * num_requests + cost["kv_token_ps"] * cached
        return SimpleNamespace(total_time=step_ps / 1e12, model_time=step_ps / 1e12, model_time_ms=step_ps / 1e9)


def main() -> None:
    """Perform the runs given on standard input."""
    registry: Any = importlib.import_module("vidur.execution_time_predictor").ExecutionTimePredictorRegistry
    registry.get = lambda *_key, **configs: StraightLine(**configs)
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory(prefix="bench-vidur-") as folder:
        os.chdir(folder)  # Vidur creates a results folder in the current folder
        for line in sys.stdin:
            with contextlib.redirect_stdout(sys.stderr):
                answer = _run(json.loads(line))
            print(json.dumps(answer), flush=True)


def _run(run: dict[str, Any]) -> dict[str, object]:
    """Build a simulator with the run's requests; return the cost of running it."""
    config: Any = importlib.import_module("vidur.config")
    entities: Any = importlib.import_module("vidur.entities")
    simulator: Any = importlib.import_module("vidur.simulator")
    entities.Replica._id = -1  # noqa: SLF001  its global scheduler takes the first replica to be number 0
    StraightLine.cost = run["bare_cost"]
    columns = zip(run["at_seconds"], run["prompt_tokens"], run["output_tokens"], strict=True)
    requests = [entities.Request(*row) for row in columns]
    simulator.RequestGeneratorRegistry.get = lambda *_args: SimpleNamespace(generate=lambda: requests)
    longest = max(sum(lengths) for lengths in zip(run["prompt_tokens"], run["output_tokens"], strict=True))
    settings = config.SimulationConfig(
        cluster_config=config.ClusterConfig(
            num_replicas=run["num_workers"],
            replica_config=config.ReplicaConfig(
                model_name="meta-llama/Llama-2-7b-hf",
                num_pipeline_stages=1,
                tensor_parallel_size=1,
                device="a100",
                network_device="a100_dgx",
            ),
            cache_config=config.CacheConfig(
                block_size=run["block_tokens"], num_blocks=run["kv_tokens"] // run["block_tokens"]
            ),
            replica_scheduler_config=config.VllmSchedulerConfig(
                batch_size_cap=run["max_num_seqs"], max_tokens_in_batch=run["max_batched_tokens"]
            ),
        ),
        request_generator_config=config.SyntheticRequestGeneratorConfig(
            length_generator_config=config.FixedRequestLengthGeneratorConfig(max_tokens=longest)
        ),
        metrics_config=config.MetricsConfig(write_metrics=False, enable_chrome_trace=False, store_plots=False),
    )
    simulation = simulator.Simulator(settings)
    started = time.process_time()
    simulation.run()
    seconds = time.process_time() - started
    finished = [request for request in requests if request.completed]
    gaps = [
        (request.completed_at - request.prefill_completed_at) * 1e3 / (request.num_decode_tokens - 1)
        for request in finished
        if request.num_decode_tokens > 1
    ]
    return {"cpu_seconds": seconds, "num_finished": len(finished), "mean_tpot_ms": sum(gaps) / max(len(gaps), 1)}


if __name__ == "__main__":
    main()
