// The Python module custom_mm._C: life cycle of the library handles, and facts about the build. Operators register
// themselves with the dispatcher in their own files; this file includes none of them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "attention/packed.h"
#include "dense/inplace/inplace_matmul.h"
#include "dense/rows/linear_rows.h"
#include "distributed/repeated.h"
#include "glue/batch_invariance.h"
#include "glue/checks.h"
#include "glue/handles.h"
#include "glue/kernel_switch.h"
#include "glue/prepared_calls.h"
#include "glue/unchanged.h"
#include "glue/values_graph.h"
#include "gpu/hopper_limits.h"
#include "python_calls.h"
#include "rows/bindings.h"
#include "sparse/index_checks.h"
#include "sparse/kept_solves.h"
#include "sparse/spmm/choose.h"
#include "texts/embed.h"
#include "texts/pack.h"
#ifdef MATMULS_CUDA
#include "distributed/peer_rows.h"
#include "gpu/device_limits.h"
#include "masked/replay.h"
#endif

namespace py = pybind11;
using matmuls::Library;

namespace {

py::list handle_info() {
  std::vector<matmuls::HandleInfo> infos;
  {
    py::gil_scoped_release release;
    infos = matmuls::live_handles();
  }
  py::list result;
  for (const auto& info : infos) {
    py::list workspaces;
    for (const auto& w : info.workspaces)
      workspaces.append(py::dict(py::arg("stream") = w.stream, py::arg("nbytes") = w.nbytes));
    result.append(py::dict(py::arg("library") = info.library, py::arg("device") = info.device,
                           py::arg("thread") = info.thread, py::arg("workspaces") = workspaces));
  }
  return result;
}

#ifdef MATMULS_CUDA
template <class GetProperty>
std::string version_of(GetProperty get) {
  int major = 0, minor = 0, patch = 0;
  get(MAJOR_VERSION, &major), get(MINOR_VERSION, &minor), get(PATCH_LEVEL, &patch);
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}
#endif

struct Relaxed {
  std::unique_ptr<matmuls::RelaxedCapture> entered;
};

at::Device gpu(int index) { return {at::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

py::dict choose_spmm(const matmuls::spmm::ProductFacts& facts, const matmuls::spmm::DensifyFacts& more) {
  py::dict result;
  if (const auto densified = matmuls::spmm::choose_densified(facts, more)) {
    result["kernel"] = matmuls::spmm::name_of(*densified);
    return result;
  }
  const auto choice = matmuls::spmm::choose_rows(facts);
  TORCH_CHECK(is_compiled(facts, choice), "choose_spmm: expected a kernel that is compiled, got ", choice.lanes,
              " lanes, ", choice.parts, " parts and ", choice.vectors, " vectors");
  result["kernel"] = choice.name();
  result["lanes"] = choice.lanes, result["parts"] = choice.parts, result["vectors"] = choice.vectors;
  result["shares"] = choice.shares, result["lean"] = choice.lean;
  result["blocks"] = choice.blocks, result["piece_blocks"] = choice.piece_blocks, result["slices"] = choice.slices;
  result["rows_each"] = choice.rows_each, result["slices_first"] = choice.slices_first;
  result["slot"] = choice.slot, result["slots"] = choice.slots;
  result["densify"] = matmuls::spmm::is_worth_densifying(facts, false);
  result["densify_copies"] = matmuls::spmm::is_worth_densifying(facts, true);
  return result;
}

py::dict build_info() {
  py::dict info;
  info["torch"] = TORCH_VERSION;
  info["compiler"] = __VERSION__;
#ifdef MATMULS_CUDA
  info["cuda"] = std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  info["archs"] = MATMULS_ARCHS;
#ifdef MATMULS_SM90A
  info["hopper_kernels"] = true;
#else
  info["hopper_kernels"] = false;
#endif
  info["cublas"] = version_of(cublasGetProperty);
  info["cublaslt"] = std::to_string(cublasLtGetVersion());
  info["cusparse"] = version_of(cusparseGetProperty);
#else
  info["cuda"] = py::none();
#endif
  return info;
}

// The kernels of cublaslt_matmul: their switch, and which of them a product runs.
void define_products(py::module_& m) {
  m.def("product_kernels",
        [] { return std::vector<std::string>(std::begin(matmuls::kProductNames), std::end(matmuls::kProductNames)); });
  m.def("switch_off_product_kernels", [](const std::vector<std::string>& off) {
    using Kernel = matmuls::ProductKernel;
    matmuls::KernelSwitch<Kernel>::set_off(off, matmuls::kProductKernels,
                                           [](Kernel k) { return matmuls::kProductNames[static_cast<int>(k)]; });
  });
  m.def(
      "choose_product",
      [](int64_t rows, int64_t columns, int64_t inner, std::optional<std::string_view> activation,
         int multiprocessors) {
        using namespace matmuls::dense_rows;
        const auto kernel =
            fastest(rows, columns, inner, matmuls::parse_activation("choose_product", activation), multiprocessors);
        return std::pair(std::string(matmuls::kProductNames[static_cast<int>(kernel)]),
                         name_of(choose(rows, columns, inner, multiprocessors)));
      },
      py::arg("rows"), py::arg("columns"), py::arg("inner"), py::arg("activation"), py::arg("multiprocessors"));
}

// The kernels of matmul_: their switch, and which of them a call runs.
void define_inplace(py::module_& m) {
  m.def("inplace_kernels",
        [] { return std::vector<std::string>(std::begin(matmuls::kInplaceNames), std::end(matmuls::kInplaceNames)); });
  m.def("switch_off_inplace_kernels", [](const std::vector<std::string>& off) {
    using Kernel = matmuls::InplaceKernel;
    matmuls::KernelSwitch<Kernel>::set_off(off, matmuls::kInplaceKernels,
                                           [](Kernel k) { return matmuls::kInplaceNames[static_cast<int>(k)]; });
  });
  m.def(
      "explain_in_place",
      [](const at::Tensor& a, const at::Tensor& b, bool transb, const std::optional<at::Tensor>& bias,
         int64_t workspace) {
        const matmuls::InplaceChoice c = matmuls::explain_in_place(a, b, transb, bias, workspace);
        py::dict launch;
        if (c.tile_rows > 0)
          launch = py::dict(py::arg("tile_rows") = c.tile_rows, py::arg("tile_columns") = c.tile_columns);
        return py::make_tuple(c.name(), c.why, launch);
      },
      py::arg("a"), py::arg("b"), py::arg("transb"), py::arg("bias"), py::arg("workspace"));
}

#ifdef MATMULS_CUDA
void define_peer_rows(py::module_& m) {
  using no_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<matmuls::PeerRows>(m, "PeerRows")
      .def(
          py::init<at::Tensor, const std::vector<int64_t>&, int, std::optional<at::Tensor>, const std::vector<int64_t>&,
                   const std::vector<int64_t>&, const std::vector<int64_t>&, int64_t, double>(),
          py::kw_only(), py::arg("buffer"), py::arg("addresses"), py::arg("rank"), py::arg("index"), py::arg("starts"),
          py::arg("slots"), py::arg("sources"), py::arg("row_bytes"), py::arg("seconds"))
      .def("send", &matmuls::PeerRows::send, py::arg("x"), no_gil())
      .def("wait", &matmuls::PeerRows::wait, no_gil())
      .def_property_readonly("lost", &matmuls::PeerRows::lost)
      .def_property_readonly_static("header", [](const py::object&) { return matmuls::kPeerHeaderBytes; })
      .def_property_readonly_static("most", [](const py::object&) { return matmuls::kMostPeers; });
}
#endif

// The switch of handles(batch_invariant=True).
void define_batch_invariance(py::module_& m) {
  m.def("is_batch_invariant", matmuls::is_batch_invariant);
  m.def("open_batch_invariant_scope", [] { ++matmuls::batch_invariant_scopes; });
  m.def("close_batch_invariant_scope", [] { --matmuls::batch_invariant_scopes; });
}

void define_index_checks(py::module_& m) {
  using no_gil = py::call_guard<py::gil_scoped_release>;
  m.def(
      "validate_offsets",
      [](const std::string& name, const at::Tensor& offsets, int64_t nonzeros, const std::string& what) {
        matmuls::validate_offsets(name.c_str(), offsets, nonzeros, what.c_str());
      },
      no_gil());
  m.def(
      "validate_indices",
      [](const std::string& name, const std::string& what, const at::Tensor& indices, int64_t size) {
        matmuls::validate_indices(name.c_str(), what.c_str(), indices, size);
      },
      no_gil());
  m.def(
      "sparse_of_values",
      [](const at::Tensor& crow, const at::Tensor& col, const at::Tensor& values, const std::vector<int64_t>& shape) {
        return matmuls::sparse_of_values(crow, col, values, shape, at::kSparseCsr);
      },
      py::arg("crow"), py::arg("col"), py::arg("values"), py::arg("shape"));
  m.def("values_of_sparse", matmuls::values_of_sparse, py::arg("a"));
  m.def("trust_indices", matmuls::trust_indices, py::arg("crow"), py::arg("col"), py::arg("order"), py::arg("columns"),
        no_gil());
}

// The analyses that a state of csr_solve_state keeps, as tuples of its members.
void define_kept_solves(py::module_& m) {
  m.def("kept_solves", [](const at::Tensor& state) {
    const auto kept = [&] {
      const py::gil_scoped_release no_gil;
      return matmuls::solve::kept_solves(state);
    }();
    py::list found;
    for (const auto& s : kept)
      found.append(py::make_tuple(s.columns, c10::toString(s.type), s.transpose, s.captured, s.nbytes));
    return found;
  });
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  // Driver calls and handles of other threads may block for long, so these functions release the GIL.
  using no_gil = py::call_guard<py::gil_scoped_release>;
  const auto lifecycle = [&](const char* name, Library library) {
    m.def((std::string("init_") + name).c_str(), [library] { return matmuls::init_handles(library); }, no_gil());
    m.def((std::string("destroy_") + name).c_str(), [library] { return matmuls::destroy_handles(library); }, no_gil());
  };
  lifecycle("cublas", Library::cublas);
  lifecycle("cublaslt", Library::cublaslt);
  lifecycle("cusparse", Library::cusparse);
  m.def("handle_info", handle_info);
  m.def("set_workspace_size", matmuls::set_workspace_size, py::arg("nbytes"), no_gil());
  m.def("workspace_size", matmuls::workspace_size, no_gil());
  m.def("is_capturing", [](int device) { return matmuls::is_capturing(gpu(device)); }, py::arg("device"));
  m.def("current_stream", [](int device) { return matmuls::current_stream(gpu(device)); }, py::arg("device"));
  m.def(
      "synchronize_stream", [](int device) { matmuls::synchronize_stream(gpu(device)); }, py::arg("device"), no_gil());
  m.def(
      "synchronize_device", [](int device) { matmuls::synchronize_device(gpu(device)); }, py::arg("device"), no_gil());
  py::class_<Relaxed>(m, "RelaxedCapture")
      .def(py::init())
      .def("__enter__", [](Relaxed& self) { self.entered = std::make_unique<matmuls::RelaxedCapture>(); })
      .def("__exit__", [](Relaxed& self, const py::args&) { self.entered.reset(); });
  define_kept_solves(m);
  m.def("build_info", build_info);
  m.def(
      "choose_spmm",
      [](int64_t rows, int64_t columns, int64_t nonzeros, int64_t longest, int64_t n, int64_t batches,
         int element_bytes, bool vectors, int64_t multiprocessors, bool plain, double alpha, bool fp16x2, bool cublas) {
        return choose_spmm({rows, columns, nonzeros, longest, n, batches, element_bytes, vectors, multiprocessors},
                           {plain, alpha == 1, fp16x2, cublas});
      },
      py::kw_only(), py::arg("rows"), py::arg("columns"), py::arg("nonzeros"), py::arg("longest"), py::arg("n"),
      py::arg("batches") = 1, py::arg("element_bytes") = 4, py::arg("vectors") = true, py::arg("multiprocessors") = 132,
      py::arg("plain") = false, py::arg("alpha") = 1.0, py::arg("fp16x2") = false, py::arg("cublas") = false);
  m.def("switch_off_spmm_kernels", [](const std::vector<std::string>& off) {
    matmuls::KernelSwitch<matmuls::spmm::SpmmKernel>::set_off(off, matmuls::spmm::kSpmmKernels, matmuls::spmm::name_of);
  });
  m.attr("kernel_limits") = py::dict(py::arg("fewest_in_fp16x2") = matmuls::spmm::kFewestInFp16x2,
                                     py::arg("hopper_block_bytes") = matmuls::kHopperBlockBytes);
#ifdef MATMULS_CUDA
  m.def(
      "simulate_device",
      [](std::optional<int64_t> shared_memory, std::optional<int> multiprocessors,
         std::optional<std::pair<int, int>> capability, std::optional<bool> hopper_code) {
        matmuls::simulate_device({shared_memory, multiprocessors, capability, hopper_code});
      },
      py::kw_only(), py::arg("shared_memory") = py::none(), py::arg("multiprocessors") = py::none(),
      py::arg("capability") = py::none(), py::arg("hopper_code") = py::none());
  matmuls::define_replay(m);
  define_peer_rows(m);
#endif
  matmuls::define_unchanged(m);
  m.def("embed", matmuls::embed, py::arg("ids"), py::arg("words"), py::arg("position_ids"), py::arg("positions"),
        py::arg("type_ids"), py::arg("types"), py::arg("weight"), py::arg("bias"), py::arg("eps"));
  m.def("pack_padded", matmuls::pack_padded, py::arg("input_ids"), py::arg("mask"), py::arg("token_type_ids"),
        py::arg("padding"), py::arg("packed"), py::arg("positions"), py::arg("packed_types"), py::arg("place"),
        py::arg("starts"));
  m.def("unpack_padded", matmuls::unpack_padded, py::arg("states"), py::arg("place"), py::arg("batch"),
        py::arg("length"));
  m.def("attend_packed", matmuls::attend_packed, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("query_starts"),
        py::arg("key_starts"), py::arg("longest"), py::arg("scale"), py::arg("left"), py::arg("right"));
  m.def(
      "check_no_overlap",
      [](const std::string& op, const at::Tensor& out, const at::Tensor& values, const at::Tensor& dense) {
        matmuls::check_no_overlap(op.c_str(), out, {{"values", values}, {"dense", dense}});
      },
      py::arg("op"), py::arg("out"), py::arg("values"), py::arg("dense"));
  define_products(m);
  define_inplace(m);
  define_batch_invariance(m);
  define_index_checks(m);
  matmuls::define_python_calls(m);
  matmuls::define_prepared_calls(m);
  matmuls::define_repeated_product(m);
  matmuls::define_explain(m);
}
