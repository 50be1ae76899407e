// Maps numbers of a RowChoice to template arguments.
#pragma once

#include <c10/util/Exception.h>

#include "rows/choose.h"

namespace matmuls {

[[noreturn]] inline void not_compiled(const RowChoice& c) {
  TORCH_CHECK(false, "matmuls: no ", name_of(c.kernel), " kernel is compiled for ", c.vectors, " vectors of each of ",
              c.threads, " threads (", name_of(c.form), "); this is a bug");
}

// Calls body.operator()<n>() with the one of `ns` that equals n.
template <int... ns, class Body>
void with_number(const RowChoice& c, int n, const Body& body) {
  if (!((n == ns && (body.template operator()<ns>(), true)) || ...)) not_compiled(c);
}

}  // namespace matmuls
