"""libcuda in every state that a machine may have it: what `specrs.device` says of it, and that nothing else is said."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# A driver that does what is asked, with no device behind it; -D makes it another.
FAKE = r"""
#include <stdlib.h>
#include <string.h>
#ifndef VERSION
#define VERSION 13000
#endif
#ifndef INIT
#define INIT 0
#endif
#ifndef LOAD
#define LOAD 0
#endif
#ifndef MAJOR
#define MAJOR 9
#define MINOR 0
#endif
#ifndef GPUS
#define GPUS 1
#endif
typedef unsigned long long u64;
int cuInit(unsigned flags) { return INIT; }
#ifndef INIT_ALONE
int cuDriverGetVersion(int *v) { *v = VERSION; return 0; }
#ifndef OLD
static char context, module, function, memory[4096];
int cuGetErrorName(int code, const char **s) { *s = "CUDA_ERROR_OF_THE_FAKE"; return 0; }
int cuGetErrorString(int code, const char **s) { *s = "the fake says no"; return 0; }
int cuDeviceGetCount(int *n) { *n = GPUS; return 0; }
int cuDeviceGet(int *d, int ordinal) { *d = ordinal; return 0; }
int cuDeviceGetAttribute(int *v, int what, int d) { *v = what == 75 ? MAJOR : what == 76 ? MINOR : 132; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = &context; return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { return 0; }
static void *current;
int cuCtxGetCurrent(void **c) { *c = current; return 0; }
int cuCtxSetCurrent(void *c) { current = c; return 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) { return 0; }
int cuModuleLoadData(void **m, const void *image) { *m = &module; return LOAD; }
int cuModuleGetFunction(void **f, void *m, const char *name) { *f = &function; return 0; }
int cuModuleUnload(void *m) { return 0; }
int cuFuncSetAttribute(void *f, int what, int v) { return 0; }
int cuLaunchKernelEx() { return 0; }
int cuMemHostAlloc(void **p, size_t n, unsigned flags) { *p = aligned_alloc(4096, 4096); return 0; }
int cuMemHostGetDevicePointer_v2(u64 *d, void *p, unsigned flags) { *d = (u64)p; return 0; }
int cuMemFreeHost(void *p) { free(p); return 0; }
int cuMemAlloc_v2(u64 *d, size_t n) { *d = (u64)memory; return 0; }
int cuMemFree_v2(u64 d) { return 0; }
int cuDeviceGetName(char *s, int n, int d) { strcpy(s, "a fake"); return 0; }
int cuMemsetD8_v2(u64 d, unsigned char c, size_t n) { memset((void *)d, c, n); return 0; }
#endif
#endif
"""

CALLS = re.findall(
    r'"(\w+)"',
    (Path(__file__).parents[3] / "src/device/libcuda.rs").read_text().split("CALLS: &[&str] = &[")[1].split("]")[0],
)
NEEDED = len(CALLS)  # functions that are looked for before anything is called
# Functions that setting up does not call do nothing.
FAKE = FAKE.replace(
    "#endif\n#endif\n",
    "".join(f"int {name}() {{ return 0; }}\n" for name in CALLS if not re.search(rf"\b{name}\(", FAKE))
    + "#endif\n#endif\n",
)

SAY = """
import specrs
from specrs import device
print(device.cuda_available())
print(device.cuda_unavailable_reason())
calls = [lambda: device.init(0), lambda: device.check(0)]
if not device.cuda_available():
    calls += [device.init, device.check]  # with CUDA these ask torch, which has a driver layer of its own
for call in calls:
    try:
        print(call())
    except specrs.CudaError as e:
        print(e.kind, e)
"""


def says(folder: Path, source: str | None, *defines: str) -> list[str]:
    """The lines that a process prints which finds this library as libcuda."""
    library = folder / "libcuda.so.1"
    if source is not None:
        compiler = shutil.which("gcc")
        assert compiler, "gcc builds the kernels, and this library"
        command = [compiler, "-shared", "-fPIC", "-w", "-o", str(library), "-x", "c", "-", *defines]
        subprocess.run(command, input=source, text=True, check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", SAY], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def unavailable(lines: list[str]) -> str:
    """The reason, where every line is as it must be without CUDA."""
    available, reason, *errors = lines
    assert available == "False"
    assert len(errors) == 4
    for line in errors:
        assert line.startswith("CudaUnavailable ") and reason in line
    if reason.startswith("no CUDA kernels in this build"):
        pytest.skip(reason)  # the driver loads nothing then
    return reason


@pytest.mark.parametrize(
    ("source", "defines", "reason"),
    [
        (
            "int nothing;",
            (),
            rf"libcuda .* version unknown\) is no NVIDIA driver's: it lacks {NEEDED} of the {NEEDED} .*, cuInit first",
        ),
        (
            FAKE,
            ("-DINIT_ALONE",),
            rf"version unknown\) .* lacks {NEEDED - 1} of the {NEEDED} functions needed, cuDriverGetVersion first",
        ),
        (
            FAKE,
            ("-DOLD", "-DVERSION=13000"),
            rf"\(of CUDA 13.0\) .* lacks {NEEDED - 2} of the {NEEDED} functions needed, cuGetErrorName",
        ),
        (
            FAKE,
            ("-DOLD", "-DVERSION=11080"),
            r"driver is too old: its libcuda is of CUDA 11.8, .* need CUDA 13.0 or later",
        ),
        (FAKE, ("-DVERSION=12090",), "driver is too old: its libcuda is of CUDA 12.9, .* need CUDA 13.0 or later"),
        (FAKE, ("-DGPUS=0",), "the driver sees no GPU"),
        (
            FAKE,
            ("-DMAJOR=7", "-DMINOR=5", "-DGPUS=2"),
            r"capability 8.0 \(Ampere\) or later is needed; cuda:0 is a fake, of compute capability 7.5, cuda:1 is a",
        ),
        (FAKE, ("-DINIT=100",), r"cuInit failed with code 100 \(CUDA_ERROR_OF_THE_FAKE\)"),
        (FAKE, ("-DINIT=12345",), r"cuInit failed with code 12345 \(CUDA_ERROR_OF_THE_FAKE\)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_libcuda_that_is_no_driver_is_told(
    source: str, defines: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    assert re.search(reason, unavailable(says(tmp_path, source, *defines)))


def test_a_libcuda_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"\x7fELF and no more")
    assert "libcuda is not on this machine, or cannot be loaded" in unavailable(says(tmp_path, None))


def test_a_driver_with_every_function_is_enough(tmp_path: Path) -> None:
    """Setting up calls nothing that was not looked for: what the fake lacks would be missing."""
    lines = says(tmp_path, FAKE)
    if lines[0] == "False":
        unavailable(lines)
    assert lines == ["True", "None", "90", "None"]


def test_an_error_of_the_driver_is_told_with_its_call(tmp_path: Path) -> None:
    lines = says(tmp_path, FAKE, "-DLOAD=218")
    if lines[0] == "False":
        unavailable(lines)
    assert lines[0] == "True"
    for line in lines[2:]:
        assert line.startswith("Cuda ") and "cuModuleLoadData" in line and "CUDA_ERROR_OF_THE_FAKE (218)" in line
