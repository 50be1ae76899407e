// Library handles: one per (library, device, host thread), borrowed for the duration of one call.
//
// The pool owns the handles and outlives the interpreter on purpose: nothing is destroyed at exit, when the driver may
// already be gone. The handles of a thread that ends are reused by the next thread that starts.
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

// Creates this thread's handle on every visible device; returns the number of devices, 0 without CUDA.
int64_t init_handles(Library library);
// Destroys the library's handles and workspaces of all threads on all devices; returns the number of handles. Raises
// while a stream that used one captures a CUDA graph.
int64_t destroy_handles(Library library);

struct WorkspaceInfo {
  uint64_t stream;
  int64_t nbytes;
};
struct HandleInfo {
  std::string library, thread;  // thread: an id, or "free" if the thread that made the handle has ended
  int64_t device;
  std::vector<WorkspaceInfo> workspaces;
};
std::vector<HandleInfo> live_handles();

// Bytes of workspace per (handle, stream); 0 selects the default: 32 MiB from sm_90 on, 8 MiB before.
void set_workspace_size(int64_t nbytes);
int64_t workspace_size();

// True if the device's current stream captures a CUDA graph.
bool is_capturing(at::Device device);
// Id of the device's current stream, never reused by a later stream; 0 for the default stream and without CUDA. Must
// not be called during a capture.
uint64_t current_stream(at::Device device);

// Waits for the device's current stream; allowed while another thread captures a graph.
void synchronize_stream(at::Device device);
// Waits for all streams of the device; raises if one of them captures a graph.
void synchronize_device(at::Device device);

// Scope in which this thread may make calls that a capture in another thread forbids, as torch's default capture mode
// is global: allocations, frees, event queries.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
};

#ifdef MATMULS_CUDA
// True in a forked child of a process with handles: it must make no call of CUDA, not even to free something.
bool is_forked();

// [nbytes] bytes on the current device by cudaMalloc, not by torch's caching allocator: its memory may belong to a
// private pool with its own accounting (CUDA graph trees), which a workspace outlives. `name`: for the error if memory
// is out. To free them waits for the device.
at::Tensor own_memory(const char* op, const char* name, int64_t nbytes);

// Every CUDA operation begins with this guard: it makes the tensor's device current, and raises in a forked child of a
// process with handles before CUDA fails there.
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
  // False if Borrowed would raise: no handle is created while this thread captures a graph.
  static bool is_available(Library library);

  cublasHandle_t cublas() const;
  cublasLtHandle_t cublaslt() const;
  cusparseHandle_t cusparse() const;

  void* workspace() const { return workspace_.data_ptr(); }
  size_t workspace_nbytes() const { return workspace_.nbytes(); }
  // Data that an operation keeps with the handle (plans, descriptors); freed with it.
  std::shared_ptr<void>& attachment() const;

 private:
  Slot& slot_;
  std::unique_lock<std::mutex> lock_;
  at::Tensor workspace_;
};

#endif
}  // namespace matmuls
