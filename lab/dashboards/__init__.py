"""Makes deploy/grafana/dashboards/*.json: `make dashboards` writes them, a test finds them stale.

One module per dashboard, in the order of `boards.BOARDS`; `board.py` and `panels.py` know Grafana's model.
"""
