"""The report of a run folder: a self-contained page report.html, summary.json, and the table in the terminal.

`read.py` reads and checks the run's files, `tables.py` and `charts.py` compute tables and charts, `page.py`
renders the templates page.html, charts.html, style.css and script.js. `gallery.py` does the same for the
figures of lab/studies (gallery.html, gallery.css). Left out: any measurement.

    python -m report runs/main --open
"""
