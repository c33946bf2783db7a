"""The choice of an engine's device: the device that the user names, or else a GPU if possible, or else the CPU.

This checks everything that can be checked without reading a weight. If nobody names a device and something keeps the
engine off the GPU, that is no error: the engine runs on the CPU, and `LLM.device` tells the reason.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specrs import backends
from specrs._specrs import ConfigError, DeviceMemoryError, Geometry, SpecrsError
from specrs.engine.config import BlockEngineConfig, EngineConfig
from specrs.engine.devices.memory_plan import Budget, Engine, Head, attention_of, free_bytes, planned
from specrs.models import (
    BlockConfig,
    Eagle3Config,
    LiveModel,
    ModelConfig,
    Ops,
    Placement,
    check_draft,
    check_memory,
    cuda_ops,
    ops_for,
    placed,
)
from specrs.models.cuda import HEAD_DIMS, unavailable
from specrs.models.cuda_attention import MOST_BRANCHES, kernels_of
from specrs.models.head_config import HeadConfig

_LOG = logging.getLogger("specrs")

VARIABLE = "SPECRS_DEVICE"
"""Environment variable with the device of engines whose configuration names none."""


@dataclass(frozen=True)
class Site:
    """The device of an engine, and everything that follows from it.

    Attributes:
        ops: the device's operations.
        config: the resolved configuration.
        geometry: the resolved geometry.
        drafts: True if a head is loaded.
        name: name of the device, with the GPU's model, or with the reason why the device is the CPU.
        budget: the budget of the GPU's memory; ``None`` on the CPU.
    """

    ops: Ops
    config: EngineConfig
    geometry: Geometry
    drafts: bool
    name: str
    budget: Budget | None

    @property
    def place(self) -> Placement:
        """The device and the dtypes."""
        return self.ops.placement


@dataclass(frozen=True)
class Wanted:
    """An engine as the user asked for it, with models that are checked but not loaded.

    Attributes:
        config: the engine's options.
        model: the target's directory, or the model in memory.
        sizes: the target's configuration.
        draft: the head's directory; ``None`` without a head.
        recurrent: True if the target declares recurrent layers and drafts are asked for.
    """

    config: EngineConfig
    model: Path | LiveModel
    sizes: ModelConfig
    draft: Path | None
    recurrent: bool

    def site(self) -> Site:
        """Pick the device, and settle everything that follows from it.

        Raises:
            ConfigError: the device does not support an option or the model, or the device does not exist.
            CudaError: a GPU was asked for, but none can be used.
            DeviceMemoryError: a GPU was asked for, but has too little free memory.
        """
        if self.config.device is not None:
            return self._on(self.config.device, "asked for")
        if asked := os.environ.get(VARIABLE):
            return self._on(asked, f"{VARIABLE} = {asked!r}")
        if (why := unavailable()) is not None:
            return self._on("cpu", why)
        try:
            return self._on("cuda", "")
        except (SpecrsError, RuntimeError) as error:  # torch raises RuntimeError
            whole = brief = str(error).removeprefix("device = 'cuda': ").removesuffix("; device='cpu' runs this model")
            if isinstance(error, DeviceMemoryError):
                brief = f"{error.need} bytes are needed on cuda:{error.device}, {error.have} are free"
        site = self._on("cpu", f"not the GPU: {brief}")  # raises if the CPU cannot run it either
        if not self._for_the_host:
            warnings.warn(f"runs on the CPU, not the GPU: {whole}", RuntimeWarning, stacklevel=3)
        return site

    def _check_cap(self, backend: backends.AttentionBackend) -> None:
        """Raise ConfigError if the model caps scores and the backend cannot. Otherwise the first pass would fail."""
        cap = self.sizes.block.score_cap
        if cap is not None and not isinstance(backend, (backends.Native, backends.NativeCuda)):
            name = backends.Capabilities.of(backend).name
            raise ConfigError(
                f"attention_backend = {name!r}: caps no scores, and the model has attn_logit_softcapping = {cap:g}, "
                "which 'native' does"
            )

    @staticmethod
    def _check_heads(backend: backends.AttentionBackend, *models: ModelConfig | HeadConfig) -> None:
        """Raise ConfigError if the backend's kernels on a GPU do not take the models' heads."""
        dims = kernels_of(backend).head_dims
        for model in models:
            if model.head_dim not in dims:
                raise ConfigError(
                    f"attention_backend = {backend.name!r}: head_dim = {model.head_dim}: it takes "
                    f"{', '.join(map(str, dims))} on a GPU; 'native' takes {', '.join(map(str, HEAD_DIMS))}"
                )

    @property
    def _for_the_host(self) -> bool:
        """True if the options name something that only the CPU has."""
        if "float32" in (self.config.kv_dtype, self.config.dtype):
            return True
        try:
            return backends.on_device(self.config.backend, "cuda") is None
        except ConfigError:  # an option of the backend's
            return True

    def _on(self, asked: str, why: str) -> Site:
        context = self.config.max_context_len or self.sizes.max_context_len
        head = None if self.draft is None else Head(*check_draft(self.draft, self.sizes))
        place = placed(asked, self.model, self.sizes, None if head is None else head.config, self.config.dtype)
        config, drafts = self.config.on(place).route(self.recurrent)
        if head is not None and isinstance(head.config, BlockConfig):
            config = _for_blocks(config, head.config)
        if head is not None and isinstance(head.config, Eagle3Config) and head.config.levels:
            config = BlockEngineConfig.over(config, head.config.levels - 1, head.config.levels)
        if not drafts:
            head, config = None, replace(config, drafters=())
        config, geometry = config.resolve(context)
        topk = geometry.shape.topk
        if head is not None and topk > head.config.draft_vocab_size:
            most = head.config.draft_vocab_size
            raise ConfigError(
                f"tree = {config.shape}: {topk} branches for a draft vocabulary of {most} tokens; at most {most} "
                "branches work"
            )
        self._check_cap(config.backend)
        if place.is_host:
            assert config.num_pages is not None and config.kv_dtype is not None
            pages = config.num_pages + 1  # page 0 is the sink
            check_memory(self.sizes, self.sizes.num_layers, pages, config.page_size, config.kv_dtype)
            return Site(ops_for(config.backend), config, geometry, head is not None, f"cpu ({why})", None)
        if isinstance(config, BlockEngineConfig) and config.width > MOST_BRANCHES:
            raise ConfigError(
                f"tree = {config.tree}: {config.width} branches (K); on a GPU a list has at most {MOST_BRANCHES} tokens"
            )
        self._check_heads(config.backend, self.sizes, *(() if head is None else (head.config,)))
        ops, ordinal = cuda_ops(place, geometry.shape, config.backend), place.device.index
        engine = Engine(self.sizes, head, config, geometry, place, attention_of(ops, ordinal))
        config, budget = planned(engine, self.config.num_pages, free_bytes(place.device))
        name = f"cuda:{ordinal} ({torch.cuda.get_device_name(ordinal)})"
        _LOG.info("%s, memory in bytes:\n%s", name, budget)
        return Site(ops, config, geometry, head is not None, name, budget)


def _for_blocks(config: EngineConfig, head: BlockConfig) -> EngineConfig:
    """Return the configuration of an engine whose head drafts blocks.

    Raises:
        ConfigError: the backend does not attend within a block.
    """
    if not head.causal and not isinstance(config.backend, (backends.Native, backends.NativeCuda)):
        name = backends.Capabilities.of(config.backend).name
        raise ConfigError(
            f"attention_backend = {name!r}: attends causally, and a block of a {head.form_name} head does not; "
            "'native' runs it"
        )
    return BlockEngineConfig.over(config, head.block_size, head.depth)
