// Wrappers of Hopper's PTX instructions: TMA bulk copies of tensor tiles, and warpgroup products (wgmma).
//
// Tiles in shared memory use TMA's 128-byte swizzle: rows of 128 bytes; 16-byte chunk c of row r is stored at chunk c ^
// (r % 8); the pattern repeats every 1024 bytes.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <type_traits>

#include "gpu/ptx.cuh"

namespace matmuls::hopper {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// ---- TMA copies; (x, y): column and row of the tile's first element

__device__ inline void tma_load_2d(const CUtensorMap& map, void* to, uint64_t* barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          ptx::shared_address(to)),
      "l"(&map), "r"(ptx::shared_address(barrier)), "r"(x), "r"(y)
      : "memory");
}
// Loads a tile of a 3D tensor.
__device__ inline void tma_load_3d(const CUtensorMap& map, void* to, uint64_t* barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(ptx::shared_address(to)),
      "l"(&map), "r"(ptx::shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// Loads a 2D tile with an L2 cache policy.
__device__ inline void tma_load_2d(const CUtensorMap& map, void* to, uint64_t* barrier, int x, int y,
                                   ptx::L2Policy policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(ptx::shared_address(to)),
      "l"(&map), "r"(ptx::shared_address(barrier)), "r"(x), "r"(y), "l"(policy)
      : "memory");
}
// Copies contiguous bytes; their number is a multiple of 16.
__device__ inline void bulk_load(const void* from, void* to, uint64_t* barrier, unsigned bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   ptx::shared_address(to)),
               "l"(from), "r"(bytes), "r"(ptx::shared_address(barrier))
               : "memory");
}
// Copies contiguous bytes with an L2 cache policy.
__device__ inline void bulk_load(const void* from, void* to, uint64_t* barrier, unsigned bytes, ptx::L2Policy policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(ptx::shared_address(to)),
      "l"(from), "r"(bytes), "r"(ptx::shared_address(barrier)), "l"(policy)
      : "memory");
}
// Multicast: loads one tile to the same offset in every block of the mask `blocks`, and signals the barrier of each.
__device__ inline void tma_load_2d_multicast(uint16_t blocks, const CUtensorMap& map, void* to, uint64_t* barrier,
                                             int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5}], [%2], %3;" ::"r"(ptx::shared_address(to)),
      "l"(&map), "r"(ptx::shared_address(barrier)), "h"(blocks), "r"(x), "r"(y)
      : "memory");
}
// Multicast of contiguous bytes.
__device__ inline void bulk_load_multicast(uint16_t blocks, const void* from, void* to, uint64_t* barrier,
                                           unsigned bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(ptx::shared_address(to)),
      "l"(from), "r"(bytes), "r"(ptx::shared_address(barrier)), "h"(blocks)
      : "memory");
}
__device__ inline void tma_store_2d(const CUtensorMap& map, const void* from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
               "r"(ptx::shared_address(from)), "r"(x), "r"(y)
               : "memory");
}
// Copies contiguous bytes to global memory; their number is a multiple of 16.
__device__ inline void bulk_store(void* to, const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(ptx::shared_address(from)),
               "r"(bytes)
               : "memory");
}
__device__ inline void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most `pending` of this thread's committed store groups still read shared memory.
template <int pending>
__device__ inline void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
// Waits until all of this thread's committed store groups have been written to global memory.
__device__ inline void bulk_wait_group_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Prefetches a tile to L2; nothing waits for it.
__device__ inline void tma_prefetch_2d(const CUtensorMap& map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(x), "r"(y) : "memory");
}
// Prefetches bytes (a multiple of 16) to L2. The data is not consumed here: later loads see whatever another kernel
// writes to it in the meantime.
__device__ inline void bulk_prefetch(const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// Prefetches the tensor map before the first copy uses it.
__device__ inline void prefetch_tensormap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Orders this thread's later bulk copies after its earlier reads of counters (generic-to-async proxy fence).
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
// Makes earlier writes to shared memory visible to bulk copies.
__device__ inline void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- results to shared memory

// Packs two floats into a word; `left` in the lower half.
template <class T>
__device__ inline uint32_t pack2(float left, float right) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(left, right);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(left, right);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}
// stmatrix: stores four 8x8 matrices of 16-bit elements in the register layout of mma and wgmma results. Lane l passes
// the address of row l % 8 of matrix l / 8.
__device__ inline void stmatrix_x4(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(ptx::shared_address(row)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// 4 x 4 transpose among four adjacent lanes: word i of lane j becomes word j of lane i. Each lane then stores 16 bytes,
// and adjacent lanes fill whole sectors: half sectors cost the next launch 0.8 us (H200).
__device__ inline void transpose_4x4(uint32_t (&word)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t got = __shfl_xor_sync(~0u, lane & bit ? word[i] : word[i | bit], bit);
      (lane & bit ? word[i] : word[i | bit]) = got;
    }
}

// ---- synchronization

// No cluster-scope release: it would be a fence of all memory in each K step of a product, which then runs at 0.74 of
// cuBLAS instead of 0.94 (H200, 40000 x 1024). These barriers order only bulk copies and wgmma, which signal barriers
// themselves.
__device__ inline void mbarrier_arrive_remote(const uint64_t* barrier, unsigned block) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(ptx::mapa(barrier, block)) : "memory");
}
// Sends four floats to another block's shared memory; its barrier counts the 16 bytes.
__device__ inline void st_async(uint32_t to, float a, float b, float c, float d, uint32_t remote_barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "f"(a), "f"(b), "f"(c), "f"(d), "r"(remote_barrier)
      : "memory");
}
// Named barrier `id` (1 to 15) for `threads` threads of the block.
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int registers>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// ---- wgmma

// Shared-memory matrix descriptor of an operand tile, 128-byte swizzle. K-major: rows of 128 bytes, 8 of them every
// 1024 bytes. MN-major: one row of 64 elements per k, 8 rows every `eight` bytes, and `apart` bytes to the next 64
// columns.
__device__ inline uint64_t smem_descriptor(const void* tile, unsigned apart = 16, unsigned eight = 1024) {
  return (uint64_t{1} << 62) | (uint64_t{eight >> 4} << 32) | (uint64_t{apart >> 4} << 16) |
         ((ptx::shared_address(tile) & 0x3ffff) >> 4);
}
// The same for K-major rows of 64 bytes with TMA's 64-byte swizzle: chunk c of row r at c ^ (r / 2 % 4).
__device__ inline uint64_t smem_descriptor_64b(const void* tile) {
  return (uint64_t{2} << 62) | (uint64_t{512 >> 4} << 32) | (uint64_t{1} << 16) |
         ((ptx::shared_address(tile) & 0x3ffff) >> 4);
}
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
template <int N>  // keeps the compiler from moving accesses to these registers across this point
__device__ inline void warpgroup_fence_operand(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
__device__ inline void warpgroup_fence_operand(uint32_t (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// d <- a @ b, or d + a @ b if `accumulate`: 64 rows, 2 N columns for N registers d, 32 bytes of K.
#define MATMULS_8(d, i)                                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define MATMULS_REGISTERS_8 "%0, %1, %2, %3"
#define MATMULS_OPERANDS_8(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define MATMULS_REGISTERS_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MATMULS_OPERANDS_16(d) MATMULS_8(d, 0)
#define MATMULS_REGISTERS_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MATMULS_OPERANDS_32(d) MATMULS_8(d, 0), MATMULS_8(d, 8)
#define MATMULS_REGISTERS_64                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MATMULS_OPERANDS_64(d) MATMULS_8(d, 0), MATMULS_8(d, 8), MATMULS_8(d, 16), MATMULS_8(d, 24)
#define MATMULS_REGISTERS_96                                                         \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MATMULS_OPERANDS_96(d) \
  MATMULS_8(d, 0), MATMULS_8(d, 8), MATMULS_8(d, 16), MATMULS_8(d, 24), MATMULS_8(d, 32), MATMULS_8(d, 40)
#define MATMULS_REGISTERS_128                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MATMULS_OPERANDS_128(d)                                                                             \
  MATMULS_8(d, 0), MATMULS_8(d, 8), MATMULS_8(d, 16), MATMULS_8(d, 24), MATMULS_8(d, 32), MATMULS_8(d, 40), \
      MATMULS_8(d, 48), MATMULS_8(d, 56)
#define MATMULS_REGISTERS_192                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MATMULS_OPERANDS_192(d)                                                                             \
  MATMULS_8(d, 0), MATMULS_8(d, 8), MATMULS_8(d, 16), MATMULS_8(d, 24), MATMULS_8(d, 32), MATMULS_8(d, 40), \
      MATMULS_8(d, 48), MATMULS_8(d, 56), MATMULS_8(d, 64), MATMULS_8(d, 72), MATMULS_8(d, 80), MATMULS_8(d, 88)
#define MATMULS_REGISTERS_256                                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MATMULS_OPERANDS_256(d)                                                                                   \
  MATMULS_8(d, 0), MATMULS_8(d, 8), MATMULS_8(d, 16), MATMULS_8(d, 24), MATMULS_8(d, 32), MATMULS_8(d, 40),       \
      MATMULS_8(d, 48), MATMULS_8(d, 56), MATMULS_8(d, 64), MATMULS_8(d, 72), MATMULS_8(d, 80), MATMULS_8(d, 88), \
      MATMULS_8(d, 96), MATMULS_8(d, 104), MATMULS_8(d, 112), MATMULS_8(d, 120)

#define MATMULS_WGMMA(n, k, types, transposes, a, b, add)                                            \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " add                                           \
               ", 0;\n\t"                                                                            \
               "wgmma.mma_async.sync.aligned.m64n" #n "k" #k ".f32" types " {" MATMULS_REGISTERS_##n \
               "}, " a ", " b ", p, 1, 1" transposes ";\n\t}"                                        \
               : MATMULS_OPERANDS_##n(d)                                                             \
               : "l"(desc_a), "l"(desc_b), "r"(int(accumulate)))
#define MATMULS_MULTIPLY(k, types, transposes)                        \
  if constexpr (N == 128)                                             \
    MATMULS_WGMMA(256, k, types, transposes, "%128", "%129", "%130"); \
  else if constexpr (N == 96)                                         \
    MATMULS_WGMMA(192, k, types, transposes, "%96", "%97", "%98");    \
  else if constexpr (N == 64)                                         \
    MATMULS_WGMMA(128, k, types, transposes, "%64", "%65", "%66");    \
  else if constexpr (N == 48)                                         \
    MATMULS_WGMMA(96, k, types, transposes, "%48", "%49", "%50");     \
  else if constexpr (N == 32)                                         \
    MATMULS_WGMMA(64, k, types, transposes, "%32", "%33", "%34");     \
  else                                                                \
    MATMULS_WGMMA(32, k, types, transposes, "%16", "%17", "%18")

template <class T, bool b_k_apart, int N>
__device__ inline void wgmma_ss(float (&d)[N], uint64_t desc_a, uint64_t desc_b, bool accumulate) {
  static_assert(N == 16 || N == 32 || N == 48 || N == 64 || N == 96 || N == 128);
  if constexpr (std::is_same_v<T, float>) {
    static_assert(!b_k_apart);  // TF32 has no transposed operand
    MATMULS_MULTIPLY(8, ".tf32.tf32", "");
  } else if constexpr (std::is_same_v<T, c10::BFloat16> && b_k_apart) {
    MATMULS_MULTIPLY(16, ".bf16.bf16", ", 0, 1");
  } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
    MATMULS_MULTIPLY(16, ".bf16.bf16", ", 0, 0");
  } else if constexpr (b_k_apart) {
    MATMULS_MULTIPLY(16, ".f16.f16", ", 0, 1");
  } else {
    MATMULS_MULTIPLY(16, ".f16.f16", ", 0, 0");
  }
}

// Sparse form (2:4 sparsity): a stores 16 of 32 elements along K, two of each aligned four. Metadata: 4 bits per four
// elements. Thread t passes those of its warp's row t / 4 % 8 (lower 16 bits) and of the row 8 below, for k from 16 *
// (t % 2) on. In each quad of threads, 0 and 1 pass the metadata of the first product (which = 0), 2 and 3 that of the
// second (which = 1).
#define MATMULS_SPARSE_WGMMA(n, types, a, b, e, half, add)                                          \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " add                                          \
               ", 0;\n\t"                                                                           \
               "wgmma.mma_async.sp.sync.aligned.m64n" #n "k32.f32" types " {" MATMULS_REGISTERS_##n \
               "}, " a ", " b ", " e ", " half ", p, 1, 1, 0, 1;\n\t}"                              \
               : MATMULS_OPERANDS_##n(d)                                                            \
               : "l"(desc_a), "l"(desc_b), "r"(places), "r"(int(accumulate)), "n"(which))
#define MATMULS_MULTIPLY_TWO_OF_FOUR(types)                              \
  if constexpr (N == 64)                                                 \
    MATMULS_SPARSE_WGMMA(128, types, "%64", "%65", "%66", "%68", "%67"); \
  else if constexpr (N == 32)                                            \
    MATMULS_SPARSE_WGMMA(64, types, "%32", "%33", "%34", "%36", "%35");  \
  else                                                                   \
    MATMULS_SPARSE_WGMMA(32, types, "%16", "%17", "%18", "%20", "%19")

template <class T, int which, int N>
__device__ inline void wgmma_sparse(float (&d)[N], uint64_t desc_a, uint64_t desc_b, uint32_t places, bool accumulate) {
  static_assert(N == 16 || N == 32 || N == 64);
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    MATMULS_MULTIPLY_TWO_OF_FOUR(".bf16.bf16");
  } else {
    MATMULS_MULTIPLY_TWO_OF_FOUR(".f16.f16");
  }
}

// The same with a in registers, in PTX's wgmma layout. TF32: thread t holds rows t / 4 and t / 4 + 8 at k = t % 4, then
// at k = t % 4 + 4. 16 bits: two adjacent k each.
#define MATMULS_FRAGMENT_WGMMA(n, k, types, transpose, left, b, add)                                 \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " add                                           \
               ", 0;\n\t"                                                                            \
               "wgmma.mma_async.sync.aligned.m64n" #n "k" #k ".f32" types " {" MATMULS_REGISTERS_##n \
               "}, {" left "}, " b ", p, 1, 1" transpose ";\n\t}"                                    \
               : MATMULS_OPERANDS_##n(d)                                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b), "r"(int(accumulate)))
#define MATMULS_MULTIPLY_FRAGMENT(k, types, transpose)                                          \
  if constexpr (N == 128)                                                                       \
    MATMULS_FRAGMENT_WGMMA(256, k, types, transpose, "%128, %129, %130, %131", "%132", "%133"); \
  else if constexpr (N == 64)                                                                   \
    MATMULS_FRAGMENT_WGMMA(128, k, types, transpose, "%64, %65, %66, %67", "%68", "%69");       \
  else if constexpr (N == 32)                                                                   \
    MATMULS_FRAGMENT_WGMMA(64, k, types, transpose, "%32, %33, %34, %35", "%36", "%37");        \
  else if constexpr (N == 16)                                                                   \
    MATMULS_FRAGMENT_WGMMA(32, k, types, transpose, "%16, %17, %18, %19", "%20", "%21");        \
  else if constexpr (N == 8)                                                                    \
    MATMULS_FRAGMENT_WGMMA(16, k, types, transpose, "%8, %9, %10, %11", "%12", "%13");          \
  else                                                                                          \
    MATMULS_FRAGMENT_WGMMA(8, k, types, transpose, "%4, %5, %6, %7", "%8", "%9")

template <class T, bool b_k_apart, int N>
__device__ inline void wgmma_rs(float (&d)[N], const uint32_t (&a)[4], uint64_t desc_b, bool accumulate) {
  static_assert(N == 4 || N == 8 || N == 16 || N == 32 || N == 64 || N == 128);
  if constexpr (std::is_same_v<T, float>) {
    static_assert(!b_k_apart);  // TF32 has no transposed operand
    MATMULS_MULTIPLY_FRAGMENT(8, ".tf32.tf32", "");
  } else if constexpr (std::is_same_v<T, c10::BFloat16> && b_k_apart) {
    MATMULS_MULTIPLY_FRAGMENT(16, ".bf16.bf16", ", 1");
  } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
    MATMULS_MULTIPLY_FRAGMENT(16, ".bf16.bf16", ", 0");
  } else if constexpr (b_k_apart) {
    MATMULS_MULTIPLY_FRAGMENT(16, ".f16.f16", ", 1");
  } else {
    MATMULS_MULTIPLY_FRAGMENT(16, ".f16.f16", ", 0");
  }
}

// Loads one warp's A fragments of four K steps from a tile of 32 k x 32 columns of float32, one 128-byte row per k. The
// warp's 16 rows come from four 16-byte chunks: the first eight from chunks place0 and place0 ^ 5, the others likewise
// from place1; each lane passes its own chunk. The four k and eight columns that a warp reads at once are in different
// banks.
__device__ inline void load_tf32_fragments(uint32_t (&fragment)[4][4], const unsigned char* tile, int place0,
                                           int place1, int lane) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k8 = lane % 4 + i / 2 * 4;
      const float x = *reinterpret_cast<const float*>(tile + (8 * k + k8) * 128 +
                                                      ((i % 2 ? place1 : place0) ^ k8) * 16 + lane / 4 % 4 * 4);
      asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(fragment[k][i]) : "f"(x));
    }
}

#endif

}  // namespace matmuls::hopper
