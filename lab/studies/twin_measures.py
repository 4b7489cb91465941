"""What is measured of a model in twin states (lab/envs/twins.py): the flawed action's probability, how far
its gradient is the right one's, and whether the two kinds of states can be told apart.

P, N: states in which the one action is right, and flawed. q_P, q_N: its mean probability there.
"""

from collections import Counter

import torch

from lab.envs import twins as states

PROBES = 64                                    # states of each kind in a measurement
SHARP = 0.4                                    # the other temperature at which a policy is looked at


def probe(actor):
    """q_P and q_N, the mean probability of R over PROBES states of each kind; cosine and leak from P to N.

        cosine = <g_P, g_N> / (|g_P| |g_N|),   leak = <g_P, g_N> / <g_P, g_P>

    g_K: the gradient, over all parameters, of R's mean log-probability in kind K. The leak is the theory's c:
    a step that raises it in P by d raises it in N by c d, to first order. None if a gradient is zero. Also
    commands_K, the mean probability of all commands, and at temperature SHARP sharp_K and sharp_commands_K.
    """
    tokens = [actor.chat.encode(command)[0] for command in (states.PULL, *states.OTHERS)]
    R, game, found, grads = tokens[0], states.Game(0.0, Counter()), {}, []
    for kind in "PN":
        tasks = [states.task(f"probe/{i}", "probe", kind) for i in range(PROBES)]
        ids_BT = torch.tensor([actor.chat.observe(game.reset(task), True) for task in tasks])
        logit_BV = actor.model(ids_BT)[:, -1].float()
        logprob_B = logit_BV.log_softmax(-1)[:, R]
        for prefix, temperature in (("", 1.0), ("sharp_", SHARP)):
            own, *others = (logit_BV.detach() / temperature).softmax(-1)[:, tokens].mean(0).tolist()
            found |= {f"{prefix or 'q_'}{kind}": own, f"{prefix}commands_{kind}": own + sum(others)}
        logprob_B.mean().backward()
        pushed = [parameter.grad for parameter in actor.model.parameters() if parameter.grad is not None]
        grads.append(torch.cat([grad.flatten().double() for grad in pushed]))
        actor.model.zero_grad(set_to_none=True)
    inner, size_P, size_N = float(grads[0] @ grads[1]), float(grads[0].norm()), float(grads[1].norm())
    return found | {"cosine": inner / (size_P * size_N) if size_P and size_N else None,
                    "leak": inner / size_P**2 if size_P else None}


@torch.no_grad()
def linear_probe(actor):
    """Accuracy of a linear probe of P against N on the hidden state from which the command is predicted.

    Least squares with an intercept on PROBES states of each kind, tested on as many others.
    """
    game, n = states.Game(0.0, Counter()), 4 * PROBES
    tasks = [states.task(f"probe/{i}", "probe", "PN"[i % 2]) for i in range(n)]
    ids_BT = torch.tensor([actor.chat.observe(game.reset(task), True) for task in tasks])
    x_BC = actor.model(ids_BT, head="hidden")[:, -1].double()
    x_BC = torch.cat([x_BC, torch.ones(n, 1, dtype=x_BC.dtype)], 1)
    side_B = torch.tensor([1.0, -1.0], dtype=x_BC.dtype).repeat(n // 2)
    weights = torch.linalg.lstsq(x_BC[:n // 2], side_B[:n // 2, None], driver="gelsd").solution
    return float(((x_BC[n // 2:] @ weights)[:, 0].sign() == side_B[n // 2:]).double().mean())


def leak_of(point):
    """The theory's c on log-odds: what arrives in N of a push on the action in P, per unit of push.

        c = leak * (1 - q_P) / (1 - q_N),   since grad log q = (1 - q) grad log(q / (1 - q))

    The stored leak is of log-probabilities (`probe`), whose gradient vanishes as q_P nears 1. Exact if q
    is the same in all states of a kind.
    """
    return None if point["leak"] is None else point["leak"] * (1 - point["q_P"]) / (1 - point["q_N"])


def final(result):
    """The flawed action's final probability."""
    return result["path"][-1]["q_N"]


def wins(result):
    """The final chance to win a training task: by q_P and q_N and, where stored, by the probability of all
    commands, else 1. The others have equal chances, what is no command wins nothing.
    """
    last = result["path"][-1]
    return chance_to_win({kind: (last[f"q_{kind}"], last.get(f"commands_{kind}", 1.0)) for kind in "PN"})


def is_sharp(result):
    """Whether a cell measured the commands at temperature SHARP, too."""
    return "sharp_commands_P" in result["path"][-1]


def sharp_wins(result):
    """`wins` at temperature SHARP: as measured or, of cells that did not, by `sharpened` q_P and q_N."""
    if not is_sharp(result):
        return computed_sharp_wins(result)
    last = result["path"][-1]
    return chance_to_win({kind: (last[f"sharp_{kind}"], last[f"sharp_commands_{kind}"]) for kind in "PN"})


def computed_sharp_wins(result):
    """The chance to win at temperature SHARP by `sharpened` q_P and q_N."""
    return chance_to_win({kind: (sharpened(result["path"][-1][f"q_{kind}"]), 1.0) for kind in "PN"})


def chance_to_win(chosen):
    """The chance to win a training task. chosen: {kind: (probability of R, of all commands)}."""
    settings = states.Environment.Settings()
    share = {"P": settings.p_tasks / states.BATCH}
    share["N"] = 1 - share["P"]
    return sum(share[kind] * (own * states.chance(kind, True, settings.flaw)
                              + (every - own) * states.chance(kind, False, settings.flaw))
               for kind, (own, every) in chosen.items())


def sharpened(q):
    """R's probability at temperature SHARP if it is q at 1 in every state, and the others are equal."""
    own, other = q ** (1 / SHARP), ((1 - q) / len(states.OTHERS)) ** (1 / SHARP)
    return own / (own + len(states.OTHERS) * other)
