"""Make the folder from which `engine.py` beside this file runs sglang 0.5.14 on a machine without a network.

Nothing is installed. Wheels of PyPI for CPython 3.12 are unpacked: sglang without its image models, its tests and the
models that are not Llama; sglang-kernel for Hopper without its build of FlashAttention-3 (1.76 GB), in whose place
vLLM's stands, which `fa3.py` calls; and the packages that sglang imports and that a machine with torch 2.11, triton and
transformers lacks. `EDITS` lists every change to sglang's own text. It takes 1.3 GB of disk, and a minute beside the
downloads. ::

    python benches/gpu/peer_sglang/bundle.py FOLDER [--wheels FOLDER] [--pack FILE.tar.xz]

The folder has 250 MB, packed 34 MB.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

SGLANG, KERNEL, VLLM = "sglang==0.5.14", "sglang-kernel==0.4.4", "vllm==0.24.0"
FA3 = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
NEEDS = (
    "annotated-types", "apache-tvm-ffi==0.1.9", "cffi", "cloudpickle", "compressed-tensors", "dill", "diskcache",
    "distro", "fastapi", "gguf", "interegular", "jiter", "jsonschema", "jsonschema-specifications", "kernels==0.14.1",
    "lark", "loguru", "msgspec", "openai==2.6.1", "orjson", "partial-json-parser", "pybase64",
    "pydantic==2.14.4", "pydantic-core==2.50.5", "python-multipart", "pyzmq", "referencing", "rpds-py", "setproctitle",
    "sniffio", "starlette", "typing-inspection", "uvicorn",
)  # fmt: skip
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (39, 38, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)),
    "manylinux2014_x86_64", "manylinux1_x86_64",
)  # fmt: skip
MODELS = {"__init__.py", "llama.py", "llama_eagle3.py", "registry.py", "utils.py"}
HERE = Path(__file__).resolve().parent

SCHEDULER_END = "        self.metrics_reporter.update_device_timer()\n"
NEXT_METHOD = "\n    def maybe_send_health_check_signal(self):\n"
TRACE = """
        if not hasattr(self, "_trace"):
            import os
            import time

            self._trace, self._clock = open(os.environ["SGLANG_TRACE"], "a", buffering=1), time.perf_counter
        print(
            self._clock(), int(batch.forward_mode), batch.batch_size(), result.num_correct_drafts,
            int(result.can_run_cuda_graph), file=self._trace,
        )
"""
# Each text is there once, and is replaced: file, old, new.
EDITS = (
    (  # a line at the end of each step: seconds, mode, requests, accepted drafts, 1 if a graph ran
        "sglang/srt/managers/scheduler.py",
        SCHEDULER_END + NEXT_METHOD,
        SCHEDULER_END + TRACE + NEXT_METHOD,
    ),
    (  # sampling functions of FlashInfer, which greedy requests do not call
        "sglang/srt/layers/sampler.py",
        "    from flashinfer.sampling import (\n        min_p_sampling_from_probs,\n"
        "        top_k_top_p_sampling_from_probs,\n    )\n",
        "",
    ),
    (  # a head without a checkpoint has no table from its vocabulary to the target's
        "sglang/srt/models/llama_eagle3.py",
        "        self.hot_token_id = None\n",
        "        self.hot_token_id = torch.arange(self.config.draft_vocab_size)\n",
    ),
    (  # transformers knows this model by now
        "sglang/srt/configs/qwen3_asr.py",
        'AutoConfig.register("qwen3_asr", Qwen3ASRConfig)\n',
        'AutoConfig.register("qwen3_asr", Qwen3ASRConfig, exist_ok=True)\n',
    ),
)
KERNEL_CALLS = (("torch.ops.sgl_kernel.fwd.default(", "flash_ops.fwd("),
                ("torch.ops.sgl_kernel.get_scheduler_metadata(", "flash_ops.get_scheduler_metadata("))  # fmt: skip


def download(requirement: str, folder: Path) -> Path:
    """The wheel of a requirement for CPython 3.12, from the package index unless the folder has it."""
    name = requirement.partition("==")[0].replace("-", "_")
    version = requirement.partition("==")[2] or "*"
    for attempt in range(2):
        found = sorted(folder.glob(f"{name}-{version}-*.whl"))
        if found:
            return found[-1]
        if attempt == 0:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
                       "--python-version", "3.12", "--implementation", "cp"]  # fmt: skip
            command += [f"--platform={platform}" for platform in PLATFORMS]
            subprocess.run([*command, "--dest", str(folder), requirement], check=True)
    raise FileNotFoundError(f"no wheel of {requirement} in {folder}")


def unpack(wheel: Path, to: Path, keep: Callable[[str], bool] = lambda name: True) -> None:
    """Unpack what a wheel installs as packages; its scripts and data stay."""
    with zipfile.ZipFile(wheel) as z:
        z.extractall(to, [n for n in z.namelist() if ".data/" not in n and keep(n)])


def of_sglang(name: str) -> bool:
    """True for the files of sglang's wheel that a run of Llama reads."""
    parts = name.split("/")
    if parts[:2] in (["sglang", "multimodal_gen"], ["sglang", "test"], ["sglang", "benchmark"], ["sglang", "eval"]):
        return False
    if parts[:3] == ["sglang", "srt", "models"] and len(parts) == 4:
        return parts[3] in MODELS
    return parts[0].startswith("sglang") and not name.endswith(".so")


def of_kernel(name: str) -> bool:
    """True for the files of sglang-kernel's wheel that a Hopper runs, but for FlashAttention-3."""
    return not name.startswith(("sgl_kernel/flash_ops", "sgl_kernel/sm100/", "sgl_kernel/flashmla"))


def replace_once(text: str, old: str, new: str) -> str:
    """Replace a text that stands there once.

    Raises:
        ValueError: it does not stand there once.
    """
    if (count := text.count(old)) != 1:
        raise ValueError(f"{old!r} stands there {count} times, not once")
    return text.replace(old, new)


def edit(site: Path) -> None:
    """Apply every change to the unpacked packages, and add the files of this folder."""
    for name, old, new in EDITS:
        path = site / name
        path.write_text(replace_once(path.read_text(), old, new))
    path = site / "sgl_kernel" / "flash_attn.py"
    text = path.read_text()
    for old, new in KERNEL_CALLS:
        if old not in text:
            raise ValueError(f"{old!r} is not in {path.name}")
        text = text.replace(old, new)
    path.write_text(text)
    shutil.copy(HERE / "fa3.py", site / "sgl_kernel" / "flash_ops.py")
    shutil.copy(HERE / "stand_ins.py", site / "sitecustomize.py")  # every process imports it first


def make(folder: Path, wheels: Path) -> None:
    """Fill the folder."""
    site = folder / "site"
    site.mkdir(parents=True)
    for requirement in NEEDS:
        unpack(download(requirement, wheels), site)
    unpack(download(SGLANG, wheels), site, of_sglang)
    unpack(download(KERNEL, wheels), site, of_kernel)
    with zipfile.ZipFile(download(VLLM, wheels)) as z:
        (site / "sgl_kernel" / Path(FA3).name).write_bytes(z.read(FA3))
    edit(site)


def main() -> None:
    """Make the folder, and pack it if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheels", type=Path, help="where wheels are and stay")
    parser.add_argument("--pack", type=Path, help="a .tar.xz of the folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as own:
        wheels = args.wheels or Path(own)
        wheels.mkdir(parents=True, exist_ok=True)
        make(args.folder, wheels)
    if args.pack:
        subprocess.run(["tar", "-C", str(args.folder), "-cJf", str(args.pack), "site"], check=True)


if __name__ == "__main__":
    main()
