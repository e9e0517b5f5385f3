// add_lora: what LoRA adapters add to a linear's product, each row with its own adapter.
//
// Rows of one adapter are brought together. First all are multiplied with A, of all adapters one packed weight: a panel has
// 32 features of one adapter or several, and is multiplied with the rows of these. Then each row is multiplied with its B
// (linear.h). An output depends on its own row and adapter alone, to the bit.
#include <omp.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "linear.h"
#include "op_checks.h"
#include "scratch.h"

namespace omniserve {
namespace {

constexpr int64_t kParallelMacs = int64_t{1} << 16;
constexpr int64_t kTaskPanels = 8;
constexpr int64_t kTasksPerThread = 4;  // in a row: neighbours are read faster

Scratch& scratch(int which) {
  static thread_local Scratch scratches[3];
  return scratches[which];
}

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Rows [begin, end) of the order that are multiplied at once, of one adapter or by one panel of A.
struct Part {
  int64_t which, begin, end;
};

// Features [begin, end) of the product of rows [first, last).
void multiply(const LinearArgs& args, int64_t begin, int64_t end, int64_t first, int64_t last) {
  const int64_t rows = (last - first + kTileOfRows - 1) / kTileOfRows * kTileOfRows;
  const int64_t features = (end - begin + kPanel - 1) / kPanel * kPanel;
  auto* const sums = static_cast<float*>(scratch(1).of(rows * features * 4));
  void* const packed_x = scratch(2).of(linear_rows_bytes(args, rows));
  linear_pack_rows(args, packed_x, first, last);
  linear_features(args, packed_x, sums, begin, end, first, last);
}

// Adds parts of up to `most` rows.
void split(std::vector<Part>& parts, int64_t which, int64_t begin, int64_t end, int64_t most) {
  for (; begin < end; begin += most) parts.push_back({which, begin, std::min(begin + most, end)});
}

}  // namespace

Tensor add_lora_into(Tensor y, Tensor x, Tensor slots, Tensor a, Tensor b, Tensor scales, std::optional<Tensor> given) {
  STD_TORCH_CHECK(x.dim() > 0 && y.dim() > 0, "x and y must have a last dimension");
  const DType dtype = dtype_of(x, "x");
  for (const auto& [tensor, name] : {std::pair<const Tensor&, const char*>{y, "y"}, {a, "a"}, {b, "b"}})
    check_type(tensor, x.scalar_type(), name);
  check_index(slots, ScalarType::Int, "slots");
  check_index(scales, ScalarType::Float, "scales");
  check_dim(a, 3, "a");
  check_dim(b, 4, "b");
  check_contiguous(a, "a");
  check_contiguous(b, "b");
  const int64_t num_in = x.size(-1), num_out = y.size(-1), num_rows = slots.size(0), num_adapters = scales.size(0);
  const int64_t at_once = dtype == DType::bf16 ? 2 : 1, rank = b.size(2) * at_once;
  const int64_t a_panels = num_panels(num_adapters * rank), b_panels = num_panels(num_out);
  const int64_t steps = (num_in + at_once - 1) / at_once, width = kPanel * at_once;
  STD_TORCH_CHECK(rank % 2 == 0 && rank <= kMostRank, "the rank must be even and at most ", kMostRank, ", got ", rank);
  STD_TORCH_CHECK(a.size(0) == a_panels && a.size(1) == steps && a.size(2) == width, "a must be [", a_panels, ", ",
                  steps, ", ", width, "] for ", num_in, " inputs and ", num_adapters, " adapters of rank ", rank,
                  ", got ", shape_of(a));
  STD_TORCH_CHECK(b.size(0) == num_adapters && b.size(1) == b_panels && b.size(3) == width, "b must be [", num_adapters,
                  ", ", b_panels, ", ", b.size(2), ", ", width, "] for ", num_adapters, " adapters and ", num_out,
                  " outputs, got ", shape_of(b));
  STD_TORCH_CHECK(x.numel() == num_rows * num_in && y.numel() == num_rows * num_out, "x and y must have ", num_rows,
                  " rows, as slots has, got ", shape_of(x), " and ", shape_of(y));
  isa_name();  // a wrong OMNISERVE_ISA is reported here, not inside a parallel region
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  if (!y.is_contiguous()) y = torch::stable::contiguous(y);
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < y.dim(); ++d) sizes.push_back(y.size(d));
  Tensor out = given.has_value() ? *given : empty_cpu(sizes.data(), y.dim(), y);
  check_type(out, y.scalar_type(), "out");
  check_contiguous(out, "out");
  STD_TORCH_CHECK(out.numel() == y.numel(), "out must have y's ", shape_of(y), ", got ", shape_of(out));
  if (out.numel() == 0) return out;

  // Rows with an adapter, those of one side by side; then those without, as of an adapter behind the last.
  const auto* const slot_of = static_cast<const int32_t*>(slots.const_data_ptr());
  const auto adapter_of = [&](int64_t row) {  // what lies in an empty seat may be anything
    return static_cast<size_t>(slot_of[row] > 0 && slot_of[row] <= num_adapters ? slot_of[row] - 1 : num_adapters);
  };
  std::vector<int64_t> starts(static_cast<size_t>(num_adapters) + 2);
  for (int64_t row = 0; row < num_rows; ++row) ++starts[adapter_of(row) + 1];
  for (size_t i = 1; i < starts.size(); ++i) starts[i] += starts[i - 1];
  const int64_t num_adapted = starts[static_cast<size_t>(num_adapters)];
  std::vector<int64_t> order(static_cast<size_t>(num_rows)), next = starts;
  for (int64_t row = 0; row < num_rows; ++row) order[static_cast<size_t>(next[adapter_of(row)]++)] = row;
  const auto start_of = [&](int64_t adapter) { return starts[static_cast<size_t>(std::min(adapter, num_adapters))]; };

  const int64_t element = dtype_bytes(dtype), low_stride = a_panels * kPanel;
  const int64_t x_bytes = num_in * element, y_bytes = num_out * element;
  const auto* const x_rows = static_cast<const char*>(x.const_data_ptr());
  const auto* const y_rows = static_cast<const char*>(y.const_data_ptr());
  auto* const out_rows = static_cast<char*>(out.mutable_data_ptr());
  const bool in_order = num_adapted > 0 && order[static_cast<size_t>(num_adapted) - 1] - order[0] == num_adapted - 1 &&
                        std::is_sorted(order.begin(), order.begin() + num_adapted);
  auto* const low = static_cast<char*>(
      scratch(0).of(aligned(num_adapted * low_stride * element) + (in_order ? 0 : num_adapted * x_bytes)));
  char* const gathered = low + aligned(num_adapted * low_stride * element);
  const LinearArgs down{in_order ? x_rows + order[0] * x_bytes : gathered,
                        a.const_data_ptr(),
                        nullptr,
                        low,
                        num_in,
                        num_adapted,
                        num_in,
                        low_stride,
                        dtype,
                        dtype};
  const int64_t most = linear_rows(down).task;
  std::vector<Part> by_panel, by_adapter;
  for (int64_t panel = 0; panel < a_panels; ++panel)
    split(by_panel, panel, start_of(panel * kPanel / rank), start_of(((panel + 1) * kPanel + rank - 1) / rank), most);
  for (int64_t adapter = 0; adapter < num_adapters; ++adapter)
    split(by_adapter, adapter, start_of(adapter), start_of(adapter + 1), most);
  const auto num_down = static_cast<int64_t>(by_panel.size());
  const int64_t blocks = (b_panels + kTaskPanels - 1) / kTaskPanels;
  const int64_t num_up = static_cast<int64_t>(by_adapter.size()) * blocks;
  const auto* const b_stack = static_cast<const char*>(b.const_data_ptr());
  const auto* const scale_of = static_cast<const float*>(scales.const_data_ptr());
  const int64_t b_bytes = panel_size(rank, dtype) * b_panels * element;

  const int64_t num_threads = omp_get_max_threads();
  const int64_t in_a_row = std::max<int64_t>(1, num_up / (num_threads * kTasksPerThread));
  const bool parallel = num_threads > 1 && num_adapted * rank * (num_in + num_out) > kParallelMacs;
#pragma omp parallel num_threads(static_cast<int>(num_threads)) if (parallel)
  {
    if (!in_order) {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < num_adapted; ++t)
        std::memcpy(gathered + t * x_bytes, x_rows + order[static_cast<size_t>(t)] * x_bytes, static_cast<size_t>(x_bytes));
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_down; ++i) {
      const Part& part = by_panel[static_cast<size_t>(i)];
      multiply(down, part.which * kPanel, (part.which + 1) * kPanel, part.begin, part.end);
    }
#pragma omp for schedule(dynamic, in_a_row) nowait
    for (int64_t i = 0; i < num_up; ++i) {
      const Part& part = by_adapter[static_cast<size_t>(i / blocks)];
      const int64_t begin = i % blocks * kTaskPanels * kPanel;
      const LoraArgs up{low + part.which * rank * element,
                        b_stack + part.which * b_bytes,
                        y_rows,
                        out_rows,
                        order.data(),
                        low_stride,
                        rank,
                        num_out,
                        dtype,
                        scale_of[part.which]};
      lora_features(up, begin, std::min(begin + kTaskPanels * kPanel, num_out), part.begin, part.end);
    }
#pragma omp for schedule(static)
    for (int64_t t = num_adapted; t < num_rows; ++t) {
      const int64_t row = order[static_cast<size_t>(t)];
      std::memcpy(out_rows + row * y_bytes, y_rows + row * y_bytes, static_cast<size_t>(y_bytes));
    }
  }
  return out;
}

Tensor add_lora(Tensor y, Tensor x, Tensor slots, Tensor a, Tensor b, Tensor scales) {
  return add_lora_into(y, x, slots, a, b, scales, std::nullopt);
}

}  // namespace omniserve
