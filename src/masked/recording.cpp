// The launches of a recording: Triton's kernels by the driver's cuLaunchKernelEx.
#ifdef MATMULS_CUDA
#include "masked/recording.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/SmallVector.h>
#include <c10/util/irange.h>

#include <cstring>
#include <optional>
#include <utility>

#include "glue/checks.h"
#include "gpu/second_stream.h"
#include "gpu/tensor_map.h"

namespace matmuls {
namespace {

constexpr size_t kMostBytes = 4096;  // of a kernel's parameters

struct Driver {
  decltype(&cuLaunchKernelEx) launch = nullptr;
  decltype(&cuFuncGetParamInfo) parameter = nullptr;
  decltype(&cuTensorMapReplaceAddress) replace = nullptr;

  Driver() {
    find("cuLaunchKernelEx", 12000, launch);
    find("cuFuncGetParamInfo", 12040, parameter);
    find("cuTensorMapReplaceAddress", 12000, replace);
  }
  template <class F>
  static void find(const char* name, unsigned version, F& function) {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    C10_CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &found));
    TORCH_CHECK(found == cudaDriverEntryPointSuccess, "expected a driver that has ", name);
    function = reinterpret_cast<F>(entry);
  }
};

const Driver& driver() {
  static const Driver known;
  return known;
}

void expect(CUresult status, const std::string& name, const char* call) {
  TORCH_CHECK(status == CUDA_SUCCESS, name, ": expected ", call, " to succeed, got CUresult ",
              static_cast<int>(status));
}

CUtensorMap encoded(const std::string& name, const Parameter& p, void* address) {
  const size_t rank = p.box.size();
  TORCH_CHECK(rank >= 1 && rank <= 5 && p.sizes.size() == rank && p.strides.size() == rank, name,
              ": expected a descriptor of 1 to 5 dimensions, got ", rank);
  cuuint64_t sizes[5], strides[5];
  cuuint32_t box[5], steps[5] = {1, 1, 1, 1, 1};
  for (const auto i : c10::irange(rank)) {
    sizes[rank - 1 - i] = static_cast<cuuint64_t>(p.sizes[i]);
    box[rank - 1 - i] = static_cast<cuuint32_t>(p.box[i]);
    if (i + 1 < rank) strides[rank - 2 - i] = static_cast<cuuint64_t>(p.strides[i] * p.element_bytes);
  }
  CUtensorMap map;
  expect(tensor_map_encoder()(&map, static_cast<CUtensorMapDataType>(p.type), static_cast<cuuint32_t>(rank), address,
                              sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                              static_cast<CUtensorMapSwizzle>(p.swizzle), CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
         name, "cuTensorMapEncodeTiled");
  return map;
}

}  // namespace

void Recording::add_buffer(std::vector<int64_t> sizes, std::vector<int64_t> strides, at::ScalarType type) {
  buffers_.push_back({std::move(sizes), std::move(strides), type});
}

void Recording::add_launch(uint64_t function, std::array<unsigned, 3> grid, unsigned threads, unsigned shared,
                           bool early, bool second, const std::vector<Parameter>& parameters) {
  Launch made{reinterpret_cast<CUfunction>(function), grid, threads, shared, early, {}, {}, {}};
  // The kernel's own list of parameters: offset and size of each. A descriptor is followed by its sizes and strides,
  // and the last two parameters are pointers to scratch memory, of which these kernels use none.
  size_t offset = 0, size = 0;
  const auto next = [&](size_t expected) {
    expect(driver().parameter(made.function, made.offsets.size(), &offset, &size), name_, "cuFuncGetParamInfo");
    TORCH_CHECK(size == expected && offset + size <= kMostBytes, name_, ": expected parameter ", made.offsets.size(),
                " of ", expected, " bytes, got ", size, " at ", offset);
    made.offsets.push_back(offset);
    made.bytes.resize(std::max(made.bytes.size(), offset + size));
  };
  const auto write = [&](const void* value, size_t bytes) {
    next(bytes);
    std::memcpy(made.bytes.data() + offset, value, bytes);
  };
  const auto write_number = [&](int64_t value, size_t bytes) { write(&value, bytes); };  // little-endian
  for (const Parameter& p : parameters) {
    if (p.kind == Parameter::Kind::number) {
      write_number(p.number, static_cast<size_t>(p.bytes));
      continue;
    }
    const bool descriptor = p.kind == Parameter::Kind::descriptor;
    TORCH_CHECK(
        p.place.tensor < arguments_ + static_cast<int64_t>(buffers_.size()) && (p.place.tensor >= 0 || !descriptor),
        name_, ": expected a tensor of the call, got number ", p.place.tensor);
    if (descriptor) {
      // Any address of the right alignment: each launch writes its own.
      const CUtensorMap map = encoded(name_, p, reinterpret_cast<void*>(uintptr_t{1} << 20));
      write(&map, sizeof map);
    } else {
      write_number(0, 8);
    }
    if (p.place.tensor >= 0) made.patches.push_back({offset, p.place, descriptor});
    for (const int64_t n : p.sizes) write_number(n, 4);
    for (const int64_t n : p.strides) write_number(n, 8);
  }
  write_number(0, 8), write_number(0, 8);
  TORCH_CHECK(driver().parameter(made.function, made.offsets.size(), &offset, &size) != CUDA_SUCCESS, name_,
              ": expected a kernel of ", made.offsets.size(), " parameters, got one of more");
  launches_.push_back(std::move(made));
  steps_.push_back({Step::Kind::launch, launches_.size() - 1, second});
}

void Recording::add_fork() { steps_.push_back({Step::Kind::fork}); }
void Recording::add_join() { steps_.push_back({Step::Kind::join}); }

void Recording::add_output(int64_t buffer, std::vector<int64_t> sizes, std::vector<int64_t> strides, int64_t offset) {
  TORCH_CHECK(buffer >= 0 && buffer < static_cast<int64_t>(buffers_.size()), name_, ": expected a buffer, got number ",
              buffer);
  const Buffer& b = buffers_[static_cast<size_t>(buffer)];
  const bool whole = offset == 0 && sizes == b.sizes && strides == b.strides;
  outputs_.push_back({static_cast<size_t>(buffer), std::move(sizes), std::move(strides), offset, whole});
}

template <class Use>
void Recording::each_buffer(const Launch& launch, const Use& use) const {
  for (const Patch& p : launch.patches)
    if (p.place.tensor >= arguments_) use(static_cast<size_t>(p.place.tensor - arguments_));
}

void Recording::finish() {
  std::vector<bool> needed(buffers_.size());
  for (const Output& o : outputs_) needed[o.buffer] = true;
  // Between a fork and its join nothing is freed: the other stream may still use it, or get it again.
  Step* join = nullptr;
  std::vector<size_t> of_second;
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
    if (step->kind == Step::Kind::join) {
      TORCH_CHECK(join == nullptr, name_, ": expected a fork before the next join");
      join = &*step;
    } else if (step->kind == Step::Kind::fork) {
      TORCH_CHECK(join != nullptr, name_, ": expected a join after each fork");
      join = nullptr;
      step->before = std::exchange(of_second, {});
    } else {
      TORCH_CHECK(join != nullptr || !step->second, name_, ": expected the second stream between a fork and its join");
      each_buffer(launches_[step->launch], [&](size_t buffer) {
        if (!needed[buffer]) (join != nullptr ? *join : *step).after.push_back(buffer);
        needed[buffer] = true;
        if (step->second) of_second.push_back(buffer);
      });
    }
  }
  TORCH_CHECK(join == nullptr, name_, ": expected a fork before each join");
}

at::Tensor Recording::made(size_t buffer, at::Device device) const {
  const Buffer& b = buffers_[buffer];
  return at::empty_strided(b.sizes, b.strides, at::TensorOptions().dtype(b.type).device(device));
}

void Recording::launch(const Launch& launch, char* bytes, cudaStream_t stream) const {
  c10::SmallVector<void*, 64> parameters;
  for (const size_t offset : launch.offsets) parameters.push_back(bytes + offset);
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = launch.grid[0], config.gridDimY = launch.grid[1], config.gridDimZ = launch.grid[2];
  config.blockDimX = launch.threads, config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = launch.shared;
  config.hStream = stream;
  config.attrs = &attribute;
  config.numAttrs = launch.early ? 1 : 0;
  CUresult status = driver().launch(&config, launch.function, parameters.data(), nullptr);
  if (status == CUDA_ERROR_INVALID_CONTEXT) {  // this thread has not used the GPU yet
    C10_CUDA_CHECK(cudaSetDevice(c10::cuda::current_device()));
    status = driver().launch(&config, launch.function, parameters.data(), nullptr);
  }
  expect(status, name_, "cuLaunchKernelEx");
}

void Recording::fill(const Launch& launch, char* bytes, const c10::ArrayRef<c10::IValue>& arguments,
                     c10::ArrayRef<at::Tensor> buffers) const {
  std::memcpy(bytes, launch.bytes.data(), launch.bytes.size());
  for (const Patch& p : launch.patches) {
    const bool given = p.place.tensor < arguments_;
    const auto which = static_cast<size_t>(given ? p.place.tensor : p.place.tensor - arguments_);
    const at::Tensor& t = given ? arguments[which].toTensor() : buffers[which];
    char* const address = static_cast<char*>(const_cast<void*>(t.const_data_ptr())) + p.place.delta;
    if (p.descriptor)
      expect(driver().replace(reinterpret_cast<CUtensorMap*>(bytes + p.at), address), name_,
             "cuTensorMapReplaceAddress");
    else
      std::memcpy(bytes + p.at, &address, sizeof address);
  }
}

std::vector<at::Tensor> Recording::run(const c10::ArrayRef<c10::IValue>& arguments, at::Device device) const {
  c10::SmallVector<at::Tensor, 16> buffers(buffers_.size());
  const auto need = [&](size_t buffer) {
    if (!buffers[buffer].defined()) buffers[buffer] = made(buffer, device);
  };
  alignas(128) char bytes[kMostBytes];
  const cudaStream_t main = c10::cuda::getCurrentCUDAStream();
  std::optional<Concurrent> concurrent;  // destroyed before the buffers: the current stream waits, then they are freed
  for (const Step& step : steps_) {
    for (const size_t buffer : step.before) need(buffer);
    if (step.kind == Step::Kind::fork) {
      concurrent.emplace();
    } else if (step.kind == Step::Kind::join) {
      concurrent->join();
      concurrent.reset();
    } else {
      const Launch& l = launches_[step.launch];
      each_buffer(l, need);
      fill(l, bytes, arguments, buffers);
      launch(l, bytes, step.second ? concurrent->stream().stream() : main);
    }
    for (const size_t buffer : step.after) buffers[buffer].reset();
  }
  std::vector<at::Tensor> results;
  results.reserve(outputs_.size());
  for (const Output& o : outputs_) {
    at::Tensor& buffer = buffers[o.buffer];
    if (!buffer.defined()) buffer = made(o.buffer, device);  // an empty result
    results.push_back(o.whole ? buffer : at::as_strided(buffer, o.sizes, o.strides, o.offset));
  }
  return results;
}

}  // namespace matmuls
#endif
