// PeerRows: each rank of a host's GPUs writes rows of a tensor into the memory of the others, by one kernel, and waits
// for the rows that the others write into its own. No collective library takes part.
//
// Every rank has a buffer that all ranks have mapped: a header, then the rows that it receives, packed. A call is
//
//     1. tell the ranks that send rows here that the last ones were read: ready[this rank] = call number
//     2. wait until those that rows go to have said the same
//     3. write the rows; then arrived[this rank] = call number in their headers
//     4. wait until arrived[r] = call number for each rank r that sends rows here
//
// This is one kernel, on a stream of this object; the current stream runs others meanwhile. `send` launches it after
// what the current stream ran before, which has read the rows of the call before, and `wait` lets the current stream
// wait for its end. Call numbers are counted in GPU memory: a captured graph may be replayed.
#pragma once

#ifdef MATMULS_CUDA
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>
#include <vector>

namespace matmuls {

constexpr int kMostPeers = 16;
constexpr int64_t kPeerHeaderBytes = 1024;

// Who gets which rows. buffers: of every rank, as mapped here. starts: the rows starts[r] to starts[r + 1] of those
// that are sent go to rank r, where slots[r] is the place of the first one. sources: bit r is set if rank r sends here.
struct PeerTable {
  char* buffers[kMostPeers];
  int64_t starts[kMostPeers + 1], slots[kMostPeers];
  uint32_t sources;
  int rank, size;
};

class PeerRows {
 public:
  // buffer: bytes, this rank's own, with a zeroed header. addresses, starts, slots: as in the table. sources: ranks.
  // index: which rows of x are sent, int64; none: all, in order. seconds: until a rank that does not answer is given
  // up.
  PeerRows(at::Tensor buffer, const std::vector<int64_t>& addresses, int rank, std::optional<at::Tensor> index,
           const std::vector<int64_t>& starts, const std::vector<int64_t>& slots, const std::vector<int64_t>& sources,
           int64_t row_bytes, double seconds);
  ~PeerRows();
  PeerRows(const PeerRows&) = delete;
  PeerRows& operator=(const PeerRows&) = delete;

  // x must stay as it is until `wait` has been called.
  void send(const at::Tensor& x);
  void wait();
  // The rank that a kernel has given up, after which the process can use its GPU no more; -1 if none.
  int lost() const;

 private:
  void follow(c10::cuda::CUDAStream current);

  at::Tensor buffer_;
  std::optional<at::Tensor> index_;
  PeerTable table_{};
  int64_t row_bytes_, limit_;  // nanoseconds
  int* lost_ = nullptr;        // in host memory: 1 + the rank, or 0
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begun_ = nullptr, done_ = nullptr;
  std::optional<c10::cuda::CUDAStream> last_;  // the current stream of the last call
};

}  // namespace matmuls
#endif
