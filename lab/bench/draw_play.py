"""Draw docs/play.svg: the committed model plays a generated room, and judges its turns.

    python -m lab.bench.draw_play                   # seconds on a CPU; another machine may sample other turns

A moving picture in one SVG file without scripts: each turn appears in its time, then all start again. Readers
who prefer reduced motion see the full transcript at once.
"""

import argparse
import textwrap
from html import escape

import gcd
from infra.files import write_text
from lab.bench.study import ROOT

MODEL, TASK, OUT = "lab/results/alfworld_model", "L0/3", ROOT / "docs" / "play.svg"
WIDTH, LINE, COLUMNS = 860, 21, 92                 # pixels of the picture and of a line; characters of a line
SECONDS, PAUSE = 1.3, 4.0                          # of a turn, and at the end
STYLE = """
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #c9d1d9 }
text { white-space: pre }
.task { fill: #f0c674 } .note { fill: #8b949e } .won { fill: #7ee787 }
.command { fill: #7ee787; font-weight: 600 }
.turn { animation: appear %.1fs infinite step-end }
@media (prefers-reduced-motion: reduce) { .turn { animation: none !important; opacity: 1 !important } }
"""


def lines_of(agent, episode):
    """The picture's lines: a list per step (the start, each turn, the end) of (class, text)."""
    room, task = episode.turns[0].observation.rsplit("\n\n", 1)
    steps = [[("", text) for text in textwrap.wrap(room.rsplit("\n\n", 1)[-1], COLUMNS)] + [("task", task)]]
    replies = [turn.observation for turn in episode.turns[1:]] + [episode.final_observation]
    for number, (turn, reply) in enumerate(zip(episode.turns, replies)):
        opinion = f"judge: {agent.judge(episode, number):.0%} good"
        command = f"[{number + 1}] > {turn.action or turn.response}"
        steps.append([("command", f"{command:<{COLUMNS - len(opinion)}}"), ("note", opinion)]
                     + [("", text) for text in textwrap.wrap(reply, COLUMNS)])
    steps.append([("won" if episode.won else "note", "Won." if episode.won else "Not won.")])
    return steps


def drawn(steps, title):
    """The SVG text of these steps."""
    total = SECONDS * len(steps) + PAUSE
    y, groups, keyframes = 58, [], []
    for number, step in enumerate(steps):
        texts = []
        for kind, text in step:
            if kind == "note" and texts:                     # the opinion stands at the right of its command
                texts.append(f'<text class="note" x="{WIDTH - 20}" y="{y - LINE}" text-anchor="end">'
                             f"{escape(text)}</text>")
                continue
            texts.append(f'<text class="{kind}" x="20" y="{y}">{escape(text.rstrip())}</text>')
            y += LINE
        y += LINE // 3
        start = 100 * SECONDS * number / total
        if number:
            keyframes.append(f"@keyframes t{number} {{ 0% {{ opacity: 0 }} {start:.2f}% {{ opacity: 1 }} "
                             "100% { opacity: 1 } }")
        style = f' class="turn" style="animation-name: t{number}"' if number else ""
        groups.append(f"<g{style}>{''.join(texts)}</g>")
    height = y + 8
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-label="{escape(title, quote=True)}">\n'
            f"<style>{STYLE % total}{chr(10).join(keyframes)}</style>\n"
            f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#0d1117"/>\n'
            f'<text class="note" x="20" y="30">{escape(title)}</text>\n' + "\n".join(groups) + "\n</svg>\n")


def main(argv=None):
    """Play the task and write the picture."""
    parser = argparse.ArgumentParser("python -m lab.bench.draw_play", description=__doc__.splitlines()[0])
    parser.parse_args(argv)
    agent = gcd.load(ROOT / MODEL)
    episode = agent.play("household", TASK)
    title = f"The committed model in generated rooms, game {TASK}"
    write_text(OUT, drawn(lines_of(agent, episode), title))
    print(f"wrote {OUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
