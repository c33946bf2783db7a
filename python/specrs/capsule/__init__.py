"""Step capsules: one round's inputs in a small file, and the writes of two runs side by side.

    with llm.recording("round3.capsule", round=3):      # or: specrs record PROMPT -o round3.capsule --round 3
        llm.generate(["def fibonacci(n):"])

    capsule = specrs.capsule.load("round3.capsule")      # CapsuleError says what is wrong with a file

A capsule has everything that placed the round's reads and writes: limits, tree shape and layout, the page tables of the
batch and who else owns their pages, lengths, the draft's beams, the verified trees, the accepted paths, seeds. It has
no weights, no text and no KV (token ids of the drafts are in it). ``specrs replay`` (`specrs.capsule.replay`) makes
the same page tables again, plans the round in any format, runs the kernels over made-up keys and values, and finds the
first write in which two runs differ.

| file | what lives there |
|---|---|
| `container` | the file: magic, version, lengths, checksum, compressed body |
| `parts`, `schema`, `consistency` | the values of a round, `Capsule`, the check of every field and between fields |
| `recorder` | what the engine calls while a round runs |
| `world` | the pool made again: same page tables, same sharing, under the same lease |
| `synth` | keys, values and queries made up from who they belong to |
| `static` | static buffers in memory whose every byte is known before a plan is written into it |
| `replay` | one run of the round, every write logged |
| `on_device` | the same where a GPU plans, builds trees, verifies and moves |
| `names`, `owners` | whose an element of an array is: request, branch, step, position, a page's owner |
| `log` | writes, and the first one in which two runs differ |
| `compare` | two runs side by side, as text and as JSON |
"""

from __future__ import annotations

from specrs.capsule.container import MAX_FILE, MAX_RAW, VERSION
from specrs.capsule.errors import CapsuleError
from specrs.capsule.file import dumps, load, loads, save
from specrs.capsule.recorder import RoundRecorder
from specrs.capsule.schema import Capsule

__all__ = [
    "MAX_FILE",
    "MAX_RAW",
    "VERSION",
    "Capsule",
    "CapsuleError",
    "RoundRecorder",
    "dumps",
    "load",
    "loads",
    "save",
]
