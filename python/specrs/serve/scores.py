"""Log-probabilities in the two forms that OpenAI's API has: lists side by side of completions, objects of chat."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from specrs.serve.writing import Items

if TYPE_CHECKING:
    from specrs.engine import Logprob
    from specrs.engine.request.logprobs import TokenLogprobs


Spell = Callable[[int], "bytes | None"]
"""The bytes that a token stands for; ``None`` without a tokenizer."""


class Names:
    """The form in which a request has its tokens written.

    Args:
        as_ids: ``token_id:N`` for each.
    """

    def __init__(self, as_ids: bool = False) -> None:
        self._as_ids = as_ids

    def __call__(self, token: int, spelled: bytes | None) -> str:
        """A token's text; ``bytes:\\x..`` where its bytes alone are no text, as OpenAI writes it."""
        if self._as_ids or spelled is None:
            return f"token_id:{token}"
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


class Columns:
    """The ``logprobs`` of completions, some tokens at a time: ``text_offset`` counts characters of the choice's text.

    Args:
        names: form of tokens.
        spell: function that spells tokens without a score; a prompt's first token has none.
        silent: tokens that the text leaves out.
        most: alternatives that are listed.
    """

    def __init__(self, names: Names, spell: Spell, silent: Collection[int], most: int) -> None:
        self._names, self._spell, self._silent, self._most = names, spell, silent, most
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, tokens: Sequence[int], scores: Sequence[TokenLogprobs | None]) -> dict[str, list[Any]]:
        """Return the scores of the next tokens."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, scored in zip(tokens, scores, strict=True):
            spelled = self._spell(token) if scored is None else scored[token].bytes
            if token not in self._silent:
                self._broken_off(spelled)
            found["tokens"].append(self._names(token, spelled))
            found["text_offset"].append(self._at)
            found["token_logprobs"].append(None if scored is None else finite(scored[token].logprob))
            found["top_logprobs"].append(None if scored is None else self._top(scored))
            if token not in self._silent:
                self._at += len(self._decoder.decode(spelled or b""))
        return found

    def _broken_off(self, spelled: bytes | None) -> None:
        """Count what stands for a character that began before, and that these bytes do not go on with."""
        if spelled and not 0x80 <= spelled[0] < 0xC0 and self._decoder.getstate()[0]:
            self._at += len(self._decoder.decode(b"", final=True))

    def _top(self, scored: TokenLogprobs) -> dict[str, float]:
        """Return the scores of the most probable tokens, and of the token itself; of tokens that are written alike, the
        more probable one."""
        found: dict[str, float] = {}
        own = next(iter(scored))
        for token, one in sorted(scored.items(), key=lambda pair: pair[1].rank):
            if one.rank <= self._most or token == own:
                found.setdefault(self._names(token, one.bytes), finite(one.logprob))
        return found


def all_objects(tokens: Sequence[int], scores: Sequence[TokenLogprobs], most: int, names: Names) -> Items:
    """`objects` of a whole output."""
    return Items(len(tokens), lambda first, end: objects(tokens[first:end], scores[first:end], most, names))


def objects(tokens: Sequence[int], scores: Sequence[TokenLogprobs], most: int, names: Names) -> list[dict[str, Any]]:
    """The ``logprobs.content`` of chat."""
    found = []
    for token, scored in zip(tokens, scores, strict=True):
        ranked = sorted((one for one in scored.items() if one[1].rank <= most), key=lambda one: one[1].rank)
        top = [_object(i, one, names) for i, one in ranked]
        found.append({**_object(token, scored[token], names), "top_logprobs": top})
    return found


def _object(token: int, scored: Logprob, names: Names) -> dict[str, Any]:
    spelled = scored.bytes
    return {
        "token": names(token, spelled), "logprob": finite(scored.logprob),
        "bytes": None if spelled is None else list(spelled),
    }  # fmt: skip


def prompt_scores(scores: Sequence[TokenLogprobs | None], names: Names) -> Items:
    """vLLM's ``prompt_logprobs``: by token id, with rank and text."""
    return Items(len(scores), lambda first, end: _ranked(scores[first:end], names))


def _ranked(scores: Sequence[TokenLogprobs | None], names: Names) -> list[dict[str, Any] | None]:
    return [
        None
        if scored is None
        else {
            str(token): {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": names(token, one.bytes)}
            for token, one in scored.items()
        }
        for scored in scores
    ]


def finite(logprob: float) -> float:
    """Return a log-probability for JSON, which has no infinity: OpenAI's least is -9999."""
    return max(logprob, -9999.0)
