"""A run's model and chat: opened, made from scratch, checked against flags, memory and environment, sharded.

Left out: the decoder and its files (lm/model.py), and prompts (lm/chat.py).
"""

import secrets
import shutil
from contextlib import contextmanager, nullcontext
from random import Random

import torch

import correction
import judge
import resume
from envs import Reply, _checks
from infra import checkpoint, files, parallel, plugins
from infra.memory import check_memory, state_bytes
from infra.streams import LORA, generator
from lm import lora
from lm import model as decoder
from lm.chat import TAGS, Chat, is_small
from lm.optim import train_last, trained
from lm.small import save_small_model

LONG_RESPONSE = 150       # tokens of a thought and a command, as long as an untrained model writes; assumed


# The chat

def open_chat(config, folder, ranks, plays=False):
    """The chat of a model folder, all of which is read except the weights.

    plays: whether the model only plays, loaded in --dtype, with no copy to train. ValueError if the files
    fit neither each other nor the flags, or if the model does not fit into memory.
    """
    shape = decoder.ModelConfig.load(folder)
    check_size(config, folder, shape, ranks, plays)
    tokenizer = decoder.load_tokenizer(folder)
    if (largest := max(tokenizer.get_vocab().values())) >= shape.vocab_size:
        raise ValueError(f"{folder}/tokenizer.json: has a token {largest}, and config.json a vocab_size of "
                         f"{shape.vocab_size}")
    return make_chat(config, tokenizer)


def check_size(config, folder, shape, ranks, plays):
    """ValueError if a model of this shape does not fit into memory; see also check_positions."""
    dtype, parameters = getattr(torch, config.dtype), decoder.count_parameters(shape)
    with torch.device("meta"):
        model = choose_trained(decoder.Model(shape), config)
    trains = config.demonstrations or config.iterations
    numbers = sum(parameter.numel() for parameter in trained(model)) if trains else 0
    state = ({"weights": dtype.itemsize * parameters} if plays else state_bytes(
        parameters, ranks.shards, dtype, numbers, config.lora > 0, ranks.copies, config.compares_gradients))
    check_memory(state, parameters, ranks.world_size, dtype, ranks.device)
    check_positions(config, folder, shape)


def check_positions(config, folder, shape):
    """ValueError if the model of a folder has fewer positions than --context."""
    if config.context > (longest := shape.max_position_embeddings):
        raise ValueError(f"--context={config.context}: {folder}/config.json allows {longest}")


def make_chat(config, tokenizer):
    """The chat in the style of --prompt; "auto": tags if the algorithm rewards them, else by the model.

    A small model has tags if its cold start had. ValueError for flags that need tokens that it lacks.
    """
    small, style = is_small(tokenizer), config.prompt
    knows_tags = small and all(len(tokenizer.encode(f"<{tag}>")) == 1 for tag in TAGS)
    if style == "auto":
        style = "tags" if config.algorithm.tags or knows_tags else "plain" if small else "think"
    if style == "think" and small:
        raise ValueError("--prompt=think: a small model has no words to think in; expected plain or tags")
    if style == "tags" and small and not knows_tags:
        why = f" --algo={config.algo}" * config.algorithm.tags
        raise ValueError(f"--prompt={config.prompt}{why}: this model's cold start had no tags, so it knows "
                         "none (--prompt tags there)")
    environment = config.environment
    chat = Chat(tokenizer, style, config.show_admissible, environment)
    asks = environment.ask and not (environment.parse or chat.bare)
    plugins.refuse("the class has no parse, which reads the answer" if asks else "", environment, "ask")
    if config.thoughts == "endpoint" and chat.bare:
        raise ValueError(f"--thoughts=endpoint: prompts of style {style} hold no thoughts here")
    phrase = correction.instruction_phrases()[0]
    if config.correction != "off" and chat.small and len(chat.encode(phrase)) > 1:
        raise ValueError(f"--correction={config.correction}: this model's cold start had no --instructions, "
                         "so it knows none")
    return chat


def check_verdict(config, chat):
    """ValueError if the judge's answers have no room for a verdict: GCD would never see a readable one."""
    judges = config.iterations and config.gcd and config.judge_kind == "generative"
    if judges and (needed := len(judge.verdict_ids(chat, "good"))) > config.judge_response_tokens:
        raise ValueError(f"--judge-response-tokens={config.judge_response_tokens}: with --prompt "
                         f"{chat.style} a verdict has {needed}")


def check_vocabulary(config, source, previous, tokenizer):
    """ValueError if a small model cannot read and write the words of the Config's environment.

    previous: the state of the run that trained the model. If that run was in this environment, by name and
    file, nothing is checked: other settings may have brought other phrases.
    """
    if not is_small(tokenizer):
        return
    then, now = resume.dict_in(previous, "settings").get("env"), plugins.content_hash(config.env)
    same_file = resume.dict_in(previous, "plugins").get("env", now) == now
    if same_file and plugins.name_of(then) == plugins.name_of(config.env):
        return
    phrases = config.environment.known_phrases or config.environment.vocabulary()
    missing = [phrase for phrase in phrases if len(tokenizer.encode(phrase)) > 1]
    if len(missing) > len(phrases) / 20:                      # real games' differ a little by the seed
        raise ValueError(f"--model={source}: has the vocabulary of another environment: {missing[0]!r}, of "
                         f"--env {config.env}, is none of its tokens; give the --env that it was trained in")


def context_warning(config, chat, longest):
    """Which share of the longest episodes would not fit the context, and what to do, a sentence; "" if none,
    or if it is unknown. longest: the model's positions, as in its config.json.

    Lengths of the environment's messages are known for one tokenizer, and count where a prompt is the whole
    conversation. Of 1,000 episodes drawn, each has all turns of training or of evaluation, and responses have
    LONG_RESPONSE tokens, if so many are allowed.
    """
    recorded = None if config.history else config.environment.message_lengths()
    if recorded is None or chat.small or chat.tools or chat.tokenizer.vocab_size != recorded.vocab_size:
        return ""
    trains = config.demonstrations or config.iterations or not config.splits
    turns = max(config.max_turns if trains else 0, config.evaluation_turns if config.splits else 0)
    first, later = (chat.frame_tokens(Reply("A room.", ["look"]), opens) for opens in (True, False))
    rng, response = Random(0), min(LONG_RESPONSE, config.max_response_tokens)
    around = first + (turns - 1) * (later + response) + config.max_response_tokens
    needed = [around + sum(recorded.draw(rng, turns, chat.show_admissible)) for _ in range(1000)]
    def within(context):
        return sum(tokens <= context for tokens in needed) / len(needed)

    if (share := 1 - within(config.context)) < 0.005:
        return ""
    enough = min(-(-max(needed) // 1024) * 1024, longest)
    ways = {f"--context {enough} (holds {within(enough):.0%})": enough > config.context,
            "fewer turns (--max-turns, --protocol)": True, "--no-show-admissible": chat.show_admissible}
    return (f"--context={config.context}: {share:.0%} of {turns}-turn episodes exceed it, with responses of "
            f"{response} tokens, and end as failed; use "
            + ", or ".join(way for way, applies in ways.items() if applies))


def threads_for(chat):
    """A block on one thread if the model is small: more are slower with such small matrices."""
    return decoder.one_thread() if chat.small else nullcontext()


# The model

def load_model(config, folder, ranks, small, state=None):
    """The model of a folder to train, sharded, with adapters and a value head if the flags need them.

    A head of the folder's that they do not need is dropped: untrained, it would go on answering (--lora is
    refused with one: see `choose_trained`). Each rank reads its own part of the weights. state: of the
    checkpoint that the folder is, if it continues. ValueError for wrong weights.
    """
    model = decoder.open_pretrained(folder, config.judge_kind == "value")
    model = sharded(choose_trained(model, config), config, ranks, small)
    parallel.collective(lambda: decoder.load_weights(model, folder))
    if config.lora and state:
        restore_adapters(model, state, folder)
    elif config.lora:
        lora.start(model, generator(config.seed, LORA, 0))
    return model


def choose_trained(model, config):
    """The model, frozen but for what --lora or --train-layers train. ValueError if they do not fit it."""
    if config.lora and model.config.value_head:
        raise ValueError(f"--lora={config.lora}: not with --model={config.model}, which has a value head")
    if config.lora:
        lora.add(model, config.lora, generator(config.seed, LORA, 0))
    if config.train_layers:
        train_last(model, config.train_layers)
    return model


def sharded(model, config, ranks, small, frozen=False):
    """Shard a model over the ranks, with the run's compute dtype and activation checkpointing."""
    auto = ranks.device.type == "cuda" and not small
    model.recompute_layers({"auto": auto, "on": True, "off": False}[config.checkpoint_activations])
    return parallel.shard(model, ranks, getattr(torch, config.dtype), frozen)


# Adapters

def unmerged(weights):
    """Of {name: tensor}, what merged weights do not determine: the adapters, and the matrices under them."""
    return {name: weight for name, weight in weights.items() if "lora_" in name
            or f"{name.removesuffix('weight')}lora_A" in weights}


def restore_adapters(model, state, source):
    """Restore what `unmerged` returned from a checkpoint's state. ValueError if the model has others."""
    targets, weights = unmerged(dict(model.named_parameters())), state.get("unmerged", {})
    if {name: t.shape for name, t in targets.items()} != {name: t.shape for name, t in weights.items()}:
        raise ValueError(f"{source / checkpoint.TRAINER_FILE}: its adapters are of another model or rank")
    checkpoint.fill(source, targets, weights, "state/unmerged")


def save_merged(model, folder):
    """decoder.save_pretrained, with adapters merged."""
    decoder.save_pretrained(model, folder, lora.merged(dict(model.named_parameters())))


# A small model from scratch

@contextmanager
def fresh_folder(config, out):
    """A folder in OUT with a fresh small model, made by rank 0, and removed after the block.

    It may take long: ScienceWorld plays games to list its vocabulary.
    """
    folder = out / parallel.on_rank0(lambda: files.FRESH + secrets.token_hex(4))   # OUT may hold "fresh"

    def save():
        phrases = vocabulary_of(config)                      # which may read games, in other files
        with files.naming(folder):
            save_small_model(folder, phrases, config.hidden_size, config.layers, config.context,
                             config.positions == "rotary", not config.untied, config.seed)

    try:
        parallel.on_rank0(save)
        yield folder
    finally:
        if parallel.is_rank0():
            shutil.rmtree(folder, ignore_errors=True)


def vocabulary_of(config):
    """The phrases that are a fresh small model's tokens: the environment's, the judge's, the method's."""
    own = config.environment.vocabulary()
    plugins.refuse(_checks.wrong_vocabulary(own), config.environment, "vocabulary")
    phrases = [*own, judge.QUESTION["plain"], *judge.ANSWERS]
    if config.prompt == "tags" or config.algorithm.tags:
        phrases += [f"<{tag}>" for tag in TAGS]
    return phrases + (correction.instruction_phrases() if config.instructions else [])
