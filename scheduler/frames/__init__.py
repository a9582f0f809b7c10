"""Frames of a scheduler, for whoever watches it."""
