// Limits of a GPU that decide how kernels are launched, queried once per device.
//
// A simulated device (for tests) has other limits than the real GPU. Launches are then chosen for the simulated limits,
// and launches that exceed them are refused as CUDA would refuse them.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <utility>

namespace matmuls {

constexpr int kMostDevices = 128;  // torch is built for 120
template <class T>
using PerDevice = std::array<std::atomic<T>, kMostDevices>;

struct DeviceLimits {
  int major, minor;
  int multiprocessors;
  int64_t shared_per_block;           // bytes, static plus dynamic, that a block may opt in to
  int64_t shared_per_multiprocessor;  // bytes
  int64_t l2;                         // bytes
  bool hopper_code;                   // the build contains sm_90a code
};

const DeviceLimits& device_limits(int device);
const DeviceLimits& device_limits();  // of the current device

// True if the kernels of the *_sm90.cu files can run: the GPU is a Hopper GPU and they were compiled for "9.0a". A
// build for "9.0" contains empty kernels instead.
bool has_hopper_kernels(int device);

struct SimulatedDevice {
  std::optional<int64_t> shared_memory;  // bytes per block
  std::optional<int> multiprocessors;
  std::optional<std::pair<int, int>> capability;
  std::optional<bool> hopper_code;
};
// Values not given stay those of the GPU. If none is given, the simulation ends.
void simulate_device(const SimulatedDevice& limits);
bool is_simulated();

// Number of the current context, from 0: a GPU's primary context, or a green context, which has fewer multiprocessors.
// Contexts beyond the first 254 share the number 254: their answers from caches are right for one of them, and launches
// chosen by them run in all.
int context_number();
constexpr int kMostContexts = 255;
template <class T>
using PerContext = std::array<std::atomic<T>, kMostContexts>;

// Sets the kernel's dynamic shared memory limit to the device's maximum. That value is the same for every call; if each
// call set its own need, another thread could lower the limit between this call's request and its launch.
void allow_all_shared_memory(const void* kernel);
// Number of blocks, or of clusters of `ranks` blocks, that can be resident on the current device; 0 if none fits.
// Requires allow_all_shared_memory(kernel).
int blocks_that_fit(const void* kernel, const cudaLaunchConfig_t& launch, int ranks);
// The same for the simulated device, derived from the result on_this_gpu for the real GPU.
int blocks_that_fit_simulated(const void* kernel, const cudaLaunchConfig_t& launch, int ranks, int on_this_gpu);
// Status that a launch returns on the simulated device; cudaSuccess if it can run.
cudaError_t launch_simulated(const void* kernel, const cudaLaunchConfig_t& launch);

}  // namespace matmuls
