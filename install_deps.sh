#!/usr/bin/env bash
# Creates a virtual environment with torch, the build tools, the package with its extension, and a model.
# It can be run again at any time: finished steps are skipped.
set -euo pipefail
unset CDPATH # with CDPATH set, cd prints the folder
cd "$(dirname "${BASH_SOURCE[0]}")"

# Tested torch versions; tools/pins has the sha256 of their files, of the build tools and of the model. The main package
# index has CUDA builds of torch alone, of which a CPU machine has no use.
cpu_torch="torch==2.13.0"
cuda_torch_gb=4.9          # what a CUDA build of it and the packages that it needs take on disk, measured with 2.13.0
cuda_torch="torch==2.11.0" # built for CUDA 13.0

usage="usage: ./install_deps.sh [--cpu | --cuda] [--dev] [--venv DIR]
  --cpu       build without CUDA        --dev       add the test and lint tools
  --cuda      build the CUDA code, whether this machine has a GPU or not
  --venv DIR  the virtual environment (default .venv)
Without --cpu or --cuda a visible GPU decides. From the environment: PYTHON, an interpreter to use; TORCH_INDEX_URL, a
package index for torch alone, such as PyTorch's own index of CPU builds, which its install page names (its files are
not compared with tools/pins); TORCH_CUDA_ARCH_LIST, the GPUs to build for."

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
die() { printf 'install_deps.sh: %s\n' "$*" >&2 && exit 1; }

kind="" dev="" venv=".venv"
while (($#)); do
  case $1 in
    --cpu | --cuda) kind=${1#--} ;;
    --dev) dev=1 ;;
    --venv) venv=${2:?"$usage"} && shift ;;
    -h | --help) echo "$usage" && exit 0 ;;
    *) die "unknown argument $1"$'\n'"$usage" ;;
  esac
  shift
done

if [[ -z $kind ]]; then
  if [[ $(nvidia-smi -L 2>/dev/null || true) == *GPU* ]]; then
    kind=cuda && say "a GPU is visible: CUDA build"
  else
    kind=cpu && say "no GPU is visible: CPU build (--cuda builds the CUDA code all the same)"
  fi
fi

# ---- requirements of the machine
python=""
for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
  if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
    python=$candidate && break
  fi
done
[[ -n $python ]] || die "no Python 3.11 to 3.13 found; install one or name it: PYTHON=/path/to/python3 ./install_deps.sh"
command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || die "no C++ compiler found; install g++ 11 or later"
"$python" -c 'import sysconfig, os, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
  die "no Python.h for $python; install its development headers (Debian: python3-dev)"

# ---- the environment
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  say "making $venv with $("$python" --version)"
  "$python" -m venv "$venv" || die "$python cannot make a virtual environment (Debian: install python3-venv)"
fi
venv=$(cd "$venv" && pwd)
python=$venv/bin/python

pip() { "$python" -m pip --disable-pip-version-check "$@"; }

# once NAME KEY COMMAND...: runs the command unless it succeeded with this key before in this environment
once() {
  local stamp=$venv/.matmuls-$1 key=$2
  shift 2
  [[ -f $stamp && $(<"$stamp") == "$key" ]] && return
  rm -f "$stamp"
  "$@" || die "this failed: $*"
  printf '%s' "$key" >"$stamp"
}

pins() { grep -o '^[^# ]*==[^ ]*' "tools/pins/$1.txt" | paste -sd ' '; }

# pinned NAME: installs what tools/pins/NAME.txt lists, without what it needs, if the files have the sha256 there.
# Ends the script if a file is another; may_lack NAME only fails if there is no such file.
pinned() { may_lack "$1" || die "$said"; }
may_lack() {
  say "installing $(pins "$1")"
  said=$(pip install -q --no-deps --require-hashes -r "tools/pins/$1.txt" 2>&1) && return
  [[ $said != *"DO NOT MATCH THE HASHES"* ]] || die "$said"$'\n'"expected the files of tools/pins/$1.txt"
  return 1
}

install_torch() {
  local kind=$1 torch=$2 from=(${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"})
  # pip does not distinguish CPU and CUDA builds of one torch version: uninstall first
  pip uninstall -q -y torch >/dev/null 2>&1 || true
  if ((${#from[@]})); then
    say "installing $torch from TORCH_INDEX_URL"
    [[ $kind == cpu ]] && pip install -q "${from[@]}" "$torch+cpu" numpy 2>/dev/null && return
  elif [[ $kind == cuda ]]; then
    pinned "${torch/==/-}"
  elif ! may_lack "${torch/==/-}+cpu"; then
    say "no CPU build of $torch for this Python in pip's package indexes: installing the one that there is."
    say "If it is a CUDA build, it takes $cuda_torch_gb GB. TORCH_INDEX_URL names an index of CPU builds: see --help."
    pinned "${torch/==/-}"
  fi
  pip install -q "${from[@]}" "$torch" numpy || die "cannot install $torch from the package index" # and what it needs
}
torch=$cpu_torch
[[ $kind == cuda ]] && torch=$cuda_torch
once torch "$kind $torch${TORCH_INDEX_URL:+ $TORCH_INDEX_URL}" install_torch "$kind" "$torch"
once tools "$(<tools/pins/build.txt)" pinned build

if [[ $kind == cuda ]]; then
  cuda=$("$python" -c 'import torch; print(torch.version.cuda or "")')
  [[ -n $cuda ]] || die "$torch has no CUDA on this platform; use --cpu"
  # find_cuda_home of setup.py knows all places where nvcc may be
  if ! "$python" -c 'import runpy, sys; sys.exit(runpy.run_path("setup.py", run_name="find")["find_cuda_home"]() is None)'; then
    install_nvcc() {
      say "no nvcc on this machine: installing the compiler of CUDA $cuda"
      pip install -q "cuda-toolkit[nvcc,nvvm,crt,cccl,cudart]==$cuda.*"
    }
    once nvcc "$cuda" install_nvcc
  fi
fi

# ---- the package
install_extra() {
  local needs
  mapfile -t needs < <("$python" -c 'import sys, tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"][sys.argv[1]], sep="\n")' "$1")
  say "installing ${needs[*]}"
  pip install -q "${needs[@]}"
}
for extra in bert plot ${dev:+test lint docs}; do
  once "extra-$extra" "$(cksum <pyproject.toml)" install_extra "$extra"
done

# Shows ninja's lines "[3/30] ..." as they come: one line that is updated on a terminal, else a line for each file.
show_progress() {
  local line began=$SECONDS left end='\n'
  [[ -t 1 ]] && end='\033[K\r'
  while read -r line; do
    [[ $line =~ ^\[([0-9]+)/([0-9]+)\].*\ -o\ ([^ ]+) ]] || continue
    local done=${BASH_REMATCH[1]} all=${BASH_REMATCH[2]} file=${BASH_REMATCH[3]##*/units/}
    left=$(((SECONDS - began) * (all - done) / done))
    printf "    [%d/%d] %s, about %d:%02d left$end" "$done" "$all" "${file##*/src/}" $((left / 60)) $((left % 60))
  done
  [[ -t 1 ]] && printf '\033[K'
  return 0
}
export MATMULS_CUDA=$([[ $kind == cuda ]] && echo 1 || echo 0)
build_log=$venv/matmuls-build.log
failed() {
  grep -E 'error|Error|matmuls:' "$build_log" | head -n 20 >&2
  die "the build failed; the whole log: $build_log"
}
build_extension() { # compiles what has changed since the last build, of this environment's kind
  say "building the extension ($kind)"
  "$python" -u setup.py build_ext --inplace 2>&1 | tee "$build_log" | show_progress || failed
}
install_package() {
  say "installing matmuls and matmuls-bench, from this folder"
  pip install --no-build-isolation -e . >"$build_log" 2>&1 || failed
  pip install --no-build-isolation -e benchmarks >>"$build_log" 2>&1 || failed
}
gpus=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u) || true # setup.py builds for these
key="$kind $torch ${TORCH_CUDA_ARCH_LIST:-$gpus}"
sources="$key $(find setup.py src -type f | sort | xargs -d '\n' cat | cksum)"
# all environments share the extension in this folder: rebuild if another environment has overwritten it
[[ $(cat build/.built-for 2>/dev/null) == "$venv $sources" ]] || rm -f "$venv/.matmuls-extension"
[[ ! -f $venv/.matmuls-extension ]] || "$python" -c 'import custom_mm' 2>/dev/null || rm -f "$venv/.matmuls-extension"
once extension "$sources" build_extension
mkdir -p build && printf '%s' "$venv $sources" >build/.built-for
once package "$key $(cat setup.py pyproject.toml benchmarks/pyproject.toml | cksum)" install_package
once model "$(<tools/pins/model.txt)" pinned model

say "ready: $venv"
