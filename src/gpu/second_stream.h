// Second streams, for work that runs at the same time as the current stream's.
//
// They are created here and used by nothing else. torch.cuda.Stream hands out the same 32 streams again and again: one
// may be in use elsewhere, or capture a graph there.
#pragma once

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace matmuls {

// A stream, and an event for waits between it and its main stream.
struct SecondStream {
  cudaStream_t stream;
  cudaEvent_t event;
};

// This thread's second stream for `main`: two concurrent captures must not share one.
SecondStream second_stream(c10::cuda::CUDAStream main);

// While it lives, work may be given to the second stream of the current one:
//
//    current stream   ----*-----------*---->
//                          \         /
//    second stream          *-------*          waits for all earlier work, and is waited for by all later work
//
// Memory that the second stream uses must be allocated before and freed after.
class Concurrent {
 public:
  Concurrent();
  ~Concurrent();  // joins, if join() was not called because of an exception
  Concurrent(const Concurrent&) = delete;

  void join();
  c10::cuda::CUDAStream stream() const;

 private:
  c10::cuda::CUDAStream main_;
  SecondStream second_;
  bool joined_ = false;
};

}  // namespace matmuls
