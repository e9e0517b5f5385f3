// The linear kernels of one instruction set; macros as for attention_kernel.inl.
//
// A block is kLinearGroup rows of weight by up to kBlockRows rows of x: W sums, as many as sum_each adds up at once.
// While the first block of a group reads its weights, it prefetches those of a later group, into L2: L1 has too few
// misses in flight for that (20 GB/s on two Zen 4 cores, 40 this way, which is what their memory gives). Further blocks
// of the group find the weights in L1, where the packed x stays as well if it is small.

namespace omniserve {
namespace OMNI_ISA {
namespace {

#include "attention_simd.inl"

constexpr int kGroup = static_cast<int>(kLinearGroup);
constexpr int kBlockRows = OMNI_LANES / kGroup;
constexpr int64_t kPrefetchBytes = 16384;  // at the least

OMNI_INLINE int64_t padded(int64_t num_in) { return (num_in + kLinearPad - 1) / kLinearPad * kLinearPad; }

// Of x, and so of out, in X and weight in T.
template <typename X, typename T>
struct Product {
  typedef X Result;
  typedef T Weight;
  typedef VF Vector;
  typedef float Packed;
  static constexpr int64_t kStep = W;
  OMNI_INLINE VF add(VF sum, VF w, VF x) { return sum + w * x; }
  OMNI_INLINE VF read(const T* p) { return load(p); }
  OMNI_INLINE VF read_x(const float* p) { return load(p); }
};

#if OMNI_DPBF16
template <>
struct Product<BF16, BF16> {  // VDPBF16PS: products are exact in fp32, sums are rounded to fp32; subnormals are zero
  typedef BF16 Result;
  typedef BF16 Weight;
  typedef __m512bh Vector;
  typedef BF16 Packed;
  static constexpr int64_t kStep = 2 * W;
  OMNI_INLINE VF add(VF sum, Vector w, Vector x) {
    return (VF)_mm512_dpbf16_ps((__m512)sum, w, x);
  }
  OMNI_INLINE Vector read(const BF16* p) {
    Vector v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  }
  OMNI_INLINE Vector read_x(const BF16* p) { return read(p); }
};
#endif

// sum[t * kGroup + r] += v[r] * x[t], for rows of x that lie `stride` apart.
template <typename P, int ROWS>
OMNI_INLINE void add_products(const typename P::Vector* v, const typename P::Packed* x, int64_t stride, VF* sum) {
#pragma GCC unroll 4
  for (int t = 0; t < ROWS; ++t) {
    const typename P::Vector row = P::read_x(x + t * stride);
#pragma GCC unroll 4
    for (int r = 0; r < kGroup; ++r) sum[t * kGroup + r] = P::add(sum[t * kGroup + r], v[r], row);
  }
}

// Writes `count` features from `feature` on, of ROWS rows of x from `row` on.
template <typename P, int ROWS, bool PREFETCH>
static void block(const LinearArgs& args, const typename P::Weight* const* weight, const typename P::Packed* packed,
                  int64_t stride, int64_t ahead, int64_t row, int64_t feature, int64_t count) {
  typedef typename P::Weight T;
  typedef typename P::Result Result;
  const typename P::Packed* const x = packed + row * stride;
  const T* const w[kGroup] = {weight[0], weight[1], weight[2], weight[3]};
  typename P::Vector v[kGroup];
  VF sum[kGroup * ROWS];  // in registers
#pragma GCC unroll 16
  for (int s = 0; s < kGroup * ROWS; ++s) sum[s] = VF{};
  const int64_t num_in = args.num_in;
  int64_t i = 0;
  for (; i + P::kStep <= num_in; i += P::kStep) {
#pragma GCC unroll 4
    for (int r = 0; r < kGroup; ++r) {
      v[r] = P::read(w[r] + i);
      if (PREFETCH) __builtin_prefetch(w[r] + i + ahead, 0, 2);
    }
    add_products<P, ROWS>(v, x + i, stride, sum);
  }
  if (i < num_in) {
#pragma GCC unroll 4
    for (int r = 0; r < kGroup; ++r) {
      T rest[P::kStep] = {};
      __builtin_memcpy(rest, w[r] + i, static_cast<size_t>(num_in - i) * sizeof(T));
      v[r] = P::read(rest);
    }
    add_products<P, ROWS>(v, x + i, stride, sum);
  }
  VF sums[OMNI_LANES];
#pragma GCC unroll 16
  for (int s = 0; s < OMNI_LANES; ++s) sums[s] = s < kGroup * ROWS ? sum[s < kGroup * ROWS ? s : 0] : VF{};
  Result results[OMNI_LANES];
  store(results, sum_each(sums));
  Result* to = static_cast<Result*>(args.out) + row * args.num_out + feature;
  for (int t = 0; t < ROWS; ++t, to += args.num_out) {
    if (count == kGroup) {
      __builtin_memcpy(to, results + t * kGroup, kGroup * sizeof(Result));
    } else {
      for (int64_t r = 0; r < count; ++r) to[r] = results[t * kGroup + r];
    }
  }
}

// The block of 1 to kBlockRows rows of x from `row` on; returns how many it took.
template <typename P, bool PREFETCH>
OMNI_INLINE int64_t any_block(const LinearArgs& args, const typename P::Weight* const* weight,
                              const typename P::Packed* packed, int64_t stride, int64_t ahead, int64_t row,
                              int64_t feature, int64_t count) {
  const int64_t left = args.num_rows - row;
  if (left >= kBlockRows) {
    block<P, kBlockRows, PREFETCH>(args, weight, packed, stride, ahead, row, feature, count);
    return kBlockRows;
  }
#if OMNI_LANES == 16
  if (left == 3) {
    block<P, 3, PREFETCH>(args, weight, packed, stride, ahead, row, feature, count);
    return 3;
  }
  if (left == 2) {
    block<P, 2, PREFETCH>(args, weight, packed, stride, ahead, row, feature, count);
    return 2;
  }
#endif
  block<P, 1, PREFETCH>(args, weight, packed, stride, ahead, row, feature, count);
  return 1;
}

template <typename P>
static void features_typed(const LinearArgs& args, const void* packed, int64_t begin, int64_t end) {
  typedef typename P::Weight T;
  const auto* x = static_cast<const typename P::Packed*>(packed);
  const int64_t stride = padded(args.num_in);
  const int64_t group_bytes = max64(1, kGroup * args.num_in * static_cast<int64_t>(sizeof(T)));
  const int64_t distance = (kPrefetchBytes + group_bytes - 1) / group_bytes * kGroup;  // in rows of weight
  for (int64_t feature = begin; feature < end; feature += kGroup) {
    const int64_t count = min64(kGroup, end - feature);
    const T* weight[kGroup];
    for (int64_t r = 0; r < kGroup; ++r)
      weight[r] = static_cast<const T*>(args.weight) + (feature + min64(r, count - 1)) * args.num_in;
    const int64_t ahead = min64(distance, args.num_out - kGroup - feature) * args.num_in;  // nothing behind the weight
    int64_t row = 0;
    if (ahead > 0 && args.num_rows > 0) row = any_block<P, true>(args, weight, x, stride, ahead, row, feature, count);
    while (row < args.num_rows) row += any_block<P, false>(args, weight, x, stride, 0, row, feature, count);
  }
}

template <typename T, typename P>
OMNI_INLINE void pack_row(const T* x, int64_t num_in, P* packed) {
  int64_t i = 0;
  for (; i + W <= num_in; i += W) store(packed + i, load(x + i));
  for (; i < num_in; ++i) packed[i] = to_float(x[i]);
}
#if OMNI_DPBF16
OMNI_INLINE void pack_row(const BF16* x, int64_t num_in, BF16* packed) {
  __builtin_memcpy(packed, x, static_cast<size_t>(num_in) * sizeof(BF16));
}
#endif

template <typename P>
static void pack_typed(const LinearArgs& args, void* packed) {
  typedef typename P::Packed Packed;
  const int64_t stride = padded(args.num_in);
  for (int64_t t = 0; t < args.num_rows; ++t) {
    Packed* const to = static_cast<Packed*>(packed) + t * stride;
    pack_row(static_cast<const typename P::Result*>(args.x) + t * args.x_stride, args.num_in, to);
    __builtin_memset(to + args.num_in, 0, static_cast<size_t>(stride - args.num_in) * sizeof(Packed));
  }
}

// fp32 x with a bf16 weight. Of many blocks each would widen the weight anew, which is more work than its products: a
// group of it is widened once, into memory that stays in L1 or L2, while the next one is prefetched.
static void features_mixed(const LinearArgs& args, const void* packed, int64_t begin, int64_t end) {
  float* const wide = args.num_rows <= kBlockRows
                          ? nullptr
                          : static_cast<float*>(__builtin_malloc(static_cast<size_t>(kGroup * args.num_in + 1) * 4));
  if (wide == nullptr) return features_typed<Product<float, BF16>>(args, packed, begin, end);  // to the same bits
  const auto* x = static_cast<const float*>(packed);
  const int64_t stride = padded(args.num_in);
  const int64_t num_weights = args.num_out * args.num_in;
  const int64_t ahead = max64(kPrefetchBytes / 2, kGroup * args.num_in);
  for (int64_t feature = begin; feature < end; feature += kGroup) {
    const int64_t count = min64(kGroup, end - feature);
    const int64_t first = feature * args.num_in;
    const BF16* const narrow = static_cast<const BF16*>(args.weight) + first;
    const int64_t length = count * args.num_in;
    int64_t i = 0;
    for (; i + W <= length; i += W) {
      if (first + i + ahead < num_weights) __builtin_prefetch(narrow + i + ahead, 0, 2);
      store(wide + i, load(narrow + i));
    }
    for (; i < length; ++i) wide[i] = to_float(narrow[i]);
    const float* weight[kGroup];
    for (int64_t r = 0; r < kGroup; ++r) weight[r] = wide + min64(r, count - 1) * args.num_in;
    for (int64_t row = 0; row < args.num_rows;)
      row += any_block<Product<float, float>, false>(args, weight, x, stride, 0, row, feature, count);
  }
  __builtin_free(wide);
}

void pack(const LinearArgs& args, void* packed) {
  switch (args.dtype) {
    case DType::f32: return pack_typed<Product<float, float>>(args, packed);  // whatever the weight
    case DType::f16: return pack_typed<Product<F16, F16>>(args, packed);
    default: return pack_typed<Product<BF16, BF16>>(args, packed);
  }
}

void features(const LinearArgs& args, const void* packed, int64_t begin, int64_t end) {
  if (args.dtype == DType::f32 && args.weight_dtype == DType::bf16)
    return features_mixed(args, packed, begin, end);
  switch (args.dtype) {
    case DType::f32: return features_typed<Product<float, float>>(args, packed, begin, end);
    case DType::f16: return features_typed<Product<F16, F16>>(args, packed, begin, end);
    default: return features_typed<Product<BF16, BF16>>(args, packed, begin, end);
  }
}

}  // namespace

#define OMNI_TEXT_OF(name) #name
#define OMNI_TEXT(name) OMNI_TEXT_OF(name)
const LinearKernels kLinearKernels = {OMNI_TEXT(OMNI_ISA), pack, features};

}  // namespace OMNI_ISA
}  // namespace omniserve
