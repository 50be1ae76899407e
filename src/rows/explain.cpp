#include "rows/explain.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <utility>

#include "glue/handles.h"
#include "glue/kernel_switch.h"
#include "rows/bindings.h"
#include "rows/choose.h"

namespace py = pybind11;

namespace matmuls {

RowPlan plan_of(const char* op, const at::Tensor& x, const RowFacts& facts, const OtherGpu& gpu,
                const char* cpu_function) {
  RowPlan plan{facts, {}, nullptr};
  if (facts.rows == 0 || facts.columns == 0) return plan;
  if (gpu) {
    plan.facts.device = *gpu;
  } else if (x.is_cuda()) {
#ifdef MATMULS_CUDA
    const OperationGuard guard(op, x);
    plan.facts.device = row_device();
#endif
  } else {
    TORCH_CHECK(x.is_cpu(), op, ": expected tensors on a CPU or a GPU, got ", x.device());
    plan.cpu_function = cpu_function;
    return plan;
  }
  plan.choice = choose(plan.facts);
  return plan;
}

namespace {

using at::Tensor;

constexpr std::array<std::pair<const char*, RowOperation>, 6> kOperations{
    {{"softmax", RowOperation::softmax},
     {"scaled_masked_softmax", RowOperation::scaled_masked_softmax},
     {"softmax_backward", RowOperation::softmax_backward},
     {"layer_norm", RowOperation::layer_norm},
     {"rms_norm", RowOperation::rms_norm},
     {"norm_backward", RowOperation::norm_backward}}};
constexpr std::array<std::pair<const char*, MaskKind>, 4> kMasks{
    {{"none", MaskKind::none}, {"bytes", MaskKind::bytes}, {"same", MaskKind::same}, {"float32", MaskKind::float32}}};

template <class V, size_t N>
V one_of(const char* what, const std::array<std::pair<const char*, V>, N>& all, const std::string& name) {
  std::string known;
  for (const auto& [each, value] : all) {
    if (name == each) return value;
    known += known.empty() ? each : std::string(", ") + each;
  }
  TORCH_CHECK_VALUE(false, "choose_row_kernel: expected ", what, " of ", known, ", got ", name);
}

// multiprocessors, bytes of shared memory per block and per multiprocessor, and the capability.
using Gpu = std::tuple<int, int64_t, int64_t, std::pair<int, int>>;
RowDevice device_of(const Gpu& gpu) {
  const auto& [multiprocessors, per_block, per_multiprocessor, capability] = gpu;
  TORCH_CHECK_VALUE(multiprocessors > 0 && per_block > 0 && per_multiprocessor > 0,
                    "expected a GPU with multiprocessors and shared memory, got ", multiprocessors, ", ", per_block,
                    " and ", per_multiprocessor);
  return {multiprocessors, per_block, per_multiprocessor, capability.first >= 9};
}
OtherGpu other(const std::optional<Gpu>& gpu) { return gpu ? OtherGpu(device_of(*gpu)) : std::nullopt; }

// Launch parameters that the kernel has, by name.
py::dict dict_of(const RowChoice& c) {
  py::dict d;
  const auto put = [&](const char* name, const auto& value, bool has) {
    if (has) d[name] = value;
  };
  put("form", std::string(name_of(c.form)), c.form != RowForm::only);
  put("scope", std::string(name_of(c.scope)), true);
  put("threads", c.threads, true);
  put("rows_per_block", c.rows_per_block, c.rows_per_block > 1);
  put("blocks_per_row", c.blocks_per_row, c.blocks_per_row > 1);
  put("elements", c.elements, true);
  put("vectors", c.vectors, c.vectors > 0);
  put("unaligned", c.unaligned, c.unaligned);
  put("exact", c.exact, c.exact);
  put("shared", c.shared, c.shared > 0);
  put("stages", c.stages, c.stages > 0);
  put("kept_parts", c.kept_parts, c.kept_parts > 0);
  put("waiting_parts", c.waiting_parts, c.kernel == RowKernel::two_pass);
  put("blocks_per_sm", c.blocks_per_sm, c.blocks_per_sm > 0);
  put("lanes", c.lanes, c.lanes > 0);
  put("tile_rows", c.tile_rows, c.tile_rows > 0);
  put("tiles_per_warp", c.tiles_per_warp, c.tiles_per_warp > 0);
  put("teams", c.teams, c.teams > 0);
  return d;
}

py::tuple tuple_of(const RowPlan& plan) {
  if (plan.choice)
    return py::make_tuple(std::string(name_of(plan.choice->kernel)), std::string(plan.choice->why),
                          dict_of(*plan.choice));
  if (plan.cpu_function)
    return py::make_tuple("cpu: " + std::string(plan.cpu_function), "the tensors are on the CPU", py::dict());
  return py::make_tuple("nothing", "no tensor has an element", py::dict());
}

py::tuple choose_row_kernel(const std::string& operation, int element, int64_t rows, int64_t columns, bool vectors,
                            bool aligned, bool adjacent, bool constant_step, const std::string& mask, bool causal,
                            double scale, bool mask_vectors, bool mask_steps, bool residual, bool keeps,
                            bool plain_constants, bool wants_dx, const Gpu& gpu) {
  TORCH_CHECK_VALUE(element == 2 || element == 4 || element == 8,
                    "choose_row_kernel: expected elements of 2, 4 or 8 bytes, got ", element);
  TORCH_CHECK_VALUE(rows > 0 && columns > 0, "choose_row_kernel: expected at least one row and column, got ", rows,
                    " and ", columns);
  check_columns(columns);
  const RowFacts f{.operation = one_of("an operation", kOperations, operation),
                   .element = element,
                   .rows = rows,
                   .columns = columns,
                   .constant_step = constant_step,
                   .adjacent = adjacent,
                   .vectors = vectors,
                   .aligned = vectors && aligned,
                   .whole = vectors && aligned && columns * element % 16 == 0,
                   .mask = one_of("a mask", kMasks, mask),
                   .causal = causal,
                   .scale = scale,
                   .mask_vectors = mask_vectors,
                   .mask_steps = mask_steps,
                   .residual = residual,
                   .keeps = keeps,
                   .plain_constants = plain_constants,
                   .wants_dx = wants_dx,
                   .device = device_of(gpu)};
  const RowChoice c = choose(f);
  TORCH_CHECK(is_compiled(f, c), "choose_row_kernel: expected a kernel that is compiled, got ", name_of(c.kernel),
              " with ", c.vectors, " vectors of each of ", c.threads, " threads");
  return tuple_of({f, c, nullptr});
}

std::vector<std::string> row_kernel_names() {
  std::vector<std::string> names;
  for (int k = 0; k < kRowKernels; ++k) names.emplace_back(name_of(static_cast<RowKernel>(k)));
  return names;
}

}  // namespace

void define_explain(py::module_& m) {
  m.def("row_kernels", row_kernel_names);
  m.def("switch_off_row_kernels", [](const std::vector<std::string>& off) {
    KernelSwitch<RowKernel>::set_off(off, kRowKernels, [](RowKernel k) { return name_of(k); });
  });
  m.def("choose_row_kernel", choose_row_kernel, py::arg("operation"), py::kw_only(), py::arg("element"),
        py::arg("rows"), py::arg("columns"), py::arg("vectors") = true, py::arg("aligned") = true,
        py::arg("adjacent") = true, py::arg("constant_step") = true, py::arg("mask") = "none",
        py::arg("causal") = false, py::arg("scale") = 1.0, py::arg("mask_vectors") = true,
        py::arg("mask_steps") = false, py::arg("residual") = false, py::arg("keeps") = false,
        py::arg("plain_constants") = false, py::arg("wants_dx") = true, py::arg("gpu"));
  m.def("explain_softmax",
        [](const std::string& op, const Tensor& x, int64_t dim, const OptionalTensor& out,
           const std::optional<Gpu>& gpu) { return tuple_of(explain_softmax(op.c_str(), x, dim, out, other(gpu))); });
  m.def("explain_scaled_masked_softmax", [](const Tensor& x, const OptionalTensor& mask, double scale, bool causal,
                                            const OptionalTensor& out, const std::optional<Gpu>& gpu) {
    return tuple_of(explain_masked_softmax(x, mask, scale, causal, out, other(gpu)));
  });
  m.def("explain_softmax_backward", [](const Tensor& y, const Tensor& grad, int64_t dim, double scale, bool causal,
                                       const OptionalTensor& out, const std::optional<Gpu>& gpu) {
    return tuple_of(explain_softmax_backward(y, grad, dim, scale, causal, out, other(gpu)));
  });
  m.def("explain_norm",
        [](const std::string& op, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
           const OptionalTensor& residual, bool rms, bool keep, const std::optional<Gpu>& gpu) {
          return tuple_of(explain_norm(op.c_str(), x, weight, bias, eps, residual, rms, keep, other(gpu)));
        });
  m.def("explain_norm_backward",
        [](const Tensor& grad, const Tensor& xhat, const Tensor& rstd, const OptionalTensor& weight, bool rms,
           bool need_dx, bool need_columns, const std::optional<Gpu>& gpu) {
          return tuple_of(explain_norm_backward(grad, xhat, rstd, weight, rms, need_dx, need_columns, other(gpu)));
        });
}

}  // namespace matmuls
