"""Which routes answer without a key is what docs/clients.md says."""

import json
import re
from pathlib import Path

from tests.router.http.conftest import StartHttp

CLIENTS = Path(__file__).parents[3] / "docs" / "clients.md"


async def test_the_routes_that_answer_without_a_key_are_those_of_the_page(start_http: StartHttp, tmp_path: Path):
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nname = "one"\nsha256 = "{"0" * 64}"\ntenant = "acme"\n')
    router = await start_http(router={"keys": str(keys)})

    async def ask(method: str, path: str) -> tuple[int, bytes]:
        answer = await router.exchange(
            f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
        )
        return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]

    paths = json.loads((await ask("GET", "/openapi.json"))[1])["paths"]
    routes = [
        ("get", "/openapi.json"),
        ("get", "/docs"),
        ("get", "/redoc"),
        *((m, path) for path, methods in paths.items() for m in methods),
    ]
    answered = {path for method, path in routes if (await ask(method.upper(), path))[0] != 401}
    said = re.search(
        r"is asked for on every route but ([^.]*)\.\s+Without", CLIENTS.read_text().replace(".json", "-json")
    )
    assert said is not None
    assert answered == {path.replace("-json", ".json") for path in re.findall(r"`(/[^`]+)`", said[1])}
