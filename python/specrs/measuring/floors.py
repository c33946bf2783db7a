"""The floor of a round: how long the memory takes to give what the round has to read, weights and KV.

Every weight is read once a pass, whatever the batch, and every request's keys and values once. The floor is these bytes
over the bandwidth that was measured in the same run. Weights that fit into a cache may come faster than that.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specrs.engine.devices.memory_plan import Head
from specrs.models import ModelConfig
from specrs.models.head_config import Eagle1Config

_TABLES = ("model.embed_tokens.weight", "embed_tokens.weight")
_REPEATS = 7


@dataclass(frozen=True)
class Reads:
    """Bytes that passes of a model and its head read.

    Attributes:
        target_weights, head_weights: matrices of a pass.
        fusion: matrix by which a head reads the target's features, once a round.
        target_kv, head_kv: keys and values of a token.
    """

    target_weights: int
    target_kv: int
    head_weights: int = 0
    fusion: int = 0
    head_kv: int = 0

    @classmethod
    def of(cls, target: ModelConfig, head: Head | None, weight_size: int = 2, kv_size: int = 2) -> Reads:
        """Count from sizes.

        Args:
            weight_size, kv_size: bytes of an element.
        """
        from specrs.models import LlamaModel

        lm_head = target.vocab_size * target.hidden_size
        shapes = LlamaModel.shapes(target)
        weights = _matrices(shapes) + (lm_head if target.tie_word_embeddings else 0)
        kv = 2 * target.num_layers * target.kv_size
        if head is None:
            return cls(weights * weight_size, kv * kv_size)
        fc = math.prod(head.shapes["fc.weight"])
        rest = _matrices(head.shapes) - fc + (0 if "lm_head.weight" in head.shapes else lm_head)
        if isinstance(head.config, Eagle1Config):  # its fc reads every token's embedding and feature
            fc, rest = 0, rest + fc
        return cls(
            weights * weight_size, kv * kv_size, rest * weight_size, fc * weight_size,
            2 * head.config.num_layers * head.config.kv_size * kv_size,
        )  # fmt: skip

    def plain(self, batch: int, context: int) -> int:
        """Bytes of a pass of the target."""
        return self.target_weights + batch * context * self.target_kv

    def tree(self, batch: int, context: int, passes: int) -> int:
        """Bytes of a round with so many passes of the head."""
        head = self.head_weights + batch * context * self.head_kv
        return self.plain(batch, context) + self.fusion + passes * head


def _matrices(shapes: dict[str, tuple[int, ...]]) -> int:
    """Elements of all matrices but embeddings, of which a pass reads some rows."""
    return sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name not in _TABLES)


def bandwidth(device: torch.device) -> float:
    """Measure the bytes a second that a device's memory gives: the greater of a large read and a large copy.

    A copy counts the bytes that it reads and those that it writes.
    """
    size = 1 << (28 if device.type == "cuda" else 26)  # f32: 1 GiB and 256 MiB, beyond any cache
    a = torch.full((size,), 1.5, device=device)
    b = torch.empty_like(a)
    read = 4 * size / _seconds(a.sum, device)
    return max(read, 8 * size / _seconds(lambda: torch.neg(a, out=b), device))


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call."""
    found = []
    for _ in range(_REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - started)
    return statistics.median(found[1:])  # the first call touches the memory
