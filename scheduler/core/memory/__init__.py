"""Memory: whether a sequence fits beside the others, for how long. `scheduler.core.policies` names the rules."""
