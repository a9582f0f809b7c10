"""Ways to batch: what the next step does. One file each; `scheduler.core.batching.table` names them."""
