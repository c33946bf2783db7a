"""A plan's attention by a backend, as the model code and the replay of recorded rounds call it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specrs import _specrs as core
from specrs._specrs import ConfigError, Plan
from specrs.backends.base import AttentionBackend, Capabilities, Step
from specrs.backends.native import Native

if TYPE_CHECKING:
    import torch


class PlanAttention:
    """Attention over the KV that a plan names, which has been written before.

        attention = PlanAttention(find("flashinfer"))
        attention(cache, 0, plan, q, out, scale)

    Args:
        backend: the backend whose format the plan is made in.
    """

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self.capabilities = Capabilities.of(backend)  # some of which a backend that is no `AttentionBackend` may lack
        self._prepared: tuple[Plan, Any] | None = None  # pass at hand, for all of its layers

    def __call__(
        self,
        kv: Any,
        layer: int,
        plan: Plan,
        q: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        cap: float | None = None,
    ) -> None:
        """out = attention of q, both f32 [Q, heads, head_dim]. With a cap c, a scaled score x becomes c tanh(x / c).

        Raises:
            ConfigError: a plan of another format; a cap, with a backend other than specrs's own; a backend whose result
                is no tensor like q.
        """
        if isinstance(self.backend, Native):
            core.attention(kv, layer, plan, q, out, scale, cap)
            return
        if cap is not None:
            raise ConfigError(
                f"attention backend {self.capabilities.name!r}: caps no scores, cap = {cap:g}; 'native' does"
            )
        if plan.format != self.backend.format:
            raise ConfigError(
                f"plan: made in the format {plan.format!r}; the attention backend {self.capabilities.name!r} reads "
                f"{self.backend.format!r}"
            )
        if self._prepared is None or self._prepared[0] is not plan:
            self._prepared = plan, self.backend.prepare(self._step(plan, kv.page_size))
        result = self.backend.attend(self._prepared[1], kv.tensor[layer, 0], kv.tensor[layer, 1], q, scale)
        got, want = _kind(result), _kind(q)
        if got != want:
            raise ConfigError(f"attention backend {self.capabilities.name!r}: attend gave {got}, must give {want}")
        out.copy_(result.detach())

    def _step(self, plan: Plan, page_size: int) -> Step:
        from torch.utils.dlpack import from_dlpack

        arrays = {name: from_dlpack(array) for name, array in plan.arrays().items()}
        return Step(
            phase=plan.phase,
            page_size=page_size,
            expand_page_size=plan.expand_page_size,
            queries=plan.queries,
            arrays=arrays,
        )


def _kind(value: Any) -> str:
    """Return the kind of a value for a message: shape, dtype and device of a tensor, else its type."""
    import torch

    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    layout = "" if value.layout == torch.strided else f" {value.layout}"
    return f"{list(value.shape)} {value.dtype} on {value.device}{layout}"
