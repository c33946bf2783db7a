"""Salts: requests of one share pages and tables of drafts with nobody else, and draw the tokens that they always do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from exact_world import SAMPLED, plain, requests
from modelzoo import Pair
from specrs import LLM, ConfigError, SamplingParams
from specrs.drafters import RecyclingDrafter

SALTS = ("ada", "bob", None)


def cached(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], salt: str | None) -> int:
    """Return the tokens that the prefix cache had of these requests, one after the other."""
    outputs = [llm.generate([p], [replace(s, cache_salt=salt)])[0] for p, s in zip(prompts, params, strict=True)]
    llm.audit()
    return sum(o.usage.cached_tokens for o in outputs)


def test_a_prefix_is_found_by_its_salt_alone(tiny: Pair) -> None:
    prompts, params = requests(6, seed=3)
    with LLM(tiny.target, tiny.draft, tree=(2, 3, 8), page_size=4) as llm:
        first = [cached(llm, prompts, params, salt) for salt in SALTS]
        again = [cached(llm, prompts, params, salt) for salt in SALTS]
    assert first[0] == first[1] == first[2], "what the requests share among themselves"
    assert all(n > first[0] + 50 for n in again)


@pytest.mark.parametrize("drafters", [["suffix", RecyclingDrafter(shared=True)], ["head"]], ids=["text", "head"])
@pytest.mark.parametrize("pages", [24, None], ids=["preempted", "roomy"])
def test_salts_change_no_token(tiny: Pair, drafters: list[object], pages: int | None) -> None:
    prompts, params = requests(8, seed=5, **SAMPLED)
    want = plain(tiny, prompts, params)
    salted = [replace(s, cache_salt=SALTS[i % 3]) for i, s in enumerate(params)]
    draft = tiny.draft if "head" in drafters else None
    with LLM(tiny.target, draft, drafters=drafters, page_size=8, max_batch=4, num_pages=pages) as llm:
        for _ in range(2):
            assert [o.token_ids for o in llm.generate(prompts, salted)] == want
            llm.audit()


def test_outputs_of_one_prompt_share_its_pages_under_a_salt(tiny: Pair) -> None:
    params = SamplingParams(n=3, temperature=0.8, seed=1, max_tokens=4, cache_salt="ada")
    with LLM(tiny.target, speculative=False, page_size=4) as llm:
        [out] = llm.generate([[i % 10 for i in range(30)]], params)
        assert [o.usage.cached_tokens for o in out.outputs] == [0, 28, 28]
        llm.audit()


def test_a_shared_table_serves_requests_of_one_salt(tiny: Pair) -> None:
    """A request of a salt drafts at once what another one of that salt has taught the table."""

    def drafted(llm: LLM, salt: str | None) -> int:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, cache_salt=salt)
        [out] = llm.generate([[5, 9, 2]], params)
        return sum(out.drafted)

    source = RecyclingDrafter(shared=True)
    with LLM(tiny.target, drafters=[source], tree=(2, 3, 8)) as llm:
        alone = drafted(llm, None)
        assert source.bytes() == 0 and drafted(llm, None) == alone, "nothing is shared without a salt"
        assert drafted(llm, "ada") == alone and source.bytes() > 0
        assert drafted(llm, "ada") > alone
        assert drafted(llm, "bob") == alone


@pytest.mark.parametrize("salt", ["", "x" * 1025, b"x", 7, ["x"]])
def test_a_salt_is_a_short_text(salt: object) -> None:
    with pytest.raises(ConfigError, match=r"cache_salt = .*: must be a text of 1 to 1024 characters"):
        SamplingParams(cache_salt=salt)  # type: ignore[arg-type]
