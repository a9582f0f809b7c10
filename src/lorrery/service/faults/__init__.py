"""Injected faults: kinds and syntax, the rules that choose what they apply to, and rules that arrive in calls."""
