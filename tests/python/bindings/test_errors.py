"""Every core error has its exception class, its operands as attributes, and hostile values never panic."""

from __future__ import annotations

from typing import Any

import pytest

from specrs import _specrs as core

CLASSES = {
    "OutOfRange": (core.ConfigError, {"what", "got", "min", "max"}),
    "Invalid": (core.ConfigError, {"what", "got", "why"}),
    "Overflow": (core.ConfigError, {"what", "expr", "ty", "limit"}),
    "Capacity": (core.ConfigError, {"what", "need", "have", "hint"}),
    "Mismatch": (core.ConfigError, {"operand", "got", "want"}),
    "PoolExhausted": (core.PoolExhaustedError, {"need", "free", "total"}),
    "TooManySequences": (core.PoolExhaustedError, {"limit"}),
    "DoubleFree": (core.LedgerError, {"page", "owners", "frees", "history"}),
    "Audit": (core.LedgerError, {"what", "history"}),
    "Dead": (core.StaleHandleError, {"what", "id", "why"}),
    "OutOfBounds": (core.OutOfBoundsError, {"kernel", "buffer", "request", "step", "index", "bound"}),
    "GraphCapture": (core.GraphCaptureError, {"call", "node", "path", "why"}),
    "StaleOutput": (core.StaleOutputError, {"what", "held", "current"}),
    "Grammar": (core.GrammarError, {"what", "why"}),
    "GrammarFailed": (core.GrammarFailedError, {"why", "request", "row", "position"}),
    "NonFinite": (core.NonFiniteError, {"what", "value", "request", "row", "position", "index"}),
    "DeviceMemory": (core.DeviceMemoryError, {"what", "device", "need", "have", "hint"}),
    "Cuda": (core.CudaError, {"call", "message"}),
    "CudaUnavailable": (core.CudaError, {"reason"}),
}


def test_each_kind_has_its_class_and_fields() -> None:
    examples = core._error_examples()
    assert {e.kind for e in examples} == set(CLASSES)
    for e in examples:
        cls, fields = CLASSES[e.kind]
        assert type(e) is cls
        assert set(vars(e)) == fields | {"kind"}
        for name in fields - {"history", "hint", "ty", "request", "step", "kind"}:
            assert str(getattr(e, name)) in str(e), (e.kind, name)


@pytest.mark.parametrize(
    ("cls", "bases"),
    [
        (core.ConfigError, (core.SpecrsError, ValueError)),
        (core.PoolExhaustedError, (core.SpecrsError,)),
        (core.LedgerError, (core.SpecrsError,)),
        (core.StaleHandleError, (core.SpecrsError,)),
        (core.OutOfBoundsError, (core.SpecrsError, IndexError)),
        (core.NonFiniteError, (core.SpecrsError, ValueError)),
        (core.CudaError, (core.SpecrsError, RuntimeError)),
        (core.DeviceMemoryError, (core.SpecrsError, MemoryError)),
        (core.StaleOutputError, (core.SpecrsError,)),
        (core.GraphCaptureError, (core.SpecrsError,)),
    ],
)
def test_hierarchy(cls: type[Exception], bases: tuple[type[Exception], ...]) -> None:
    assert cls.__bases__ == bases
    assert cls.__module__ == "specrs._specrs"
    assert cls.__doc__
    assert str(cls("made in Python")) == "made in Python"


HOSTILE = [-1, -(2**31), 2**31, 2**32, 2**63, 2**64, 2**127, -(2**127) - 1, 2**200, -(2**200)]


@pytest.mark.parametrize("value", HOSTILE)
def test_integers_of_any_size_are_reported_with_their_operand(value: int) -> None:
    shape = core.TreeShape(2, 2, 4)
    calls = [
        ("topk", lambda: core.TreeShape(value, 1, 1)),
        ("steps", lambda: core.TreeShape(1, value, 1)),
        ("draft_tokens", lambda: core.TreeShape(1, 1, value)),
        ("max_batch", lambda: core.Geometry(value, 16, 1, shape)),
        ("max_context_len", lambda: core.Geometry(1, value, 1, shape)),
        ("page_size", lambda: core.Geometry(1, 16, value, shape)),
        ("committed length", lambda: core.Geometry(1, 16, 1, shape).draft_region(value)),
    ]
    for what, call in calls:
        with pytest.raises(core.ConfigError) as e:
            call()
        assert e.value.what == what
        assert e.value.kind == "OutOfRange"
        if abs(value) < 2**126:
            assert e.value.got == value
    with pytest.raises(core.ConfigError) as e:
        core.Tree.from_parents([-1, value])
    assert e.value.what == "tree parent"


@pytest.mark.parametrize("value", ["1", 1.5, None, [], object()])
def test_what_is_no_integer_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match="integer"):
        core.TreeShape(value, 1, 1)
