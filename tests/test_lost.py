"""Proves that studies/lost.py gives a refusal the reason that it has, and counts how episodes are lost.

    python -m pytest tests/test_lost.py
"""

import pytest

import rollout
from envs.alfred import rooms
from envs.alfred.expert import Belief, Coach, learn_prior
from envs.alfred.game import Game
from lm.engine import Response
from studies import lost

pytestmark = pytest.mark.fast
INTRO = ("You are in the middle of a room. Looking quickly around you, you see a bed 1, a desk 1, "
         "a drawer 2, and a drawer 1.\n\nYour task is to: put a pen in bed.")
SEEN = (("go to desk 1", "You arrive at desk 1. On the desk 1, you see a pen 2, and a book 1."),
        ("go to drawer 1", "You arrive at drawer 1. The drawer 1 is closed."))


@pytest.mark.parametrize("more, command, why", [
    ((), "", "no command of the game"), ((), "dance", "no command of the game"),
    ((), "take pen 2", "no command of the game"), ((), "go to", "no command of the game"),
    ((), "go to sofa 1", "names what is not in the room"),
    ((), "take pen 2 from sofa 1", "names what is not in the room"),
    ((), "go to drawer 1", "goes where it is"),
    ((), "go to drawer 2", "goes where nothing new can be reached"),
    ((), "take pen 2 from desk 1", "is not at the place"), ((), "open drawer 2", "is not at the place"),
    ((), "use pen 2", "is not at the place"), ((), "take pen 1 from drawer 1", "the place is closed"),
    ((), "close drawer 1", "for another reason"),
    (1, "take pen 1 from desk 1", "another of its kind lies here"),
    (1, "take cup 1 from desk 1", "the thing is not here"),
    (1, "move pen 2 to desk 1", "does not hold the thing"),
    (2, "take book 1 from desk 1", "holds something already"),
    (3, "take pen 2 from bed 1", "the thing lies elsewhere")])
def test_a_refusal_has_the_first_reason_that_there_is(more, command, why):
    belief = Belief(INTRO)
    told = {(): SEEN, 1: SEEN[:1],
            2: (*SEEN[:1], ("take pen 2 from desk 1", "You pick up the pen 2 from the desk 1.")),
            3: (*SEEN[:1], ("go to bed 1", "You arrive at bed 1. On the bed 1, you see nothing."))}[more]
    for said, answer in told:
        belief.update(said, answer)
    assert lost.reason(belief, command) == why


@pytest.fixture
def task():
    return next(task for task in map(lambda i: rooms.task("train", i), range(99))
                if task.task_type == "pick_and_place_simple")


def played(task, chat, commands, turns=30):
    """The episode of these commands, then of the expert's where there are too few (None: nobody's)."""
    conversation, coach = rollout.Conversation(rollout.Seat(task, 0, 0), Game(), chat, 0).begin(), None
    if commands[-1:] == [None]:
        commands = commands[:-1]
    else:
        coach = Coach(learn_prior([task]), task, 0)
        coach.see(conversation.reply.observation)
    ended, commands = False, iter(commands)
    while not ended and (command := next(commands, coach and coach.advice())):
        ended = conversation.act(Response(chat.respond(command), [], False), turns, 10**6)
        if coach:
            coach.see(conversation.reply.observation, command)
    return conversation.episode


def test_refusals_are_counted_the_first_by_its_reason(task, chat):
    found = lost.looked_through(played(task, chat, ["dance", "fly", "dance", "look"]))
    assert found["refused"] == 3 and found["again"] == 1 and found["no command of the game"] == 1
    assert found["turns"] > 6 and not {*found} & {*lost.LOST}
    assert sum(found[why] for why in lost.REFUSED) == 1


def test_an_episode_is_lost_before_the_thing_is_seen_or_taken_or_after(task, chat):
    whole = [turn.action for turn in played(task, chat, []).turns]
    take = next(i for i, command in enumerate(whole) if command.startswith("take"))
    for n, how in ((0, 0), (take, 1), (take + 1, 2)):
        found = lost.looked_through(played(task, chat, [*whole[:n], "look", None]))
        assert {name: found[name] for name in lost.LOST} == {
            name: int(i == how) for i, name in enumerate(lost.LOST)}


def test_a_column_has_a_number_for_each_row(task, chat):
    class Player:
        def play(self, seats, temperature):
            assert temperature == 0.4
            return [played(seat.task, chat, commands)
                    for seat, commands in zip(seats, ([], ["dance", None]), strict=True)]

    found = dict(zip(lost.ROWS, lost.column(Player(), [task, task], 0.4), strict=True))
    assert found["won, % of episodes"] == "50.0"
    assert found["first refused, % of episodes: no command of the game"] == "50.0"
    assert found["lost, % of episodes: never saw the thing"] == "50.0"


def test_a_model_without_a_name_is_a_mistake(capsys):
    with pytest.raises(SystemExit):
        lost.main(["--models", "runs/a"])
    assert "--models=runs/a: expected NAME=FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_a_temperature_that_is_none_is_a_mistake(value, capsys):
    with pytest.raises(SystemExit):
        lost.main(["--models", "a=b", "--temperature", value])
    assert f"--temperature={value}: expected 0" in capsys.readouterr().err
