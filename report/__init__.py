"""The report of a run folder: a self-contained page report.html, summary.json, and the table in the terminal.

`read.py` reads and checks what the run stored, `tables.py` and `charts.py` compute what is shown of it, and
`page.py` hands that to the templates: page.html, charts.html, style.css, script.js. Nothing is measured here.
`gallery.py` does the same for the studies' figures (gallery.html, gallery.css).

    python -m report runs/main --open
"""
