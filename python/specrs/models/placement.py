"""The device that a model's memory lies on, and the precision that it computes in: named here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Placement:
    """Device and dtypes of a model. Its `Dense` has one; weights, activations, features and caches follow it.

    Attributes:
        device: device of weights, activations, features and caches.
        activations: dtype of what passes between operations.
        weights: dtype that products keep their weights in; ``None``: as the checkpoint has them, never rounded.
        logits: dtype of logits; ``None``: that of activations.
    """

    device: torch.device
    activations: torch.dtype
    weights: torch.dtype | None = None
    logits: torch.dtype | None = None

    @property
    def logits_dtype(self) -> torch.dtype:
        """Type of logits."""
        return self.logits or self.activations

    @property
    def is_host(self) -> bool:
        """True if the host's kernels reach the device."""
        return self.device == HOST.device

    @property
    def dtype_name(self) -> str:
        """Type of activations, as options name it."""
        return str(self.activations).removeprefix("torch.")

    def for_logits(self) -> Placement:
        """Return the placement of logits: activations of their dtype."""
        return replace(self, activations=self.logits_dtype)

    def empty(self, *shape: int) -> torch.Tensor:
        """Return memory for activations, with any contents."""
        return torch.empty(shape, dtype=self.activations, device=self.device)

    def vector(self, weight: torch.Tensor) -> torch.Tensor:
        """A bias, or the weight of a norm, as operations read it beside activations."""
        return weight.to(self.device, self.activations)


HOST = Placement(torch.device("cpu"), torch.float32)
"""The CPU, as the Rust kernels compute."""
