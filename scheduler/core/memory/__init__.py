"""Memory: whether a sequence fits beside the others, and for how long. `scheduler.core.catalogue` names the rules."""
