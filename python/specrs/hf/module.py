"""Makes a `LiveModel` from a transformers module, and an engine over it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specrs._specrs import ConfigError
from specrs.chat import TOKENIZER_CONFIG
from specrs.engine import LLM
from specrs.engine_options import LLMOptions
from specrs.models import LiveModel, UnsupportedModelError
from specrs.models.families import FAMILIES

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel
    from typing_extensions import Unpack


_PARTS = (torch.nn.Linear, torch.nn.Embedding, torch.nn.ModuleList, torch.nn.Dropout)
"""Parts that a module is made of, beside classes in the file of its own and the activation that its configuration
names."""
_TORCH = str(Path(torch.__file__).parent)
_HOOKS = ("transformers.", "torch.")
"""Packages whose hooks change no output: transformers' own record what a pass went through."""


def from_model(
    model: PreTrainedModel, tokenizer: Any = None, *, draft: str | Path | None = None, **options: Unpack[LLMOptions]
) -> LLM:
    """An engine over a module's weights, without files.

    On the CPU the engine packs matrices: a copy, in the module's own dtype. Embeddings there, and on a GPU whatever is
    not stacked (q, k and v; gate and up), are the module's own memory. So the module must stay as it is while the
    engine lives: what is written to its weights, the engine sees in part.

    Args:
        model: a causal language model of a family that specrs runs (docs/models.md), on one device.
        tokenizer: a tokenizer of transformers that is backed by the tokenizers library, or a ``tokenizers.Tokenizer``;
            the engine keeps a copy. ``None``: prompts are token ids.
        draft, options: options as `LLM` takes them. Without ``device``, the engine runs where the module is.

    Raises:
        ConfigError: the module is no such model, or lies on several devices.
        UnsupportedModelError: an architecture, a value of its configuration, or a part of the module (a class, a hook)
            that is not implemented.
        ModelFileError: tensors do not fit the configuration, such as those of a module with adapters.
    """
    source = live_model(model, tokenizer)
    options.setdefault("device", str(device_of(source)))
    return LLM(source, draft, **options)


def live_model(model: PreTrainedModel, tokenizer: Any = None) -> LiveModel:
    """Return the content of a module and its configurations."""
    module = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    config: Any = getattr(module, "config", None)
    if not isinstance(module, torch.nn.Module) or not hasattr(config, "to_dict"):
        raise ConfigError(f"model is a {type(model).__name__}: must be a model of transformers")
    architecture = type(module).__name__
    name = f"{architecture} (in memory)"
    if architecture in FAMILIES:  # others are refused as such
        _check_parts(module)
    tensors = module.state_dict()
    for tensor_name, tensor in tensors.items():
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            why = "no plain tensor, as of quantised or distributed weights; a model in f32, bf16 or f16 works"
            raise UnsupportedModelError(f"tensor {tensor_name}", type(tensor).__name__, why)
    # Nobody here knows what a subclass does differently, so the class itself names the architecture.
    files: dict[str, Mapping[str, Any]] = {"config.json": {**config.to_dict(), "architectures": [architecture]}}
    generation = getattr(module, "generation_config", None)
    if generation is not None:
        files["generation_config.json"] = generation.to_dict()
    files |= _tokenizer_config(tokenizer)
    return LiveModel(name, files, tensors, backend_of(tokenizer))


def _check_parts(model: torch.nn.Module) -> None:
    """Refuse what computes something else than the family's code does. Raises UnsupportedModelError."""
    home = type(model).__module__
    if not home.startswith("transformers.models."):
        got = f"{home}.{type(model).__qualname__}"
        raise UnsupportedModelError("model", got, "code that specrs does not know; transformers' own class works")
    act = _activation(model)
    for place, part in model.named_modules():
        what = f"module {place}" if place else "model"
        kind = type(part)
        if kind.__module__ != home and kind not in _PARTS and kind is not act:
            why = f"unknown to specrs, which runs the model as {home} has it; adapters can be merged"
            raise UnsupportedModelError(what, f"{kind.__module__}.{kind.__qualname__}", why)
        if (forward := part.__dict__.get("forward")) is not None and not _is_own(forward, part):
            name = getattr(forward, "__qualname__", type(forward).__name__)
            raise UnsupportedModelError(f"{what}.forward", name, "replaced in this object, which specrs does not see")
        for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
            if not (getattr(hook, "__module__", None) or "").startswith(_HOOKS):
                raise UnsupportedModelError(f"hook of {what}", hook, "specrs calls no hooks; it works once removed")


def _is_own(forward: Any, part: torch.nn.Module) -> bool:
    """Return whether a `forward` on an object is its class's own: transformers 5.0 leaves it there, torch.compile
    compiled."""
    code = getattr(forward, "__code__", None)
    if code is not None and code.co_filename.startswith(_TORCH):  # else a wrapper of a compiled one, with its marks
        forward = getattr(forward, "_torchdynamo_orig_callable", forward)
    return getattr(forward, "__func__", None) is type(part).forward and forward.__self__ is part


def _activation(model: Any) -> type | None:
    """The class of what transformers puts where the configuration names an activation."""
    from transformers.activations import ACT2FN

    family = FAMILIES.get(type(model).__name__)
    name = None if family is None else getattr(model.config, family.act_key, None)
    return type(ACT2FN[name]) if isinstance(name, str) and name in ACT2FN else None


def _tokenizer_config(tokenizer: Any) -> dict[str, Mapping[str, Any]]:
    """Return the special tokens and chat templates that a tokenizer of transformers knows."""
    named = getattr(tokenizer, "special_tokens_map", None)
    if not isinstance(named, Mapping):
        return {}
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = [{"name": name, "template": source} for name, source in template.items()]
    return {TOKENIZER_CONFIG: {**named, "chat_template": template}}


def device_of(source: LiveModel) -> torch.device:
    """The device of a model's tensors. ConfigError: there are several, none, or one without values."""
    devices = {tensor.device for tensor in source.tensors.values()}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices))) or "no device: it has no tensors"
        raise ConfigError(f"model: {source} is on {names}; a model on one device works, as model.to('cpu')")
    [device] = devices
    if device.type == "meta":
        raise ConfigError(f"model: {source} is on the meta device, so without values: offloaded, or never loaded")
    return device


def backend_of(tokenizer: Any) -> Tokenizer | None:
    """Return a copy of the tokenizers library's object, without padding and truncation that other users of it have
    set."""
    if tokenizer is None:
        return None
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, Tokenizer):
        why = "must be backed by the tokenizers library (AutoTokenizer gives one), or None for token ids"
        raise ConfigError(f"tokenizer is a {type(tokenizer).__name__}: {why}")
    copy: Tokenizer = Tokenizer.from_str(backend.to_str())
    copy.no_padding()
    copy.no_truncation()
    return copy
