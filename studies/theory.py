"""Why a flawed action should die, and how it lives on: the theory of arXiv:2509.23870, checked and drawn.

Lemma 3.1, Theorem 3.2, Figure 4 and section 3.3, Theorem A.1. Each formula is a function, checked by
another way to the same number: sampling, a step of the softmax, integration in time. The paper's formulas
for Theorems 3.2 and A.1 could not be read; what stands here was derived anew from its words. Left out:
coupling by gradients, which no formula but a model has (studies/twins.py).

    python -m studies.theory         # results/studies/theory.json, .md and pictures; a minute on one core
"""

import argparse
import math
import sys
from pathlib import Path

import numpy as np

from studies import common

PAGE = common.ROOT / "studies" / "theory.page.md"
C = (0.02, 0.04, 0.06)                        # pushes from similar samples, at r = .2, as in section 3.3
STARTS = (0.05, 0.4, 0.6, 0.95)               # probabilities from which these push
COUPLINGS = (0.1, 0.3, 0.5, 0.7, 0.9)
GOOD, FLAWED = (0.3, 0.5), (0.2, 0.1)         # (probability at first, what it takes off or adds to failure)


# Lemma 3.1: outcome reward gives a flawed action a negative advantage

def flawed_advantage(q, r, group=math.inf):
    """E[A 1(taken)] = -q r (1 - q) (1 - 1 / G) of an action that is taken with probability q and adds r to
    the probability of failure; A = R - mean(R) over a group of G. Lemma 3.1 is G = infinity: the paper's
    mean is the expectation, and that of a group has the episode itself in it."""
    return -q * r * (1 - q) * (1 - 1 / group)


def sampled_advantage(q, r, p, group, n, rng):
    """The same by play: n groups of episodes that fail with probability p, or p + r where it is taken.
    Returns mean and standard error."""
    taken_NG = rng.random((n, group)) < q
    reward_NG = (rng.random((n, group)) >= p + r * taken_NG).astype(float)
    advantage_NG = reward_NG - reward_NG.mean(1, keepdims=True)
    per_group_N = (advantage_NG * taken_NG).mean(1)
    return float(per_group_N.mean()), float(per_group_N.std(ddof=1) / math.sqrt(n))


# Theorem 3.2: squeezing by the softmax cannot save it

def advantages_of_three(q_3, r1, r2):
    """Total expected advantages of three actions, flawed 1, another 2, good 3, q_3 their probabilities:
    1 adds r1 to the failure that there is without it, 2 adds r2, 3 takes off what makes q2 r2 + q3 r3 = 0.
    They sum to 0."""
    q1, q2, q3 = q_3
    return np.array([q1 * r1 * (q1 - 1), q2 * (q1 * r1 - r2), q3 * q1 * r1 + q2 * r2])


def step_of_three(q_3, r1, r2, eta=1e-4):
    """A small step on the logits by their advantages: how the probabilities and the log-odds of 1 over 3
    change, both divided by eta."""
    advantage_3 = advantages_of_three(q_3, r1, r2)
    moved_3 = q_3 * np.exp(eta * advantage_3)
    moved_3 /= moved_3.sum()
    log_odds = math.log(moved_3[0] / moved_3[2]) - math.log(q_3[0] / q_3[2])
    return (moved_3 - q_3) / eta, log_odds / eta


def flawed_rises(q_3, r1, r2):
    """Whether the flawed action's probability rises: q2 r2 (q2 - q3) > q1 r1 ((1 - q1)^2 + q2^2 + q3^2).
    It takes a second action that is much worse and likelier than the good one."""
    q1, q2, q3 = q_3
    return q2 * r2 * (q2 - q3) > q1 * r1 * ((1 - q1) ** 2 + q2**2 + q3**2)


def random_cases(n, rng):
    """What a step does in n random cases: how often the flawed probability rises, its log-odds to the good
    action's rise, its distance to the good action's probability rises, and how often `flawed_rises` is
    wrong."""
    counts = dict.fromkeys(("flawed rises", "log-odds rise", "gap rises", "formula wrong"), 0)
    for q_3, (r1, r2) in zip(rng.dirichlet(np.ones(3), n), rng.random((n, 2)) * 0.5):
        change_3, log_odds = step_of_three(q_3, r1, r2)
        counts["flawed rises"] += bool(change_3[0] > 0)
        counts["log-odds rise"] += bool(log_odds > 1e-9)
        counts["gap rises"] += bool(change_3[0] - change_3[2] > 0)
        decided = abs(change_3[0]) > 1e-5               # else the step's own curvature decides
        counts["formula wrong"] += bool(decided and (change_3[0] > 0) != flawed_rises(q_3, r1, r2))
    return {name: count / n for name, count in counts.items()}


# Section 3.3: a push from similar samples

def fixed_points(c, r):
    """(q-, q+), where a constant push c on the flawed logit and the penalty r q (1 - q) are even:

        q = (1 -+ sqrt(1 - 4 c / r)) / 2

    Below q+ it settles at the floor q- (near c / r, never 0), above it runs away; none for c > r / 4, the
    largest penalty (Figure 4): then it always does.
    """
    if 4 * c > r:
        return None
    root = math.sqrt(1 - 4 * c / r)
    return (1 - root) / 2, (1 + root) / 2


def pushed(q, c, r, eta=1.0, steps=4000):
    """The flawed probability over time under dz = eta (c - r q (1 - q)), from q; steps + 1 values."""
    z, path = math.log(q / (1 - q)), [q]
    for _ in range(steps):
        z += eta * (c - r * path[-1] * (1 - path[-1]))
        path.append(1 / (1 + math.exp(-z)))
    return path


def together(c, good=GOOD, flawed=FLAWED, eta=0.05, steps=20000):
    """A good action and a flawed one in similar states, each in a softmax of its own, that share the
    fraction c of each other's advantage:  dz = eta (A + c A_other),  A = +-q |r| (1 - q). Returns both
    paths."""
    (q_g, r_g), (q_b, r_b) = good, flawed
    z_g, z_b = (math.log(q / (1 - q)) for q in (q_g, q_b))
    paths = [q_g], [q_b]
    for _ in range(steps):
        a_g, a_b = q_g * r_g * (1 - q_g), -q_b * r_b * (1 - q_b)
        z_g, z_b = z_g + eta * (a_g + c * a_b), z_b + eta * (a_b + c * a_g)
        q_g, q_b = (1 / (1 + math.exp(-z)) for z in (z_g, z_b))
        paths[0].append(q_g)
        paths[1].append(q_b)
    return paths


def peak(paths):
    """(largest flawed probability, the good one's at that moment); None where it only falls."""
    good, flawed = paths
    top = max(range(len(flawed)), key=flawed.__getitem__)
    return (flawed[top], good[top]) if top else None


# Theorem A.1: when does the good action's success let go of the flawed one?

def turning_point(z2, c, r1, r2, other=1.0):
    """The smallest good logit z1 at which the flawed probability begins to fall, by bisection:

        c |r1| q1 (1 - q1) <= r2 q2 (1 - q2),    q = e^z / (e^z + other)

    where q1 > 1/2. None where it falls from there on.
    """
    def slope(z):
        return math.exp(z) * other / (math.exp(z) + other) ** 2

    start = math.log(other)                      # q1 = 1/2, where the push is largest
    if c * r1 * slope(start) <= r2 * slope(z2):
        return None
    low, high = start, start + 200
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if c * r1 * slope(middle) > r2 * slope(z2) else (low, middle)
    return high


def large_turning_point(z2, c, r1, r2):
    """Its limit for large logits: z1 - z2 = ln(c |r1| / r2)."""
    return z2 + math.log(c * r1 / r2)


# The study

def measure(n, seed):
    """Every number of the page, as plain values."""
    rng = np.random.default_rng(seed)
    lemma = []
    for q, r, p in ((0.1, 0.2, 0.3), (0.5, 0.2, 0.3), (0.9, 0.2, 0.3), (0.5, -0.2, 0.6)):
        for group in (8, 64):
            mean, error = sampled_advantage(q, r, p, group, n, rng)
            lemma.append({"q": q, "r": r, "p": p, "group": group, "formula": flawed_advantage(q, r, group),
                          "lemma": flawed_advantage(q, r), "sampled": mean, "standard error": error})
    regimes = [{"c": c, "fixed": fixed_points(c, 0.2),
                "ends": {str(q): pushed(q, c, 0.2)[-1] for q in STARTS}} for c in C]
    coupled = [{"coupling": c, "peak": peak(together(c))} for c in COUPLINGS]
    turning = [{"z2": z2, "exact": turning_point(z2, 0.5, 0.5, 0.1),
                "limit": large_turning_point(z2, 0.5, 0.5, 0.1)} for z2 in (0.5, 1.0, 2.0, 4.0, 8.0)]
    return {"lemma": lemma, "three": random_cases(n, rng) | {"cases": n}, "regimes": regimes,
            "coupled": coupled, "turning": turning}


def draw(found, out):
    """theory.svg, all panels, and a picture for each claim: {name: the file's name}."""
    plotted, pictures = common.pyplot("theory"), {}
    for name, panels in PICTURES.items():
        rows = 2 if len(panels) > 2 else 1
        figure, axes = plotted.subplots(rows, len(panels) // rows, squeeze=False, layout="constrained",
                                        figsize=(4.5 * len(panels) // rows, 3.2 * rows))
        for panel, axis in zip(panels, axes.flat):
            panel(found, axis)
            if axis.get_legend_handles_labels()[1]:
                axis.legend(fontsize=8)
        pictures[name] = f"theory.{name}.svg" if name else "theory.svg"
        common.save(figure, out / pictures[name])
    return pictures


def draw_penalty(found, axis):
    """Figure 4, with what was sampled."""
    q = np.linspace(0, 1, 201)
    axis.plot(q, 0.2 * q * (1 - q), color="black", label="r q (1 - q)")
    points = [row for row in found["lemma"] if row["group"] == 64 and row["r"] == 0.2]
    axis.errorbar([row["q"] for row in points], [-row["sampled"] for row in points],
                  [3 * row["standard error"] for row in points], fmt="o", color="tab:red",
                  label="sampled, G = 64")
    for c in C:
        axis.axhline(c, color="tab:blue", linewidth=0.8, linestyle=":")
        axis.text(1.0, c, f"c = {c}", va="bottom", ha="right", fontsize=8, color="tab:blue")
    axis.set(title="penalty on a flawed action, r = 0.2", xlabel="its probability q", ylabel="|A|",
             ylim=(0, 0.067))


def draw_lemma(found, axis):
    """Lemma 3.1: sampled against formula, each case."""
    for group, mark in ((8, "o"), (64, "s")):
        rows = [row for row in found["lemma"] if row["group"] == group]
        axis.errorbar([row["formula"] for row in rows], [row["sampled"] for row in rows],
                      [3 * row["standard error"] for row in rows], fmt=mark, markersize=4,
                      label=f"groups of {group}, 3 standard errors")
    ends = [row["formula"] for row in found["lemma"]]
    axis.plot([min(ends), max(ends)], [min(ends), max(ends)], color="grey", linewidth=0.8, label="equal")
    axis.set(title="expected advantage of a flawed action", xlabel="-q r (1 - q) (1 - 1 / G)",
             ylabel="sampled")


def draw_squeezing(found, axis):
    """Theorem 3.2: how often a step lifts what."""
    names = ("flawed rises", "gap rises", "log-odds rise")
    labels = ("probability", "distance to\nthe good one's", "log-odds to\nthe good one")
    bars = axis.barh(labels[::-1], [found["three"][name] for name in names[::-1]], color="tab:orange")
    axis.bar_label(bars, [f" {found['three'][name]:.1%}" for name in names[::-1]], fontsize=8)
    axis.set(title="what a step lifts, of a flawed action", xlabel="share of random cases", xlim=(0, 0.4))


def draw_pushes(found, axis):
    """Section 3.3: floor, tipping point, runaway."""
    for c, colour in zip(C, ("tab:green", "tab:orange", "tab:red")):
        for start in STARTS:
            axis.plot(pushed(start, c, 0.2)[:1500], color=colour, linewidth=1,
                      label=f"c = {c}" if start == STARTS[0] else None)
    axis.set(title="pushed by c: floor, tipping point, runaway", xlabel="steps", ylabel="q", ylim=(0, 1))


def draw_pair(found, axis):
    """Section 3.3: a good action and a coupled flawed one."""
    for c in COUPLINGS:
        axis.plot(together(c)[1][::20], linewidth=1, label=f"coupling {c}")
    axis.set(title="a flawed action beside a good one", xlabel="steps / 20", ylabel="flawed q", ylim=(0, 1))


def draw_turning(found, axis):
    """Theorem A.1."""
    z2 = [row["z2"] for row in found["turning"]]
    axis.plot(z2, [row["exact"] for row in found["turning"]], "o-", label="exact")
    axis.plot(z2, [row["limit"] for row in found["turning"]], "--", label="z2 + ln(c |r1| / r2)")
    axis.set(title="good logit at which the flawed begins to fall", xlabel="flawed logit z2",
             ylabel="good logit z1")


PICTURES = {"": (draw_penalty, draw_pushes, draw_pair, draw_turning), "lemma": (draw_lemma,),
            "squeezing": (draw_squeezing,), "figure4": (draw_penalty,), "regimes": (draw_pushes, draw_pair),
            "turning": (draw_turning,)}


# What it says of the paper

def figures_of(found, pictures):
    """The gallery's entries, see common.publish."""
    lemma, three = found["lemma"], found["three"]
    off = max(abs(row["sampled"] - row["formula"]) / row["standard error"] for row in lemma)
    negative = all(row["sampled"] < -4 * row["standard error"] for row in lemma if row["r"] > 0)
    half = next(row for row in lemma if (row["q"], row["r"], row["group"]) == (0.5, 0.2, 64))
    largest = all(row["sampled"] >= half["sampled"] for row in lemma if (row["r"], row["group"]) == (0.2, 64))
    settled = [row for row in found["regimes"] if row["fixed"]]          # at c > r / 4 all runs away
    safe, danger = [], []
    for row in settled:
        safe += [end < 0.5 for q, end in row["ends"].items() if float(q) < 0.5]
        danger += [end > 0.5 for q, end in row["ends"].items() if float(q) > 0.5]
    tipping = ", ".join(f"{row['fixed'][1]:.2f} at c = {row['c']}" for row in settled)
    floors = ", ".join(f"{row['fixed'][0]:.2f}" for row in settled)
    coupled = [row for row in found["coupled"] if row["peak"]]
    shared = ", ".join(str(row["coupling"]) for row in coupled)
    peaks = ", ".join(f"{row['peak'][0]:.2f}" for row in coupled)
    turns = [row["exact"] for row in found["turning"]]
    last = found["turning"][-1]
    told = (
        ("Lemma 3.1", "lemma", "Outcome reward gives a flawed action a negative expected advantage, "
         "-q r (1 - q), however likely it is.",
         f"Sampled groups agree within {off:.1f} standard errors with the lemma times 1 - 1/G: a group's own "
         "mean takes off an eighth in groups of 8. The sign is the lemma's in every case.",
         "yes" if off < 4 and negative else "no"),
        ("Theorem 3.2", "squeezing", "Squeezing by the softmax can lift a flawed action's probability for a "
         "while, but never over the good action's: its log-odds to it do not rise.",
         f"Of {three['cases']:,} random cases it rises in {three['flawed rises']:.1%}, its log-odds to the "
         f"good action in {three['log-odds rise']:.1%}. The plain distance of the two does in "
         f"{three['gap rises']:.1%}.",
         "yes" if three["flawed rises"] > 0 == three["log-odds rise"] else "no"),
        ("Figure 4", "figure4", "The penalty on a flawed action, |A| = r q (1 - q), is largest, r / 4, at "
         "q = 1/2, and vanishes at both ends.",
         f"At q = 1/2 and r = 0.2 sampled groups of 64 give {-half['sampled']:.4f}; r / 4 less what the "
         f"group's own mean takes off is {-half['formula']:.4f}.",
         "yes" if largest and off < 4 else "no"),
        ("Section 3.3", "regimes", "Pushed by similar samples, a flawed action with q < 1/2 is safe, since "
         "the penalty grows with q; above 1/2 it is in danger and runs away.",
         f"Below 1/2 it settles, at a floor that is never 0 ({floors}); but it runs away only above a "
         f"tipping point that is higher than 1/2 ({tipping}), and everywhere once c > r / 4. Beside a good "
         f"action whose advantage it shares by {shared} it peaks at {peaks}, and then falls.",
         "no" if not all(safe) else "yes" if all(danger) else "partly"),
        ("Theorem A.1", "turning", "A flawed action that similar good samples push up begins to fall once "
         "these are likely enough; how far their logit must grow can be bounded.",
         f"It does, at a finite logit for each of {len(turns)} flawed logits; for large ones the good logit "
         f"is then ln(c |r1| / r2) = {last['limit'] - last['z2']:.2f} above. The paper's own constant could "
         "not be read.", "yes" if None not in turns else "no"))
    return [{"paper": paper, "claim": claim, "found": said, "agrees": agrees, "picture": pictures[name]}
            for paper, name, claim, said, agrees in told]


def page(found, command, seed):
    """The page's text, from its template beside this file."""
    furthest = max(abs(row["sampled"] - row["formula"]) / row["standard error"] for row in found["lemma"])
    largest = max(row["standard error"] for row in found["lemma"])
    lemma = (f"in {len(found['lemma'])} cases sampled and formula are at most {furthest:.1f} standard errors "
             f"apart; the largest standard error is {largest:.1e}")
    regimes = "\n".join(f"| {row['c']} | " + ("none" if row["fixed"] is None else "{:.3f}, {:.3f}".format(
        *row["fixed"])) + " | " + ", ".join(f"{end:.3f}" for end in row["ends"].values()) + " |"
        for row in found["regimes"])
    coupled = "\n".join(f"| {row['coupling']} | " + ("none: it only falls | – |" if row["peak"] is None else
                        "{:.2f} | {:.2f} |".format(*row["peak"])) for row in found["coupled"])
    turning = "; ".join(f"z2 = {row['z2']:g}: {row['exact'] - row['z2']:.2f} (limit "
                        f"{row['limit'] - row['z2']:.2f})" for row in found["turning"])
    return PAGE.read_text(encoding="utf-8").format(
        command=command, seed=seed, numbers=found["three"], lemma=lemma, regimes=regimes, coupled=coupled,
        turning=turning)


def main(argv=None):
    parser = argparse.ArgumentParser("python -m studies.theory", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--n", type=int, default=200_000, help="groups sampled, and random cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(common.OUT), help="folder of theory.json, .md and pictures")
    options = parser.parse_args(argv)
    if not 100 <= options.n <= 10**7:
        parser.error(f"--n={options.n}: expected 100 to 10000000")
    found, out = measure(options.n, options.seed), Path(options.out)
    command = f"python -m studies.theory --n {options.n} --seed {options.seed}"
    figures = figures_of(found, draw(found, out))
    common.publish(out, "theory", command.split(), [options.seed], found | {"numpy": np.__version__}, figures,
                   page(found, command, options.seed))
    print(page(found, command, options.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
