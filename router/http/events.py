"""Server-sent events that have a name, as the streams of OpenAI's Responses and Anthropic's Messages consist of."""

import json
from typing import Any


def named_event(kind: str, fields: dict[str, Any]) -> bytes:
    """Return one event; its `type` is its name."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()
