"""The tokens that only the files beside `tokenizer.json` have.

The set of tokens, their special flags, and the way they match a text are the same as in transformers' AutoTokenizer,
which reads the same files with its general class (`TokenizersBackend`). A model's own tokenizer class may do more;
specrs ignores that.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specrs._specrs import ConfigError
from specrs.chat import TOKENIZER_CONFIG

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_ADDED = "added_tokens_decoder"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def eos_of(tokenizer: Tokenizer, config: Mapping[str, Any]) -> int | None:
    """Return the id of the token that ends a text, as a tokenizer's files name it; ``None`` if the tokenizer has no
    such token.

    Raises:
        ConfigError: ``eos_token`` is not a token.
    """
    token = _token("eos_token", config.get("eos_token"))
    return None if token is None else tokenizer.token_to_id(_text(token))


def add_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], added: Mapping[str, Any]) -> None:
    """Give a tokenizer the tokens that only the files beside its own have, with their flags.

    Args:
        tokenizer: the tokenizer of ``tokenizer.json``.
        config: the result of `specrs.chat.files.tokenizer_config`.
        added: ids by token, from ``added_tokens.json``.

    Raises:
        ConfigError: a token or an id is invalid; the message names its file and key.
    """
    from tokenizers import AddedToken

    named, others = _special(config)
    known = _declared(tokenizer, config, added, {_text(token) for token in (*named, *others)})
    by_text = {token.content: token for token in known.values()}
    tokens = [token for _, token in sorted(known.items())]
    names = {_text(token) for token in named}
    for token in tokens:
        token.special = token.special or token.content in names
    have = {token.content for token in tokenizer.get_added_tokens_decoder().values()} | by_text.keys()
    for special in (*named, *others):
        if (text := _text(special)) not in have:
            have.add(text)
            token = AddedToken(text, special=True) if isinstance(special, str) else special
            token.special = token.special or text in names
            tokens.append(token)
    tokenizer.add_tokens(tokens)
    for token_id, token in known.items():
        if (found := tokenizer.token_to_id(token.content)) != token_id:
            why = f"is token {token_id} there and {found} here, as in transformers: tokenizer.json ends elsewhere"
            warnings.warn(f"{TOKENIZER_CONFIG}: {_ADDED}: {token.content!r} {why}", RuntimeWarning, stacklevel=4)


def _special(config: Mapping[str, Any]) -> tuple[list[str | AddedToken], list[str | AddedToken]]:
    """Return the special tokens that have a name, and those that have none."""
    extra = config.get("extra_special_tokens") or []
    if not isinstance(extra, (list, dict)):
        raise _refuse(
            "extra_special_tokens", extra, "must be a list of tokens, or an object with a token for each name"
        )
    values = {name: config.get(name) for name in _NAMES}
    # These are a model's own names, such as image_token.
    values |= {key: v for key, v in config.items() if key.endswith("_token") and isinstance(v, (str, dict))}
    if isinstance(extra, dict):
        values |= extra
        extra = []
    named = [token for name, value in values.items() if (token := _token(name, value)) is not None]
    return named, [token for value in extra if (token := _token("extra_special_tokens", value)) is not None]


def _declared(
    tokenizer: Tokenizer, config: Mapping[str, Any], added: Mapping[str, Any], special: set[str]
) -> dict[int, AddedToken]:
    """Return added tokens by id, from the newest of the files that list them."""
    from tokenizers import AddedToken

    if _ADDED not in config:
        found: dict[int, AddedToken] = {}
        for text, token_id in added.items():
            is_special = text in special
            token = AddedToken(text, normalized=not is_special, special=is_special)
            found[_id(f"added_tokens.json: {text!r}", token_id)] = token
        return found | tokenizer.get_added_tokens_decoder()
    listed = config[_ADDED]
    if not isinstance(listed, dict):
        raise _refuse(_ADDED, listed, "must be an object with a token for each id")
    found = {}
    for key, value in listed.items():
        given = _token(_ADDED, value)
        if given is None or isinstance(given, str):
            raise _refuse(f"{_ADDED}[{key!r}]", value, "must be an object with the token's text as content")
        found[_id(f"{TOKENIZER_CONFIG}: {_ADDED}", key)] = given
    return found


def _id(where: str, value: object) -> int:
    try:
        if isinstance(value, str) and value.isascii() and value.isdigit():
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    except ValueError:  # more digits than Python reads
        pass
    raise ConfigError(f"{where} = {value!r:.80}: must be a token id")


def _token(name: str, value: object) -> str | AddedToken | None:
    """Parse a token from a file: a text, or an object with the token's text and flags."""
    from tokenizers import AddedToken

    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise _refuse(name, value, "must be a text, or an object with the token's text as content")
    flags = {flag: value[flag] for flag in _FLAGS if flag in value}
    for flag, given in flags.items():
        if not isinstance(given, bool):
            raise _refuse(f"{name}.{flag}", given, "must be true or false")
    return AddedToken(value["content"], **flags)


def _text(token: str | AddedToken) -> str:
    return token if isinstance(token, str) else token.content


def _refuse(name: str, got: object, why: str) -> ConfigError:
    return ConfigError(f"{TOKENIZER_CONFIG}: {name} = {got!r:.80}: {why}")
