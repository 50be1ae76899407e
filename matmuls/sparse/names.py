"""The names of the kernels of A @ B with A sparse: one for each, in `plan.explain()`, in results and in tests.

A name is the folder or the file of its kernel under src/sparse/spmm, or says what is multiplied.
"""

BY_ROWS = "by_rows"  # lanes share a row of A: by_rows/
SPLIT_ROWS = "split_rows"  # by_rows/ too, with long rows of A cut into pieces
SHARES = "shares"  # by_rows/ too, with A divided into merge-path shares of equal rows + nonzeros
CHUNKS = "chunks"  # about equally many nonzeros for each group of lanes: chunks/
FP16X2 = "fp16x2"  # densified, a float32 number as two float16: densified/fp16x2_sm90.cu
SPARSE24 = "sparse24"  # densified with 2:4 sparsity: densified/sparse24_sm90.cu, float32 through fp16x2_sm90.cu
PACKED_MMA = "packed_mma"  # 16 bits, nonzeros packed for mma: packed_mma/
PACKED_MMA_LINEAR = "packed_mma_linear"  # the same for x @ A^T + bias, rows of x as they lie
SMEM_TILES = "smem_tiles"  # part of B in shared memory: smem_tiles/
REORDERED = "reordered"  # rows of A in an order that reads less of B: reordered/, multiplied by chunks/
DENSE = "dense"  # A with its zeros: cuBLAS or, on a CPU, torch's BLAS
BLOCKS = "blocks"  # the blocks of BSR and BSC on tensor cores: matmuls/triton/blocks.py

# The operator that multiplies by the pattern itself, whatever the values: by_rows, split_rows, shares or chunks. A
# selector measures it as one candidate; `default_spmm.kernel_of` says which of the four runs.
DEFAULT = "default_spmm"
