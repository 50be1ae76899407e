#ifdef MATMULS_CUDA
#include "gpu/counter_slots.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>

#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

namespace matmuls {
namespace {

using SlotKey = std::tuple<int, unsigned long long, unsigned long long>;  // GPU, stream, capture or 0

// Never destroyed: graphs may be destroyed after the process's statics.
struct CounterSlots {
  std::mutex mutex;
  std::map<SlotKey, int> taken;
  std::map<int, std::vector<int>> free;  // by GPU
  std::map<int, int> used;               // number of slots that have ever been taken, by GPU

  std::optional<int> take(const SlotKey& key) {
    const int device = std::get<0>(key);
    auto& given_back = free[device];
    if (given_back.empty() && used[device] == kCounterSlots) return std::nullopt;
    int slot;
    if (given_back.empty()) {
      slot = used[device]++;
    } else {
      slot = given_back.back();
      given_back.pop_back();
    }
    return taken[key] = slot;
  }
  void give_back(const SlotKey& key) {
    const auto found = taken.find(key);
    free[std::get<0>(key)].push_back(found->second);
    taken.erase(found);
  }
};
CounterSlots& slots() {
  static CounterSlots& all = *new CounterSlots;
  return all;
}

cudaError_t capture_of(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                       cudaGraph_t* graph) {
#if CUDART_VERSION >= 13000
  return cudaStreamGetCaptureInfo(stream, status, id, graph);
#else
  return cudaStreamGetCaptureInfo_v2(stream, status, id, graph);
#endif
}

// The driver calls it when nothing can launch the graph any more; no call of CUDA is allowed in it.
void CUDART_CB graph_destroyed(void* of) {
  const std::unique_ptr<const SlotKey> key(static_cast<const SlotKey*>(of));
  const std::lock_guard lock(slots().mutex);
  slots().give_back(*key);
}

}  // namespace

std::optional<int> counter_slot(cudaStream_t stream) {
  unsigned long long id = 0, capture = 0;
  cudaStreamCaptureStatus status;
  cudaGraph_t graph = nullptr;
  C10_CUDA_CHECK(capture_of(stream, &status, &capture, &graph));
  const bool captures = status == cudaStreamCaptureStatusActive;
  if (captures) {
    id = reinterpret_cast<uintptr_t>(stream);  // a stream's id cannot be queried in a capture
  } else {
    capture = 0;
    C10_CUDA_CHECK(cudaStreamGetId(stream, &id));
  }
  const SlotKey key{c10::cuda::current_device(), id, capture};
  std::optional<int> slot;
  {
    const std::lock_guard lock(slots().mutex);
    if (const auto found = slots().taken.find(key); found != slots().taken.end()) return found->second;
    slot = slots().take(key);
  }
  if (!captures || !slot) return slot;
  // The driver may hold a lock of its own here and in graph_destroyed: this thread must not hold the mutex.
  auto of = std::make_unique<SlotKey>(key);
  cudaUserObject_t owner;
  if (cudaUserObjectCreate(&owner, of.get(), graph_destroyed, 1, cudaUserObjectNoDestructorSync) != cudaSuccess) {
    (void)cudaGetLastError();
    const std::lock_guard lock(slots().mutex);
    slots().give_back(key);
    return std::nullopt;
  }
  (void)of.release();  // from here on graph_destroyed frees it
  if (cudaGraphRetainUserObject(graph, owner, 1, cudaGraphUserObjectMove) == cudaSuccess) return slot;
  (void)cudaGetLastError();
  (void)cudaUserObjectRelease(owner, 1);
  return std::nullopt;
}

}  // namespace matmuls
#endif
