"""Where --log sends an iteration's metrics, beside metrics.jsonl: TensorBoard's files, or Weights & Biases.

Left out: the cold start, whose steps count something else, and the evaluation; metrics.jsonl and
evaluation.json have them.
"""

import sys
from unittest import mock

from infra import files, parallel
from infra.errors import reported


def opened(name, out, run, settings, state, resources):
    """Return sink(metrics, iteration) for the log `name`, None for "none" and on ranks other than 0.

    run: the run's identity. state: the resumed checkpoint's, or None: later iterations are logged anew.
    resources: an ExitStack, which closes the log. ValueError, naming the flag, if it cannot be opened; what
    fails later is printed once, and ends no run.
    """
    if name == "none" or not parallel.is_rank0():
        return None
    failed = []
    try:
        send = OPEN[name](out, run, settings, state, resources)
    except Exception as error:                                    # a service may raise anything
        raise ValueError(f"--log={name}: {type(error).__name__}: {error}") from error

    def sink(metrics, iteration):
        try:
            send(metrics, iteration)
        except Exception as error:
            if not failed:
                print(f"--log={name}: {type(error).__name__}: {' '.join(str(error).split())}; "
                      f"{out / files.METRICS} has all metrics", file=sys.stderr)
            failed.append(error)

    return sink


def tensorboard(out, run, settings, state, resources):
    """Write OUT/tensorboard; `tensorboard --logdir OUT` shows it."""
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(out / "tensorboard", purge_step=state and state["iteration"])
    resources.callback(reported(writer.close, "--log=tensorboard: close"))
    return lambda metrics, iteration: [writer.add_scalar(*item, iteration) for item in metrics.items()]


def wandb(out, run, settings, state, resources):
    """Log to the project "gcd"; the account comes from wandb's own settings.

    Of an iteration that a resumed run repeats, wandb keeps the first record.
    """
    import wandb
    with mock.patch.object(sys, "argv", sys.argv[:1]):    # it stores the flags; an endpoint's may hold a key
        logged = wandb.init(project="gcd", id=run, name=out.name, dir=out, config=settings, resume="allow")
    resources.callback(reported(logged.finish, "--log=wandb: finish"))
    return lambda metrics, iteration: logged.log(metrics, step=iteration)


OPEN = {"tensorboard": tensorboard, "wandb": wandb}
