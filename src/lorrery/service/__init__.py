"""How any process of this project lives: errors, signals, clocks, tasks; settings, network, telemetry, files, faults.

`process.py` is the life of a service; `local` runs a cluster of them on this machine. Nothing here knows a service.
"""
