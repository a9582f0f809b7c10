"""Policies from outside the tree: a plug-in is wrapped where it is built, so that the core calls all policies alike.

Each wrapper implements the protocol of what it wraps, checks what comes back, and raises what is wrong as an error of
the policy, as if the policy had raised it itself. A senseless result would otherwise surface far from the policy, in a
device that knows nothing of it, or not at all: a queue that wakes at the present time would be called for ever. The
messages name no request, so that each is logged once. The tree's own policies are not wrapped: tests and types check
them.
"""
