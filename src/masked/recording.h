// A recorded call of an operator with Triton's kernels: the buffers that it allocates and the launches that it makes,
// repeated without Python. The kernels stay Triton's; a first call in Python compiles them (matmuls/triton/record.py).
// Some launches may run on a second stream, between a fork from the current stream and the join with it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace matmuls {

// Where a pointer of a launch leads: `delta` bytes from the start of a tensor, which is an argument of the operator if
// it is below their number, and else a buffer. -1: a null pointer.
struct Place {
  int64_t tensor = -1, delta = 0;
};

// A kernel's parameter as the recording gives it: a pointer, a number of 4 or 8 bytes, or a TMA descriptor.
struct Parameter {
  enum class Kind { pointer, number, descriptor } kind;
  Place place;
  int64_t number = 0, bytes = 8;
  // A descriptor's fields: outermost dimension first, strides in elements; type and swizzle number CUDA's enumerators.
  int64_t type = 0, swizzle = 0, element_bytes = 0;
  std::vector<int64_t> box = {}, sizes = {}, strides = {};
};

class Recording {
 public:
  explicit Recording(std::string name, int64_t arguments) : name_(std::move(name)), arguments_(arguments) {}

  void add_buffer(std::vector<int64_t> sizes, std::vector<int64_t> strides, at::ScalarType type);
  // Raises if the parameters do not have the number, the sizes and the order that the compiled kernel declares.
  // second: on the second stream.
  void add_launch(uint64_t function, std::array<unsigned, 3> grid, unsigned threads, unsigned shared, bool early,
                  bool second, const std::vector<Parameter>& parameters);
  void add_fork();
  void add_join();
  void add_output(int64_t buffer, std::vector<int64_t> sizes, std::vector<int64_t> strides, int64_t offset);
  // After all launches: notes where each buffer is freed, and which buffers a fork needs.
  void finish();

  // Repeats the call on the current stream of `device`, the current one and that of the recording; returns its results.
  std::vector<at::Tensor> run(const c10::ArrayRef<c10::IValue>& arguments, at::Device device) const;

 private:
  struct Buffer {
    std::vector<int64_t> sizes, strides;
    at::ScalarType type;
  };
  struct Output {
    size_t buffer;
    std::vector<int64_t> sizes, strides;
    int64_t offset;  // in elements
    bool whole;      // the buffer as it is allocated
  };
  struct Patch {
    size_t at;  // in the parameters' bytes
    Place place;
    bool descriptor;
  };
  struct Launch {
    CUfunction function;
    std::array<unsigned, 3> grid;
    unsigned threads, shared;
    bool early;                   // programmatic dependent launch
    std::vector<char> bytes;      // of all parameters
    std::vector<size_t> offsets;  // of each parameter
    std::vector<Patch> patches;   // where addresses are written
  };
  struct Step {
    enum class Kind { launch, fork, join } kind;
    size_t launch = 0;                // its place in launches_
    bool second = false;              // the launch is on the second stream
    std::vector<size_t> before = {};  // buffers to allocate: those of the second stream, before a fork
    std::vector<size_t> after = {};   // buffers to free, which no later step uses
  };

  void launch(const Launch& launch, char* bytes, cudaStream_t stream) const;
  // The parameters of a launch, with the addresses of this call's tensors.
  void fill(const Launch& launch, char* bytes, const c10::ArrayRef<c10::IValue>& arguments,
            c10::ArrayRef<at::Tensor> buffers) const;
  template <class Use>
  void each_buffer(const Launch& launch, const Use& use) const;
  at::Tensor made(size_t buffer, at::Device device) const;

  std::string name_;
  int64_t arguments_;
  std::vector<Buffer> buffers_;
  std::vector<Launch> launches_;
  std::vector<Step> steps_;
  std::vector<Output> outputs_;
};

}  // namespace matmuls
