// Rows that are rounded to int8 times a weight of int8; included by linear_kernel.inl. Sums are exact in int32, in whatever
// order they are made: every instruction set gives the same bits. They lie in vectors and buffers of floats, as bits.
//
// VPDPBUSD and the tiles multiply unsigned bytes by signed ones: a row has its codes plus 128, and 128 times the sum of
// a feature's codes is taken off in the end. Other instruction sets multiply pairs of int16.

#if OMNI_VNNI
typedef uint8_t XCode;
constexpr int32_t kXOffset = 128;
#else
typedef int16_t XCode;
constexpr int32_t kXOffset = 0;
#endif

// A row of codes of x: of inputs up to a multiple of 64, and behind them the row's scale.
OMNI_INLINE int64_t int8_inputs(int64_t num_in) { return (num_in + kInt8Inputs - 1) / kInt8Inputs * kInt8Inputs; }

OMNI_INLINE int64_t int8_row_bytes(int64_t num_in) {
  return packed_row_bytes(int8_inputs(num_in) * static_cast<int64_t>(sizeof(XCode)) + 4, 1);
}

// -- rounding of rows ------------------------------------------------------------------------------------------------

// Codes of W inputs. Pairs of int16 are (0, 2) and (1, 3) of each four.
OMNI_INLINE void put_codes(XCode* to, VF values, VF scale) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: the lower bits of a sum with it are the nearest integer
  const VF lowest = splat(-128.0f), highest = splat(127.0f);
  VF value = values / scale;
  value = value > lowest ? value : lowest;  // of NaN, too
  value = value < highest ? value : highest;
  const VI codes = (VI)(value + splat(kRound)) - (VI)splat(kRound) + kXOffset;
#if OMNI_VNNI
  const VC bytes = __builtin_convertvector(codes, VC);
  __builtin_memcpy(to, &bytes, sizeof(bytes));
#else
  for (int i = 0; i < W; ++i) to[i / 4 * 4 + i % 2 * 2 + i / 2 % 2] = static_cast<int16_t>(codes[i]);
#endif
}

OMNI_INLINE VF load_some(const float* x, int64_t count) { return load_first(x, count); }
template <typename X>
OMNI_INLINE VF load_some(const X* x, int64_t count) {
  if (count >= W) return load(x);
  VF v{};
  for (int64_t i = 0; i < count; ++i) v[i] = to_float(x[i]);
  return v;
}

template <typename X>
static void int8_pack_row(const LinearArgs& args, const X* x, int64_t row, XCode* to) {
  const int64_t num_in = args.num_in, all = int8_inputs(num_in);
  VI most{};  // of the bits of |x|, which are ordered as the numbers are, with NaN above all
  for (int64_t i = 0; i < num_in; i += W) {
    const VI bits = (VI)load_some(x + i, num_in - i) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  int32_t highest = 0;
  for (int i = 0; i < W; ++i) highest = most[i] > highest ? most[i] : highest;
  constexpr int32_t kInfinity = 0x7f800000;
  float scale;
  __builtin_memcpy(&scale, &highest, sizeof(scale));
  const Int8Form& form = *args.int8;
  const bool is_fixed = form.x_scale != nullptr && !form.is_of_rows;
  scale = form.x_scale == nullptr ? scale / 127.5f : form.x_scale[form.is_of_rows ? row : 0];
  // A row of zeros; what a row with NaN makes is NaN, and with infinity too, if that would be the scale.
  float by = scale;
  if (scale == 0.0f) by = 1.0f;
  if (highest > kInfinity || (highest == kInfinity && !is_fixed)) scale = __builtin_nanf("");
  for (int64_t i = 0; i < num_in; i += W) put_codes(to + i, load_some(x + i, num_in - i), splat(by));
  for (int64_t i = (num_in + W - 1) / W * W; i < all; ++i) to[i] = kXOffset;
  __builtin_memcpy(to + all, &scale, sizeof(scale));
}

static void int8_pack(const LinearArgs& args, void* packed_x, int64_t begin, int64_t end) {
  const int64_t bytes = int8_row_bytes(args.num_in);
  for (int64_t t = begin; t < end; ++t) {
    XCode* const to = reinterpret_cast<XCode*>(static_cast<char*>(packed_x) + (t - begin) * bytes);
    const int64_t first = t * args.x_stride;
    switch (args.dtype) {
      case DType::f32: int8_pack_row(args, static_cast<const float*>(args.x) + first, t, to); break;
      case DType::f16: int8_pack_row(args, static_cast<const F16*>(args.x) + first, t, to); break;
      default: int8_pack_row(args, static_cast<const BF16*>(args.x) + first, t, to);
    }
  }
}

// -- products --------------------------------------------------------------------------------------------------------

// Of four inputs.
struct Int8Products {
  typedef int8_t Weight;
  typedef XCode Packed;
  static constexpr int64_t kStep = 4;

#if OMNI_VNNI
  template <int ROWS, int VECTORS>
  OMNI_INLINE void add(const int8_t* w, const XCode* x, int64_t stride, VF* sum) {
    __m512i v[VECTORS];
#pragma GCC unroll 2
    for (int i = 0; i < VECTORS; ++i) __builtin_memcpy(&v[i], w + i * 4 * W, sizeof(v[i]));
#pragma GCC unroll 16
    for (int t = 0; t < ROWS; ++t) {
      int32_t four;
      __builtin_memcpy(&four, x + t * stride, sizeof(four));
      const __m512i row = _mm512_set1_epi32(four);
#pragma GCC unroll 2
      for (int i = 0; i < VECTORS; ++i)
        sum[t * VECTORS + i] = (VF)_mm512_dpbusd_epi32((__m512i)sum[t * VECTORS + i], row, v[i]);
    }
  }
#else
  template <int ROWS, int VECTORS>
  OMNI_INLINE void add(const int8_t* w, const XCode* x, int64_t stride, VF* sum) {
    VI v[VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; ++i) v[i] = pairs(load(reinterpret_cast<const int32_t*>(w + i * 4 * W)), 0);
    add_pairs<ROWS, VECTORS>(v, x, stride, sum);
    if (OMNI_LANES == 8) asm volatile("" : : : "memory");  // 16 registers do not hold both halves beside the sums
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; ++i) v[i] = pairs(load(reinterpret_cast<const int32_t*>(w + i * 4 * W)), 1);
    add_pairs<ROWS, VECTORS>(v, x + 2, stride, sum);
  }

  template <int ROWS, int VECTORS>
  OMNI_INLINE void add_pairs(const VI* v, const XCode* x, int64_t stride, VF* sum) {
#pragma GCC unroll 16
    for (int t = 0; t < ROWS; ++t) {
      int32_t pair;
      __builtin_memcpy(&pair, x + t * stride, sizeof(pair));
#pragma GCC unroll 8
      for (int i = 0; i < VECTORS; ++i)
        sum[t * VECTORS + i] = (VF)((VI)sum[t * VECTORS + i] + products(v[i], VI{} + pair));
    }
  }

  // Of the four bytes of a lane the even or the odd ones, as int16.
  OMNI_INLINE VI pairs(VI fours, int odd) {
    typedef int16_t VP __attribute__((vector_size(OMNI_LANES * 4)));
    const VP halves = (VP)fours;
    return (VI)((odd ? halves : halves << 8) >> 8);
  }

  // Sums of two products of int16.
  OMNI_INLINE VI products(VI a, VI b) {
#if OMNI_LANES == 16
    return (VI)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif OMNI_LANES == 8
    return (VI)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
  }
#endif
};

// Make the numbers of some rows of integer sums, in place, and write them. `rows` are the packed rows of x.
static void int8_write(const LinearArgs& args, const char* header, const char* rows, float* sums, int64_t feature,
                       int64_t row, int64_t num_rows) {
  const auto* const scales = reinterpret_cast<const float*>(header);
  const auto* const totals = reinterpret_cast<const int32_t*>(header) + kPanel;
  const int64_t bytes = int8_row_bytes(args.num_in);
  const int64_t at = int8_inputs(args.num_in) * static_cast<int64_t>(sizeof(XCode));
  for (int64_t t = 0; t < num_rows; ++t) {
    float x_scale;
    __builtin_memcpy(&x_scale, rows + t * bytes + at, sizeof(x_scale));
    for (int64_t f = 0; f < kPanel; f += W) {
      float* const to = sums + t * kPanel + f;
      const VI sum = (VI)((VU)load(to) - static_cast<uint32_t>(kXOffset) * (VU)load(totals + f));
      store(to, in_register(__builtin_convertvector(sum, VF) * splat(x_scale) * load(scales + f)));
    }
  }
  asm volatile("" : : : "memory");  // the last product is rounded before a bias is added
  write_sums(args, sums, feature, row, num_rows);
}

#if !OMNI_TILES
static void int8_features(const LinearArgs& args, const void* packed_x, float* sums, int64_t begin, int64_t end,
                          int64_t first_row, int64_t last_row) {
  typedef Int8Products P;
  const int64_t num_rows = last_row - first_row, num_steps = int8_inputs(args.num_in) / P::kStep;
  const int64_t piece_steps =
      num_rows <= kBlockRows ? max64(num_steps, 1) : kPieceBytes / static_cast<int64_t>(sizeof(XCode)) / P::kStep;
  const int64_t size = int8_panel_bytes(args.num_in), x_bytes = int8_row_bytes(args.num_in);
  const auto* const weight = static_cast<const char*>(args.weight);
  const auto codes = [&](int64_t feature, int64_t step) {
    return reinterpret_cast<const int8_t*>(weight + feature / kPanel * size + kInt8Header) + step * P::kStep * kPanel;
  };
  Panel<P> panel;
  panel.piece.stride = x_bytes / static_cast<int64_t>(sizeof(XCode));
  panel.first_row = first_row;
  panel.last_row = last_row;
  for (int64_t step = 0; step == 0 || step < num_steps; step += piece_steps) {  // without inputs, too
    panel.piece.x = static_cast<const XCode*>(packed_x) + step * P::kStep;
    panel.piece.num_steps = min64(piece_steps, num_steps - step);
    panel.piece.goes_on = step > 0;
    panel.is_last = step + piece_steps >= num_steps;
    for (panel.feature = begin; panel.feature < end; panel.feature += kPanel) {
      panel.piece.panel = codes(panel.feature, step);
      if (panel.feature + kPanel < end)
        panel.next = codes(panel.feature + kPanel, step);
      else if (!panel.is_last)
        panel.next = codes(begin, step + piece_steps);
      else
        panel.next = codes(end < args.num_out ? end : 0, 0);
      panel.piece.sums = sums + (panel.feature - begin) * num_rows;
      rows_of<P>(args, panel, [&](float* some, int64_t row, int64_t count) {
        const char* const rows = static_cast<const char*>(packed_x) + (row - first_row) * x_bytes;
        int8_write(args, weight + panel.feature / kPanel * size, rows, some, panel.feature, row, count);
      });
    }
  }
}
#else
// The same on tiles, in the manner of tile_features. Inputs are whole steps.
static void tile_int8_features(const LinearArgs& args, const void* packed_x, float* sums, int64_t begin, int64_t end,
                               int64_t first_row, int64_t last_row) {
  const int64_t num_rows = last_row - first_row, padded_rows = (num_rows + kTileRows - 1) / kTileRows * kTileRows;
  const int64_t num_steps = int8_inputs(args.num_in) / kInt8Inputs, size = int8_panel_bytes(args.num_in);
  const int64_t x_bytes = int8_row_bytes(args.num_in);
  constexpr int64_t kStepBytes = kInt8Inputs * kPanel;
  const auto* const weight = static_cast<const char*>(args.weight);
  const auto* const x = static_cast<const char*>(packed_x);
  const auto codes = [&](int64_t feature, int64_t step) {
    return weight + feature / kPanel * size + kInt8Header + step * kStepBytes;
  };
  const auto write = [&](float* some, int64_t feature, int64_t row, int64_t count) {
    int8_write(args, weight + feature / kPanel * size, x + row * x_bytes, some, feature, first_row + row, count);
  };
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.shape(tile, kTileRows, kTileRowBytes);
  tile_configure(config);
  TilePiece piece;
  piece.x_bytes = x_bytes;
  if (num_rows <= kTileRows) {  // bound by memory: panels in pairs, and a last one alone
    piece.x = x;
    piece.num_steps = num_steps;
    piece.ahead_step = kStepBytes;
    piece.sums = sums;
    piece.goes_on = false;
    for (int64_t feature = begin; feature < end; feature += 2 * kPanel) {
      claim_rows(args, feature, first_row, num_rows);  // of the second panel brings nothing
      piece.panel = codes(feature, 0);
      piece.ahead = codes(feature, 0) + kTileAhead;
      const bool paired = feature + kPanel < end;
      paired ? tile_pair<Int8Step>(piece, size) : tile_block<false, Int8Step>(piece);
      write(sums, feature, 0, num_rows);
      if (paired) write(sums + kTileRows * kPanel, feature + kPanel, 0, num_rows);
    }
    return tile_release();
  }
  const int64_t num_blocks = (num_rows + 2 * kTileRows - 1) / (2 * kTileRows);
  const int64_t num_pieces = max64(1, (num_steps + kTilePieceSteps - 1) / kTilePieceSteps);
  piece.ahead_step = kStepBytes / num_blocks / kLine * kLine;
  for (int64_t p = 0; p < num_pieces; ++p) {
    const int64_t step = num_steps * p / num_pieces;
    piece.num_steps = num_steps * (p + 1) / num_pieces - step;
    piece.goes_on = step > 0;
    for (int64_t feature = begin; feature < end; feature += kPanel) {
      const char* const next = feature + kPanel < end ? codes(feature + kPanel, step)
                               : p + 1 < num_pieces   ? codes(begin, step + piece.num_steps)
                                                      : codes(end < args.num_out ? end : 0, 0);
      piece.panel = codes(feature, step);
      for (int64_t b = 0; b < num_blocks; ++b) {
        const int64_t row = b * 2 * kTileRows, rows = min64(2 * kTileRows, num_rows - row);
        piece.x = x + row * x_bytes + step * kInt8Inputs;
        piece.ahead = next + piece.num_steps * piece.ahead_step * b;
        piece.sums = sums + (feature - begin) * padded_rows + row * kPanel;
        rows > kTileRows ? tile_block<true, Int8Step>(piece) : tile_block<false, Int8Step>(piece);
        if (p + 1 == num_pieces) write(piece.sums, feature, row, rows);
      }
    }
  }
  tile_release();
}
#endif
