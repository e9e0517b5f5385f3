// Prefill by tiles: a tile of query tokens over all the keys that they see. Part of attention_amx.cpp.
//
// A "row" is (query i, head g of the group), i * G + g; kTileRows of them, a column, are the lanes of a vector and the
// columns of a B tile. Scores [key][row]: K's rows are the A tile where they lie, Q^T is packed once. The softmax runs
// down the lanes, and two keys' weights, zipped, are a row of the B tile for the transposed output [element][row]:
// A is V^T, packed once per kPrefillTile keys for all rows. Weights are [hi; lo] here too, since the tests' tolerance
// is one rounding of the output.

// 2 x 2 tiles of C share the A and B tiles, so that a product costs one load.
template <int kM, int kN>
constexpr int c_tile() {
  return 2 * kM + kN;
}
constexpr int kA0 = 4, kA1 = 5, kB0 = 6, kB1 = 7;

TileConfig prefill_config() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.shape(tile, kTileRows, kTileRowBytes);
  return config;
}

// The kNumA x kNumB products of the A and B tiles, added to C.
template <int kNumA, int kNumB>
OMNI_INLINE void multiply_tiles() {
  tile_dpbf16<c_tile<0, 0>(), kA0, kB0>();
  if (kNumB > 1) tile_dpbf16<c_tile<0, 1>(), kA0, kB1>();
  if (kNumA > 1) tile_dpbf16<c_tile<1, 0>(), kA1, kB0>();
  if (kNumA > 1 && kNumB > 1) tile_dpbf16<c_tile<1, 1>(), kA1, kB1>();
}

// scores[key][row] of two groups of keys for kColumns columns.
template <int kColumns>
static void score_step(const PrefillTile& tile, const BF16* const* groups, const float* query, float* scores) {
  const int64_t stride = tile.head_size * static_cast<int64_t>(sizeof(BF16));
  const int64_t next_query = tile.score_tiles * kTileFloats, next_scores = kPrefillTile * W;
  tile_zero<c_tile<0, 0>()>();
  tile_zero<c_tile<1, 0>()>();
  if (kColumns > 1) tile_zero<c_tile<0, 1>()>();
  if (kColumns > 1) tile_zero<c_tile<1, 1>()>();
  for (int64_t i = 0; i < tile.score_tiles; ++i) {
    const int64_t h = tile_dim<32>(i, tile.head_size);
    tile_load<kB0>(query + i * kTileFloats, kTileRowBytes);
    if (kColumns > 1) tile_load<kB1>(query + next_query + i * kTileFloats, kTileRowBytes);
    tile_load<kA0>(groups[0] + h, stride);
    tile_load<kA1>(groups[1] + h, stride);
    multiply_tiles<2, kColumns>();
  }
  tile_store<c_tile<0, 0>()>(scores, kTileRowBytes);
  tile_store<c_tile<1, 0>()>(scores + kTileFloats, kTileRowBytes);
  if (kColumns > 1) tile_store<c_tile<0, 1>()>(scores + next_scores, kTileRowBytes);
  if (kColumns > 1) tile_store<c_tile<1, 1>()>(scores + next_scores + kTileFloats, kTileRowBytes);
}

// Tiles [i, i + kNumA) of the output of kColumns columns += V^T weights.
template <int kNumA, int kColumns>
static void add_values(const PrefillTile& tile, int64_t steps, int64_t i, const float* weights, float* output) {
  const int64_t next_weights = kPrefillTile * W, next_output = tile.value_tiles * kTileFloats;
  output += i * kTileFloats;
  tile_load<c_tile<0, 0>()>(output, kTileRowBytes);
  if (kNumA > 1) tile_load<c_tile<1, 0>()>(output + kTileFloats, kTileRowBytes);
  if (kColumns > 1) tile_load<c_tile<0, 1>()>(output + next_output, kTileRowBytes);
  if (kNumA > 1 && kColumns > 1) tile_load<c_tile<1, 1>()>(output + next_output + kTileFloats, kTileRowBytes);
  for (int64_t step = 0; step < steps; ++step) {
    const float* const values = tile.values + (step * tile.value_tiles + i) * kTileFloats;
    tile_load<kA0>(values, kTileRowBytes);
    if (kNumA > 1) tile_load<kA1>(values + kTileFloats, kTileRowBytes);
    for (int64_t part = 0; part < 2; ++part) {
      const float* const pairs = weights + (2 * step + part) * kTileFloats;
      tile_load<kB0>(pairs, kTileRowBytes);
      if (kColumns > 1) tile_load<kB1>(pairs + next_weights, kTileRowBytes);
      multiply_tiles<kNumA, kColumns>();
    }
  }
  tile_store<c_tile<0, 0>()>(output, kTileRowBytes);
  if (kNumA > 1) tile_store<c_tile<1, 0>()>(output + kTileFloats, kTileRowBytes);
  if (kColumns > 1) tile_store<c_tile<0, 1>()>(output + next_output, kTileRowBytes);
  if (kNumA > 1 && kColumns > 1) tile_store<c_tile<1, 1>()>(output + next_output + kTileFloats, kTileRowBytes);
}

// Elements of a row as bf16 in the lower half of each lane; those that `elements` leaves out are not read, and 0.
OMNI_INLINE VI bits_of_row(const BF16* row, __mmask16 elements) {
  return (VI)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(elements, row));
}
OMNI_INLINE VI bits_of_row(const I8* row, __mmask16 elements) {
  constexpr __mmask16 kAll = 0xffff;
  const __m512i codes = _mm512_maskz_cvtepi8_epi32(kAll, _mm_maskz_loadu_epi8(elements, row));
  return (VI)_mm512_maskz_srli_epi32(kAll, (__m512i)_mm512_maskz_cvtepi32_ps(kAll, codes), 16);
}

// Rows of K and V of the keys [first, first + kPrefillTile), of which the chunk sees [low, high).
template <typename T>
struct KeyRows {
  static constexpr bool kScaled = __is_same(T, I8);
  const BF16* groups[kPrefillTile / kTileRows];  // of K
  const T* v[kPrefillTile];                      // nullptr: not seen
  float k_scales[kScaled ? kPrefillTile : 1];    // 0: not seen
  float v_scales[kScaled ? kPrefillTile : 1];

  KeyRows(const PagedKV& kv, const int32_t* block_table, int64_t kv_head, int64_t first, int64_t low, int64_t high,
          BF16* copies) {
    for (int64_t g = 0; g < kPrefillTile / kTileRows; ++g, copies += kTileRows * kv.head_size) {
      const int64_t begin = first + g * kTileRows, seen = max64(begin, low), stop = min64(begin + kTileRows, high);
      for (int64_t t = 0; t < kTileRows; ++t) v[g * kTileRows + t] = nullptr;
      if (kScaled)
        for (int64_t t = 0; t < kTileRows; ++t) k_scales[g * kTileRows + t] = v_scales[g * kTileRows + t] = 0.0f;
      groups[g] = copies;
      const auto row_bytes = static_cast<size_t>(kv.head_size) * sizeof(BF16);
      if (seen >= stop) {
        __builtin_memset(copies, 0, kTileRows * row_bytes);
        continue;
      }
      const BlockRef ref(block_table[begin / kv.block_size]);
      const int64_t offset = ref.block * kv.block_stride + kv_head * kv.head_stride, in_block = begin % kv.block_size;
      const int64_t row = ref.reversed ? kv.block_size - 1 - in_block : in_block;
      const int64_t way = ref.reversed ? -1 : 1, step = way * kv.head_size;
      const auto* const k_rows = reinterpret_cast<const T*>(kv.k + offset) + row * kv.head_size;
      const auto* const v_rows = reinterpret_cast<const T*>(kv.v + offset) + row * kv.head_size;
      for (int64_t t = seen; t < stop; ++t) v[t - first] = v_rows + (t - begin) * step;
      if constexpr (kScaled) {
        const int64_t scale = ref.block * kv.scale_block_stride + kv_head * kv.scale_head_stride + row;
        for (int64_t t = seen; t < stop; ++t) {
          k_scales[t - first] = kv.k_scales[scale + (t - begin) * way];
          v_scales[t - first] = kv.v_scales[scale + (t - begin) * way];
        }
      } else if (stop - seen == kTileRows && !ref.reversed) {
        groups[g] = k_rows;
        continue;
      }
      if (stop - seen < kTileRows) __builtin_memset(copies, 0, kTileRows * row_bytes);
      for (int64_t t = seen - begin; t < stop - begin; ++t)  // rows that nobody sees are not read
        copy_row(k_rows + t * step, kv.head_size, copies + t * kv.head_size);
    }
  }

 private:
  static void copy_row(const BF16* from, int64_t head_size, BF16* to) {
    __builtin_memcpy(to, from, static_cast<size_t>(head_size) * sizeof(BF16));
  }
  static void copy_row(const I8* from, int64_t head_size, BF16* to) {
    for (int64_t h = 0; h < head_size; h += W) {
      const auto elements = static_cast<__mmask16>(head_size - h >= W ? 0xffff : 0xff);
      _mm512_mask_cvtepi32_storeu_epi16(to + h, elements, (__m512i)bits_of_row(from + h, elements));
    }
  }
};

// Weights, running maxima and sums of one column over `count` keys from position `first` on, a whole number of steps;
// its output so far is rescaled.
template <typename T>
static void weigh_column(const PrefillTile& tile, int64_t column, int64_t first, int64_t count, const KeyRows<T>& rows,
                         const AttentionParams& params) {
  float* const scores = tile.scores + column * kPrefillTile * W;
  float* const weights = tile.weights + column * kPrefillTile * W;
  const int32_t* const positions = tile.position + column * W;
  const int32_t* const first_keys = tile.first_key + column * W;
  const VI position = load(positions), lowest = load(first_keys);
  const VF slopes = load(tile.slopes + column * W);
  const bool all_seen = first + count - 1 <= positions[0] && first >= first_keys[W - 1];
  const bool is_bounded = params.window > 0 || params.chunk > 0, has_slopes = params.alibi_slopes != nullptr;
  const bool is_plain = all_seen && only_scaled(params);  // scores stay as they are
  if (KeyRows<T>::kScaled)
    for (int64_t t = 0; t < count; ++t) store(scores + t * W, load(scores + t * W) * splat(rows.k_scales[t]));
  const VF old_max = load(tile.max + column * W);
  VF best = old_max;
  if (is_plain) {
    best = vmax(best, max_of(scores, count) * splat(params.scale));
  } else {
    for (int64_t t = 0; t < count; ++t) {
      const auto key = static_cast<int32_t>(first + t);
      VF s = soften(load(scores + t * W), params);
      if (has_slopes) s += slopes * __builtin_convertvector(key - position, VF);
      if (!all_seen) {
        s = position < key ? splat(kNegInf) : s;
        if (is_bounded) s = lowest > key ? splat(kNegInf) : s;
      }
      store(scores + t * W, s);
      best = vmax(best, s);
    }
  }
  const VF base = best == splat(kNegInf) ? splat(0.0f) : best;  // a row that has seen no key yet
  const VF factor = splat(is_plain ? params.scale * kLog2E : kLog2E), offset = base * splat(kLog2E);
  VF even_total{}, odd_total{};
  for (int64_t t = 0; t < count; t += 2) {
    VF even = vexp2(load(scores + t * W) * factor - offset);
    VF odd = vexp2(load(scores + (t + 1) * W) * factor - offset);
    even_total += even;
    odd_total += odd;
    if (KeyRows<T>::kScaled) {
      even *= splat(rows.v_scales[t]);
      odd *= splat(rows.v_scales[t + 1]);
    }
    VI hi, lo;
    split_pairs(even, odd, &hi, &lo);
    float* const row = weights + t / kStepTokens * 2 * kTileFloats + t % kStepTokens / 2 * W;
    store_bits(row, hi);
    store_bits(row + kTileFloats, lo);
  }
  VF sum = load(tile.sum + column * W);
  if (_mm512_cmp_ps_mask((__m512)best, (__m512)old_max, _CMP_NEQ_UQ) != 0) {
    const VF rescale = vexp(old_max - base);
    float* const output = tile.output + column * tile.value_tiles * kTileFloats;
    for (int64_t i = 0; i < tile.value_tiles * kTileFloats; i += W) store(output + i, load(output + i) * rescale);
    sum *= rescale;
    store(tile.max + column * W, best);
  }
  store(tile.sum + column * W, sum + (even_total + odd_total));
}

// V^T of `steps` steps; rows of elements past the head size, and keys that are not seen, are zeros.
template <typename T>
static void pack_values(const PrefillTile& tile, const KeyRows<T>& rows, int64_t steps) {
  for (int64_t step = 0; step < steps; ++step)
    for (int64_t i = 0; i < tile.value_tiles; ++i) {
      const auto elements = static_cast<__mmask16>(tile.head_size - i * W >= W ? 0xffff : 0xff);
      const auto widened = [&](int64_t t) {
        const T* const row = rows.v[step * kStepTokens + t];
        return row == nullptr ? VI{} : bits_of_row(row + i * W, elements);
      };
      VI pairs[W];
      for (int64_t p = 0; p < W; ++p) pairs[p] = widened(2 * p) | (widened(2 * p + 1) << 16);
      unzip<W, 4>(pairs);
      float* const out = tile.values + (step * tile.value_tiles + i) * kTileFloats;
      for (int64_t h = 0; h < W; ++h) store_bits(out + h * W, pairs[h]);
    }
}

// Q^T in tiles: row p of tile i holds the elements tile_dim(i) + 2p and + 1 of each row; those that the tile before
// has are zeros.
static void pack_rows(const BF16* q, int64_t q_stride, int64_t q_begin, int64_t group, int64_t kv_head,
                      const PrefillTile& tile) {
  for (int64_t column = 0; column < tile.columns; ++column)
    for (int64_t i = 0; i < tile.score_tiles; ++i) {
      VI pairs[W] = {};
      for (int64_t lane = 0; lane < min64(W, tile.rows - column * W); ++lane) {
        const int64_t row = column * W + lane;
        pairs[lane] = load_query(q + (q_begin + row / group) * q_stride +
                                     (kv_head * group + row % group) * tile.head_size,
                                 tile_dim<32>(i, tile.head_size), 32 * i);
      }
      unzip<W, 4>(pairs);
      float* const out = tile.query + (column * tile.score_tiles + i) * kTileFloats;
      for (int64_t p = 0; p < W; ++p) store_bits(out + p * W, pairs[p]);
    }
}

// kColumns columns over the keys [first, stop), those of one tile.
template <int kColumns, typename T>
static void attend_columns(const PrefillTile& tile, int64_t column, int64_t first, int64_t stop, const KeyRows<T>& rows,
                           const AttentionParams& params) {
  const int64_t seen = min64(stop, tile.position[(column + kColumns) * W - 1] + 1) - first;
  if (seen <= 0) return;
  const int64_t steps = (seen + kStepTokens - 1) / kStepTokens;
  for (int64_t step = 0; step < steps; ++step)
    score_step<kColumns>(tile, rows.groups + 2 * step, tile.query + column * tile.score_tiles * kTileFloats,
                         tile.scores + (column * kPrefillTile + step * kStepTokens) * W);
  for (int i = 0; i < kColumns; ++i) weigh_column(tile, column + i, first, steps * kStepTokens, rows, params);
  const float* const weights = tile.weights + column * kPrefillTile * W;
  float* const output = tile.output + column * tile.value_tiles * kTileFloats;
  int64_t i = 0;
  for (; i + 2 <= tile.value_tiles; i += 2) add_values<2, kColumns>(tile, steps, i, weights, output);
  if (i < tile.value_tiles) add_values<1, kColumns>(tile, steps, i, weights, output);
}

template <typename T>
static void prefill_by_tiles(const BF16* q, int64_t q_stride, const PagedKV& kv, const int32_t* block_table,
                      int64_t context_len, int64_t q_begin, int64_t q_end, int64_t kv_head,
                      const AttentionParams& params, BF16* out, int64_t out_stride, float* scratch) {
  const int64_t group = params.num_heads / kv.kv_heads;
  PrefillTile tile((q_end - q_begin) * group, kv.head_size);
  tile.lay_out(scratch);
  pack_rows(q, q_stride, q_begin, group, kv_head, tile);
  for (int64_t m = 0; m < tile.columns * W; ++m) {
    const int64_t row = min64(m, tile.rows - 1), head = kv_head * group + row % group;
    const int64_t position = context_len + q_begin + row / group;
    tile.max[m] = params.sinks != nullptr ? params.sinks[head] : kNegInf;
    tile.sum[m] = params.sinks != nullptr ? 1.0f : 0.0f;
    tile.slopes[m] = params.alibi_slopes != nullptr ? params.alibi_slopes[head] : 0.0f;
    tile.position[m] = static_cast<int32_t>(position);
    tile.first_key[m] = static_cast<int32_t>(first_key(position, params));
  }
  for (int64_t i = 0; i < tile.columns * tile.value_tiles * kTileFloats; ++i) tile.output[i] = 0.0f;

  tile_configure(prefill_config());
  const int64_t high = context_len + q_end, low = tile.first_key[0];
  // Tiles of keys begin at multiples of their size, so a row's result does not depend on how the chunk was cut.
  for (int64_t first = low / kPrefillTile * kPrefillTile; first < high; first += kPrefillTile) {
    const int64_t stop = min64(first + kPrefillTile, high);
    const KeyRows<T> rows(kv, block_table, kv_head, first, low, stop, reinterpret_cast<BF16*>(tile.keys));
    pack_values(tile, rows, (stop - first + kStepTokens - 1) / kStepTokens);
    int64_t column = 0;
    for (; column + 2 <= tile.columns; column += 2) attend_columns<2>(tile, column, first, stop, rows, params);
    if (column < tile.columns) attend_columns<1>(tile, column, first, stop, rows, params);
  }
  tile_release();

  for (int64_t column = 0; column < tile.columns; ++column) {
    const VF inverse = splat(1.0f) / load(tile.sum + column * W);
    for (int64_t i = 0; i < tile.value_tiles; ++i) {
      VI result[W];
      const float* const output = tile.output + (column * tile.value_tiles + i) * kTileFloats;
      for (int64_t h = 0; h < W; ++h) result[h] = (VI)(load(output + h * W) * inverse);
      unzip<W, 4>(result);
      for (int64_t lane = 0; lane < min64(W, tile.rows - column * W); ++lane) {
        const int64_t m = column * W + lane;
        BF16* const row = out + (q_begin + m / group) * out_stride + (kv_head * group + m % group) * tile.head_size;
        if ((i + 1) * W <= tile.head_size)
          store(row + i * W, (VF)result[lane]);
        else
          store_half(row + i * W, (VF)result[lane]);
      }
    }
  }
}
