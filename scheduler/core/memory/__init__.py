"""Memory: whether a sequence fits beside the others, for how long. `scheduler.core.memory.table` has the rules."""
