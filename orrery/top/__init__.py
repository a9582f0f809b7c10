"""The orrery in a terminal, `lorrery top`: a model of what frames say, rules over it, tables of it, and a screen.

`run.py` holds them together; docs/orrery.md describes what is seen.
"""
