// Prefill: a tile of query tokens over all the keys that they see. Part of attention_kernel.inl.
//
// Query rows lie side by side in the lanes: scores[t][m] = sum_h K[t][h] * Q^T[h][m]. Q^T is packed once in panels of
// kPanel lanes; K and V tiles are widened to fp32 once for all rows (bf16 K is read in place where VDPBF16PS exists).

constexpr int64_t kPanelVectors = W == 16 ? 4 : 2;
constexpr int64_t kPanel = kPanelVectors * W;

// Parts of the scratch of one prefill tile, and its sizes.
struct Tile {
  int64_t rows;         // query rows in use: queries * group
  int64_t padded_rows;  // to whole vectors
  int64_t head_size;
  int64_t padded_head;
  float* query;         // panels [padded_rows / kPanel][H][kPanel]; the last panel may be narrower
  float* output;        // [padded_rows][padded_head], not yet divided
  float* scores;        // [kPrefillTile][padded_rows]
  float* keys;          // [kPrefillTile][H]
  float* values;        // panels [padded_head / kPanel][kPrefillTile][kPanel]
  float* max;           // [padded_rows]
  float* sum;           // [padded_rows]
  float* rescale;       // [padded_rows]
  float* slopes;        // [padded_rows], of ALiBi
  int32_t* position;    // [padded_rows], ascending; padding repeats the last row's
  int32_t* first_key;   // [padded_rows], the lowest position that the row sees; ascending
};

// Query rows of Q for keys of T.
template <typename T, typename Q>
static void pack_queries(const Q* q, int64_t q_stride, int64_t q_begin, int64_t group, int64_t kv_head,
                         const Tile& tile) {
  for (int64_t m0 = 0; m0 < tile.padded_rows; m0 += kPanel) {
    const int64_t width = min64(kPanel, tile.padded_rows - m0);
    float* panel = tile.query + m0 * tile.head_size;
    for (int64_t m = 0; m < width; ++m) {
      const int64_t row = min64(m0 + m, tile.rows - 1);
      const Q* source = q + (q_begin + row / group) * q_stride + (kv_head * group + row % group) * tile.head_size;
      for (int64_t h = 0; h < tile.head_size; ++h) panel[h * width + m] = to_float(source[h]);
    }
  }
}

// scores of MR keys for NR vectors of rows: MR * NR sums stay in registers.
template <int NR>
static inline void score_block(const float* keys, const float* panel, int64_t width, int64_t head_size, float* scores,
                               int64_t scores_stride) {
  constexpr int MR = 4;
  VF sums[MR][NR]{};
  for (int64_t h = 0; h < head_size; ++h) {
    VF query[NR];
    for (int j = 0; j < NR; ++j) query[j] = load(panel + h * width + j * W);
    for (int t = 0; t < MR; ++t) {
      const VF key = splat(keys[t * head_size + h]);
      for (int j = 0; j < NR; ++j) sums[t][j] += key * query[j];
    }
  }
  for (int t = 0; t < MR; ++t)
    for (int j = 0; j < NR; ++j) store(scores + t * scores_stride + j * W, sums[t][j]);
}

#if OMNI_DPBF16
// bf16: a lane holds a pair of neighbouring head elements of one row.
template <>
void pack_queries<BF16, BF16>(const BF16* q, int64_t q_stride, int64_t q_begin, int64_t group, int64_t kv_head,
                        const Tile& tile) {
  for (int64_t m0 = 0; m0 < tile.padded_rows; m0 += kPanel) {
    const int64_t width = min64(kPanel, tile.padded_rows - m0);
    float* panel = tile.query + m0 * (tile.head_size / 2);
    for (int64_t m = 0; m < width; ++m) {
      const int64_t row = min64(m0 + m, tile.rows - 1);
      const BF16* source = q + (q_begin + row / group) * q_stride + (kv_head * group + row % group) * tile.head_size;
      for (int64_t h = 0; h < tile.head_size; h += 2)
        __builtin_memcpy(panel + h / 2 * width + m, source + h, sizeof(float));
    }
  }
}

template <int NR>
static inline void score_block(const BF16* const* keys, const float* panel, int64_t width, int64_t head_size,
                               float* scores, int64_t scores_stride) {
  constexpr int MR = 4;
  __m512 sums[MR][NR];
  for (int t = 0; t < MR; ++t)
    for (int j = 0; j < NR; ++j) sums[t][j] = _mm512_setzero_ps();
  for (int64_t h = 0; h < head_size; h += 2) {
    __m512bh query[NR];
    for (int j = 0; j < NR; ++j) query[j] = (__m512bh)load(panel + h / 2 * width + j * W);
    for (int t = 0; t < MR; ++t) {
      int32_t pair;
      __builtin_memcpy(&pair, keys[t] + h, sizeof(pair));
      const __m512bh key = (__m512bh)_mm512_set1_epi32(pair);
      for (int j = 0; j < NR; ++j) sums[t][j] = _mm512_dpbf16_ps(sums[t][j], key, query[j]);
    }
  }
  for (int t = 0; t < MR; ++t)
    for (int j = 0; j < NR; ++j) store(scores + t * scores_stride + j * W, (VF)sums[t][j]);
}
#endif

// Codes become values; what has no scale is a value.
template <typename T>
OMNI_INLINE VF scaled(VF row, VF scale) {
  return Rows<T>::kScaled ? row * scale : row;
}

// What score_block reads: fp32 rows in the scratch, or rows where they lie.
template <typename T>
struct KeySource {
  const float* keys;
  int64_t head_size;
  OMNI_MEMBER KeySource(const Rows<T>& rows, const Tile& tile)
      : keys(tile.keys), head_size(tile.head_size) {
    for (int64_t t = 0; t < rows.count; ++t) {
      int64_t h = 0;
      float* const key = tile.keys + t * head_size;
      const VF scale = splat(Rows<T>::kScaled ? *rows.k_scale[t] : 1.0f);
      for (; h + W <= head_size; h += W) store(key + h, scaled<T>(load(rows.k[t] + h), scale));
      if (h < head_size) store_half(key + h, scaled<T>(load_half(rows.k[t] + h), scale));
    }
  }
  OMNI_MEMBER const float* at(int64_t t) const { return keys + t * head_size; }
};
#if OMNI_DPBF16
template <>
struct KeySource<BF16> {
  Rows<BF16> rows;
  OMNI_MEMBER KeySource(const Rows<BF16>& source, const Tile&) : rows(source) {
    for (int64_t t = rows.count; t < (rows.count + 3) / 4 * 4; ++t) rows.k[t] = rows.k[rows.count - 1];
  }
  OMNI_MEMBER const BF16* const* at(int64_t t) const { return rows.k + t; }
};
#endif

// Scores of the tile's keys, which start at position `first`; those after a panel's last row's position are left out.
template <typename T>
static void score_tile(const Rows<T>& rows, int64_t first, const Tile& tile) {
  const KeySource<T> source(rows, tile);
  constexpr int64_t kElementsPerLane = (OMNI_DPBF16 && sizeof(T) == 2 && !__is_same(T, F16)) ? 2 : 1;
  for (int64_t m0 = 0; m0 < tile.padded_rows; m0 += kPanel) {
    const int64_t width = min64(kPanel, tile.padded_rows - m0);
    const float* panel = tile.query + m0 * (tile.head_size / kElementsPerLane);
    const int64_t seen = min64(rows.count, tile.position[m0 + width - 1] + 1 - first);
    for (int64_t t = 0; t < seen; t += 4) {
      float* scores = tile.scores + t * tile.padded_rows + m0;
      switch (width / W) {
        case 1: score_block<1>(source.at(t), panel, width, tile.head_size, scores, tile.padded_rows); break;
        case 2: score_block<2>(source.at(t), panel, width, tile.head_size, scores, tile.padded_rows); break;
        case 3: score_block<3>(source.at(t), panel, width, tile.head_size, scores, tile.padded_rows); break;
        default: score_block<4>(source.at(t), panel, width, tile.head_size, scores, tile.padded_rows);
      }
    }
  }
}

// Scores become weights in place; max, sum and rescale are brought up to date.
static void soften_tile(int64_t count, int64_t first, const AttentionParams& params, const Tile& tile) {
  const bool all_seen = first + count - 1 <= tile.position[0] && first >= tile.first_key[tile.rows - 1];
  const bool is_bounded = params.window > 0 || params.chunk > 0, has_slopes = params.alibi_slopes != nullptr;
  for (int64_t m = 0; m < tile.padded_rows; m += W) {
    const VI position = load(tile.position + m), lowest = load(tile.first_key + m);
    const VF slopes = load(tile.slopes + m);
    const VF old_max = load(tile.max + m);
    VF best = old_max;
    for (int64_t t = 0; t < count; ++t) {
      float* const at = tile.scores + t * tile.padded_rows + m;
      const auto key = static_cast<int32_t>(first + t);
      VF s = soften(load(at), params);
      if (has_slopes) s += slopes * __builtin_convertvector(key - position, VF);
      if (!all_seen) {
        s = position < key ? splat(kNegInf) : s;
        if (is_bounded) s = lowest > key ? splat(kNegInf) : s;
      }
      store(at, s);
      best = vmax(best, s);
    }
    const VF base = best == splat(kNegInf) ? splat(0.0f) : best;  // a row that has seen no key yet
    VF total{};
    for (int64_t t = 0; t < count; ++t) {
      float* const at = tile.scores + t * tile.padded_rows + m;
      const VF weight = vexp(load(at) - base);
      store(at, weight);
      total += weight;
    }
    const VF rescale = vexp(old_max - base);
    store(tile.max + m, best);
    store(tile.rescale + m, rescale);
    store(tile.sum + m, load(tile.sum + m) * rescale + total);
  }
}

// output[m : m + 4][NR vectors] = output * rescale + sum over t in [begin, end) of weights[t][m] * values[t].
template <int NR>
static inline void add_block(const Tile& tile, const float* values, int64_t width, int64_t m, int64_t h, int64_t begin,
                             int64_t end) {
  constexpr int MR = 4;
  VF sums[MR][NR];
  float* const out = tile.output + m * tile.padded_head + h;
  for (int i = 0; i < MR; ++i)
    for (int j = 0; j < NR; ++j)
      sums[i][j] = load(out + i * tile.padded_head + j * W) * splat(tile.rescale[m + i]);
  for (int64_t t = begin; t < end; ++t) {
    VF value[NR];
    for (int j = 0; j < NR; ++j) value[j] = load(values + t * width + j * W);
    const float* weights = tile.scores + t * tile.padded_rows + m;
    for (int i = 0; i < MR; ++i) {
      const VF weight = splat(weights[i]);
      for (int j = 0; j < NR; ++j) sums[i][j] += weight * value[j];
    }
  }
  for (int i = 0; i < MR; ++i)
    for (int j = 0; j < NR; ++j) store(out + i * tile.padded_head + j * W, sums[i][j]);
}

template <typename T>
static void add_tile(const Rows<T>& rows, int64_t first, const Tile& tile) {
  for (int64_t h0 = 0; h0 < tile.padded_head; h0 += kPanel) {
    const int64_t width = min64(kPanel, tile.padded_head - h0);
    float* panel = tile.values + h0 * kPrefillTile;
    for (int64_t t = 0; t < rows.count; ++t) {
      const VF scale = splat(Rows<T>::kScaled ? *rows.v_scale[t] : 1.0f);
      for (int64_t h = 0; h < width; h += W) {
        const T* const from = rows.v[t] + h0 + h;
        store(panel + t * width + h, scaled<T>(h0 + h + W <= tile.head_size ? load(from) : load_half(from), scale));
      }
    }
    for (int64_t m = 0; m < tile.padded_rows; m += 4) {
      const int64_t end = min64(rows.count, tile.position[m + 3] + 1 - first);
      const int64_t begin = max64(0, tile.first_key[m] - first);
      switch (width / W) {
        case 1: add_block<1>(tile, panel, width, m, h0, begin, end); break;
        case 2: add_block<2>(tile, panel, width, m, h0, begin, end); break;
        case 3: add_block<3>(tile, panel, width, m, h0, begin, end); break;
        default: add_block<4>(tile, panel, width, m, h0, begin, end);
      }
    }
  }
}

template <typename T, typename Q>
static void prefill_typed(const Q* q, int64_t q_stride, const PagedKV& kv, const int32_t* block_table,
                          int64_t context_len, int64_t q_begin, int64_t q_end, int64_t kv_head,
                          const AttentionParams& params, void* out, int64_t out_stride, float* scratch) {
  const int64_t group = params.num_heads / kv.kv_heads;
  Tile tile;
  tile.rows = (q_end - q_begin) * group;
  tile.padded_rows = (tile.rows + W - 1) / W * W;
  tile.head_size = kv.head_size;
  tile.padded_head = (kv.head_size + W - 1) / W * W;
  tile.query = scratch;
  tile.output = tile.query + tile.padded_rows * tile.padded_head;
  tile.scores = tile.output + tile.padded_rows * tile.padded_head;
  tile.keys = tile.scores + tile.padded_rows * kPrefillTile;
  tile.values = tile.keys + tile.padded_head * kPrefillTile;
  tile.max = tile.values + tile.padded_head * kPrefillTile;
  tile.sum = tile.max + tile.padded_rows;
  tile.rescale = tile.sum + tile.padded_rows;
  tile.slopes = tile.rescale + tile.padded_rows;
  tile.position = reinterpret_cast<int32_t*>(tile.slopes + tile.padded_rows);
  tile.first_key = tile.position + tile.padded_rows;
  for (int64_t m = 0; m < tile.padded_rows; ++m) {
    const int64_t row = min64(m, tile.rows - 1), head = kv_head * group + row % group;
    const int64_t position = context_len + q_begin + row / group;
    tile.max[m] = params.sinks != nullptr ? params.sinks[head] : kNegInf;
    tile.sum[m] = params.sinks != nullptr ? 1.0f : 0.0f;
    tile.slopes[m] = params.alibi_slopes != nullptr ? params.alibi_slopes[head] : 0.0f;
    tile.position[m] = static_cast<int32_t>(position);
    tile.first_key[m] = static_cast<int32_t>(first_key(position, params));
  }
  for (int64_t i = 0; i < tile.padded_rows * tile.padded_head; ++i) tile.output[i] = 0.0f;
  pack_queries<T, Q>(q, q_stride, q_begin, group, kv_head, tile);

  const int64_t stop = context_len + q_end;
  for (int64_t first = tile.first_key[0], last; first < stop; first = last) {
    // Tiles end at multiples of their size, so a row's result does not depend on how the chunk was cut.
    last = min64(first / kPrefillTile * kPrefillTile + kPrefillTile, stop);
    Rows<T> rows;
    rows.find(kv, block_table, kv_head, first, last);
    score_tile(rows, first, tile);
    soften_tile(rows.count, first, params, tile);
    add_tile(rows, first, tile);
  }

  for (int64_t m = 0; m < tile.rows; ++m) {
    Q* row = static_cast<Q*>(out) + (q_begin + m / group) * out_stride + (kv_head * group + m % group) * tile.head_size;
    const VF inverse = splat(1.0f / tile.sum[m]);
    const float* source = tile.output + m * tile.padded_head;
    int64_t h = 0;
    for (; h + W <= tile.head_size; h += W) store(row + h, load(source + h) * inverse);
    if (h < tile.head_size) store_half(row + h, load(source + h) * inverse);
  }
}

void prefill(const void* q, DType q_dtype, int64_t q_stride, const PagedKV& kv, const int32_t* block_table,
             int64_t context_len, int64_t q_begin, int64_t q_end, int64_t kv_head, const AttentionParams& params,
             void* out, int64_t out_stride, float* scratch) {
  const auto run = [&](auto function, auto* query) {
    function(query, q_stride, kv, block_table, context_len, q_begin, q_end, kv_head, params, out, out_stride, scratch);
  };
  const auto* const q_f32 = static_cast<const float*>(q);
  const auto* const q_bf16 = static_cast<const BF16*>(q);
  const auto* const q_f16 = static_cast<const F16*>(q);
  switch (kv.dtype) {
    case DType::f32: return run(prefill_typed<float, float>, q_f32);
    case DType::f16: return run(prefill_typed<F16, F16>, q_f16);
    case DType::bf16: return run(prefill_typed<BF16, BF16>, q_bf16);
    case DType::i8:
      switch (q_dtype) {
        case DType::f32: return run(prefill_typed<I8, float>, q_f32);
        case DType::f16: return run(prefill_typed<I8, F16>, q_f16);
        default: return run(prefill_typed<I8, BF16>, q_bf16);
      }
  }
}
