"""The studies' results -> gallery.html: every figure of the paper, and what else studies look at, what is
claimed there, and what came out here.

Reads the NAME.json of a folder (studies/common.publish writes them) and the pictures that they name, and puts
all into one page that needs no other file and no network. A figure without an entry is listed with the reason
why. Left out: anything measured or drawn.
"""

import base64
import re
from dataclasses import dataclass
from pathlib import Path

from report import page, read
from run import files

ROOT = Path(__file__).resolve().parent.parent
STUDIES = ROOT / "results" / "studies"
TONES = {"yes": "yes", "partly": "partly", "no": "no", "not measurable": "open"}      # of what "agrees" says
MISSING = "not measured here"
WIDE = 2.2                        # times its height: beside a text such a picture is too small to read
READING = "faults"                # the study whose runs teach to read the curves
# What the paper (arXiv:2509.23870) has, in its order, and what is said where no study has an entry
PAPER = {
    "Figure 1": "It takes models of a run's many iterations: confidence in repeated actions over training.",
    "Lemma 3.1": "It takes no run: python -m studies.theory.",
    "Theorem 3.2": "It takes no run: python -m studies.theory.",
    "Figure 2": "It takes the flawed actions of won and of lost episodes.",
    "Figure 3a": "It takes the gradients of samples of several worlds.",
    "Figure 3b": "It takes a gradient step on one sample, and all others' probabilities.",
    "Figure 4": "It takes no run: python -m studies.theory.",
    "Section 3.3": "It takes no run: python -m studies.theory.",
    "Theorem A.1": "It takes no run: python -m studies.theory.",
    "Figure 5": "It takes the same decisions asked again of models along a run.",
    "Figure 6": "A drawing of the method, not a measurement; this is ours.",
    "Figure 7": "It takes the rows of Table 3, which it draws.",
    "Table 3": "It takes some eight core-hours: python -m studies.ablation says how.",
    "Figure 8": "It takes the influence between samples along runs of several methods.",
    "Figure 9": "It takes the influence of each token.",
    "Figure 10a": "What it shows could not be read in the sources that this project has.",
    "Figure 10b": "It takes a judge that answers and one that is a value head, and their gradients.",
    "Figure 11": "It takes runs of twice the iterations."}
OURS = {"Figure 6": ROOT / "docs" / "loop.svg"}


@dataclass(frozen=True, slots=True)
class Entry:
    """What the page says of one figure or claim."""

    anchor: str          # its id on the page
    paper: str           # which figure or claim
    claim: str           # the paper's, in our words; empty where nothing was measured
    found: str           # here
    agrees: str          # of TONES, or MISSING
    picture: str         # a data: address; empty: none
    wide: bool           # the picture needs the page's whole width
    study: str           # which file says so
    command: str         # that makes it anew

    @property
    def tone(self):
        """The class of its colour."""
        return TONES.get(self.agrees, "open")


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a fault looks like, and how it is told."""

    title: str
    what: str            # is broken
    tell: str            # how it is told
    found: str           # the numbers
    told: bool           # whether that held
    error: str           # with which gcd.py stops such a run; empty: it does not
    picture: str


def picture(path, place):
    """An SVG file as an address that holds it whole, but for its indents. As an image it runs no script and
    loads nothing."""
    try:
        content = re.sub(rb"\n +", b"\n", path.read_bytes())
    except OSError as error:
        raise ValueError(f"{place}: its picture {path}: {error.strerror}") from None
    return "data:image/svg+xml;base64," + base64.b64encode(content).decode()


def is_wide(path):
    """Whether an SVG file says, by its viewBox, that it is much wider than high."""
    content = path.read_text(encoding="utf-8", errors="replace")
    box = re.search(r'viewBox="[-\d.]+ [-\d.]+ (\d+\.?\d*) (\d+\.?\d*)"', content)
    return box is not None and float(box[1]) > WIDE * float(box[2])


def studies(folder):
    """{file: study} of every JSON file in a folder. ValueError names one that is broken, or that none is."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    found = {path: read.expect(files.read_json(path), dict, path) for path in sorted(folder.glob("*.json"))}
    if not found:
        raise ValueError(f"{folder}: no study in it (python -m studies.NAME writes NAME.json)")
    return found


def words(record, names, place):
    """The named fields of a record, which must be texts. ValueError names the field and the file."""
    record = read.expect(record, dict, place)
    for name in names:
        if not isinstance(record.get(name), str):
            raise ValueError(f"{place}, {name}: expected a text, found {record.get(name)!r:.60}")
    return [record[name] for name in names]


def entries(found):
    """An entry for each figure that a study has something to say of, and for each of PAPER without one: in
    the paper's order, then what is of no figure."""
    result = []
    for path, study in found.items():
        for number, figure in enumerate(read.expect(study.get("figures", []), list, f"{path}, figures"), 1):
            place = f"{path}, figure {number}"
            paper, claim, said, agrees, file = words(
                figure, ("paper", "claim", "found", "agrees", "picture"), place)
            if agrees not in TONES:
                raise ValueError(f"{place}, agrees: expected one of {', '.join(TONES)}, found {agrees!r:.60}")
            (command,) = words(study, ("command",), path)
            result.append(Entry(f"{path.stem}-{number}", paper, claim, said, agrees,
                                picture(path.parent / file, place), is_wide(path.parent / file),
                                path.stem, command))
    covered = [name for name in PAPER if any(covers(entry.paper, name) for entry in result)]
    for name, reason in PAPER.items():
        if name not in covered:
            ours = picture(OURS[name], name) if name in OURS else ""
            anchor = name.lower().replace(" ", "-").replace(".", "-")
            result.append(Entry(anchor, name, "", reason, MISSING, ours, False, "", ""))
    order = {name: i for i, name in enumerate(PAPER)}
    return sorted(result, key=lambda entry: min((order[name] for name in PAPER if covers(entry.paper, name)),
                                                default=len(order)))


def covers(paper, name):
    """Whether what an entry calls itself names this figure: "Figure 4 and section 3.3" names two."""
    return re.search(rf"\b{re.escape(name)}(?![\w.]*\w)", paper, re.IGNORECASE) is not None


def lessons(found):
    """What the runs that were broken on purpose teach, and the command that makes them; ([], "") without."""
    for path, study in found.items():
        if path.stem == READING:
            (command,) = words(study, ("command",), path)
            return [lesson(path, fault, f"{path}, fault {number}") for number, fault in
                    enumerate(read.expect(study.get("faults", []), list, f"{path}, faults"), 1)], command
    return [], ""


def lesson(path, fault, place):
    """One of them, checked."""
    title, what, tell, said, error, file = words(
        fault, ("title", "what", "tell", "found", "error", "picture"), place)
    if not isinstance(fault.get("told"), bool):
        raise ValueError(f"{place}, told: expected true or false, found {fault.get('told')!r:.60}")
    return Lesson(title, what, tell, said, fault["told"], error, picture(path.parent / file, place))


def gallery(folder=STUDIES):
    """The page as one text. Raises ValueError for what no study writes, naming its file."""
    found = studies(folder)
    taught, command = lessons(found)
    return page.environment().get_template("gallery.html").render(
        entries=entries(found), lessons=taught, lessons_command=command, missing=MISSING)
