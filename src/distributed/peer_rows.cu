// PeerRows on GPUs that map each other's memory: the kernels that write rows and wait for them.
#ifdef __CUDACC__
#include "distributed/peer_rows.h"

#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "glue/handles.h"
#include "gpu/device_limits.h"
#include "gpu/ptx.cuh"

namespace matmuls {
namespace {

constexpr int kThreads = 512, kUnroll = 4;

// At the start of every buffer. Other ranks write ready and arrived; `calls` and `blocks` are of this rank alone.
struct Header {
  unsigned long long ready[kMostPeers], arrived[kMostPeers], calls;
  unsigned blocks;  // of the running `send` that have written their rows
};
static_assert(sizeof(Header) <= kPeerHeaderBytes);

__device__ Header* header_of(const PeerTable& t, int rank) { return reinterpret_cast<Header*>(t.buffers[rank]); }

// A rank that does not answer in time ends the kernel with an error that no later call on this GPU survives, since its
// rows are missing: *lost says which one it was.
__device__ void await(const unsigned long long* flag, unsigned long long call, int rank, int* lost, uint64_t limit) {
  if (ptx::load_acquire_system(flag) >= call) return;
  const uint64_t begin = ptx::globaltimer();
  while (ptx::load_acquire_system(flag) < call) {
    if (ptx::globaltimer() - begin < limit) continue;
    *const_cast<volatile int*>(lost) = rank + 1;
    __threadfence_system();
    __trap();
  }
}

// x [.., vectors] of words W. first: the row to begin with, so that not all ranks write to the same one at once.
// lanes: threads that share a row, a power of 2.
template <class W>
__device__ void write_rows(const PeerTable& t, const W* x, const int64_t* index, int64_t vectors, int lanes) {
  const int64_t rows = t.starts[t.size], first = t.starts[t.rank + 1], teams = kThreads / lanes;
  const int64_t step = int64_t{gridDim.x} * teams;
  for (int64_t i = blockIdx.x * teams + threadIdx.x / lanes; i < rows; i += kUnroll * step) {
    const W* from[kUnroll];
    W* to[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      from[u] = nullptr, to[u] = nullptr;
      if (i + u * step >= rows) continue;
      int64_t row = i + u * step + first;
      if (row >= rows) row -= rows;
      int r = 0;
      while (row >= t.starts[r + 1]) ++r;
      from[u] = x + (index == nullptr ? row : index[row]) * vectors;
      to[u] = reinterpret_cast<W*>(t.buffers[r] + kPeerHeaderBytes) + (t.slots[r] + row - t.starts[r]) * vectors;
    }
    for (int64_t v = threadIdx.x % lanes; v < vectors; v += lanes) {
      W words[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (from[u] != nullptr) words[u] = from[u][v];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (from[u] != nullptr) to[u][v] = words[u];
    }
  }
}

// Writes this rank's rows; its last block then waits for those of the others.
template <class W>
__global__ void __launch_bounds__(kThreads)
    send_kernel(const __grid_constant__ PeerTable t, const W* x, const int64_t* index, int64_t vectors, int lanes,
                int* lost, uint64_t limit) {
  __shared__ bool is_last;
  Header* const own = header_of(t, t.rank);
  const unsigned long long call = *const_cast<volatile unsigned long long*>(&own->calls) + 1;
  const int r = threadIdx.x;
  const bool is_target = r < t.size && t.starts[min(r, t.size - 1) + 1] > t.starts[min(r, t.size - 1)];
  if (blockIdx.x == 0 && r < t.size && (t.sources >> r & 1) != 0)
    ptx::store_release_system(&header_of(t, r)->ready[t.rank], call);
  if (is_target) await(&own->ready[r], call, r, lost, limit);
  __syncthreads();
  write_rows(t, x, index, vectors, lanes);
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();  // the rows of this block before its arrival
    is_last = atomicAdd(&own->blocks, 1u) + 1 == gridDim.x;
    __threadfence_system();  // the arrivals of all blocks before the flags
    if (is_last) own->blocks = 0, own->calls = call;
  }
  __syncthreads();
  if (!is_last) return;
  if (is_target) {
    __threadfence_system();
    ptx::store_release_system(&header_of(t, r)->arrived[t.rank], call);
  }
  __syncthreads();  // every flag is set before any is waited for
  if (r < t.size && (t.sources >> r & 1) != 0) await(&own->arrived[r], call, r, lost, limit);
}

bool captures(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

// CUDA may load a kernel at its first launch, and then wait for all that runs on the GPU: for a kernel that waits for
// another rank, which may wait for this launch.
template <class W>
void load_kernel() {
  cudaFuncAttributes attributes;
  C10_CUDA_CHECK(cudaFuncGetAttributes(&attributes, send_kernel<W>));
}

template <class W>
void launch_send(const PeerTable& table, const void* x, const int64_t* index, int64_t row_bytes, int* lost,
                 int64_t limit, cudaStream_t stream) {
  const int64_t vectors = row_bytes / static_cast<int64_t>(sizeof(W)), rows = table.starts[table.size];
  int lanes = 1;
  while (lanes < 32 && lanes < vectors) lanes *= 2;
  // Half of the GPU is left to kernels that other streams wait for: this one may wait for them by way of other ranks.
  const int64_t most = std::max(1, device_limits().multiprocessors / 2);
  const int64_t blocks = std::clamp<int64_t>(ceil_of(rows * lanes, kThreads * kUnroll), 1, most);
  send_kernel<W><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(table, static_cast<const W*>(x), index,
                                                                         vectors, lanes, lost, limit);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

PeerRows::PeerRows(at::Tensor buffer, const std::vector<int64_t>& addresses, int rank, std::optional<at::Tensor> index,
                   const std::vector<int64_t>& starts, const std::vector<int64_t>& slots,
                   const std::vector<int64_t>& sources, int64_t row_bytes, double seconds)
    : buffer_(std::move(buffer)), index_(std::move(index)), row_bytes_(row_bytes), limit_(int64_t(seconds * 1e9)) {
  const auto size = static_cast<int>(addresses.size());
  TORCH_CHECK(size <= kMostPeers && 0 <= rank && rank < size && slots.size() == addresses.size() &&
                  starts.size() == addresses.size() + 1 && row_bytes > 0,
              "PeerRows: expected at most ", kMostPeers, " ranks with a place for each, got ", size);
  table_.rank = rank, table_.size = size;
  for (int r = 0; r < size; ++r) table_.buffers[r] = reinterpret_cast<char*>(addresses[r]), table_.slots[r] = slots[r];
  std::copy(starts.begin(), starts.end(), table_.starts);
  for (const int64_t r : sources) table_.sources |= 1u << r;
  const c10::cuda::CUDAGuard guard(buffer_.device());
  C10_CUDA_CHECK(cudaHostAlloc(reinterpret_cast<void**>(&lost_), sizeof(int), cudaHostAllocMapped));
  *lost_ = 0;
  load_kernel<uint4>(), load_kernel<uint2>(), load_kernel<uint32_t>(), load_kernel<uint16_t>();
  int least = 0, greatest = 0;
  C10_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  C10_CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
  for (cudaEvent_t* const event : {&begun_, &done_})
    C10_CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
}

// After an error of the GPU, torch cannot unmap the buffer and would end the process: it is left as it is.
PeerRows::~PeerRows() {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(buffer_.get_device());
  if (cudaDeviceSynchronize() == cudaSuccess) {
    cudaEventDestroy(begun_);
    cudaEventDestroy(done_);
    cudaStreamDestroy(stream_);
    cudaFreeHost(lost_);
  } else {
    static_cast<void>(new at::Tensor(buffer_));
  }
  cudaSetDevice(before);
}

int PeerRows::lost() const { return *const_cast<volatile int*>(lost_) - 1; }

// The own stream waits for what the current one has run, and the one of the last call, which read the rows.
void PeerRows::follow(c10::cuda::CUDAStream current) {
  const bool is_captured = captures(current);
  if (!is_captured && last_ && *last_ != current && !captures(*last_)) {
    C10_CUDA_CHECK(cudaEventRecord(begun_, *last_));
    C10_CUDA_CHECK(cudaStreamWaitEvent(stream_, begun_));
  }
  C10_CUDA_CHECK(cudaEventRecord(begun_, current));
  C10_CUDA_CHECK(cudaStreamWaitEvent(stream_, begun_));
  if (!is_captured) last_ = current;
}

void PeerRows::send(const at::Tensor& x) {
  TORCH_CHECK(
      x.is_contiguous() && x.dim() == 2 && x.size(1) * x.element_size() == row_bytes_ && x.device() == buffer_.device(),
      "PeerRows: expected contiguous rows of ", row_bytes_, " bytes on ", buffer_.device(), ", got ", x.sizes(), " of ",
      x.scalar_type(), " on ", x.device());
  TORCH_CHECK(lost() < 0, "PeerRows: expected an answer of rank ", lost(), ", got none in time");
  const OperationGuard guard("distributed.plan", x);
  follow(c10::cuda::getCurrentCUDAStream());
  const void* const rows = x.const_data_ptr();
  const int64_t* const index = index_ ? index_->const_data_ptr<int64_t>() : nullptr;
  const int64_t aligned = reinterpret_cast<int64_t>(rows) | row_bytes_;
  if (aligned % 16 == 0)
    launch_send<uint4>(table_, rows, index, row_bytes_, lost_, limit_, stream_);
  else if (aligned % 8 == 0)
    launch_send<uint2>(table_, rows, index, row_bytes_, lost_, limit_, stream_);
  else if (aligned % 4 == 0)
    launch_send<uint32_t>(table_, rows, index, row_bytes_, lost_, limit_, stream_);
  else
    launch_send<uint16_t>(table_, rows, index, row_bytes_, lost_, limit_, stream_);
  C10_CUDA_CHECK(cudaEventRecord(done_, stream_));
}

void PeerRows::wait() {
  const OperationGuard guard("distributed.plan", buffer_);
  C10_CUDA_CHECK(cudaStreamWaitEvent(c10::cuda::getCurrentCUDAStream(), done_));
}

}  // namespace matmuls
#endif
