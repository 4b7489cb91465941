"""The command: a run folder -> report.html and summary.json in it, and the table in the terminal.

    python -m report runs/main --open
    python -m report --gallery              # results/studies -> gallery.html in it, the paper's claims
"""

import argparse
import sys
import webbrowser
from pathlib import Path

from report import gallery, page, read, tables
from run import files


def write(folder, results=read.RESULTS):
    """Reads a run folder, writes report.html and summary.json into it. Returns the summary and its caption.

    Raises ValueError for what is no run folder, OSError for what cannot be read or written.
    """
    runs = read.read_runs(folder)
    summary, seeds = tables.summarize(runs), read.read_seeds(runs, results)
    files.write_text(folder / "report.html", page.page(runs, summary, seeds))
    files.write_json(folder / "summary.json", summary)
    return summary, tables.caption(runs, summary, seeds)


def show(path):
    """The page in the browser."""
    if not webbrowser.open(path.resolve().as_uri()):
        print(f"report: no browser found; open {path} yourself", file=sys.stderr)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m report", allow_abbrev=False,
                                     description="A run folder -> report.html, summary.json and a table.")
    parser.add_argument("folder", type=Path, nargs="?",
                        help="what holds one folder per method (default: runs/main), or with --gallery the "
                        "studies' results (default: results/studies)")
    parser.add_argument("--gallery", action="store_true",
                        help="the studies' figures beside the paper's claims, as gallery.html")
    parser.add_argument("--open", action="store_true", help="show the page in the browser")
    arguments = parser.parse_args(argv)
    folder = arguments.folder or (gallery.STUDIES if arguments.gallery else Path("runs/main"))
    written = folder / ("gallery.html" if arguments.gallery else "report.html")
    try:
        if arguments.gallery:
            files.write_text(written, gallery.gallery(folder))
        else:
            summary, caption = write(folder)
    except ValueError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"report: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    if arguments.gallery:
        print(f"wrote {written}")
    else:
        print("\n".join([tables.table(summary), *caption]))
        print(f"wrote {written} and {folder / 'summary.json'}")
    if arguments.open:
        show(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
