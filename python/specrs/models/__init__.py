"""Target models and draft heads in torch, over the `Ops` of a backend. Importing this package imports torch."""

from specrs.models.config import Eagle3Config, LayerConfig, ModelConfig, RopeConfig
from specrs.models.eagle3 import Eagle3Head
from specrs.models.errors import DraftMismatchError, ModelFileError, UnsupportedModelError
from specrs.models.llama import LlamaModel
from specrs.models.load import load_draft, load_target
from specrs.models.loader import Checkpoint
from specrs.models.ops import HostOps, Linear, Ops, TorchOps, new_cache

__all__ = [
    "Checkpoint",
    "DraftMismatchError",
    "Eagle3Config",
    "Eagle3Head",
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
    "load_draft",
    "load_target",
    "new_cache",
]
