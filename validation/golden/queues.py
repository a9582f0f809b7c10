"""Tells the six queue records apart: one shape (`rounds` of events and a question), each with fields of its own."""

from collections.abc import Mapping

from lorrery.validation.golden.kind import Record


def queue_kind(record: Record) -> str | None:
    """Return the name of the queue that a record is about, or None if it is about no queue."""
    config, rounds = record.get("config"), record.get("rounds")
    if "lora_ranks" not in record or not isinstance(config, Mapping) or not isinstance(rounds, list):
        return None
    for own_field, name in (
        ("profile", "pets_req_queue"),
        ("fair_weights", "vtc_req_queue"),
        ("batch_num_adapters", "cluster_req_queue"),
    ):
        if own_field in config:
            return name
    first_round = rounds[0] if rounds else {}
    for own_field, name in (("enqueue_time", "abort_req_queue"), ("prefetch_ids", "req_queue")):
        if own_field in first_round:
            return name
    return "peft_req_queue"
