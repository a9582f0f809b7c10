"""Queues: who waits, in which order, and who may enter the batch now. `scheduler.core.catalogue` names them."""
