"""Jain's index of recent service to tenants, for the metrics: over whole minutes, so that memory is bounded.

The formula is that of reports (`loadgen/workload/fairness.py`). A request counts when it ends.
"""

MINUTE_SECONDS = 60.0
MAX_TENANTS = 10_000
"""Most tenants counted in one minute; clients may name any if there are no API keys."""


class ServedByTenant:
    """Prompt and output tokens by tenant, of the current minute and the one before."""

    def __init__(self) -> None:
        self._minute = 0
        self._now: dict[str, int] = {}
        self._before: dict[str, int] = {}

    def add(self, tenant_id: str, tokens: int, at_seconds: float) -> None:
        """Count the tokens of a request that has ended."""
        self._turn(at_seconds)
        if tenant_id in self._now or len(self._now) < MAX_TENANTS:
            self._now[tenant_id] = self._now.get(tenant_id, 0) + tokens

    def jain_index(self, at_seconds: float) -> float:
        """Return the index; 1 if no tenant got service."""
        self._turn(at_seconds)
        served = [
            self._now.get(tenant, 0) + self._before.get(tenant, 0) for tenant in self._now.keys() | self._before.keys()
        ]
        squares = sum(tokens * tokens for tokens in served)
        return sum(served) ** 2 / (len(served) * squares) if squares else 1.0

    def _turn(self, at_seconds: float) -> None:
        minute = int(at_seconds // MINUTE_SECONDS)
        if minute != self._minute:
            self._before = self._now if minute == self._minute + 1 else {}
            self._now, self._minute = {}, minute
