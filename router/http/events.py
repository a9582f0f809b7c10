"""Named server-sent events, as in the streams of OpenAI's Responses and Anthropic's Messages."""

import json
from typing import Any


def named_event(kind: str, fields: dict[str, Any]) -> bytes:
    """Return one event; `kind` is both its name and its `type`."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()
