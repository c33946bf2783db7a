"""specrs's drafts and tree verification as a plugin of sglang.

sglang finds the plugin by an entry point; a package of yours has it in its pyproject.toml:

    [project.entry-points."sglang.srt.plugins"]
    specrs = "sglang_plugin:register"

and `speculative_algorithm="SPECRS"` takes it. The worker is sglang's own for drafts from text, with two parts
exchanged: drafts come from specrs's suffix automaton over prompt and output (`SuffixDrafts`), merged into a tree, and
specrs walks the tree (`verify`). The walk draws the token that plain decoding by specrs's sampler would draw, by seed
and position, so that sampled requests do not change with their drafts either. Attention, KV and batches are sglang's.

Seen to run in the engine of sglang 0.5.14 on an H200, with its Triton attention. `main` runs a model without drafts and
with the plugin:

    python examples/sglang_plugin.py MODEL [--tokens 64] [--backend triton]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch

from specrs import Sampler, TreeBatch, verify
from specrs._specrs import SuffixDrafts, merge_drafts

NAME = "SPECRS"
TEXT_BYTES = 1 << 24  # most memory of a request's automaton
WINDOW = 4096  # tokens that sglang hands over the first time that it asks for a request


class Trees:
    """The corpus of sglang's worker: for each request, the tree of drafts of the next round."""

    def __init__(self, draft_token_num: int, vocab: int) -> None:
        self.nodes, self.vocab = draft_token_num, vocab
        self.texts: dict[str, tuple[SuffixDrafts, int]] = {}  # by request, with the tokens that it has
        self.batch = TreeBatch.from_parents([], [])  # of the round at hand

    def batch_get(self, requests: list[str], recent: list[list[int]], lengths: list[int]):
        """Return the tokens of all trees, and for each node which nodes of its tree it may attend to.

        Args:
            requests: ids.
            recent: the last tokens of each request.
            lengths: tokens of each request so far.
        """
        import numpy as np

        trees = [self._tree(*each) for each in zip(requests, recent, lengths)]
        self.batch = TreeBatch.from_parents([parents for parents, _ in trees], [tokens for _, tokens in trees])
        mask = np.zeros((len(trees), self.nodes, self.nodes), dtype=np.uint8)
        for rows, (parents, _) in zip(mask, trees):
            for node, parent in enumerate(parents):
                rows[node] = rows[parent] if node else 0
                rows[node, node] = 1
        return np.array([token for _, tokens in trees for token in tokens], dtype=np.int64), mask.reshape(-1)

    def _tree(self, request: str, recent: list[int], length: int) -> tuple[list[int], list[int]]:
        text, known = self.texts.get(request) or (SuffixDrafts(self.vocab, TEXT_BYTES), length - len(recent))
        text.extend(recent[len(recent) - (length - known) :])
        self.texts[request] = text, length
        proposal = text.propose(self.nodes - 1, self.nodes - 1)
        tree = merge_drafts(recent[-1], self.vocab, [proposal], self.nodes, self.nodes - 1)
        parents, tokens = list(tree.parents), list(tree.tokens)
        while len(tokens) < self.nodes:  # sglang's batches have trees of one size: the rest is a chain of guesses
            parents.append(len(tokens) - 1)
            tokens.append(tokens[-1])
        return parents, tokens

    def batch_put(self, recent: list[list[int]]) -> None:
        """A text learns when its request is asked for again."""

    def erase_match_state(self, requests: list[str]) -> None:
        for request in requests:
            self.texts.pop(request, None)

    def synchronize(self) -> None:
        pass

    def reset(self) -> None:
        self.texts.clear()


def sampler_of(request, vocab: int) -> Sampler:
    """specrs's sampler for a request of sglang. sglang writes a temperature of 0 as top_k = 1."""
    asked = request.sampling_params
    greedy = asked.top_k == 1
    return Sampler(
        vocab, request.origin_input_ids, temperature=0.0 if greedy else asked.temperature,
        top_k=0 if greedy or asked.top_k > vocab else asked.top_k, top_p=1.0 if greedy else asked.top_p,
        min_p=0.0 if greedy else asked.min_p, seed=asked.sampling_seed or 0,
        repetition_penalty=asked.repetition_penalty, presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logit_bias={int(token): bias for token, bias in (asked.logit_bias or {}).items()},
    )  # fmt: skip


def walk(trees: TreeBatch, logits: torch.Tensor, samplers: list[Sampler], lens: list[int], nodes: int):
    """Verify trees of ``nodes`` nodes each. Returns what sglang's own verification does: the token drawn behind each
    node of a path, int32 [requests * nodes]; the lengths of the paths with the last token, int32 [requests]; and the
    rows of each path, int32 [requests, nodes], -1 behind its end."""
    accepts = verify(trees, logits.float().cpu(), samplers, lens)
    for error in filter(None, accepts.errors):
        raise error
    drawn = torch.zeros(len(lens) * nodes, dtype=torch.int32)
    rows = torch.full((len(lens), nodes), -1, dtype=torch.int32)
    for i, (path, tokens) in enumerate(zip(accepts.paths, accepts.tokens)):
        places = torch.tensor(path, dtype=torch.int32) + i * nodes
        drawn[places.long()] = torch.tensor(tokens, dtype=torch.int32)
        samplers[i].commit(tokens)
        rows[i, : len(path)] = places
    lengths = torch.tensor([len(tokens) for tokens in accepts.tokens], dtype=torch.int32)
    return drawn.to(logits.device), lengths.to(logits.device), rows.to(logits.device)


def register() -> None:
    """Register the algorithm; sglang calls this in each of its processes."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class Algorithm(CustomSpecAlgo):
        """Drafts from text, as sglang's NGRAM: no head, no draft KV."""

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        # sglang 0.5.14 calls these, and its base class for plugins lacks them.
        carries_draft_hidden_states = SpeculativeAlgorithm.carries_draft_hidden_states
        create_future_map = SpeculativeAlgorithm.create_future_map
        need_topk = SpeculativeAlgorithm.need_topk

        def handle_server_args(self, server_args) -> None:
            server_args.speculative_ngram_max_trie_depth = WINDOW
            SpeculativeAlgorithm.NGRAM.handle_server_args(server_args)

    @SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=Algorithm)
    def worker(server_args):
        from sglang.srt.speculative import ngram_worker

        class Worker(ngram_worker.NGRAMWorker):
            def __init__(self, server_args, gpu_id, *args, target_worker, **more) -> None:
                vocab = target_worker.model_config.vocab_size
                trees = Trees(server_args.speculative_num_draft_tokens, vocab)
                with mock.patch.object(ngram_worker, "NgramCorpus", lambda **_: trees):
                    super().__init__(server_args, gpu_id, *args, target_worker=target_worker, **more)
                self.trees, self.samplers, self.vocab = trees, dict[str, Sampler](), vocab

            def forward_batch_generation(self, batch, on_publish=None):
                with mock.patch.object(ngram_worker, "eagle_sample", self.sample):
                    return super().forward_batch_generation(batch, on_publish)

            def sampler(self, request, length: int, root: int) -> Sampler:
                """A request's sampler, which knows all tokens so far. While rounds overlap, sglang's list lacks the
                last."""
                sampler = sampler_of(request, self.vocab)
                sampler.commit([*request.output_ids[: length - len(request.origin_input_ids)], root])
                return sampler

            def sample(self, verify_input, batch, logits_output, vocab_mask=None):
                if vocab_mask is not None:
                    raise NotImplementedError(f"{NAME}: structured output")
                trees, nodes, lens = self.trees.batch, self.draft_token_num, batch.seq_lens.tolist()
                rows = zip(batch.reqs, lens, torch.from_dlpack(trees.tokens)[::nodes].tolist())
                self.samplers = {r.rid: self.samplers.get(r.rid) or self.sampler(r, *at) for r, *at in rows}
                logits = logits_output.next_token_logits[:, : self.vocab]
                return walk(trees, logits, list(self.samplers.values()), lens, nodes)

        return Worker


def found_by_sglang(folder: Path) -> None:
    """Let this process, and those that sglang starts, find this file as a plugin, as an installed package would be."""
    info = folder / "specrs_sglang-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: specrs-sglang\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nspecrs = sglang_plugin:register\n")
    path = [str(folder), str(Path(__file__).parent)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])
    sys.path[:0] = path


def run(model: str, prompts: list[list[int]], tokens: int, backend: str, **drafts) -> tuple[list[dict], float]:
    """Greedy and sampled continuations by sglang's engine, and the seconds that they took."""
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(
        model_path=model, skip_tokenizer_init=True, attention_backend=backend, sampling_backend="pytorch", page_size=1,
        grammar_backend="none", disable_radix_cache=True, mem_fraction_static=0.5, max_running_requests=8, **drafts,
    )  # fmt: skip
    asked = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    engine.generate(input_ids=prompts, sampling_params=asked)  # warm
    began = time.perf_counter()
    outputs = engine.generate(input_ids=prompts, sampling_params=asked)
    seconds = time.perf_counter() - began
    engine.shutdown()
    return outputs, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, help="a JSON list of lists of token ids")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--backend", default="triton")
    args = parser.parse_args()
    prompts = json.loads(args.prompts.read_text()) if args.prompts else [[7, 8, 9, 10] * 8, list(range(20, 60)) * 2]
    plain, seconds = run(args.model, prompts, args.tokens, args.backend)
    with tempfile.TemporaryDirectory() as folder:
        found_by_sglang(Path(folder))
        drafted, faster = run(
            args.model, prompts, args.tokens, args.backend,
            speculative_algorithm=NAME, speculative_num_draft_tokens=16,
        )  # fmt: skip
    same = [a["output_ids"] == b["output_ids"] for a, b in zip(plain, drafted)]
    rounds = [out["meta_info"].get("spec_verify_ct") for out in drafted]
    print(f"{sum(same)} of {len(same)} outputs equal; {args.tokens} tokens in {rounds} rounds; {seconds / faster:.2f}x")


if __name__ == "__main__":
    main()
