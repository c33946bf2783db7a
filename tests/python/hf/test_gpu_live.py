"""A live module on a GPU: its engine's tokens are those of an engine over its files, with drafts and without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import modelzoo
from modelrun import random_tokens
from specrs import LLM, SamplingParams, device
from specrs.hf import from_model
from specrs.hf import generate as by_specrs

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Phi3ForCausalLM", "SmolLM3ForCausalLM"])
def test_a_live_module_gives_the_tokens_of_its_files(tmp_path: Path, architecture: str) -> None:
    sizes = {"head_dim": 64, "vocab_size": 304, "eos_token_id": 303, "bos_token_id": 1}
    target = modelzoo.write_target(tmp_path / "target", architecture, dtype=torch.bfloat16, **sizes)
    draft = modelzoo.write_eagle3(
        tmp_path / "draft", target, dtype=torch.bfloat16, head_dim=64, draft_vocab_size=None, own_embedding=True
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).to("cuda")
    prompt, params = random_tokens(20, seed=2), SamplingParams(max_tokens=40, temperature=0)
    with LLM(target, device="cuda", speculative=False, max_context_len=256) as llm:
        [want] = llm.generate([prompt], params)
    for head in (None, draft):
        with from_model(model, draft=head, max_context_len=256) as llm:
            [got] = llm.generate([prompt], params)
            assert got.token_ids == want.token_ids and llm.device.startswith("cuda")
    ids = torch.tensor([prompt], device="cuda")
    options = {"draft": str(draft), "max_context_len": 256}
    out = model.generate(ids, max_new_tokens=40, do_sample=False, custom_generate=by_specrs, engine_options=options)
    assert out.is_cuda and out[0, 20:].tolist() == want.token_ids
