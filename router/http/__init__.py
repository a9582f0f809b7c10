"""The HTTP edge of a router: S-LoRA's and OpenAI's routes in front of the same requests that gRPC's `Generate` makes.

server.py      listens; bounds what a client may send
app.py         which route does what
answer.py      one HTTP answer of one or more generations: collected, or streamed as server-sent events
openai.py      OpenAI's requests and shapes, as vLLM answers them
slora.py       S-LoRA's
errors.py      a request's error as an HTTP answer
"""
