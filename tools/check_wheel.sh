#!/usr/bin/env bash
# Checks a CPU wheel as a user installs it: a new environment with the wheel and what it requires, and no compiler.
# Then beside a torch of another minor version: the import must say so in one sentence, and so must `matmuls info`.
set -euo pipefail
usage="usage: tools/check_wheel.sh WHEEL OTHER_PYTHON [CLIENT]
  WHEEL         as tools/build_wheels.sh makes it, in the folder of matmuls-bench's
  OTHER_PYTHON  an interpreter of an environment with another minor version of torch
  CLIENT        a file that mypy and pyright of PYTHON's environment check against the installed wheel
From the environment: PYTHON, the interpreter for the new environment."
wheel=$(realpath "${1:?"$usage"}")
other=$(realpath -s "${2:?"$usage"}")
client=${3:+$(realpath "$3")}
python=$(realpath -s "${PYTHON:-$(command -v python3)}")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" # not the source folder, whose packages would be imported

echo "== a new environment with $(basename "$wheel")"
"$python" -m venv venv
venv/bin/python -m pip --disable-pip-version-check install -q "$wheel"
clean() { env -u PYTHONPATH PATH="$folder/venv/bin" "$@"; } # no compiler on PATH
cp "$root/README.md" .
clean python "$root/tools/run_blocks.py" README.md
clean matmuls info
for name in bert embed tune; do clean matmuls "$name" --help >/dev/null; done
"$python" -m zipfile -l "$wheel" >files
! grep -E 'matmuls/(ablation|bench|experiment|figures|matrices|report|specs)|matmuls_(bench|report)' files || exit 1
for name in bench bench-bert spmm report; do
  status=0
  said=$(clean matmuls "$name" 2>&1) || status=$?
  ((status == 2)) && [[ $said == "matmuls: $name is a command of matmuls-bench, which is not installed"* ]] ||
    { echo "$said" && echo "check_wheel.sh: expected exit status 2 and what to install, got $status: $name" && exit 1; }
done

echo "== with matmuls-bench"
venv/bin/python -m pip --disable-pip-version-check install -q "$(dirname "$wheel")"/matmuls_bench-*.whl
for name in bench bench-bert report; do clean matmuls "$name" --help >/dev/null; done
clean matmuls spmm grid:16 --n 4 --device cpu

clean python -c 'import matmuls, sys; from importlib.metadata import requires, version
torch = [r for r in requires("matmuls") if r.startswith(("torch<", "torch>", "torch="))]
assert len(torch) == 1 and "<" in torch[0] and ">=" in torch[0], torch
print(version("matmuls"), torch[0])'
if [[ -n $client ]]; then
  cp "$client" client.py
  "$(dirname "$python")/mypy" --strict --python-executable venv/bin/python client.py
  "$(dirname "$python")/pyright" --pythonpath venv/bin/python client.py
fi

echo "== the same wheel beside $("$other" -c 'import torch; print("torch", torch.__version__)')"
"$other" -m pip --disable-pip-version-check install -q --no-deps --target beside "$wheel"
expect() { # COMMAND...: fails with exit status 1, and says the one sentence
  local said status=0
  said=$(PYTHONPATH=$folder/beside "$@" 2>&1) || status=$?
  said=$(tr -s ' \n' ' ' <<<"$said")
  ((status == 1)) || { echo "$said" && echo "check_wheel.sh: expected exit status 1, got $status: $*" && exit 1; }
  [[ $said == *"this matmuls was built with torch 2."*" install the wheel of matmuls for torch 2."* ]] ||
    { echo "$said" && echo "check_wheel.sh: expected the sentence about two versions of torch: $*" && exit 1; }
  echo "as expected: ${said##*Error: }"
}
expect "$other" -c 'import custom_mm'
expect "$other" -c 'import matmuls'
expect "$folder/beside/bin/matmuls" info
