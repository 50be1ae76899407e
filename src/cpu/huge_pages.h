// Requests huge pages (2 MiB) for memory that the CPU is about to write for the first time.
#pragma once

#include <ATen/core/Tensor.h>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace matmuls {

// Returns `fresh` after the request. Faulting in pages of 4 KiB takes longer than many a sparse product: one with a
// result of 159 MiB took 113 ms on two cores and takes 36 with huge pages.
inline at::Tensor in_huge_pages(at::Tensor fresh) {
#ifdef __linux__
  constexpr size_t kLeast = size_t{4} << 20;
  if (fresh.is_cpu() && fresh.nbytes() >= kLeast) {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto data = reinterpret_cast<uintptr_t>(fresh.data_ptr()), begin = (data + page - 1) / page * page;
    // madvise is only advice: it fails harmlessly on systems without huge pages.
    madvise(reinterpret_cast<void*>(begin), data + fresh.nbytes() - begin, MADV_HUGEPAGE);
  }
#endif
  return fresh;
}

}  // namespace matmuls
