"""Every launch of an engine's rounds, with each operand that it writes laid over each of the others: refused."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from modelzoo import Pair, agree, write_eagle3, write_target
from specrs import LLM, SamplingParams, device
from specrs import _specrs as core

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

WRITTEN = {
    "_device_embed": {"out"},
    "_device_gather_rows": {"out"},
    "_device_copy_rows": {"dst"},
    "_device_add_rms_norm": {"residual", "copy", "out"},
    "_device_gated_up": {"out"},
    "_device_row_conv": {"out"},
    "_device_rope_kv": {"q", "cache"},
    "_device_attention": {"out", "workspace"},
    "_device_verify_greedy": {"accepts", "scratch"},
    "_device_sample_verify": {"accepts", "scratch"},
    "_device_kv_commit": {"moves"},  # with pages of one token: the table
    "_device_kv_move": {"cache"},
    "_device_draft_select": {"beams", "scratch"},
    "_device_tree_build": {"trees", "masks"},
    "_device_tree_unite": {"trees", "masks", "origins"},
    "_device_tree_lists": {"trees", "masks", "sound"},
    "_device_list_beams": {"beams"},
    "_device_block_rows": {"blocks"},
    "_device_plan": {"plan", "arrays"},
    "_device_round_end": {"state", "control"},
}
"""Arguments that each launch writes."""
Place = tuple[Any, ...]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("overlap")
    sizes = {"vocab_size": 16, "eos_token_id": 3, "bos_token_id": None, "max_position_embeddings": 1024}
    target = write_target(root / "target", dtype=torch.bfloat16, head_dim=64, **sizes)
    draft = write_eagle3(root / "draft", target, draft_vocab_size=16, dtype=torch.bfloat16, head_dim=64)
    agree(target, draft)
    return Pair(target, draft)


pytestmark = pytest.mark.usefixtures("no_fault_is_left")


def leaves(given: dict[str, Any]) -> dict[Place, torch.Tensor]:
    """Tensors with elements, by the way to each."""
    found: dict[Place, torch.Tensor] = {}
    for name, value in given.items():
        inner: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, dict):
            inner = value.items()
        elif isinstance(value, (list, tuple)):
            inner = enumerate(value)
        elif dataclasses.is_dataclass(value):
            inner = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        each = [((name,), value), *(((name, key), one) for key, one in inner)]
        found.update({place: t for place, t in each if isinstance(t, torch.Tensor) and t.numel() and t.is_cuda})
    return found


def put(given: dict[str, Any], place: Place, tensor: torch.Tensor) -> dict[str, Any]:
    """The arguments with another tensor at a place."""
    if len(place) == 1:
        return {**given, place[0]: tensor}
    name, key = place
    if isinstance(given[name], dict):
        return {**given, name: {**given[name], key: tensor}}
    if dataclasses.is_dataclass(given[name]):
        return {**given, name: dataclasses.replace(given[name], **{key: tensor})}
    return {**given, name: [tensor if i == key else one for i, one in enumerate(given[name])]}


def over(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
    """A tensor like `like` at the start of another's memory; None where it cannot lie there."""
    first = memory.storage_offset() * memory.element_size()
    size = like.numel() * like.element_size()
    if first % 16 or not memory.is_contiguous() or memory.numel() * memory.element_size() < size:
        return None
    raw = torch.empty(0, dtype=torch.uint8, device=memory.device)
    raw.set_(memory.untyped_storage(), first, (size,), (1,))
    return raw.view(like.dtype).view(like.shape)


def tried(launch: Callable[..., None], written: set[str], given: dict[str, Any]) -> int:
    """Lay each written operand over each other one, or the other over it; returns how many pairs there were."""
    tensors, pairs = leaves(given), 0
    for mine, output in tensors.items():
        for other, tensor in tensors.items():
            if mine[0] not in written or mine == other:
                continue
            moved, place = over(tensor, output), mine
            if moved is None:
                moved, place = over(output, tensor), other
            if moved is None:
                continue
            with pytest.raises(core.ConfigError, match=r"got memory that .* uses too"):
                launch(**put(given, place, moved))
            pairs += 1
    return pairs


@pytest.mark.parametrize("options", [
    {"tree": (4, 3, 12)}, {"tree": (4, 3, 12), "page_size": 1}, {"tree": (4, 3, 12), "drafters": ["head", "suffix"]},
    {"speculative": False},
], ids=["tree", "tree-remapped", "sources", "plain"])  # fmt: skip
def test_no_launch_writes_over_another_operand(
    pair: Pair, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, int] = {}

    def watched(name: str) -> Callable[..., None]:
        launch = getattr(core, name)
        kinds: set[tuple[Place, ...]] = set()

        def call(*args: Any, **kwargs: Any) -> None:
            bound = inspect.signature(launch).bind(*args, **kwargs)
            bound.apply_defaults()
            kind = tuple(leaves(bound.arguments))
            if kind not in kinds and len(kinds) < 4:  # with and without what may be left out
                kinds.add(kind)
                remaps = name == "_device_kv_commit" and bound.arguments["moves"] is None
                written = {"table"} if remaps else WRITTEN[name]
                seen[name] = seen.get(name, 0) + tried(launch, written, bound.arguments)
            launch(*args, **kwargs)

        return call

    for name in WRITTEN:
        monkeypatch.setattr(core, name, watched(name))
    prompts = [[4, 5], [6], [7, 8, 9] * 8, [10]]
    params = [SamplingParams(max_tokens=24, temperature=0.5 * (i % 2), seed=i, ignore_eos=True) for i in range(4)]
    with LLM(pair.target, pair.draft, device="cuda", graphs="off", max_context_len=256, **options) as llm:
        got = [out.token_ids for out in llm.generate(prompts, params)]
    monkeypatch.undo()
    with LLM(pair.target, pair.draft, device="cuda", graphs="off", max_context_len=256, **options) as llm:
        assert [out.token_ids for out in llm.generate(prompts, params)] == got, "a refused launch wrote something"
    assert all(pairs > 0 for pairs in seen.values()), seen
    assert {"_device_embed", "_device_rope_kv", "_device_attention"} <= set(seen), seen
    if "tree" in options:
        of_trees = {"_device_plan", "_device_draft_select", "_device_tree_build", "_device_kv_commit"}
        assert of_trees <= set(seen) and {"_device_verify_greedy", "_device_sample_verify"} & set(seen), seen
    if "drafters" in options:
        assert "_device_tree_unite" in seen, seen
