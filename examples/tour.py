# %% [markdown]
# # A tour in five minutes
#
# Load a trained agent, let it play, ask its judge, train one of your own, look at the report.
# Run it as `python examples/tour.py`, or open it as a notebook (percent format: VS Code, Jupytext, PyCharm).

# %%
import sys
from pathlib import Path

# else a notebook, in this folder or the root: VS Code's, too, has a __file__
SCRIPT = "__file__" in globals() and "ipykernel" not in sys.modules
if SCRIPT and (len(sys.argv) > 2 or sys.argv[-1].startswith("-")):
    sys.exit("usage: python examples/tour.py [FOLDER TO WRITE TO]")
HERE = Path(__file__).resolve() if SCRIPT else Path.cwd() / "tour"
ROOT = next(folder for folder in HERE.parents if (folder / "gcd.py").is_file())
sys.path.insert(0, str(ROOT))

import gcd  # noqa: E402

# %% [markdown]
# ## Play
# The committed model has 0.55 million parameters and learned ALFWorld in 50 minutes of one CPU core. `L0/3`
# is task number 3 of split L0: a generated room in the household environment.

# %%
agent = gcd.load(ROOT / "lab/results/alfworld_model")
episode = agent.play("household", "L0/3")
print(episode)

# %% [markdown]
# ## Ask its judge
# GCD trains the model to judge its own actions. P(good) is the probability that it calls a turn good; the AUC
# tells how much that is worth (0.5 is chance).

# %%
for number, turn in enumerate(episode.turns):
    print(f"P(good) = {agent.judge(episode, number):.2f}   {turn.action}")
print("AUC in training:", agent.judge_auc())

# %% [markdown]
# ## Train
# A fresh small model: 600 demonstrations of an expert, 100 judge questions, two iterations of GRPO with GCD.
# That is too little to win many games, which most labels of turns need, so an oracle gives them. In full it
# is `bash run.sh`.

# %%
OUT = Path(sys.argv[1]) if SCRIPT and len(sys.argv) > 1 else ROOT / "runs/tour"
mine = gcd.train(demonstrations=600, judge_demonstrations=100, judge_labels="oracle", iterations=2, tasks=4,
                 evaluate="L0", protocol="sampled", out=OUT / "grpo+gcd", overwrite=True)
print(mine.play("household", "L0/3"))

# %% [markdown]
# ## Look at it
# The report is one HTML page: training curves, and stored episodes turn by turn.

# %%
from report.__main__ import main as report  # noqa: E402

report([str(OUT)])
