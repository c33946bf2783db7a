"""Weights that `torch.save` wrote: the tokens of the same weights as safetensors, and no line of a stranger's code."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import pickletools
import random
import resource
import shutil
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from modelzoo import Pair, read_weights
from specrs import LLM, SamplingParams
from specrs.models import HOST, Checkpoint, ModelFileError, weight_bytes
from specrs.models import pickled as pickled_module
from specrs.models.weight_files import open_weights

PICKLED = "pytorch_model.bin"


def pickled(source: Path, directory: Path, shards: int = 1, archive: bool = True) -> Path:
    """A copy of a model's directory with its weights as `torch.save` writes them; archive: torch's since 1.6."""
    shutil.copytree(source, directory)
    weights = read_weights(directory)
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    names = sorted(weights)
    weight_map = {}
    for i in range(shards):
        file = PICKLED if shards == 1 else f"pytorch_model-{i + 1:05}-of-{shards:05}.bin"
        held = OrderedDict((name, weights[name]) for name in names[i::shards])
        torch.save(held, directory / file, _use_new_zipfile_serialization=archive)
        weight_map.update(dict.fromkeys(held, file))
    if shards > 1:
        (directory / f"{PICKLED}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


@pytest.mark.parametrize(("shards", "archive"), [(1, True), (3, True), (1, False)])
def test_tokens_are_those_of_the_same_weights_as_safetensors(
    tiny: Pair, tmp_path: Path, shards: int, archive: bool
) -> None:
    target = pickled(tiny.target, tmp_path / "target", shards, archive)
    head = pickled(tiny.draft, tmp_path / "head", archive=archive)
    params = [SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temperature=1.0, seed=3)]
    with LLM(tiny.target, tiny.draft, tree=(2, 2, 4)) as llm:
        want = llm.generate([[1, 2], [7, 8, 9]], params)
    with LLM(target, head, tree=(2, 2, 4)) as llm:
        got = llm.generate([[1, 2], [7, 8, 9]], params)
    assert [(out.token_ids, out.rounds) for out in got] == [(out.token_ids, out.rounds) for out in want]
    on_disk = sum(file.stat().st_size for file in target.glob("*.bin"))
    assert weight_bytes(target, head, None) == on_disk + (head / PICKLED).stat().st_size


def test_every_tensor_comes_back_as_stored(tmp_path: Path) -> None:
    """In what order its values lie in the file, and whether tensors share them, is the file's affair."""
    base = torch.arange(24, dtype=torch.float32)
    tensors = {
        "turned": base.view(4, 6).t(), "part": base[3:9], "again": base[3:9], "half": base.to(torch.float16),
        "map": torch.tensor([0, 3, 5]), "none": torch.empty(0, 4), "grown": torch.nn.Parameter(base.bfloat16()),
    }  # fmt: skip
    torch.save(tensors, tmp_path / PICKLED)
    weights = Checkpoint(tmp_path)
    assert set(weights) == set(tensors)
    for name, tensor in tensors.items():
        got = weights.load(name)
        assert torch.equal(got, tensor) and got.dtype == tensor.dtype and got.is_contiguous()
        assert weights.shape(name) == tuple(tensor.shape)
    assert [weights.dtype(name) for name in ("half", "map", "grown")] == ["F16", "I64", "BF16"]
    assert weights.same("part", "again") and not weights.same("part", "half")
    assert weights.path("nothing") == tmp_path / PICKLED


def test_safetensors_stand_before_what_torch_saved(tiny: Pair, tmp_path: Path) -> None:
    directory = tmp_path / "both"
    shutil.copytree(tiny.target, directory)
    (directory / PICKLED).write_bytes(b"not read")
    (directory / f"{PICKLED}.index.json").write_text("not read")
    with LLM(directory) as llm:
        assert llm.vocab_size > 0


class Runs:
    """An object whose pickle runs code wherever it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


class Call:
    """A pickle's call of something, with arguments."""

    def __init__(self, *made: Any) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return self.made[0], self.made[1:]


def old_layout(tensors: bytes, keys: bytes) -> bytes:
    """The five pickles of an older file, the last two by hand, and room for records."""
    heads = [pickle.dumps(one, 2) for one in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    return b"".join(heads) + tensors + keys + bytes(64)


def with_attributes(**attributes: Any) -> OrderedDict[str, Any]:
    made = OrderedDict(a=torch.ones(3))
    vars(made).update(attributes)
    return made


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1].expand(1 << 40)


ONE = torch.ones(3)
SAVED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "code": (lambda at: {"a": Runs(at / "ran")}, r"asks for (posix|nt)\.mkdir, which is no tensor"),
    "code behind a tensor": (lambda at: {"a": ONE, "b": Runs(at / "ran")}, r"asks for (posix|nt)\.mkdir"),
    "a class": (lambda at: {"a": ONE, "args": argparse.Namespace(a=1)}, r"a pickle with NEWOBJ|asks for .*Namespace"),
    "a module": (lambda at: torch.nn.Linear(2, 2), r"asks for |NEWOBJ|storage that is none"),
    "memory that nobody wrote": (lambda at: {"a": Call(torch.Tensor, 64, 64)}, r"asks for torch(\._C)?\.\w*Tensor"),
    "a tensor": (lambda at: ONE, "holds a tensor: must map names to tensors"),
    "a list": (lambda at: [ONE], "holds a list: must map"),
    "a dictionary within": (lambda at: {"model": {"a": ONE}}, "model: a dict: must be a tensor"),
    "a number": (lambda at: {"step": 7}, "step: a int: must be a tensor"),
    "a tensor without a name": (lambda at: {7: ONE}, "a int as a name: must be a text"),
    "a tensor as a name": (lambda at: {ONE: ONE}, "a tensor as a name: must be a text"),
    "more values than bytes": (lambda at: {"a": wide(ONE)}, r"a: shape \[1099511627776\] with strides \[0\] from 0"),
    "a negative bit": (lambda at: {"a": torch._neg_view(ONE)}, "negative or conjugate bit"),
    "a conjugate bit": (lambda at: {"a": torch.ones(3, dtype=torch.cfloat).conj()}, "ComplexFloatStorage are not"),
    "float8": (lambda at: {"a": ONE.to(torch.float8_e4m3fn)}, r"asks for|are not read"),
    "a sparse tensor": (lambda at: {"a": torch.eye(3).to_sparse()}, "asks for torch.serialization._get_layout"),
    "a meta tensor": (lambda at: {"a": torch.ones(3, device="meta")}, "asks for .*meta"),
    "a name of two lines": (lambda at: {"a\n\x1b[1mb" * 99: 3}, r"tensor a\\n\\x1b\[1mba.*\.\.\.: a int"),
}  # fmt: skip


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("what", SAVED)
def test_what_is_no_mapping_of_tensors_is_refused_and_not_run(tmp_path: Path, what: str, archive: bool) -> None:
    make, message = SAVED[what]
    torch.save(make(tmp_path), tmp_path / PICKLED, _use_new_zipfile_serialization=archive)
    with pytest.raises(ModelFileError, match=message) as caught:
        Checkpoint(tmp_path)
    assert caught.value.path == tmp_path / PICKLED and not (tmp_path / "ran").exists()
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("archive", [True, False])
def test_attributes_of_what_is_read_are_not(tmp_path: Path, archive: bool) -> None:
    """A state's dictionary has versions beside its items; a stranger's may have anything there."""
    for attributes in ({"keys": 5, "__class__": 3}, {"_metadata": {"": {"version": 1}}}):
        torch.save(with_attributes(**attributes), tmp_path / PICKLED, _use_new_zipfile_serialization=archive)
        assert torch.equal(Checkpoint(tmp_path).load("a"), ONE)
    odd = torch.ones(3)
    odd.detach = 5  # type: ignore[assignment, method-assign]
    torch.save({"a": odd}, tmp_path / PICKLED, _use_new_zipfile_serialization=archive)
    with pytest.raises(ModelFileError, match=r"asks for torch\._tensor\._rebuild_from_type_v2"):
        Checkpoint(tmp_path)


def edited(file: Path, edit: Callable[[str, bytes], bytes], compressed: str = "") -> None:
    """An archive again, record by record: without torch's alignment."""
    with zipfile.ZipFile(file) as old:
        records = [(info.filename, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(file, "w") as new:
        for name, held in records:
            kind = zipfile.ZIP_DEFLATED if compressed and name.endswith(compressed) else zipfile.ZIP_STORED
            new.writestr(name, edit(name, held), kind)


def test_an_archive_that_another_program_wrote_reads_alike(tmp_path: Path) -> None:
    tensors = {name: torch.randn(7, 5).to(dtype) for name, dtype in (("a", torch.float32), ("b", torch.bfloat16))}
    tensors["t2d"] = torch.rand(9) < 0.5
    torch.save(tensors, tmp_path / PICKLED)
    for shift in range(8):
        edited(tmp_path / PICKLED, lambda name, held: held + b" " if name.endswith("/version") else held)
        weights = Checkpoint(tmp_path)
        for name, tensor in tensors.items():
            got = weights.load(name)
            assert torch.equal(got, tensor) and got.data_ptr() % got.element_size() == 0, shift


def test_records_are_held_against_what_the_pickle_says(tmp_path: Path) -> None:
    def refused(message: str, edit: Callable[[str, bytes], bytes], compressed: str = "") -> None:
        torch.save({"a": torch.ones(8), "b": torch.zeros(8)}, tmp_path / PICKLED)
        edited(tmp_path / PICKLED, edit, compressed)
        with pytest.raises(ModelFileError, match=message):
            Checkpoint(tmp_path)

    def same(name: str, held: bytes) -> bytes:
        return held

    first = "/data/0"
    refused("tensor a: its record has 16 bytes: must be 8 values of F32", lambda n, h: h[:16] if first in n else h)
    refused("tensor a: its record has 64 bytes: must be 8", lambda n, h: h + h if first in n else h)
    refused("record .*/data/0 is compressed", same, first)
    refused("record .*/data.pkl is compressed", same, "data.pkl")
    refused("big-endian", lambda n, h: b"big" if n.endswith("byteorder") else h)
    torch.save({"a": torch.ones(8)}, tmp_path / PICKLED)
    with zipfile.ZipFile(tmp_path / PICKLED) as old:
        records = {info.filename: old.read(info) for info in old.infolist()}
    root = next(iter(records)).split("/")[0]
    for gone, message in (("data/0", "tensor a: its record 0 is missing"), ("data.pkl", "something else")):
        with zipfile.ZipFile(tmp_path / PICKLED, "w") as new:
            for other, held in records.items():
                if other != f"{root}/{gone}":
                    new.writestr(other, held)
        with pytest.raises(ModelFileError, match=message):
            Checkpoint(tmp_path)
    with zipfile.ZipFile(tmp_path / PICKLED, "w") as new:
        for other, held in {**records, f"{root}/constants.pkl": b""}.items():
            new.writestr(other, held)
    with pytest.raises(ModelFileError, match="TorchScript perhaps"):
        Checkpoint(tmp_path)


def test_an_older_file_is_held_against_its_records(tmp_path: Path) -> None:
    def refused(message: str, old: bytes, new: bytes) -> None:
        torch.save({"a": torch.ones(8)}, tmp_path / PICKLED, _use_new_zipfile_serialization=False)
        held = (tmp_path / PICKLED).read_bytes()
        assert held.count(old) == 1
        (tmp_path / PICKLED).write_bytes(held.replace(old, new))
        with pytest.raises(ModelFileError, match=message):
            Checkpoint(tmp_path)

    refused("ends at byte", b"." + struct.pack("<q", 8), b"." + struct.pack("<q", 9))
    refused("of -1 values", b"." + struct.pack("<q", 8), b"." + struct.pack("<q", -1))
    refused("its record has 16 bytes", b"." + struct.pack("<q", 8), b"." + struct.pack("<q", 4))
    refused("big-endian", b"little_endianq\x02\x88", b"little_endianq\x02\x89")
    refused("does not begin as torch.save", b"M\xe9\x03.\x80\x02}", b"M\xe8\x03.\x80\x02}")


def op(name: str, arg: bytes = b"") -> bytes:
    [one] = [one for one in pickletools.opcodes if one.name == name]
    return one.code.encode("latin-1") + arg


BY_HAND = [
    (b".", "takes more than it has"), (op("MARK") + op("TUPLE1") + b".", "takes more than it has"),
    (op("NONE") + op("MARK") + op("POP") + b".", "a pickle with POP"), (op("BINGET", b"\x07") + b".", "KeyError: 7"),
    (op("EMPTY_LIST") + op("NONE") * 2 + op("SETITEM") + b".", "sets items of a list"),
    (op("EMPTY_DICT") + op("NONE") + op("APPEND") + b".", "appends to a dict"), (op("TUPLE") + b".", "IndexError"),
    (op("EMPTY_DICT") + op("EMPTY_LIST") + op("NONE") + op("SETITEM") + b".", "a list as a name"),
    (op("EMPTY_DICT") + op("MARK") + op("NONE") + op("SETITEMS") + b".", "ValueError"),
    (op("GLOBAL", b"torch\nFloatStorage\n") + b".", "holds torch.FloatStorage"), (op("NONE"), "ValueError: pickle"),
    (op("NONE") + op("EMPTY_TUPLE") + op("REDUCE") + b".", "calls a NoneType"),
    (op("GLOBAL", b"builtins\neval\n") + op("EMPTY_TUPLE") + op("REDUCE") + b".", "asks for builtins.eval"),
    (op("GLOBAL", b"a\nb\n") + op("EMPTY_TUPLE") + op("NEWOBJ") + b".", "NEWOBJ"),
    (op("INST", b"os\nsystem\n") + b".", "a pickle with INST"), (op("EXT1", b"\x01") + b".", "a pickle with EXT1"),
    (op("EMPTY_TUPLE") + op("BINPERSID") + b".", "a storage that is none"), (b"\x80", "ValueError"),
    (op("LONG_BINPUT", b"\xff\xff\xff\x7f") + b".", "IndexError"), (op("NONE") * 120, "more than 99 operations"),
    (b"}q\0" + op("SHORT_BINUNICODE", b"\1a") + b"h\0s.", "a: a dict"), (b"}}b.", "a: missing"),
    (b"}N" + b"\x85" * 98 + b"Ns.", "more than 99"), (b"}N" + b"\x85" * 90 + b"Ns.", "a tuple as a name"),
    (op("SHORT_BINUNICODE", b"\1a") + b")\x93.", "a name that is no text"),
]  # fmt: skip


@pytest.mark.parametrize(("pickled", "message"), BY_HAND)
def test_pickles_made_by_hand_say_why(
    tmp_path: Path, pickled: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickled_module, "_MOST", 99)
    with zipfile.ZipFile(tmp_path / PICKLED, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
    with pytest.raises(ModelFileError, match=message):
        Checkpoint(tmp_path).load("a")


DEEP = b"\x85" * 300_000
DOUBLED = b"X\1\0\0\0aq\0" + b"h\0h\0\x86q\0" * 60


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (old_layout(b"}.", b"])" + DEEP + b"a."), "keys that are no texts"),
        (old_layout(b"}.", b"]" + op("LONG4", struct.pack("<i", 3000) + b"\x7f" * 3000) + b"a."), "that are no texts"),
        (old_layout(b"}.", b"]X\1\0\0\0aa."), "KeyError: 'a'"), (old_layout(b"}.", b"}."), "that are no texts"),
        (old_layout(b"})" + DEEP + b"Ns.", b"]."), "a tuple as a name"),
        (old_layout(b"}" + DOUBLED + b"h\0h\0\x93Ns.", b"]."), "a name that is no text"),
        (old_layout(b"}" + DOUBLED + b"}h\0Ns0.", b"]."), "a pickle with POP"),
    ],
)  # fmt: skip
def test_a_small_file_takes_neither_long_nor_much_nor_the_process(tmp_path: Path, held: bytes, message: str) -> None:
    (tmp_path / PICKLED).write_bytes(held)
    with pytest.raises(ModelFileError, match=message):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1,) * 65, "shape and strides are none"), ((2**47, 2**47, 0), "no tensor has so many values"),
        ((2**62,), "are no sizes"), ((-1,), "are no sizes"), ((1.5,), "are no sizes"),
        (3, "shape and strides are none"), ((2**48,), "are no sizes"), ((2**47, 2), "no tensor has so many values"),
        ((9,) * 64, "no tensor has so many values"), ((3, 2**40), "its record has 3 values"),
        ((2**61, 0), "are no sizes"), ((0, 2**47), None),
    ],
)  # fmt: skip
def test_shapes_are_those_of_tensors(tmp_path: Path, archive: bool, shape: Any, message: str | None) -> None:
    class Described(torch.Tensor):
        def __reduce_ex__(self, protocol: Any) -> Any:
            strides = (1,) * len(shape) if isinstance(shape, tuple) else shape
            return torch._utils._rebuild_tensor_v2, (ONE.storage(), 0, shape, strides, False, OrderedDict())

    torch.save({"a": torch.ones(1).as_subclass(Described)}, tmp_path / PICKLED, _use_new_zipfile_serialization=archive)
    if message is None:
        assert Checkpoint(tmp_path).load("a").shape == shape
        return
    with pytest.raises(ModelFileError, match=message) as caught:
        Checkpoint(tmp_path)
    assert len(str(caught.value)) < 600


def test_values_are_those_that_torch_loads(tmp_path: Path) -> None:
    """Values agree for every type, layout and place in a storage; for rows alone too, which `same` reads."""
    rng, file = torch.Generator().manual_seed(1), tmp_path / PICKLED
    types = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16,
             torch.int8, torch.uint8, torch.bool)  # fmt: skip
    for archive in (True, False):
        for pad in range(3):
            made: dict[str, torch.Tensor] = {"p" * (pad + 1): torch.ones(pad + 1, dtype=torch.bool)}
            for dtype in types:
                base = (torch.rand(6, 7, generator=rng) * 9 - 4).to(dtype)
                made |= {f"{dtype}{i}": view for i, view in enumerate((
                    base, base[1:], base.t(), base[::2, 1::3], base[0, 0], base[:0], base[2:3].expand(4, 7)[:1],
                    base.view(2, 21),
                ))}  # fmt: skip
            torch.save(made, file, _use_new_zipfile_serialization=archive)
            want, weights = torch.load(file, weights_only=True), Checkpoint(tmp_path)
            for name, tensor in want.items():
                got = weights.load(name)
                assert torch.equal(got, tensor) and got.dtype == tensor.dtype, name
                if tensor.dim():
                    opened = open_weights(file, HOST.device).get_slice(name)
                    assert torch.equal(opened[1:3], tensor[1:3])
                    assert weights.same(name, name) == bool(not tensor.is_floating_point() or not tensor.isnan().any())


def test_files_with_any_byte_changed_load_or_say_why(tmp_path: Path) -> None:
    """A file that loads has the shapes and types that it says, within the file."""
    rng, file = random.Random(5), tmp_path / PICKLED
    for archive in (True, False):
        torch.save(
            {"a": torch.ones(6, 4).t(), "b": torch.zeros(5).half()}, file, _use_new_zipfile_serialization=archive
        )
        whole = file.read_bytes()
        refused = 0
        for _ in range(1500):
            held = bytearray(whole)
            for _ in range(rng.choice((1, 1, 2, 8))):
                held[rng.randrange(len(held))] = rng.randrange(256)
            file.write_bytes(held)
            try:
                weights = Checkpoint(tmp_path)
                for name in weights:
                    assert weights.load(name).shape == weights.shape(name)
            except ModelFileError as error:
                refused += 1
                assert str(error).isprintable()
        assert refused > 300


@pytest.mark.parametrize("archive", [True, False])
def test_a_file_cut_anywhere_is_named(tmp_path: Path, archive: bool) -> None:
    file = tmp_path / PICKLED
    torch.save({"a": torch.ones(6, 4)}, file, _use_new_zipfile_serialization=archive)
    whole = file.read_bytes()
    for keep in range(0, len(whole), 7):
        file.write_bytes(whole[:keep])
        with pytest.raises(ModelFileError) as caught:
            Checkpoint(tmp_path)
        assert caught.value.path == file and str(caught.value).isprintable()


def test_pointers_and_shards_that_are_not_there_are_named(tiny: Pair, tmp_path: Path) -> None:
    (tmp_path / PICKLED).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n")
    with pytest.raises(ModelFileError, match="a Git LFS pointer"):
        Checkpoint(tmp_path)
    directory = pickled(tiny.target, tmp_path / "shards", 2)
    index = directory / f"{PICKLED}.index.json"
    assert Checkpoint(directory).path("nothing") == index
    (directory / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(ModelFileError, match=r"pytorch_model-00002-of-00002.bin: no such file"):
        LLM(directory)
    for held, message in (
        ('{"weight_map": {"a": "../x.bin"}}', "outside the model directory"), ("[]", "not readable as an index"),
        ('{"weight_map": {"a": "' + "x" * 300 + '.bin"}}', "or no file's name"),
        ('{"weight_map": {"a": "x.safetensors"}}', r"must be a \*\.bin"), ("[" * 100_000, "RecursionError"),
        ('{"weight_map": {"a": ' + "9" * 5000 + "}}", "not readable as an index"),
        ('{"weight_map": {"a": "x\\n.bin"}}', r"'x\\n\.bin' is outside"),
    ):  # fmt: skip
        index.write_text(held)
        with pytest.raises(ModelFileError, match=message) as caught:
            LLM(directory)
        assert str(caught.value).isprintable()


def test_a_safetensors_index_names_no_pickle(tmp_path: Path) -> None:
    torch.save({"a": ONE}, tmp_path / "m.bin")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "m.bin"}}')
    with pytest.raises(ModelFileError, match=r"shard 'm.bin': must be a \*\.safetensors"):
        Checkpoint(tmp_path)


def test_a_file_that_changes_between_is_named(tmp_path: Path) -> None:
    for write, suffix in ((torch.save, "pytorch_model.bin"), (save_file, "model.safetensors")):
        for later, message in (({"b": ONE}, "not readable"), ({"a": torch.ones(4)}, "changed while it was read")):
            write({"a": ONE}, tmp_path / suffix)
            weights = Checkpoint(tmp_path)
            write(later, tmp_path / suffix)
            with pytest.raises(ModelFileError, match=message):
                weights.load("a")
            (tmp_path / suffix).unlink()


@pytest.mark.parametrize("archive", [True, False])
def test_what_is_read_is_mapped(tmp_path: Path, archive: bool) -> None:
    """Memory stays near what is kept, whatever the file's layout."""
    torch.save({f"t{i}": torch.full((1 << 20,), float(i)) for i in range(64)}, tmp_path / PICKLED,
               _use_new_zipfile_serialization=archive)  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    weights = Checkpoint(tmp_path)
    assert weights.shape("t63") == (1 << 20,)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB, of 256 MiB of values
    assert weights.load("t63")[5] == 63


def test_sizes_are_known_of_types_that_models_do_not_have(tmp_path: Path) -> None:
    """Buffers that are left out may have any: `specrs doctor` counts them."""
    made = {"model.layers.0.self_attn.bias": torch.ones(3, dtype=torch.uint8), "x": torch.ones(2, dtype=torch.float64)}
    for write, name in ((torch.save, PICKLED), (save_file, "model.safetensors")):
        write(made, tmp_path / name)
        weights = Checkpoint(tmp_path)
        assert weights.nbytes == 3 + 16 and [weights.dtype(each) for each in made] == ["U8", "F64"]
        assert torch.equal(weights.load("x"), made["x"])
