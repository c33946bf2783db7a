"""Shared fixtures: tiny random models, written once a session; memory and faults of a GPU.

Tests of texts and of the layout need no torch, so nothing here imports it before a fixture that does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from specrs import num_threads, set_num_threads

if TYPE_CHECKING:
    from gpu_world import Canaries
    from modelzoo import Pair

os.environ["HF_HUB_OFFLINE"] = "1"  # tests download nothing
os.environ.setdefault("SPECRS_DEVICE", "cpu")  # tests name the GPU where they mean it
set_num_threads(num_threads())  # the kernels keep theirs, whatever torch is given


def pytest_collection_finish() -> None:
    """The models here are tiny: waking torch's threads costs more than they bring."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """10 tokens only (`VOCAB`), so that an untrained head is right often enough."""
    from modelzoo import VOCAB, Pair, write_eagle3, write_target

    root = tmp_path_factory.mktemp("tiny")
    target = write_target(
        root / "target", vocab_size=VOCAB, eos_token_id=None, bos_token_id=None, max_position_embeddings=256
    )
    return Pair(target, write_eagle3(root / "draft", target, draft_vocab_size=8))


@pytest.fixture(scope="session")
def ternary(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """3 tokens, so that with topk 3 every path is drafted as far as the tree reaches."""
    from modelzoo import Pair, write_eagle3, write_target

    root = tmp_path_factory.mktemp("ternary")
    target = write_target(
        root / "target", vocab_size=3, eos_token_id=None, bos_token_id=None, max_position_embeddings=256
    )
    return Pair(target, write_eagle3(root / "draft", target, draft_vocab_size=3))


@pytest.fixture(scope="session")
def bytes_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A byte-level tokenizer and EOS."""
    from modelzoo import Pair, write_eagle3, write_target

    root = tmp_path_factory.mktemp("bytes")
    target = write_target(root / "target", tokenizer=True, max_position_embeddings=256)
    return Pair(target, write_eagle3(root / "draft", target))


@pytest.fixture
def no_fault_is_left() -> Iterator[None]:
    """A GPU's fault that a test does not expect fails that test, not the next one."""
    import torch

    from specrs import device

    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()
    device.check()


@pytest.fixture
def canaries() -> Iterator[Canaries]:
    """Makes tensors of a GPU between canaries, all of which must live when the test ends."""
    from gpu_world import Canaries

    made = Canaries()
    yield made
    made.check()
