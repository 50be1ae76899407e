// Library handles: one per (library, device, host thread), borrowed for the length of one call.
//
// A pool owns the handles and outlives the interpreter on purpose: nothing is destroyed at exit, when the driver may
// already be gone. A thread that ends leaves its handles to the next one that starts.
#pragma once

#ifdef MATMULS_CUDA
#include <c10/cuda/CUDAGuard.h>
#endif

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "glue/checks.h"

namespace matmuls {

enum class Library { cublas, cublaslt, cusparse };

// Creates this thread's handle on every visible device; returns how many devices are ready, 0 without CUDA.
int64_t init_handles(Library library);
// Destroys the library's handles and workspaces of every thread on every device; returns how many there were.
// Raises while a stream that used one is capturing a CUDA graph.
int64_t destroy_handles(Library library);

struct WorkspaceInfo {
  uint64_t stream;
  int64_t nbytes;
};
struct HandleInfo {
  std::string library, thread;  // thread: an id, or "free" when the thread that made it has ended
  int64_t device;
  std::vector<WorkspaceInfo> workspaces;
};
std::vector<HandleInfo> live_handles();

// Bytes of workspace per (handle, stream); 0 takes the default, 32 MiB from sm_90 on and 8 MiB before.
void set_workspace_size(int64_t nbytes);
int64_t workspace_size();

// True where the device's current stream captures a CUDA graph.
bool is_capturing(at::Device device);
// The id of the device's current stream, which no later stream gets; 0 for the default one and without CUDA. Not to be
// asked during a capture.
uint64_t current_stream(at::Device device);

// Wait for the device's current stream, or for all of its streams, also while another thread captures a graph.
void synchronize_stream(at::Device device);
void synchronize_device(at::Device device);

// A scope in which this thread may make calls that a capture in another thread forbids: allocations, event queries.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
};

#ifdef MATMULS_CUDA
// What every CUDA operation opens with: the tensor's device becomes the current one, and a forked child of a process
// with handles is told so instead of meeting whatever CUDA answers there.
class OperationGuard {
 public:
  OperationGuard(const char* op, const at::Tensor& tensor);

 private:
  c10::cuda::CUDAGuard guard_;
};

struct Slot;

// A handle bound to the current device and stream, locked for this thread until the end of the scope.
class Borrowed {
 public:
  Borrowed(Library library, const char* op);
  // Whether it would be given: none is made while this thread captures a graph.
  static bool is_to_be_had(Library library);

  cublasHandle_t cublas() const;
  cublasLtHandle_t cublaslt() const;
  cusparseHandle_t cusparse() const;

  void* workspace() const { return workspace_.data_ptr(); }
  size_t workspace_nbytes() const { return workspace_.nbytes(); }
  // What an operation keeps beside the handle (plans, descriptors); freed with it.
  std::shared_ptr<void>& attachment() const;

 private:
  Slot& slot_;
  std::unique_lock<std::mutex> lock_;
  at::Tensor workspace_;
};

#endif
}  // namespace matmuls
