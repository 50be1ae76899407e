// Kernels that tests and measurements switch off: the chooser of a family then passes them over, as where they do not
// take a call. One mask per family, for the whole process. custom_mm/kernel_switch.py sets it.
#pragma once

#include <atomic>
#include <cstdint>

namespace matmuls {

// Kernel: the enumeration of a family's kernels, of at most 32.
template <class Kernel>
class KernelSwitch {
 public:
  static bool is_off(Kernel kernel) { return mask().load(std::memory_order_relaxed) >> static_cast<int>(kernel) & 1; }
  static void set_off(uint32_t kernels) { mask().store(kernels, std::memory_order_relaxed); }

 private:
  static std::atomic<uint32_t>& mask() {
    static std::atomic<uint32_t> off{0};
    return off;
  }
};

}  // namespace matmuls
