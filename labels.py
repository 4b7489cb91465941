"""Labels of turns for the judge: "good", "bad" or None, by a rule, the environment or a large model.

The paper labels by a rule on repeated observations and by a large model (arXiv:2509.23870 §4.1). No model and
no tensors here. An environment may bring label kinds of its own (`Environment.labels`). Left out: which of
the labelled turns are judged (judge.py).
"""

from infra.plugins import refuse

LABELS = ("rule", "dense", "taken", "oracle", "flaws", "rule+oracle", "shuffled", "endpoint",
          "rule+endpoint")
OF_ORACLE, OF_ENDPOINT = ("oracle", "rule+oracle", "flaws"), ("endpoint", "rule+endpoint")


def anchors(episode):
    """The anchor (last informative observation) before each turn, and after the last one."""
    return [turn.anchor for turn in episode.turns] + [episode.last_anchor]


def rule_labels(episode):
    """The paper's rule (§4.1) on anchors, one label per turn.

    "good": the last turn of a won episode. Of the others, "bad": one whose anchor occurs again later in the
    episode, also after its last turn, so that it led nowhere. Otherwise None. Ours: anchors in place of
    observations (lab/studies/label_kinds.py measures both); "good" in won episodes alone, where the paper
    calls each last step good, and before the rule of repetition, where the paper has it after.
    """
    seen = anchors(episode)
    labels = ["bad" if seen[t] in seen[t + 1:] else None for t in range(len(episode.turns))]
    if episode.won:
        labels[-1] = "good"
    return labels


def dense_labels(episode):
    """The rule, plus "good" for each valid turn of a won episode whose resulting observation occurs once.

    Ours: the paper's rule labels hardly any turn good.
    """
    seen = anchors(episode)
    return [label or ("good" if episode.won and turn.valid and seen.count(after) == 1 else None)
            for label, turn, after in zip(rule_labels(episode), episode.turns, seen[1:])]


def taken_labels(episode):
    """The rule over turns that the game took, with the error of `rule_labels` repaired; the outcome plays no
    part.

    "bad": a turn in a loop, from an observation back to the same one, in which no observation was new to the
    episode. "good": a turn that brought a new observation. Refused turns have no label. Ours.
    `rule_labels` calls each refused turn bad (its observation "occurs again", since the game gave no other),
    and each turn that leaves a place to which the model returns later, which is often needed. How often each
    is right by the oracle: lab/studies/label_kinds.py.
    """
    seen, n = anchors(episode), len(episode.turns)
    new = [observation not in seen[:t] for t, observation in enumerate(seen)]
    loops = ((t, u) for t in range(n) for u in range(t + 1, n + 1)
             if seen[u] == seen[t] and not any(new[t + 1:u + 1]))
    bad = {k for t, u in loops for k in range(t, u)}
    return [None if not turn.valid else "bad" if t in bad else "good" if new[t + 1] else None
            for t, turn in enumerate(episode.turns)]


def flaw_labels(episode, environment):
    """The oracle's labels of the turns that the game took: "bad" is a flaw in the paper's sense."""
    return [label if turn.valid else None
            for turn, label in zip(episode.turns, oracle_labels(episode, environment), strict=True)]


def oracle_labels(episode, environment):
    """The labels of the environment's oracle (None without one), which are also written to turn.oracle.

    A truncated response counts as refused.
    """
    if environment.oracle and all(turn.oracle is None for turn in episode.turns):
        last = environment.noop_message if episode.truncated else episode.final_observation
        replies = [turn.observation for turn in episode.turns] + [last]
        labels = environment.oracle(replies, [turn.action or "" for turn in episode.turns])
        refuse(wrong_labels(labels, episode), environment, f"oracle, task {episode.task.id}")
        for turn, label in zip(episode.turns, labels, strict=True):
            turn.oracle = label
    return [turn.oracle for turn in episode.turns]


def wrong_labels(labels, episode):
    """What is wrong with an environment's labels of an episode; "" if nothing is."""
    n, known = len(episode.turns), ("good", "bad", None)
    if isinstance(labels, (list, tuple)) and len(labels) == n and all(label in known for label in labels):
        return ""
    return f"it returned {labels!r:.60}; expected a list of {n}, each \"good\", \"bad\" or None"


def combine(rule, other, undisputed=False):
    """The rule's label; where it has none, "good" if `other`, the large model's or the oracle's label, is.

    The paper does not say how it combines the two. undisputed: None where they contradict each other.
    """
    disputed = undisputed and {rule, other} == {"good", "bad"}
    return None if disputed else rule or ("good" if other == "good" else None)


def label_turns(episode, kind, environment, by_endpoint=None):
    """Label each turn of an episode, write the labels to turn.label, and return them.

    kind: one of LABELS, or a kind of the environment's own. "shuffled" gives dense labels here; judge.choose
    replaces them by coin tosses. by_endpoint: {(episode.index, t): label} of a large model. "rule+oracle"
    leaves out what the two dispute.
    """
    of_model = [(by_endpoint or {}).get((episode.index, t)) for t in range(len(episode.turns))]
    match kind:
        case "oracle":
            labels = oracle_labels(episode, environment)
        case "flaws":
            labels = flaw_labels(episode, environment)
        case "endpoint":
            labels = of_model
        case "rule+endpoint":
            labels = [combine(*pair) for pair in zip(rule_labels(episode), of_model, strict=True)]
        case "rule+oracle":
            pairs = zip(rule_labels(episode), oracle_labels(episode, environment), strict=True)
            labels = [combine(rule, oracle, undisputed=True) for rule, oracle in pairs]
        case _:
            rules = {"rule": rule_labels, "dense": dense_labels, "taken": taken_labels,
                     "shuffled": dense_labels}
            labels = (environment.labels | rules)[kind](episode)
            refuse(wrong_labels(labels, episode), environment, f"labels {kind}, task {episode.task.id}")
    for turn, label in zip(episode.turns, labels, strict=True):
        turn.label = label
    return labels
