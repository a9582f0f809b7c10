"""The orrery in a terminal, `lorrery top`: a model built from frames, rules over it, tables of it, and a screen.

`run.py` combines them; docs/monitoring.md describes the display.
"""
