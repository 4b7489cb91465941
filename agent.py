"""The library: load a trained agent, let it play, ask its judge.

    import gcd
    agent = gcd.load("lab/results/alfworld_model")
    episode = agent.play("household", "L0/3")
    print(episode)
    agent.judge(episode, 2)                            # P(good) of the turn printed as [3]

Left out: training (gcd.train), and many episodes at once (rollout.play).
"""

from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch

import judge
import resume
import rollout
from batching import Sample, device_of
from config import PLAYS_ONLY, Config, arguments, environment_in, parse
from infra import files, job, plugins
from infra.flags import flag_of
from infra.streams import stream
from lm import model as decoder
from lm import smollm2
from lm.chat import Chat
from lm.engine import Sampling, Slots, answer, generate
from models import check_positions, check_vocabulary, make_chat, open_chat, threads_for
from update import last_values

TEMPERATURE = 0.4             # of play, by default
JUDGE_SAMPLES = 8             # answers to a question whose P(good) has to be estimated
LEAST_READABLE = 0.05         # a model with less probability on "good" and "bad" was never taught to judge
JUDGE_FILE = "judge.json"     # next to a model: its judge's AUC, where the run's metrics are not at hand


@dataclass(frozen=True, slots=True)
class Agent:
    """A model with its chat, and the settings under which it plays.

    settings: the flags that `load` was given; `play` uses them too, unless it is given others. state: that of
    the run that trained the model, {} if none is known; its last instruction of correction precedes a first
    observation.
    """

    model: decoder.Model
    chat: Chat
    config: Config
    settings: dict = field(default_factory=dict)
    state: dict = field(default_factory=dict)

    def play(self, env, task, seed=0, temperature=TEMPERATURE, **settings):
        """Play one episode. Returns a rollout.Episode; print it for its transcript.

        env: an environment's name or file. task: "SPLIT/NUMBER", such as "L0/3", or a task's id. settings:
        flags of the environment and the run, such as max_turns=30 or games=DIR; model, device and dtype are
        `load`'s. ValueError for an unknown environment, task or setting, for more context than the model has,
        and for an environment whose words a small model does not know.

        >>> episode = agent.play("household", "L0/3")
        >>> print(episode)                                          # doctest: +ELLIPSIS
        task L0/3/pick_heat_then_place_in_recep
        <BLANKLINE>
        -= Welcome to TextWorld, ALFRED! =-
        ...
        """
        if of_load := {"model", "device", "dtype"} & settings.keys():
            raise ValueError(f"{flag_of(min(of_load))}: give it to load")
        env = str(env)
        same = resume.is_of(vars(self.config), env)
        own = {name: value for name, value in self.settings.items()              # not of another environment
               if same or name in vars(self.config) and name != "admissible_only"}
        config = playing(self.config.model, own | settings | {"env": env})
        chat = make_chat(config, self.chat.tokenizer)
        check_vocabulary(config, config.model, self.state, chat.tokenizer)
        check_positions(config, config.model, self.model.config)
        sampling = Sampling(temperature, config.max_response_tokens)
        spec = rollout.EpisodeSpec(task_named(config.environment, task), 0, stream(seed),
                                   instruction=self.instruction_in(config.env))
        (game,) = config.environment.make(1)
        with closing(game), threads_for(chat):
            (episode,) = rollout.play(self.model, chat, [game], [spec], sampling, config.max_turns,
                                      config.context, history=config.history,
                                      on_truncation=config.on_truncation,
                                      admissible_only=config.admissible_only)
        return episode

    def instruction_in(self, env):
        """What precedes a first observation in an environment, by its name; "" if nothing does."""
        return resume.played_instruction(Path(self.config.model), self.state, env)

    def respond(self, conversation, temperature=TEMPERATURE):
        """Sample the next lm.engine.Response in a rollout.Conversation, without submitting it."""
        sampling = Sampling(temperature, self.config.max_response_tokens)
        length = len(conversation.prompt) + sampling.max_response_tokens
        restrictions = [conversation.restriction()] if self.config.admissible_only else None
        with threads_for(self.chat):
            (response,) = generate(Slots(self.model, 1, length, self.chat.stop_ids, sampling),
                                   [conversation.prompt], [conversation.next_stream()],
                                   restrictions=restrictions)
        return response

    def judge(self, episode, turn):
        """P(good): the model's probability that turn number `turn` (from 0) of an episode was a good one.

        ValueError if there is no such turn, or if the model was never taught to judge: see
        `probability_good`.

        >>> 0 <= agent.judge(episode, 0) <= 1
        True
        """
        if not 0 <= turn < len(episode.turns):
            raise ValueError(f"turn {turn}: the episode has turns 0 to {len(episode.turns) - 1}")
        return self.probability_good(episode.turns[turn].prompt_ids, episode.turns[turn].response_ids)

    def probability_good(self, prompt_ids, response_ids):
        """P(good) of a response to a prompt, both token ids.

        Exact for a judge that answers in one word of one token, and for a value head; otherwise the share of
        "good" among the readable ones of 8 sampled answers. ValueError if the answers are unreadable: then
        the model was never taught to judge.
        """
        chat = self.chat
        with threads_for(chat), torch.no_grad():
            if self.model.config.value_head:
                sample = Sample(prompt_ids + response_ids, [], [], None, 0)
                return float(last_values(self.model, [sample]).sigmoid())
            question = prompt_ids + chat.closed(response_ids) + judge.question_message(chat)
            good, bad = (chat.encode(label) for label in judge.ANSWERS)
            if judge.question_style(chat) == "plain" and len(good) == len(bad) == 1:
                ids = torch.tensor([question], device=device_of(self.model))
                logits_V = self.model(ids, column_N=[-1])[0]
                p_good, p_bad = logits_V.float().softmax(-1)[[good[0], bad[0]]].tolist()
                readable = p_good + p_bad
            else:
                own = stream(self.config.seed, *question)
                streams = [stream(own, i) for i in range(JUDGE_SAMPLES)]
                (given,) = answer(self.model, [question], [streams], chat.stop_ids,
                                  Sampling(1.0, self.config.judge_response_tokens), JUDGE_SAMPLES)
                verdicts = judge.read_verdicts(chat, given)
                p_good = verdicts.count("good") / JUDGE_SAMPLES
                readable = 1 - verdicts.count(None) / JUDGE_SAMPLES
        if readable < LEAST_READABLE:
            raise ValueError("this model was never taught to judge: it answers neither \"good\" nor \"bad\"")
        return p_good / readable

    def judge_auc(self):
        """The judge's AUC in the last ten iterations of training: {"labels": against the labels that it was
        trained on, "oracle": against the environment's oracle}; empty if nothing is known.

        >>> sorted(agent.judge_auc())
        ['labels', 'oracle']
        """
        folder, lines = Path(self.config.model), ()
        if folder.name == files.CHECKPOINT:                      # OUT's other models are earlier ones
            lines, _ = files.read_lines(folder.parent / files.METRICS)
        last = files.iterations_in(lines)[-10:]
        known = {key: [auc for line in last if files.is_number(auc := line.get(f"judge/{name}"))]
                 for key, name in (("labels", "auc"), ("oracle", "auc_oracle"))}
        measured = {key: sum(values) / len(values) for key, values in known.items() if values}
        stored = files.read_json(folder / JUDGE_FILE)
        if not isinstance(stored, dict):
            raise ValueError(f"{folder / JUDGE_FILE}: expected an object with labels and oracle")
        return measured or {key: stored[key] for key in ("labels", "oracle")
                            if files.is_number(stored.get(key))}


def load(folder, **settings):
    """Load the agent of a checkpoint, or of any Hugging Face folder that gcd.py can train.

    settings: flags under which it plays, such as max_turns=30, device="cuda" or dtype="bfloat16" (by default
    it plays on the CPU, in fp32); it is prompted as in its run, and in its environment limited to admissible
    commands if the run was, unless other flags are given. The run's other settings are not restored, and have
    to be given: those of the environment, such as task_ids, and max_turns, context and max_response_tokens.
    ValueError for a folder without weights, an unknown architecture, or wrong settings, and for a
    temperature, which `play` takes.

    >>> agent = load("lab/results/alfworld_model")
    >>> agent.model.config.hidden_size
    96
    """
    if "temperature" in settings:
        raise ValueError("--temperature: give it to play")
    folder = smollm2.named(folder)
    if "env" in settings:
        settings["env"] = str(settings["env"])                     # may be a Path
    settings = resume.prompting_of(Path(folder), settings.get("env", Config.env)) | settings
    settings |= environment_in(settings.get("env", Config.env))[1]
    decoder.ModelConfig.load(folder)                                    # of a wrong folder the clearest error
    return agent_of(playing(str(Path(folder).resolve()), settings), settings)        # the caller may move


def agent_of(config, settings=()):
    """The Agent of the model folder in a Config. settings: see Agent; without a device among them the CPU's.
    """
    folder, device = Path(config.model), torch.device("cuda" if config.device == "cuda" else "cpu")
    job.check_device(config.device)
    chat = open_chat(config, folder, job.Ranks(0, 1, device), plays=True)
    model = decoder.load_pretrained(folder, getattr(torch, config.dtype), device)
    return Agent(model, chat, config, dict(settings), resume.state_beside(folder))


def playing(folder, settings):
    """The Config of a run that only plays with the model in `folder`, in fp32 unless the settings differ."""
    fixed = PLAYS_ONLY | {"model": folder, "evaluate": "none"}
    return parse(arguments({"dtype": "float32"} | settings | fixed))


def task_named(environment, name):
    """The task of an environment's splits whose id is `name`; if there is none, of "SPLIT/NUMBER" the task
    with this index. ValueError if there is none either.
    """
    split, _, number = (name := str(name)).rpartition("/")
    numbered = split in environment.splits and number.isdecimal()
    for known in [split] if numbered else environment.splits:
        try:
            tasks = environment.split_tasks(known)
        except ValueError as error:
            if numbered or isinstance(error, plugins.PluginError):
                raise
            continue                                                         # a split may be missing
        if found := [task for task in tasks if task.id == name]:
            return found[0]
    if not numbered:
        raise ValueError(f"task {name!r}: expected SPLIT/NUMBER, the split one of "
                         f"{', '.join(environment.splits)}, or the id of a task of these splits")
    if int(number) >= len(tasks):
        raise ValueError(f"task {name!r}: {split} has tasks 0 to {len(tasks) - 1}")
    return tasks[int(number)]
