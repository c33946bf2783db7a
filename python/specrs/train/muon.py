"""Muon for the matrices inside the layers, AdamW for everything else.

Muon (Jordan et al., 2024) replaces a matrix's momentum by its nearest semi-orthogonal matrix; the scale
0.2*sqrt(max side) gives its update the root mean square of AdamW's (arXiv:2502.16982), so that one learning rate serves
both.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the semi-orthogonal factor of each matrix of a stack [N, r, c]; in bfloat16 on a
    GPU."""
    x = g.bfloat16() if g.is_cuda else g
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    y: Tensor = x.mT if tall else x
    return y.float()


class MuonAdamW:
    """Both optimisers behind one `step(lr)`; `matrices` get Muon, `others` AdamW."""

    def __init__(
        self, matrices: list[nn.Parameter], others: list[nn.Parameter], weight_decay: float, momentum: float = 0.95
    ) -> None:
        self.weight_decay, self.momentum = weight_decay, momentum
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for p in matrices:
            groups[p.shape].append(p)
        self.groups = [(ps, torch.zeros(len(ps), *ps[0].shape, device=ps[0].device)) for ps in groups.values()]
        decayed = [p for p in others if p.ndim >= 2]
        plain = [p for p in others if p.ndim < 2]
        self.adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=others[0].is_cuda,
        )  # fmt: skip

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move every parameter by its gradient, and drop the gradients."""
        for params, buffer in self.groups:
            grads = torch.stack([p.grad for p in params if p.grad is not None])
            buffer.lerp_(grads, 1 - self.momentum)
            update = orthogonalise(torch.lerp(grads, buffer, self.momentum))
            scale = -lr * 0.2 * max(params[0].shape) ** 0.5
            weights: list[Tensor] = list(params)
            torch._foreach_mul_(weights, 1 - lr * self.weight_decay)
            torch._foreach_add_(weights, list(update.unbind()), alpha=scale)
            for p in params:
                p.grad = None
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on beside the parameters."""
        return {"momentum": [buffer for _, buffer in self.groups], "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` returned, for the same parameters."""
        for (_, buffer), kept in zip(self.groups, state["momentum"], strict=True):
            buffer.copy_(kept)
        self.adamw.load_state_dict(state["adamw"])


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices for Muon, the rest): embeddings, output heads, Markov heads and norms stay with AdamW."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        outer = p.ndim < 2 or any(part in name for part in ("embed", "lm_head", "markov"))
        (others if outer else matrices).append(p)
    return matrices, others


def learning_rate(at: float, peak: float, warmup: float = 0.04, hold: float = 0.3) -> float:
    """Return the rate when a share ``at`` of the training is over: warm up, hold, then fall linearly to zero."""
    return peak * max(min(at / warmup, 1.0, (1 - at) / (1 - hold)), 0.0)
