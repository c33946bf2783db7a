"""A DLPack producer made by hand with ctypes: what no well-behaved library would send, and deleters that count."""

from __future__ import annotations

import ctypes
from typing import Any

_PyCapsule_New = ctypes.pythonapi.PyCapsule_New
_PyCapsule_New.restype = ctypes.py_object
_PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Legacy(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Producer:
    """Exports float32 ``values`` (or other types, by keywords) and counts calls of its deleter.

    It keeps the memory alive itself, so that a wrong second call of the deleter is counted instead of crashing.
    """

    def __init__(
        self,
        values: list[float],
        shape: list[int] | None = None,
        strides: list[int] | None = None,
        *,
        legacy: bool = False,
        major: int = 1,
        flags: int = 0,
        reuse: bool = False,
        **fields: Any,
    ) -> None:
        self.values = (ctypes.c_float * max(1, len(values)))(*values)
        shape = [len(values)] if shape is None else shape
        self._shape = (ctypes.c_int64 * max(1, len(shape)))(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * max(1, len(strides)))(*strides)
        self.deleted = 0
        self._deleter = _DELETER(self._delete)
        self._managed: Legacy | Versioned = Legacy() if legacy else Versioned()
        if isinstance(self._managed, Versioned):
            self._managed.major, self._managed.minor, self._managed.flags = major, 0, flags
        self._managed.deleter = ctypes.cast(self._deleter, ctypes.c_void_p)
        t = self._managed.tensor
        t.data = ctypes.addressof(self.values)
        t.device_type, t.device_id, t.ndim = 1, 0, len(shape)
        t.code, t.bits, t.lanes, t.byte_offset = 2, 32, 1, 0
        t.shape = ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64))
        if self._strides is not None:
            t.strides = ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64))
        for name, value in fields.items():
            setattr(t, name, value)
        self._name = b"dltensor" if legacy else b"dltensor_versioned"
        self._reuse = reuse
        self.last: Any = None

    def _delete(self, _managed: int) -> None:
        self.deleted += 1

    def __dlpack__(self, **_kwargs: Any) -> Any:
        if self.last is None or not self._reuse:
            self.last = _PyCapsule_New(ctypes.addressof(self._managed), self._name, None)
        return self.last
