"""`lm-eval`: tasks of our own through ``local-completions``, and through `LLM` in this process; the scores are equal.

The environment lends torch, transformers and specrs from where the server has them.
"""

from __future__ import annotations

import math
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from common import BASE_URL, MODEL, same
from specrs import LLM, SamplingParams

HERE = Path(__file__).parent
TASKS = ["specrs_choice", "specrs_generate", "specrs_text"]
MODEL_DIR = os.environ["MODEL_DIR"]
CONTEXT = 2047  # tokens of a prompt that lm-eval takes, one token of the context being left to generate


class Engine(TemplateLM):
    """An `LLM` as lm-eval's models are: likelihoods from `prompt_logprobs`, texts from `generate`."""

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self.llm = llm

    @property
    def eot_token_id(self) -> int:
        return min(self.llm.eos_ids)

    def tok_encode(self, string: str, **_: Any) -> list[int]:
        return self.llm.tokenizer.encode(string, add_special_tokens=False).ids  # lm-eval's own does the same

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        whole = [(list(context) + list(rest))[-CONTEXT:] for _, context, rest in requests]
        found = []
        for (_, _, rest), tokens, output in zip(requests, whole, self.llm.generate(whole, params), strict=True):
            scores = [dict(s) for s in output.prompt_logprobs[len(tokens) - len(rest) :]]
            own = [s[t] for s, t in zip(scores, rest, strict=True)]
            own = [getattr(p, "logprob", p) for p in own]
            best = [max(getattr(p, "logprob", p) for p in s.values()) for s in scores]
            found.append((sum(own), own == best))
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        found = []
        for request in requests:
            windows = get_rolling_token_windows(self.tok_encode(request.args[0]), self.eot_token_id, CONTEXT - 1, 1)
            each = [(("", ""), *make_disjoint_window(w)) for w in windows]
            found.append(sum(score for score, _ in self._loglikelihood_tokens(each)))
        return found

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        found = []
        for request in requests:
            prompt, options = request.args
            params = SamplingParams(max_tokens=options["max_gen_toks"], temperature=0, stop=options["until"])
            found.append(self.llm.generate([self.tok_encode(prompt)], params)[0].text)
        return found


def scores(model: Any, **arguments: Any) -> dict[str, dict[str, float]]:
    """Return the scores of every task, by metric."""
    os.chdir(HERE / "tasks")  # the tasks' data lies there
    manager = TaskManager(include_path=str(HERE / "tasks"), include_defaults=False)
    done = lm_eval.simple_evaluate(
        model, tasks=TASKS, task_manager=manager, bootstrap_iters=0, log_samples=False, **arguments
    )
    numbers = {task: {k: v for k, v in found.items() if isinstance(v, (int, float))}
               for task, found in done["results"].items()}  # fmt: skip
    return {task: {k: v for k, v in found.items() if "stderr" not in k} for task, found in numbers.items()}


def main() -> None:
    """Both ways."""
    print(f"lm-eval {version('lm_eval')}")
    options = {
        "model": MODEL, "base_url": f"{BASE_URL}/completions", "tokenizer": MODEL_DIR,
        "tokenizer_backend": "huggingface", "num_concurrent": 4, "max_retries": 1, "max_length": CONTEXT + 1,
        "tokenized_requests": True,
    }  # fmt: skip
    served = scores("local-completions", model_args=options)
    with LLM(MODEL_DIR, os.environ["DRAFT_DIR"]) as llm:
        alone = scores(Engine(llm))
    same(served.keys(), alone.keys(), "tasks")
    for task, metrics in alone.items():
        same(served[task].keys(), metrics.keys(), f"metrics of {task}")
        for name, value in metrics.items():
            close = math.isclose(served[task][name], value, rel_tol=1e-9)
            same(close, True, f"{task}, {name}: {served[task][name]} for {value}")
        print(task, {k: round(v, 6) for k, v in metrics.items()})
    same(0 < alone["specrs_choice"]["acc,none"] <= 1, True, "a score that says something")


if __name__ == "__main__":
    main()
