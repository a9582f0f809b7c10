"""Distinguishes the six queue records: one shape (`rounds` of events and a query), each with its own fields."""

from collections.abc import Mapping

from lorrery.validation.golden.kind import Record


def queue_kind(record: Record) -> str | None:
    """Return the name of the queue that a record covers, or None if it covers none."""
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
