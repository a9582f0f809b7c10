"""Memory: whether a sequence fits beside the others, and for how long. `scheduler.core.memories` names the rules."""
