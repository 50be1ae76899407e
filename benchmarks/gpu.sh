#!/usr/bin/env bash
# All checks and benchmarks that need a GPU: build, tests, compute-sanitizer, BERT, benchmarks.
# Usage: benchmarks/gpu.sh OUT [STEP...], with PYTHON and TORCH_CUDA_ARCH_LIST from the environment.
set -uo pipefail
shopt -s nullglob
cd "$(dirname "$0")/.."
out=${1:?usage: benchmarks/gpu.sh OUT [STEP...]}
shift
steps=${*:-build tests cycles sanitize bert bench spmm spmm-pruned spmm-two-of-four sparse-linear constant blocks bench-bert
  host-times masked-choices encoders traffic attention-backends pyg-steps training-steps sparse-systems batch-invariance distributed}
python=${PYTHON:-python3}
mkdir -p "$out"
# matmuls-bench without an installation: its commands are found by the entry points in this folder
export PYTHONPATH=$PWD:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}
(cd benchmarks && "$python" -c 'import setuptools; setuptools.setup()' -q egg_info) || exit 1
failed=0

step() { # name, command...
  local name=$1 begin=$SECONDS
  shift
  "$@" >"$out/$name.log" 2>&1
  local status=$?
  echo "$name: status $status, $((SECONDS - begin)) s"
  tail -n 3 "$out/$name.log" | cut -c1-300
  ((status == 0)) || failed=1
}

sanitize() { # tool, pytest -k expression, file: small tests of the table or a file; exit status 9 on any error
  local file=${3:-table}
  step "sanitize-$1-$file" env MATMULS_POISON=1 CUBLAS_WORKSPACE_CONFIG=:4096:8 compute-sanitizer --tool "$1" --error-exitcode 9 \
    "$python" -m pytest -q -m cuda -p no:cacheprovider "$(find tests -name "test_$file.py")" -k "$2"
  grep -h "ERROR SUMMARY\|RACECHECK SUMMARY" "$out/sanitize-$1-$file.log"
}

bert() {
  "$python" -m matmuls bert --device cuda "How old are you?" "What is your age?" "A cat sat on the mat." "$@"
}

# Generated matrices, and the .npz, .mtx or .graph files of the folder MATRICES. The committed results have five files:
# mdual (a mesh in METIS's sources), Franz6_id1959_aug (SuiteSparse), and cond-mat-2005, email-Enron and NotreDame_www
# (undirected, from graph-tool's collection). Their values are random.
spmm() {
  local files=() drawn=(rmat:18:16 rmat:20:8 grid:1024)
  [ -n "${MATRICES:-}" ] && files=("$MATRICES"/*.{npz,mtx,graph})
  for share in 0.5 0.8 0.9 0.95 0.99; do drawn+=("pruned:4096x4096:$share" "pruned:3072x768:$share"); done
  step spmm "$python" -m matmuls spmm "${files[@]}" "${drawn[@]}" --n 32,128,512 --backward \
    --dtype float32 --dtype float16 --dtype bfloat16 --device cuda --out "$out"
}

# Pruned weights of language models' shapes, times B of few columns (a few dozen tokens) and of many.
spmm_pruned() {
  local drawn=()
  for shape in 4096x4096 768x3072 8192x8192 14336x4096 4096x14336; do
    for share in 0.5 0.8 0.9 0.95 0.99; do drawn+=("pruned:$shape:$share"); done
  done
  step spmm-pruned "$python" -m matmuls spmm "${drawn[@]}" --n 8,32,64,128 --dtype float16 --dtype bfloat16 --device cuda \
    --against dense --out "$out/pruned"
  step spmm-pruned-wide "$python" -m matmuls spmm pruned:4096x4096:0.95 pruned:4096x4096:0.99 --n 512,2048 \
    --dtype float16 --dtype bfloat16 --device cuda --against dense --out "$out/pruned-wide"
}

# 2:4 sparsity, as torch's semi-structured tensors need it.
spmm_two_of_four() {
  local drawn=()
  for shape in 4096x4096 14336x4096 4096x14336 8192x8192; do drawn+=("pruned:$shape:2of4"); done
  step spmm-two-of-four "$python" -m matmuls spmm "${drawn[@]}" --n 16,32,64,128,512,2048 --dtype bfloat16 --against dense \
    --against "torch 2:4" --device cuda --out "$out/two-of-four"
}

# On two GPUs or more: tests and products of as many processes. MATRICES: as for spmm, of square matrices.
distributed() {
  local gpus files=()
  gpus=$(nvidia-smi -L | wc -l)
  ((gpus > 1)) || { echo "distributed: needs two GPUs" && return; }
  [ -n "${MATRICES:-}" ] && files=("$MATRICES"/{mdual,NotreDame_www,cond-mat-2005}.npz)
  local products=(torchrun --nproc-per-node="$gpus" -m matmuls spmm --distributed --backward -n "32,128" --dtype float32 --dtype bfloat16)
  step distributed-tests "$python" -m pytest -m cuda tests/distributed
  step distributed-drawn "${products[@]}" --out "$out/drawn" grid:4096 rmat:22:16
  ((${#files[@]})) && step distributed-rcm "${products[@]}" --reorder rcm --out "$out/rcm" "${files[@]}"
  step distributed-models torchrun --nproc-per-node="$gpus" benchmarks/scripts/distributed_models.py "$out"
}

for name in $steps; do
  case $name in
    build) step build env TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST:-9.0a}" "$python" setup.py build_ext --inplace ;;
    tests) step tests "$python" -m pytest -vv -m cuda --durations=8 ;;
    cycles) step cycles env MATMULS_CYCLES=10000 "$python" -m pytest -q -s -m cuda -k 10_000_cycles ;;
    sanitize)
      sanitize memcheck "the_truth or test_empty or (any_strides and off_by_one_element)"
      sanitize initcheck "the_truth or test_empty"
      # racecheck makes cuBLAS's kernels a hundred times slower: every operation, but only in two dtypes
      sanitize racecheck "the_truth and (bfloat16 or float32)"
      # without the caching allocator each tensor has its own allocation, so memcheck sees reads past its end
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 sanitize memcheck "off_16_bytes and float16" rowwise
      # fused attention: both template instances, every mask, full and partial tiles of rows and keys;
      # 3 s per test, mostly for the float64 reference
      sanitize racecheck "one_kernel_is and bfloat16 and (200 or 384)" attention
      # packed matrices: every cluster size, few nonzeros and many; MATMULS_POISON changes what plans choose
      packed="lane_reads or with_a_permutation or too_small or test_products or test_linear or non_finite"
      for tool in memcheck initcheck racecheck synccheck; do
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 sanitize "$tool" "($packed) and not (layers or 9000 or 4096)" packed
      done
      # encoders on packed texts, products with gelu, recorded calls of two experts
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 sanitize memcheck "" packed_attention
      sanitize racecheck "" packed_attention
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 sanitize memcheck "" linear_rows
      sanitize racecheck "" linear_rows # minutes: every lane of a warp signals for itself, as racecheck asks
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 sanitize racecheck "" pack
      # products of two sparse matrices, prepared solves, rows of distributed products
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 sanitize memcheck "bounds or skewed or hub or narrow" spgemm_cuda
      sanitize racecheck "bounds or narrow" spgemm_cuda # minutes
      sanitize synccheck "bounds or narrow" spgemm_cuda
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 sanitize memcheck "not fork and not graph" solve_plan
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 sanitize memcheck "" splits
      # without MATMULS_POISON, whose deterministic algorithms are not recorded
      step sanitize-memcheck-replay compute-sanitizer --tool memcheck --error-exitcode 9 \
        "$python" -m pytest -q -m cuda -p no:cacheprovider tests/masked/test_replay.py
      # kernels whose thread blocks wait for each other
      sanitize synccheck "(matmul_ or linear_ or square) and the_truth and (bfloat16 or float32)"
      ;;
    bert)
      step bert-float32 bert
      step bert-bfloat16 bert --dtype bfloat16
      ;;
    bench) step bench "$python" -m matmuls bench --device cuda --precompile 12 --out "$out" ;;
    spmm) spmm ;;
    spmm-pruned) spmm_pruned ;;
    spmm-two-of-four) spmm_two_of_four ;;
    sparse-linear) step sparse-linear "$python" benchmarks/scripts/sparse_linear.py "$out" ;;
    constant) step constant "$python" benchmarks/scripts/constant.py "$out" ;;
    blocks) step blocks "$python" benchmarks/scripts/blocks.py "$out" ;;
    bench-bert) step bench-bert "$python" -m matmuls bench-bert --device cuda --out "$out" ;;
    host-times | masked-choices | encoders | attention-backends | pyg-steps | training-steps | batch-invariance)
      step "$name" "$python" "benchmarks/scripts/${name//-/_}.py" "$out" ;;
    traffic) step traffic "$python" benchmarks/scripts/traffic.py "$out" --minutes 30 --device cuda ;;
    sparse-systems)
      [ -n "${MATRICES:-}" ] && step sparse-systems "$python" benchmarks/scripts/sparse_systems.py "$out" "$MATRICES"/*.npz --device cuda ;;
    distributed) distributed ;;
    *) echo "no step named $name" && failed=1 ;;
  esac
done
exit $failed
