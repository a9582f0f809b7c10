"""The HTTP edge of a router: S-LoRA's and OpenAI's routes in front of the same requests that gRPC's `Generate` makes.

server.py           listens
connection.py       bounds the time and bytes that a connection may take bodies.py           strict parsing of JSON
bodies app.py              the routes of the process, and errors as responses edge.py             what all routes need
of a request answer.py           one HTTP response of one or more generations: collected, or streamed as server-sent
events errors.py           a request's error as an HTTP response openai.py           OpenAI's routes, as vLLM answers
them
  generating.py       the fields of their requests, each honoured, ignored or refused
  openai_requests.py  those of completions and of chat
  openai_shapes.py    their responses
  openai_details.py   log-probabilities, token ids and prompts in these
responses.py        OpenAI's Responses, text only
  responses_requests.py, responses_shapes.py
anthropic.py        Anthropic's Messages, text only
  anthropic_requests.py, anthropic_shapes.py
  anthropic_errors.py   keys and errors in Anthropic's format
blocks.py           content blocks, for Responses and Messages events.py           named events, for Responses and
Messages vllm.py             vLLM's routes beside OpenAI's slora.py            S-LoRA's llm_mock.py         llm-mock's
"""
