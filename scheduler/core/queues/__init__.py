"""Queues: who waits, in which order, and who may enter the batch now. `scheduler.core.policies` names them."""
