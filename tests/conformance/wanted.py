"""Where this router's answers are meant to differ from a real vLLM's, and why."""

import re
from collections.abc import Iterable
from typing import NamedTuple


class Wanted(NamedTuple):
    """A kind of difference that is meant.

    Attributes:
        request: pattern of names of requests.
        difference: pattern of differences, as `compare.differences` words them.
        why: the reason.
    """

    request: str
    difference: str
    why: str


WANTED = (
    Wanted("", r'^body\.error\.param: null -> "', "names the field where vLLM does not: a client has more, not less"),
    Wanted(
        "",
        r'^body\.error\.param: "(body|input_tokens|type|max_tokens|logprob_token_ids|response_format)[\w.]*" -> "',
        "names the field as the client sent it, not the class that vLLM reads it with, or a value that it makes of it",
    ),
    Wanted("", r'^body\.error\.type: "BadRequestError" -> "Bad Request"', "checked with the types, not behind them"),
    Wanted("/tokenize", r"^body\.error\.type", "vLLM tries two kinds of body and tells the errors of the first"),
    Wanted(
        "GET /v1/models|models after",
        r"^body\.data(\[\]\.(owned_by|root))?:",
        "it is no vLLM, and serves another model",
    ),
    Wanted("GET /version", r"^body\.version", "its own version"),
    Wanted(
        "(GET|POST|PUT|DELETE|HEAD|OPTIONS) /v1/models/",
        r"^(status|body)",
        "OpenAI's clients ask for one model, which vLLM does not answer",
    ),
    Wanted("(HEAD) /(health|ping)", r"^status: 405 -> 200", "load balancers probe with HEAD"),
    Wanted("(POST|HEAD) /generate", r"^status", "S-LoRA's route"),
    Wanted(
        " /(v1/chat/completions/render|inference/v1/generate)",
        r"^status: (403|405) -> 404",
        "vLLM has these routes to refuse them: they are for parts of an engine on several machines",
    ),
    Wanted(
        r"\[(5463|5503)\]|\"5463\"",
        r"^(status: 200 -> 400|body)",
        "the vocabulary has 5,463 tokens; that vLLM's matrices have more rows is no use to a client",
    ),
    Wanted("grammar", r"^status: 200 -> 400", "the mock model follows schemas, patterns and choices, and no grammar"),
    Wanted("structural_tag", r"^(status|body)", "the same"),
    Wanted("structured_outputs", r"^status: 500 -> 400", "the fault is the client's, and vLLM means to say so"),
    Wanted(
        "vllm_xargs", r"^status: 400 -> 200", "no engine reads these arguments, so they cannot be too large for one"
    ),
    Wanted("ignore_eos", r"^(body|events)", "an output that has a form ends with it; vLLM goes on without one"),
    Wanted("json", r'\{\\"a\\": \[1, 2\]\}', "JSON with blanks and without is the same"),
    Wanted("batch stream=true", r"^body\.choices", "vLLM returns the last token of each output alone"),
    Wanted("^key", r"^status: 200 -> 401", "with keys, every route that shows or does something asks for one"),
    Wanted("^key .*/v1/absent", r"^status: 401 -> 404", "what is not there needs no key"),
    Wanted("^key", r"prompt_tokens_details|cache_\w+_input_tokens", "usage always tells what a cache had"),
    Wanted("^key .*/(version|v1/models)", r"^body\.(version|data)", "as without keys"),
    Wanted("max_tokens=3", r"^(body|events)", "of a call that is cut off no part is shown as text"),
    Wanted(
        "structured_outputs.*tools|tool_choice",
        r"^body\.choices\[\]\.message\.content|^events|^status: 400 -> 200",
        "the mock model writes the calls that it is asked for; one without weights writes anything",
    ),
    Wanted(
        "forced .* stream", r"^events\.choice", "a text is cut into other tokens, so others of its events are empty"
    ),
)


def unwanted(request: str, found: Iterable[str]) -> list[str]:
    """Return those of a request's differences that are not meant."""
    meant = [one.difference for one in WANTED if re.search(one.request, request)]
    return [one for one in found if not any(re.search(pattern, re.sub(r"\[\d+\]", "[]", one)) for pattern in meant)]
