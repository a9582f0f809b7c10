"""How a chat of OpenAI's shows an output that calls tools, as vLLM does."""

from json import dumps
from json.encoder import encode_basestring_ascii as quoted

from lorrery.router.http.call_reader import CallPiece, CallReader, call_id, read_whole
from lorrery.router.http.forms import Form

NO_CONTENT = '"content": ""'
NO_DELTA = '"delta": {}'


class ChatCalls:
    """The fields of one output's message, or of its growing parts.

    Args:
        form: of the output.
        output_id: unlike any other output's.
    """

    def __init__(self, form: Form, output_id: str) -> None:
        self._reader = CallReader(form.tool)
        self._output_id = output_id

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return self._reader.num_calls

    def delta(self, text: str, last: bool) -> str:
        """Return the fields of a delta for more text; empty: it has none. `last`: whether the output ends there."""
        pieces = self._reader.push(text)
        if last:
            pieces += self._reader.end()
        fields = []
        if content := "".join(piece.text for piece in pieces if piece.call is None):
            fields.append(f'"content": {quoted(content)}')
        calls = [piece for piece in pieces if piece.call is not None]
        if calls:
            fields.append(f'"tool_calls": [{", ".join(map(self._call_delta, calls))}]')
        return ", ".join(fields)

    def _call_delta(self, piece: CallPiece) -> str:
        assert piece.call is not None
        if piece.name is None:
            return f'{{"index": {piece.call}, "function": {{"arguments": {quoted(piece.text)}}}}}'
        head = {"index": piece.call, "id": call_id("call_", self._output_id, piece.call), "type": "function"}
        return dumps(head | {"function": {"name": piece.name, "arguments": piece.text}})

    def whole(self, text: str) -> str:
        """Return the fields of a message for its whole text."""
        content, calls = read_whole(self._reader, text)
        if not calls:
            return f'"content": {quoted(content)}'
        shown = [
            {
                "id": call_id("call_", self._output_id, number),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for number, (name, arguments) in enumerate(calls)
        ]
        return f'"content": {quoted(content)}, "tool_calls": {dumps(shown)}'
