"""Fill ``.peers`` (git-ignored, or ``$PEERS_DIR``) with what ``gpu/formats.py`` needs on a machine without a network.

Parts of the peers' wheels, and four shared objects built from them: FlashInfer's modules for batch prefill, batch
decode and packing (bf16, head 128, sm_90a) and sglang's tree kernel. No GPU is needed; nvcc 13, ninja and a C++
compiler are, and a Python with torch and apache-tvm-ffi 0.1.11. About 5 minutes. ::

    PYTHONPATH=benches python benches/gpu/formats_bundle.py --cuda-home DIR --wheels DIR

The GPU machine has CPython 3.12; everything else there comes with its torch (2.11) and triton.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from common import peers_dir, wheel
from peer_sources import FLASHINFER, SGLANG, SGLANG_FILES, TVM_FFI
from peer_vllm import FILE, VLLM

TREE = """#include <speculative/tree.cuh>
#include <tvm/ffi/function.h>
TVM_FFI_DLL_EXPORT_TYPED_FUNC(build_tree_kernel_efficient, sglang::build_tree_kernel_efficient);
"""
MODULES = """
import torch
from flashinfer.jit.attention import modules
from flashinfer.jit.quantization import gen_quantization_module
half = torch.bfloat16
shape = (half, half, half, torch.int32, 128, 128, 0, False, False)
for spec in (
    modules._gen_batch_prefill_primary_module("fa2", *shape, False),
    modules.gen_batch_decode_module(*shape),
    gen_quantization_module(),
):
    spec.write_ninja()
    print(spec.ninja_path)
"""


def pack(name: str, root: Path, files: list[Path]) -> Path:
    """A zip that `common.wheel` takes for the wheel ``name``, holding these files alone."""
    path = peers_dir() / "wheels" / f"{name}-subset.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for file in sorted(set(files)):
            z.write(file, file.relative_to(root))
    return path


def main() -> None:
    """Build everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda-home", type=Path, default=Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")))
    parser.add_argument("--wheels", type=Path, required=True, help="a PEERS_DIR with the whole wheels")
    args = parser.parse_args()
    import tvm_ffi

    bundle, os.environ["PEERS_DIR"] = peers_dir(), str(args.wheels)
    whole = {
        name: wheel(name, version)
        for name, version in (("sglang", SGLANG), ("flashinfer-python", FLASHINFER), ("vllm", VLLM))
    }
    os.environ["PEERS_DIR"] = str(bundle)
    work = Path(tempfile.mkdtemp())
    roots = {name: work / name for name in whole}
    for name, path in whole.items():
        with zipfile.ZipFile(path) as z:
            keep = [m for m in z.namelist() if name != "vllm" or m == FILE]
            z.extractall(roots[name], keep)

    root = roots["sglang"]
    pack(f"sglang-{SGLANG}", root, [f for pattern in SGLANG_FILES for f in root.glob(pattern)])
    pack(f"vllm-{VLLM}", roots["vllm"], [roots["vllm"] / FILE])
    source, ffi, jit = work / "tree.cu", Path(tvm_ffi.__file__).parent, root / "sglang/kernels/jit"
    source.write_text(TREE)
    flags = [
        "-std=c++20",
        "-O3",
        "--expt-relaxed-constexpr",
        "-DSGL_CUDA_ARCH=900",
        "-arch=sm_90a",
        "-shared",
        "-Xcompiler",
        "-fPIC",
    ]
    paths = [f"-I{p}" for p in (jit / "csrc", jit / "include", ffi / "include")]
    libraries = [f"-L{ffi / 'lib'}", "-ltvm_ffi", f"-L{args.cuda_home / 'lib64'}", "-lcudart"]
    nvcc = args.cuda_home / "bin" / "nvcc"
    subprocess.run([nvcc, *flags, *paths, source, *libraries, "-o", bundle / "tree.so"], check=True)

    root = roots["flashinfer-python"]
    package = root / "flashinfer"
    (package / "__init__.py").write_text("from . import jit as jit\n")  # the whole one imports what is not there
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), *sys.path]),
        "FLASHINFER_WORKSPACE_BASE": str(work / "workspace"),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "CUDA_HOME": str(args.cuda_home),
        "PATH": f"{args.cuda_home / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    command = [sys.executable, "-c", MODULES]
    for line in subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.split():
        folder = Path(line).parent
        subprocess.run(["ninja", "-C", folder], env=env, check=True, stdout=subprocess.DEVNULL)
        target = package / "data" / "aot" / folder.name
        target.mkdir(parents=True)
        shutil.copy(folder / f"{folder.name}.so", target)
    code = package / "data" / "csrc"
    unused = {"data", "experimental", "moe_ep"}
    files = [f for f in package.rglob("*.py") if not unused & set(f.relative_to(package).parts)]
    files += [
        *code.glob("*.jinja"),
        *code.glob("batch_prefill*"),
        *code.glob("batch_decode*"),
        *package.glob("data/aot/*/*.so"),
    ]
    pack(f"flashinfer_python-{FLASHINFER}", root, files)

    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        "3.12",
    ]
    command += [f"--platform=manylinux_2_{n}_x86_64" for n in (24, 28)]
    subprocess.run([*command, "--dest", bundle / "wheels", f"apache-tvm-ffi=={TVM_FFI}"], check=True)
    shutil.rmtree(work)
    for path in sorted(f for f in bundle.rglob("*") if f.is_file()):
        print(f"{path.stat().st_size:>10} {path.relative_to(bundle)}")


if __name__ == "__main__":
    main()
