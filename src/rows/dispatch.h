// Maps numbers of a RowChoice to template arguments, by the lists of rows/traits.h and rows/kernel_sizes.h.
#pragma once

#include <c10/util/Exception.h>

#include <iterator>
#include <utility>

#include "rows/choose.h"

namespace matmuls {

[[noreturn]] inline void not_compiled(const RowChoice& c) {
  TORCH_CHECK(false, "matmuls: no ", name_of(c.kernel), " kernel is compiled for ", c.vectors, " vectors of each of ",
              c.threads, " threads (", name_of(c.form), "); this is a bug");
}

// Calls body.operator()<k>() for the k of a list that is the instance of the choice.
template <const auto& list, class Body>
void with_instance(const RowChoice& c, const Body& body) {
  const bool found = [&]<size_t... i>(std::index_sequence<i...>) {
    return ((is(list[i], c) && (body.template operator()<list[i]>(), true)) || ...);
  }(std::make_index_sequence<std::size(list)>());
  if (!found) not_compiled(c);
}

}  // namespace matmuls
