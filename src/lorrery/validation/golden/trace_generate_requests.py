"""`trace_generate_requests`: S-LoRA's synthetic workload, against `loadgen.workload.slora`, bit for bit."""

from lorrery.loadgen.workload.slora import draw
from lorrery.validation.golden.kind import Mismatch, Record, compare


class TraceGenerateRequests:
    """One drawn workload."""

    name = "trace_generate_requests"

    def detect(self, record: Record) -> bool:
        """Whether the record has the parameters of a workload and its arrays."""
        return record.keys() >= {"params", "n", "adapter_index", "input_len", "output_len", "req_time"}

    def replay(self, record: Record) -> list[Mismatch]:
        """Draw the workload and compare every number."""
        params = dict(record["params"])
        for name in ("input_range", "output_range"):
            low, high = params[name]
            params[name] = (low, high)
        draws = draw(**params)
        found = compare("n", record["n"], len(draws.req_time))
        for name in ("adapter_index", "input_len", "output_len", "req_time"):
            found += compare(name, record[name], getattr(draws, name).tolist())
        return found
