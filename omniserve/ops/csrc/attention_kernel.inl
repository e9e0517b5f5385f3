// The attention kernels of one instruction set. The including file sets OMNI_LANES (fp32 lanes of a vector: 4, 8, 16),
// OMNI_ISA (namespace), OMNI_DPBF16 (1: bf16 scores by VDPBF16PS) and, before all that, `#pragma GCC target`.
//
// Decode reads K and V where they lie; a score's lanes are added up W scores at a time. Prefill keeps scores transposed, [key][query row], so that a softmax runs down the lanes; a "row" m is (query i, head g of the group),
// m = i * G + g, so all heads that share a KV head share its converted tile. Accumulation is in fp32 everywhere.

namespace omniserve {
namespace OMNI_ISA {
namespace {

#include "attention_simd.inl"

constexpr float kNegInf = -__builtin_inff();

// Addresses of the K and V rows at positions [begin, end), and of their scales.
template <typename T>
struct Rows {
  static constexpr bool kScaled = __is_same(T, I8);
  const T* k[kPrefillTile];
  const T* v[kPrefillTile];
  const float* k_scale[kScaled ? kPrefillTile : 1];
  const float* v_scale[kScaled ? kPrefillTile : 1];
  int64_t count;

  OMNI_MEMBER void find(const PagedKV& kv, const int32_t* block_table, int64_t kv_head, int64_t begin, int64_t end) {
    count = end - begin;
    for (int64_t i = 0; i < count;) {
      const int64_t offset = (begin + i) % kv.block_size, run = min64(count - i, kv.block_size - offset);
      const BlockRef ref(block_table[(begin + i) / kv.block_size]);
      const int64_t at = ref.block * kv.block_stride + kv_head * kv.head_stride;
      const int64_t first = (ref.reversed ? kv.block_size - 1 - offset : offset) * kv.head_size;
      const int64_t step = ref.reversed ? -kv.head_size : kv.head_size;
      const T* k_row = reinterpret_cast<const T*>(kv.k + at) + first;
      const T* v_row = reinterpret_cast<const T*>(kv.v + at) + first;
      if (kScaled) {
        const int64_t scale = ref.block * kv.scale_block_stride + kv_head * kv.scale_head_stride;
        for (int64_t j = 0; j < run; ++j) {
          const int64_t row = ref.reversed ? kv.block_size - 1 - offset - j : offset + j;
          k_scale[i + j] = kv.k_scales + scale + row;
          v_scale[i + j] = kv.v_scales + scale + row;
        }
      }
      for (const int64_t stop = i + run; i < stop; ++i, k_row += step, v_row += step) {
        k[i] = k_row;
        v[i] = v_row;
      }
    }
  }
};

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
