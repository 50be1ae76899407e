// Kernels that tests and measurements switch off: the chooser of a family then passes them over, as where they do not
// take a call. One mask per family, for the whole process. custom_mm/kernel_switch.py sets it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace matmuls {

// Kernel: the enumeration of a family's kernels, of at most 32.
template <class Kernel>
class KernelSwitch {
 public:
  static bool is_off(Kernel kernel) { return mask().load(std::memory_order_relaxed) >> static_cast<int>(kernel) & 1; }
  // Switches those off whose name is in `off`, and all others on. name_of: of each of the first `count` kernels.
  template <class NameOf>
  static void set_off(const std::vector<std::string>& off, int count, const NameOf& name_of) {
    uint32_t bits = 0;
    for (int k = 0; k < count; ++k) bits |= uint32_t{std::ranges::count(off, name_of(static_cast<Kernel>(k))) > 0} << k;
    mask().store(bits, std::memory_order_relaxed);
  }

 private:
  static std::atomic<uint32_t>& mask() {
    static std::atomic<uint32_t> off{0};
    return off;
  }
};

}  // namespace matmuls
