// Attention kernels for x86 with AMX-BF16, beside the AVX512-BF16 kernels: tiles serve bf16 caches whose blocks hold
// whole tiles, everything else is the neighbour's.
#if defined(__x86_64__)
#pragma GCC diagnostic push  // GCC 12 takes its own _mm512_undefined_ps for an oversight (its bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "attention_amx.h"

namespace omniserve {

// The functions before the target pragma are compiled for any x86; this one says whether the rest of the file may run.
bool amx_bf16_granted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM, for the whole process
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA: Linux gives its 8 KiB only to those who ask
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         __builtin_cpu_supports("amx-int8") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

int64_t amx_decode_scratch_floats(const PagedKV& kv, int64_t num_heads) {
  return amx_bf16::tiles_serve_decode(kv) ? amx_bf16::DecodeShape(kv, num_heads).scratch_floats() : 0;
}

int64_t amx_prefill_scratch_floats(const PagedKV& kv, DType q_dtype, int64_t num_rows) {
  if (!amx_bf16::tiles_serve_prefill(kv, q_dtype)) return 0;
  return amx_bf16::PrefillTile(num_rows, kv.head_size).scratch_floats();
}

}  // namespace omniserve

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#define OMNI_LANES 16

namespace omniserve {
namespace amx_bf16 {
namespace {

#include "attention_simd.inl"

constexpr float kNegInf = -__builtin_inff();

OMNI_INLINE VF soften(VF scores, const AttentionParams& params) {
  scores *= splat(params.scale);
  return params.softcap > 0.0f ? splat(params.softcap) * vtanh(scores / splat(params.softcap)) : scores;
}

constexpr float kLog2E = 1.44269504f;

// 2^x to 1e-7 relative; 0 below the smallest normal result (a subnormal one takes a hundred cycles), so -inf gives 0. NaN
// stays NaN. It takes four instructions less than vexp, and the factor from e to 2 goes into that of the scores.
OMNI_INLINE VF vexp2(VF x) {
  const __m512 lowest = _mm512_set1_ps(-126.0f);
  constexpr __mmask16 kAll = 0xffff;  // GCC 12 warns of the unmasked forms
  const __m512 v = _mm512_maskz_max_ps(kAll, lowest, (__m512)x);  // the second operand if either is NaN
  const __m512 n = _mm512_maskz_roundscale_ps(kAll, v, _MM_FROUND_TO_NEAREST_INT);
  const VF r = (VF)v - (VF)n;
  VF p = splat(1.535336188319500e-4f);  // Cephes' exp2f
  p = p * r + splat(1.339887440266574e-3f);
  p = p * r + splat(9.618437357674640e-3f);
  p = p * r + splat(5.550332471162809e-2f);
  p = p * r + splat(2.402264791363012e-1f);
  p = p * r + splat(6.931472028550421e-1f);
  p = p * r + splat(1.0f);
  const __mmask16 seen = _mm512_cmp_ps_mask((__m512)x, lowest, _CMP_NLT_UQ);
  return (VF)_mm512_maskz_scalef_ps(seen, (__m512)p, n);
}

// Scores need nothing but the scale, which the exponential's argument can take in.
OMNI_INLINE bool only_scaled(const AttentionParams& params) {
  return params.softcap <= 0.0f && params.alibi_slopes == nullptr && params.scale > 0.0f;
}

// Of `count` vectors, a multiple of four.
OMNI_INLINE VF max_of(const float* scores, int64_t count) {
  VF best[4] = {load(scores), load(scores + W), load(scores + 2 * W), load(scores + 3 * W)};
  for (int64_t i = 4; i < count; i += 4)
    for (int64_t j = 0; j < 4; ++j) best[j] = vmax(best[j], load(scores + (i + j) * W));
  return vmax(vmax(best[0], best[1]), vmax(best[2], best[3]));
}

// The kDims elements of a row that tile i of it covers begin here: the last tile ends with the row and so overlaps its
// neighbour where the head size is no multiple of kDims.
template <int64_t kDims>
OMNI_INLINE int64_t tile_dim(int64_t i, int64_t head_size) {
  return min64(i * kDims, head_size - kDims);
}

OMNI_INLINE VI load_bits(const void* p) {
  VI v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
OMNI_INLINE void store_bits(void* p, VI v) { __builtin_memcpy(p, &v, sizeof(v)); }

// 32 elements of a query row, those before `from` as zeros.
OMNI_INLINE VI load_query(const BF16* row, int64_t begin, int64_t from) {
  return (VI)_mm512_maskz_loadu_epi16(0xffffffffu << (from - begin), row + begin);
}

// The N vectors as one array of 16 N elements: its even elements, then its odd ones, kTimes over. This rotates the bits
// of an element's index to the right: [a][b] becomes [b][a] once all the bits of b have come to the top.
template <int N, int kTimes>
OMNI_INLINE void unzip(VI* v) {
  if (N == 1) return;
  const VI even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  for (int time = 0; time < kTimes; ++time) {
    VI out[N];
    for (int i = 0; i < N / 2; ++i) {
      out[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], even);
      out[N / 2 + i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], even + 1);
    }
    for (int i = 0; i < N; ++i) v[i] = out[i];
  }
}

// Rounds weights to bf16, twice: hi + lo has 16 bits, and the error of the sum over V falls from 1e-3 to 1e-6. A lane
// holds the weights of two neighbouring tokens, the even one below.
OMNI_INLINE void split_pairs(VF even, VF odd, VI* hi, VI* lo) {
  const __m512i zip = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                       5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const auto round = [zip](VF low, VF high) {
    return (VI)_mm512_permutexvar_epi16(zip, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
  };
  *hi = round(even, odd);
  *lo = round(even - (VF)(*hi << 16), odd - (VF)(*hi & static_cast<int32_t>(0xffff0000)));
}

#include "attention_amx_decode.inl"
#include "attention_amx_prefill.inl"

void decode(const void* q, DType q_dtype, const PagedKV& kv, const int32_t* block_table, int64_t position,
            int64_t num_rows, int64_t begin, int64_t end, const AttentionParams& params, float* acc, float* m, float* l,
            float* scratch) {
  if (!tiles_serve_decode(kv))
    return avx512_bf16_kernels().decode(q, q_dtype, kv, block_table, position, num_rows, begin, end, params, acc, m, l,
                                        scratch);
  decode_by_tiles(static_cast<const BF16*>(q), kv, block_table, position, num_rows, begin, end, params, acc, m, l,
                  scratch);
}

void merge(const float* acc, const float* m, const float* l, int64_t num_pieces, int64_t num_rows, int64_t num_heads,
           int64_t kv_heads, int64_t head_size, const float* sinks, DType dtype, void* out) {
  avx512_bf16_kernels().merge(acc, m, l, num_pieces, num_rows, num_heads, kv_heads, head_size, sinks, dtype, out);
}

void prefill(const void* q, DType q_dtype, int64_t q_stride, const PagedKV& kv, const int32_t* block_table,
             int64_t context_len, int64_t q_begin, int64_t q_end, int64_t kv_head, const AttentionParams& params,
             void* out, int64_t out_stride, float* scratch) {
  if (!tiles_serve_prefill(kv, q_dtype))
    return avx512_bf16_kernels().prefill(q, q_dtype, q_stride, kv, block_table, context_len, q_begin, q_end, kv_head,
                                         params, out, out_stride, scratch);
  const auto by_tiles = kv.dtype == DType::i8 ? prefill_by_tiles<I8> : prefill_by_tiles<BF16>;
  by_tiles(static_cast<const BF16*>(q), q_stride, kv, block_table, context_len, q_begin, q_end, kv_head, params,
           static_cast<BF16*>(out), out_stride, scratch);
}

const Kernels kKernels = {decode, merge, prefill};

}  // namespace
}  // namespace amx_bf16

const Kernels& amx_bf16_kernels() { return amx_bf16::kKernels; }

}  // namespace omniserve
#endif
