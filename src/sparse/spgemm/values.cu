// The launches for the values of C = A @ B on a GPU.
#ifdef __CUDACC__
#include <ATen/Dispatch.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "glue/scalar_types.h"
#include "gpu/device_limits.h"
#include "sparse/spgemm/gpu.h"
#include "sparse/spgemm/indices_of.cuh"
#include "sparse/spgemm/values.cuh"

namespace matmuls::spgemm {

namespace {

using at::Tensor;

// Mean columns of C's rows from which on a warp takes a row, not 8 lanes. Estimated, not measured.
constexpr int64_t kMeanForWarps = 24;

// Memory of the lists that short_rows_kernel writes: bounds by the nonzeros of C.
struct Lists {
  Tensor memory;
  Work work;

  Lists(const Tensor& like, int64_t nonzeros) {
    constexpr int64_t kLater = sizeof(Later) / sizeof(int64_t);
    const int64_t tiles = nonzeros / (kByWarp / 2) + 1, rows = nonzeros / kByLanes + 1;
    const int64_t words = ceil_of(tiles * static_cast<int64_t>(sizeof(Tile)), 8);
    memory = empty({kLater + words + ceil_of(rows, 2)}, like.options().dtype(at::kLong));
    int64_t* const data = memory.mutable_data_ptr<int64_t>();
    work = {reinterpret_cast<Later*>(data), reinterpret_cast<uint32_t*>(data + kLater + words),
            reinterpret_cast<Tile*>(data + kLater), static_cast<unsigned long long>(rows),
            static_cast<unsigned long long>(tiles)};
  }
};

template <class T, class F, class I>
void launch(const Call<T, I>& call, const Work& work, int64_t nonzeros) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const int64_t resident = 16 * device_limits().multiprocessors;
  C10_CUDA_CHECK(cudaMemsetAsync(work.later, 0, sizeof(Later), stream));
  const auto blocks = [&](int64_t rows, int lanes, int64_t most) {
    return static_cast<unsigned>(std::clamp<int64_t>(ceil_of(rows, kValueThreads / lanes), 1, most));
  };
  if (nonzeros / call.rows < kMeanForWarps) {
    short_rows_kernel<8, kByLanes, true, T, F, I>
        <<<blocks(call.rows, 8, INT32_MAX), kValueThreads, 0, stream>>>(call, work);
    if (nonzeros > kByLanes)
      short_rows_kernel<32, kByWarp, false, T, F, I>
          <<<blocks(nonzeros / kByLanes, 32, resident), kValueThreads, 0, stream>>>(call, work);
  } else {
    short_rows_kernel<32, kByWarp, true, T, F, I>
        <<<blocks(call.rows, 32, INT32_MAX), kValueThreads, 0, stream>>>(call, work);
  }
  if (nonzeros > kByWarp) {
    tiles_kernel<T, F, I><<<blocks(nonzeros / (kByWarp / 2), 32, resident), kValueThreads, 0, stream>>>(call, work);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

void values_on_gpu(const Pattern& a, const Pattern& b, const Pattern& c, const Tensor& a_values, const Tensor& b_values,
                   const Tensor& out) {
  const Lists lists(c.crow, c.nonzeros());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "csr_spgemm", [&] {
    AT_DISPATCH_INDEX_TYPES(c.crow.scalar_type(), "csr_spgemm", [&] {
      using F = arithmetic_t<scalar_t>;
      const Call<scalar_t, index_t> call{indices_of<index_t>(a),
                                         indices_of<index_t>(b),
                                         indices_of<index_t>(c),
                                         a_values.const_data_ptr<scalar_t>(),
                                         b_values.const_data_ptr<scalar_t>(),
                                         out.mutable_data_ptr<scalar_t>(),
                                         c.rows(),
                                         b.rows(),
                                         c.nonzeros()};
      launch<scalar_t, F, index_t>(call, lists.work, c.nonzeros());
    });
  });
}

}  // namespace matmuls::spgemm
#endif
