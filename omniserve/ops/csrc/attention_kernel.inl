// The attention kernels of one instruction set. The including file sets OMNI_LANES (fp32 lanes of a vector: 4, 8, 16),
// OMNI_ISA (namespace), OMNI_DPBF16 (1: bf16 scores by VDPBF16PS) and, before all that, `#pragma GCC target`.
//
// Decode reads rows of K and V where they lie; a score's lanes are added up W scores at a time. Prefill keeps scores
// transposed, [key][query row], so that a softmax runs down the lanes; a "row" m is (query i, head g of the group),
// m = i * G + g, so all heads that share a KV head share its converted tile. Accumulation is in fp32 everywhere.

namespace omniserve {
namespace OMNI_ISA {
namespace {

#include "attention_simd.inl"

constexpr float kNegInf = -__builtin_inff();

OMNI_INLINE const char* row_address(const void* base, const PagedKV& kv, int64_t element_size,
                                    const int32_t* block_table, int64_t kv_head, int64_t position) {
  const int64_t block = block_table[position / kv.block_size];
  const int64_t row = (block * kv.kv_heads + kv_head) * kv.block_size + position % kv.block_size;
  return static_cast<const char*>(base) + row * kv.head_size * element_size;
}

// Addresses of the K and V rows at positions [begin, begin + count).
template <typename T>
struct Rows {
  const T* k[kPrefillTile];
  const T* v[kPrefillTile];
  int64_t count;

  inline __attribute__((always_inline)) void find(const PagedKV& kv, const int32_t* block_table, int64_t kv_head,
                                                  int64_t begin, int64_t end) {
    count = end - begin;
    for (int64_t i = 0; i < count;) {
      const int64_t run = min64(count - i, kv.block_size - (begin + i) % kv.block_size);
      const T* k_row = reinterpret_cast<const T*>(row_address(kv.k, kv, sizeof(T), block_table, kv_head, begin + i));
      const T* v_row = reinterpret_cast<const T*>(row_address(kv.v, kv, sizeof(T), block_table, kv_head, begin + i));
      for (const int64_t stop = i + run; i < stop; ++i, k_row += kv.head_size, v_row += kv.head_size) {
        k[i] = k_row;
        v[i] = v_row;
      }
    }
  }
};

template <typename T>
OMNI_INLINE void prefetch_row(const T* row, int64_t head_size) {
  const char* line = reinterpret_cast<const char*>(row);
  const char* const stop = line + head_size * static_cast<int64_t>(sizeof(T));
  for (; line < stop; line += 64) __builtin_prefetch(line, 0, 2);
}

OMNI_INLINE VF soften(VF scores, const AttentionParams& params) {
  scores *= splat(params.scale);
  return params.softcap > 0.0f ? splat(params.softcap) * vtanh(scores / splat(params.softcap)) : scores;
}

#include "attention_decode.inl"
#include "attention_prefill.inl"

}  // namespace

const Kernels kKernels = {decode, merge, prefill};

}  // namespace OMNI_ISA
}  // namespace omniserve
