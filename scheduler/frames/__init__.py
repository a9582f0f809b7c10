"""Frames of a scheduler, for watchers."""
