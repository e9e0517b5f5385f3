// pack_linear, packed_linear, packed_heads, quantized_linear, int8_linear and their rows: checks, and the division of
// work among threads.
#include "linear.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>
#include <optional>
#include <vector>

#include "op_checks.h"
#include "scratch.h"

namespace omniserve {
namespace {

constexpr int64_t kParallelMacs = int64_t{1} << 17;   // less is done before a thread has woken up
constexpr int64_t kParallelBytes = int64_t{1} << 16;  // of rows that are looked up
constexpr int64_t kTasksPerThread = 16;               // a thread that lost its core for a while leaves some to others
constexpr int64_t kMinTaskPanels = 2;                 // two panels are read faster than one after the other
constexpr int64_t kMaxTaskPanels = 4;

// Panels of one call, those of all heads and parts of the rows in a line. Each thread has a share of neighbours, so that
// it reads one stretch of the weight, and rows that it wrote itself the last time: lines that another core has written
// take longer. One that is done takes from the others, a few panels at a time.
class Shares {
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };

 public:
  Shares(int64_t num_threads, int64_t num_panels) : shares_(static_cast<size_t>(num_threads)) {
    for (int64_t t = 0; t < num_threads; ++t) {
      shares_[static_cast<size_t>(t)].next = num_panels * t / num_threads;
      shares_[static_cast<size_t>(t)].end = num_panels * (t + 1) / num_threads;
    }
  }

  struct Range {
    int64_t begin;
    int64_t end;
  };

  // What one thread takes.
  class Taker {
   public:
    Taker(Shares& shares, int64_t thread) : shares_(shares.shares_), first_(static_cast<size_t>(thread)) {}

    // Up to `count` panels for this thread, or nothing when all are taken.
    std::optional<Range> take(int64_t count) {
      for (; tried_ < shares_.size(); ++tried_) {
        Share& share = shares_[(first_ + tried_) % shares_.size()];
        const int64_t begin = share.next.fetch_add(count, std::memory_order_relaxed);
        if (begin < share.end) return Range{begin, std::min(begin + count, share.end)};
      }
      return std::nullopt;
    }

   private:
    std::vector<Share>& shares_;
    const size_t first_;
    size_t tried_ = 0;
  };

 private:
  std::vector<Share> shares_;
};

Scratch& rows_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

Scratch& sums_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

// A contiguous CPU tensor of `like`'s dtype with the first `dim` sizes of `shape`, and `last`.
Tensor empty_like_rows(const Tensor& shape, int64_t dim, int64_t last, const Tensor& like) {
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < dim; ++d) sizes.push_back(shape.size(d));
  sizes.push_back(last);
  return empty_cpu(sizes.data(), dim + 1, like);
}

// Elements from one row of x to the next, if the same between all.
std::optional<int64_t> distance_of_rows(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  if (x.size(last) > 1 && x.stride(last) != 1) return std::nullopt;
  std::optional<int64_t> distance;
  int64_t next = 0;  // stride that the next dimension must have
  for (int64_t d = last - 1; d >= 0; --d) {
    if (x.size(d) == 1) continue;
    if (!distance)
      distance = x.stride(d);
    else if (x.stride(d) != next)
      return std::nullopt;
    next = x.stride(d) * x.size(d);
  }
  return distance.value_or(0);
}

void check_packed(const Tensor& packed, int64_t num_in, int64_t num_out) {
  const int64_t at_once = dtype_of(packed, "packed") == DType::bf16 ? 2 : 1;
  check_dim(packed, 3, "packed");
  check_contiguous(packed, "packed");
  const int64_t panels = num_panels(num_out), steps = (num_in + at_once - 1) / at_once;
  STD_TORCH_CHECK(packed.size(0) == panels && packed.size(1) == steps && packed.size(2) == kPanel * at_once,
                  "packed must be [", panels, ", ", steps, ", ", kPanel * at_once, "] for ", num_in, " inputs and ",
                  num_out, " outputs, got ", shape_of(packed));
}

void check_ids(const int64_t* ids, int64_t count, int64_t num_out) {
  for (int64_t i = 0; i < count; ++i)
    STD_TORCH_CHECK(ids[i] >= 0 && ids[i] < num_out, "ids must be from 0 to ", num_out - 1, ", got ", ids[i]);
}

constexpr int64_t kMostInputs = int64_t{1} << 40;  // bytes of a record do not overflow

// The forms that linear_quantized.inl expands.
constexpr struct { int64_t bits; Scales scales; } kForms[] = {
    {4, Scales::f16}, {5, Scales::f16}, {8, Scales::f16}, {4, Scales::f32}, {8, Scales::f32}, {4, Scales::affine16},
    {5, Scales::affine16}, {4, Scales::affine32}, {8, Scales::affine32}, {4, Scales::k}, {5, Scales::k},
    {6, Scales::k_signed},
};

QuantForm checked_form(int64_t bits, int64_t scales, int64_t group) {
  const QuantForm form{bits, static_cast<Scales>(scales), group};
  const bool known = std::any_of(std::begin(kForms), std::end(kForms), [&](const auto& each) {
    return each.bits == bits && static_cast<int64_t>(each.scales) == scales;
  });
  const int64_t unit = bits == 5 ? 32 : 8;
  STD_TORCH_CHECK(known && (form.is_k() ? group == (bits == 6 ? 16 : 32) : group > 0 && group < kMostInputs && group % unit == 0),
                  "there is no weight of ", bits, " bits with scales of the kind ", scales, " and groups of ", group);
  return form;
}

void check_bytes(const Tensor& packed, int64_t num_in, int64_t num_out, int64_t bytes) {
  check_type(packed, ScalarType::Byte, "packed");
  check_dim(packed, 2, "packed");
  check_contiguous(packed, "packed");
  const int64_t panels = num_panels(num_out);
  STD_TORCH_CHECK(packed.size(0) == panels && packed.size(1) == bytes, "packed must be [", panels, ", ", bytes,
                  "] for ", num_in, " inputs and ", num_out, " outputs, got ", shape_of(packed));
  const auto address = reinterpret_cast<uintptr_t>(packed.const_data_ptr());
  STD_TORCH_CHECK(address % 4 == 0, "packed must be aligned to 4 bytes, but begins at ", address);
}

void check_bias(const std::optional<Tensor>& bias, const Tensor& x, int64_t num_out) {
  if (!bias.has_value()) return;
  check_dim(*bias, 1, "bias");
  check_contiguous(*bias, "bias");
  check_type(*bias, x.scalar_type(), "bias");
  STD_TORCH_CHECK(bias->size(0) == num_out, "bias must have ", num_out, " elements, got ", shape_of(*bias));
}

void check_order(const std::optional<Tensor>& order, int64_t num_in) {
  if (!order.has_value()) return;
  check_dim(*order, 1, "order");
  check_contiguous(*order, "order");
  check_type(*order, ScalarType::Int, "order");
  STD_TORCH_CHECK(order->size(0) == num_in, "order must have ", num_in, " elements, got ", shape_of(*order));
  const auto* const columns = static_cast<const int32_t*>(order->const_data_ptr());
  uint32_t most = 0;  // a negative number is a large one
  for (int64_t i = 0; i < num_in; ++i) most = std::max(most, static_cast<uint32_t>(columns[i]));
  STD_TORCH_CHECK(num_in == 0 || most < num_in, "order must be of numbers from 0 to ", num_in - 1, ", got ",
                  static_cast<int32_t>(most));
}

// The products of one call: of x with one weight, or of each head's part of x with the head's weight.
struct Heads {
  int64_t count = 1;
  int64_t x_bytes = 0;       // from one head of x to the next
  int64_t weight_bytes = 0;
  int64_t out_bytes = 0;

  LinearArgs of(LinearArgs args, int64_t head) const {
    args.x = static_cast<const char*>(args.x) + head * x_bytes;
    args.weight = static_cast<const char*>(args.weight) + head * weight_bytes;
    args.out = static_cast<char*>(args.out) + head * out_bytes;
    return args;
  }
};

// Writes products with packed weights that have been checked; `args` are those of the first head.
void products(const LinearArgs& args, const Heads& heads) {
  isa_name();  // a wrong OMNISERVE_ISA is reported here, not inside a parallel region
  // A team of all threads or of one: libgomp ends and starts threads whenever the size of a team changes.
  const int64_t num_threads = omp_get_max_threads();
  const bool parallel =
      num_threads > 1 && heads.count * args.num_in * args.num_out * args.num_rows > kParallelMacs;
  const int64_t panels = num_panels(args.num_out);
  const int64_t wanted = parallel ? num_threads * kTasksPerThread : 1;
  const LinearRows split = linear_rows(args);
  const int64_t blocks = (args.num_rows + split.block - 1) / split.block, part_blocks = split.task / split.block;
  const int64_t row_parts = (blocks + part_blocks - 1) / part_blocks, parts = heads.count * row_parts;
  const int64_t task_panels = std::clamp<int64_t>(panels * parts / wanted, kMinTaskPanels, kMaxTaskPanels);
  const int64_t most_rows = (blocks + row_parts - 1) / row_parts * split.block;  // of a part
  const int64_t part_rows = (most_rows + kTileOfRows - 1) / kTileOfRows * kTileOfRows;
  const int64_t sums_bytes = part_rows * task_panels * kPanel * 4, x_bytes = linear_rows_bytes(args, part_rows);
  Shares shares(parallel ? num_threads : 1, parts * panels);
#pragma omp parallel num_threads(static_cast<int>(num_threads)) if (parallel)
  {
    float* const sums = static_cast<float*>(sums_scratch().of(sums_bytes));
    void* const packed_x = rows_scratch().of(x_bytes);
    int64_t packed_part = -1;
    Shares::Taker taker(shares, omp_get_thread_num());
    while (const std::optional<Shares::Range> task = taker.take(task_panels)) {
      for (int64_t panel = task->begin, end; panel < task->end; panel = end) {
        const int64_t part = panel / panels, first = panel % panels, of_rows = part % row_parts;
        end = std::min((part + 1) * panels, task->end);
        const int64_t last = first + end - panel, first_row = blocks * of_rows / row_parts * split.block;
        const int64_t last_row = std::min(blocks * (of_rows + 1) / row_parts * split.block, args.num_rows);
        const LinearArgs own = heads.of(args, part / row_parts);
        if (part != packed_part) linear_pack_rows(own, packed_x, first_row, last_row);
        packed_part = part;
        linear_features(own, packed_x, sums, first * kPanel, std::min(last * kPanel, args.num_out), first_row,
                        last_row);
      }
    }
  }
}

// Writes the product with a packed weight that has been checked.
void product(Tensor x, const Tensor& packed, const std::optional<Tensor>& bias, DType weight_dtype,
             const QuantForm* form, const std::optional<Tensor>& order, const Int8Form* int8, const Tensor& out) {
  const int64_t num_in = x.size(-1), num_out = out.size(-1);
  const std::optional<int64_t> distance = distance_of_rows(x);
  if (!distance) x = torch::stable::contiguous(x);
  if (out.numel() == 0) return;
  products({x.const_data_ptr(),
            packed.const_data_ptr(),
            bias.has_value() ? bias->const_data_ptr() : nullptr,
            out.mutable_data_ptr(),
            distance.value_or(num_in),
            out.numel() / num_out,
            num_in,
            num_out,
            dtype_of(x, "x"),
            weight_dtype,
            form,
            order.has_value() ? static_cast<const int32_t*>(order->const_data_ptr()) : nullptr,
            int8},
           Heads{});
}

// The result of a product of x with `num_out` features, or what the caller gives for it.
Tensor result_of(const Tensor& x, int64_t num_out, const std::optional<Tensor>& given) {
  if (!given.has_value()) return empty_like_rows(x, x.dim() - 1, num_out, x);
  check_type(*given, x.scalar_type(), "out");
  check_contiguous(*given, "out");
  STD_TORCH_CHECK(x.size(-1) > 0 && given->dim() == x.dim() && given->size(-1) == num_out &&
                      given->numel() == x.numel() / x.size(-1) * num_out,
                  "out must have ", num_out, " features for each row of ", shape_of(x), ", got ", shape_of(*given));
  return *given;
}

}  // namespace

Tensor packed_linear_into(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t num_out,
                          std::optional<Tensor> given) {
  STD_TORCH_CHECK(x.dim() > 0, "x must have a last dimension, got shape []");
  const DType dtype = dtype_of(x, "x");
  STD_TORCH_CHECK(num_out >= 0, "out_features must not be negative, got ", num_out);
  check_packed(packed, x.size(-1), num_out);
  const bool mixed = dtype == DType::f32 && packed.scalar_type() == ScalarType::BFloat16;
  if (!mixed) check_type(packed, x.scalar_type(), "packed");
  check_bias(bias, x, num_out);
  Tensor out = result_of(x, num_out, given);
  product(x, packed, bias, mixed ? DType::bf16 : dtype, nullptr, std::nullopt, nullptr, out);
  return out;
}

Tensor packed_linear(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t num_out) {
  return packed_linear_into(x, packed, bias, num_out, std::nullopt);
}

Tensor packed_heads_into(Tensor x, Tensor packed, int64_t num_out, std::optional<Tensor> given) {
  check_dim(x, 3, "x");
  const DType dtype = dtype_of(x, "x");
  STD_TORCH_CHECK(num_out >= 0, "out_features must not be negative, got ", num_out);
  const int64_t num_rows = x.size(0), num_heads = x.size(1), num_in = x.size(2);
  const DType weight_dtype = dtype_of(packed, "packed");
  const bool mixed = dtype == DType::f32 && weight_dtype == DType::bf16;
  if (!mixed) check_type(packed, x.scalar_type(), "packed");
  const int64_t at_once = weight_dtype == DType::bf16 ? 2 : 1;
  const int64_t panels = num_panels(num_out), steps = (num_in + at_once - 1) / at_once;
  check_dim(packed, 4, "packed");
  check_contiguous(packed, "packed");
  STD_TORCH_CHECK(packed.size(0) == num_heads && packed.size(1) == panels && packed.size(2) == steps &&
                      packed.size(3) == kPanel * at_once,
                  "packed must be [", num_heads, ", ", panels, ", ", steps, ", ", kPanel * at_once, "] for ", num_heads,
                  " heads, ", num_in, " inputs and ", num_out, " outputs, got ", shape_of(packed));
  Tensor out = given.has_value() ? *given : empty_cpu({num_heads, num_rows, num_out}, x);
  check_type(out, x.scalar_type(), "out");
  check_contiguous(out, "out");
  STD_TORCH_CHECK(out.dim() == 3 && out.size(0) == num_heads && out.size(1) == num_rows && out.size(2) == num_out,
                  "out must be [", num_heads, ", ", num_rows, ", ", num_out, "], got ", shape_of(out));
  if (x.size(2) > 1 && x.stride(2) != 1) x = torch::stable::contiguous(x);
  if (out.numel() == 0) return out;
  const int64_t element = dtype_bytes(dtype);
  const int64_t weight_bytes = panels * panel_size(num_in, weight_dtype) * dtype_bytes(weight_dtype);
  const Heads heads{num_heads, x.stride(1) * element, weight_bytes, num_rows * num_out * element};
  products({x.const_data_ptr(), packed.const_data_ptr(), nullptr, out.mutable_data_ptr(), x.stride(0), num_rows, num_in,
            num_out, dtype, weight_dtype},
           heads);
  return out;
}

Tensor packed_heads(Tensor x, Tensor packed, int64_t num_out) {
  return packed_heads_into(x, packed, num_out, std::nullopt);
}

Tensor quantized_linear_into(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t num_out, int64_t bits,
                             int64_t scales, int64_t group, std::optional<Tensor> order, std::optional<Tensor> given) {
  STD_TORCH_CHECK(x.dim() > 0, "x must have a last dimension, got shape []");
  const DType dtype = dtype_of(x, "x");
  STD_TORCH_CHECK(num_out >= 0, "out_features must not be negative, got ", num_out);
  const QuantForm form = checked_form(bits, scales, group);
  check_bytes(packed, x.size(-1), num_out, panel_bytes(x.size(-1), form));
  check_bias(bias, x, num_out);
  check_order(order, x.size(-1));
  Tensor out = result_of(x, num_out, given);
  product(x, packed, bias, dtype, &form, order, nullptr, out);
  return out;
}

Tensor quantized_linear(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t num_out, int64_t bits, int64_t scales,
                        int64_t group, std::optional<Tensor> order) {
  return quantized_linear_into(x, packed, bias, num_out, bits, scales, group, order, std::nullopt);
}

Tensor int8_linear_into(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t num_out,
                        std::optional<Tensor> x_scale, std::optional<Tensor> given) {
  STD_TORCH_CHECK(x.dim() > 0, "x must have a last dimension, got shape []");
  const DType dtype = dtype_of(x, "x");
  STD_TORCH_CHECK(num_out >= 0, "out_features must not be negative, got ", num_out);
  const int64_t num_in = x.size(-1);
  STD_TORCH_CHECK(num_in <= kMostInt8Inputs, "x must have at most ", kMostInt8Inputs, " inputs, got ", num_in);
  check_bytes(packed, num_in, num_out, int8_panel_bytes(num_in));
  check_bias(bias, x, num_out);
  bool is_of_rows = false;
  if (x_scale.has_value()) {
    check_type(*x_scale, ScalarType::Float, "x_scale");
    is_of_rows = x_scale->dim() > 1;
    if (is_of_rows) {
      bool fits = x_scale->dim() == x.dim() && x_scale->size(-1) == 1 && x_scale->is_contiguous();
      for (int64_t d = 0; fits && d < x.dim() - 1; ++d) fits = x_scale->size(d) == x.size(d);
      STD_TORCH_CHECK(fits, "x_scale must be one number, [1], or contiguous with one for each row of x, ", shape_of(x),
                      ", got ", shape_of(*x_scale));
    } else {
      STD_TORCH_CHECK(x_scale->numel() == 1, "x_scale must be one number, or one for each row, got ", shape_of(*x_scale));
      const float scale = *static_cast<const float*>(x_scale->const_data_ptr());
      STD_TORCH_CHECK(scale > 0 && std::isfinite(scale), "x_scale must be positive and finite, got ", scale);
    }
  }
  const Int8Form form{x_scale.has_value() ? static_cast<const float*>(x_scale->const_data_ptr()) : nullptr, is_of_rows};
  Tensor out = result_of(x, num_out, given);
  product(x, packed, bias, dtype, nullptr, std::nullopt, &form, out);
  return out;
}

Tensor int8_linear(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t num_out, std::optional<Tensor> x_scale) {
  return int8_linear_into(x, packed, bias, num_out, x_scale, std::nullopt);
}

void pack_linear(Tensor weight, Tensor packed) {
  check_dim(weight, 2, "weight");
  check_contiguous(weight, "weight");
  check_type(packed, weight.scalar_type(), "packed");
  check_packed(packed, weight.size(1), weight.size(0));
  const DType dtype = dtype_of(weight, "weight");
  const void* const from = weight.const_data_ptr();
  void* const to = packed.mutable_data_ptr();
  const int64_t panels = packed.size(0), num_in = weight.size(1), num_out = weight.size(0);
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t panel = 0; panel < panels; ++panel) pack_panels(from, to, num_in, num_out, dtype, panel, panel + 1);
}

Tensor packed_rows(Tensor ids, Tensor packed, int64_t num_in, int64_t num_out) {
  check_type(ids, ScalarType::Long, "ids");
  check_contiguous(ids, "ids");
  check_packed(packed, num_in, num_out);
  const auto* const wanted = static_cast<const int64_t*>(ids.const_data_ptr());
  const int64_t count = ids.numel();
  check_ids(wanted, count, num_out);
  Tensor out = empty_like_rows(ids, ids.dim(), num_in, packed);
  const DType dtype = dtype_of(packed, "packed");
  const void* const from = packed.const_data_ptr();
  char* const to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t row_bytes = num_in * dtype_bytes(dtype);
#pragma omp parallel for schedule(dynamic, 1) if (count * row_bytes > kParallelBytes)
  for (int64_t i = 0; i < count; ++i) unpack_feature(from, to + i * row_bytes, num_in, dtype, wanted[i]);
  return out;
}

Tensor quantized_rows(Tensor ids, Tensor packed, int64_t num_in, int64_t num_out, int64_t bits, int64_t scales,
                 int64_t group) {
  check_type(ids, ScalarType::Long, "ids");
  check_contiguous(ids, "ids");
  const QuantForm form = checked_form(bits, scales, group);
  check_bytes(packed, num_in, num_out, panel_bytes(num_in, form));
  const auto* const wanted = static_cast<const int64_t*>(ids.const_data_ptr());
  const int64_t count = ids.numel();
  check_ids(wanted, count, num_out);
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < ids.dim(); ++d) sizes.push_back(ids.size(d));
  sizes.push_back(num_in);
  Tensor out = torch::stable::new_empty(packed, sizes, ScalarType::Float);
  const void* const from = packed.const_data_ptr();
  float* const to = static_cast<float*>(out.mutable_data_ptr());
#pragma omp parallel for schedule(dynamic, 1) if (count * num_in > kParallelBytes / 4)
  for (int64_t i = 0; i < count; ++i) expand_feature(from, to + i * num_in, num_in, form, wanted[i]);
  return out;
}

}  // namespace omniserve
