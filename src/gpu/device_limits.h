// The limits of a GPU that launches are chosen by: asked once per device, in one place.
//
// A simulated device (tests) has other limits than the GPU at hand. Launches are then chosen for it, and those that it
// could not run are refused as CUDA would refuse them.
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
  int cooperative_multiprocessors;    // what a launch of cooperating blocks finds: a context may have fewer
  int64_t shared_per_block;           // bytes, static and dynamic, that a block may have when it asks
  int64_t shared_per_multiprocessor;  // bytes
  int64_t l2;                         // bytes
  bool hopper_code;                   // the build has code for 9.0a
};

const DeviceLimits& device_limits(int device);
const DeviceLimits& device_limits();  // of the current device

// True where the kernels of the *_sm90.cu files run: the GPU is a Hopper one and they were compiled for it, "9.0a". A
// build for "9.0" has empty kernels in their place.
bool has_hopper_kernels(int device);

struct SimulatedDevice {
  std::optional<int64_t> shared_memory;  // of a block
  std::optional<int> multiprocessors, cooperative_multiprocessors;
  std::optional<std::pair<int, int>> capability;
  std::optional<bool> hopper_code;
};
// What is not given stays as the GPU has it. Nothing given: no simulation.
void simulate_device(const SimulatedDevice& limits);
bool is_simulated();

// Allows a kernel as much dynamic shared memory as its device has. That is the same for every call: with each call's
// own need, a call of another thread could lower it between this one's request and its launch.
void allow_all_shared_memory(const void* kernel);
// How many blocks, or clusters of `ranks` blocks, run at once on the current device; 0 where none fits. The kernel must
// have been allowed its shared memory.
int blocks_that_fit(const void* kernel, const cudaLaunchConfig_t& launch, int ranks);
// The answer for the simulated device, from that for the GPU at hand.
int blocks_that_fit_simulated(const void* kernel, const cudaLaunchConfig_t& launch, int ranks, int on_this_gpu);
// What a launch on the simulated device returns; cudaSuccess where it can run.
cudaError_t launch_simulated(const void* kernel, const cudaLaunchConfig_t& launch);

}  // namespace matmuls
