"""Prompts of `bench_gate`, written for it: kinds of text that the model in the package was, and was not, trained for.

Every kind has short prompts and long ones, since a long prompt makes the draft head's own prefill dear.
"""

# ruff: noqa: E501

from __future__ import annotations

import random

PROSE = [
    "The harbour was quiet that morning, and the fishermen",
    "In the second chapter we saw that a small island economy depends on its neighbours. Here we ask how it",
    "Minutes of the meeting of the garden society, held on the first Tuesday of May in the old school. Present were "
    "the chair, Mrs. Aldous, the treasurer, Mr. Penn, and eleven members. The minutes of the last meeting were read "
    "and approved. The treasurer reported that the fence had cost more than expected, since two of its posts stood in "
    "water, and that the balance was therefore small. Mr. Lowe asked whether the hedge might not have done as well. "
    "The chair answered that",
    "My grandmother kept her letters in a tin that had once held biscuits. She never read them to us, but on some "
    "evenings she would take the tin down from the shelf, put it on the table before her, and rest both hands on its "
    "lid as if something inside might wish to get out. When I was nine years old I asked her who had written them. "
    "She looked at me for a long time. Outside the rain had stopped, the gutters were still running, and somewhere "
    "down the street a dog was barking at nothing in particular. She told me that a letter is a promise which has "
    "already been kept, and that I would understand this when I was older. I am older now than she was on that "
    "evening, and I have the tin. There is a dent in one corner, and the picture on its lid, a mail coach in the "
    "snow, has faded so far that only the horses can be made out. Last week I opened it for the first time. The "
    "letters lay in bundles, each tied with a different ribbon, and on the topmost envelope stood",
]

JSON = [
    '{"name": "Ada", "age": 36, "langu',
    '[{"id": 1, "title": "Oak table", "price": 249.0, "tags": ["wood", "kitchen"]}, {"id": 2, "title": ',
    '{\n  "station": "Northfield",\n  "platforms": [\n    {"number": 1, "departures": [{"time": "08:14", "to": "Milton", '
    '"delay": 0}, {"time": "08:31", "to": "Harbour", "delay": 4}]},\n    {"number": 2, "departures": [{"time": "08:17", '
    '"to": "Eastgate", "delay": 0}, {"time": "08:44", "to": "Milton", "delay": 12}]},\n    {"number": 3, "departures": '
    '[{"time": "08:20", "to":',
    '{\n  "openapi": "3.0.0",\n  "info": {"title": "Library", "version": "1.2.0"},\n  "paths": {\n    "/books": {\n      '
    '"get": {\n        "summary": "List the books on the shelves",\n        "parameters": [\n          {"name": "limit", '
    '"in": "query", "required": false, "schema": {"type": "integer", "maximum": 100}},\n          {"name": "author", '
    '"in": "query", "required": false, "schema": {"type": "string"}}\n        ],\n        "responses": {\n          '
    '"200": {"description": "A page of books"},\n          "400": {"description": "A parameter is out of range"}\n'
    '        }\n      },\n      "post": {\n        "summary": "Add a book",\n        "requestBody": {"content": '
    '{"application/json": {"schema": {"$ref": "#/components/schemas/Book"}}}},\n        "responses": {\n',
]

SQL = [
    "SELECT name, count(*) FROM visits WHERE",
    "CREATE TABLE orders (\n    id INTEGER PRIMARY KEY,\n    customer_id INTEGER NOT NULL,\n    placed_at TIMESTAMP",
    "INSERT INTO plants (id, name, height, flowers) VALUES\n    (1, 'fern', 40, FALSE),\n    (2, 'rose', 120, TRUE),\n"
    "    (3, 'ivy', 300, FALSE),\n    (4, 'tulip', 35, TRUE),\n    (5, 'moss', 2, FALSE),\n    (6, ",
    "-- Revenue of each region by quarter, and its share of the year.\nWITH quarters AS (\n    SELECT r.name AS region,\n"
    "           date_trunc('quarter', o.placed_at) AS quarter,\n           sum(l.amount * l.price) AS revenue\n"
    "    FROM orders o\n    JOIN lines l ON l.order_id = o.id\n    JOIN customers c ON c.id = o.customer_id\n"
    "    JOIN regions r ON r.id = c.region_id\n    WHERE o.placed_at >= '2023-01-01' AND o.state <> 'cancelled'\n"
    "    GROUP BY r.name, quarter\n), years AS (\n    SELECT region, sum(revenue) AS revenue FROM quarters GROUP BY "
    "region\n)\nSELECT q.region, q.quarter, q.revenue,\n       q.revenue / y.revenue AS share\nFROM quarters q\nJOIN ",
]

C = [
    "int main(int argc, char **argv) {\n",
    "#include <stdio.h>\n#include <string.h>\n\nstatic size_t count_words(const char *text)\n{\n    size_t n = 0;\n",
    "struct ring {\n    unsigned head, tail, mask;\n    void **slots;\n};\n\nstatic int ring_push(struct ring *r, void *p)\n"
    "{\n    if (r->head - r->tail > r->mask)\n        return -1;\n    r->slots[r->head++ & r->mask] = p;\n    return 0;\n"
    "}\n\nstatic void *ring_pop(struct ring *r)\n{\n",
    "/* A hash map from strings to integers, with open addressing. */\n#include <stdlib.h>\n#include <string.h>\n#include "
    "<stdint.h>\n\ntypedef struct {\n    char *key;\n    int value;\n} entry_t;\n\ntypedef struct {\n    entry_t *entries;\n"
    "    size_t capacity, used;\n} map_t;\n\nstatic uint32_t hash(const char *s)\n{\n    uint32_t h = 5381;\n    while (*s)\n"
    "        h = h * 33 ^ (unsigned char)*s++;\n    return h;\n}\n\nint map_init(map_t *m, size_t capacity)\n{\n"
    "    m->entries = calloc(capacity, sizeof *m->entries);\n    if (m->entries == NULL)\n        return -1;\n"
    "    m->capacity = capacity;\n    m->used = 0;\n    return 0;\n}\n\nentry_t *map_find(map_t *m, const char *key)\n{\n"
    "    size_t i = hash(key) % m->capacity;\n    while (m->entries[i].key != NULL) {\n        if (strcmp(m->entries[i].key,"
    " key) == 0)\n            return &m->entries[i];\n        i = (i + 1) % m->capacity;\n    }\n    return NULL;\n}\n\nint "
    "map_put(map_t *m, const char *key, int value)\n{\n",
]

PYTHON = [
    "def moving_average(values, width):\n",
    "class Inventory:\n    def __init__(self):\n        self.items = {}\n\n    def add(self, name, count=1):\n",
    "import argparse\nimport csv\nimport sys\n\n\ndef read_rows(path):\n    with open(path, newline='') as f:\n        "
    "return list(csv.DictReader(f))\n\n\ndef totals(rows, column):\n    result = {}\n    for row in rows:\n        key = "
    "row[column]\n        result[key] = result.get(key, 0) + float(row['amount'])\n    return result\n\n\ndef main():\n    "
    "parser = argparse.ArgumentParser(",
    '"""A small scheduler of jobs that run at fixed times."""\n\nimport heapq\nimport threading\nimport time\n\n\nclass '
    'Job:\n    """One callable, and when it runs next."""\n\n    def __init__(self, when, interval, action, args=()):\n'
    "        self.when = when\n        self.interval = interval\n        self.action = action\n        self.args = args\n"
    "        self.cancelled = False\n\n    def __lt__(self, other):\n        return self.when < other.when\n\n    def "
    'cancel(self):\n        """Do not run again."""\n        self.cancelled = True\n\n\nclass Scheduler:\n    """Runs jobs '
    'in a thread of its own."""\n\n    def __init__(self):\n        self._jobs = []\n        self._lock = '
    "threading.Condition()\n        self._thread = None\n        self._stopping = False\n\n    def start(self):\n        "
    'if self._thread is not None:\n            raise RuntimeError("already started")\n        self._thread = '
    "threading.Thread(target=self._run, daemon=True)\n        self._thread.start()\n\n    def add(self, interval, action, "
    "*args):\n        job = Job(time.monotonic() + interval, interval, action, args)\n        with self._lock:\n"
    "            heapq.heappush(self._jobs, job)\n            self._lock.notify()\n        return job\n\n    def _run(self):\n",
]

CJK = [
    "春天来了,公园里的",
    "図書館は駅から歩いて五分のところにあります。月曜日は",
    "오늘 아침 회의에서 우리는 새로운 일정을 정했습니다. 먼저",
    "小镇的东边有一条河,河上有一座旧桥。每天清晨,卖豆腐的老人推着车从桥上走过,车轮压在石板上,发出轻轻的响声。孩子们听见这声音,"
    "就知道该起床上学了。有一年夏天下了很大的雨,桥被水冲坏了一半,老人只好从另一条路绕过来,声音也就听不见了。那几天,很多孩子都",
]


def _unicode(seed: int, length: int) -> str:
    """Characters of the basic plane, uniform but for surrogates and controls."""
    rng = random.Random(seed)
    points = (rng.choice((rng.randrange(0x20, 0xD800), rng.randrange(0xE000, 0xFFFE))) for _ in range(length))
    return "".join(map(chr, points))


UNICODE = [_unicode(seed, length) for seed, length in ((1, 8), (2, 20), (3, 40), (4, 120))]

MIXED = [
    "Step 1: run `git status`, then edit config.yaml:\n\nserver:\n  port: 80",
    "| city | people |\n|---|---|\n| Lund | 94,000 |\n| Graz | 292,000 |\n| 長崎 | 390,000 |\n| ",
    '# Fehlerbericht\n\nBeim Aufruf von `load("größe.json")` kommt:\n\n```\nTraceback (most recent call last):\n  File '
    '"app.py", line 12, in <module>\n    load("größe.json")\nUnicodeDecodeError: \'ascii\' codec can\'t decode byte 0xc3\n```'
    "\n\nErwartet: die Datei wird als UTF-8 gelesen. Versuch einer Lösung:\n\n```python\ndef load(path):\n",
    "From: ines@example.org\nTo: ops@example.org\nSubject: Backup läuft nicht mehr\n\nHi all,\n\nsince Friday the nightly "
    'job ends with exit code 3. The log says:\n\n  02:00:01 INFO  start {"host": "db2", "mode": "full"}\n  02:00:07 '
    "WARN  lock held by pid 4711 (SELECT pg_advisory_lock(42))\n  02:10:07 ERROR timeout after 600 s\n\nI looked at the "
    "query: SELECT pid, state FROM pg_stat_activity WHERE state <> 'idle'; and it shows one session from the report "
    "server. 先週の金曜日に新しいレポートを追加しました。 Could that be the reason? In cron we have\n\n  0 2 * * * "
    "/opt/backup/run.sh --full --compress=zstd\n\nIf nobody objects I will move it to 04:00 and ",
]

# Beginnings of Python files and of parts of them, as a user of the demo types them: what the model was trained for.
CODE = [
    "class TestReadFile(unittest.TestCase):",
    "class Stack:",
    "import os\nimport sys\n\n\ndef main():\n",
    "def read(path):\n    with open(",
    "for i in range(10):\n    print(",
    "class Node:\n    def __init__(self, value, next=None):\n",
    "def fibonacci(n):\n    ",
    'if __name__ == "__main__":\n    parser = argparse.ArgumentParser(',
]

KINDS: dict[str, list[str]] = {
    "code": CODE,
    "prose": PROSE,
    "json": JSON,
    "sql": SQL,
    "c": C,
    "python": PYTHON,
    "cjk": CJK,
    "unicode": UNICODE,
    "mixed": MIXED,
}
