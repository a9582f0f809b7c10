"""Logging of a process: events with key=value fields, to standard error.

Records of the standard library's logging (grpc, asyncio) go the same way in the same format. Logging is set up once,
before gRPC starts: reconfiguring it later can deadlock with gRPC (grpc/grpc #43421).

If lines cannot be written, such as on a full disk, the next event that can be has `lines_lost`: their number.
"""

import logging
import sys
from typing import cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from lorrery.chassis.sections import LogSettings
from lorrery.chassis.standard_streams import num_lost_writes

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
        structlog.contextvars.merge_contextvars,
        bind_service,
        count_lost,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    render: list[Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if log.format == "json"
        else [
            # Plain: rich would print every variable, prompts included, and block the loop for half a second.
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        ]
    )
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
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
