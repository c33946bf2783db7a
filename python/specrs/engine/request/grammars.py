"""The grammars of an engine: compiled once, kept for later requests, and a source of drafts when they force tokens.

No step of the engine compiles a grammar: `LLM.add` does it before it queues a request, `AsyncLLM.submit` does it in its
pool.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from specrs._specrs import Grammar, GrammarTracker, GrammarVocabulary
from specrs.drafters import Proposal
from specrs.engine.request.token_bytes import TokenTable
from specrs.grammar import StructuredOutputs, refuse

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_KEPT = 64  # number of grammars to keep, the last used ones
_SURE = 0.95  # assumed certainty of a forced token: the text is forced, but the model chooses its spelling
_LAST = 0.6  # assumed certainty of a text's last token, which may extend into the text after it
_BUCKETS = {"token": 0, "text": 1, "last": 2}

_Key = tuple[str, tuple[str, ...], str | None, str | tuple[int, ...] | None]


class Grammars:
    """The compiled grammars of one engine. Any thread may call this object at any time.

    Args:
        tokenizer: the model's tokenizer; with ``None`` every grammar is refused.
        vocab_size: columns of a row of logits.
        eos_ids: tokens that stand for no text, even if the tokenizer does not call them special.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._tokenizer, self._size = tokenizer, vocab_size
        self._table = None if tokenizer is None else TokenTable(tokenizer)
        self._special: dict[int, str] = {}
        if tokenizer is not None:
            added = tokenizer.get_added_tokens_decoder()
            self._special = {i: t.content for i, t in added.items() if t.special and i < vocab_size}
            self._special |= {i: added[i].content if i in added else "" for i in eos_ids if i < vocab_size}
        self._vocabulary: GrammarVocabulary | None = None
        self._made = threading.Lock()  # held while the vocabulary is made
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, Future[Grammar]] = OrderedDict()
        self._held: weakref.WeakValueDictionary[_Key, Future[Grammar]] = weakref.WeakValueDictionary()

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """Return the grammar, and compile it unless it is kept. If another thread compiles the same grammar, wait for
        it.

        Raises:
            GrammarError: the grammar is malformed or too large, or there is no tokenizer.
        """
        return self.held(wanted).result()

    def held(self, wanted: StructuredOutputs) -> Future[Grammar]:
        """Compile as `compile` does, and keep the grammar for as long as the caller keeps the result of this call.

        Meanwhile the grammar is not compiled again, even if many other grammars are.
        """
        if self._tokenizer is None:
            raise refuse(wanted.kind, getattr(wanted, wanted.kind), "the model directory has no tokenizer.json")
        key = self._key(wanted)
        with self._lock:
            found = self._kept.get(key) or self._held.get(key)
            mine = found is None
            if found is None:
                found = self._held[key] = Future()
            if key not in self._kept:
                self._kept[key] = found
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
        if mine:
            kind, texts, whitespace, start_after = key
            mark = list(start_after) if isinstance(start_after, tuple) else start_after
            try:
                found.set_result(self.vocabulary.compile(kind, list(texts), whitespace, mark))
            except BaseException as error:
                with self._lock:
                    for place in (self._kept, self._held):
                        if place.get(key) is found:
                            del place[key]
                found.set_exception(error)
        found.result()  # raises
        return found

    def _key(self, wanted: StructuredOutputs) -> _Key:
        mark = wanted.start_after
        if isinstance(mark, str):
            # A special token stands for no text, so users write its name.
            ids = [i for i, name in self._special.items() if name == mark]
            mark = tuple(ids[:1]) or mark
        elif mark is not None:
            mark = tuple(mark)
            if max(mark) >= self._size:
                raise refuse("start_after", wanted.start_after, f"the vocabulary has {self._size} tokens")
        kind = "json" if wanted.kind == "json_object" else wanted.kind
        texts: tuple[str, ...]
        if kind == "json":
            texts = (wanted.schema(),)
        elif wanted.choice is not None:
            texts = tuple(wanted.choice)
        else:
            texts = (str(wanted.regex if wanted.regex is not None else wanted.grammar),)
        return kind, texts, wanted.whitespace, mark

    @property
    def vocabulary(self) -> GrammarVocabulary:
        """The bytes of the tokens, made at the first use."""
        with self._made:
            if self._vocabulary is None:
                assert self._table is not None
                tokens = [self._table(i) for i in range(self._size)]
                self._vocabulary = GrammarVocabulary(tokens, sorted(self._special))
            return self._vocabulary

    def forced(self, tracker: GrammarTracker) -> Proposal:
        """Return a chain of the tokens that must come next.

        The text is certain but its tokens are not: the model may spell the text in other tokens, so the chain is a
        draft like any other. The tokens are the tokenizer's spelling. If that decodes to another text, they are the
        longest tokens that spell the text.
        """
        tokens: list[int] = []
        probs: list[float] = []
        buckets: list[int] = []
        for part in tracker.forced():
            if isinstance(part, int):
                tokens.append(part)
                probs.append(_SURE)
                buckets.append(_BUCKETS["token"])
            else:
                spelled = self._spelled(*part)
                tokens += spelled
                probs += [_SURE] * (len(spelled) - 1) + [_LAST]
                buckets += [_BUCKETS["text"]] * (len(spelled) - 1) + [_BUCKETS["last"]]
        return Proposal(range(-1, len(tokens) - 1), tokens, probs, buckets)

    def _spelled(self, text: bytes, longest: Sequence[int]) -> Sequence[int]:
        assert self._tokenizer is not None and self._table is not None
        try:
            ids = self._tokenizer.encode(text.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError:
            return longest
        same = b"".join(map(self._table, ids)) == text and max(ids, default=0) < self._size
        return ids if same and ids else longest
