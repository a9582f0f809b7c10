"""How a chat of OpenAI's shows an output that calls tools, as vLLM does."""

from collections.abc import Iterator
from json import dumps
from json.encoder import encode_basestring_ascii as quoted

from lorrery.router.http.call_reader import CallPiece, CallReader, call_id, read_whole
from lorrery.router.http.forms import Form


class ChatCalls:
    """The fields of one output's message, or of its growing parts.

    Args:
        form: of the output.
        output_id: unlike any other output's.
    """

    def __init__(self, form: Form, output_id: str) -> None:
        self._reader = CallReader(form.tool, form.parsed)
        self._output_id = output_id

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return self._reader.num_calls

    def deltas(self, text: str, last: bool) -> list[str]:
        """Return the fields of each delta for more text, at least one, which may be empty.

        Args:
            text: that follows.
            last: whether the output ends there.
        """
        pieces = self._reader.push(text)
        if last:
            pieces += self._reader.end()
        content = "".join(piece.text for piece in pieces if piece.call is None)
        calls = [shown for piece in pieces if piece.call is not None for shown in self._call_deltas(piece)]
        said = [f'"content": {quoted(content)}'] if content else []
        return [*said, *(f'"content": null, "tool_calls": [{call}]' for call in calls)] or [""]

    def _call_deltas(self, piece: CallPiece) -> Iterator[str]:
        """Yield the parts of a call: its name, and more of its arguments."""
        assert piece.call is not None
        if piece.name is not None:
            identity = {"id": call_id("chatcmpl-tool-", self._output_id, piece.call), "type": "function"}
            yield dumps(identity | {"index": piece.call, "function": {"name": piece.name}})
        if piece.text:
            yield f'{{"index": {piece.call}, "function": {{"arguments": {quoted(piece.text)}}}}}'

    def whole(self, text: str) -> tuple[str, str]:
        """Return the content of a message for its whole text, and its field with calls after a comma; empty: none."""
        content, calls = read_whole(self._reader, text)
        if not calls:
            return content, ""
        shown = [
            {
                "id": call_id("chatcmpl-tool-", self._output_id, number),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for number, (name, arguments) in enumerate(calls)
        ]
        return content, f', "tool_calls": {dumps(shown)}'
