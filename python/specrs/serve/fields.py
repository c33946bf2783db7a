"""The table of request fields: which are honoured, which are ignored since they change no output, which are refused.

Parsing, the documentation and a test read the same table. A field that is in no table is refused too, by name: a typing
error or another server's field would otherwise change an output in silence. ``null`` is an absent field, everywhere.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrs.serve import forms, responses_fields, responses_items, tool_fields
from specrs.serve.config import ServeConfig
from specrs.serve.errors import RequestError, bad, shown
from specrs.serve.turns import arguments

COMPLETIONS, CHAT, RESPONSES = "completions", "chat", "responses"
ROUNDS = "rounds"  # switched on by `return_spec_stats`
_ALL = (COMPLETIONS, CHAT, RESPONSES)
_MAX_SEED = 2**64 - 1

Check = Callable[[str, Any, ServeConfig], Any]


class Kind(enum.Enum):
    """Treatment of a field."""

    HONOURED = "honoured"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True)
class Field:
    """A field of a request.

    Attributes:
        name: name in the body.
        kind: treatment of the field.
        check: a function that returns the field's value, checked, as the server uses it; raises RequestError.
        note: note for the documentation.
        endpoints: endpoints that have the field.
        origin: origin of the field: ``OpenAI``, ``vLLM`` or ``specrs``.
    """

    name: str
    kind: Kind
    check: Check
    note: str
    endpoints: Sequence[str] = _ALL
    origin: str = "OpenAI"


def wrong(name: str, value: object, why: str) -> RequestError:
    """A value that a field cannot have."""
    return bad(f"{name} = {shown(value)}: {why}", name)


# -- checks -------------------------------------------------------------------------------------------------------


def as_it_is(name: str, value: Any, config: ServeConfig) -> Any:
    """Pass a value on unchanged; `specrs.SamplingParams` checks it."""
    return value


def flag(name: str, value: Any, config: ServeConfig) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, value, "must be true or false")
    return value


def stats(name: str, value: Any, config: ServeConfig) -> bool | str:
    if not isinstance(value, bool) and value != ROUNDS:
        raise wrong(name, value, f'must be true, false or "{ROUNDS}"')
    return value if isinstance(value, bool) else ROUNDS


def text(name: str, value: Any, config: ServeConfig) -> str:
    if not isinstance(value, str):
        raise wrong(name, value, "must be a text")
    return value


def whole(low: int, high: int | None = None) -> Check:
    """A whole number in a range."""

    def check(name: str, value: Any, config: ServeConfig) -> int:
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(name, value, "must be a whole number")
        if value < low or (high is not None and value > high):
            raise wrong(name, value, f"must be at least {low}" if high is None else f"must be in {low}..{high}")
        return value

    return check


def outputs(name: str, value: Any, config: ServeConfig) -> int:
    return int(whole(1, config.max_n)(name, value, config))


def seed(name: str, value: Any, config: ServeConfig) -> int:
    """OpenAI's are of 64 bits with a sign, ours without: negative ones by two's complement."""
    number: int = whole(-(2**63), _MAX_SEED)(name, value, config)
    return number % 2**64


def top_k(name: str, value: Any, config: ServeConfig) -> int:
    number: int = whole(-1)(name, value, config)
    return max(number, 0)  # both mean all


def stop(name: str, value: Any, config: ServeConfig) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
        raise wrong(name, value, "must be a text, or a list of texts")
    texts = [one for one in texts if one]  # clients send "" for none
    if len(texts) > config.max_stop:
        raise bad(f"{name} has {len(texts)} texts: at most max_stop = {config.max_stop}", name)
    for one in texts:
        if len(one) > config.max_stop_chars:
            raise bad(f"{name}: {len(one)} characters; at most max_stop_chars = {config.max_stop_chars}", name)
    return texts


def entries(name: str, value: Any, config: ServeConfig) -> Any:
    """A list or a mapping of bounded length, whose entries `specrs.SamplingParams` checks."""
    if not isinstance(value, (list, dict)):
        raise wrong(name, value, f"must be {'an object' if name == 'logit_bias' else 'a list'}")
    if len(value) > config.max_token_ids:
        raise bad(f"{name} has {len(value)} entries: at most max_token_ids = {config.max_token_ids}", name)
    return value


def words(name: str, value: Any, config: ServeConfig) -> Any:
    found = entries(name, [value] if isinstance(value, str) else value, config)
    for one in found:
        if not isinstance(one, str) or not one:
            raise wrong(name, one, "must be a text of one character at least")
    size, most = sum(map(len, found)), 8 * config.max_stop_chars  # the engine's thread tokenises them
    if size > most:
        raise bad(f"{name} has {size} characters: at most 8 * max_stop_chars = {most}", name)
    return found


def prompt(name: str, value: Any, config: ServeConfig) -> list[str | list[int]]:
    """A text, texts, token ids, or lists of token ids: as a list."""
    if isinstance(value, list) and len(value) > config.max_waiting_tokens:
        raise bad(f"{name} has {len(value)} entries: at most max_waiting_tokens = {config.max_waiting_tokens}", name)
    if isinstance(value, str) or (isinstance(value, list) and value and _ids(value)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise wrong(name, value, "must be a text, a list of texts, token ids, or lists of token ids; not empty")
    if len(value) > config.max_prompts:
        raise bad(f"{name} has {len(value)} prompts: at most max_prompts = {config.max_prompts}", name)
    for i, one in enumerate(value):
        if not isinstance(one, str) and not (isinstance(one, list) and _ids(one)):
            raise bad(f"{name}[{i}] = {shown(one)}: must be a text, or a list of token ids", name)
        if one == []:
            raise bad(f"{name}[{i}] = {shown(one)}: is empty: there is nothing to continue", name)
    return value


def _ids(value: list[Any]) -> bool:
    return all(isinstance(one, int) and not isinstance(one, bool) for one in value)


def messages(name: str, value: Any, config: ServeConfig) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise wrong(name, value, "must be a list of messages, not empty")
    if len(value) > config.max_messages:
        raise bad(f"{name} has {len(value)} messages: at most max_messages = {config.max_messages}", name)
    return [_message(f"{name}[{i}]", one) for i, one in enumerate(value)]


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise bad(f"{where} = {shown(message)}: must be an object with a role", "messages")
    if not isinstance(message.get("role"), str):
        raise bad(f"{where}.role = {shown(message.get('role'))}: must be a text", "messages")
    if message.get("tool_calls") is not None:
        message = {**message, "tool_calls": _calls(f"{where}.tool_calls", message["tool_calls"])}
    content = message.get("content")
    if isinstance(content, list):
        message = {**message, "content": _parts(f"{where}.content", content)}
    elif content is not None and not isinstance(content, str):
        raise bad(f"{where}.content = {shown(content)}: must be a text, or a list of parts", "messages")
    return dict(message)


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Read earlier calls of a conversation, with any arguments: the model wrote them."""
    if not isinstance(calls, list):
        raise bad(f"{where} = {shown(calls)}: must be a list", "messages")
    found = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad(f"{where}[{i}].function.name: is needed", "messages")
        told = function.get("arguments")
        if told is not None and not isinstance(told, (str, dict)):
            raise bad(f"{where}[{i}].function.arguments = {shown(told)}: must be a text", "messages")
        told = arguments(told) if isinstance(told, str) else told or {}
        found.append({**call, "function": {**function, "arguments": told}})
    return found


def _parts(where: str, parts: list[Any]) -> str:
    """Join parts of text: most templates know nothing else."""
    found = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        key = {"text": "text", "refusal": "refusal"}.get(kind) if isinstance(kind, str) else None
        if key is None:
            raise bad(f"{where}[{i}].type = {shown(kind)}: parts of type 'text' alone are supported", "messages")
        if not isinstance(part.get(key), str):
            raise bad(f"{where}[{i}].{key} = {shown(part.get(key))}: must be a text", "messages")
        found.append(part[key])
    return "\n".join(found)


def stream_options(name: str, value: Any, config: ServeConfig) -> dict[str, bool]:
    if not isinstance(value, dict):
        raise wrong(name, value, "must be an object")
    known = ("include_usage", "continuous_usage_stats", "include_obfuscation")
    for key, one in value.items():
        if key not in known:
            raise bad(f"{name}.{key}: no such option; there are {', '.join(known)}", name)
        if one is not None and not isinstance(one, bool):
            raise bad(f"{name}.{key} = {shown(one)}: must be true or false", name)
    return {key: bool(value.get(key)) for key in known}


def prediction(name: str, value: Any, config: ServeConfig) -> str | None:
    """OpenAI's predicted output: ``{"type": "content", "content": text or parts}``."""
    if not isinstance(value, dict) or value.get("type") != "content":
        raise wrong(name, value, 'must be {"type": "content", "content": ...}')
    content = value.get("content")
    if isinstance(content, list):
        content = _parts(f"{name}.content", content)
    if not isinstance(content, str):
        raise bad(f"{name}.content = {shown(content)}: must be a text, or parts of text", name)
    return content or None


def variables(name: str, value: Any, config: ServeConfig) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(name, value, "must be an object")
    return value


def template(name: str, value: Any, config: ServeConfig) -> str:
    if not config.trust_request_chat_template:
        raise bad(f"{name}: this server takes no templates from requests (trust_request_chat_template)", name)
    return text(name, value, config)


def only(*neutral: Any, why: str) -> Check:
    """Accept values that change nothing; refuse others."""

    def check(name: str, value: Any, config: ServeConfig) -> None:
        if not any(type(value) is type(one) and value == one for one in neutral):
            raise bad(f"{name} = {shown(value)}: {why}", name, "unsupported_parameter")

    return check


def anything(name: str, value: Any, config: ServeConfig) -> None:
    """Accept any value: the field changes nothing."""


# -- the table ----------------------------------------------------------------------------------------------------

_H, _I, _R = Kind.HONOURED, Kind.IGNORED, Kind.REFUSED
_C, _M, _S = (COMPLETIONS,), (CHAT,), (RESPONSES,)
_CM, _MS = (COMPLETIONS, CHAT), (CHAT, RESPONSES)
_BEAMS = "beam search is not implemented"
_LATER = "is not implemented"

TABLE: tuple[Field, ...] = (
    # OpenAI's, of all
    Field("model", _H, text, "one of the served names; absent: the first"),
    Field("stream", _H, flag, "server-sent events, and behind choices `[DONE]`"),
    Field("stream_options", _H, stream_options, "`include_usage`, `continuous_usage_stats`; needs `stream`; "
          "obfuscation is not added"),
    Field("n", _H, outputs, "outputs of each prompt, which is prefilled once; at most `max_n`", _CM),
    Field("temperature", _H, as_it_is, "at least 0; 0 is greedy"),
    Field("top_p", _H, as_it_is, "in (0, 1]"),
    Field("seed", _H, seed, "of 64 bits; negative ones by two's complement; same seed, same tokens"),
    Field("stop", _H, stop, "a text or a list, at most `max_stop`; may span tokens and rounds"),
    Field("frequency_penalty", _H, as_it_is, "exact on draft trees"),
    Field("presence_penalty", _H, as_it_is, "exact on draft trees"),
    Field("logit_bias", _H, entries, "by token id; at most `max_token_ids`"),
    Field("user", _I, anything, "changes no output"),
    # OpenAI's, of completions
    Field("prompt", _H, prompt, "a text, texts, token ids, or lists of token ids; an empty text is the token that the "
          "tokenizer puts before texts (BOS), and refused where it puts none", _C),
    Field("max_tokens", _H, whole(0), "16 where neither request nor model says; 0 generates nothing", _C),
    Field("echo", _H, flag, "the prompt before the output; with `logprobs` its tokens' too, which are the model's own "
          "in each `logprobs_mode`", _C),
    Field("logprobs", _H, whole(0, 20), "of each token and so many most probable ones, 0..20", _C),
    Field("best_of", _H, outputs, "generates so many, gives the `n` most probable by token, by the log-probabilities "
          "asked for or else the model's; not with `stream`", _C),
    Field("suffix", _R, only("", why="the model fills no gaps in a text"), "fill in the middle", _C),
    # OpenAI's, of chat
    Field("messages", _H, messages, "content as a text, or parts of type `text`; roles `system`, `developer` (as "
          "`system` where the template does not name it), `user`, `assistant`, `tool`, and those that the template "
          "names", _M),
    Field("max_completion_tokens", _H, whole(1), "the rest of the context where nobody says", _M),
    Field("max_tokens", _H, whole(1), "the older name of `max_completion_tokens`, which goes first", _M),
    Field("logprobs", _H, flag, "of each token", _M),
    Field("top_logprobs", _H, whole(0, 20), "most probable tokens beside it; needs `logprobs`, or `include`", _MS),
    Field("prediction", _H, prediction, "drafts from this text too; changes no token"),
    Field("reasoning_effort", _H, text, "handed to a template that reads it; else refused", _M),
    Field("response_format", _H, forms.response_format, "`text`, `json_object`, `json_schema` (always strict); in "
          "completions as vLLM has it", _CM),
    Field("tools", _H, tool_fields.tools, "functions that the model may call, at most `max_tools`; `strict` ones get "
          "arguments of their schema alone", _M),
    Field("tool_choice", _H, tool_fields.tool_choice, "`auto`, `none`, `required`, a tool, or `allowed_tools`", _M),
    Field("parallel_tool_calls", _H, flag, "false: one call at most", _MS),
    Field("functions", _R, only([], why="is the former name of tools"), "as `tools`", _M),
    Field("function_call", _R, only("none", "auto", why="is the former name of tool_choice"), "as `tool_choice`", _M),
    Field("audio", _R, only(why="the model writes text alone"), "spoken output", _M),
    Field("modalities", _R, only(["text"], why="the model writes text alone"), "other than text", _M),
    Field("web_search_options", _R, only(why="there is no search"), "search", _M),
    Field("verbosity", _R, only("medium", why="no template reads it"), "how much to write", _M),
    Field("moderation", _R, only(why="there is no moderation"), "judging of texts", _MS),
    Field("metadata", _I, anything, "changes no output", _M),
    Field("store", _I, anything, "nothing is stored", _MS),
    Field("service_tier", _I, anything, "there is one tier", _MS),
    Field("safety_identifier", _I, anything, "changes no output", _MS),
    Field("prompt_cache_key", _I, anything, "the prefix cache needs no hint", _MS),
    Field("prompt_cache_options", _I, anything, "the prefix cache needs no hint", _MS),
    Field("prompt_cache_retention", _I, anything, "the prefix cache keeps what fits", _MS),
    # OpenAI's, of responses
    Field("input", _H, responses_items.read, "a text, or items: messages of text, function calls, their outputs, "
          "reasoning", _S),
    Field("instructions", _H, text, "a system message before all others", _S),
    Field("max_output_tokens", _H, whole(1), "reasoning included; the rest of the context where nobody says", _S),
    Field("text", _H, responses_fields.text, "`format`, as `response_format` of a chat; `verbosity` must be `medium`",
          _S),
    Field("reasoning", _H, responses_fields.reasoning, "`effort`, handed to a template that reads it, else refused; no "
          "`summary` is made, `auto` is taken", _S),
    Field("tools", _H, tool_fields.tools_of_response, "functions, as in a chat; no built-in tools", _S),
    Field("tool_choice", _H, tool_fields.tool_choice_of_response, "as in a chat", _S),
    Field("include", _H, responses_fields.include, "`message.output_text.logprobs`; others are of what there is not",
          _S),
    Field("truncation", _H, responses_fields.truncation, "`auto` leaves out the oldest turns where the conversation "
          "does not fit; `disabled`, the default, refuses", _S),
    Field("metadata", _H, responses_fields.metadata, "comes back in the response", _S),
    Field("max_tool_calls", _I, anything, "of built-in tools, which there are not", _S),
    Field("image", _I, anything, "there are no images", _S),
    Field("n", _R, only(1, why="a response is one output"), "several outputs", _S),
    Field("background", _R, only(False, why="no response is stored, so that none can be asked for later"),
          "responses that are asked for later", _S),
    Field("background_options", _R, only({}, why="there is no background"), "as `background`", _S),
    Field("previous_response_id", _R, only(why="no response is stored: send the conversation as input"),
          "what a stored response said", _S),
    Field("conversation", _R, only(why="no conversation is stored: send it as input"), "stored items", _S),
    Field("prompt", _R, only(why="no prompt is stored: send its text as input"), "a stored prompt", _S),
    Field("context_management", _R, only([], why="nothing is compacted"), "compaction", _S),
    Field("access_programs", _R, only({}, why="they are of OpenAI's models"), "of OpenAI's models", _S),
    # vLLM's
    Field("top_k", _H, top_k, "0 and -1 keep all", origin="vLLM"),
    Field("min_p", _H, as_it_is, "in [0, 1]", origin="vLLM"),
    Field("repetition_penalty", _H, as_it_is, "of prompt and output", origin="vLLM"),
    Field("stop_token_ids", _H, entries, "end the output as EOS does", origin="vLLM"),
    Field("ignore_eos", _H, flag, "go on beyond the model's end of text", origin="vLLM"),
    Field("min_tokens", _H, whole(0), "before which nothing ends the output", origin="vLLM"),
    Field("bad_words", _H, words, "texts that the output never spells", origin="vLLM"),
    Field("allowed_token_ids", _H, entries, "no others", origin="vLLM"),
    Field("include_stop_str_in_output", _H, flag, "keep the stop string in the text", origin="vLLM"),
    Field("skip_special_tokens", _H, flag, "leave them out of the text (true)", origin="vLLM"),
    Field("truncate_prompt_tokens", _H, whole(-1), "keep so many last tokens; -1: what fits", _CM, "vLLM"),
    Field("prompt_logprobs", _H, whole(0, 20), "of the prompt's tokens; not with `stream`", _CM, "vLLM"),
    Field("logprobs_mode", _H, as_it_is, "`raw_logprobs`, the model's own; or `processed_logprobs`, of what tokens are "
          "drawn from; named as vLLM's option of an engine", origin="specrs"),
    Field("priority", _H, as_it_is, "lower runs first, and is preempted last", origin="vLLM"),
    Field("cache_salt", _H, as_it_is, "requests of one salt share cached prefixes with each other alone",
          origin="vLLM"),
    Field("add_special_tokens", _H, flag, "of the tokenizer, before a text (completions: true, chat: false)",
          origin="vLLM"),
    Field("return_token_ids", _H, flag, "`token_ids` in each choice, and `prompt_token_ids`", _CM, "vLLM"),
    Field("return_tokens_as_token_ids", _H, flag, "tokens in `logprobs` as `token_id:N`", _CM, "vLLM"),
    Field("chat_template", _H, template, "a template of the request's own, rendered in a process apart; where the "
          "server allows it", _MS, "vLLM"),
    Field("chat_template_kwargs", _H, variables, "further variables of the template", _MS, "vLLM"),
    Field("documents", _H, as_it_is, "a variable of the template", _MS, "vLLM"),
    Field("add_generation_prompt", _H, flag, "begin an answer (true)", _M, "vLLM"),
    Field("continue_final_message", _H, flag, "go on with the last message", _M, "vLLM"),
    Field("echo", _H, flag, "the last message's text before the output; with `continue_final_message`", _M, "vLLM"),
    Field("request_id", _I, anything, "send `X-Request-Id`", origin="vLLM"),
    Field("spaces_between_special_tokens", _R, only(True, why=_LATER), "of a text without special tokens",
          origin="vLLM"),
    Field("use_beam_search", _R, only(False, why=_BEAMS), "beams", origin="vLLM"),
    Field("length_penalty", _R, only(1, 1.0, why=_BEAMS), "of beams", origin="vLLM"),
    Field("logits_processors", _R, only([], why=_LATER), "code of the server's", origin="vLLM"),
    Field("kv_transfer_params", _R, only(why=_LATER), "keys and values of another server", origin="vLLM"),
    Field("vllm_xargs", _R, only({}, why=_LATER), "of vLLM's plugins", origin="vLLM"),
    Field("mm_processor_kwargs", _R, only({}, why="the model reads text alone"), "of pictures", _MS, "vLLM"),
    Field("include_reasoning", _H, flag, "false leaves reasoning out of the answer", _MS, "vLLM"),
    Field("structured_outputs", _H, forms.structured_outputs, "one of `json`, `json_object`, `regex`, `choice`, "
          "`grammar` (Lark); `whitespace_pattern`, `disable_any_whitespace`", origin="vLLM"),
    Field("guided_json", _H, forms.guided("json"), "a JSON schema", origin="vLLM"),
    Field("guided_regex", _H, forms.guided("regex"), "a regular expression", origin="vLLM"),
    Field("guided_choice", _H, forms.guided("choice"), "a list of texts", origin="vLLM"),
    Field("guided_grammar", _H, forms.guided("grammar"), "a grammar in Lark's syntax", origin="vLLM"),
    Field("guided_whitespace_pattern", _H, text, "what stands between two tokens of JSON", origin="vLLM"),
    # specrs' own
    Field("speculative", _H, flag, "false decodes this request plainly; its tokens are the same", origin="specrs"),
    Field("return_spec_stats", _H, stats, "objects [`specrs` and `metrics`](#what-a-request-costs); `\"rounds\"`, in "
          "streams: also one in each choice, with [each round's tree](playground.md)", _CM, "specrs"),
    Field("return_spec_stats", _H, flag, "objects [`specrs` and `metrics`](#what-a-request-costs) in the response", _S,
          "specrs"),
)  # fmt: skip

_BY_NAME: dict[str, dict[str, Field]] = {
    endpoint: {one.name: one for one in TABLE if endpoint in one.endpoints} for endpoint in _ALL
}


def read(endpoint: str, body: Mapping[str, Any], config: ServeConfig) -> dict[str, Any]:
    """The honoured fields of a request, checked.

    Raises:
        RequestError: 400, by field.
    """
    table = _BY_NAME[endpoint]
    found: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        known = table.get(name)
        if known is None:
            raise bad(f"{shown(name)}: no field of this endpoint", name[:64], "unknown_parameter")
        checked = known.check(name, value, config)
        if known.kind is Kind.HONOURED:
            found[name] = checked
    if "stream_options" in found and not found.get("stream"):
        raise bad("stream_options: needs stream = true", "stream_options")
    return found


def table() -> str:
    """The table for the documentation, in Markdown: a row for each field, grouped by whose it is."""
    rows = ["| field | of | endpoints | class | |", "|---|---|---|---|---|"]
    for one in TABLE:
        where = "all" if one.endpoints == _ALL else ", ".join(one.endpoints)
        rows.append(f"| `{one.name}` | {one.origin} | {where} | {one.kind.value} | {one.note} |")
    return "\n".join(rows) + "\n"
