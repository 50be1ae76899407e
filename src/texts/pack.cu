// pack_padded and unpack_padded (pack.h) on a GPU.
#ifdef __CUDACC__
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "texts/pack.h"

namespace matmuls::texts {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;

// Calls f(row, column, tokens ahead) for each of a warp's consecutive tokens, 32 at a time, one a lane. Returns the
// tokens ahead of the next warp's. f is called by lanes that have a token.
template <class F>
__device__ Counts each_token(const Padded& in, Counts before, const F& f) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = in.batch * in.length;
  const int each = (count + kThreads - 1) / kThreads * 32;  // tokens of a warp
  const int first = min(count, warp * each), last = min(count, first + each);
  const unsigned lower = (1u << lane) - 1;
#pragma unroll 4
  for (int base = first; base < last; base += 32) {
    const int i = base + lane, row = i / in.length, column = i % in.length;
    const Counts own = i < last ? count_token(in, row, column) : Counts{0, 0};
    const unsigned computed = __ballot_sync(~0u, own.computed), numbered = __ballot_sync(~0u, own.numbered);
    if (i < last) f(row, column, before + Counts{__popc(computed & lower), __popc(numbered & lower)});
    before = before + Counts{__popc(computed), __popc(numbered)};
  }
  return before;
}

// The tokens ahead of each warp's, of all warps' own numbers; all of them in `total`.
__device__ Counts exclusive_sums(Counts own, Counts* of_warps, Counts& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) of_warps[warp] = own;
  __syncthreads();
  Counts ahead = of_warps[lane];
  for (int step = 1; step < 32; step *= 2) {
    const Counts other{__shfl_up_sync(~0u, ahead.computed, step), __shfl_up_sync(~0u, ahead.numbered, step)};
    if (lane >= step) ahead = ahead + other;
  }
  const auto of_lane = [&](int from) {
    return Counts{__shfl_sync(~0u, ahead.computed, from), __shfl_sync(~0u, ahead.numbered, from)};
  };
  total = of_lane(kWarps - 1);
  const Counts through = of_lane(warp);
  return {through.computed - own.computed, through.numbered - own.numbered};
}

// One block, whose warps take consecutive tokens: it counts, then writes where texts begin, then packs.
__global__ void __launch_bounds__(kThreads) pack_kernel(Padded in, Packed out) {
  extern __shared__ Counts texts[];  // [batch]: tokens ahead of each text
  __shared__ Counts of_warps[kWarps];
  Counts total;
  const Counts own = each_token(in, {0, 0}, [](int, int, Counts) {});
  const Counts start = exclusive_sums(own, of_warps, total);
  each_token(in, start, [&](int row, int column, Counts before) {
    if (column == 0) texts[row] = before;
  });
  __syncthreads();
  each_token(in, start,
             [&](int row, int column, Counts before) { pack_token(in, out, row, column, before, texts[row]); });
  for (int at = total.computed + threadIdx.x; at < out.size; at += kThreads) out.set(at, 0, 0, 0);
  if (threadIdx.x == 0) out.queries[0] = out.keys[0] = 0;
  for (int row = threadIdx.x; row < out.texts; row += kThreads) {
    const auto ahead = [&](int text) { return text < in.batch ? texts[text].computed : total.computed; };
    out.segment(row, ahead(row), ahead(row + 1), row < in.batch && !in.shown(row, 0));
  }
}

// out [rows, vectors] <- states[place[row]], or zeros where place is -1; in vectors of V.
template <class V>
__global__ void __launch_bounds__(256) unpack_kernel(const V* __restrict__ states, const int32_t* __restrict__ place,
                                                     V* __restrict__ out, int64_t count, int vectors) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int64_t from = place[i / vectors];
  out[i] = from < 0 ? V{} : states[from * vectors + i % vectors];
}

template <class V>
void unpack(const at::Tensor& states, const int32_t* place, const at::Tensor& out) {
  const int64_t vectors = states.size(1) * states.element_size() / sizeof(V), count = out.nbytes() / sizeof(V);
  unpack_kernel<V><<<static_cast<unsigned>((count + 255) / 256), 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
      static_cast<const V*>(states.const_data_ptr()), place, static_cast<V*>(out.mutable_data_ptr()), count,
      static_cast<int>(vectors));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

void pack_on_gpu(const Padded& in, const Packed& out) {
  pack_kernel<<<1, kThreads, sizeof(Counts) * in.batch, c10::cuda::getCurrentCUDAStream()>>>(in, out);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void unpack_on_gpu(const at::Tensor& states, const int32_t* place, const at::Tensor& out) {
  const auto address = reinterpret_cast<uintptr_t>(states.const_data_ptr());
  const uintptr_t both = address | static_cast<uintptr_t>(states.size(1) * states.element_size());  // and a row's bytes
  both % 16 == 0  ? unpack<int4>(states, place, out)
  : both % 4 == 0 ? unpack<int32_t>(states, place, out)
  : both % 2 == 0 ? unpack<int16_t>(states, place, out)
                  : unpack<int8_t>(states, place, out);
}

}  // namespace matmuls::texts
#endif
