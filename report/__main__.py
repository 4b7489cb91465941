"""The command: writes report.html and summary.json into a run folder, and prints the table; or compares.

    python -m report runs/main --open
    python -m report compare A.json B.json  # two evaluations, game by game; see compare.py
    python -m report --gallery              # writes lab/results/studies/gallery.html: the papers' claims
"""

import argparse
import sys
import webbrowser
from pathlib import Path

from envs._terminal import StdoutError, printed
from infra import files
from report import compare, gallery, page, read, tables


def write(folder, results=read.RESULTS):
    """Write report.html and summary.json into a run folder. Returns the summary and its caption.

    ValueError if the folder is no run folder, OSError if a file cannot be read or written.
    """
    runs = read.read_runs(folder)
    summary, seeds = tables.summarize(runs), read.read_seeds(runs, results)
    files.write_text(folder / "report.html", page.page(runs, summary, seeds))
    files.write_json(folder / "summary.json", summary)
    return summary, tables.caption(runs, summary, seeds)


def main(argv=None):
    """The command. Returns its exit status: 0, or 2 for what cannot be read, written or compared."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["compare"]:
        with printed("report"):
            return run_compare(argv[1:])
    parser = argparse.ArgumentParser(prog="python -m report", allow_abbrev=False,
                                     description="Write a run folder's report.html and summary.json.",
                                     epilog="python -m report compare --help: two evaluations, game by game")
    parser.add_argument("folder", type=Path, nargs="?",
                        help="folder of a run, or of several methods' (default: runs/main); with --gallery, "
                        "the studies' results (default: lab/results/studies)")
    parser.add_argument("--gallery", action="store_true",
                        help="write gallery.html: the studies' figures next to the papers' claims")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    with printed("report"):
        return run(parser.parse_args(argv))


def run_compare(argv):
    """Print a comparison. Returns the exit status."""
    try:
        print("\n".join(compare.main(argv)), flush=True)
        return 0
    except (ValueError, OSError, StdoutError) as error:
        return failed(error)


def failed(error, done=""):
    """Print an error, and what was done before it. Returns the exit status."""
    why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else f"{error}"
    print("; ".join(filter(None, [f"report: {why}", done])).replace("\n", "\\n"), file=sys.stderr)
    return 2


def run(arguments):
    """Write the page and print the table. Returns the exit status."""
    folder = arguments.folder or (gallery.STUDIES if arguments.gallery else Path("runs/main"))
    page_file, done, lines = folder / ("gallery.html" if arguments.gallery else "report.html"), "", []
    try:
        if arguments.gallery:
            files.write_text(page_file, gallery.gallery(folder))
            done = f"wrote {page_file}"
        else:
            summary, caption = write(folder)
            done = f"wrote {page_file} and {folder / 'summary.json'}"
            lines = [tables.table(summary), *caption]
        print("\n".join([*lines, done]), flush=True)
    except (ValueError, OSError, StdoutError) as error:
        return failed(error, done)
    if arguments.open and not webbrowser.open(page_file.resolve().as_uri()):
        print(f"report: no browser found; open {page_file} yourself", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
