"""Prompts of `bench_drafters`, written for it: work whose output repeats its input, and work that does not."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from gate_texts import PROSE

VOCAB = 8192  # vocabulary of the model in the package


@dataclass(frozen=True)
class Task:
    """A prompt, and its author's expectation of the output.

    Attributes:
        prompt: text, or token ids.
        prediction: text, as `SamplingParams.prediction` takes it.
        answer: text that a model which can do the work gives; ``None``: what the model in the package says.
    """

    prompt: str | list[int]
    prediction: str | None = None
    answer: str | None = None


_LEDGER = '''class Ledger:
    """Accounts by name, and what was moved between them."""

    def __init__(self, names):
        self.balances = {name: 0 for name in names}
        self.moves = []

    def move(self, source, target, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if self.balances[source] < amount:
            raise ValueError("source has too little")
        self.balances[source] -= amount
        self.balances[target] += amount
        self.moves.append((source, target, amount))

    def undo(self):
        source, target, amount = self.moves.pop()
        self.balances[source] += amount
        self.balances[target] -= amount

    def total(self):
        return sum(self.balances.values())
'''

_QUEUE = '''import heapq
import itertools


class PriorityQueue:
    """Entries by priority; of equal ones, the first that came."""

    def __init__(self):
        self._heap = []
        self._count = itertools.count()

    def push(self, entry, priority):
        heapq.heappush(self._heap, (priority, next(self._count), entry))

    def pop(self):
        if not self._heap:
            raise IndexError("pop from an empty queue")
        priority, _, entry = heapq.heappop(self._heap)
        return entry

    def peek(self):
        if not self._heap:
            raise IndexError("peek into an empty queue")
        return self._heap[0][2]

    def __len__(self):
        return len(self._heap)
'''

_READER = """def read_records(path, separator=","):
    records = []
    with open(path) as lines:
        header = next(lines).rstrip("\\n").split(separator)
        for number, line in enumerate(lines, start=2):
            fields = line.rstrip("\\n").split(separator)
            if len(fields) != len(header):
                raise ValueError("line %d has %d fields" % (number, len(fields)))
            records.append(dict(zip(header, fields)))
    return records


def write_records(path, records, separator=","):
    header = list(records[0])
    with open(path, "w") as out:
        out.write(separator.join(header) + "\\n")
        for record in records:
            out.write(separator.join(record[name] for name in header) + "\\n")
"""


def _edits(done: bool, predicted: bool = True) -> list[Task]:
    """Make tasks of a file, then the same file with a change begun; ``done``: and its rest, as asked for."""
    tasks = []
    for file, old, new in ((_LEDGER, "amount", "value"), (_QUEUE, "entry", "item"), (_READER, "records", "rows")):
        changed = file.replace(old, new)
        end = changed.index("\n", len(changed) // 8) + 1
        prompt = f"# ledger.py\n{file}\n\n# ledger.py, {old} renamed to {new}\n{changed[:end]}"
        answer = changed[end:] if done else None
        tasks.append(Task(prompt, file if predicted else None, answer))
    return tasks


_PASSAGES = (
    "The lamp of the lower lighthouse is trimmed twice a night, at ten and at two, and its oil is drawn from the iron "
    "tank under the stair. Nobody but the keeper of the watch may open the tank, and he writes the level in the book.",
    "A basket of unwashed wool loses a third of its weight in the first bath. It is turned, never wrung, and dried in "
    "the shade, since the sun yellows the fibre and makes it brittle before it is ever spun.",
    "Every third year the lower field lies fallow. In the autumn before, it is limed at four sacks to the acre, and in "
    "the spring after, it is sown with barley, which stands the lime better than wheat does.",
)


def _quotes(done: bool) -> list[Task]:
    """Passages, and an answer that quotes them; ``done``: and does so."""
    context = "\n\n".join(f"[{i}] {text}" for i, text in enumerate(_PASSAGES, start=1))
    return [
        Task(
            f"{context}\n\nAnswer with the words of passage [{i}].\n\nAnswer: \"{text[: len(text) // 4]}",
            answer=text[len(text) // 4 :] + f'"\n\nThese are the words of passage [{i}].\n' if done else None,
        )
        for i, text in enumerate(_PASSAGES, start=1)
    ]  # fmt: skip


def _tools() -> list[Task]:
    """Make tasks of calls of a tool, each like the others."""
    tasks = []
    for tool, cities in (
        ("get_weather", ("Lund", "Graz", "Bern", "Cork")),
        ("find_train", ("Ghent", "Turin", "Basel", "Delft")),
        ("book_room", ("Porto", "Lyon", "Bruges", "Sofia")),
    ):
        calls = [
            {"type": "function", "name": tool, "arguments": {"city": city, "unit": "metric", "days": n, "detail": True}}
            for n, city in enumerate(cities)
        ]
        text = ",\n".join(json.dumps(call, indent=2) for call in calls)
        tasks.append(Task(f"calls = [\n{text},\n"))
    return tasks


def _turns() -> list[Task]:
    """Make tasks of a talk whose answers take up earlier messages."""
    talk = (
        "User: How do I read a file by lines?\n"
        "Assistant: with open(path) as lines:\n    for line in lines:\n        print(line.rstrip())\n"
    )
    more = (
        "User: And with the number of each line?\nAssistant: with open(path) as lines:\n",
        "User: Once more, and skip empty lines.\nAssistant: with open(path) as lines:\n    for line in lines:\n",
        "User: Write it as a function.\nAssistant: def read(path):\n    with open(path) as lines:\n",
    )
    return [Task(talk + "".join(more[: i + 1])) for i in range(len(more))]


def _noise() -> list[Task]:
    """Random tokens, short and long."""
    rng = random.Random(12)
    return [Task([rng.randrange(VOCAB) for _ in range(n)]) for n in (20, 100, 400)]


TASKS: dict[str, list[Task]] = {
    "code editing": _edits(done=False),
    "code editing, done": _edits(done=True),
    "code editing, done, nothing predicted": _edits(done=True, predicted=False),
    "answers that quote": _quotes(done=False),
    "answers that quote, done": _quotes(done=True),
    "JSON tools": _tools(),
    "many turns": _turns(),
    "prose": [Task(text) for text in PROSE],
    "random tokens": _noise(),
}
