"""The command: writes report.html and summary.json into a run folder, and prints the table.

    python -m report runs/main --open
    python -m report --gallery              # writes lab/results/studies/gallery.html: the papers' claims
"""

import argparse
import sys
import webbrowser
from pathlib import Path

from infra import files
from report import gallery, page, read, tables


def write(folder, results=read.RESULTS):
    """Write report.html and summary.json into a run folder. Returns the summary and its caption.

    ValueError if the folder is no run folder, OSError if a file cannot be read or written.
    """
    runs = read.read_runs(folder)
    summary, seeds = tables.summarize(runs), read.read_seeds(runs, results)
    files.write_text(folder / "report.html", page.page(runs, summary, seeds))
    files.write_json(folder / "summary.json", summary)
    return summary, tables.caption(runs, summary, seeds)


def open_in_browser(path):
    """Open a page in the browser, or print its path if there is none."""
    if not webbrowser.open(path.resolve().as_uri()):
        print(f"report: no browser found; open {path} yourself", file=sys.stderr)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m report", allow_abbrev=False,
                                     description="Write a run folder's report.html and summary.json.")
    parser.add_argument("folder", type=Path, nargs="?",
                        help="run folder, with one folder per method (default: runs/main); with --gallery, "
                        "the studies' results (default: lab/results/studies)")
    parser.add_argument("--gallery", action="store_true",
                        help="write gallery.html: the studies' figures next to the papers' claims")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
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
        open_in_browser(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
