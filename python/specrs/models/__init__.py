"""Target models and draft heads, over a device's operations and an attention (`Ops`). Importing this package imports
torch."""

from specrs.models.attention import HostAttention, ReadAttention, TorchAttention
from specrs.models.block_config import BlockConfig
from specrs.models.block_head import BlockHead
from specrs.models.cache import cache_bytes, check_memory, new_cache
from specrs.models.config import LayerConfig, ModelConfig, has_recurrent_state
from specrs.models.cuda import CudaDense, placed
from specrs.models.cuda_attention import CudaAttention
from specrs.models.dense import HostDense, TorchDense, follow_torch
from specrs.models.eagle3 import Eagle3Head
from specrs.models.errors import DraftMismatchError, HubError, ModelFileError, UnsupportedModelError
from specrs.models.generation import default_sampling, stated_sampling
from specrs.models.head_config import Eagle3Config, HeadConfig
from specrs.models.live import LiveModel, ModelSource
from specrs.models.llama import LlamaModel
from specrs.models.load import check_draft, drafted_tokens, load_draft, load_target
from specrs.models.loader import Checkpoint
from specrs.models.locate import locate
from specrs.models.numerics import numerics
from specrs.models.ops import Attention, Dense, Embedding, Heads, Linear, Ops
from specrs.models.pairs import cuda_ops, ops_for, torch_ops
from specrs.models.placement import HOST, Placement
from specrs.models.rope_config import RopeConfig
from specrs.models.weight_files import weight_bytes

__all__ = [
    "HOST",
    "Attention",
    "BlockConfig",
    "BlockHead",
    "Checkpoint",
    "CudaAttention",
    "CudaDense",
    "Dense",
    "DraftMismatchError",
    "Eagle3Config",
    "Eagle3Head",
    "Embedding",
    "Heads",
    "HostAttention",
    "HostDense",
    "HubError",
    "HeadConfig",
    "LayerConfig",
    "Linear",
    "LiveModel",
    "LlamaModel",
    "ModelConfig",
    "ModelFileError",
    "ModelSource",
    "Ops",
    "Placement",
    "ReadAttention",
    "RopeConfig",
    "TorchAttention",
    "TorchDense",
    "UnsupportedModelError",
    "cache_bytes",
    "check_draft",
    "check_memory",
    "cuda_ops",
    "default_sampling",
    "drafted_tokens",
    "follow_torch",
    "has_recurrent_state",
    "load_draft",
    "load_target",
    "locate",
    "new_cache",
    "numerics",
    "ops_for",
    "placed",
    "stated_sampling",
    "torch_ops",
    "weight_bytes",
]
