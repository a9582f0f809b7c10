"""The HTTP edge of a router: S-LoRA's and OpenAI's routes in front of the same requests that gRPC's `Generate` makes.

server.py           listens
connection.py       bounds what a connection may cost
bodies.py           JSON as it is to be
app.py              which route does what
edge.py             what all routes need of a request
answer.py           one HTTP answer of one or more generations: collected, or streamed as server-sent events
errors.py           a request's error as an HTTP answer
openai.py           OpenAI's routes, as vLLM answers them
  generating.py       the fields of their requests, each honoured, passed over or refused
  openai_requests.py  those of completions and of chat
  openai_shapes.py    their answers
  openai_details.py   log-probabilities, token ids and prompts in these
responses.py        OpenAI's Responses, of text
  responses_requests.py, responses_shapes.py
anthropic.py        Anthropic's Messages, of text
  anthropic_requests.py, anthropic_shapes.py
  anthropic_errors.py   keys and errors as Anthropic has them
blocks.py           content in blocks, of both
events.py           events with names, of both
vllm.py             vLLM's routes beside OpenAI's
slora.py            S-LoRA's
llm_mock.py         llm-mock's
"""
