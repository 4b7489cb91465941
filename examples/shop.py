"""A shop with a real database: an agent searches, looks at the stock and buys, by calling tools.

    # the small model, from scratch, on a CPU; then a Qwen2.5 or 3 folder
    python gcd.py --env examples/shop.py
    python gcd.py --env examples/shop.py --model DIR --max-response-tokens 512 --out runs/qwen

An order is a goal in words: two cups, the cheapest kind of which two are in stock. The shop's articles, their
prices and the stock are drawn from the task's name. A purchase ends the episode. Held out: every fifth pair
of an article and a count. Each task has a database of its own in memory (sqlite3), and each tool is a query.
"""

import random
import re
import sqlite3

from envs import Demonstration, Task
from envs.tools import Game, ToolEnvironment, ToolError, call, calls_in, schemas

NAMES = ("bowl", "candle", "chair", "cup", "hat", "jug", "kettle", "lamp", "mirror", "pan", "shelf", "vase")
COUNTS = range(1, 6)
KINDS = range(2, 5)                     # kinds of each article in a shop
FIRST, LAST = 10, 59                    # an article's number
PRICES = range(1, 10)                   # euros


class Shop(Game):
    """The game. Its tools are its public methods."""

    def begin(self, task, seed):
        self.close()
        self._database = sqlite3.connect(":memory:")
        self._database.execute("create table articles (number integer primary key, name, price, stock)")
        self._database.executemany("insert into articles values (?, ?, ?, ?)", articles_of(task))
        self._name, self._count = task.problem
        return f"Order: {self._count} of the cheapest {self._name} of which so many are in stock."

    def search(self, name: str) -> str:
        """List the kinds of an article, with number and price, the cheapest first.

        Args:
            name: the article's name, one word
        """
        rows = self._rows("select number, price from articles where name = ? order by price", name)
        if not rows:
            raise ToolError("the shop has no such article")
        return "\n".join(f"article {number} costs {price}" for number, price in rows)

    def stock(self, article: int) -> str:
        """Say how many of an article are in stock.

        Args:
            article: the article's number
        """
        return f"in stock: {self._one(article)[1]}"

    def buy(self, article: int, count: int) -> str:
        """Buy an article. This completes the order: there is no second purchase.

        Args:
            article: the article's number
            count: how many
        """
        name, stock = self._one(article)
        if not 0 < count <= stock:
            self.finish(False, "not in stock")
            return "there are not so many"
        best = self._rows("select number from articles where name = ? and stock >= ? order by price limit 1",
                          self._name, self._count)
        self._database.execute("update articles set stock = stock - ? where number = ?", (count, article))
        right = (name, count) == (self._name, self._count) and best == [(article,)]
        self.finish(right, "bought" if right else "bought the wrong thing")
        return "sold"

    def _rows(self, query, *values):
        return self._database.execute(query, values).fetchall()

    def _one(self, article):
        """(name, stock) of an article; ToolError if there is none."""
        rows = self._rows("select name, stock from articles where number = ?", article)
        if not rows:
            raise ToolError("the shop has no such article")
        return rows[0]

    def close(self):
        if hasattr(self, "_database"):
            self._database.close()


def articles_of(task):
    """The rows of a task's shop: (number, name, price, stock); prices of an article's kinds differ."""
    rng, (wanted, count) = random.Random(task.id), task.problem
    numbers, rows = rng.sample(range(FIRST, LAST + 1), LAST + 1 - FIRST), []
    for name in NAMES:
        prices = rng.sample(PRICES, rng.choice(KINDS))
        stocks = [rng.randrange(10) for _ in prices]
        if name == wanted and max(stocks) < count:
            stocks[rng.randrange(len(stocks))] = count           # an order can always be filled
        rows += [(numbers.pop(), name, price, stock) for price, stock in zip(prices, stocks)]
    return rows


class Known:
    """What is known after observations: the order, the kinds found, {number: price}, and {number: stock}."""

    def __init__(self, order):
        self.count, self.name = re.match(r"Order: (\d+) of the cheapest (\w+)", order).groups()
        self.count, self.prices, self.stocks = int(self.count), {}, {}

    def best(self):
        """The call that is right now."""
        if not self.prices:
            return "search", {"name": self.name}
        enough = [number for number in sorted(self.prices, key=self.prices.get)
                  if self.stocks.get(number, self.count) >= self.count]
        if enough[0] not in self.stocks:
            return "stock", {"article": enough[0]}
        return "buy", {"article": enough[0], "count": self.count}

    def learn(self, name, arguments, answer):
        """Take in the answer to a call."""
        if name == "search" and arguments == {"name": self.name}:
            found = re.findall(r"article (\d+) costs (\d+)", answer)
            self.prices = {int(number): int(price) for number, price in found}
        if name == "stock" and (stock := re.fullmatch(r"in stock: (\d+)", answer)):
            self.stocks[arguments["article"]] = int(stock[1])


class Expert:
    """Search, look at the stock from the cheapest kind on, buy. A mistake looks at or buys another kind."""

    restarts = 0

    def __init__(self, game):
        self.game = game

    def show(self, task, seed, mistake_rate, max_turns):
        rng, replies, commands, mistakes = random.Random(seed), [self.game.reset(task)], [], []
        known = Known(replies[0].observation)
        while not replies[-1].done and len(commands) < max_turns:
            name, arguments = known.best()
            others = sorted(known.prices.keys() - {arguments.get("article")})
            mistakes.append(bool(others) and rng.random() < mistake_rate)
            if mistakes[-1]:
                name, arguments = "stock", {"article": rng.choice(others)}
            commands.append(call(name, **arguments))
            replies.append(self.game.step(commands[-1]))
            known.learn(name, arguments, replies[-1].observation)
        return Demonstration(replies, commands, mistakes)


class Environment(ToolEnvironment):
    """Orders at shops that no other order has."""

    rules = "You work for a shop. Fill the order with one purchase, and look at the stock before you buy."
    defaults = {"max_turns": 10, "max_response_tokens": 24, "iterations": 40, "judge_labels": "oracle"}
    splits = ("dev", "test")
    captions = {"dev": "orders as in training, in other shops", "test": "articles in a count never ordered"}

    def make(self, n):
        return [Shop() for _ in range(n)]

    def tools(self):
        return schemas(Shop)

    def _task(self, split, i, rng):
        """Task number i of a split."""
        pairs = [(name, count) for a, name in enumerate(NAMES) for count in COUNTS
                 if ((a + count) % 5 == 0) == (split == "test")]
        return Task(f"{split}/{i}", split, "buy", rng.choice(pairs))

    def train_tasks(self, types, start, n):
        return [self._task(f"train{self.seed}", i, random.Random(f"{self.seed} {i}"))
                for i in range(start, start + n)]

    def split_tasks(self, name):
        return [self._task(name, i, random.Random(f"{name} {i}")) for i in range(200)]

    def unseen_splits(self):
        return ["test"]

    def vocabulary(self):
        numbers = [str(n) for n in (*range(10), *range(FIRST, LAST + 1))]
        return [*super().vocabulary(), "Order: ", " of the cheapest ", " of which so many are in stock.",
                "article ", " costs ", "in stock: ", "there are not so many", "sold",
                "the shop has no such article", "\n", *NAMES, *numbers]

    def expert(self, games):
        return Expert(games[0])

    def oracle(self, observations, commands):
        """"good" for a command that is the one right call by what was known, "bad" for any other.

        None after a command of several calls: the text does not tell whose answer a line is.
        """
        known, labels = Known(observations[0]), []
        for command, answer in zip(commands, observations[1:]):
            calls = self._calls(command)
            labels.append("good" if calls == [known.best()] else "bad")
            if len(calls_in(command)) > 1:
                break
            for name, arguments in calls:
                known.learn(name, arguments, answer)
        return labels + [None] * (len(commands) - len(labels))
