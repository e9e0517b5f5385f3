// Products with codes of few bits; included by linear_kernel.inl. Rows of fp32 are multiplied with the weight that codes
// mean: as it is read, or from a dense piece of a panel, which stays in L1; an output has the bits that the dense weight
// would give. Rows of bf16 are multiplied with the codes as bf16 where there is VDPBF16PS: pairs_of_codes. With AVX2 few of
// them are multiplied as whole numbers of 16 bits: fixed_rows_of_codes.

constexpr int64_t kExpanded = 128;      // inputs of a piece, at most; pieces begin at multiples of it
constexpr int64_t kCodesAhead = 2048;   // bytes of the codes that are prefetched

typedef uint8_t VC __attribute__((vector_size(OMNI_LANES)));

OMNI_INLINE VU load_words(const uint32_t* p) {
  VU v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
OMNI_INLINE VF load_bytes(const uint8_t* p) {  // unsigned
  VC bytes;
  __builtin_memcpy(&bytes, p, sizeof(bytes));
#if OMNI_LANES == 16
  constexpr __mmask16 kAll = 0xffff;  // GCC 12 warns of the unmasked forms
  return (VF)_mm512_maskz_cvtepi32_ps(kAll, _mm512_maskz_cvtepu8_epi32(kAll, (__m128i)bytes));
#elif OMNI_LANES == 8
  int64_t low;
  __builtin_memcpy(&low, &bytes, sizeof(low));
  return (VF)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(low)));
#else
  VF v;
  for (int i = 0; i < W; ++i) v[i] = static_cast<float>(bytes[i]);
  return v;
#endif
}

// Codes of 8 bits: unsigned beside an offset.
template <bool OFFSET>
OMNI_INLINE VF bytes_of(const uint8_t* at) {
  return OFFSET ? load_bytes(at) : load(reinterpret_cast<const I8*>(at));
}

// Shift right, or left by a negative number.
OMNI_INLINE VU shifted(VU v, int right) { return right >= 0 ? v >> right : v << -right; }

// How a vector of codes becomes w = value * scale + offset. Either the value is the code less its zero, or the zero is
// in the offset: with one rounding for product and sum both give the same bits.
template <int BITS, bool OFFSET>
struct Values {
  static constexpr int kZero = OFFSET ? 0 : 1 << (BITS - 1);
  static constexpr bool kLooksUp = OMNI_LANES == 16 && BITS <= 5;
  static constexpr bool kZeroInOffset = OMNI_LANES >= 8 && BITS < 8 && !kLooksUp && !OFFSET;
  static constexpr bool kHasOffset = OFFSET || kZeroInOffset;
  VF low, high;  // a table of 32 values

  OMNI_MEMBER Values() {
    for (int i = 0; i < OMNI_LANES; ++i) {
      low[i] = static_cast<float>(i - kZero);
      high[i] = static_cast<float>(i + 16 - kZero);
    }
  }

  // Of input j of the eight in these words; `above` has their upper bits, of the first two inputs in the lowest places.
  OMNI_MEMBER VF of(VU words, VU above, int j) const {
    const int pair = j / 2, half = j % 2 * 16;
    const VU lower = words >> (4 * pair + half);
#if OMNI_LANES == 16
    constexpr __mmask16 kAll = 0xffff;  // GCC 12 warns of the unmasked forms
    // Both look at the bits of an index that they need alone.
    if constexpr (BITS == 4)
      return (VF)_mm512_maskz_permutexvar_ps(kAll, (__m512i)lower, (__m512)low);
    const VU upper = shifted(above, (BITS - 4) * pair + half - 4), mask = VU{} + (BITS == 5 ? 16u : 48u);
    const VU codes = (VU)_mm512_ternarylogic_epi32((__m512i)mask, (__m512i)upper, (__m512i)lower, 0xca);  // mask ? :
    if constexpr (BITS == 5)
      return (VF)_mm512_maskz_permutex2var_ps(kAll, (__m512)low, (__m512i)codes, (__m512)high);
    return (VF)_mm512_maskz_cvtepi32_ps(kAll, (__m512i)(codes & 63u));
#else
    VU codes = lower & 15u;
    if constexpr (BITS > 4) codes |= shifted(above, (BITS - 4) * pair + half - 4) & (BITS == 5 ? 16u : 48u);
    return __builtin_convertvector(kZeroInOffset ? (VI)codes : (VI)codes - kZero, VF);
#endif
  }
};

// Scale and offset of a vector of features.
struct ScaleOf {
  VF scale;
  VF offset;
};

template <Scales SCALES>
OMNI_INLINE ScaleOf scale_of(const uint8_t* record, int64_t group, int64_t feature) {
  const auto* const halves = reinterpret_cast<const F16*>(record);
  const auto* const floats = reinterpret_cast<const float*>(record);
  if constexpr (SCALES == Scales::f16) return {load(halves + feature), VF{}};
  if constexpr (SCALES == Scales::f32) return {load(floats + feature), VF{}};
  if constexpr (SCALES == Scales::affine16) return {load(halves + feature), load(halves + kPanel + feature)};
  if constexpr (SCALES == Scales::affine32) return {load(floats + feature), load(floats + kPanel + feature)};
  if constexpr (SCALES == Scales::k) {
    const uint8_t* const bytes = record + kPanel * 4 + group * kPanel + feature;
    return {load(halves + feature) * load_bytes(bytes),
            -(load(halves + kPanel + feature) * load_bytes(bytes + 8 * kPanel))};
  }
  const auto* const bytes = reinterpret_cast<const I8*>(record + kPanel * 2 + group * kPanel + feature);
  return {load(halves + feature) * load(bytes), VF{}};
}

// Where expanded weights go: fp32 as [inputs, 32].
struct ToFloats {
  typedef float Weight;
  OMNI_INLINE void put(float* to, int64_t input, int64_t feature, VF first, VF second) {
    store(to + input * kPanel + feature, first);
    store(to + (input + 1) * kPanel + feature, second);
  }
};

#if OMNI_DPBF16
typedef uint16_t VW __attribute__((vector_size(64)));

OMNI_INLINE __m512bh pairs_of(VF first, VF second) {
  const VW both = (VW)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  constexpr VW kInTurn = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                          8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (__m512bh)__builtin_shuffle(both, kInTurn);
}

// bf16 as [inputs / 2, 32, 2], for instructions that multiply bf16 alone.
struct ToPairs {
  typedef BF16 Weight;
  OMNI_INLINE void put(BF16* to, int64_t input, int64_t feature, VF first, VF second) {
    const __m512bh pairs = pairs_of(first, second);
    __builtin_memcpy(to + (input * kPanel + feature * 2), &pairs, sizeof(pairs));
  }
};
#endif

// Reads the weights of one form.
template <int BITS, Scales SCALES>
struct Reader {
  static constexpr bool kOffset = SCALES != Scales::f16 && SCALES != Scales::f32 && SCALES != Scales::k_signed;
  typedef Values<BITS, kOffset> Codes;

  // The codes of eight inputs and a vector of features.
  struct Eight {
    VU word;
    VU above;
    const uint8_t* bytes;
  };

  const Codes values;
  const int64_t group, block, record_bytes, scale_bytes;

  OMNI_MEMBER explicit Reader(const QuantForm& form)
      : group(form.group), block(form.block()), record_bytes(form.record_bytes()), scale_bytes(form.scale_bytes()) {}

  // Scale and offset of the group of an input of a record.
  OMNI_MEMBER ScaleOf scale(const uint8_t* record, int64_t input, int64_t feature) const {
    ScaleOf by = scale_of<SCALES>(record, input / group, feature);
    if constexpr (Codes::kZeroInOffset) by.offset = by.scale * splat(-static_cast<float>(Codes::kZero));
    return by;
  }

  OMNI_MEMBER Eight eight(const uint8_t* record, int64_t input, int64_t feature) const {
    const uint8_t* const codes = record + scale_bytes;
    const auto* const words = reinterpret_cast<const uint32_t*>(codes) + feature;
    const uint32_t* const above = words + block / 8 * kPanel;
    Eight eight{VU{}, VU{}, codes + input * kPanel + feature};
    if constexpr (BITS < 8) eight.word = load_words(words + input / 8 * kPanel);
    if constexpr (BITS == 5) eight.above = load_words(above + input / 32 * kPanel) >> (input % 32 / 2);
    if constexpr (BITS == 6) eight.above = load_words(above + input / 16 * kPanel) >> (input % 16);
    return eight;
  }

  // The weights of input j of eight.
  OMNI_MEMBER VF weight(const Eight& eight, int j, const ScaleOf& by) const {
    VF value;
    if constexpr (BITS < 8)
      value = values.of(eight.word, eight.above, j);
    else
      value = bytes_of<kOffset>(eight.bytes + j * kPanel);
    VF product = value * by.scale;
    if constexpr (!Codes::kHasOffset) return product;
    // Beside a half's scale a product is exact. Others are rounded, as torch does it, and not fused with the sum.
    if constexpr (SCALES == Scales::affine32) {
#if defined(__aarch64__)
      asm("" : "+w"(product));
#else
      product = in_register(product);
#endif
    }
    return product + by.offset;
  }
};

// Inputs [begin, end) of a record, of one group, to `to`. begin and end are multiples of 8.
template <typename To, typename R>
OMNI_INLINE void expand_group(const R& reader, const uint8_t* record, int64_t begin, int64_t end,
                              typename To::Weight* to) {
  for (int64_t feature = 0; feature < kPanel; feature += W) {
    const ScaleOf by = reader.scale(record, begin, feature);
    for (int64_t input = begin; input < end; input += 8) {
      const auto eight = reader.eight(record, input, feature);
#pragma GCC unroll 4
      for (int j = 0; j < 8; j += 2)
        To::put(to, input - begin + j, feature, reader.weight(eight, j, by), reader.weight(eight, j + 1, by));
    }
  }
}

// Inputs [begin, end) of a panel of codes. begin is a multiple of kExpanded, end of 8.
template <typename To>
struct Expand {
  template <int BITS, Scales SCALES>
  static __attribute__((noinline)) void run(const QuantForm& form, const uint8_t* panel, int64_t begin, int64_t end,
                                            typename To::Weight* to) {
    const Reader<BITS, SCALES> reader(form);
    for (int64_t input = begin, stop; input < end; input = stop) {
      const int64_t first = input / reader.block * reader.block;
      stop = min64(input / reader.group * reader.group + reader.group, end);
      expand_group<To>(reader, panel + input / reader.block * reader.record_bytes, input - first, stop - first,
                       to + (input - begin) * kPanel);
    }
  }
};

// Few rows of fp32: each weight is multiplied as soon as it is read. As in a dense panel, an output's products are
// added in the order of the inputs, so that its bits are the same.
template <int ROWS>
struct MultiplyOf {
  static constexpr int kAtOnce = ROWS <= 2 ? kVectors : kPartVectors;  // vectors of features; registers hold their sums

  template <int BITS, Scales SCALES>
  static __attribute__((noinline)) void run(const LinearArgs& args, const uint8_t* panel, const float* x,
                                            int64_t stride, float* sums) {
    const Reader<BITS, SCALES> reader(*args.form);
    const int64_t num_in = (args.num_in + 7) / 8 * 8;
    for (int64_t feature = 0; feature < kPanel; feature += kAtOnce * W) {
      VF sum[ROWS * kAtOnce] = {};
      const uint8_t* record = panel;
      for (int64_t first = 0; first < num_in; first += reader.block, record += reader.record_bytes)
        for (int64_t begin = 0; begin < reader.block && first + begin < num_in; begin += reader.group) {
          ScaleOf by[kAtOnce];
#pragma GCC unroll 8
          for (int v = 0; v < kAtOnce; ++v) by[v] = reader.scale(record, begin, feature + v * W);
          const int64_t end = min64(begin + reader.group, num_in - first);
          for (int64_t input = begin; input < end; input += 8) {
            __builtin_prefetch(record + reader.scale_bytes + input * kPanel * BITS / 8 + kCodesAhead, 0, 2);
            if (BITS > 4)
              __builtin_prefetch(record + reader.scale_bytes + input * kPanel * BITS / 8 + kCodesAhead + kLine, 0, 2);
            typename Reader<BITS, SCALES>::Eight eight[kAtOnce];
#pragma GCC unroll 8
            for (int v = 0; v < kAtOnce; ++v) eight[v] = reader.eight(record, input, feature + v * W);
            const float* const rows = x + first + input;
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j)
#pragma GCC unroll 8
              for (int v = 0; v < kAtOnce; ++v) {
                const VF weight = reader.weight(eight[v], j, by[v]);
#pragma GCC unroll 4
                for (int t = 0; t < ROWS; ++t)
                  add_product(sum[t * kAtOnce + v], weight, broadcast(rows[t * stride + j]));
              }
          }
        }
      for (int s = 0; s < ROWS * kAtOnce; ++s) store(sums + s / kAtOnce * kPanel + feature + s % kAtOnce * W, sum[s]);
    }
  }
};

// Rows up to which weights are multiplied as they are read. More rows share what is expanded.
constexpr int64_t kMultipliedRows = OMNI_LANES == 16 ? 8 : 4;

#if OMNI_LANES == 8
// A part of a row of bf16 in whole numbers: x = unit * code, where unit is a power of two. The largest value has 15 bits,
// and of values above a 128th of it none is rounded; the error of others is a 128th of the largest one's own, at most.
struct FixedPart {
  float unit;   // NaN: the part has a value that is not finite
  int32_t sum;  // of the codes
};

// Make whole numbers of a row of packed x, in its place, and write its parts behind it.
static void fix_row(const LinearArgs& args, float* row) {
  auto* const codes = reinterpret_cast<int16_t*>(row);
  auto* part = reinterpret_cast<FixedPart*>(row + sums_at(args));
  const int64_t group = args.form->group;
  for (int64_t begin = 0, end; begin < args.num_in; begin = end, ++part) {
    end = min64(min64(begin + kPart, begin / group * group + group), args.num_in);
    VI most{};  // of the bits of |x|, which are ordered as the numbers are
    for (int64_t i = begin; i < end; i += W) {  // behind the last input are zeros
      const VI bits = (VI)load(row + i) & 0x7fffffff;
      most = bits > most ? bits : most;
    }
    int32_t highest = 0;
    for (int i = 0; i < W; ++i) highest = most[i] > highest ? most[i] : highest;
    const int32_t exponent = highest >> 23;
    constexpr int32_t kLeast = 27;  // exponent of the largest value; below it 1 / unit would be infinite
    const int32_t used = exponent > kLeast ? exponent : kLeast;
    float unit, per_unit;
    const int32_t unit_bits = (used - 14) << 23, per_unit_bits = (254 - (used - 14)) << 23;
    __builtin_memcpy(&unit, &unit_bits, sizeof(unit));
    __builtin_memcpy(&per_unit, &per_unit_bits, sizeof(per_unit));
    const bool is_finite = exponent < 255;
    VI sum{};
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: the lower bits of a sum with it are the nearest integer
    for (int64_t i = begin; i < end; i += W) {
      const VF value = load(row + i) * splat(is_finite ? per_unit : 0.0f) + splat(kRound);
      VI code = (VI)value - (VI)splat(kRound);
      if (!is_finite) code = VI{};
      sum += code;
      const VS narrow = __builtin_convertvector(code, VS);
      __builtin_memcpy(codes + i, &narrow, sizeof(narrow));
    }
    part->unit = is_finite ? unit : __builtin_nanf("");
    part->sum = 0;
    for (int i = 0; i < W; ++i) part->sum += sum[i];
  }
}

// Few rows in whole numbers: pairs of codes are multiplied as they are read, and a part's sum, which is exact, by its
// scales.
template <int ROWS>
struct MultiplyFixedOf {
  static constexpr int kAtOnce = ROWS <= 2 ? kVectors : kPartVectors;  // vectors of features

  template <int BITS, Scales SCALES>
  static __attribute__((noinline)) void run(const LinearArgs& args, const uint8_t* panel, const float* x,
                                            int64_t stride, float* sums) {
    typedef Reader<BITS, SCALES> R;
    const R reader(*args.form);
    constexpr int32_t kZero = BITS < 8 && !R::kOffset ? 1 << (BITS - 1) : 0;
    const int64_t num_in = (args.num_in + 7) / 8 * 8;
    const auto* const parts = reinterpret_cast<const FixedPart*>(x + sums_at(args));
    const int64_t parts_stride = stride * 4 / static_cast<int64_t>(sizeof(FixedPart));
    for (int64_t s = 0; s < ROWS * kPanel; s += W) store(sums + s, VF{});
    for (int64_t feature = 0; feature < kPanel; feature += kAtOnce * W) {
      const uint8_t* record = panel;
      const FixedPart* part = parts;
      for (int64_t first = 0; first < num_in; first += reader.block, record += reader.record_bytes)
        for (int64_t begin = 0; begin < reader.block && first + begin < num_in; begin += reader.group) {
          const int64_t end = min64(begin + reader.group, num_in - first);
          for (int64_t input = begin; input < end; ++part) {
            const int64_t stop = min64(input + kPart, end);
            VI sum[ROWS * kAtOnce];
#pragma GCC unroll 8
            for (int t = 0; t < ROWS; ++t)
#pragma GCC unroll 4
              for (int v = 0; v < kAtOnce; ++v) sum[t * kAtOnce + v] = VI{} - kZero * part[t * parts_stride].sum;
            for (; input < stop; input += 8) {
              const uint8_t* const line = record + reader.scale_bytes + input * kPanel * BITS / 8 + kCodesAhead;
              __builtin_prefetch(line, 0, 2);
              __builtin_prefetch(line + kLine, 0, 2);
              if (BITS == 8) __builtin_prefetch(line + 2 * kLine, 0, 2), __builtin_prefetch(line + 3 * kLine, 0, 2);
              typename R::Eight eight[kAtOnce];
#pragma GCC unroll 4
              for (int v = 0; v < kAtOnce; ++v) eight[v] = reader.eight(record, input, feature + v * W);
              const float* const rows = x + (first + input) / 2;
#pragma GCC unroll 4
              for (int pair = 0; pair < 4; ++pair) {
                __m256i codes[kAtOnce];
#pragma GCC unroll 4
                for (int v = 0; v < kAtOnce; ++v) codes[v] = pair_of<BITS, R::kOffset>(eight[v], pair);
#pragma GCC unroll 8
                for (int t = 0; t < ROWS; ++t) {
                  const __m256i both = (__m256i)broadcast(rows[t * stride + pair]);
#pragma GCC unroll 4
                  for (int v = 0; v < kAtOnce; ++v) sum[t * kAtOnce + v] += (VI)_mm256_madd_epi16(codes[v], both);
                }
              }
            }
#pragma GCC unroll 4
            for (int v = 0; v < kAtOnce; ++v) {
              const ScaleOf by = scale_of<SCALES>(record, begin / reader.group, feature + v * W);
#pragma GCC unroll 8
              for (int t = 0; t < ROWS; ++t) {
                const FixedPart& of = part[t * parts_stride];
                float* const to = sums + t * kPanel + feature + v * W;
                VF all = load(to) + (VF)_mm256_cvtepi32_ps((__m256i)sum[t * kAtOnce + v]) * (by.scale * broadcast(of.unit));
                if constexpr (R::kOffset) all += by.offset * broadcast(of.unit * static_cast<float>(of.sum));
                store(to, all);
              }
            }
          }
        }
    }
  }

  // The codes of two neighbouring inputs, the first in the lower halves.
  template <int BITS, bool OFFSET, typename E>
  OMNI_INLINE __m256i pair_of(const E& eight, int pair) {
    if constexpr (BITS < 8) {
      VU codes = eight.word >> (4 * pair) & 0xf000fu;
      if constexpr (BITS > 4)
        codes |= shifted(eight.above, (BITS - 4) * pair - 4) & (BITS == 5 ? 0x100010u : 0x300030u);
      return (__m256i)codes;
    } else {
      int64_t of_first, of_second;
      __builtin_memcpy(&of_first, eight.bytes + 2 * pair * kPanel, sizeof(of_first));
      __builtin_memcpy(&of_second, eight.bytes + (2 * pair + 1) * kPanel, sizeof(of_second));
      const __m128i bytes = _mm_unpacklo_epi8(_mm_cvtsi64_si128(of_first), _mm_cvtsi64_si128(of_second));
      return OFFSET ? _mm256_cvtepu8_epi16(bytes) : _mm256_cvtepi8_epi16(bytes);
    }
  }
};
#endif

#if OMNI_DPBF16
// The codes less their zero as pairs of bf16, in which all are exact.
template <int BITS, bool OFFSET>
struct PairValues {
  static constexpr int kZero = OFFSET ? 0 : 1 << (BITS - 1);
  VW low, high;  // a table of 64 values

  OMNI_MEMBER PairValues() {
    for (int i = 0; i < 32; ++i) {
      const int first = BITS == 4 ? i % 16 : i;  // the bits above the lower four are another code's
      low[i] = bits_of(static_cast<float>(first - kZero));
      high[i] = bits_of(static_cast<float>(i + 32 - kZero));
    }
  }
  OMNI_MEMBER static uint16_t bits_of(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    return static_cast<uint16_t>(bits >> 16);
  }

  // Of the neighbours 2 pair and 2 pair + 1 of the eight in these words.
  OMNI_MEMBER __m512bh of(VU words, VU above, int pair) const {
    constexpr __mmask32 kAll = 0xffffffff;
    VU codes = words >> (4 * pair);
    if constexpr (BITS > 4) {
      const VU upper = shifted(above, (BITS - 4) * pair - 4), mask = VU{} + (BITS == 5 ? 0x100010u : 0x300030u);
      codes = (VU)_mm512_ternarylogic_epi32((__m512i)mask, (__m512i)upper, (__m512i)codes, 0xca);  // mask ? :
    }
    if constexpr (BITS < 6) return (__m512bh)_mm512_maskz_permutexvar_epi16(kAll, (__m512i)codes, (__m512i)low);
    return (__m512bh)_mm512_maskz_permutex2var_epi16(kAll, (__m512i)low, (__m512i)codes, (__m512i)high);
  }
};

constexpr int64_t kPieceInputs = 512;  // of which the codes of a panel stay in L1

// Rows up to which pairs are multiplied; more are faster with a weight in bf16 on tiles, or if its groups are small.
OMNI_INLINE bool are_paired(const LinearArgs& args, int64_t num_rows) {
#if OMNI_TILES
  return num_rows <= 4;
#else
  return num_rows <= kBlockRows || args.form->group >= 32;
#endif
}

// Sum the parts of a row of packed x.
OMNI_INLINE void sum_parts(const LinearArgs& args, BF16* row) {
  auto* sums = reinterpret_cast<float*>(row + sums_at(args));
  for (int64_t begin = 0, end; begin < args.num_in; begin = end) {
    end = min64(min64(begin + kPart, begin / args.form->group * args.form->group + args.form->group), args.num_in);
    float sum = 0;
    for (int64_t i = begin; i < end; ++i) sum += to_float(row[i]);
    *sums++ = sum;
  }
}

// Some inputs of rows of bf16 and of one or more panels of codes.
struct PairsPiece {
  const uint8_t* panel;
  int64_t panel_bytes;  // distance of panels
  int64_t ahead;        // bytes from the codes to those that are prefetched meanwhile
  const BF16* x;        // packed rows
  int64_t stride;       // of x
  int64_t first_part, last_part;
  float* sums;          // [panels, sums_rows, kPanel]
  int64_t sums_rows;
  bool goes_on;         // sums has those of the parts before
};

// Rows of bf16: codes are multiplied as they are read, in pairs, and the sums of a part by its scale. One row of one
// panel has two sums, which would wait for themselves: few rows take several panels at once.
template <int ROWS, int PANELS>
struct MultiplyPairsOf {
  static constexpr int kSums = PANELS * ROWS * kVectors;

  template <int BITS, Scales SCALES>
  static __attribute__((noinline)) void run(const LinearArgs& args, const PairsPiece& piece) {
    const Reader<BITS, SCALES> reader(*args.form);
    constexpr bool kOffset = Reader<BITS, SCALES>::kOffset;
    const PairValues<BITS < 8 ? BITS : 4, kOffset> values;
    const int64_t parts = parts_of_group(*args.form), num_in = (args.num_in + 7) / 8 * 8, stride = piece.stride;
    const auto* const sums_of_x = reinterpret_cast<const float*>(piece.x + sums_at(args));
    if (!piece.goes_on)
      for (int p = 0; p < PANELS; ++p)
        for (int64_t s = 0; s < ROWS * kPanel; s += W) store(piece.sums + p * piece.sums_rows * kPanel + s, VF{});
    for (int64_t part = piece.first_part; part < piece.last_part; ++part) {
      const int64_t group = part / parts, begin = group * reader.group + part % parts * kPart;
      const int64_t end = min64(min64(begin + kPart, (group + 1) * reader.group), num_in);
      const int64_t block = begin / reader.block, first = begin - block * reader.block;
      const uint8_t* const record = piece.panel + block * reader.record_bytes;
      __m512 sum[kSums] = {};
      const BF16* x = piece.x + begin;
      for (int64_t input = first, last = first + end - begin; input < last; input += 8, x += 8) {
        typename Reader<BITS, SCALES>::Eight eight[PANELS * kVectors];
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p) {
          const uint8_t* const line = record + p * piece.panel_bytes + reader.scale_bytes + input * kPanel * BITS / 8 + piece.ahead;
          __builtin_prefetch(line, 0, 2);
          __builtin_prefetch(line + kLine, 0, 2);
          if (BITS == 8) __builtin_prefetch(line + 2 * kLine, 0, 2), __builtin_prefetch(line + 3 * kLine, 0, 2);
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v)
            eight[p * kVectors + v] = reader.eight(record + p * piece.panel_bytes, input, v * W);
        }
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; ++pair) {
          __m512bh codes[PANELS * kVectors];
#pragma GCC unroll 8
          for (int v = 0; v < PANELS * kVectors; ++v) codes[v] = pair_of<BITS, kOffset>(values, eight[v], pair);
#pragma GCC unroll 16
          for (int t = 0; t < ROWS; ++t) {
            int32_t both;
            __builtin_memcpy(&both, x + t * stride + 2 * pair, sizeof(both));
            const __m512bh row = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 2
              for (int v = 0; v < kVectors; ++v) {
                __m512& to = sum[(p * ROWS + t) * kVectors + v];
                to = _mm512_dpbf16_ps(to, codes[p * kVectors + v], row);
              }
          }
        }
      }
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const ScaleOf by = scale_of<SCALES>(record + p * piece.panel_bytes, first / reader.group, v * W);
#pragma GCC unroll 16
          for (int t = 0; t < ROWS; ++t) {
            float* const to = piece.sums + (p * piece.sums_rows + t) * kPanel + v * W;
            VF all = load(to) + (VF)sum[(p * ROWS + t) * kVectors + v] * by.scale;
            if constexpr (kOffset) all += broadcast(sums_of_x[t * stride / 2 + part]) * by.offset;
            store(to, all);
          }
        }
    }
  }

  template <int BITS, bool OFFSET, typename V, typename E>
  OMNI_INLINE __m512bh pair_of(const V& values, const E& eight, int pair) {
    if constexpr (BITS < 8) {
      return values.of(eight.word, eight.above, pair);
    } else {
      const uint8_t* const bytes = eight.bytes + 2 * pair * kPanel;
      return pairs_of(bytes_of<OFFSET>(bytes), bytes_of<OFFSET>(bytes + kPanel));
    }
  }
};
#endif

// Calls `Does::run<bits, scales>` of a form.
template <typename Does, typename... Args>
OMNI_INLINE void of_form(const QuantForm& form, const Args&... args) {
#define OMNI_FORM(BITS, SCALES) \
  if (form.bits == BITS && form.scales == Scales::SCALES) return Does::template run<BITS, Scales::SCALES>(args...)
  OMNI_FORM(4, f16);
  OMNI_FORM(5, f16);
  OMNI_FORM(8, f16);
  OMNI_FORM(4, f32);
  OMNI_FORM(8, f32);
  OMNI_FORM(4, affine16);
  OMNI_FORM(5, affine16);
  OMNI_FORM(4, affine32);
  OMNI_FORM(8, affine32);
  OMNI_FORM(4, k);
  OMNI_FORM(5, k);
  OMNI_FORM(6, k_signed);
#undef OMNI_FORM
}

// Inputs [begin, end) of a panel of codes; begin is a multiple of kExpanded. Inputs up to a multiple of 32 are zero.
template <typename To>
static void expand(const LinearArgs& args, const uint8_t* panel, int64_t begin, int64_t end,
                   typename To::Weight* to) {
  const QuantForm& form = *args.form;
  const int64_t all = min64(end, (args.num_in + 7) / 8 * 8);
  for (int64_t i = 0, bytes = (all - begin) * kPanel * form.bits / 8; i < bytes; i += kLine)
    __builtin_prefetch(panel + begin * kPanel * form.bits / 8 + kCodesAhead + i, 0, 2);
  of_form<Expand<To>>(form, form, panel, begin, all, to);
  if (all < end) __builtin_memset(to + (all - begin) * kPanel, 0, static_cast<size_t>((end - all) * kPanel) * sizeof(*to));
}

// Features of at most kMultipliedRows rows of fp32.
static void few_rows_of_codes(const LinearArgs& args, const float* x, float* sums, int64_t begin, int64_t end,
                              int64_t first_row, int64_t num_rows) {
  const int64_t stride = x_stride<float>(args), size = panel_bytes(args.num_in, *args.form);
  for (int64_t feature = begin; feature < end; feature += kPanel) {
    claim_rows(args, feature, first_row, num_rows);
    const uint8_t* const codes = static_cast<const uint8_t*>(args.weight) + feature / kPanel * size;
    const auto multiply = [&](auto does) { of_form<decltype(does)>(*args.form, args, codes, x, stride, sums); };
    // Rows up to a power of two, which are in packed x, though they may be nobody's.
    if (num_rows == 1)
      multiply(MultiplyOf<1>());
    else if (num_rows == 2)
      multiply(MultiplyOf<2>());
    else if (num_rows <= 4)
      multiply(MultiplyOf<4>());
    else if constexpr (kMultipliedRows == 8)
      multiply(MultiplyOf<8>());
    write_sums(args, sums, feature, first_row, num_rows);
  }
}

#if OMNI_LANES == 8
// Features of few rows of bf16, which are in whole numbers.
static void fixed_rows_of_codes(const LinearArgs& args, const float* x, float* sums, int64_t begin, int64_t end,
                                int64_t first_row, int64_t num_rows) {
  const int64_t stride = x_stride<float>(args), size = panel_bytes(args.num_in, *args.form);
  for (int64_t feature = begin; feature < end; feature += kPanel) {
    claim_rows(args, feature, first_row, num_rows);
    const uint8_t* const codes = static_cast<const uint8_t*>(args.weight) + feature / kPanel * size;
    for (int64_t row = 0; row < num_rows; row += 4) {
      const auto multiply = [&](auto does) {
        of_form<decltype(does)>(*args.form, args, codes, x + row * stride, stride, sums + row * kPanel);
      };
      // Rows up to a power of two, which are in packed x, though they may be nobody's.
      if (num_rows - row == 1)
        multiply(MultiplyFixedOf<1>());
      else if (num_rows - row == 2)
        multiply(MultiplyFixedOf<2>());
      else
        multiply(MultiplyFixedOf<4>());
    }
    write_sums(args, sums, feature, first_row, num_rows);
  }
}
#endif

#if OMNI_DPBF16
// Rows of a block of pairs: up to kBlockRows, or more that are in packed x, though they may be nobody's.
OMNI_INLINE void multiply_pairs(const LinearArgs& args, const PairsPiece& piece, int64_t rows, int64_t panels) {
  const auto multiply = [&](auto does) { of_form<decltype(does)>(*args.form, args, piece); };
  if (rows == 1 && panels == 4) return multiply(MultiplyPairsOf<1, 4>());
  if (rows == 1 && panels == 2) return multiply(MultiplyPairsOf<1, 2>());
  if (rows == 1) return multiply(MultiplyPairsOf<1, 1>());
  if (rows == 2 && panels == 2) return multiply(MultiplyPairsOf<2, 2>());
  if (rows == 2) return multiply(MultiplyPairsOf<2, 1>());
  if (rows <= 4) return multiply(MultiplyPairsOf<4, 1>());
  if (rows <= 8) return multiply(MultiplyPairsOf<8, 1>());
  multiply(MultiplyPairsOf<kBlockRows, 1>());
}

// Features of rows of bf16. Of more rows than a block has, the codes of a piece of the inputs stay in L1.
static void pairs_of_codes(const LinearArgs& args, const BF16* x, float* sums, int64_t begin, int64_t end,
                           int64_t first_row, int64_t num_rows) {
  const int64_t parts = num_parts(args), size = panel_bytes(args.num_in, *args.form);
  const bool is_block = num_rows <= kBlockRows;
  const int64_t piece_parts = is_block ? max64(parts, 1) : max64(kPieceInputs / min64(args.form->group, kPart), 1);
  const int64_t most_panels = num_rows == 1 ? 4 : num_rows == 2 ? 2 : 1;
  PairsPiece piece;
  piece.panel_bytes = size;
  piece.ahead = is_block ? kCodesAhead : size;
  piece.stride = x_stride<BF16>(args);
  piece.sums_rows = (num_rows + kTileOfRows - 1) / kTileOfRows * kTileOfRows;
  for (int64_t part = 0; part == 0 || part < parts; part += piece_parts) {  // without inputs, too
    piece.first_part = part;
    piece.last_part = min64(part + piece_parts, parts);
    piece.goes_on = part > 0;
    for (int64_t feature = begin, panels; feature < end; feature += panels * kPanel) {
      const int64_t left = (end - feature + kPanel - 1) / kPanel;
      panels = most_panels;
      while (panels > left) panels /= 2;
      piece.panel = static_cast<const uint8_t*>(args.weight) + feature / kPanel * size;
      for (int64_t row = 0; row < num_rows; row += kBlockRows) {
        const int64_t rows = min64(kBlockRows, num_rows - row);
        piece.x = x + row * piece.stride;
        piece.sums = sums + (feature - begin) * piece.sums_rows + row * kPanel;
        const bool is_last = piece.last_part == parts;
        for (int64_t p = 0; is_last && p < panels; ++p) claim_rows(args, feature + p * kPanel, first_row + row, rows);
        multiply_pairs(args, piece, rows, panels);
        for (int64_t p = 0; is_last && p < panels; ++p)
          write_sums(args, piece.sums + p * piece.sums_rows * kPanel, feature + p * kPanel, first_row + row, rows);
      }
    }
  }
}
#endif

// Inputs and features of codes times rows: a piece of a panel is expanded, then multiplied as if it were dense. P is
// the product of the dense weight.
template <typename P, typename To>
static void quantized_features(const LinearArgs& args, const typename P::Packed* x, float* sums, int64_t begin, int64_t end,
                          int64_t first_row, int64_t last_row) {
  alignas(64) typename P::Weight dense[kExpanded * kPanel];
  const int64_t num_rows = last_row - first_row, size = panel_bytes(args.num_in, *args.form);
  const auto* const weight = static_cast<const uint8_t*>(args.weight);
  Panel<P> panel;
  panel.piece.stride = x_stride<typename P::Packed>(args);
  panel.piece.panel = panel.next = dense;
  panel.first_row = first_row;
  panel.last_row = last_row;
  const auto compute = [&](int64_t feature, int64_t input) {
    const int64_t stop = min64(input + kExpanded, args.num_in);
    panel.feature = feature;
    panel.piece.x = x + input;
    panel.piece.num_steps = (stop - input + P::kStep - 1) / P::kStep;
    panel.piece.goes_on = input > 0;
    panel.is_last = stop == args.num_in;
    panel.piece.sums = sums + (feature - begin) * num_rows;
    expand<To>(args, weight + feature / kPanel * size, input, (stop + 7) / 8 * 8, dense);
    rows_of<P>(args, panel);
  };
  if (num_rows <= kBlockRows) {  // a panel is read in the order in which it lies
    for (int64_t feature = begin; feature < end; feature += kPanel)
      for (int64_t input = 0; input == 0 || input < args.num_in; input += kExpanded) compute(feature, input);
  } else {  // a piece of the rows stays in L2
    for (int64_t input = 0; input == 0 || input < args.num_in; input += kExpanded)
      for (int64_t feature = begin; feature < end; feature += kPanel) compute(feature, input);
  }
}

#if OMNI_TILES
// The same on tiles: as tile_features, whose sums these are.
static void tile_quantized_features(const LinearArgs& args, const BF16* x, float* sums, int64_t begin, int64_t end,
                               int64_t first_row, int64_t last_row) {
  const int64_t num_rows = last_row - first_row, padded_rows = (num_rows + kTileRows - 1) / kTileRows * kTileRows;
  const int64_t size = panel_bytes(args.num_in, *args.form);
  const auto* const weight = static_cast<const uint8_t*>(args.weight);
  alignas(64) BF16 dense[kExpanded * kPanel];
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.shape(tile, kTileRows, kTileRowBytes);
  tile_configure(config);
  TilePiece piece;
  piece.x_bytes = x_stride<BF16>(args) * 2;
  piece.panel = dense;
  piece.ahead = reinterpret_cast<const char*>(dense);
  piece.ahead_step = 0;
  const auto compute = [&](int64_t feature, int64_t input) {
    const int64_t stop = min64(input + kExpanded, args.num_in);
    piece.num_steps = (stop - input + kTileInputs - 1) / kTileInputs;
    piece.goes_on = input > 0;
    expand<ToPairs>(args, weight + feature / kPanel * size, input, input + piece.num_steps * kTileInputs, dense);
    for (int64_t row = 0; row < num_rows; row += 2 * kTileRows) {
      const int64_t rows = min64(2 * kTileRows, num_rows - row);
      piece.x = x + row * (piece.x_bytes / 2) + input;
      piece.sums = sums + (feature - begin) * padded_rows + row * kPanel;
      rows > kTileRows ? tile_block<true>(piece) : tile_block<false>(piece);
      if (stop == args.num_in) write_rows<BF16>(args, piece.sums, feature, first_row + row, rows);
    }
  };
  if (num_rows <= kFewRows) {
    for (int64_t feature = begin; feature < end; feature += kPanel) {
      claim_rows(args, feature, first_row, num_rows);
      for (int64_t input = 0; input == 0 || input < args.num_in; input += kExpanded) compute(feature, input);
    }
  } else {
    for (int64_t input = 0; input == 0 || input < args.num_in; input += kExpanded)
      for (int64_t feature = begin; feature < end; feature += kPanel) compute(feature, input);
  }
  tile_release();
}
#endif
