"""A request's sampler, and the bans that hold for some of its tokens.

Some tokens are always banned: all tokens but ``allowed_token_ids``, and bad words of one token. Two bans come and go:

* Before ``min_tokens``, no token is drawn that would end the output.
* A bad word of several tokens bans its last token after the others.

A grammar bans tokens at every draw, depending on the tokens before. Samplers hold its tracker, so a walk over a tree
draws under the mask of each path. A device that draws a round by one mask has `room` for only one token.

A round draws all of its tokens by one sampler, so a ban that holds for some of them needs care. For ``min_tokens`` the
number of tokens that one sampler may draw is known before (`Draws.room`), and the round's tree is made no deeper. The
place where a bad word is about to be completed is known only after the draws: `Draws.standing` counts the tokens that
were drawn as they should be. The round keeps these tokens. The next round draws one token by a sampler that has the
ban. Its seed and position are the same, so its token is the one that plain decoding draws under the same bans.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from specrs._specrs import Grammar, GrammarFailedError, Sampler, TokenMask
from specrs.sampling_params import PROCESSED, ResolvedSampling


class Draws:
    """The samplers of one request, which follow its output.

    Args:
        vocab: columns of a row of logits.
        prompt: token ids.
        params: parameters of the request.
        seed: seed of the request's random numbers.
        endings: tokens that would end the output.
        bad_words: token ids of each bad word, at least one.
        grammar: grammar that the output must follow.
        by_path: true if each draw of a round has the mask of its own path; false if all draws have the mask of the
            first.
    """

    def __init__(
        self,
        vocab: int,
        prompt: Sequence[int],
        params: ResolvedSampling,
        seed: int,
        endings: Collection[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
        by_path: bool = True,
    ) -> None:
        self._vocab, self._prompt, self._params, self._seed = vocab, list(prompt), params, seed
        told = params.logprobs is not None and params.logprobs_mode == PROCESSED
        self._largest_alone = params.temperature == 0 and not told  # nobody sees the scores of other tokens
        self._endings = frozenset(token for token in endings if token < vocab)
        self.grammar = None if grammar is None else grammar.start(sorted(self._endings))
        """The grammar's tracker of the output; ``None`` without a grammar."""
        self._by_path = by_path
        self._least = params.min_tokens if self._endings else 0  # tokens to draw before an ending may be drawn
        self._output: list[int] = []
        self._words: dict[int, list[tuple[int, ...]]] = {}  # words of several tokens, keyed by the last token but one
        for word in dict.fromkeys(map(tuple, bad_words)):
            if len(word) > 1:
                self._words.setdefault(word[-2], []).append(word)
        self._longest = max(map(len, bad_words), default=1)
        self._bias: Mapping[int, float] = dict(params.logit_bias)
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else TokenMask(vocab, allowed)
        self._bias = {**self._bias, **{word[0]: -math.inf for word in bad_words if len(word) == 1}}
        penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
        self._penalised = penalised
        self._free = self._sampler(())
        self._early = self._sampler(self._endings) if self._least else self._free
        self._banned: frozenset[int] = frozenset()  # tokens banned by words that the output may be about to complete
        self.sampler = self._early
        """The sampler of the next token, and of the tokens after it as far as `room` goes."""

    def _sampler(self, banned: Collection[int]) -> Sampler:
        p = self._params
        sampler = Sampler(
            self._vocab,
            self._prompt,
            temperature=p.temperature,
            top_k=p.top_k,
            top_p=p.top_p,
            min_p=p.min_p,
            seed=self._seed,
            repetition_penalty=p.repetition_penalty,
            presence_penalty=p.presence_penalty,
            frequency_penalty=p.frequency_penalty,
            logit_bias={**self._bias, **dict.fromkeys(banned, -math.inf)} if banned else dict(self._bias),
            allowed=self._allowed,
            grammar=self.grammar,
        )
        if self._penalised:
            sampler.commit(self._output)
        return sampler

    @property
    def room(self) -> int:
        """Number of tokens, from the next one on, that `sampler` may draw."""
        if self._banned or (self.grammar is not None and not self._by_path):
            return 1
        return self._least - len(self._output) if len(self._output) < self._least else sys.maxsize

    @property
    def varies(self) -> bool:
        """True if the next round may begin before this one's end, or draw by another sampler."""
        words = bool(self._words) or len(self._output) < self._least
        return words or self._penalised or self.grammar is not None

    @property
    def complete(self) -> bool:
        """True if nothing can follow: the grammar's text is complete, and no token would end the output."""
        return self.grammar is not None and not self._endings and self.grammar.complete

    def commit(self, tokens: Sequence[int]) -> None:
        """Add the output's next tokens."""
        self._output += tokens
        if self.grammar is not None:
            with suppress(GrammarFailedError):  # the next draw reports it
                self.grammar.commit(list(tokens))
        early = len(self._output) < self._least
        if self._penalised and tokens:
            self._free.commit(list(tokens))
            if early and self._early is not self._free:
                self._early.commit(list(tokens))
        self._banned = self._behind(self._output, len(self._output))
        if self._banned:
            self.sampler = self._sampler(self._banned | self._endings if early else self._banned)
        else:
            self.sampler = self._early if early else self._free

    def standing(self, tokens: Sequence[int], draws: int) -> int:
        """Return how many draws of a round stand; the later ones were made without a ban that holds for them.

        Args:
            tokens: tokens that the draws gave, in order.
            draws: number of draws: as many as tokens, or one more if the last draw gave no token.
        """
        if not self._words:
            return draws
        tail = self._output[-self._longest :]
        path = [*tail, *tokens]
        for i in range(1, draws):  # the first draw was made under the bans after the output
            banned = self._behind(path, len(tail) + i)
            # Banning other tokens does not change which logit is the largest.
            sound = self._largest_alone and i < len(tokens) and tokens[i] not in banned
            if banned and not sound:
                return i
        return draws

    def _behind(self, output: list[int], end: int) -> frozenset[int]:
        """Return the tokens that would complete a bad word of several tokens after ``output[:end]``."""
        words = self._words.get(output[end - 1], ()) if end else ()
        return frozenset(w[-1] for w in words if tuple(output[max(end + 1 - len(w), 0) : end]) == w[:-1])
