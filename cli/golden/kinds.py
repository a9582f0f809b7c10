"""The kinds of golden records, in one tuple. A record belongs to at most one of them."""

from cli.golden.kind import Kind
from cli.golden.length_limits import LengthLimits
from cli.golden.llmmock_decode_length import LlmMockDecodeLength
from cli.golden.llmmock_step_time import LlmMockStepTime
from cli.golden.llmmock_trie import LlmMockTrie
from cli.golden.not_modelled import NotModelled, loop_not_modelled, queue_not_modelled
from cli.golden.req_queue import SloraReqQueue
from cli.golden.router_loop import SloraRouterLoop
from cli.golden.run_exp_metrics import RunExpMetrics
from cli.golden.sampling_params import SamplingParameters
from cli.golden.trace_generate_requests import TraceGenerateRequests

KINDS: tuple[Kind, ...] = (
    SloraReqQueue(),
    SloraRouterLoop(),
    SamplingParameters(),
    LengthLimits(),
    TraceGenerateRequests(),
    RunExpMetrics(),
    LlmMockTrie(),
    LlmMockStepTime(),
    LlmMockDecodeLength(),
    queue_not_modelled("vtc_req_queue", "the fair queue (virtual token counters)"),
    queue_not_modelled("cluster_req_queue", "the adapter-clustering queue"),
    queue_not_modelled("abort_req_queue", "the early-drop queue"),
    queue_not_modelled("peft_req_queue", "the queue of one adapter at a time"),
    queue_not_modelled("pets_req_queue", "the profiled-cost (PetS) queue"),
    loop_not_modelled("vtc_fair", "the fair queue (virtual token counters)"),
    loop_not_modelled("cluster", "the adapter-clustering queue"),
    NotModelled(
        "llmmock_scheduler",
        "llm-mock's scheduler (a whole run on a virtual clock)",
        lambda record: record.keys() >= {"batch_size", "cache", "requests", "result"},
    ),
)
