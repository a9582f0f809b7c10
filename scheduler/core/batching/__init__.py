"""Ways to batch: what the next step does; small ones share a file by kind. `scheduler.core.policies` names them."""
