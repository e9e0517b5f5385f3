#!/usr/bin/env bash
# Everything about this project that only a GPU can tell, by one command, in less than half an hour:
# first what is broken (ten minutes), then how fast the rest is.
#
#   benchmarks/gpu/run.sh                    all parts
#   benchmarks/gpu/run.sh --only check       groups (check, speed, speed-1, speed-2) or parts by name
#   benchmarks/gpu/run.sh --dry              tiny sizes: do the scripts run? Also without a GPU
#
# Where a command may take ten minutes at most, three calls, each within its time:
#
#   benchmarks/gpu/run.sh --minutes 9.5 --only check
#   benchmarks/gpu/run.sh --minutes 9.5 --only speed-1
#   benchmarks/gpu/run.sh --minutes 9.5 --only speed-2
#
# It needs one NVIDIA GPU of compute capability 8.0 or more (made for an H100 or H200 with 16 cores and 128 GiB), no
# network and no virtual environment: the python3 of the machine (or PYTHON=) with torch for CUDA, transformers,
# accelerate, scipy, tqdm and httpx, and pytest and hypothesis for the checks. The extension is built with that
# machine's g++, unless an omniserve/_C.abi3.so that loads was carried along.
#
#   WHEELS=folder   wheels to install, without their dependencies, beside the machine's packages: xformers, say
#                   (pip download --no-deps --only-binary=:all: --platform manylinux_2_28_x86_64 -d folder xformers==0.0.35)
#   OUT=folder      where records and report.md go (default benchmarks/results/gpu; of a dry run .cache/gpu-dry)
#
# Compiled kernels are kept in .cache/: a second run on the same machine begins sooner.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
cache=$PWD/.cache
mkdir -p "$cache"

export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton}

if [ -n "${WHEELS:-}" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-cache-dir --upgrade --target "$cache/site" "$WHEELS"/*.whl
    export PYTHONPATH=$PYTHONPATH:$cache/site
fi

loads() {
    "$python" -c 'import omniserve.ops' >"$cache/extension.log" 2>&1
}
if ! loads; then
    rm -f omniserve/_C*.so
    # Beside pyproject.toml, which a setuptools older than 77 cannot read; what it says is not needed here.
    mkdir -p "$cache/build"
    cp setup.py "$cache/build"
    ln -sfn "$PWD/omniserve" "$cache/build/omniserve"
    (cd "$cache/build" && "$python" setup.py -q build_ext --inplace) >"$cache/build.log" 2>&1 ||
        { cat "$cache/build.log" >&2; exit 1; }
    loads || { cat "$cache/extension.log" >&2; exit 1; }
fi

exec "$python" -m benchmarks.gpu --spent-s "$SECONDS" "$@"
