"""Tensors of files that `torch.save` wrote, without `torch.load`.

Such a file is a pickle that describes tensors, and records of their values. `_described` carries the pickle's few
operations out over plain values: a name in it is looked up in a table, and nothing is imported or called. Each tensor
is then held against the record that it names. `torch.load` would map records without that check (one that is short or
compressed gives other values), even where it is told to load weights alone, and hand out memory that no record fills.

Both layouts are those of torch/serialization.py: since torch 1.6 a ZIP archive (`NAME/data.pkl`, `NAME/data/KEY`),
before that four pickles (a magic number, the version, the writer's machine, the tensors), a fifth with the records'
keys, and the records, each behind its number of values.
"""

from __future__ import annotations

import io
import math
import mmap
import pickletools
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from specrs.models.errors import ModelFileError, one_line

_KINDS = {
    "torch FloatStorage": ("F32", torch.float32), "torch HalfStorage": ("F16", torch.float16),
    "torch BFloat16Storage": ("BF16", torch.bfloat16), "torch DoubleStorage": ("F64", torch.float64),
    "torch LongStorage": ("I64", torch.int64), "torch IntStorage": ("I32", torch.int32),
    "torch ShortStorage": ("I16", torch.int16), "torch CharStorage": ("I8", torch.int8),
    "torch ByteStorage": ("U8", torch.uint8), "torch BoolStorage": ("BOOL", torch.bool),
}  # fmt: skip
_REBUILD = ("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor")
_PARAMETER = ("torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state")
# torch asks for a buffer that could be written to; nobody writes to it, so no memory is set aside for copies of its
# pages.
_PRIVATE = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.11
_MAGIC = 0x1950A86A20F9469CFC6C
_ZIP = b"PK\x03\x04"  # mark before each record of an archive
_LOCAL = struct.Struct("<4s22xHH")  # header there: the lengths of a record's name and of the part that follows it
# Limits of a tensor: dimensions, as torch has it; size, so that no product in bytes overflows.
_DIMENSIONS, _LARGEST = 64, 1 << 48
_INERT = ("torch Size", "torch device")  # values that may stand beside tensors, and are not read
_VALUES = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
}  # fmt: skip
_LONGEST = 128 << 20  # bytes of an archive's pickle
_MOST = 2_000_000  # operations, of which a tensor takes 25


class _Refused(Exception):
    """A file is whole, but holds something that is not read."""


@dataclass(frozen=True, slots=True)
class _Name:
    """A name that a pickle would import."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class _Key:
    """A key of a dictionary that is no text, described by its kind. Values beside tensors may have any key, and hashing
    a stranger's value may not end."""

    what: str


@dataclass(frozen=True, slots=True)
class _Storage:
    kind: str
    key: str
    count: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor as the pickle describes it, unchecked."""

    storage: _Storage
    offset: Any
    shape: Any
    strides: Any


@dataclass(frozen=True)
class PickledSlice:
    """A tensor before it is read."""

    file: PickledFile
    name: str

    def get_shape(self) -> list[int]:
        return list(self.file.tensors[self.name].shape)

    def get_dtype(self) -> str:
        return _KINDS[self.file.tensors[self.name].storage.kind][0]

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return self.file.get_tensor(self.name, rows)


class PickledFile:
    """A file of tensors by name, open; the parts that are read are mapped.

    Raises:
        ModelFileError: the file is not whole, or has anything but tensors by name whose values it holds.
    """

    def __init__(self, path: Path) -> None:
        self.tensors: dict[str, _Tensor] = {}
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, _PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
                found, self._records = _archive(file) if self._map[:4] == _ZIP else _stream(self._map)
            if type(found) is not dict:
                raise _Refused(f"holds {_kind(found)}: must map names to tensors")
            for name, value in found.items():
                if type(name) is not str:
                    raise _Refused(f"{name.what} as a name: must be a text")
                if type(value) is not _Tensor:
                    raise ModelFileError(path, f"{_kind(value)}: must be a tensor", name)
                if (why := _wrong(value, self._records)) is not None:
                    raise ModelFileError(path, why, name)
                self.tensors[name] = value
        except (ModelFileError, MemoryError):
            raise
        except _Refused as refused:
            raise ModelFileError(path, str(refused)) from None
        except OSError as error:
            raise ModelFileError(path, f"not readable: {error.strerror}") from error
        except Exception as error:  # a stranger's bytes may lead to any error
            why = "not a whole file of torch.save (truncated, or a Git LFS pointer?)"
            raise ModelFileError(path, f"{why}: {_said(error)}") from error

    def keys(self) -> list[str]:
        return list(self.tensors)

    def get_slice(self, name: str) -> PickledSlice:
        return PickledSlice(self, name)

    def get_tensor(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Return a tensor over the file's own memory, where its values lie there as their type wants them; else a copy
        of them alone."""
        tensor = self.tensors[name]
        (at, size), dtype = self._records[tensor.storage.key], _KINDS[tensor.storage.kind][1]
        shape, strides, width = tensor.shape, tensor.strides, dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)[slice(None) if rows is None else rows]
        if at % width == 0 and dtype is not torch.bool:
            whole = torch.frombuffer(self._map, dtype=dtype, count=tensor.storage.count, offset=at)
            values = whole.as_strided(shape, strides, tensor.offset)
            return values if rows is None else values[rows]
        stored = torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=at)
        stored = stored.as_strided((*shape, width), (*(step * width for step in strides), 1), tensor.offset * width)
        stored = stored if rows is None else stored[rows]
        if dtype is torch.bool:
            return stored.squeeze(-1) != 0  # a byte may be any
        return stored.clone(memory_format=torch.contiguous_format).view(dtype).squeeze(-1)


def _archive(file: BinaryIO) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Return what an archive's pickle describes, and the places of its records: by key, the first byte and the number
    of bytes."""
    with zipfile.ZipFile(file) as archive:
        infos = {info.filename: info for info in archive.infolist()}
        for name, info in infos.items():
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise _Refused(f"record {one_line(name)} is compressed or encrypted: torch.save stores it as it is")
        [root] = [name for name in infos if name.count("/") == 1 and name.endswith("/data.pkl")] or [""]
        root = root.removesuffix("data.pkl")
        if not root or f"{root}constants.pkl" in infos:
            raise _Refused(
                "an archive of something else, TorchScript perhaps: must be of torch.save, of tensors by name"
            )
        if (order := infos.get(f"{root}byteorder")) is not None:
            file.seek(_begin(file, order))
            if file.read(min(order.file_size, 9)) != b"little":
                raise _Refused("values of a big-endian machine are not read")
        described = infos[f"{root}data.pkl"]
        if described.file_size > _LONGEST:
            raise _Refused(f"a pickle of {described.file_size} bytes: at most {_LONGEST} are read")
        file.seek(_begin(file, described))
        found = _described(io.BytesIO(file.read(described.file_size)), _MOST)
        records = {}
        for name, info in infos.items():
            if name.startswith(f"{root}data/"):
                records[name.removeprefix(f"{root}data/")] = (_begin(file, info), info.file_size)
    end = file.seek(0, 2)
    for key, (at, size) in records.items():
        if at + size > end:
            raise _Refused(f"record {one_line(key)} ends at byte {at + size} of {end}")
    return found, records


def _begin(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    file.seek(info.header_offset)
    mark, name, extra = _LOCAL.unpack(file.read(_LOCAL.size))
    if mark != _ZIP:
        raise _Refused(f"record {one_line(info.filename)} does not begin at byte {info.header_offset}")
    return info.header_offset + _LOCAL.size + int(name) + int(extra)


def _stream(file: mmap.mmap) -> tuple[Any, dict[str, tuple[int, int]]]:
    """The same of a file that is older than archives."""
    if _described(file, 99) != _MAGIC or _described(file, 99) != 1001:
        raise _Refused("does not begin as torch.save has it")
    machine = _described(file, 999)
    if type(machine) is not dict or machine.get("little_endian") is not True:
        raise _Refused("values of a big-endian machine are not read")
    storages: dict[str, _Storage] = {}
    found, keys = _described(file, _MOST, storages), _described(file, _MOST)
    if type(keys) is not list or any(type(key) is not str for key in keys):
        raise _Refused("a pickle of records' keys that are no texts")
    records: dict[str, tuple[int, int]] = {}
    end, size = file.tell(), len(file)
    for key in keys:
        [count] = struct.unpack_from("<q", file, end)
        width = _KINDS[storages[key].kind][1].itemsize
        records[key] = end + 8, count * width
        end += 8 + count * width
        if count < 0 or end > size:
            raise _Refused(f"record {one_line(key)} of {count} values ends at byte {end} of {size}")
    return found, records


def _wrong(tensor: _Tensor, records: dict[str, tuple[int, int]]) -> str | None:
    """Return the reason why a tensor is not what its record holds, or ``None`` where it is, so that `as_strided` stays
    within."""
    storage, shape, strides = tensor.storage, tensor.shape, tensor.strides
    if type(shape) is not tuple or type(strides) is not tuple or len(shape) != len(strides) or len(shape) > _DIMENSIONS:
        return "its shape and strides are none"
    if any(type(n) is not int or not 0 <= n < _LARGEST for n in (tensor.offset, *shape, *strides)):
        return "its shape, strides or offset are no sizes"
    if math.prod(n or 1 for n in shape) >= _LARGEST:
        return one_line(f"no tensor has so many values: shape {list(shape)}")
    if storage.key not in records:
        return f"its record {one_line(storage.key)} is missing"
    name, dtype = _KINDS[storage.kind]
    size = records[storage.key][1]
    if size != storage.count * dtype.itemsize:
        return f"its record has {size} bytes: must be {storage.count} values of {name}"
    values = math.prod(shape)
    last = tensor.offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if values and (last >= storage.count or values > storage.count):
        what = one_line(f"shape {list(shape)} with strides {list(strides)} from {tensor.offset}")
        return f"{what}: its record has {storage.count} values"
    return None


def _described(file: Any, most: int, storages: dict[str, _Storage] | None = None) -> Any:
    """Return the value of a pickle of plain values, dictionaries and tensors; the rest of the file is the next
    pickle's.

    storages: gets those that it names.

    Raises:
        _Refused: the pickle asks for anything else.
        Exception: the bytes are no pickle.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def popped(count: int) -> list[Any]:
        if count > len(stack) - (marks[-1] if marks else 0):
            raise _Refused("a pickle that takes more than it has")
        items = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return items

    def marked() -> list[Any]:
        at = marks.pop()
        items = stack[at:]
        del stack[at:]
        return items

    def put(pairs: list[Any]) -> None:
        if type(stack[-1]) is not dict:
            raise _Refused(f"sets items of {_kind(stack[-1])}")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            stack[-1][key if type(key) is str else _Key(_kind(key))] = value

    arg: Any
    for i, (op, arg, _) in enumerate(pickletools.genops(file)):
        if i >= most:
            raise _Refused(f"a pickle of more than {most} operations")
        match op.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return popped(1)[0]
            case "MARK":
                marks.append(len(stack))
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(op.name == "NEWTRUE")
            case name if name in _VALUES:
                stack.append(arg)
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(popped(int(op.name[-1]))))
            case "TUPLE":
                stack.append(tuple(marked()))
            case "SETITEM":
                put(popped(2))
            case "SETITEMS":
                put(marked())
            case "APPEND" | "APPENDS":
                items = popped(1) if op.name == "APPEND" else marked()
                if type(stack[-1]) is not list:
                    raise _Refused(f"appends to {_kind(stack[-1])}")
                stack[-1].extend(items)
            case "BINPUT" | "LONG_BINPUT":
                memo[arg] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[arg])
            case "GLOBAL":
                stack.append(_Name(arg))
            case "STACK_GLOBAL":
                parts = popped(2)
                if any(type(part) is not str for part in parts):
                    raise _Refused("a pickle with a name that is no text")
                stack.append(_Name(" ".join(parts)))
            case "BUILD":  # attributes: those of a state's dictionary are the versions of its modules
                popped(1)
            case "BINPERSID":
                storage = _storage(*popped(1))
                stack.append(storage)
                if storages is not None:
                    storages[storage.key] = storage
            case "REDUCE":
                stack.append(_made(*popped(2)))
            case _:
                raise _Refused(f"a pickle with {op.name}, which tensors do not need")
    raise _Refused("a pickle without an end")


def _storage(given: Any) -> _Storage:
    """Return the storage that `("storage", type, key, device, count)` names; older files have a view of another behind
    it, or None."""
    if type(given) is not tuple or len(given) not in (5, 6) or given[0] != "storage" or given[5:] not in ((), (None,)):
        raise _Refused("a pickle with a storage that is none")
    _, kind, key, _, count = given[:5]
    if type(kind) is not _Name or kind.name not in _KINDS:
        raise _Refused(f"values of {_kind(kind)} are not read")
    if type(key) is not str or type(count) is not int or not 0 <= count < _LARGEST:
        raise _Refused("a pickle with a storage that is none")
    return _Storage(kind.name, key, count)


def _made(what: Any, given: Any) -> Any:
    """Return the result of a call, one of the few that files of tensors have."""
    if type(what) is not _Name or type(given) is not tuple:
        raise _Refused(f"calls {_kind(what)}")
    if what.name == "collections OrderedDict" and given == ():
        return {}
    if what.name in _INERT:
        return None
    if what.name in _REBUILD and len(given) >= 4 and type(given[0]) is _Storage:
        if given[6:] and given[6]:
            raise _Refused("a tensor with torch's negative or conjugate bit is not read")
        return _Tensor(*given[:4])
    if what.name in _PARAMETER and given and type(given[0]) is _Tensor:
        return given[0]
    raise _Refused(f"asks for {_kind(what)}, which is no tensor by itself")


def _said(error: Exception) -> str:
    """Return the text of an error, which may be the repr of anything in the file."""
    try:
        return f"{type(error).__name__}: {one_line(str(error))}"
    except Exception:
        return type(error).__name__


def _kind(value: Any) -> str:
    """Return the name of a value's kind for people."""
    if type(value) is _Name:
        return one_line(value.name.replace(" ", "."))
    return {_Tensor: "a tensor", _Storage: "a storage"}.get(type(value), f"a {type(value).__name__}")
