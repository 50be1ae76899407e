// The switches of a call (call_state.h).
#include "glue/call_state.h"

#include <ATen/Context.h>

#include "glue/batch_invariance.h"

namespace matmuls {
namespace {

// Switches side by side in words, the first in the lowest bits.
class Bits {
 public:
  void add(uint64_t value, int bits) {
    if (used_ + bits > 64) {
      ++word_;
      used_ = 0;
    }
    words.at(word_) |= (value & ((uint64_t{1} << bits) - 1)) << used_;
    used_ += bits;
  }
  template <class Enum>
  void add(Enum value) {
    add(static_cast<uint64_t>(value), 3);
  }
  void add(bool value) { add(uint64_t{value}, 1); }

  std::array<uint64_t, 2> words{};

 private:
  size_t word_ = 0;
  int used_ = 0;
};

// Not in all versions of torch.
template <class Context>
bool uses_fa3(const Context& c) {
  if constexpr (requires { c.userEnabledFA3SDP(); }) return c.userEnabledFA3SDP();
  return false;
}

}  // namespace

Switches Switches::now() {
  at::Context& c = at::globalContext();
  Bits bits;
  bits.add(static_cast<uint64_t>(kernels_off.load(std::memory_order_relaxed)), 32);
  for (const bool on :
       {is_batch_invariant(), c.deterministicAlgorithms(), c.deterministicAlgorithmsWarnOnly(),
        c.deterministicFillUninitializedMemory(), c.deterministicCuDNN(), c.deterministicMkldnn(), c.benchmarkCuDNN(),
        c.userEnabledCuDNN(), c.userEnabledMkldnn(), c.userEnabledFlashSDP(), uses_fa3(c),
        c.userEnabledMemEfficientSDP(), c.userEnabledMathSDP(), c.userEnabledCuDNNSDP(), c.userEnabledOverrideableSDP(),
        c.allowFP16BF16ReductionMathSDP(), c.allowFP16AccumulationCuBLAS(), c.allowFP16ReductionCPU()})
    bits.add(on);
  bits.add(c.allowFP16ReductionCuBLAS());
  bits.add(c.allowBF16ReductionCuBLAS());
  for (const auto backend : {at::Float32Backend::CUDA, at::Float32Backend::MKLDNN}) {
    const at::Float32Precision precision = c.float32Precision(backend, at::Float32Op::MATMUL);
    bits.add(precision == at::Float32Precision::TF32);  // all others but these two are the same
    bits.add(precision == at::Float32Precision::BF16);
  }
  bits.add(c.blasPreferredBackend());
  for (const at::SDPBackend backend : c.sDPPriorityOrder()) bits.add(backend);
  return {bits.words};
}

}  // namespace matmuls
