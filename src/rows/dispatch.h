// Maps numbers of a RowChoice to template arguments, by the lists of rows/traits.h and rows/kernel_sizes.h.
#pragma once

#include <c10/util/Exception.h>

#include <utility>

#include "rows/choose.h"

namespace matmuls {

[[noreturn]] inline void not_compiled(const RowChoice& c) {
  TORCH_CHECK(false, "matmuls: no ", name_of(c.kernel), " kernel is compiled for ", c.vectors, " vectors of each of ",
              c.threads, " threads (", name_of(c.form), "); this is a bug");
}

// Calls body.operator()<i>() for i from 0 to n - 1, until it returns true for the instance of the choice.
template <size_t n, class Body>
void with_instance(const RowChoice& c, const Body& body) {
  const bool found = [&]<size_t... i>(std::index_sequence<i...>) {
    return (body.template operator()<i>() || ...);
  }(std::make_index_sequence<n>());
  if (!found) not_compiled(c);
}

}  // namespace matmuls
