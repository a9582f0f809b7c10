"""Outputs of a given form: JSON under a schema, texts that match a pattern, one of several texts.

A constraint and a seed give a text, always the same. `drawing.py` is the way in.
"""
