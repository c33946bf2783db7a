"""Shared fixtures: tiny random models, written once a session."""

from __future__ import annotations

import os

import pytest
import torch

from modelzoo import VOCAB, Pair, write_eagle3, write_target
from specrs import num_threads, set_num_threads

os.environ["HF_HUB_OFFLINE"] = "1"  # tests download nothing
os.environ.setdefault("SPECRS_DEVICE", "cpu")  # tests name the GPU where they mean it
set_num_threads(num_threads())  # the kernels keep theirs, whatever torch is given
torch.set_num_threads(1)  # the models here are tiny: waking torch's threads costs more than they bring


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """10 tokens only (`VOCAB`), so that an untrained head is right often enough."""
    root = tmp_path_factory.mktemp("tiny")
    target = write_target(
        root / "target", vocab_size=VOCAB, eos_token_id=None, bos_token_id=None, max_position_embeddings=256
    )
    return Pair(target, write_eagle3(root / "draft", target, draft_vocab_size=8))


@pytest.fixture(scope="session")
def ternary(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """3 tokens, so that with topk 3 every path is drafted as far as the tree reaches."""
    root = tmp_path_factory.mktemp("ternary")
    target = write_target(
        root / "target", vocab_size=3, eos_token_id=None, bos_token_id=None, max_position_embeddings=256
    )
    return Pair(target, write_eagle3(root / "draft", target, draft_vocab_size=3))


@pytest.fixture(scope="session")
def bytes_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A byte-level tokenizer and EOS."""
    root = tmp_path_factory.mktemp("bytes")
    target = write_target(root / "target", tokenizer=True, max_position_embeddings=256)
    return Pair(target, write_eagle3(root / "draft", target))
