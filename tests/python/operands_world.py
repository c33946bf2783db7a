"""Operands of launches by name, for tests that make them as lists."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def named(kind: type[T], tensors: Iterable[torch.Tensor]) -> T:
    """Operands of a class of `specrs.operands`, in the order of its fields."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    given: dict[str, Any] = dict(zip(names, tensors, strict=True))
    return kind(**given)
