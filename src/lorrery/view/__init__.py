"""What people look at: the page and terminal of a cluster or of a simulation's record, reports, plots, tables.

`frame.py` is the picture of one moment that page (`app.py`, `page/`) and terminal (`top/`) show; `reports` makes an
HTML page from the files of runs.
"""
