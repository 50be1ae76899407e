#!/usr/bin/env bash
# Builds wheels of matmuls, one for each version of torch, and that of matmuls-bench. A wheel runs with the minor version of torch, the Python and
# the CUDA that it was built with; its version says which: matmuls-0.2.0+torch2.13.cpu-cp311-...whl.
set -euo pipefail
unset CDPATH
cd "$(dirname "${BASH_SOURCE[0]}")/.."

default_torch=(2.11 2.12 2.13 2.14)
usage="usage: tools/build_wheels.sh [--torch VERSION]... [--cpu] [--cuda] [--venv DIR] OUT
  --torch VERSION  such as 2.13; may be repeated (default: ${default_torch[*]})
  --cpu, --cuda    the kinds to build (default: --cpu)
  --venv DIR       an environment with torch and the build tools: one wheel for the torch in it, without a new one
  OUT              the folder for the wheels
From the environment: PYTHON, the interpreter to build for; TORCH_INDEX_URL, a package index for torch alone;
TORCH_CUDA_ARCH_LIST, the GPUs of a CUDA wheel (default: those of this machine, else 7.5 8.0 8.6+PTX 9.0a)."

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
die() { printf 'build_wheels.sh: %s\n' "$*" >&2 && exit 1; }

versions=() kinds=() venv="" out=""
while (($#)); do
  case $1 in
    --torch) versions+=("${2:?"$usage"}") && shift ;;
    --cpu | --cuda) kinds+=("${1#--}") ;;
    --venv) venv=${2:?"$usage"} && shift ;;
    -h | --help) echo "$usage" && exit 0 ;;
    -*) die "unknown argument $1"$'\n'"$usage" ;;
    *) [[ -z $out ]] || die "expected one folder, got $out and $1"$'\n'"$usage" && out=$1 ;;
  esac
  shift
done
[[ -n $out ]] || die "$usage"
[[ -z $venv ]] || ((${#versions[@]} == 0)) || die "expected --torch or --venv, got both"
((${#versions[@]})) || versions=("${default_torch[@]}")
((${#kinds[@]})) || kinds=(cpu)
mkdir -p "$out" && out=$(cd "$out" && pwd)

# install VERSION KIND PYTHON: torch and what compiles beside it
install() {
  local torch="torch==$1.*" python=$3
  "$python" -m pip install -q ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$torch" numpy
  "$python" -m pip install -q "setuptools>=77,<82" wheel ninja
  [[ $2 == cuda ]] || return 0
  local cuda
  cuda=$("$python" -c 'import torch; print(torch.version.cuda or "")')
  [[ -n $cuda ]] || die "this $torch has no CUDA; use --cpu"
  "$python" -c 'import runpy, sys; sys.exit(runpy.run_path("setup.py", run_name="find")["find_cuda_home"]() is None)' ||
    "$python" -m pip install -q "cuda-toolkit[nvcc,nvvm,crt,cccl,cudart]==$cuda.*"
}

# wheel KIND PYTHON: compiles what has changed since the last build of this kind in this folder
wheel() {
  rm -rf build/lib.* build/bdist.* benchmarks/build # of another kind or an earlier version
  MATMULS_CUDA=$([[ $1 == cuda ]] && echo 1 || echo 0) "$2" -m pip wheel -q --no-build-isolation --no-deps -w "$out" . ./benchmarks
}

for kind in "${kinds[@]}"; do
  if [[ -n $venv ]]; then
    say "building the $kind wheel for the torch of $venv"
    wheel "$kind" "$venv/bin/python"
    continue
  fi
  for version in "${versions[@]}"; do
    env=$(mktemp -d)
    trap 'rm -rf "$env"' EXIT
    say "building the $kind wheel for torch $version: installing that torch"
    "${PYTHON:-python3}" -m venv "$env"
    install "$version" "$kind" "$env/bin/python"
    say "building the $kind wheel for torch $version"
    wheel "$kind" "$env/bin/python"
    rm -rf "$env"
  done
done
ls -l "$out"
