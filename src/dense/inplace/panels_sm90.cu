// matmul_ by panels_kernel_sm90.cuh on Hopper: the choice of its tile, or of another kernel, and the launch.
#ifdef __CUDACC__
#include <limits>

#include "dense/gemm_types.h"
#include "dense/inplace/inplace_matmul.h"
#include "dense/inplace/panels_kernel_sm90.cuh"
#include "glue/kernel_switch.h"

namespace matmuls {
namespace {

using namespace in_place;

// ----------------------------------------------------------------------------------------------------------- launch

template <class T, class Tile, bool b_k_apart>
struct PanelsTile : Walk {
  static constexpr auto kernel = panels_kernel<T, Tile, b_k_apart>;
  static constexpr TileSize size{Tile::rows, Tile::columns};

  static int clusters() { return clusters_at_once<kernel, Tile::threads, Tile::shared>(kPair); }

  explicit PanelsTile(const Operands& o)
      : Walk(o.a.size(0), o.columns, size, clusters(), kTransposedTile<T, b_k_apart>) {
    if (Tile::scratch(across) > kScratchBytes) waves = 0;
  }

  bool needs_counter() const { return kTransposedTile<T, b_k_apart> || across > 1; }
  double cycles(const Operands& o) const { return waves * size.cycles(up(o.a.size(1), Tile::wide)); }

  void launch(const Operands& o) const {
    const int64_t rows = o.a.size(0), inner = o.a.size(1);
    const Shape shape{static_cast<int>(rows), static_cast<int>(o.columns), pairs, across, up(inner, Tile::wide)};
    T* const data = o.a.mutable_data_ptr<T>();
    const CUtensorMap a_map = map_of<T>(data, rows, inner, o.a.stride(0), Tile::rows);
    const CUtensorMap b_map =
        b_k_apart ? map_of<T>(o.b.const_data_ptr<T>(), inner, o.columns, o.b.stride(0), Tile::wide)
                  : map_of<T>(o.b.const_data_ptr<T>(), o.columns, inner, o.b.stride(0), Tile::columns / kPair);
    const CUtensorMap out_map = map_of<T>(data, rows, o.columns, o.a.stride(0),
                                          kTransposedTile<T, b_k_apart> ? kPair * Tile::rows / Tile::parts : 64);
    std::optional<Counters> counters;
    if (needs_counter()) counters.emplace(o.a);
    Launch launch(across * teams() * kPair, Tile::threads, Tile::shared);
    start(launch, kPair, kernel, a_map, b_map, out_map, o.bias.defined() ? o.bias.const_data_ptr<T>() : nullptr, shape,
          counters ? counters->own<TeamCounters>() : nullptr, counters ? counters->slot.value_or(0) : 0);
  }
};

template <class T>
using Large = Tile<T, 2, 256, 4>;
template <class T>
using Middle = Tile<T, 2, 192, 4>;
template <class T>
using Narrow = Tile<T, 2, 128, 6>;
template <class T>
using Small = Tile<T, 1, 128, 8>;

// Time of panels through a workspace over that of large tiles that leave no multiprocessor idle. They reach 0.87 to
// 0.93 of cuBLAS at 16 bits, 0.49 to 0.58 in TF32 (H200).
template <class T>
constexpr double kPanels = sizeof(T) == 4 ? 1.7 : 1.15;

bool is_on(InplaceKernel kernel) { return !KernelSwitch<InplaceKernel>::is_off(kernel); }

// What a call that the kernels support runs.
template <class T, bool b_k_apart>
InplaceChoice choose(const Operands& o) {
  if (is_on(InplaceKernel::few_rows) && few_rows_fit<T, b_k_apart>(o))
    return {InplaceKernel::few_rows, "the result's tiles fit into one wave", kFewRows, kFewColumns};
  constexpr InplaceChoice other{InplaceKernel::workspace, "the tiles would leave part of the GPU idle"};
  const PanelsTile<T, Large<T>, b_k_apart> large(o);
  if (!is_on(InplaceKernel::panels) || large.clusters() == 0) return other;
  InplaceChoice choice = other;
  double least = std::numeric_limits<double>::infinity();
  const auto consider = [&]<class Tile>(const PanelsTile<T, Tile, b_k_apart>& way) {
    if (way.waves == 0 || way.cycles(o) >= least) return;
    least = way.cycles(o);
    choice = {InplaceKernel::panels, "estimated faster than other tiles and than panels through a workspace",
              Tile::rows, Tile::columns};
  };
  consider(large);
  if constexpr (!kTransposedTile<T, b_k_apart>) {
    consider(PanelsTile<T, Middle<T>, b_k_apart>(o));
    consider(PanelsTile<T, Narrow<T>, b_k_apart>(o));
    consider(PanelsTile<T, Small<T>, b_k_apart>(o));
  }
  const double copied = workspace_cycles(o.a.size(0), o.columns, up(o.a.size(1), Large<T>::wide), large.size,
                                         large.clusters(), kPanels<T>);
  return is_on(InplaceKernel::workspace) && copied < least ? other : choice;
}

// Launches a choice of few_rows or panels.
template <class T, bool b_k_apart>
void launch(const Operands& o, const InplaceChoice& c) {
  if (c.kernel == InplaceKernel::few_rows) return multiply_few_rows<T, b_k_apart>(o);
  const auto is = [&]<class Tile>(std::type_identity<Tile>) {
    return c.tile_rows == Tile::rows && c.tile_columns == Tile::columns;
  };
  if constexpr (!kTransposedTile<T, b_k_apart>) {
    if (is(std::type_identity<Middle<T>>())) return PanelsTile<T, Middle<T>, b_k_apart>(o).launch(o);
    if (is(std::type_identity<Narrow<T>>())) return PanelsTile<T, Narrow<T>, b_k_apart>(o).launch(o);
    if (is(std::type_identity<Small<T>>())) return PanelsTile<T, Small<T>, b_k_apart>(o).launch(o);
  }
  PanelsTile<T, Large<T>, b_k_apart>(o).launch(o);
}

// True if TMA can address the matrix: contiguous rows that all start on 16 bytes.
bool walkable(const at::Tensor& t) {
  const int64_t item = t.element_size();
  return t.stride(1) == 1 && t.stride(0) * item % 16 == 0 && t.stride(0) >= t.size(1) &&
         reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

// Hands the operands to `use`, with their type and whether b is contiguous along the columns of the result.
// `otherwise`: what is returned for a call that the kernels do not support.
template <class Result, class Use>
Result with_operands(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, bool transb, Result otherwise,
                     const Use& use) {
  if (!has_hopper_kernels(c10::cuda::current_device())) return otherwise;
  const bool tf32 = a.scalar_type() == at::kFloat;
  if (tf32 ? !allows_tf32() : a.scalar_type() != at::kBFloat16 && a.scalar_type() != at::kHalf) return otherwise;
  at::Tensor rows = transb ? b : b.t();  // [N, K]
  const int64_t columns = rows.size(0);
  // TMA stores write at least 16 bytes.
  if (columns * rows.element_size() % 16 != 0 || a.size(0) > INT32_MAX / 2 || !walkable(a) ||
      (bias.defined() && bias.stride(0) != 1))
    return otherwise;
  const bool k_apart = !walkable(rows) && walkable(rows.t());
  if (!k_apart && !walkable(rows)) return otherwise;
  const Operands o{a, k_apart ? rows.t() : rows, bias, columns};
  const auto typed = [&]<class T>() {
    return k_apart ? use.template operator()<T, true>(o) : use.template operator()<T, false>(o);
  };
  if (tf32) return typed.template operator()<float>();
  return a.scalar_type() == at::kBFloat16 ? typed.template operator()<c10::BFloat16>()
                                          : typed.template operator()<c10::Half>();
}

}  // namespace

InplaceChoice choose_in_place(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, bool transb) {
  const InplaceChoice other{InplaceKernel::workspace,
                            "the kernels need Hopper, 16 bits or TF32, and rows at multiples of 16 bytes"};
  return with_operands(a, b, bias, transb, other,
                       [&]<class T, bool k_apart>(const Operands& o) { return choose<T, k_apart>(o); });
}

bool multiply_in_place_sm90(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, bool transb) {
  return with_operands(a, b, bias, transb, false, [&]<class T, bool k_apart>(const Operands& o) {
    const InplaceChoice choice = choose<T, k_apart>(o);
    if (choice.kernel == InplaceKernel::workspace) return false;
    launch<T, k_apart>(o, choice);
    return true;
  });
}

}  // namespace matmuls
#endif
