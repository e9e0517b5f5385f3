// store_host_kv: put tokens into one layer of the host pool.
#include <optional>

#include "host_kv.h"
#include "op_checks.h"

namespace omniserve {

// k, v [T, K, H]: the pool's dtype, or any but int8 for an int8 pool; only the last dimension must be contiguous.
// pool [B, K, 2, S, H]; scales [B, K, 2, S] float32 for int8, else none; slot_mapping [T] int64: block * S + offset, and
// -1 leaves a token out.
void store_host_kv(Tensor k, Tensor v, Tensor pool, std::optional<Tensor> scales, Tensor slot_mapping) {
  const PagedKV kv = host_kv(pool, scales);
  const DType row_dtype = dtype_of(k, "k");
  const HostBlockShape shape{kv.kv_heads, kv.block_size, kv.head_size, kv.dtype, row_dtype, row_dtype};
  check_index(slot_mapping, ScalarType::Long, "slot_mapping");
  const int64_t num_tokens = k.dim() == 3 ? k.size(0) : -1;
  for (const auto& [rows, name] : {std::pair{&k, "k"}, std::pair{&v, "v"}}) {
    check_dim(*rows, 3, name);
    STD_TORCH_CHECK(rows->size(0) == num_tokens && rows->size(1) == kv.kv_heads && rows->size(2) == kv.head_size, name,
                    " must be [", num_tokens, ", ", kv.kv_heads, ", ", kv.head_size, "] to fit the pool, got ",
                    shape_of(*rows));
    STD_TORCH_CHECK(dtype_of(*rows, name) == row_dtype && (kv.dtype == DType::i8 || row_dtype == kv.dtype), name,
                    " must have the pool's dtype, got ", torch::headeronly::toString(rows->scalar_type()));
    STD_TORCH_CHECK(rows->stride(2) == 1 || kv.head_size <= 1, name,
                    " must be contiguous in its last dimension, got stride ", rows->stride(2));
  }
  STD_TORCH_CHECK(slot_mapping.size(0) == num_tokens, "slot_mapping has ", slot_mapping.size(0), " entries for ",
                  num_tokens, " tokens");
  const int64_t* const slots = static_cast<const int64_t*>(slot_mapping.const_data_ptr());
  const int64_t num_slots = kv.num_blocks * kv.block_size;
  for (int64_t t = 0; t < num_tokens; ++t)
    STD_TORCH_CHECK(slots[t] >= -1 && slots[t] < num_slots, "slot_mapping[", t, "] is ", slots[t],
                    "; it must be -1 or in [0, ", num_slots, ")");
  const int64_t element = dtype_bytes(row_dtype);
  auto row = [element](const Tensor& rows, int64_t t) {
    return TokenRow{static_cast<const char*>(rows.const_data_ptr()) + t * rows.stride(0) * element,
                    rows.stride(1) * element};
  };
  char* const blocks = static_cast<char*>(pool.mutable_data_ptr());
  float* const block_scales = scales ? static_cast<float*>(scales->mutable_data_ptr()) : nullptr;
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (slots[t] == -1) continue;
    const int64_t block = slots[t] / shape.block_size;
    append_host_token(shape, slots[t] % shape.block_size, row(k, t), row(v, t), blocks + block * shape.block_bytes(),
                      scales ? block_scales + block * shape.block_scales() : nullptr);
  }
}

}  // namespace omniserve
