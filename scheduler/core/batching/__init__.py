"""Ways to batch: what the next step does. One file each; `scheduler.core.batchings` names them."""
