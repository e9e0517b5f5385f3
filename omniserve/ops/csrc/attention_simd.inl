// Vectors of OMNI_LANES floats for the kernels of one instruction set. Included inside that set's own namespace, after
// `#pragma GCC target`, by attention_kernel.inl and linear_kernel.inl. Nothing of the standard library may be called
// here: an inline function compiled for a wide instruction set could be the copy that the linker keeps for everybody.

constexpr int64_t W = OMNI_LANES;

typedef float VF __attribute__((vector_size(OMNI_LANES * 4)));
typedef int32_t VI __attribute__((vector_size(OMNI_LANES * 4)));
typedef uint32_t VU __attribute__((vector_size(OMNI_LANES * 4)));
typedef uint16_t VH __attribute__((vector_size(OMNI_LANES * 2)));
typedef int16_t VS __attribute__((vector_size(OMNI_LANES * 2)));
typedef int8_t VB __attribute__((vector_size(OMNI_LANES)));

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
struct I8 {
  int8_t value;
};

#define OMNI_MEMBER inline __attribute__((always_inline))
#define OMNI_INLINE static OMNI_MEMBER

OMNI_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
OMNI_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

OMNI_INLINE VF splat(float x) { return x - VF{}; }  // x + 0 would be an addition: it makes 0 of -0
// GCC likes to load a vector again for each of its uses; two loads a cycle are all that a core does.
OMNI_INLINE VF in_register(VF v) {
#if OMNI_LANES >= 8
  asm("" : "+v"(v));
#endif
  return v;
}
OMNI_INLINE VI lane_numbers() {
  VI lanes{};
  for (int i = 0; i < OMNI_LANES; ++i) lanes[i] = i;
  return lanes;
}
OMNI_INLINE VF vmax(VF a, VF b) { return a > b ? a : b; }

#if OMNI_LANES == 8
OMNI_INLINE VF widen_bf16(VH h) {  // GCC 12 makes five instructions of the conversion below
  return (VF)((VU)_mm256_cvtepu16_epi32((__m128i)h) << 16);
}
#else
OMNI_INLINE VF widen_bf16(VH h) { return (VF)(__builtin_convertvector(h, VU) << 16); }
#endif

OMNI_INLINE VH narrow_bf16(VF x) {  // round to nearest even, NaN stays NaN
  const VU u = (VU)x;
  const VU rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const VI is_nan = (VI)((u & 0x7fffffffu) > 0x7f800000u);
  return __builtin_convertvector(is_nan ? ((u >> 16) | 0x40u) : rounded, VH);
}

#if OMNI_LANES == 16
constexpr __mmask16 kAllLanes = 0xffff;  // GCC 12 warns of the unmasked forms
OMNI_INLINE VF widen_f16(VH h) { return (VF)_mm512_maskz_cvtph_ps(kAllLanes, (__m256i)h); }
OMNI_INLINE VH narrow_f16(VF x) {
  return (VH)_mm512_maskz_cvtps_ph(kAllLanes, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
}
#elif OMNI_LANES == 8
OMNI_INLINE VF widen_f16(VH h) { return (VF)_mm256_cvtph_ps((__m128i)h); }
OMNI_INLINE VH narrow_f16(VF x) { return (VH)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }
#else
OMNI_INLINE VF widen_f16(VH h) {
  const VU u = __builtin_convertvector(h, VU);
  const VU magnitude = (u & 0x7fffu) << 13;
  const VU scaled = (VU)((VF)magnitude * splat(0x1p112f));  // moves the exponent's bias; exact for subnormals too
  const VI special = (VI)(magnitude >= 0x0f800000u);
  return (VF)((special ? (scaled | 0x7f800000u) : scaled) | ((u & 0x8000u) << 16));
}
OMNI_INLINE VH narrow_f16(VF x) {  // round to nearest even: adding a float of the right exponent drops the low bits
  const VU u = (VU)x;
  const VU twice = u + u;
  VF base = (VF)(u & 0x7fffffffu) * splat(0x1p112f) * splat(0x1p-110f);
  VU bias = twice & 0xff000000u;
  bias = bias < 0x71000000u ? (VU{} + 0x71000000u) : bias;
  base = (VF)((bias >> 1) + 0x07800000u) + base;
  const VU bits = (VU)base;
  const VU finite = ((bits >> 13) & 0x7c00u) + (bits & 0x0fffu);
  const VI is_nan = (VI)(twice > 0xff000000u);
  return __builtin_convertvector((is_nan ? (VU{} + 0x7e00u) : finite) | ((u >> 16) & 0x8000u), VH);
}
#endif

OMNI_INLINE VF load(const float* p) {
  VF v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
OMNI_INLINE VF load(const BF16* p) {
  VH h;
  __builtin_memcpy(&h, p, sizeof(h));
  return widen_bf16(h);
}
OMNI_INLINE VF load(const F16* p) {
  VH h;
  __builtin_memcpy(&h, p, sizeof(h));
  return widen_f16(h);
}
OMNI_INLINE VF widen_i8(VB b) {
#if OMNI_LANES == 16
  constexpr __mmask16 kAll = 0xffff;  // GCC 12 warns of the unmasked form
  return (VF)_mm512_maskz_cvtepi32_ps(kAll, _mm512_maskz_cvtepi8_epi32(kAll, (__m128i)b));
#elif OMNI_LANES == 8
  int64_t low;
  __builtin_memcpy(&low, &b, sizeof(low));
  return (VF)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(low)));
#else
  return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(b, VS), VI), VF);  // GCC: step by step
#endif
}
OMNI_INLINE VF load(const I8* p) {
  VB b;
  __builtin_memcpy(&b, p, sizeof(b));
  return widen_i8(b);
}
OMNI_INLINE VI load(const int32_t* p) {
  VI v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
OMNI_INLINE void store(float* p, VF v) { __builtin_memcpy(p, &v, sizeof(v)); }
OMNI_INLINE void store(BF16* p, VF v) {
  const VH h = narrow_bf16(v);
  __builtin_memcpy(p, &h, sizeof(h));
}
OMNI_INLINE void store(F16* p, VF v) {
  const VH h = narrow_f16(v);
  __builtin_memcpy(p, &h, sizeof(h));
}

// Head sizes are multiples of 8, so the only remainder that a vector can leave is half of 16 lanes.
OMNI_INLINE VF load_half(const float* p) {
  VF v{};
  __builtin_memcpy(&v, p, sizeof(v) / 2);
  return v;
}
OMNI_INLINE VF load_half(const BF16* p) {
  VH h{};
  __builtin_memcpy(&h, p, sizeof(h) / 2);
  return widen_bf16(h);
}
OMNI_INLINE VF load_half(const F16* p) {
  VH h{};
  __builtin_memcpy(&h, p, sizeof(h) / 2);
  return widen_f16(h);
}
OMNI_INLINE VF load_half(const I8* p) {
  VB b{};
  __builtin_memcpy(&b, p, sizeof(b) / 2);
  return widen_i8(b);
}
OMNI_INLINE void store_half(float* p, VF v) { __builtin_memcpy(p, &v, sizeof(v) / 2); }
OMNI_INLINE void store_half(BF16* p, VF v) {
  const VH h = narrow_bf16(v);
  __builtin_memcpy(p, &h, sizeof(h) / 2);
}
OMNI_INLINE void store_half(F16* p, VF v) {
  const VH h = narrow_f16(v);
  __builtin_memcpy(p, &h, sizeof(h) / 2);
}

// W floats, of which at most `count` are there; zeros for the others.
OMNI_INLINE VF load_first(const float* p, int64_t count) {
  if (count >= W) return load(p);
  VF v{};
  for (int64_t i = 0; i < count; ++i) v[i] = p[i];
  return v;
}

// W pairs of bf16, a pair in each 32-bit lane.
OMNI_INLINE VU load_pairs(const BF16* p) {
  VU v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
OMNI_INLINE VU load_half_pairs(const BF16* p) {
  VU v{};
  __builtin_memcpy(&v, p, sizeof(v) / 2);
  return v;
}
OMNI_INLINE VF first_of_pairs(VU pairs) { return (VF)(pairs << 16); }
OMNI_INLINE VF second_of_pairs(VU pairs) { return (VF)(pairs & 0xffff0000u); }

OMNI_INLINE float to_float(float x) { return x; }
OMNI_INLINE float to_float(BF16 x) {
  const uint32_t u = static_cast<uint32_t>(x.bits) << 16;
  float f;
  __builtin_memcpy(&f, &u, sizeof(f));
  return f;
}
OMNI_INLINE float to_float(F16 x) {
  VH h{};
  h[0] = x.bits;
  return widen_f16(h)[0];
}

#if OMNI_LANES == 16
OMNI_INLINE VF pair_sums(VF a, VF b) {  // in each 128 bits: a0+a1, a2+a3, b0+b1, b2+b3
  return __builtin_shuffle(a, b, VI{0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30}) +
         __builtin_shuffle(a, b, VI{1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31});
}
OMNI_INLINE VF quarter_sums(VF a, VF b) {  // the same with 128 bits as the unit
  return __builtin_shuffle(a, b, VI{0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}) +
         __builtin_shuffle(a, b, VI{4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31});
}
#elif OMNI_LANES == 8
OMNI_INLINE VF pair_sums(VF a, VF b) {
  return __builtin_shuffle(a, b, VI{0, 2, 8, 10, 4, 6, 12, 14}) +
         __builtin_shuffle(a, b, VI{1, 3, 9, 11, 5, 7, 13, 15});
}
OMNI_INLINE VF quarter_sums(VF a, VF b) {
  return __builtin_shuffle(a, b, VI{0, 1, 2, 3, 8, 9, 10, 11}) +
         __builtin_shuffle(a, b, VI{4, 5, 6, 7, 12, 13, 14, 15});
}
#else
OMNI_INLINE VF pair_sums(VF a, VF b) {
  return __builtin_shuffle(a, b, VI{0, 2, 4, 6}) +
         __builtin_shuffle(a, b, VI{1, 3, 5, 7});
}
OMNI_INLINE VF quarter_sums(VF a, VF) { return a; }
#endif

// Sum each of W vectors: lane i of the result is the sum of v[i]'s lanes. Destroys v.
OMNI_INLINE VF sum_each(VF* v) {
  for (int i = 0; i < W / 2; ++i) v[i] = pair_sums(v[2 * i], v[2 * i + 1]);
  for (int i = 0; i < W / 4; ++i) v[i] = pair_sums(v[2 * i], v[2 * i + 1]);
  if (W >= 8)
    for (int i = 0; i < W / 8; ++i) v[i] = quarter_sums(v[2 * i], v[2 * i + 1]);
  if (W >= 16) v[0] = quarter_sums(v[0], v[1]);
  return v[0];
}

#if OMNI_LANES == 16
#define OMNI_FOLD(v, join)                                                                      \
  v = join(v, __builtin_shuffle(v, VI{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));  \
  v = join(v, __builtin_shuffle(v, VI{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));  \
  v = join(v, __builtin_shuffle(v, VI{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13})); \
  v = join(v, __builtin_shuffle(v, VI{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}))
#elif OMNI_LANES == 8
#define OMNI_FOLD(v, join)                                          \
  v = join(v, __builtin_shuffle(v, VI{4, 5, 6, 7, 0, 1, 2, 3}));    \
  v = join(v, __builtin_shuffle(v, VI{2, 3, 0, 1, 6, 7, 4, 5}));    \
  v = join(v, __builtin_shuffle(v, VI{1, 0, 3, 2, 5, 4, 7, 6}))
#else
#define OMNI_FOLD(v, join)                              \
  v = join(v, __builtin_shuffle(v, VI{2, 3, 0, 1}));    \
  v = join(v, __builtin_shuffle(v, VI{1, 0, 3, 2}))
#endif

OMNI_INLINE VF vadd(VF a, VF b) { return a + b; }
OMNI_INLINE float max_lane(VF v) {
  OMNI_FOLD(v, vmax);
  return v[0];
}
OMNI_INLINE float sum_lanes(VF v) {
  OMNI_FOLD(v, vadd);
  return v[0];
}
#undef OMNI_FOLD

// exp(x) to 1e-7 relative (Cephes' expf); 0 below the smallest normal result, so -inf gives 0. NaN stays NaN.
#if OMNI_LANES == 16
OMNI_INLINE VF vexp(VF x) {
  const __m512 lowest = _mm512_set1_ps(-87.33f);
  constexpr __mmask16 kAll = 0xffff;  // GCC 12 warns of the unmasked forms
  const __m512 v = _mm512_maskz_max_ps(kAll, lowest, (__m512)x);  // the second operand if either is NaN
  const __m512 n = _mm512_maskz_roundscale_ps(kAll, v * splat(1.44269504f), _MM_FROUND_TO_NEAREST_INT);
  VF r = v - n * splat(0.693359375f);
  r = r - n * splat(-2.12194440e-4f);
  VF p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * (r * r) + r + splat(1.0f);
  const __mmask16 seen = _mm512_cmp_ps_mask((__m512)x, lowest, _CMP_NLT_UQ);
  return (VF)_mm512_maskz_scalef_ps(seen, (__m512)p, n);
}
#else
OMNI_INLINE VF vexp(VF x) {
  const VF lowest = splat(-87.33f);
  const VI underflow = (VI)(x < lowest);
  x = underflow ? lowest : x;  // not a maximum: NaN passes
  x = x > splat(88.37f) ? splat(88.37f) : x;
  const VF magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer that stands in the low bits
  const VF shifted = x * splat(1.44269504f) + magic;
  const VF n = shifted - magic;
  VF r = x - n * splat(0.693359375f);
  r = r - n * splat(-2.12194440e-4f);
  VF p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * (r * r) + r + splat(1.0f);
  const VI exponent = ((VI)shifted - (VI)magic) << 23;
  const VF result = (VF)((VI)p + exponent);
  return underflow ? splat(0.0f) : result;
}
#endif

// tanh(x); by its series near 0, where 1 - 2 / (exp(2x) + 1) would cancel.
OMNI_INLINE VF vtanh(VF x) {
  const VF limit = splat(9.1f);
  const VF clamped = x > limit ? limit : (x < -limit ? -limit : x);
  const VF large = splat(1.0f) - splat(2.0f) / (vexp(clamped + clamped) + splat(1.0f));
  const VF y = x * x;
  VF p = splat(-5.70498872745e-3f);  // Cephes' tanhf, |x| < 0.625
  p = p * y + splat(2.06390887954e-2f);
  p = p * y + splat(-5.37397155531e-2f);
  p = p * y + splat(1.33314422036e-1f);
  p = p * y + splat(-3.33332819422e-1f);
  const VF small = p * y * x + x;
  return (y < splat(0.390625f)) ? small : large;
}
