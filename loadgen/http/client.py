"""The HTTP client of one server: reads its models, sends requests, records their streams.

It assumes nothing about the server except the route itself: no header, no absence of one, no vendor. The base model and
the adapters are read from `/v1/models`, if there is one.
"""

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from lorrery.loadgen.http.answer import BAD_RESPONSE, Answer, error_text
from lorrery.loadgen.http.connection import Connection, ConnectionLostError, Pool, Response
from lorrery.loadgen.http.routes import Route
from lorrery.loadgen.reception import Ask, ClusterView, Reception, Send
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.installed import VERSION
from lorrery.service.settings.sections import TlsSettings

CONNECTION_FAILED = "CONNECTION_FAILED"
"""Status of a request whose server could not be reached."""
CONNECTION_LOST = "CONNECTION_LOST"
"""Status of a request whose connection ended before the answer did."""
_POLL_SECONDS = 0.2
_MOST_ERROR_BYTES, _MOST_LIST_BYTES = 1 << 16, 1 << 26
_OK, _NOT_FOUND = 200, 404
_NOT_ALLOWED = (401, 403)
_SERVER_ERRORS = 500


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address of a server; `prefix` precedes the path of every route."""

    host: str
    port: int
    is_tls: bool
    prefix: str


def server_address(option: str, target: str, tls: TlsSettings) -> ServerAddress:
    """Read HOST:PORT or a URL; a suffix `/v1`, as in OpenAI's base URLs, is ignored.

    Args:
        option: the flag that it came with.
        target: to read; without a scheme it is https if `tls` has settings, otherwise http.
        tls: of the client's side.

    Raises:
        SettingsError: it is neither.
    """
    default = "http" if tls.ca is None and tls.cert is None else "https"
    try:
        parts = urlsplit(target if "://" in target else f"{default}://{target}")
        usual_port = {"http": 80, "https": 443}[parts.scheme]
        port = parts.port or usual_port
    except (ValueError, KeyError):
        parts, port = urlsplit(""), 0
    if not parts.hostname or (":" not in target) or parts.query or parts.fragment or parts.username:
        raise SettingsError(f"{option} {target}: HOST:PORT or a URL (http://HOST:PORT) expected")
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return ServerAddress(parts.hostname, port, parts.scheme == "https", prefix)


class HttpClient:
    """A client of one server; open it with `async with` inside the loop that uses it.

    Args:
        target: HOST:PORT or a URL.
        route: protocol of the requests.
        tls: the client's side of TLS.
        api_key: sent with every request; empty: none.
        model: the base model; empty: the first of `/v1/models`.

    Raises:
        SettingsError: an invalid target, or a certificate that cannot be used.
    """

    tells_true_length = False

    def __init__(
        self,
        target: str,
        route: Route,
        tls: TlsSettings,
        api_key: str = "",
        model: str = "",
        *,
        needs_list: bool = True,
    ) -> None:
        self.target = target
        self._address = server_address("--target", target, tls)
        self._route, self._model, self._needs_list = route, model, needs_list
        self._pool = Pool(self._address.host, self._address.port, _tls_context(tls) if self._address.is_tls else None)
        host = f"[{self._address.host}]" if ":" in self._address.host else self._address.host
        self._headers = f"host: {host}:{self._address.port}\r\nuser-agent: lorrery-load/{VERSION}\r\n" + (
            f"authorization: Bearer {api_key}\r\n" if api_key else ""
        )
        self._cards: list[dict[str, Any]] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()

    # --- what is served ----------------------------------------------------------------------------------------------

    async def cluster(self, timeout_seconds: float) -> ClusterView:
        """See `Client.cluster`; over HTTP only the model and the maximum length are known."""
        deadline = time.monotonic() + timeout_seconds
        why = "nothing answers there"
        while (left := deadline - time.monotonic()) > 0:
            try:
                status, content = await self._get("/v1/models", left)
            except (OSError, ConnectionLostError, TimeoutError) as error:
                why = str(error) or why
            else:
                if status < _SERVER_ERRORS:
                    return self._view(status, content)
                why = f"/v1/models answers {status}: {error_text(content)}"
            await asyncio.sleep(min(_POLL_SECONDS, max(deadline - time.monotonic(), 0.0)))
        raise LorreryError(f"no server at {self.target} within {timeout_seconds:g} s: {why}")

    def _view(self, status: int, content: object) -> ClusterView:
        if status in _NOT_ALLOWED:
            raise LorreryError(
                f"{self.target}: /v1/models answers {status}: {error_text(content)}; give the key with --api-key or in"
                " $OPENAI_API_KEY"
            )
        cards = content.get("data") if status == _OK and isinstance(content, dict) else None
        listed = [card for card in cards if isinstance(card, dict) and "id" in card] if isinstance(cards, list) else []
        self._cards = listed
        base = next((card for card in listed if not card.get("parent")), None)
        if self._needs_list and not self._model and base is None:
            raise LorreryError(f"{self.target}: /v1/models lists no model ({status}); name it with --model")
        self._model = self._model or (str(base["id"]) if base else "")
        named = next((card for card in listed if card["id"] == self._model), base) or {}
        most = named.get("max_model_len")
        most = most if isinstance(most, int) and most > 0 else None
        return ClusterView(
            model=self._model,
            time_scale=1.0,
            num_shards=1,
            num_connected_shards=1,
            max_req_input_len=most,
            max_req_total_len=most,
            workers=None,
        )

    async def adapters(self, timeout_seconds: float) -> list[str]:
        """See `Client.adapters`: the models that have a parent, as vLLM lists them."""
        del timeout_seconds
        return [str(card["id"]) for card in self._cards or () if card.get("parent")]

    async def _get(self, path: str, timeout_seconds: float) -> tuple[int, object]:
        async with asyncio.timeout(timeout_seconds):
            response = Response(_collect)
            await self._exchange(f"GET {self._address.prefix}{path} HTTP/1.1\r\n{self._headers}\r\n".encode(), response)
        return response.status, _parsed(response)

    # --- requests ----------------------------------------------------------------------------------------------------

    def prepare(self, ask: Ask) -> Send:
        """See `Client.prepare`."""
        body = json.dumps(self._route.body(ask, self._model), ensure_ascii=False, separators=(",", ":")).encode()
        head = (
            f"POST {self._address.prefix}{self._route.path} HTTP/1.1\r\n{self._headers}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"x-request-id: load-{ask.seed}-{ask.request.index}\r\n\r\n"
        )
        message = head.encode() + body

        async def send(reception: Reception, on_tokens: Callable[[int], None]) -> None:
            answer = Answer(self._route.read, reception, on_tokens)
            await self._receive(message, answer, ask.timeout_seconds)
            answer.end(ask.max_new_tokens if ask.ignore_eos and self._route.has_asked_length else None)

        return send

    async def _receive(self, message: bytes, answer: Answer, timeout_seconds: float) -> None:
        def on_body(response: Response, piece: bytes) -> None:
            if response.status == _OK and not _is_document(response):
                answer.feed(piece)
            else:
                _collect(response, piece)

        response = Response(on_body)
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._exchange(message, response)
        except TimeoutError:
            answer.fail("DEADLINE_EXCEEDED", f"no end within {timeout_seconds:g} s")
        except ConnectionLostError as error:
            if not answer.is_over:
                answer.fail(CONNECTION_LOST, str(error))
        except OSError as error:
            answer.fail(CONNECTION_FAILED, str(error))
        else:
            if response.status != _OK:
                answer.fail(f"HTTP_{response.status}", _why(response))
            elif _is_document(response):
                answer.fail(BAD_RESPONSE, f"no stream of events, but: {_why(response)}")

    async def _exchange(self, message: bytes, response: Response) -> None:
        connection: Connection = await self._pool.take()
        try:
            connection.send(message, response)
            await response.ended
        except BaseException:
            self._pool.discard(connection)
            raise
        self._pool.give_back(connection)


def _collect(response: Response, piece: bytes) -> None:
    if len(response.body) < (_MOST_LIST_BYTES if response.status == _OK else _MOST_ERROR_BYTES):
        response.body += piece


def _is_document(response: Response) -> bool:
    """Whether an answer is one JSON document and no stream: some servers report errors so, with the status 200."""
    return response.headers.get("content-type", "").startswith("application/json")


def _why(response: Response) -> str:
    text = error_text(_parsed(response))
    if location := response.headers.get("location"):
        return f"{text} (it redirects to {location}; redirects are not followed)".strip()
    return text


def _parsed(response: Response) -> object:
    with contextlib.suppress(ValueError):
        parsed: object = json.loads(response.body)
        return parsed
    return response.body.decode("utf-8", "replace")


def _tls_context(tls: TlsSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=None if tls.ca is None else str(tls.ca))
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key)
    except OSError as error:
        raise SettingsError(f"client_tls: {error}") from None
    return context
