"""The things that the bits of a model's results depend on, beside the model and its input."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import torch

from specrs import _specrs as core
from specrs.models.cuda import CudaDense, CudaLinear
from specrs.models.ops import Linear, Ops


def numerics(ops: Ops, weights: Iterable[tuple[str, Linear]]) -> dict[str, Any]:
    """Return what the bits depend on: the device, and the class of each weight's products by its name; plain values
    that JSON takes.

    On a GPU a class is a split of K and a fingerprint, which two machines share where the same rows give the same bits.
    Products that a bench opened without the contract are named under ``products``, and specrs's own attention has a
    rule there, by which its bits are defined.
    On the CPU it is the dtype that the weight is kept in: neither threads nor instructions change a bit.
    """
    dense, at = ops.dense, ops.placement
    found: dict[str, Any] = {"activations": at.dtype_name, "logits": _name(at.logits_dtype)}
    instructions, rule = core._numerics_ids()
    if isinstance(dense, CudaDense):
        products = json.loads(dense.products.numerics())
        found |= {key: products[key] for key in ("device", "capability", "driver_cuda", "cublaslt", "cublaslt_path")}
        if ops.attention.capabilities.format == "native":
            found["attention_rule"] = rule
        else:  # whose bits depend on the batch, too
            found["triton"] = version("triton")
        if not products["contract"]:  # a bench's choice
            found["products"] = "the fastest algorithm of any class for each number of rows: NOT exact, for a bench"
    else:
        found |= {"device": str(at.device), "instructions": instructions}
    found["torch"] = torch.__version__  # cosines and sines; on a GPU some families' sums, products and caps
    return {**found, "weights": {name: _of(linear) for name, linear in weights}}


def _of(linear: Linear) -> dict[str, Any]:
    entry: dict[str, Any] = {"shape": [linear.out_features, linear.in_features]}
    if isinstance(linear, CudaLinear):
        return entry | {"split": linear.product.split, "fingerprint": f"{linear.product.fingerprint:#018x}"}
    if isinstance(linear, core.PackedLinear):
        return entry | {"dtype": {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}[linear.storage]}
    return entry


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
