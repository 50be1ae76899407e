// Wrappers of PTX instructions that have no CUDA C++ function.
#pragma once

#include <cstdint>

namespace matmuls::ptx {

// 2^x and 1/x to 2 ulp, one instruction each. Denormals flush to zero, which avoids scaling code.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A word whose bits are 1 from bit n up: all of them for n < 0, none for n > 31.
__device__ inline uint32_t ones_from(int n) {
  uint32_t bits;
  asm("shl.b32 %0, %1, %2;" : "=r"(bits) : "r"(~0u), "r"(max(n, 0)));
  return bits;
}

// Makes a word opaque to the compiler: numbers unpacked from it are unpacked again instead of kept in registers.
__device__ inline void opaque(uint32_t& word) { asm volatile("" : "+r"(word)); }
__device__ inline void opaque(int& word) { asm volatile("" : "+r"(word)); }

// The same for an address: the compiler then adds a column offset to it in one instruction instead of recomputing the
// whole address.
template <class T>
__device__ inline void opaque(T*& address) {
  asm volatile("" : "+l"(address));
}

// L2 eviction priority of reads: evict_last (staying) or evict_first. evict_last if the data exceeds the L2, so that
// written lines are evicted as they come: a copy runs at 4.28 TB/s, 4.12 with equal priorities, 4.0 to 4.1 the other
// way round, depending on what other kernels left in the L2 (H200). evict_first if the data fits: 128x128 rows of 64x12
// run at 3.86 TB/s instead of 3.70.
using L2Policy = uint64_t;
__device__ inline L2Policy l2_policy(bool staying) {
#if __CUDA_ARCH__ >= 900
  L2Policy last, first;
  asm("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(last));
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(first));
  return staying ? last : first;
#else
  return 0;
#endif
}
// Loads 16 bytes if `there`, else 0, without a branch.
__device__ inline uint4 load_if(bool there, const uint4* from, [[maybe_unused]] L2Policy policy) {
  uint4 w{};
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\t"
      "@p ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %6;\n\t}"
      : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w)
      : "l"(from), "r"(static_cast<int>(there)), "l"(policy));
#else
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\t@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n\t}"
               : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w)
               : "l"(from), "r"(static_cast<int>(there)));
#endif
  return w;
}
// Loads 4 or 2 bytes if `there`, else 0, without a branch.
__device__ inline uint32_t load_if(bool there, const uint32_t* from) {
  uint32_t word = 0;
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\t@p ld.global.b32 %0, [%1];\n\t}"
               : "+r"(word)
               : "l"(from), "r"(static_cast<int>(there)));
  return word;
}
__device__ inline uint32_t load_if(bool there, const uint32_t* from, [[maybe_unused]] L2Policy policy) {
  uint32_t word = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\t@p ld.global.L2::cache_hint.b32 %0, [%1], %3;\n\t}"
               : "+r"(word)
               : "l"(from), "r"(static_cast<int>(there)), "l"(policy));
#else
  word = load_if(there, from);
#endif
  return word;
}
__device__ inline uint32_t load_if(bool there, const uint16_t* from) {
  uint32_t word = 0;
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\t@p ld.global.u16 %0, [%1];\n\t}"
               : "+r"(word)
               : "l"(from), "r"(static_cast<int>(there)));
  return word;
}
// Read-only load (ld.global.nc) with L1::evict_first, for values that no kernel writes meanwhile and that are used once
// or again soon.
template <class T>
__device__ inline T load_first_out(const T* from) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8);
  T x;
  if constexpr (sizeof(T) == 2)
    asm("ld.global.nc.L1::evict_first.b16 %0, [%1];" : "=h"(reinterpret_cast<uint16_t&>(x)) : "l"(from));
  else if constexpr (sizeof(T) == 4)
    asm("ld.global.nc.L1::evict_first.b32 %0, [%1];" : "=r"(reinterpret_cast<uint32_t&>(x)) : "l"(from));
  else
    asm("ld.global.nc.L1::evict_first.b64 %0, [%1];" : "=l"(reinterpret_cast<uint64_t&>(x)) : "l"(from));
  return x;
}
// Stores 16 bytes: `store` for data that is read soon, `store_once` without allocation in L1.
__device__ inline void store(void* to, uint4 w) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w) : "memory");
}
__device__ inline void store_once(void* to, uint4 w) {
  asm volatile("st.global.L1::no_allocate.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w.x), "r"(w.y), "r"(w.z),
               "r"(w.w)
               : "memory");
}

__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
__device__ inline void store_shared(uint32_t to, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}
// Stores the lower half of word.
__device__ inline void store_shared_half(uint32_t to, uint32_t word) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}
// cp.async of 16 bytes to shared memory. Copies up to cp_async_commit_group() form a group; only this thread may read
// it after cp_async_wait_group(). The L2 prefetches the `around` bytes that contain them: 256 makes norms of 8191
// bfloat16 columns 1 to 2.5 % faster (H200).
template <int around = 128>
__device__ inline void cp_async(void* shared, const void* from) {
#if __CUDA_ARCH__ >= 800
  static_assert(around == 128 || around == 256);
  if constexpr (around == 128)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(from)
                 : "memory");
  else
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(from)
                 : "memory");
#else
  *static_cast<uint4*>(shared) = *static_cast<const uint4*>(from);
#endif
}
// The same with an L2 policy.
__device__ inline void cp_async(void* shared, const void* from, [[maybe_unused]] L2Policy policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(from), "l"(policy)
               : "memory");
#else
  cp_async(shared, from);
#endif
}
// cp.async of 16 bytes if `there`; else writes zeros, and `from` is not read.
__device__ inline void cp_async_or_zero(void* shared, const void* from, bool there) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
#else
  *static_cast<uint4*>(shared) = there ? *static_cast<const uint4*>(from) : uint4{};
#endif
}
// cp.async of 4 bytes.
__device__ inline void cp_async_word(uint32_t* shared, const uint32_t* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(from) : "memory");
#else
  *shared = *from;
#endif
}
__device__ inline void cp_async_commit_group() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits for all but the last n groups, n <= 3.
__device__ inline void cp_async_wait_group(int n) {
#if __CUDA_ARCH__ >= 800
  if (n == 0)
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  else if (n == 1)
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  else if (n == 2)
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  else
    asm volatile("cp.async.wait_group 3;" ::: "memory");
#endif
}

// The same for n known at compile time.
template <int n>
__device__ inline void cp_async_wait_group() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
#endif
}

// ldmatrix: loads four 8x8 matrices of 16-bit elements. Lane l passes the address of row l % 8 of matrix l / 8, and
// gets of each matrix the elements 2 (l % 4) and the next of row l / 4; transposed: of column l / 4.
template <bool transposed = false>
__device__ inline void ldmatrix_x4(uint32_t row, uint32_t (&a)[4]) {
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(row)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(row)
                 : "memory");
}
// d [16, 8] += a [16, 16] b [16, 8], of bfloat16 or float16 elements, in float32. Lane l, with g = l / 4 and t = 2 (l %
// 4), has of two neighbours each: of d the columns t of the rows g and g + 8; of a the columns t of these rows, then
// the columns t + 8; of b the rows t and t + 8 of column g.
template <bool bfloat16>
__device__ inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (bfloat16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Programmatic dependent launch (PDL), for kernels launched by launch_programmatic and those before them.
// griddepcontrol_launch_dependents: the next kernel's blocks may start. griddepcontrol_wait: all writes of earlier
// kernels are visible after it. Before sm_90 both do nothing: a kernel starts after the previous one has ended.
__device__ inline void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ inline void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- flags in memory that several GPUs have mapped
__device__ inline unsigned long long load_acquire_system(const unsigned long long* flag) {
  unsigned long long now;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(now) : "l"(flag) : "memory");
  return now;
}
__device__ inline void store_release_system(unsigned long long* flag, unsigned long long now) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(now) : "memory");
}
__device__ inline uint64_t globaltimer() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

#if __CUDA_ARCH__ >= 900
// ---- counters in global memory that blocks synchronize on
__device__ inline void add_release(unsigned* counter, unsigned n) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(n) : "memory");
}
// Adds 1, or sets the counter to zero if it was `last`.
__device__ inline void increment(unsigned* counter, unsigned last) {
  asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(counter), "r"(last) : "memory");
}
__device__ inline unsigned load_relaxed(const unsigned* counter) {
  unsigned now;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  return now;
}
__device__ inline unsigned add_acquire_release(unsigned* counter, unsigned n) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(n) : "memory");
  return before;
}
__device__ inline unsigned load_acquire(const unsigned* counter) {
  unsigned now;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  return now;
}

// ---- clusters: blocks that can access each other's shared memory
//
// Address of the same shared variable in another block of the cluster.
__device__ inline uint32_t mapa(const void* shared, unsigned block) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(shared)), "r"(block));
  return remote;
}
__device__ inline unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline unsigned cluster_blocks() {
  unsigned blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}
// cluster_arrive, then cluster_wait: every thread of every block of the cluster arrives and waits for all.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// Arrives without a memory fence: for threads that have written nothing that others read, except new barriers.
__device__ inline void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// mbarrier that counts arrivals and bytes: `expect` arrives and adds bytes to expect, `send` delivers bytes, `wait`
// waits for all.
__device__ inline void mbarrier_init(uint64_t* barrier, unsigned arrivals = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void mbarrier_arrive(const uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ inline void mbarrier_arrive_expect_tx(uint64_t* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ inline void mbarrier_wait(uint64_t* barrier, unsigned parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}
__device__ inline void st_async(uint32_t to, uint64_t word, uint32_t remote_barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to), "l"(word),
               "r"(remote_barrier)
               : "memory");
}
#endif

}  // namespace matmuls::ptx
