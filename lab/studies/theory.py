"""Why a flawed action should disappear, and how it survives: the theory of arXiv:2509.23870, tested.

Lemma 3.1, Theorem 3.2, Figure 4 and section 3.3, Theorem A.1. Each formula is a function, and is checked by a
second method: sampling, one step of the softmax, or integration in time. The paper's formulas of Theorems 3.2
and A.1 were not readable; here they are derived from its text. Left out: several good samples that push one
flawed action (section 3.3, Appendix A.3), and coupling by gradients, which needs a model
(lab/studies/cures.py).

    python -m lab.studies.theory     # lab/results/studies/theory.json, .md and .svg; a minute on one core
"""

import argparse
import math
import sys
from pathlib import Path

import numpy as np

from lab.bench.study import parse_clean
from lab.studies import common

PAGE = common.ROOT / "lab" / "studies" / "theory.page.md"
C = (0.02, 0.04, 0.06)                        # pushes from similar samples, for r = .2, as in section 3.3
STARTS = (0.05, 0.4, 0.6, 0.95)               # initial probabilities under a push
COUPLINGS = (0.1, 0.3, 0.5, 0.7, 0.9)
GOOD, FLAWED = (0.3, 0.5), (0.2, 0.1)         # (initial probability, change of the failure probability)


# Lemma 3.1: outcome rewards give a flawed action a negative advantage

def flawed_advantage(q, r, group=math.inf):
    """Expected advantage of an action of probability q that raises the probability of failure by r.

        E[A 1(taken)] = -q r (1 - q) (1 - 1 / G),   A = R - mean(R) over a group of G

    Lemma 3.1 is the case G = infinity: its mean is the expectation, whereas a group's mean includes the
    episode itself.
    """
    return -q * r * (1 - q) * (1 - 1 / group)


def sampled_advantage(q, r, p, group, n, rng):
    """Estimate `flawed_advantage` from n sampled groups; returns mean and standard error.

    An episode fails with probability p, or p + r if the action is taken.
    """
    taken_NG = rng.random((n, group)) < q
    reward_NG = (rng.random((n, group)) >= p + r * taken_NG).astype(float)
    advantage_NG = reward_NG - reward_NG.mean(1, keepdims=True)
    per_group_N = (advantage_NG * taken_NG).mean(1)
    return float(per_group_N.mean()), float(per_group_N.std(ddof=1) / math.sqrt(n))


# Theorem 3.2: the squeezing effect of the softmax cannot save it

def advantages_of_three(q_3, r1, r2):
    """Expected advantages of three actions with probabilities q_3: 1 is flawed, 3 is good.

    Action 1 adds r1 to the probability of failure, action 2 adds r2, and action 3 adds the r3 for which
    q2 r2 + q3 r3 = 0. Each is multiplied by the action's probability; they sum to 0.
    """
    q1, q2, q3 = q_3
    return np.array([q1 * r1 * (q1 - 1), q2 * (q1 * r1 - r2), q3 * q1 * r1 + q2 * r2])


def step_of_three(q_3, r1, r2):
    """Effect of a small step of the logits along the advantages.

    Returns the change of the probabilities and of the log-odds of action 1 to action 3, both divided by eta.
    """
    advantage_3, eta = advantages_of_three(q_3, r1, r2), 1e-4
    moved_3 = q_3 * np.exp(eta * advantage_3)
    moved_3 /= moved_3.sum()
    log_odds = math.log(moved_3[0] / moved_3[2]) - math.log(q_3[0] / q_3[2])
    return (moved_3 - q_3) / eta, log_odds / eta


def flawed_rises(q_3, r1, r2):
    """Whether the flawed action's probability rises: q2 r2 (q2 - q3) > q1 r1 ((1 - q1)^2 + q2^2 + q3^2).

    This requires a second action that is much worse than the flawed one and likelier than the good one.
    """
    q1, q2, q3 = q_3
    return q2 * r2 * (q2 - q3) > q1 * r1 * ((1 - q1) ** 2 + q2**2 + q3**2)


def random_cases(n, rng):
    """Frequencies over n random cases of one step, of which each can occur: with some probability of failure,
    that and its sums with r1, r2 and r3 lie between 0 and 1.

    "flawed rises": the flawed action's probability rises; "log-odds rise": its log-odds to the good action
    rise; "gap rises": its probability minus the good action's rises; "formula wrong": `flawed_rises` is
    wrong.
    """
    counts = dict.fromkeys(("flawed rises", "log-odds rise", "gap rises", "formula wrong"), 0)
    for _ in range(n):
        q_3, (r1, r2) = rng.dirichlet(np.ones(3)), rng.random(2) * 0.5
        while max(r1, r2) + q_3[1] * r2 / q_3[2] > 1:
            q_3, (r1, r2) = rng.dirichlet(np.ones(3)), rng.random(2) * 0.5
        change_3, log_odds = step_of_three(q_3, r1, r2)
        counts["flawed rises"] += bool(change_3[0] > 0)
        counts["log-odds rise"] += bool(log_odds > 1e-9)
        counts["gap rises"] += bool(change_3[0] - change_3[2] > 0)
        decided = abs(change_3[0]) > 1e-5               # otherwise the curvature of the step decides
        counts["formula wrong"] += bool(decided and (change_3[0] > 0) != flawed_rises(q_3, r1, r2))
    return {name: count / n for name, count in counts.items()}


# Section 3.3: a push from similar samples

def fixed_points(c, r):
    """(q-, q+), where a constant push c on the flawed logit equals the penalty r q (1 - q).

        q = (1 -+ sqrt(1 - 4 c / r)) / 2

    Below q+, q converges to the floor q- (near c / r, never 0); above q+, it runs away to 1. None for
    c > r / 4, the largest penalty (Figure 4): then q always runs away.
    """
    if 4 * c > r:
        return None
    root = math.sqrt(1 - 4 * c / r)
    return (1 - root) / 2, (1 + root) / 2


def pushed(q, c, r, eta=1.0, steps=4000):
    """The flawed probability over time under dz = eta (c - r q (1 - q)), starting at q; steps + 1 values."""
    z, path = math.log(q / (1 - q)), [q]
    for _ in range(steps):
        z += eta * (c - r * path[-1] * (1 - path[-1]))
        path.append(1 / (1 + math.exp(-z)))
    return path


def coupled_paths(c):
    """Probabilities over time of a good and a flawed action in similar states, each in its own softmax.

    Each logit also gets a fraction c of the other action's advantage: dz = eta (A + c A_other),
    A = +-q |r| (1 - q). Returns the paths of both.
    """
    (q_g, r_g), (q_b, r_b), eta, steps = GOOD, FLAWED, 0.05, 20000
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
    """(largest flawed probability, the good action's at that moment); None if the flawed one only falls."""
    good, flawed = paths
    top = max(range(len(flawed)), key=flawed.__getitem__)
    return (flawed[top], good[top]) if top else None


def narrowest(paths):
    """The smallest lead of the good probability over the flawed one, over time.

    In log-odds the lead only grows: a step adds eta (1 - c) (A - A_other), and A > 0 > A_other.
    """
    return min(good - flawed for good, flawed in zip(*paths))


# Theorem A.1: when does the good action's success stop pushing up the flawed one?

def turning_point(z2, c, r1, r2):
    """The smallest good logit z1 at which the flawed probability starts to fall, by bisection.

        c |r1| q1 (1 - q1) <= r2 q2 (1 - q2),    q = e^z / (e^z + 1),    q1 > 1/2

    None if it falls at every such z1.
    """
    def slope(z):
        return math.exp(z) / (math.exp(z) + 1) ** 2

    if c * r1 * slope(0.0) <= r2 * slope(z2):          # at q1 = 1/2 the push is largest
        return None
    low, high = 0.0, 200.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if c * r1 * slope(middle) > r2 * slope(z2) else (low, middle)
    return high


def large_turning_point(z2, c, r1, r2):
    """The limit of `turning_point` for large logits: z1 - z2 = ln(c |r1| / r2)."""
    return z2 + math.log(c * r1 / r2)


# The study

def measure(n, seed):
    """Compute every number of the page, as plain values."""
    rng = np.random.default_rng(seed)
    lemma = []
    for q, r, p in ((0.1, 0.2, 0.3), (0.5, 0.2, 0.3), (0.9, 0.2, 0.3), (0.5, -0.2, 0.6)):
        for group in (8, 64):
            mean, error = sampled_advantage(q, r, p, group, n, rng)
            lemma.append({"q": q, "r": r, "p": p, "group": group, "formula": flawed_advantage(q, r, group),
                          "lemma": flawed_advantage(q, r), "sampled": mean, "standard error": error})
    regimes = [{"c": c, "fixed": fixed_points(c, 0.2),
                "ends": {str(q): pushed(q, c, 0.2)[-1] for q in STARTS}} for c in C]
    paths = {c: coupled_paths(c) for c in COUPLINGS}
    coupled = [{"coupling": c, "peak": peak(path), "narrowest": narrowest(path)} for c, path in paths.items()]
    turning = [{"z2": z2, "exact": turning_point(z2, 0.5, 0.5, 0.1),
                "limit": large_turning_point(z2, 0.5, 0.5, 0.1)} for z2 in (0.5, 1.0, 2.0, 4.0, 8.0)]
    return {"lemma": lemma, "three": random_cases(n, rng) | {"cases": n}, "regimes": regimes,
            "coupled": coupled, "turning": turning}


def draw(found, out):
    """Draw theory.svg with four panels, and a picture for each claim; returns {name: file name}."""
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
    """Figure 4, with sampled values."""
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
    """Lemma 3.1: sampled value against formula, for each case."""
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
    """Theorem 3.2: how often a step raises each quantity."""
    names = ("flawed rises", "gap rises", "log-odds rise")
    labels = ("probability", "difference to\nthe good one's", "log-odds to\nthe good one")
    bars = axis.barh(labels[::-1], [found["three"][name] for name in names[::-1]], color="tab:orange")
    axis.bar_label(bars, [f" {found['three'][name]:.1%}" for name in names[::-1]], fontsize=8)
    axis.set(title="what a step raises, of a flawed action", xlabel="share of random cases", xlim=(0, 0.4))


def draw_pushes(found, axis):
    """Section 3.3: floor, tipping point, runaway."""
    for c, colour in zip(C, ("tab:green", "tab:orange", "tab:red")):
        for start in STARTS:
            axis.plot(pushed(start, c, 0.2)[:1500], color=colour, linewidth=1,
                      label=f"c = {c}" if start == STARTS[0] else None)
    axis.set(title="pushed by c: floor, tipping point, runaway", xlabel="steps", ylabel="q", ylim=(0, 1))


def draw_pair(found, axis):
    """Section 3.3: a flawed action coupled to a good one."""
    for c in COUPLINGS:
        axis.plot(coupled_paths(c)[1][::20], linewidth=1, label=f"coupling {c}")
    axis.set(title="a flawed action coupled to a good one", xlabel="steps / 20", ylabel="flawed q",
             ylim=(0, 1))


def draw_turning(found, axis):
    """Theorem A.1."""
    z2 = [row["z2"] for row in found["turning"]]
    axis.plot(z2, [row["exact"] for row in found["turning"]], "o-", label="exact")
    axis.plot(z2, [row["limit"] for row in found["turning"]], "--", label="z2 + ln(c |r1| / r2)")
    axis.set(title="good logit at which the flawed action starts to fall", xlabel="flawed logit z2",
             ylabel="good logit z1")


PICTURES = {"": (draw_penalty, draw_pushes, draw_pair, draw_turning), "lemma": (draw_lemma,),
            "squeezing": (draw_squeezing,), "figure4": (draw_penalty,), "regimes": (draw_pushes, draw_pair),
            "turning": (draw_turning,)}


# Agreement with the paper

def figures_of(found, pictures):
    """What was found on each of the paper's claims: dicts of claim, finding and verdict, for the gallery."""
    lemma, three = found["lemma"], found["three"]
    off = max(abs(row["sampled"] - row["formula"]) / row["standard error"] for row in lemma)
    negative = all(row["sampled"] < -4 * row["standard error"] for row in lemma if row["r"] > 0)
    half = next(row for row in lemma if (row["q"], row["r"], row["group"]) == (0.5, 0.2, 64))
    largest = all(row["sampled"] >= half["sampled"] for row in lemma if (row["r"], row["group"]) == (0.2, 64))
    settled = [row for row in found["regimes"] if row["fixed"]]          # for c > r / 4 everything runs away
    safe, danger = [], []
    for row in settled:
        safe += [end < 0.5 for q, end in row["ends"].items() if float(q) < 0.5]
        danger += [end > 0.5 for q, end in row["ends"].items() if float(q) > 0.5]
    tipping = ", ".join(f"{row['fixed'][1]:.2f} at c = {row['c']}" for row in settled)
    floors = ", ".join(f"{row['fixed'][0]:.2f}" for row in settled)
    coupled = [row for row in found["coupled"] if row["peak"]]
    shared = ", ".join(str(row["coupling"]) for row in coupled)
    peaks = ", ".join(f"{row['peak'][0]:.2f}" for row in coupled)
    narrowing = max(GOOD[0] - FLAWED[0] - row["narrowest"] for row in found["coupled"])
    turns = [row["exact"] for row in found["turning"]]
    last = found["turning"][-1]
    rows = (
        ("Lemma 3.1", "lemma", "Outcome rewards give a flawed action a negative expected advantage, "
         "-q r (1 - q), whatever its probability q.",
         f"Sampled groups agree within {off:.1f} standard errors with the lemma times 1 - 1/G, the effect of "
         "the group's own mean (an eighth less in groups of 8). The sign agrees with the lemma in each case.",
         "yes" if off < 4 and negative else "no"),
        ("Theorem 3.2", "squeezing", "The squeezing effect of the softmax can raise a flawed action's "
         "probability, but the probability gap between it and the good action cannot increase.",
         f"In {three['cases']:,} random cases of one step the probability rises in "
         f"{three['flawed rises']:.1%}, and the gap, the difference of the two probabilities, does increase "
         f"in {three['gap rises']:.1%}. Their log-odds rise in {three['log-odds rise']:.1%}; if the paper's "
         "formula, which was not readable, is of logits, this is what it says.",
         "no" if three["log-odds rise"] or not three["flawed rises"]
         else "partly" if three["gap rises"] else "yes"),
        ("Figure 4", "figure4", "The penalty on a flawed action, |A| = r q (1 - q), is largest, r / 4, at "
         "q = 1/2, and vanishes at both ends.",
         f"At q = 1/2 and r = 0.2 sampled groups of 64 give {-half['sampled']:.4f}; the formula, r / 4 times "
         f"1 - 1/64 for the group's own mean, gives {-half['formula']:.4f}.",
         "yes" if largest and off < 4 else "no"),
        ("Section 3.3", "regimes", "Pushed up by similar samples, a flawed action with q < 1/2 is safe, "
         "because the penalty grows with q; above 1/2 it is in danger and runs away.",
         f"Under a push c below r / 4 it converges from below 1/2 to a floor that is never 0 ({floors}), and "
         f"runs away only above a tipping point that is higher than 1/2 ({tipping}). Above c = r / 4 it "
         "runs away from everywhere: no start is safe. Coupled to a good "
         f"action by {shared} it peaks at {peaks}, and then falls. The gap between the two widens at every "
         f"step in log-odds; in probabilities it first narrows, by at most {narrowing:.3f}.",
         "no" if not all(safe) else "yes" if all(danger) and settled == found["regimes"] else "partly"),
        ("Theorem A.1", "turning", "A flawed action that similar good samples push up starts to fall once "
         "the good logit is a certain multiple of its original value.",
         "The theorem is not tested: its multiple, of logits taken to be linear in the advantages, was not "
         "readable. What is derived here is additive. The flawed action starts to fall at a finite good "
         f"logit for {len(turns) - turns.count(None)} of {len(turns)} flawed logits; for large ones that is "
         f"ln(c |r1| / r2) = {last['limit'] - last['z2']:.2f} above the flawed one, wherever it started.",
         "not measurable"))
    return [{"paper": paper, "claim": claim, "found": text, "agrees": agrees, "picture": pictures[name]}
            for paper, name, claim, text, agrees in rows]


def page(found, command, seed):
    """The page's text, from its template in this folder."""
    furthest = max(abs(row["sampled"] - row["formula"]) / row["standard error"] for row in found["lemma"])
    largest = max(row["standard error"] for row in found["lemma"])
    lemma = (f"in {len(found['lemma'])} cases the sampled value and the formula differ by at most "
             f"{furthest:.1f} standard errors; the largest standard error is {largest:.1e}")
    regimes = "\n".join(f"| {row['c']} | " + ("none" if row["fixed"] is None else "{:.3f}, {:.3f}".format(
        *row["fixed"])) + " | " + ", ".join(f"{end:.3f}" for end in row["ends"].values()) + " |"
        for row in found["regimes"])
    coupled = "\n".join(f"| {row['coupling']} | " + (
        "none, it only falls | –" if row["peak"] is None else "{:.2f} | {:.2f}".format(*row["peak"]))
        + f" | {row['narrowest']:.3f} |" for row in found["coupled"])
    turning = "; ".join(f"z2 = {row['z2']:g}: {row['exact'] - row['z2']:.2f} (limit "
                        f"{row['limit'] - row['z2']:.2f})" for row in found["turning"])
    return PAGE.read_text(encoding="utf-8").format(
        command=command, seed=seed, numbers=found["three"], lemma=lemma, regimes=regimes, coupled=coupled,
        turning=turning)


def main(argv=None):
    parser = argparse.ArgumentParser("python -m lab.studies.theory", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--n", type=int, default=200_000, help="number of sampled groups and of random cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(common.OUT), help="output folder")
    options = parse_clean(parser, argv)
    if not 100 <= options.n <= 10**7:
        parser.error(f"--n={options.n}: expected 100 to 10000000")
    found, out = measure(options.n, options.seed), Path(options.out)
    command = f"python -m lab.studies.theory --n {options.n} --seed {options.seed}"
    figures = figures_of(found, draw(found, out))
    common.publish(out, "theory", command.split(), [options.seed], found | {
        "commit": options.commit, "numpy": np.__version__}, figures, page(found, command, options.seed))
    print(page(found, command, options.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
