"""Queues: the order of waiting sequences, and which may enter the batch now. `scheduler.core.policies` names them."""
