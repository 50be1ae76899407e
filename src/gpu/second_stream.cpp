#ifdef MATMULS_CUDA
#include "gpu/second_stream.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "glue/handles.h"

namespace matmuls {
namespace {

constexpr size_t kMost = 64;  // per thread, before they are given back

// Streams of threads that have ended, by device. Never destroyed: threads may end after the process's statics.
struct Free {
  std::mutex mutex;
  std::map<int, std::vector<SecondStream>> streams;
};
Free& free_streams() {
  static Free& all = *new Free;
  return all;
}

// False if the stream is part of a capture that its former thread left open.
bool is_idle(const SecondStream& s) {
  cudaStreamCaptureStatus status;
  C10_CUDA_CHECK(cudaStreamIsCapturing(s.stream, &status));
  return status == cudaStreamCaptureStatusNone;
}

SecondStream take(int device) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  const RelaxedCapture relaxed;
  {
    const std::lock_guard lock(free_streams().mutex);
    auto& some = free_streams().streams[device];
    for (SecondStream& s : some)
      if (is_idle(s)) {
        std::swap(s, some.back());
        const SecondStream found = some.back();
        some.pop_back();
        return found;
      }
  }
  SecondStream made{};
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&made.stream, cudaStreamNonBlocking));
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&made.event, cudaEventDisableTiming));
  return made;
}

struct OfThread {
  const pid_t process = getpid();
  std::map<std::pair<int, cudaStream_t>, SecondStream> streams;  // by the device and the main stream

  void give_back() {
    const std::lock_guard lock(free_streams().mutex);
    for (const auto& [key, s] : streams) free_streams().streams[key.first].push_back(s);
    streams.clear();
  }
  // A forked child has none of the parent's streams, and the mutex may be locked there for ever.
  ~OfThread() {
    if (getpid() == process) give_back();
  }
};

void wait(cudaStream_t waiting, cudaStream_t earlier, cudaEvent_t event) {
  C10_CUDA_CHECK(cudaEventRecord(event, earlier));
  C10_CUDA_CHECK(cudaStreamWaitEvent(waiting, event, 0));
}

}  // namespace

SecondStream second_stream(c10::cuda::CUDAStream main) {
  static thread_local OfThread own;
  const std::pair<int, cudaStream_t> key{main.device_index(), main.stream()};
  if (const auto found = own.streams.find(key); found != own.streams.end()) return found->second;
  if (own.streams.size() >= kMost) own.give_back();
  return own.streams[key] = take(key.first);
}

Concurrent::Concurrent() : main_(c10::cuda::getCurrentCUDAStream()), second_(second_stream(main_)) {
  wait(second_.stream, main_, second_.event);
}

void Concurrent::join() {
  joined_ = true;
  wait(main_, second_.stream, second_.event);
}

Concurrent::~Concurrent() {
  if (joined_) return;
  (void)cudaEventRecord(second_.event, second_.stream);
  (void)cudaStreamWaitEvent(main_, second_.event, 0);
}

c10::cuda::CUDAStream Concurrent::stream() const {
  return c10::cuda::getStreamFromExternal(second_.stream, main_.device_index());
}

}  // namespace matmuls
#endif
