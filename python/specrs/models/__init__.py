"""Target models and draft heads in torch, over the `Ops` of a backend. Importing this package imports torch."""

from specrs.models.config import Eagle3Config, LayerConfig, ModelConfig, RopeConfig, has_recurrent_state
from specrs.models.eagle3 import Eagle3Head
from specrs.models.errors import DraftMismatchError, ModelFileError, UnsupportedModelError
from specrs.models.generation import default_sampling
from specrs.models.llama import LlamaModel
from specrs.models.load import load_draft, load_target
from specrs.models.loader import Checkpoint
from specrs.models.locate import locate
from specrs.models.ops import (
    BackendOps,
    Heads,
    HostOps,
    Linear,
    Ops,
    TorchOps,
    check_memory,
    follow_torch,
    new_cache,
    ops_for,
)

__all__ = [
    "BackendOps",
    "Checkpoint",
    "DraftMismatchError",
    "Eagle3Config",
    "Eagle3Head",
    "Heads",
    "HostOps",
    "LayerConfig",
    "Linear",
    "LlamaModel",
    "ModelConfig",
    "ModelFileError",
    "Ops",
    "RopeConfig",
    "TorchOps",
    "UnsupportedModelError",
    "check_memory",
    "default_sampling",
    "follow_torch",
    "has_recurrent_state",
    "load_draft",
    "load_target",
    "locate",
    "new_cache",
    "ops_for",
]
