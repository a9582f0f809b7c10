"""Counts HTTP requests under the names of prometheus-fastapi-instrumentator, which vLLM's server uses.

Routes that serve clients are counted; routes that are polled every few seconds (metrics, health) are not.
"""

from prometheus_client import CollectorRegistry

from lorrery.service.telemetry.series import Exporter, Series, table

_HIGHR_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0),
    60.0,
)
REQUESTS = Series(
    "http_requests_total",
    "requests",
    "HTTP requests answered, by route, method and status class.",
    ("handler", "method", "status"),
    more="`handler` is the route's path, or `none`; `status` is `2xx`, `4xx` or `5xx`. The routes that generate exist"
    " from the start, others appear with their first request. `/metrics`, `/load`, `/version` and the probes are not"
    " counted.",
)
DURATION = Series(
    "http_request_duration_seconds",
    "wall seconds",
    "From the head of an HTTP request to the end of its response, including a stream's, by route and method.",
    ("handler", "method"),
    (0.1, 0.5, 1.0),
)
DURATION_HIGHR = Series(
    "http_request_duration_highr_seconds",
    "wall seconds",
    "The same over all routes together, in more buckets.",
    buckets=_HIGHR_BUCKETS,
)
REQUEST_SIZE = Series(
    "http_request_size_bytes",
    "bytes",
    "Length of the bodies of HTTP requests as their headers say, 0 where they do not, by route.",
    ("handler",),
    is_summary=True,
)
RESPONSE_SIZE = Series(
    "http_response_size_bytes",
    "bytes",
    "Length of the bodies of responses as their headers say, 0 where they do not, as in a stream, by route.",
    ("handler",),
    is_summary=True,
)
TABLE = table(globals())

_GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_NOT_COUNTED = frozenset({"/metrics", "/load", "/version", "/health", "/healthz", "/ping"})


class RequestsCounted:
    """See the module.

    Args:
        registry: where the metrics are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        exporter = Exporter(registry, TABLE)
        self._requests = exporter.numbers(REQUESTS)
        self._duration = exporter.histograms(DURATION)
        self._duration_highr = exporter.histogram(DURATION_HIGHR)
        self._request_size = exporter.summaries(REQUEST_SIZE)
        self._response_size = exporter.summaries(RESPONSE_SIZE)
        for handler in _GENERATING:
            self._duration.labels(handler, "POST")
            self._request_size.labels(handler)
            self._response_size.labels(handler)
            for status in ("2xx", "4xx", "5xx"):
                self._requests.labels(handler, "POST", status)

    def ended(
        self, handler: str | None, method: str, status: int, seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """Count a request.

        Args:
            handler: path of its route; None: no route.
            method: such as `POST`.
            status: of the response.
            seconds: from the request's head to the end of the response.
            request_bytes: length of its body, as its head says; 0: it does not.
            response_bytes: the same of the response.
        """
        if handler in _NOT_COUNTED:
            return
        name = handler or "none"
        self._requests.labels(name, method, f"{status // 100}xx").inc()
        self._duration.labels(name, method).observe(seconds)
        self._duration_highr.observe(seconds)
        self._request_size.labels(name).observe(request_bytes)
        self._response_size.labels(name).observe(response_bytes)
