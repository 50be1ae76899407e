#include "glue/values_graph.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_convert_indices_from_csr_to_coo.h>
#include <ATen/ops/_sparse_compressed_tensor_unsafe.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/index.h>

#include "glue/autograd.h"
#include "glue/checks.h"

namespace matmuls {
namespace {

using at::Tensor;
using Context = torch::autograd::AutogradContext;
using Gradients = torch::autograd::variable_list;
using Stored = at::SparseCsrTensorImpl;

// What a sparse tensor stores; null for other layouts, and for wrapped tensors (functorch).
const Stored* stored(const Tensor& t) { return dynamic_cast<const Stored*>(t.unsafeGetTensorImpl()); }

// The same memory, to which autograd's functions give a graph of their own.
Tensor aliased(const Tensor& t) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return t.alias();
}

Tensor made(const Tensor& compressed, const Tensor& plain, const Tensor& values, at::IntArrayRef sizes,
            at::Layout layout) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return at::_sparse_compressed_tensor_unsafe(compressed, plain, values, sizes, values.options().layout(layout));
}

// Raises an error if the values are differentiated again.
struct Cut : KernelFunction<Cut> {
  static Tensor forward(Context*, const Tensor& values, const Tensor&) { return aliased(values); }
  static Gradients backward(Context*, const Gradients&) {
    TORCH_CHECK(false,
                "spgemm: expected one use of the sparse product, C.values(), where its gradient is differentiated "
                "again, got several uses or another one, whose gradients torch adds without their graphs; take "
                "C.values() once, or plan_spgemm(A, B).values()");
  }
};

// False if a gradient may have lost a part of its graph: torch adds up sparse gradients without the graphs of their
// values.
bool is_whole(const torch::autograd::Node& node) {
  if (node.name() != "AddBackward0") return true;
  for (const auto& edge : node.next_edges())
    if (!edge.is_valid() || !is_whole(*edge.function)) return false;
  return true;
}
bool is_whole(const Tensor& gradient) {
  return gradient.requires_grad() && (!gradient.grad_fn() || is_whole(*gradient.grad_fn()));
}

bool is_same(const Tensor& x, const Tensor& y) {
  return x.const_data_ptr() == y.const_data_ptr() && x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type();
}

// The values of a dense matrix where a sparse tensor of these indices has its own, in their shape.
Tensor at_places(const Tensor& dense, const Tensor& compressed, const Tensor& plain, at::Layout layout,
                 const Tensor& values) {
  const bool by_rows = layout == at::kSparseCsr || layout == at::kSparseBsr;
  const Tensor outer = at::_convert_indices_from_csr_to_coo(compressed, plain, /*out_int32=*/false).select(0, 0);
  const Tensor inner = plain.to(at::kLong);
  const c10::List<std::optional<Tensor>> places{by_rows ? outer : inner, by_rows ? inner : outer};
  if (values.dim() == 1) return at::index(dense, places);
  const int64_t height = values.size(1), width = values.size(2);
  const Tensor blocks = dense.unflatten(1, {-1, width}).unflatten(0, {-1, height}).transpose(1, 2);
  return at::index(blocks, places);
}

struct OfValues : KernelFunction<OfValues> {
  static Tensor forward(Context* ctx, const Tensor& values, const Tensor& compressed, const Tensor& plain,
                        at::IntArrayRef sizes, at::Layout layout) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({compressed, plain});
    ctx->saved_data["layout"] = static_cast<int64_t>(layout);
    ctx->saved_data["values"] = values;  // not read: what depends on them depends on their graph
    return made(compressed, plain, aliased(values), sizes, layout);
  }

  static Gradients backward(Context* ctx, const Gradients& grads) {
    const Tensor& g = grads[0];
    if (!g.defined()) return {{}, {}, {}, {}, {}};
    const auto saved = ctx->get_saved_variables();
    const Tensor &compressed = saved[0], &plain = saved[1], values = ctx->saved_data["values"].toTensor();
    const auto layout = static_cast<at::Layout>(ctx->saved_data["layout"].toInt());
    const Stored* parts = g.layout() == layout ? stored(g) : nullptr;
    const bool own =
        parts != nullptr && is_same(parts->compressed_indices(), compressed) && is_same(parts->plain_indices(), plain);
    // The gradient of torch's `values()` stores what it was given, with its graph.
    if (own && !g.requires_grad()) return {parts->values(), {}, {}, {}, {}};
    const bool is_known = is_whole(g);
    const bool is_alike = own || (parts != nullptr && at::equal(parts->compressed_indices(), compressed) &&
                                  at::equal(parts->plain_indices(), plain));
    const Tensor found = is_alike ? values_of_sparse(g) : at_places(g.to_dense(), compressed, plain, layout, values);
    return {at::GradMode::is_enabled() && !is_known ? Cut::apply(found, values) : found, {}, {}, {}, {}};
  }
};

// The values of a. given: those that torch's constructor was given, with a graph, or none. A gradient that is itself
// differentiated goes to them, as that of the constructor cuts the graph.
struct ValuesOf : KernelFunction<ValuesOf> {
  static Tensor forward(Context* ctx, const Tensor& a, const OptionalTensor& given) {
    const Stored& parts = *stored(a);
    ctx->saved_data["given"] = given.has_value();
    ctx->save_for_backward({parts.compressed_indices(), parts.plain_indices()});
    ctx->saved_data["sizes"] = a.sizes();
    ctx->saved_data["layout"] = static_cast<int64_t>(a.layout());
    return aliased(parts.values());
  }

  static Gradients backward(Context* ctx, const Gradients& grads) {
    if (at::GradMode::is_enabled() && ctx->saved_data["given"].toBool() && ctx->needs_input_grad(1))
      return {Tensor(), grads[0]};
    const auto saved = ctx->get_saved_variables();
    return {sparse_of_values(saved[0], saved[1], grads[0], ctx->saved_data["sizes"].toIntVector(),
                             static_cast<at::Layout>(ctx->saved_data["layout"].toInt())),
            Tensor()};
  }
};

}  // namespace

Tensor sparse_of_values(const Tensor& compressed, const Tensor& plain, const Tensor& values, at::IntArrayRef sizes,
                        at::Layout layout) {
  if (!at::GradMode::is_enabled() || !values.requires_grad())
    return made(compressed, plain, aliased(values), sizes, layout);
  return OfValues::apply(values, compressed, plain, sizes, layout);
}

Tensor values_of_sparse(const Tensor& a) {
  if (stored(a) == nullptr) return a.values();
  const Tensor& values = stored(a)->values();
  if (!at::GradMode::is_enabled() || !a.requires_grad()) return aliased(values);
  const auto& node = a.grad_fn();
  const bool is_built = node && node->name() == "SparseCompressedTensorBackward0" && values.requires_grad();
  return ValuesOf::apply(a, is_built ? OptionalTensor(values) : std::nullopt);
}

}  // namespace matmuls
