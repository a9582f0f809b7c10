"""One request's times as its client will see them, up to the network: counted when a message is written.

TTFT = first token - arrival; ITL = gap between two tokens; E2E = last message - arrival;
TPOT = (E2E - TTFT) / (output tokens - 1). All in device seconds: wall seconds over the cluster's `time_scale`.
"""

import time

from lorrery.router.metrics import RouterMetrics


class Timing:
    """Follows one request from its arrival.

    Attributes:
        time_scale: wall seconds per device second; to be set once a shard works on the request.
    """

    __slots__ = ("_arrived", "_first", "_last", "_metrics", "time_scale")

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._arrived = self._first = self._last = time.monotonic()
        self.time_scale = 1.0

    def message(self, num_tokens: int, output_tokens: int) -> None:
        """Count a message of `num_tokens`, which brings the request's output to `output_tokens`."""
        metrics = self._metrics
        metrics.messages += 1
        if not num_tokens:
            return
        now = time.monotonic()
        metrics.output_tokens += num_tokens
        metrics.tokens_per_message.observe(num_tokens)
        if num_tokens == output_tokens:
            self._first = now
            metrics.ttft.observe((now - self._arrived) / self.time_scale)
        else:
            metrics.itl.observe((now - self._last) / self.time_scale / num_tokens, num_tokens)
        self._last = now

    def finish(self, prompt_tokens: int, output_tokens: int) -> None:
        """Count a request that ended by itself."""
        now = time.monotonic()
        self._metrics.prompt_tokens += prompt_tokens
        self._metrics.e2e.observe((now - self._arrived) / self.time_scale)
        if output_tokens > 1:
            self._metrics.tpot.observe((now - self._first) / self.time_scale / (output_tokens - 1))
