"""The HTTP edge of a router: OpenAI's and vLLM's routes in front of the same requests that gRPC's `Generate` makes.

| file | contents |
|---|---|
| `server.py` | listens |
| `connection.py` | bounds the time and bytes that a connection may take |
| `bodies.py` | strict parsing of JSON, within bounds |
| `app.py` | the routes of the process, and errors as responses; those of clients are in the table of `router.edges` |
| `edge.py` | what all routes need of a request |
| `answer.py` | one response of one or more generations: collected, or streamed as server-sent events |
| `errors.py` | a request's error as a response, with the client's names of fields |
| `openai.py` | OpenAI's routes, as vLLM answers them |
| `generating.py`, `forms.py` | the fields of their requests, each honoured, ignored or refused; the form of an output |
| `openai_requests.py`, `openai_shapes.py` | requests and responses of completions and of chat |
| `token_details.py` | log-probabilities, token ids and prompts in these |
| `vllm.py` | vLLM's routes beside OpenAI's |
"""
