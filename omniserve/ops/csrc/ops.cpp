// The operators of torch.ops.omniserve: schemas, registration, and those that only move rows.
#include <tuple>

#include "host_kv.h"
#include "op_checks.h"

namespace omniserve {
namespace {

// Below this a copy is done before another thread has woken up.
constexpr int64_t kParallelBytes = int64_t{1} << 20;

// Calls function(i) for each of `count` pieces of work that move so many bytes together.
template <typename Function>
void for_each(int64_t count, int64_t bytes, Function function) {
  if (bytes < kParallelBytes) {
    for (int64_t i = 0; i < count; ++i) function(i);
  } else {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; ++i) function(i);
  }
}

// Copies row by row: destination and source of row i, or nullptr as destination to leave it out, as source for zeros.
template <typename Destination, typename Source>
void copy_rows(int64_t num_rows, int64_t row_bytes, Destination destination, Source source) {
  for_each(num_rows, num_rows * row_bytes, [&](int64_t i) {
    char* const to = destination(i);
    if (to == nullptr) return;
    if (const char* const from = source(i)) {
      std::memcpy(to, from, static_cast<size_t>(row_bytes));
    } else {
      std::memset(to, 0, static_cast<size_t>(row_bytes));
    }
  });
}

// -1 means "none"; anything else must name one of `count` rows.
void check_rows_in_range(const int64_t* rows, int64_t num_rows, int64_t count, const char* name) {
  for (int64_t i = 0; i < num_rows; ++i)
    STD_TORCH_CHECK(rows[i] >= -1 && rows[i] < count, name, "[", i, "] is ", rows[i], "; it must be -1 or in [0, ",
                    count, ")");
}

}  // namespace

void store_kv(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slot_mapping) {
  const PagedKV kv = paged_kv(k_cache, v_cache);
  const int64_t num_tokens = k.dim() == 3 ? k.size(0) : -1;
  for (const auto& [tensor, name] : {std::pair<const Tensor&, const char*>{k, "k"}, {v, "v"}}) {
    check_dim(tensor, 3, name);
    check_type(tensor, kv.dtype == DType::i8 ? k.scalar_type() : k_cache.scalar_type(), name);
    STD_TORCH_CHECK(tensor.size(0) == num_tokens && tensor.size(1) == kv.kv_heads && tensor.size(2) == kv.head_size,
                    name, " must be [", num_tokens, ", ", kv.kv_heads, ", ", kv.head_size, "] to fit the cache, got ",
                    shape_of(tensor));
    STD_TORCH_CHECK(kv.head_size <= 1 || tensor.stride(2) == 1, name, " must have contiguous heads, got stride ",
                    tensor.stride(2), " in dimension 2");
  }
  check_index(slot_mapping, ScalarType::Long, "slot_mapping");
  STD_TORCH_CHECK(slot_mapping.size(0) == num_tokens, "slot_mapping has ", slot_mapping.size(0), " entries for ",
                  num_tokens, " tokens");
  const auto* slots = static_cast<const int64_t*>(slot_mapping.const_data_ptr());
  check_rows_in_range(slots, num_tokens, kv.num_blocks * kv.block_size, "slot_mapping");

  const DType dtype = dtype_of(k, "k");
  const auto element = dtype_bytes(dtype);
  if (kv.dtype == DType::i8) {
    for (const auto& [rows, cache] : {std::pair<const Tensor&, const Tensor&>{k, k_cache}, {v, v_cache}}) {
      char* const to = static_cast<char*>(cache.mutable_data_ptr());
      const char* const from = static_cast<const char*>(rows.const_data_ptr());
      const int64_t token_stride = rows.stride(0), head_stride = rows.stride(1);
      for_each(num_tokens * kv.kv_heads, num_tokens * kv.kv_heads * kv.head_size * element, [&](int64_t i) {
        const int64_t slot = slots[i / kv.kv_heads], head = i % kv.kv_heads;
        if (slot < 0) return;
        char* const plane = to + slot / kv.block_size * kv.block_stride + head * kv.head_stride;
        const int64_t offset = slot % kv.block_size;
        const float scale =
            quantize_row(dtype, from + (i / kv.kv_heads * token_stride + head * head_stride) * element, kv.head_size,
                         plane + offset * kv.head_size);
        std::memcpy(plane + kv.block_size * kv.head_size + offset * kScaleBytes, &scale, kScaleBytes);
      });
    }
    return;
  }
  for (const auto& [rows, cache] : {std::pair<const Tensor&, const Tensor&>{k, k_cache}, {v, v_cache}}) {
    char* const to = static_cast<char*>(cache.mutable_data_ptr());
    const char* const from = static_cast<const char*>(rows.const_data_ptr());
    const int64_t token_stride = rows.stride(0), head_stride = rows.stride(1);
    copy_rows(
        num_tokens * kv.kv_heads, kv.head_size * element,
        [&](int64_t i) -> char* {
          const int64_t slot = slots[i / kv.kv_heads], head = i % kv.kv_heads;
          if (slot < 0) return nullptr;
          const int64_t block = slot / kv.block_size, offset = slot % kv.block_size;
          return to + ((block * kv.kv_heads + head) * kv.block_size + offset) * kv.head_size * element;
        },
        [&](int64_t i) {
          return from + (i / kv.kv_heads * token_stride + i % kv.kv_heads * head_stride) * element;
        });
  }
}

namespace {

Tensor piggyback_concat(Tensor attn, Tensor results, Tensor rows) {
  check_rows(attn, "attn");
  check_rows(results, "results");
  check_type(results, attn.scalar_type(), "results");
  check_index(rows, ScalarType::Long, "rows");
  const int64_t num_tokens = attn.size(0), width = attn.size(1), num_seats = rows.size(0);
  STD_TORCH_CHECK(results.size(1) == width, "results must have attn's width ", width, ", got ", shape_of(results));
  const auto* row_of_seat = static_cast<const int64_t*>(rows.const_data_ptr());
  check_rows_in_range(row_of_seat, num_seats, results.size(0), "rows");

  Tensor out = empty_cpu({num_tokens + num_seats, width}, attn);
  const auto element = static_cast<int64_t>(attn.element_size());
  char* const to = static_cast<char*>(out.mutable_data_ptr());
  const char* const device_rows = static_cast<const char*>(attn.const_data_ptr());
  const char* const host_rows = static_cast<const char*>(results.const_data_ptr());
  const int64_t device_stride = attn.stride(0) * element, host_stride = results.stride(0) * element;
  copy_rows(
      num_tokens + num_seats, width * element, [&](int64_t i) { return to + i * width * element; },
      [&](int64_t i) -> const char* {
        if (i < num_tokens) return device_rows + i * device_stride;
        const int64_t row = row_of_seat[i - num_tokens];
        return row < 0 ? nullptr : host_rows + row * host_stride;
      });
  return out;
}

// Checks what operators on residuals share; returns the number of the first seat's row.
int64_t check_residual(const Tensor& hidden, const Tensor& store, const Tensor& slots, const char* name = "store") {
  check_rows(hidden, "hidden");
  check_rows(store, name);
  check_type(store, hidden.scalar_type(), name);
  check_index(slots, ScalarType::Long, "slots");
  STD_TORCH_CHECK(store.size(1) == hidden.size(1), name, " must have hidden's width ", hidden.size(1), ", got ",
                  shape_of(store));
  STD_TORCH_CHECK(slots.size(0) <= hidden.size(0), "there are ", slots.size(0), " slots but only ", hidden.size(0),
                  " rows of hidden");
  check_rows_in_range(static_cast<const int64_t*>(slots.const_data_ptr()), slots.size(0), store.size(0), "slots");
  return hidden.size(0) - slots.size(0);
}

void residual_store(Tensor hidden, Tensor store, Tensor slots) {
  const int64_t first = check_residual(hidden, store, slots);
  const auto* slot_of_seat = static_cast<const int64_t*>(slots.const_data_ptr());
  const auto element = static_cast<int64_t>(hidden.element_size());
  const int64_t from_stride = hidden.stride(0) * element, to_stride = store.stride(0) * element;
  const char* const from = static_cast<const char*>(hidden.const_data_ptr()) + first * from_stride;
  char* const to = static_cast<char*>(store.mutable_data_ptr());
  copy_rows(
      slots.size(0), hidden.size(1) * element,
      [&](int64_t i) { return slot_of_seat[i] < 0 ? nullptr : to + slot_of_seat[i] * to_stride; },
      [&](int64_t i) { return from + i * from_stride; });
}

void residual_fetch(Tensor store, Tensor slots, Tensor hidden) {
  const int64_t first = check_residual(hidden, store, slots);
  const auto* slot_of_seat = static_cast<const int64_t*>(slots.const_data_ptr());
  const auto element = static_cast<int64_t>(hidden.element_size());
  const int64_t from_stride = store.stride(0) * element, to_stride = hidden.stride(0) * element;
  const char* const from = static_cast<const char*>(store.const_data_ptr());
  char* const to = static_cast<char*>(hidden.mutable_data_ptr()) + first * to_stride;
  copy_rows(
      slots.size(0), hidden.size(1) * element, [&](int64_t i) { return to + i * to_stride; },
      [&](int64_t i) { return slot_of_seat[i] < 0 ? nullptr : from + slot_of_seat[i] * from_stride; });
}

void piggyback_receive(Tensor slots, Tensor wanted, Tensor as_one, Tensor step, Tensor result_flags, Tensor host_results,
                       Tensor results, Tensor skips, Tensor joined) {
  check_rows(host_results, "host_results");
  check_rows(results, "results");
  check_type(results, host_results.scalar_type(), "results");
  const int64_t num_seats = slots.size(0), num_slots = results.size(0), width = results.size(1);
  STD_TORCH_CHECK(host_results.size(0) == num_slots && host_results.size(1) == width, "host_results must be [",
                  num_slots, ", ", width, "] as results, got ", shape_of(host_results));
  for (const auto& [tensor, size, name] :
       {std::tuple<const Tensor&, int64_t, const char*>{slots, num_seats, "slots"}, {wanted, num_seats, "wanted"},
        {as_one, 1, "as_one"}, {step, 1, "step"}, {result_flags, num_slots, "result_flags"},
        {skips, num_slots, "skips"}, {joined, num_seats, "joined"}}) {
    check_index(tensor, ScalarType::Long, name);
    check_aligned(tensor, name);
    STD_TORCH_CHECK(tensor.size(0) == size, name, " must be [", size, "], got ", shape_of(tensor));
  }
  const auto* slot_of_seat = static_cast<const int64_t*>(slots.const_data_ptr());
  const auto* wanted_of_seat = static_cast<const int64_t*>(wanted.const_data_ptr());
  check_rows_in_range(slot_of_seat, num_seats, num_slots, "slots");
  const auto* flag_of_slot = static_cast<const int64_t*>(result_flags.const_data_ptr());
  auto* const skip_of_slot = static_cast<int64_t*>(skips.mutable_data_ptr());
  auto* const joined_seats = static_cast<int64_t*>(joined.mutable_data_ptr());
  const int64_t number = *static_cast<const int64_t*>(step.const_data_ptr());
  bool all_here = true, is_here = false;
  for (int64_t seat = 0; seat < num_seats; ++seat) {
    const int64_t slot = slot_of_seat[seat], flag = wanted_of_seat[seat];
    if (flag >= 0) {  // else it does as the seat before it
      is_here = slot >= 0 && (flag == 0 || __atomic_load_n(flag_of_slot + slot, __ATOMIC_ACQUIRE) == flag);
    }
    joined_seats[seat] = is_here ? slot : -1;
    all_here = all_here && (is_here || slot < 0);
  }
  const bool none = !all_here && *static_cast<const int64_t*>(as_one.const_data_ptr()) != 0;
  const auto element = static_cast<int64_t>(results.element_size());
  const char* const from = static_cast<const char*>(host_results.const_data_ptr());
  char* const to = static_cast<char*>(results.mutable_data_ptr());
  for (int64_t seat = 0; seat < num_seats; ++seat) {
    const int64_t slot = slot_of_seat[seat];
    if (none) joined_seats[seat] = -1;
    if (slot < 0) continue;
    if (joined_seats[seat] < 0) {
      __atomic_store_n(skip_of_slot + slot, number, __ATOMIC_RELEASE);
    } else if (wanted_of_seat[seat] != 0 && to != from) {
      std::memcpy(to + slot * results.stride(0) * element, from + slot * host_results.stride(0) * element,
                  static_cast<size_t>(width * element));
    }
  }
}

// Puts the heads of one token, [heads, H] with some distance between heads, side by side; returns where they end.
char* pack_heads(char* to, const char* from, int64_t num_heads, int64_t head_stride, int64_t head_bytes) {
  if (head_stride == head_bytes) {
    std::memcpy(to, from, static_cast<size_t>(num_heads * head_bytes));
  } else {
    for (int64_t head = 0; head < num_heads; ++head) {
      std::memcpy(to + head * head_bytes, from + head * head_stride, static_cast<size_t>(head_bytes));
    }
  }
  return to + num_heads * head_bytes;
}

void piggyback_send(Tensor hidden, Tensor q, Tensor k, Tensor v, Tensor slots, Tensor residuals, Tensor mailbox,
                    Tensor flags, Tensor step) {
  const int64_t first = check_residual(hidden, residuals, slots, "residuals");
  check_dim(q, 3, "q");
  check_dim(k, 3, "k");
  const int64_t head_size = q.size(2), num_slots = residuals.size(0);
  for (const auto& [tensor, heads, name] : {std::tuple<const Tensor&, int64_t, const char*>{q, q.size(1), "q"},
                                            {k, k.size(1), "k"},
                                            {v, k.size(1), "v"}}) {
    check_dim(tensor, 3, name);
    check_type(tensor, hidden.scalar_type(), name);
    STD_TORCH_CHECK(tensor.size(0) == hidden.size(0) && tensor.size(1) == heads && tensor.size(2) == head_size, name,
                    " must be [", hidden.size(0), ", ", heads, ", ", head_size, "], got ", shape_of(tensor));
    STD_TORCH_CHECK(head_size <= 1 || tensor.stride(2) == 1, name, " must have contiguous heads, got stride ",
                    tensor.stride(2), " in dimension 2");
  }
  check_rows(mailbox, "mailbox");
  check_type(mailbox, hidden.scalar_type(), "mailbox");
  const int64_t width = (q.size(1) + 2 * k.size(1)) * head_size;
  STD_TORCH_CHECK(mailbox.size(0) == num_slots && mailbox.size(1) == width, "mailbox must be [", num_slots, ", ", width,
                  "], a row of q, k and v for each of residuals' slots, got ", shape_of(mailbox));
  check_index(flags, ScalarType::Long, "flags");
  check_aligned(flags, "flags");
  STD_TORCH_CHECK(flags.size(0) == num_slots, "flags must have residuals' ", num_slots, " slots, got ",
                  shape_of(flags));
  check_index(step, ScalarType::Long, "step");
  STD_TORCH_CHECK(step.size(0) == 1, "step must be [1], got ", shape_of(step));

  const auto element = static_cast<int64_t>(hidden.element_size());
  const auto* slot_of_seat = static_cast<const int64_t*>(slots.const_data_ptr());
  const int64_t number = *static_cast<const int64_t*>(step.const_data_ptr());
  const char* const hidden_rows = static_cast<const char*>(hidden.const_data_ptr());
  char* const residual_rows = static_cast<char*>(residuals.mutable_data_ptr());
  char* const mailbox_rows = static_cast<char*>(mailbox.mutable_data_ptr());
  auto* const flag_of_slot = static_cast<int64_t*>(flags.mutable_data_ptr());
  const int64_t hidden_stride = hidden.stride(0) * element, residual_stride = residuals.stride(0) * element;
  const int64_t mailbox_stride = mailbox.stride(0) * element, head_bytes = head_size * element;
  const int64_t row_bytes = hidden.size(1) * element;
  for_each(slots.size(0), slots.size(0) * (row_bytes + width * element), [&](int64_t seat) {
    const int64_t slot = slot_of_seat[seat], row = first + seat;
    if (slot < 0) return;
    std::memcpy(residual_rows + slot * residual_stride, hidden_rows + row * hidden_stride,
                static_cast<size_t>(row_bytes));
    char* to = mailbox_rows + slot * mailbox_stride;
    for (const Tensor* rows : {&q, &k, &v}) {
      to = pack_heads(to, static_cast<const char*>(rows->const_data_ptr()) + row * rows->stride(0) * element,
                      rows->size(1), rows->stride(1) * element, head_bytes);
    }
    __atomic_store_n(flag_of_slot + slot, number, __ATOMIC_RELEASE);  // whoever sees it sees the rows
  });
}

}  // namespace
}  // namespace omniserve

STABLE_TORCH_LIBRARY(omniserve, m) {
  m.def(
      "store_kv(Tensor k_TKH, Tensor v_TKH, Tensor(a!) k_cache_BKSH, Tensor(b!) v_cache_BKSH, Tensor slot_mapping_T)"
      " -> ()");
  m.def(
      "paged_attention(Tensor q_TNH, Tensor k_cache_BKSH, Tensor v_cache_BKSH, Tensor block_table_RM, "
      "Tensor query_start_R1, Tensor seq_lens_R, float scale, int window, float softcap, Tensor? reversed_RM=None, "
      "int chunk=0, Tensor? sinks_N=None, Tensor? alibi_slopes_N=None) -> Tensor");
  m.def(
      "cpu_attention(Tensor q_RNH, Tensor pool_BK2SH, Tensor? scales_BK2S, Tensor block_table_RM, Tensor seq_lens_R, "
      "float scale, int window, float softcap, int num_threads, int chunk=0, Tensor? sinks_N=None, "
      "Tensor? alibi_slopes_N=None) -> Tensor");
  m.def(
      "store_host_kv(Tensor k_TKH, Tensor v_TKH, Tensor(a!) pool_BK2SH, Tensor(b!)? scales_BK2S, "
      "Tensor slot_mapping_T) -> ()");
  m.def("piggyback_concat(Tensor attn_TD, Tensor results_RD, Tensor rows_P) -> Tensor");
  m.def("residual_store(Tensor hidden_TD, Tensor(a!) store_SD, Tensor slots_P) -> ()");
  m.def("residual_fetch(Tensor store_SD, Tensor slots_P, Tensor(a!) hidden_TD) -> ()");
  m.def(
      "piggyback_receive(Tensor slots_P, Tensor wanted_P, Tensor as_one_1, Tensor step_1, Tensor result_flags_S, "
      "Tensor host_results_SD, Tensor(a!) results_SD, Tensor(b!) skips_S, Tensor(c!) joined_P) -> ()");
  m.def(
      "piggyback_send(Tensor hidden_TD, Tensor q_TNH, Tensor k_TKH, Tensor v_TKH, Tensor slots_P, "
      "Tensor(a!) residuals_SD, Tensor(b!) mailbox_SW, Tensor(c!) flags_S, Tensor step_1) -> ()");
  m.def("pack_linear(Tensor weight_OI, Tensor(a!) packed) -> ()");
  m.def("packed_linear(Tensor x, Tensor packed, Tensor? bias_O, SymInt out_features) -> Tensor");
  m.def("packed_heads(Tensor x_TNI, Tensor packed, SymInt out_features) -> Tensor");
  m.def("add_lora(Tensor y, Tensor x, Tensor slots_T, Tensor a, Tensor b, Tensor scales_S) -> Tensor");
  m.def("packed_rows(Tensor ids, Tensor packed, SymInt in_features, SymInt out_features) -> Tensor");
  m.def(
      "quantized_linear(Tensor x, Tensor packed, Tensor? bias_O, SymInt out_features, int bits, int scales, int group, "
      "Tensor? order_I=None) -> Tensor");
  m.def(
      "int8_linear(Tensor x, Tensor packed, Tensor? bias_O, SymInt out_features, Tensor? x_scale=None) -> Tensor");
  m.def(
      "quantized_rows(Tensor ids, Tensor packed, SymInt in_features, SymInt out_features, int bits, int scales, int group) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(omniserve, CPU, m) {
  m.impl("store_kv", TORCH_BOX(&omniserve::store_kv));
  m.impl("paged_attention", TORCH_BOX(&omniserve::paged_attention));
  m.impl("store_host_kv", TORCH_BOX(&omniserve::store_host_kv));
  m.impl("cpu_attention", TORCH_BOX(&omniserve::cpu_attention));
  m.impl("piggyback_concat", TORCH_BOX(&omniserve::piggyback_concat));
  m.impl("residual_store", TORCH_BOX(&omniserve::residual_store));
  m.impl("residual_fetch", TORCH_BOX(&omniserve::residual_fetch));
  m.impl("piggyback_receive", TORCH_BOX(&omniserve::piggyback_receive));
  m.impl("piggyback_send", TORCH_BOX(&omniserve::piggyback_send));
  m.impl("packed_linear", TORCH_BOX(&omniserve::packed_linear));
  m.impl("packed_heads", TORCH_BOX(&omniserve::packed_heads));
  m.impl("pack_linear", TORCH_BOX(&omniserve::pack_linear));
  m.impl("add_lora", TORCH_BOX(&omniserve::add_lora));
  m.impl("packed_rows", TORCH_BOX(&omniserve::packed_rows));
  m.impl("int8_linear", TORCH_BOX(&omniserve::int8_linear));
  m.impl("quantized_linear", TORCH_BOX(&omniserve::quantized_linear));
  m.impl("quantized_rows", TORCH_BOX(&omniserve::quantized_rows));
}
