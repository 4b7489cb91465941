"""The gallery of the studies' results, gallery.html: each claim of the papers, and the result here.

Reads every NAME.json of a folder (written by `publish` in lab/studies/common.py), the pictures that they
name, and how many predictions held, and writes one page that needs no other file and no network. A figure
of the paper without an entry is listed with the reason. Left out: any measurement or drawing.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from infra import files
from report import page, read

ROOT = Path(__file__).resolve().parent.parent
STUDIES = ROOT / "lab" / "results" / "studies"
TONES = {"yes": "yes", "partly": "partly", "no": "no", "not measurable": "open"}     # of "agrees"
MISSING = "not measured here"
WIDE = 2.2                        # width / height; a wider picture is too small next to text
UNQUOTED = " !$()*+,-./:;=?@_~"    # what a data: URL and HTML leave as it is, besides letters and digits
READING = "faults"                # the study of the section "Reading the curves"
PREDICTIONS = "predictions.json"  # beside the folder: {study: numbers of claims}, by lab.bench.predictions
# Figures and claims of the paper (arXiv:2509.23870), in its order
PAPER = ("Figure 1", "Lemma 3.1", "Theorem 3.2", "Figure 2", "Figure 3a", "Figure 3b", "Figure 4",
         "Section 3.3", "Theorem A.1", "Figure 5", "Figure 6", "Figure 7", "Table 3", "Figure 8", "Figure 9",
         "Figure 10a", "Figure 10b", "Figure 11")
# Of those without a study; any other's is not in the folder
REASONS = {"Figure 6": "A drawing of the method, not a measurement; this one is ours.",
           "Figure 10a": "Its content could not be read in the sources available to this project."}
NO_STUDY = "This folder has no study of it."
OURS = {"Figure 6": ROOT / "docs" / "loop.svg"}


@dataclass(frozen=True, slots=True)
class Entry:
    """The page's entry on one figure or claim."""

    anchor: str          # its id on the page
    paper: str           # the figure or claim
    claim: str           # of the paper, in our words; empty if not measured here
    found: str           # the result here
    agrees: str          # one of TONES, or MISSING
    picture: str         # a data: URL; empty: none
    wide: bool           # whether the picture needs the page's full width
    command: str         # reproduces the result
    predicted: str       # what was predicted of the study, and how much of it held; empty: nothing

    @property
    def tone(self):
        """The class of its color."""
        return TONES.get(self.agrees, "open")


@dataclass(frozen=True, slots=True)
class Lesson:
    """A deliberate fault in a run, and the rule that detects it."""

    title: str
    what: str            # description of the fault
    tell: str            # the rule
    found: str           # its numbers
    detected: bool       # whether the rule detected the fault
    error: str           # with which gcd.py stops such a run; empty: it does not stop
    picture: str         # a data: URL


def picture(path, place):
    """An SVG file, in one line, as a data: URL, which is a fifth shorter than in base64.

    As an image it runs no scripts and loads nothing.
    """
    try:
        content = re.sub(rb"\s*\n\s*", b" ", path.read_bytes())
    except OSError as error:
        raise ValueError(f"{place}: its picture {path}: {error.strerror}") from None
    return "data:image/svg+xml," + quote(content, safe=UNQUOTED)


def is_wide(path):
    """Whether an SVG file is WIDE by its viewBox."""
    content = path.read_text(encoding="utf-8", errors="replace")
    box = re.search(r'viewBox="[-\d.]+ [-\d.]+ (\d+\.?\d*) (\d+\.?\d*)"', content)
    return box is not None and float(box[1]) > WIDE * float(box[2])


def picture_path(folder, name, place):
    """The path of a study's picture. ValueError if it is not in `folder`: the study may be a stranger's."""
    path = folder / name
    if path.resolve().parent != folder.resolve():
        raise ValueError(f"{place}: its picture {name!r:.200}: expected a file in {folder}")
    return path


def studies(folder):
    """{file: study} of every JSON file in a folder. ValueError if one is broken or none exists."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    found = {path: read.checked(files.read_json(path), lambda study, place: read.expect(study, dict, place),
                                path) for path in sorted(folder.glob("*.json"))}
    if not found:
        raise ValueError(f"{folder}: no study in it (python -m lab.studies.NAME writes NAME.json)")
    return found


def texts(record, names, place):
    """The named fields of a record. ValueError, with field and file, if one is no text."""
    record = read.expect(record, dict, place)
    for name in names:
        if not isinstance(record.get(name), str):
            raise ValueError(f"{place}, {name}: expected a text, found {record.get(name)!r:.60}")
    return [record[name] for name in names]


def predicted_of(folder, name):
    """How many of the claims that were committed before a study's runs held; "" if there are none."""
    path = folder.parent / PREDICTIONS
    numbers = read.expect(files.read_json(path), dict, path).get(name)
    if numbers and not (isinstance(numbers, list) and [type(n) for n in numbers] == [int] * 3):
        raise ValueError(f"{path}, {name}: expected three numbers of claims, found {numbers!r:.60}")
    return "of {} claims about this study {} held and {} failed".format(*numbers) if numbers else ""


def entries(found):
    """An Entry for each figure of the studies, and for each of PAPER that none covers.

    They are in the paper's order; entries that are not in PAPER come last.
    """
    result = []
    for path, study in found.items():
        for number, figure in enumerate(read.expect(study.get("figures", []), list, f"{path}, figures"), 1):
            place = f"{path}, figure {number}"
            paper, claim, result_here, agrees, file = texts(
                figure, ("paper", "claim", "found", "agrees", "picture"), place)
            if agrees not in TONES:
                raise ValueError(f"{place}, agrees: expected one of {', '.join(TONES)}, found {agrees!r:.60}")
            (command,), drawn = texts(study, ("command",), path), picture_path(path.parent, file, place)
            result.append(Entry(f"{path.stem}-{number}", paper, claim, result_here, agrees,
                                picture(drawn, place), is_wide(drawn), command,
                                predicted_of(path.parent, path.stem)))
    covered = [name for name in PAPER if any(covers(entry.paper, name) for entry in result)]
    for name in PAPER:
        if name not in covered:
            ours = picture(OURS[name], name) if name in OURS else ""
            anchor = name.lower().replace(" ", "-").replace(".", "-")
            result.append(Entry(anchor, name, "", REASONS.get(name, NO_STUDY), MISSING, ours, False, "", ""))
    order = {name: i for i, name in enumerate(PAPER)}
    return sorted(result, key=lambda entry: min((order[name] for name in PAPER if covers(entry.paper, name)),
                                                default=len(order)))


def covers(paper, name):
    """Whether an entry's title contains this name: "Figure 4 and section 3.3" covers two."""
    return re.search(rf"\b{re.escape(name)}(?![\w.]*\w)", paper, re.IGNORECASE) is not None


def lessons(found):
    """The Lessons of the runs with deliberate faults, and the command of their study; else ([], "")."""
    for path, study in found.items():
        if path.stem == READING:
            (command,) = texts(study, ("command",), path)
            return [lesson(path, fault, f"{path}, fault {number}") for number, fault in
                    enumerate(read.expect(study.get("faults", []), list, f"{path}, faults"), 1)], command
    return [], ""


def lesson(path, fault, place):
    """The Lesson of one fault, checked."""
    title, what, tell, found, error, file = texts(
        fault, ("title", "what", "tell", "found", "error", "picture"), place)
    if not isinstance(fault.get("told"), bool):
        raise ValueError(f"{place}, told: expected true or false, found {fault.get('told')!r:.60}")
    drawn = picture(picture_path(path.parent, file, place), place)
    return Lesson(title, what, tell, found, fault["told"], error, drawn)


def gallery(folder=STUDIES):
    """The page as HTML. ValueError, with the file, if a study's file is not as a study writes it."""
    found = studies(folder)
    of_faults, command = lessons(found)
    return page.templates().get_template("gallery.html").render(
        entries=entries(found), lessons=of_faults, lessons_command=command, missing=MISSING)
