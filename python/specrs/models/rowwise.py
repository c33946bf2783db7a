"""Operations on activations for families whose layers the host's kernels do not fuse, in torch.

Each is made of additions, multiplications, divisions and roundings alone, which are correctly rounded: an element's
bits depend on its own inputs, not on where in a tensor it lies. torch's own `exp` and `tanh` do not keep that, since
the ends of a tensor take another path through them than its middle. All compute in float32. `out` may be an input, but
for `gelu_up`.
"""

from __future__ import annotations

import math

import torch

# e^r = 1 + r + r^2 (C0 r^5 + ... + C5) on |r| <= ln2 / 2, tanh(z) = z + z^3 (T0 z^8 + ... + T4) on |z| < 0.625, and
# ln 2 in two parts: Cephes' single precision functions (Moshier, 1992).
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_SMALL = 0.625


def scaled_add(x: torch.Tensor, y: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """out = x + scale * y; overwrites y."""
    torch.add(x, y if scale == 1.0 else y.mul_(scale), out=out)


def gelu_up(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out [M, N] = gelu(gate) * up of rows [gate, up] of 2 N, by gelu's tanh form (https://arxiv.org/abs/1606.08415).

    0.5 x (1 + tanh u) is x / (1 + e^-2u).
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    u = gate * gate * gate
    u.mul_(0.044715).add_(gate).mul_(-2.0 * math.sqrt(2.0 / math.pi))
    # Beyond, the quotient is x, or as good as 0.
    e = _exp(u.clamp_(-88.0, 88.0)).add_(1.0)
    torch.mul(torch.div(gate, e, out=e), up, out=out)


def soft_cap(x: torch.Tensor, cap: float) -> None:
    """x = cap * tanh(x / cap), in place."""
    torch.mul(_tanh(x.float() / cap), cap, out=x)


def _exp(x: torch.Tensor) -> torch.Tensor:
    """e^x within 2 ulp or so, for |x| <= 88; NaN for NaN."""
    n = torch.round(x * math.log2(math.e))
    r = x - n * _LN2_HIGH  # a short constant: the product is exact
    r.sub_(n * _LN2_LOW)
    p = torch.full_like(r, _EXP[0])
    for c in _EXP[1:]:
        p.mul_(r).add_(c)
    p.mul_(r * r).add_(r).add_(1.0)
    power = (torch.nan_to_num(n).to(torch.int32) + 127) << 23  # the exponent of 2^n
    return p.mul_(power.view(p.dtype))


def _tanh(z: torch.Tensor) -> torch.Tensor:
    """tanh within some ulp."""
    square = z * z
    p = torch.full_like(z, _TANH[0])
    for c in _TANH[1:]:
        p.mul_(square).add_(c)
    small = p.mul_(square).mul_(z).add_(z)
    e = _exp((z + z).clamp_(-40.0, 40.0)).add_(1.0)
    large = torch.div(-2.0, e).add_(1.0)
    return torch.where(z.abs() < _SMALL, small, large)
