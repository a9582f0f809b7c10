"""What is to be generated for a response or a message: it is asked for as a chat is, as in vLLM.

So its parameters are checked and have effect as a chat's do.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from lorrery.chassis.errors import InvalidRequest
from lorrery.router.http.openai_requests import ChatRequest


def as_chat(given: Mapping[str, Any]) -> ChatRequest:
    """Return a chat whose conversation is empty.

    Args:
        given: its fields; those that are null are left out.

    Raises:
        InvalidRequest: a field has a value that it may not have in a chat.
    """
    fields = {name: value for name, value in given.items() if value is not None}
    try:
        return ChatRequest.model_validate({**fields, "messages": []})
    except ValidationError as error:
        wrong = error.errors()[0]
        field = ".".join(map(str, wrong["loc"]))
        raise InvalidRequest(f"{field}: {wrong['msg']}", field=field) from None
