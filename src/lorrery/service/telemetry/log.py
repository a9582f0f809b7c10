"""Logging of a process: events with key=value fields, to standard error.

Records of the standard library's logging (grpc, asyncio) go the same way in the same format. Logging is set up once,
before gRPC starts: reconfiguring it later can deadlock with gRPC (grpc/grpc #43421).

If lines cannot be written, such as on a full disk, the next event that can be has `lines_lost`: their number.

Whatever others send, the log stays readable and small: an event has at most `BURST` lines at once and then one a
second, and three tracebacks and then one a minute; a library has as many lines as tracebacks. `lines_left_out` counts
what is missing before a line. Values and tracebacks are cut.

Events that may happen a thousand times a second go to a `BoundedLog`: the first of each kind in a second, then a count.
"""

import asyncio
import contextlib
import logging
import re
import sys
import time
from typing import TextIO, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from lorrery.service.entry_point import num_lost_writes
from lorrery.service.settings.sections import LogSettings

BURST = 100
MAX_CHARACTERS = 1_000
"""Upper bound on a value; a traceback may have eight times as many."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\ud800-\udfff]")
"""What would steer a terminal, end a line there, or has no bytes."""
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(log: LogSettings, service: str) -> None:
    """Set up logging for this process; call it once, before any gRPC object exists.

    Args:
        log: level and format.
        service: name added to every event.
    """

    def bind_service(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        return event

    def count_lost(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        if num_lost := num_lost_writes(sys.stderr):
            event["lines_lost"] = num_lost
        return event

    level = _LEVELS[log.level]
    shared: list[Processor] = [
        _Bounds(),
        structlog.contextvars.merge_contextvars,
        bind_service,
        count_lost,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        # Plain: rich would print every variable, prompts included, and block the loop for half a second.
        structlog.processors.format_exc_info,
        _cut_traceback,
    ]
    render: list[Processor] = [
        structlog.processors.JSONRenderer()
        if log.format == "json"
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    ]
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = _Handler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    logging.root.handlers = [handler]
    # Debug and info records of libraries concern their internals.
    logging.root.setLevel(max(level, logging.WARNING))


def get_logger(name: str) -> FilteringBoundLogger:
    """Return a logger whose events carry `module=name`: `log.info("sequence_finished", output_tokens=12)`."""
    return cast("FilteringBoundLogger", structlog.get_logger(module=name))


class _Handler(logging.StreamHandler[TextIO]):
    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(structlog.DropEvent):
            super().emit(record)


class _Bounds:
    """Drops the lines and tracebacks of an event that are too many, and cuts its values."""

    def __init__(self) -> None:
        self._lines, self._few, self._tracebacks = _Allowance(BURST, 1.0), _Allowance(3, 1 / 60), _Allowance(3, 1 / 60)

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        record = event.get("_record")
        kind = event["event"] if record is None else record.name
        num_left_out = (self._lines if record is None else self._few).take(kind)
        if num_left_out is None:
            raise structlog.DropEvent
        if num_left_out:
            event["lines_left_out"] = num_left_out
        if (error := event.get("exc_info")) and not isinstance(error, BaseException):
            error = sys.exception() if error is True else error[1]
        is_a_clients = record is not None and isinstance(error, UnicodeError)  # gRPC logs one for wrong metadata
        if error and (is_a_clients or self._tracebacks.take(kind) is None):
            del event["exc_info"]
            event["error"] = repr(error)
        for name, value in event.items():
            if name not in ("_record", "exc_info") and not isinstance(value, int | float | None):
                event[name] = _shown(value)
        return event


class _Allowance:
    """How often each of a few kinds of thing may happen.

    Args:
        burst: at once.
        per_second: after that.
    """

    def __init__(self, burst: float, per_second: float) -> None:
        self._burst, self._per_second = burst, per_second
        self._kinds: dict[str, tuple[float, float, int]] = {}  # what is left, when, and how many were refused since

    def take(self, kind: str) -> int | None:
        """Return how many of this kind were refused since the last that was not; None: this one is refused."""
        now = time.monotonic()
        left, then, num_refused = self._kinds.get(kind, (self._burst, now, 0))
        left = min(self._burst, left + (now - then) * self._per_second)
        if left < 1:
            self._kinds[kind] = left, now, num_refused + 1
            return None
        self._kinds[kind] = left - 1, now, 0
        return num_refused


def _shown(value: object) -> object:
    """Return a value as the log shows it: itself, or if it is long or has control characters a text."""
    text = value if isinstance(value, str) else repr(value)
    short = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."
    clean = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], short)
    return value if clean == text else clean


def _cut_traceback(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Cut a traceback, whose end says most."""
    if "exception" in event:
        event["exception"] = event["exception"][-8 * MAX_CHARACTERS :]
    return event


WINDOW_SECONDS = 1.0


class BoundedLog:
    """Logs one event, at INFO.

    Args:
        log: the logger.
        event: its name; repetitions are reported as EVENT_again.
    """

    def __init__(self, log: FilteringBoundLogger, event: str) -> None:
        self._log = log
        self._event = event
        self._num_more: dict[str, int] = {}

    def say(self, kind: str, **fields: object) -> None:
        """Log an occurrence, or count it if one of its kind was logged within the last second."""
        if kind in self._num_more:
            self._num_more[kind] += 1
            return
        self._num_more[kind] = 0
        self._log.info(self._event, **fields)
        asyncio.get_running_loop().call_later(WINDOW_SECONDS, self._end, kind)

    def _end(self, kind: str) -> None:
        num_more = self._num_more.pop(kind)
        if num_more:
            self._log.info(f"{self._event}_again", kind=kind, num=num_more)
