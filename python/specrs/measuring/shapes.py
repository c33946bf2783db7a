"""Models of random weights: only a `config.json` exists, and tensors are drawn on the device when they are asked for.

How long a round takes does not depend on what the weights say, so a shape is measured without its checkpoint. Drafts of
a random head are never accepted: tokens a second of such a model say nothing about the model that has the shape.

    with random_weights():
        target, draft = directories(Path(folder), shape_config("llama-3.1-8b"))
        llm = LLM(target, draft)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import specrs.models.cuda as cuda
import specrs.models.head_files as head_files
import specrs.models.host_memory as host_memory
import specrs.models.llama as llama
from specrs._specrs import ConfigError
from specrs.models import HOST, Eagle3Config, ModelConfig, Placement
from specrs.models.reading import read_json

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 128, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.2-1b": {
        **_LLAMA, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64,
        "intermediate_size": 8192, "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **_LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336,
    },
    "llama-3.3-70b": {
        **_LLAMA, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672,
    },
    "qwen3-8b": {
        **_LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
        "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    },
}  # fmt: skip
"""`config.json` of published models, by name; the scaling of their rotary embeddings, which costs nothing, is left
out."""
_DRAFT_VOCAB = 32000  # as published EAGLE-3 heads have it


def shape_config(shape: str, layers: int | None = None) -> dict[str, Any]:
    """Return the `config.json` of a shape by name, or of a path to such a file.

    Args:
        shape: a name of `SHAPES`, a `config.json`, or a directory that has one.
        layers: decoder layers to keep; ``None``: all.

    Raises:
        ConfigError: neither a name nor a file, a configuration that specrs does not run, or more layers than there are.
    """
    path = Path(shape)
    if shape in SHAPES:
        raw = dict(SHAPES[shape])
    elif path.exists():
        raw = read_json(path / "config.json" if path.is_dir() else path)
    else:
        names = ", ".join(SHAPES)
        raise ConfigError(f"shape = {shape!r}: must be one of {names}, or the path of a config.json")
    most = ModelConfig.from_dict(raw, path=None if shape in SHAPES else path).num_layers
    if layers is not None:
        if not 1 <= layers <= most:
            raise ConfigError(f"layers = {layers}: the shape {shape!r} has 1 to {most}")
        raw["num_hidden_layers"] = layers
        if isinstance(kinds := raw.get("layer_types"), list):
            raw["layer_types"] = kinds[:layers]
    return raw


def directories(root: Path, config: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write `config.json` of the target and of an EAGLE-3 head for it, and return both directories."""
    target, draft = root / "target", root / "draft"
    sizes = ModelConfig.from_dict(config)
    layers = sizes.num_layers
    head = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": sizes.hidden_size, "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads, "head_dim": sizes.head_dim,
        "intermediate_size": sizes.intermediate_size, "rms_norm_eps": sizes.rms_norm_eps, "hidden_act": "silu",
        "rope_theta": 500000.0, "max_position_embeddings": sizes.max_position_embeddings,
        "vocab_size": sizes.vocab_size, "draft_vocab_size": min(_DRAFT_VOCAB, sizes.vocab_size),
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
        "eagle_aux_hidden_state_layer_ids": sorted({min(1, layers - 1), layers // 2, layers - 1}),
    }  # fmt: skip
    for path, raw in ((target, config), (draft, head)):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(raw))
    return target, draft


class RandomCheckpoint:
    """A checkpoint whose tensors are drawn when they are asked for; it stands where `specrs.models.Checkpoint` does.

    Attributes:
        bytes: bytes of all matrices drawn so far, of any checkpoint.
    """

    bytes = 0

    def __init__(self, directory: Path, rename: Any = None, placement: Placement = HOST) -> None:
        self._at = placement
        self._path = Path(directory)
        raw = read_json(self._path / "config.json")
        head = Eagle3Config.from_dict(raw) if "draft_vocab_size" in raw else None
        self._names: tuple[str, ...] = ()  # names by which a head says what it is; those of a target follow from sizes
        self._shapes: dict[str, tuple[int, ...]]
        if head is None:
            self._shapes = llama.LlamaModel.shapes(ModelConfig.from_dict(raw))
        else:
            self._names = ("lm_head.weight", "fc.weight", "d2t")
            self._shapes = {
                "fc.weight": (head.hidden_size, head.aux_size),
                "lm_head.weight": (head.draft_vocab_size, head.hidden_size),
                "d2t": (head.draft_vocab_size,),
            }
        self._generator: torch.Generator | None = None

    def check(self, expected: Mapping[str, tuple[int, ...]], **_: Iterable[str]) -> None:
        """Take the shapes that the model calls for: they are those that are drawn."""
        self._shapes = dict(expected)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def path(self, name: str) -> Path:
        """Return the path to name in errors."""
        return self._path

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        """Return the type of a tensor, as safetensors spells it."""
        return "I64" if name == "d2t" else "BF16"

    def load(self, name: str) -> torch.Tensor:
        """Draw a tensor, of a size that keeps activations near 1; norms are ones."""
        shape, device = self._shapes[name], self._at.device
        if name == "d2t":
            return torch.zeros(shape, dtype=torch.int64)
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16, device=device)
        if self._generator is None:
            self._generator = torch.Generator(device).manual_seed(1)
        noise = torch.empty(shape, dtype=torch.bfloat16, device=device)
        RandomCheckpoint.bytes += noise.nbytes
        return noise.normal_(0.0, 1.0 if "embed" in name else shape[-1] ** -0.5, generator=self._generator)


_READERS: tuple[Any, ...] = (llama, head_files, cuda, host_memory)  # modules that open checkpoints


def draw_weights() -> None:
    """Give models of this process random weights from here on."""
    for module in _READERS:
        module.Checkpoint = RandomCheckpoint


@contextmanager
def random_weights() -> Iterator[None]:
    """Give models that are loaded meanwhile random weights."""
    before = [module.Checkpoint for module in _READERS]
    draw_weights()
    try:
        yield
    finally:
        for module, usual in zip(_READERS, before, strict=True):
            module.Checkpoint = usual
