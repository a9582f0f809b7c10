"""How evenly tenants were served: the tokens of each, and Jain's index of them.

Jain, Chiu and Hawe (DEC-TR-301, 1984): with x_i the tokens of tenant i, prompts and outputs of completed requests,

    J = (sum x_i)^2 / (n * sum x_i^2)

1 if all got the same, 1 / n if one got everything. It ignores what tenants asked for: if they ask for different
amounts, even perfect service is below 1.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lorrery.loadgen.workload.outcome_table import OutcomeTable

__all__ = ["Fairness", "TenantSummary", "fairness", "jain_index"]


@dataclass(frozen=True, slots=True)
class TenantSummary:
    """One tenant's share; TTFT from the intended send time, 0 if nothing completed."""

    tenant_id: str
    num_requests: int
    num_completed: int
    served_tokens: int
    ttft_p50_ms: float
    ttft_p99_ms: float


@dataclass(frozen=True, slots=True)
class Fairness:
    """How evenly the tenants of a run were served.

    Attributes:
        jain_index: of `served_tokens`.
        tenants: by name.
    """

    jain_index: float
    tenants: tuple[TenantSummary, ...]


def jain_index(served: Iterable[float]) -> float:
    """Return Jain's index; 1 if no tenant was served."""
    amounts = np.fromiter(served, np.float64)
    squares = float((amounts**2).sum())
    return float(amounts.sum()) ** 2 / (len(amounts) * squares) if squares else 1.0


def fairness(table: OutcomeTable) -> Fairness | None:
    """Return how evenly tenants were served; None if no request names one."""
    rows_of = dict(table.tenant_id.rows_of())
    if not any(rows_of):
        return None
    completed = table.completed
    tokens, ttft = table.prompt_tokens + table.output_tokens, table.first_token_seconds - table.intended_seconds
    found: list[TenantSummary] = []
    for tenant_id, its_rows in sorted(rows_of.items()):
        rows = its_rows[completed[its_rows]]
        p50, p99 = (np.quantile(ttft[rows], (0.5, 0.99)) * 1e3).tolist() if len(rows) else (0.0, 0.0)
        found.append(TenantSummary(tenant_id, len(its_rows), len(rows), int(tokens[rows].sum()), p50, p99))
    return Fairness(jain_index(tenant.served_tokens for tenant in found), tuple(found))
