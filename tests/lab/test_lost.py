"""Tests of lab/studies/lost.py: the reason of a refusal, and the counts of how episodes are lost.

    python -m pytest tests/lab/test_lost.py
"""

import pytest

import rollout
from envs.alfred import rooms
from envs.alfred.expert import Belief, OnlineExpert, learn_prior
from envs.alfred.game import Game
from lab.studies import lost
from lm.engine import Response

INTRO = ("You are in the middle of a room. Looking quickly around you, you see a bed 1, a desk 1, "
         "a drawer 2, and a drawer 1.\n\nYour task is to: put a pen in bed.")
SEEN = (("go to desk 1", "You arrive at desk 1. On the desk 1, you see a pen 2, and a book 1."),
        ("go to drawer 1", "You arrive at drawer 1. The drawer 1 is closed."))


@pytest.mark.parametrize("more, command, expected", [
    ((), "", "not a command of the game"), ((), "dance", "not a command of the game"),
    ((), "take pen 2", "not a command of the game"), ((), "go to", "not a command of the game"),
    ((), "go to sofa 1", "names something that is not in the room"),
    ((), "take pen 2 from sofa 1", "names something that is not in the room"),
    ((), "go to drawer 1", "goes to where it already is"),
    ((), "go to drawer 2", "goes to a receptacle that is already within reach"),
    ((), "take pen 2 from desk 1", "is not at the receptacle"),
    ((), "open drawer 2", "is not at the receptacle"), ((), "use pen 2", "is not at the receptacle"),
    ((), "take pen 1 from drawer 1", "the receptacle is closed"),
    ((), "close drawer 1", "another reason"),
    (1, "take pen 1 from desk 1", "another object of this type is here"),
    (1, "take cup 1 from desk 1", "the object is not here"),
    (1, "move pen 2 to desk 1", "does not hold the object"),
    (2, "take book 1 from desk 1", "already holds an object"),
    (3, "take pen 2 from bed 1", "the object is elsewhere")])
def test_a_refusal_is_counted_by_the_first_reason_that_applies(more, command, expected):
    belief = Belief(INTRO)
    exchanges = {(): SEEN, 1: SEEN[:1],
                 2: (*SEEN[:1], ("take pen 2 from desk 1", "You pick up the pen 2 from the desk 1.")),
                 3: (*SEEN[:1], ("go to bed 1", "You arrive at bed 1. On the bed 1, you see nothing."))}[more]
    for past_command, answer in exchanges:
        belief.update(past_command, answer)
    assert lost.reason(belief, command) == expected


@pytest.fixture
def task():
    return next(task for task in map(lambda i: rooms.task("train", i), range(99))
                if task.task_type == "pick_and_place_simple")


def played(task, chat, commands, turns=30):
    """Play these commands, then the expert's; a final None ends the episode there. Returns the episode."""
    conversation = rollout.Conversation(rollout.EpisodeSpec(task, 0, 0), Game(), chat, 0).start()
    expert = None
    if commands[-1:] == [None]:
        commands = commands[:-1]
    else:
        expert = OnlineExpert(learn_prior([task]), task, 0)
        expert.observe(conversation.reply.observation)
    ended, commands = False, iter(commands)
    while not ended and (command := next(commands, expert and expert.command())):
        ended = conversation.act(Response(chat.respond(command), [], False), turns, 10**6)
        if expert:
            expert.observe(conversation.reply.observation, command)
    return conversation.episode


def test_refusals_are_counted_and_the_first_one_by_its_reason(task, chat):
    found = lost.failures_of(played(task, chat, ["dance", "fly", "dance", "look"]))
    assert found["refused"] == 3 and found["repeated"] == 1 and found["not a command of the game"] == 1
    assert found["turns"] > 6 and not {*found} & {*lost.LOSSES}
    assert sum(found[reason] for reason in lost.REASONS) == 1


def test_an_episode_is_lost_before_the_object_is_seen_or_before_it_is_taken_or_after(task, chat):
    solution = [turn.action for turn in played(task, chat, []).turns]
    take = next(i for i, command in enumerate(solution) if command.startswith("take"))
    for n, how in ((0, 0), (take, 1), (take + 1, 2)):
        found = lost.failures_of(played(task, chat, [*solution[:n], "look", None]))
        assert {name: found[name] for name in lost.LOSSES} == {
            name: int(i == how) for i, name in enumerate(lost.LOSSES)}


def test_a_column_has_a_number_per_row(task, chat):
    class Player:
        def play(self, specs, temperature):
            assert temperature == 0.4
            return [played(spec.task, chat, commands)
                    for spec, commands in zip(specs, ([], ["dance", None]), strict=True)]

    found = dict(zip(lost.ROWS, lost.column(Player(), [task, task], 0.4), strict=True))
    assert found["won, % of episodes"] == "50.0"
    assert found["first refused, % of episodes: not a command of the game"] == "50.0"
    assert found["lost, % of episodes: never saw the object"] == "50.0"


def test_a_model_without_a_name_is_an_error(capsys):
    with pytest.raises(SystemExit):
        lost.main(["--models", "runs/a"])
    assert "--models=runs/a: expected NAME=FOLDER" in capsys.readouterr().err
