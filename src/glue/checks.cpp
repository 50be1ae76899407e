#include "glue/checks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace matmuls {

at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) { return at::empty(sizes, options); }
at::Tensor zeros(at::IntArrayRef sizes, const at::TensorOptions& options) { return at::zeros(sizes, options); }

namespace {

void check_strided(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK(t.layout() == at::kStrided, op, ": expected ", name, " to be a strided tensor, got layout ", t.layout());
}

// A loop over memory: `count` steps of `stride` bytes.
struct Loop {
  int64_t stride, count;
};

int64_t extent(const std::vector<Loop>& loops) {
  int64_t bytes = 0;
  for (const auto& l : loops) bytes += l.stride * (l.count - 1);
  return bytes;
}

// The bytes of a tensor as loops of count >= 2 with positive strides from its lowest byte. The last loop covers the
// bytes of one element.
std::vector<Loop> loops_of(const at::Tensor& t) {
  std::vector<Loop> loops;
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) > 1 && t.stride(d) != 0) loops.push_back({t.stride(d) * t.element_size(), t.size(d)});
  if (t.element_size() > 1) loops.push_back({1, t.element_size()});
  return loops;
}

// Is there an index with sum(stride_i * x_i) == target, 0 <= x_i < count_i? Strides are sorted in descending order, so
// each level has few choices for common layouts; `budget` bounds the search for the others.
bool reachable(const std::vector<Loop>& loops, size_t level, int64_t target, const std::vector<int64_t>& rest,
               const std::vector<int64_t>& gcd, int64_t& budget) {
  if (target < 0 || target > rest[level]) return false;
  if (level == loops.size()) return target == 0;
  if (target % gcd[level] != 0) return false;
  if (--budget < 0) return true;
  const auto [stride, count] = loops[level];
  const int64_t after = rest[level + 1];
  const int64_t high = std::min(count - 1, target / stride);
  const int64_t low = target > after ? (target - after + stride - 1) / stride : 0;
  for (int64_t x = low; x <= high; ++x)
    if (reachable(loops, level + 1, target - x * stride, rest, gcd, budget)) return true;
  return false;
}

bool is_reachable(std::vector<Loop> loops, int64_t target) {
  std::sort(loops.begin(), loops.end(), [](const Loop& l, const Loop& r) { return l.stride > r.stride; });
  // Two loops of equal stride reach the same offsets as one longer loop. Views of one matrix share their strides.
  std::vector<Loop> merged;
  for (const auto& l : loops) {
    if (!merged.empty() && merged.back().stride == l.stride)
      merged.back().count += l.count - 1;
    else
      merged.push_back(l);
  }
  loops = std::move(merged);
  std::vector<int64_t> rest(loops.size() + 1, 0), gcd(loops.size() + 1, 0);
  for (size_t i = loops.size(); i-- > 0;) {
    rest[i] = rest[i + 1] + loops[i].stride * (loops[i].count - 1);
    gcd[i] = std::gcd(gcd[i + 1], loops[i].stride);
  }
  int64_t budget = 100'000;
  return reachable(loops, 0, target, rest, gcd, budget);
}

// True if two indices of t share memory. They do not if, sorted by stride, every stride exceeds the reach of all
// smaller ones. Otherwise search for a nonzero difference of two indices with offset 0; its first nonzero loop counts
// up.
bool overlaps_itself(const at::Tensor& t) {
  if (t.numel() == 0) return false;
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) > 1 && t.stride(d) == 0) return true;
  auto loops = loops_of(t);
  std::sort(loops.begin(), loops.end(), [](const Loop& l, const Loop& r) { return l.stride < r.stride; });
  bool clear = true;
  int64_t reach = 0;
  for (const auto& l : loops) {
    clear &= l.stride > reach;
    reach += l.stride * (l.count - 1);
  }
  for (size_t first = 0; !clear && first < loops.size(); ++first) {
    std::vector<Loop> differences{{loops[first].stride, loops[first].count - 1}};  // differences of 1 and up
    int64_t target = -loops[first].stride;
    for (size_t i = first + 1; i < loops.size(); ++i) {  // differences from 1 - count to count - 1
      differences.push_back({loops[i].stride, 2 * loops[i].count - 1});
      target += loops[i].stride * (loops[i].count - 1);
    }
    if (is_reachable(std::move(differences), target)) return true;
  }
  return false;
}

}  // namespace

void check_same(const char* op, const char* name, const at::Tensor& t, const at::Tensor& a) {
  if (!t.defined()) return;
  check_strided(op, name, t);
  TORCH_CHECK(t.device() == a.device(), op, ": expected ", name, " on ", a.device(), " as a is, got ", t.device());
  TORCH_CHECK(t.scalar_type() == a.scalar_type(), op, ": expected ", name, " of dtype ", a.scalar_type(),
              " as a is, got ", t.scalar_type());
}

void expect_memory(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK((t.is_cpu() || t.is_cuda()) && t.layout() == at::kStrided && t.has_storage(), op, ": expected ", name,
              " to be a dense tensor on a CPU or GPU, got ", t.layout(), " on ", t.device());
}

void expect_gpu(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK_NOT_IMPLEMENTED(t.is_cuda(), op, ": expected ", name, " on a GPU, got it on ", t.device());
}

void check_operands(const char* op, const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias,
                    const at::Tensor& out) {
  TORCH_CHECK(a.defined() && b.defined(), op, ": expected tensors a and b, got None");
  check_strided(op, "a", a);
  TORCH_CHECK(is_real_or_complex(a.scalar_type()), op, ": expected a floating-point or complex dtype, got ",
              a.scalar_type(), " for a");
  check_same(op, "b", b, a);
  check_same(op, "bias", bias, a);
  check_same(op, "out", out, a);
}

bool overlap(const at::Tensor& x, const at::Tensor& y) {
  if (x.numel() == 0 || y.numel() == 0 || !x.storage().is_alias_of(y.storage())) return false;
  auto lx = loops_of(x);
  const auto ly = loops_of(y);
  // x and y share an address if x0 + sum(sx * i) == y0 + sum(sy * j); with j' = last - j all terms turn positive.
  const int64_t shift = static_cast<const char*>(y.const_data_ptr()) - static_cast<const char*>(x.const_data_ptr());
  const int64_t target = shift + extent(ly);
  if (shift > extent(lx) || target < 0) return false;
  lx.insert(lx.end(), ly.begin(), ly.end());
  return is_reachable(std::move(lx), target);
}

void check_no_overlap(const char* op, const at::Tensor& out, std::initializer_list<Named> inputs) {
  TORCH_CHECK(!overlaps_itself(out), op, ": expected out to have one memory location per element, got sizes ",
              out.sizes(), " with strides ", out.strides());
  for (const auto& input : inputs)
    TORCH_CHECK(!input.tensor.defined() || !overlap(out, input.tensor), op, ": expected out and ", input.name,
                " not to overlap in memory; give out its own storage or clone ", input.name);
}

}  // namespace matmuls
