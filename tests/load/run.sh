#!/usr/bin/env bash
# The load test whole (benches/serve_load.py), on a quiet machine that may have no network:
#
#   tests/load/run.sh [WHEELS] [-- ARGUMENTS]
#
# PYTHON (python3) has torch, tokenizers, safetensors and jinja2; WHEELS is a folder with wheels of what it lacks of
# starlette, uvicorn, httptools, uvloop, prometheus-client, anyio, h11, click and idna, which are put beside it for this run:
#
#   pip download --no-deps --only-binary=:all: -d WHEELS starlette uvicorn httptools uvloop prometheus-client ...
#
# The extension is the checkout's own (python/specrs/_specrs.abi3.so). Writes benches/results/serve_load.json; OUT names a
# folder for a copy. Set SPECRS_COMMIT where the checkout has no git. Exits with 1 where a token, status or audit is wrong.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ $# -gt 0 ] && [ "$1" != -- ]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$work/site" "$1"/*.whl
    shift
fi
[ "${1:-}" != -- ] || shift
export PYTHONPATH=$root/python:$work/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 SPECRS_DEVICE=${SPECRS_DEVICE:-cpu}
"$python" -c 'import starlette, uvicorn, prometheus_client, specrs.serve' || exit 2
ulimit -n "$(ulimit -Hn)"
status=0
"$python" "$root/benches/serve_load.py" "$@" || status=$?
if [ -n "${OUT:-}" ] && [ -f "$root/benches/results/serve_load.json" ]; then
    cp "$root/benches/results/serve_load.json" "$OUT"
fi
exit "$status"
