// Argument checks that the operators share, and the few tensor helpers that the stable ABI leaves to us.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <string>

#include "attention.h"

namespace omniserve {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string shape_of(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t i = 0; i < tensor.dim(); ++i) text += (i ? ", " : "") + std::to_string(tensor.size(i));
  return text + "]";
}

inline void check_dim(const Tensor& tensor, int64_t dim, const char* name) {
  STD_TORCH_CHECK(tensor.dim() == dim, name, " must have ", dim, " dimensions, got shape ", shape_of(tensor));
}

inline void check_type(const Tensor& tensor, ScalarType type, const char* name) {
  STD_TORCH_CHECK(tensor.scalar_type() == type, name, " must be ", torch::headeronly::toString(type), ", got ",
                  torch::headeronly::toString(tensor.scalar_type()));
}

inline void check_contiguous(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous, got shape ", shape_of(tensor));
}

// A tensor over foreign memory can begin anywhere; code that the compiler vectorised may count on whole elements.
inline void check_aligned(const Tensor& tensor, const char* name) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  STD_TORCH_CHECK(address % static_cast<uintptr_t>(tensor.element_size()) == 0, name,
                  " must be aligned to its elements of ", tensor.element_size(), " bytes, but begins at ", address);
}

// A 1-D index tensor of `type`, contiguous.
inline void check_index(const Tensor& tensor, ScalarType type, const char* name) {
  check_dim(tensor, 1, name);
  check_type(tensor, type, name);
  check_contiguous(tensor, name);
}

// A 2-D tensor whose rows are contiguous; only their distance is free.
inline void check_rows(const Tensor& tensor, const char* name) {
  check_dim(tensor, 2, name);
  STD_TORCH_CHECK(tensor.size(1) <= 1 || tensor.stride(1) == 1, name, " must have contiguous rows, got stride ",
                  tensor.stride(1), " in dimension 1");
}

inline DType dtype_of(const Tensor& tensor, const char* name) {
  const ScalarType type = tensor.scalar_type();
  if (type == ScalarType::Float) return DType::f32;
  if (type == ScalarType::BFloat16) return DType::bf16;
  STD_TORCH_CHECK(type == ScalarType::Half, name, " must be float32, bfloat16 or float16, got ",
                  torch::headeronly::toString(type));
  return DType::f16;
}

// A contiguous CPU tensor of `like`'s dtype. Straight through the C shim: the boxed aten::new_empty costs 1 us more.
inline Tensor empty_cpu(const int64_t* sizes, int64_t dim, const Tensor& like) {
  constexpr int64_t kMaxDims = 8;
  STD_TORCH_CHECK(dim <= kMaxDims, "at most ", kMaxDims, " dimensions, got ", dim);
  int64_t strides[kMaxDims], stride = 1;
  for (int64_t i = dim; i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  }
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dim, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}
inline Tensor empty_cpu(std::initializer_list<int64_t> sizes, const Tensor& like) {
  return empty_cpu(sizes.begin(), static_cast<int64_t>(sizes.size()), like);
}

// The cache of one layer, checked; K and V must agree in everything. An int8 cache is [B, K, S, H + 4] bytes, where the
// S * (H + 4) of a block's head are laid out as device_layout() says.
inline PagedKV paged_kv(const Tensor& k_cache, const Tensor& v_cache) {
  check_dim(k_cache, 4, "k_cache");
  check_dim(v_cache, 4, "v_cache");
  for (int64_t i = 0; i < 4; ++i)
    STD_TORCH_CHECK(k_cache.size(i) == v_cache.size(i), "k_cache and v_cache differ in shape: ", shape_of(k_cache),
                    " and ", shape_of(v_cache));
  check_type(v_cache, k_cache.scalar_type(), "v_cache");
  check_contiguous(k_cache, "k_cache");
  check_contiguous(v_cache, "v_cache");
  check_aligned(k_cache, "k_cache");
  check_aligned(v_cache, "v_cache");
  const bool is_i8 = k_cache.scalar_type() == ScalarType::Char;
  const int64_t head_size = k_cache.size(3) - (is_i8 ? kScaleBytes : 0);
  if (is_i8) {
    STD_TORCH_CHECK(head_size >= 0 && k_cache.size(2) * head_size % kScaleBytes == 0, "an int8 k_cache is [B, K, S, H + ",
                    kScaleBytes, "] with S * H a multiple of ", kScaleBytes, ", got ", shape_of(k_cache));
    for (const Tensor* cache : {&k_cache, &v_cache})
      STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(cache->const_data_ptr()) % kScaleBytes == 0,
                      "an int8 cache must be aligned to its scales of ", kScaleBytes, " bytes");
  }
  return device_layout(k_cache.const_data_ptr(), v_cache.const_data_ptr(), k_cache.size(0), k_cache.size(1),
                       k_cache.size(2), head_size, is_i8 ? DType::i8 : dtype_of(k_cache, "k_cache"));
}

// One layer of the host pool, checked; `scales` goes with int8 and with nothing else.
inline PagedKV host_kv(const Tensor& pool, const std::optional<Tensor>& scales) {
  check_dim(pool, 5, "pool");
  check_contiguous(pool, "pool");
  check_aligned(pool, "pool");
  STD_TORCH_CHECK(pool.size(2) == 2, "pool must be [B, K, 2, S, H], got ", shape_of(pool));
  const bool is_i8 = pool.scalar_type() == ScalarType::Char;
  STD_TORCH_CHECK(is_i8 == scales.has_value(), "an int8 pool needs scales, and no other pool has any; the pool is ",
                  torch::headeronly::toString(pool.scalar_type()));
  const float* row_scales = nullptr;
  if (is_i8) {
    check_dim(*scales, 4, "scales");
    check_type(*scales, ScalarType::Float, "scales");
    check_contiguous(*scales, "scales");
    check_aligned(*scales, "scales");
    for (int64_t i = 0; i < 4; ++i)
      STD_TORCH_CHECK(scales->size(i) == pool.size(i), "scales must be the pool's ", shape_of(pool),
                      " without its last dimension, got ", shape_of(*scales));
    row_scales = static_cast<const float*>(scales->const_data_ptr());
  }
  return host_layout(pool.const_data_ptr(), row_scales, pool.size(0), pool.size(1), pool.size(3), pool.size(4),
                     is_i8 ? DType::i8 : dtype_of(pool, "pool"));
}

Tensor paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start,
                       Tensor seq_lens, double scale, int64_t window, double softcap, std::optional<Tensor> reversed,
                       int64_t chunk, std::optional<Tensor> sinks, std::optional<Tensor> alibi_slopes);
Tensor cpu_attention(Tensor q, Tensor pool, std::optional<Tensor> scales, Tensor block_table, Tensor seq_lens,
                     double scale, int64_t window, double softcap, int64_t num_threads, int64_t chunk,
                     std::optional<Tensor> sinks, std::optional<Tensor> alibi_slopes);
void store_host_kv(Tensor k, Tensor v, Tensor pool, std::optional<Tensor> scales, Tensor slot_mapping);
Tensor packed_linear(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t num_out);
Tensor packed_heads(Tensor x, Tensor packed, int64_t num_out);
Tensor add_lora(Tensor y, Tensor x, Tensor slots, Tensor a, Tensor b, Tensor scales);
void store_kv(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slot_mapping);

// The same operators, which write to `given` instead of a new tensor if there is one.
Tensor paged_attention_into(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start,
                            Tensor seq_lens, double scale, int64_t window, double softcap,
                            std::optional<Tensor> reversed, int64_t chunk, std::optional<Tensor> sinks,
                            std::optional<Tensor> alibi_slopes, std::optional<Tensor> given);
Tensor packed_linear_into(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t num_out,
                          std::optional<Tensor> given);
Tensor packed_heads_into(Tensor x, Tensor packed, int64_t num_out, std::optional<Tensor> given);
Tensor add_lora_into(Tensor y, Tensor x, Tensor slots, Tensor a, Tensor b, Tensor scales, std::optional<Tensor> given);
Tensor quantized_linear_into(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t num_out, int64_t bits,
                             int64_t scales, int64_t group, std::optional<Tensor> order, std::optional<Tensor> given);
Tensor int8_linear_into(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t num_out,
                        std::optional<Tensor> x_scale, std::optional<Tensor> given);
Tensor int8_linear(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t num_out, std::optional<Tensor> x_scale);
void pack_linear(Tensor weight, Tensor packed);
Tensor packed_rows(Tensor ids, Tensor packed, int64_t num_in, int64_t num_out);
Tensor quantized_linear(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t num_out, int64_t bits, int64_t scales,
                        int64_t group, std::optional<Tensor> order);
Tensor quantized_rows(Tensor ids, Tensor packed, int64_t num_in, int64_t num_out, int64_t bits, int64_t scales,
                 int64_t group);

}  // namespace omniserve
