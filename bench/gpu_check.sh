#!/usr/bin/env bash
# One prepared run of at most 8 minutes on a machine with an NVIDIA GPU: tests of the kernels on the
# GPU, GB/s of a commit, launches and host time per window, graph replay, and vLLM with and without
# nwor if it is installed. Writes JSON after every part, so that a run cut short leaves what it found.
#
#   bench/gpu_check.sh [--json OUT] [--seconds 480] [--model PATH] [--dry-run]
#
# --dry-run needs no GPU: every part with tiny sizes under Triton's interpreter, where it can run at all.
# PYTHON=... chooses an interpreter that has torch and triton; otherwise one is set up from pip.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

NEEDED='import hypothesis, numpy, pytest, torch, triton'
if [[ -n ${PYTHON:-} ]]; then
  "$PYTHON" -c "$NEEDED" || { echo "PYTHON=$PYTHON lacks one of the packages above" >&2; exit 2; }
elif python3 -c "$NEEDED" 2>/dev/null; then
  PYTHON=python3
else
  PYTHON=.venv-gpu/bin/python
  if ! [[ -x $PYTHON ]] || ! "$PYTHON" -c "$NEEDED" 2>/dev/null; then
    echo "==> setting up .venv-gpu; this is not part of the 8 minutes"
    python3 -m venv .venv-gpu
    "$PYTHON" -m pip install --quiet --constraint requirements/constraints.txt --editable '.[test,triton]'
  fi
fi

export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" bench/gpu_check.py "$@"
