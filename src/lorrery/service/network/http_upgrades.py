"""Requests that offer an upgrade: no server here accepts one, so the offer is ignored (RFC 9110, 7.8).

Java's HttpClient offers `h2c` with each request over http://. llhttp ends such a request after its head and parses its
body as the next request; uvicorn leaves it at that, so a body could smuggle a request past a proxy. Here the head is
rewritten without the offer, and a new parser reads it and what follows.
"""

import asyncio
from collections.abc import Sequence

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class UpgradeBlindProtocol(HttpToolsProtocol):
    """uvicorn's connection, which ignores upgrades. `CONNECT`, which would open a tunnel, is not a valid request here.

    Attributes:
        beneath: the transport that TLS writes to; None: no TLS.
    """

    beneath: asyncio.Transport | None = None

    @property
    def unread_bytes(self) -> int:
        """Bytes written but not taken by the client; TLS's transport does not count those of the one beneath it."""
        num_bytes = self.transport.get_write_buffer_size()
        return num_bytes if self.beneath is None else num_bytes + self.beneath.get_write_buffer_size()

    @property
    def is_answering(self) -> bool:
        """Whether the response to a complete request is still being sent."""
        cycle = self.cycle
        comes = cycle is not None and not cycle.response_complete and (cycle.response_started or not cycle.more_body)
        return comes or len(self.pipeline) > 0 or self.unread_bytes > 0

    def data_received(self, data: bytes) -> None:
        """Parse received data; `send_400_response` is called if it is not a request."""
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def on_headers_complete(self) -> None:
        """Begin the request, unless its head will be parsed again."""
        if not self.offers_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the request, unless its head will be parsed again."""
        if not self.offers_upgrade():
            super().on_message_complete()

    def offers_upgrade(self) -> bool:
        """Return whether the head offers an upgrade, so that the parser stops and the head has to be parsed again.

        Raises:
            ValueError: it asks for a tunnel; the parser turns this into an error of its own.
        """
        if not self.parser.should_upgrade():
            return False
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("CONNECT")
        return True

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                (head_end,) = upgrade.args
                version = self.parser.get_http_version()
                data = head_without_upgrade(self.parser.get_method(), self.url, version, self.headers) + data[head_end:]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            else:
                return


def head_without_upgrade(method: bytes, target: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the head of a request without its `upgrade` headers.

    Args:
        method: such as `b"POST"`.
        target: as the client wrote it.
        version: of HTTP, such as `"1.1"`.
        headers: names in lower case, and values, as parsed.
    """
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    lines += [b"%b: %b" % header for header in headers if header[0] != b"upgrade"]
    return b"\r\n".join([*lines, b"", b""])
