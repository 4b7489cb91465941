"""Draws docs/loop.svg, the diagram of one training step: play, judge, credit assignment, update.

    python -m lab.bench.loop
"""

from html import escape

from infra.files import write_text

BOXES = {       # name: (x, y, title, source file, lines of description)
    "play": (20, 80, "play", "rollout.py", ("the model plays 16 games,", "8 times each")),
    "judge": (375, 15, "judge", "judge.py", ("turns get labels; the model", "is asked about its own turns")),
    "credit": (375, 145, "credit", "algorithms/", ("rewards are compared:", "each turn gets an advantage")),
    "update": (730, 80, "update", "update.py", ("one step on both losses:", "L = L_policy + λ L_judge")),
}
ARROWS = (       # (from, to, label, position of the label)
    ("play", "judge", "turns", (285, 66)), ("play", "credit", "rewards", (283, 194)),
    ("judge", "update", "judge samples", (672, 54)), ("credit", "update", "advantages", (672, 208)),
)
WIDTH, HEIGHT, BOX = 970, 290, (220, 92)
STYLE = """text{font:14px system-ui,sans-serif;fill:#1d2329}.title{font-weight:600;font-size:16px}
.file{font:12px ui-monospace,Menlo,monospace;fill:#5c6670}.note{font-size:12.5px;fill:#5c6670}
rect{fill:#fff;stroke:#0072b2;stroke-width:1.5}path{fill:none;stroke:#5c6670;stroke-width:1.6}"""


def text(x, y, line, kind, anchor="start"):
    """An SVG text element of one line. kind: CSS class."""
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(line)}</text>'


def box(x, y, title, file, lines):
    """The box of one stage: title, source file, lines of description."""
    parts = [f'<rect x="{x}" y="{y}" width="{BOX[0]}" height="{BOX[1]}" rx="9"/>',
             text(x + 14, y + 26, title, "title"), text(x + BOX[0] - 14, y + 26, file, "file", "end")]
    return "".join(parts + [text(x + 14, y + 52 + 20 * i, line, "note") for i, line in enumerate(lines)])


def arrow(start, end):
    """A curve from the right edge of box `start` to the left edge of box `end`; both are keys of BOXES."""
    (x, y, *_), (u, v, *_) = BOXES[start], BOXES[end]
    a, b = (x + BOX[0], y + BOX[1] / 2), (u - 4, v + BOX[1] / 2)
    middle = (a[0] + b[0]) / 2
    return f'<path marker-end="url(#tip)" d="M{a[0]} {a[1]}C{middle} {a[1]} {middle} {b[1]} {b[0]} {b[1]}"/>'


def picture():
    """The complete diagram as SVG."""
    x, y = BOXES["update"][0] + BOX[0] / 2, BOXES["update"][1] + BOX[1]
    u, v = BOXES["play"][0] + BOX[0] / 2, BOXES["play"][1] + BOX[1]
    back = f'<path marker-end="url(#tip)" d="M{x} {y}V270H{u}V{v + 4}"/>'
    tip = ('<marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="8" markerHeight="8" '
           'orient="auto"><path d="M1 1L6 4L1 7"/></marker>')
    labels = [text(*position, label, "note", "middle") for _, _, label, position in ARROWS]
    return "".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" ',
        f'aria-label="One training step"><style>{STYLE}</style><defs>{tip}</defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" style="stroke:none;fill:#fafaf7"/>',
        *(box(*fields) for fields in BOXES.values()), *(arrow(start, end) for start, end, *_ in ARROWS), back,
        text(485, 263, "the updated model plays again", "note", "middle"), *labels,
        "</svg>\n"])


if __name__ == "__main__":
    write_text("docs/loop.svg", picture())
    print("wrote docs/loop.svg")
