// add_lora: what LoRA adapters add to a linear's product, each row with its own adapter.
//
// Rows of one adapter are brought together and multiplied by the packed kernels (linear.h), first all with A, then all
// with B. An output depends on its own row and adapter alone, to the bit.
#include <omp.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "linear.h"
#include "op_checks.h"

namespace omniserve {
namespace {

constexpr int64_t kParallelMacs = int64_t{1} << 16;
constexpr int64_t kTaskPanels = 4;

// Memory of one thread that grows and stays.
class Buffer {
 public:
  char* of(int64_t bytes) {
    if (bytes > size_) {
      size_ = (bytes + 4095) / 4096 * 4096;
      memory_.reset(static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(size_))));
      if (!memory_) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t size_ = 0;
};

Buffer& buffer(int which) {
  static thread_local Buffer buffers[3];
  return buffers[which];
}

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// The rows [begin, end) of the order, which have one adapter.
struct Group {
  int64_t adapter, begin, end;
};

// Up to so many rows of a group that are computed at once.
struct Part {
  const Group* group;
  int64_t begin, end;
};

// to[i] = y[i] + scale * delta[i]
template <typename T>
void add_scaled(const void* y, const void* delta, void* to, float scale, int64_t count) {
  const auto* const base = static_cast<const T*>(y);
  const auto* const more = static_cast<const T*>(delta);
  auto* const out = static_cast<T*>(to);
  for (int64_t i = 0; i < count; ++i)
    out[i] = static_cast<T>(static_cast<float>(base[i]) + scale * static_cast<float>(more[i]));
}

// Features [begin, end) of the product of rows [first, last).
void multiply(const LinearArgs& args, int64_t begin, int64_t end, int64_t first, int64_t last) {
  const int64_t rows = (last - first + kTileOfRows - 1) / kTileOfRows * kTileOfRows;
  const int64_t features = (end - begin + kPanel - 1) / kPanel * kPanel;
  auto* const sums = reinterpret_cast<float*>(buffer(1).of(rows * features * 4));
  char* const packed_x = buffer(2).of(linear_rows_bytes(args, rows));
  linear_pack_rows(args, packed_x, first, last);
  linear_features(args, packed_x, sums, begin, end, first, last);
}

void check_stack(const Tensor& stack, const Tensor& x, int64_t num_in, int64_t num_out, const char* name) {
  check_dim(stack, 4, name);
  check_contiguous(stack, name);
  check_type(stack, x.scalar_type(), name);
  const int64_t at_once = dtype_of(x, "x") == DType::bf16 ? 2 : 1;
  const int64_t panels = num_panels(num_out), steps = (num_in + at_once - 1) / at_once;
  STD_TORCH_CHECK(stack.size(1) == panels && stack.size(2) == steps && stack.size(3) == kPanel * at_once, name,
                  " must be [adapters, ", panels, ", ", steps, ", ", kPanel * at_once, "] for ", num_in,
                  " inputs and ", num_out, " outputs, got ", shape_of(stack));
}

}  // namespace

Tensor add_lora(Tensor y, Tensor x, Tensor slots, Tensor a, Tensor b, Tensor scales) {
  STD_TORCH_CHECK(x.dim() > 0 && y.dim() > 0, "x and y must have a last dimension");
  const DType dtype = dtype_of(x, "x");
  check_type(y, x.scalar_type(), "y");
  check_index(slots, ScalarType::Int, "slots");
  check_index(scales, ScalarType::Float, "scales");
  check_dim(b, 4, "b");
  const int64_t num_in = x.size(-1), num_out = y.size(-1), num_rows = slots.size(0), num_adapters = scales.size(0);
  const int64_t rank = b.size(2) * (dtype == DType::bf16 ? 2 : 1);
  check_stack(a, x, num_in, rank, "a");
  check_stack(b, x, rank, num_out, "b");
  STD_TORCH_CHECK(a.size(0) == num_adapters && b.size(0) == num_adapters, "a, b and scales must have as many adapters, got ",
                  shape_of(a), ", ", shape_of(b), " and ", shape_of(scales));
  STD_TORCH_CHECK(x.numel() == num_rows * num_in && y.numel() == num_rows * num_out, "x and y must have ", num_rows,
                  " rows, as slots has, got ", shape_of(x), " and ", shape_of(y));
  isa_name();  // a wrong OMNISERVE_ISA is reported here, not inside a parallel region
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  if (!y.is_contiguous()) y = torch::stable::contiguous(y);
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < y.dim(); ++d) sizes.push_back(y.size(d));
  Tensor out = empty_cpu(sizes.data(), y.dim(), y);
  if (out.numel() == 0) return out;

  // Rows with an adapter, those of one side by side; then those without.
  const auto* const slot_of = static_cast<const int32_t*>(slots.const_data_ptr());
  const auto adapter_of = [&](int64_t row) {  // what lies in an empty seat may be anything
    return slot_of[row] > 0 && slot_of[row] <= num_adapters ? int64_t{slot_of[row]} - 1 : num_adapters;
  };
  std::vector<int64_t> starts(static_cast<size_t>(num_adapters) + 2);
  for (int64_t row = 0; row < num_rows; ++row) ++starts[static_cast<size_t>(adapter_of(row)) + 1];
  std::vector<Group> groups;
  for (int64_t adapter = 0; adapter <= num_adapters; ++adapter) {
    const auto i = static_cast<size_t>(adapter);
    starts[i + 1] += starts[i];
    if (adapter < num_adapters && starts[i + 1] > starts[i]) groups.push_back({adapter, starts[i], starts[i + 1]});
  }
  std::vector<int64_t> order(static_cast<size_t>(num_rows));
  const int64_t num_adapted = starts[static_cast<size_t>(num_adapters)];
  for (int64_t row = 0; row < num_rows; ++row)
    order[static_cast<size_t>(starts[static_cast<size_t>(adapter_of(row))]++)] = row;

  const int64_t element = dtype_bytes(dtype);
  const auto* const x_rows = static_cast<const char*>(x.const_data_ptr());
  const auto* const y_rows = static_cast<const char*>(y.const_data_ptr());
  auto* const out_rows = static_cast<char*>(out.mutable_data_ptr());
  const auto* const scale_of = static_cast<const float*>(scales.const_data_ptr());
  const int64_t x_bytes = num_in * element, low_bytes = rank * element, y_bytes = num_out * element;
  char* const gathered = buffer(0).of(aligned(num_adapted * x_bytes) + aligned(num_adapted * low_bytes) +
                                      aligned(num_adapted * y_bytes));
  char* const low = gathered + aligned(num_adapted * x_bytes);
  char* const delta = low + aligned(num_adapted * low_bytes);
  const auto* const a_stack = static_cast<const char*>(a.const_data_ptr());
  const auto* const b_stack = static_cast<const char*>(b.const_data_ptr());
  const int64_t a_bytes = panel_size(num_in, dtype) * num_panels(rank) * element;
  const int64_t b_bytes = panel_size(rank, dtype) * num_panels(num_out) * element;
  const auto down = [&](int64_t adapter) {
    return LinearArgs{gathered, a_stack + adapter * a_bytes, nullptr, low, num_in, num_adapted, num_in, rank, dtype, dtype};
  };
  const auto up = [&](int64_t adapter) {
    return LinearArgs{low, b_stack + adapter * b_bytes, nullptr, delta, rank, num_adapted, rank, num_out, dtype, dtype};
  };
  std::vector<Part> parts;
  for (const Group& group : groups) {
    const int64_t most = linear_rows(down(group.adapter)).task;
    for (int64_t begin = group.begin; begin < group.end; begin += most)
      parts.push_back({&group, begin, std::min(begin + most, group.end)});
  }
  const int64_t num_parts = static_cast<int64_t>(parts.size());
  const int64_t blocks = (num_panels(num_out) + kTaskPanels - 1) / kTaskPanels, width = kTaskPanels * kPanel;

  const int64_t num_threads = omp_get_max_threads();
  const bool parallel = num_threads > 1 && num_adapted * rank * (num_in + num_out) > kParallelMacs;
#pragma omp parallel num_threads(static_cast<int>(num_threads)) if (parallel)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_parts; ++i) {
      const Part& part = parts[static_cast<size_t>(i)];
      for (int64_t row = part.begin; row < part.end; ++row)
        std::memcpy(gathered + row * x_bytes, x_rows + order[static_cast<size_t>(row)] * x_bytes, static_cast<size_t>(x_bytes));
      multiply(down(part.group->adapter), 0, rank, part.begin, part.end);
    }
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = 0; i < num_parts * blocks; ++i) {
      const Part& part = parts[static_cast<size_t>(i / blocks)];
      const int64_t begin = i % blocks * width, end = std::min(begin + width, num_out);
      multiply(up(part.group->adapter), begin, end, part.begin, part.end);
      for (int64_t row = part.begin; row < part.end; ++row) {
        const int64_t to = order[static_cast<size_t>(row)] * y_bytes + begin * element;
        const char* const more = delta + row * y_bytes + begin * element;
        const float scale = scale_of[part.group->adapter];
        if (dtype == DType::f32)
          add_scaled<float>(y_rows + to, more, out_rows + to, scale, end - begin);
        else if (dtype == DType::bf16)
          add_scaled<c10::BFloat16>(y_rows + to, more, out_rows + to, scale, end - begin);
        else
          add_scaled<c10::Half>(y_rows + to, more, out_rows + to, scale, end - begin);
      }
    }
#pragma omp for schedule(static)
    for (int64_t i = num_adapted; i < num_rows; ++i) {
      const int64_t row = order[static_cast<size_t>(i)];
      std::memcpy(out_rows + row * y_bytes, y_rows + row * y_bytes, static_cast<size_t>(y_bytes));
    }
  }
  return out;
}

}  // namespace omniserve
