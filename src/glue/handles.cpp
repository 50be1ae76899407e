#include "glue/handles.h"

#ifndef MATMULS_CUDA

namespace matmuls {
int64_t init_handles(Library) { return 0; }
int64_t destroy_handles(Library) { return 0; }
std::vector<HandleInfo> live_handles() { return {}; }
static int64_t workspace_nbytes = 0;
void set_workspace_size(int64_t nbytes) {
  TORCH_CHECK(nbytes >= 0, "set_workspace_size: expected a size >= 0 bytes, got ", nbytes);
  workspace_nbytes = nbytes;
}
int64_t workspace_size() { return workspace_nbytes; }
bool is_capturing(at::Device) { return false; }
uint64_t current_stream(at::Device) { return 0; }
void synchronize_stream(at::Device) {}
void synchronize_device(at::Device) {}
struct RelaxedCapture::Guard {};
RelaxedCapture::RelaxedCapture() = default;
RelaxedCapture::~RelaxedCapture() = default;
}  // namespace matmuls

#else

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include "gpu/device_limits.h"

namespace matmuls {

namespace {

constexpr const char* kNames[] = {"cublas", "cublaslt", "cusparse"};
constexpr const char* name_of(Library library) { return kNames[static_cast<int>(library)]; }

// A child of fork() inherits handles of a CUDA context that it cannot use. Reading the flag costs one load per call;
// getpid() would cost a system call.
std::atomic<bool> handles_made{false};
std::atomic<bool> forked_with_handles{false};

void check_not_forked(const char* op) {
  TORCH_CHECK(!forked_with_handles.load(std::memory_order_relaxed), op,
              ": the CUDA handles were made before fork() and belong to the parent process; start workers with "
              "multiprocessing's 'spawn' method");
}

void watch_for_fork() {
  static const int once = pthread_atfork(nullptr, nullptr, [] {
    if (handles_made.load()) forked_with_handles.store(true);
  });
  (void)once;
}

// Returns torch's cached GPU memory to the driver. torch refuses while any thread captures a graph or allocates to a
// private pool, which cannot be queried in advance; the cache is kept then.
void empty_torch_cache() {
  try {
    c10::cuda::CUDACachingAllocator::emptyCache();
  } catch (const c10::Error&) {
  }
}

// Makes something that takes GPU memory outside torch's allocator. make() returns false if memory ran out; it is called
// again after torch's cache is emptied, and then torch.OutOfMemoryError is raised.
template <class Make>
void make_in_gpu_memory(const char* op, const char* name, int64_t nbytes, const Make& make) {
  if (make()) return;
  empty_torch_cache();
  if (make()) return;
  size_t free = 0, total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) (void)cudaGetLastError();
  TORCH_CHECK_WITH(OutOfMemoryError, false, op, ": CUDA out of memory. Expected room for ", name,
                   nbytes > 0 ? " of " + std::to_string(nbytes) + " bytes" : std::string(),
                   " outside torch's allocator, ", "got ", free, " bytes free of ", total);
}

bool was_made(cublasStatus_t status) {
  if (status == CUBLAS_STATUS_ALLOC_FAILED) return false;
  MATMULS_CUBLAS_CHECK(status);
  return true;
}
bool was_made(cusparseStatus_t status) {
  if (status == CUSPARSE_STATUS_ALLOC_FAILED) return false;
  MATMULS_CUSPARSE_CHECK(status);
  return true;
}
bool was_made(cudaError_t status) {
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    return false;
  }
  C10_CUDA_CHECK(status);
  return true;
}

void* create(Library library, const char* op) {
  watch_for_fork();
  const RelaxedCapture relaxed;
  void* handle = nullptr;
  const std::string name = std::string("a ") + name_of(library) + " handle";
  make_in_gpu_memory(op, name.c_str(), 0, [&] {
    switch (library) {
      case Library::cublas: return was_made(cublasCreate(reinterpret_cast<cublasHandle_t*>(&handle)));
      case Library::cublaslt: return was_made(cublasLtCreate(reinterpret_cast<cublasLtHandle_t*>(&handle)));
      case Library::cusparse: return was_made(cusparseCreate(reinterpret_cast<cusparseHandle_t*>(&handle)));
    }
    return true;
  });
  if (library == Library::cublas)
    // Keep split-K partial sums in float32: torch's default lets cuBLAS round them to the 16-bit type.
    MATMULS_CUBLAS_CHECK(cublasSetMathMode(
        static_cast<cublasHandle_t>(handle),
        static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)));
  handles_made.store(true);
  return handle;
}

void destroy(Library library, void* handle) {
  const RelaxedCapture relaxed;
  switch (library) {
    case Library::cublas: MATMULS_CUBLAS_CHECK(cublasDestroy(static_cast<cublasHandle_t>(handle))); break;
    case Library::cublaslt: MATMULS_CUBLAS_CHECK(cublasLtDestroy(static_cast<cublasLtHandle_t>(handle))); break;
    case Library::cusparse: MATMULS_CUSPARSE_CHECK(cusparseDestroy(static_cast<cusparseHandle_t>(handle))); break;
  }
}

at::TensorOptions bytes_on(int device) { return at::TensorOptions(at::kByte).device(at::kCUDA, device); }

// The stream may have been destroyed since.
bool is_still_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) (void)cudaGetLastError();
  return status == cudaStreamCaptureStatusActive;
}

bool captures(cudaStream_t stream) {
  if (stream == nullptr) return false;  // the default stream cannot capture
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

// Unique in the process: a new stream may get the address of a destroyed one, but never its id. CUDA does not return
// the id of a stream that captures.
uint64_t id_of(cudaStream_t stream) {
  unsigned long long id = 0;
  C10_CUDA_CHECK(cudaStreamGetId(stream, &id));
  return id;
}

}  // namespace

bool is_capturing(at::Device device) {
  return device.is_cuda() && captures(c10::cuda::getCurrentCUDAStream(device.index()));
}
uint64_t current_stream(at::Device device) {
  if (!device.is_cuda()) return 0;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index());
  return stream == nullptr ? 0 : id_of(stream);
}
void synchronize_stream(at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  const RelaxedCapture relaxed;
  C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream(device.index())));
}
void synchronize_device(at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  const RelaxedCapture relaxed;
  C10_CUDA_CHECK(cudaDeviceSynchronize());
}

// It raises nothing: destructors use it, even at the end of the process, when the driver may be gone.
struct RelaxedCapture::Guard {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;

  Guard() { exchange(); }
  ~Guard() { exchange(); }
  void exchange() {
    if (cudaThreadExchangeStreamCaptureMode(&mode) != cudaSuccess) (void)cudaGetLastError();
  }
};
RelaxedCapture::RelaxedCapture() : guard_(std::make_unique<Guard>()) {}
RelaxedCapture::~RelaxedCapture() = default;

bool is_forked() { return forked_with_handles.load(std::memory_order_relaxed); }

at::Tensor own_memory(const char* op, const char* name, int64_t nbytes) {
  const RelaxedCapture relaxed;
  void* data = nullptr;
  make_in_gpu_memory(op, name, nbytes, [&] { return was_made(cudaMalloc(&data, nbytes)); });
  const auto free = [](void* p) {
    if (is_forked()) return;
    const RelaxedCapture relaxed;
    C10_CUDA_CHECK_WARN(cudaFree(p));
  };
  return at::from_blob(data, {nbytes}, free, bytes_on(c10::cuda::current_device()));
}

// One handle and its resources. The owner thread holds `mutex` during a call, destroy_handles during the destruction;
// no other thread waits for it. Slots are never freed, only emptied.
struct Slot {
  const Library library;
  const int device;
  std::thread::id owner;  // guarded by the pool's mutex; a default-constructed id means free

  std::mutex mutex;  // guards the members below
  void* handle = nullptr;
  struct Workspace {
    uint64_t stream_id;
    at::Tensor bytes;
  };
  std::map<cudaStream_t, Workspace> workspaces;
  std::set<cudaStream_t> captured;  // streams that used the handle inside a capture
  std::shared_ptr<void> attachment;

  void release() {
    c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    attachment.reset();
    const auto freed = std::exchange(workspaces, {});  // freed after the handle, even if destroying it throws
    destroy(library, std::exchange(handle, nullptr));
  }
};

namespace {

struct Pool {
  std::mutex mutex;
  std::vector<std::unique_ptr<Slot>> slots;
  std::atomic<int64_t> workspace_nbytes{0};
};

Pool& pool() {
  static Pool* const leaked = new Pool;
  return *leaked;
}

Slot* claim_slot(Library library, int device) {
  std::lock_guard lock(pool().mutex);
  for (auto& slot : pool().slots)
    if (slot->library == library && slot->device == device && slot->owner == std::thread::id()) {
      slot->owner = std::this_thread::get_id();
      return slot.get();
    }
  pool().slots.emplace_back(new Slot{library, device, std::this_thread::get_id()});
  return pool().slots.back().get();
}

// This thread's slots by library and device; returned to the pool when the thread ends.
struct ThreadSlots {
  std::array<std::vector<Slot*>, 3> by_library;

  ~ThreadSlots() {
    if (forked_with_handles.load()) return;  // the pool's mutex may have been held at the fork
    std::lock_guard lock(pool().mutex);
    for (auto& by_device : by_library)
      for (auto* slot : by_device)
        if (slot) slot->owner = std::thread::id();
  }
};

Slot& my_slot(Library library, int device) {
  thread_local ThreadSlots mine;
  auto& by_device = mine.by_library[static_cast<int>(library)];
  if (by_device.size() <= static_cast<size_t>(device)) by_device.resize(device + 1);
  auto& slot = by_device[device];
  if (!slot) slot = claim_slot(library, device);
  return *slot;
}

std::vector<Slot*> all_slots() {
  std::lock_guard lock(pool().mutex);
  std::vector<Slot*> found;
  for (auto& slot : pool().slots) found.push_back(slot.get());
  return found;
}

int64_t workspace_nbytes_for(int device) {
  const int64_t asked = pool().workspace_nbytes.load(std::memory_order_relaxed);
  if (asked > 0) return asked;
  return device_limits(device).major >= 9 ? (32 << 20) : (8 << 20);
}

// Bounds the workspaces of a process that creates streams without end; torch's own pool has 64 streams a device.
constexpr size_t kMaxWorkspaces = 80;

const at::Tensor& cached_workspace(Slot& slot, cudaStream_t stream, const char* op) {
  const uint64_t id = id_of(stream);
  if (auto it = slot.workspaces.find(stream); it != slot.workspaces.end()) {
    if (it->second.stream_id == id && it->second.bytes.numel() == workspace_nbytes_for(slot.device))
      return it->second.bytes;
    slot.workspaces.erase(it);  // work of a destroyed stream may still use it; cudaFree waits for that
  }
  if (slot.workspaces.size() >= kMaxWorkspaces) slot.workspaces.clear();
  return slot.workspaces
      .insert_or_assign(stream, Slot::Workspace{id, own_memory(op, "a workspace", workspace_nbytes_for(slot.device))})
      .first->second.bytes;
}

void check_not_capturing(const char* op, Slot& slot) {
  std::erase_if(slot.captured, [](cudaStream_t stream) { return !is_still_capturing(stream); });
  TORCH_CHECK(slot.captured.empty(), op, ": expected no CUDA graph capture in progress, got one that uses the ",
              name_of(slot.library), " handle on device ", slot.device, "; end the capture first");
}

}  // namespace

int64_t init_handles(Library library) {
  const std::string op = std::string("init_") + name_of(library);
  check_not_forked(op.c_str());
  const int devices = c10::cuda::device_count();  // 0 without a driver, no error
  if (devices == 0) return 0;
  at::globalContext().lazyInitDevice(at::kCUDA);
  for (int device = 0; device < devices; ++device) {
    c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    Borrowed(library, op.c_str());
  }
  return devices;
}

int64_t destroy_handles(Library library) {
  if (forked_with_handles.load()) return 0;  // a forked child owns none
  const std::string op = std::string("destroy_") + name_of(library);
  std::vector<Slot*> slots = all_slots();
  std::erase_if(slots, [&](Slot* slot) { return slot->library != library; });
  if (c10::cuda::device_count() > 0 && !slots.empty())
    TORCH_CHECK(
        !captures(c10::cuda::getCurrentCUDAStream()), op,
        ": expected no CUDA graph capture in progress, got the current stream capturing; end the capture first");
  // Lock all slots first, so that no capture begins between the check and the destruction. A thread holds at most one
  // slot.
  std::vector<std::unique_lock<std::mutex>> locks;
  for (auto* slot : slots) locks.emplace_back(slot->mutex);
  for (auto* slot : slots) check_not_capturing(op.c_str(), *slot);
  int64_t destroyed = 0;
  std::exception_ptr failure;
  for (auto* slot : slots) {
    if (!slot->handle) continue;
    try {
      slot->release();
      ++destroyed;
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
  return destroyed;
}

std::vector<HandleInfo> live_handles() {
  std::vector<HandleInfo> infos;
  if (forked_with_handles.load()) return infos;
  for (auto* slot : all_slots()) {
    std::ostringstream thread;
    {
      std::lock_guard lock(pool().mutex);
      slot->owner == std::thread::id() ? thread << "free" : thread << slot->owner;
    }
    std::lock_guard lock(slot->mutex);
    if (!slot->handle) continue;
    HandleInfo info{name_of(slot->library), thread.str(), slot->device, {}};
    for (auto& [stream, workspace] : slot->workspaces)
      info.workspaces.push_back({reinterpret_cast<uint64_t>(stream), workspace.bytes.numel()});
    infos.push_back(std::move(info));
  }
  return infos;
}

void set_workspace_size(int64_t nbytes) {
  TORCH_CHECK(nbytes >= 0, "set_workspace_size: expected a size >= 0 bytes, got ", nbytes);
  pool().workspace_nbytes.store(nbytes);
}

int64_t workspace_size() { return pool().workspace_nbytes.load(); }

OperationGuard::OperationGuard(const char* op, const at::Tensor& tensor)
    : guard_((check_not_forked(op), tensor.device())) {}

bool Borrowed::is_available(Library library) {
  Slot& slot = my_slot(library, c10::cuda::current_device());
  const std::lock_guard lock(slot.mutex);
  return slot.handle || !captures(c10::cuda::getCurrentCUDAStream());
}

Borrowed::Borrowed(Library library, const char* op)
    : slot_(my_slot(library, c10::cuda::current_device())), lock_(slot_.mutex) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const bool capturing = captures(stream);
  if (!slot_.handle) {
    TORCH_CHECK(!capturing, op, ": expected a live ", name_of(library), " handle for this thread on device ",
                slot_.device, " during CUDA graph capture, got none: call init_", name_of(library),
                "() or run the work once before the capture");
    slot_.handle = create(library, op);
  }
  if (capturing)
    slot_.captured.insert(stream);
  else if (!slot_.captured.empty())
    slot_.captured.erase(stream);
  if (library == Library::cusparse) {
    MATMULS_CUSPARSE_CHECK(cusparseSetStream(cusparse(), stream), ", in ", op);
    return;
  }
  // Under capture the workspace comes from the capture's pool and returns to it after the call: a replayed graph never
  // writes where an eager call may, and memory use stays flat.
  workspace_ = capturing ? at::empty({workspace_nbytes_for(slot_.device)}, bytes_on(slot_.device))
                         : cached_workspace(slot_, stream, op);
  if (library == Library::cublas) {
    // Set the stream first: cublasSetStream resets the workspace.
    MATMULS_CUBLAS_CHECK(cublasSetStream(cublas(), stream), ", in ", op);
    MATMULS_CUBLAS_CHECK(cublasSetWorkspace(cublas(), workspace(), workspace_nbytes()), ", in ", op);
  }
}

cublasHandle_t Borrowed::cublas() const { return static_cast<cublasHandle_t>(slot_.handle); }
cublasLtHandle_t Borrowed::cublaslt() const { return static_cast<cublasLtHandle_t>(slot_.handle); }
cusparseHandle_t Borrowed::cusparse() const { return static_cast<cusparseHandle_t>(slot_.handle); }
std::shared_ptr<void>& Borrowed::attachment() const { return slot_.attachment; }

}  // namespace matmuls
#endif
