// Decode: one query token over many keys. K and V are read once for all query heads of a group. Part of
// attention_kernel.inl.

// GB query heads are scored at a time, W / lanes_of(GB) keys at a time: together at most W sums.
template <int GB>
constexpr int keys_at_once() {
  return static_cast<int>(W) / (GB == 3 ? 4 : GB);
}

template <typename T, int GB>
struct Scorer {
  static constexpr int TT = keys_at_once<GB>();

  // sums[g * TT + t] over lanes = q[g] . k[t]; q rows are fp32, padded with zeros to q_stride.
  OMNI_INLINE void dot(const float* q, int64_t q_stride, const T* const* k, int64_t head_size, VF* sums) {
    int64_t h = 0;
    for (; h + W <= head_size; h += W) {
      VF query[GB];
      for (int g = 0; g < GB; ++g) query[g] = load(q + g * q_stride + h);
      for (int t = 0; t < TT; ++t) {
        const VF key = load(k[t] + h);
        for (int g = 0; g < GB; ++g) sums[g * TT + t] += query[g] * key;
      }
    }
    if (h < head_size) {
      for (int t = 0; t < TT; ++t) {
        const VF key = load_half(k[t] + h);
        for (int g = 0; g < GB; ++g) sums[g * TT + t] += load(q + g * q_stride + h) * key;
      }
    }
  }
};

#if OMNI_DPBF16
OMNI_INLINE __m512bh load_bf16_pairs(const BF16* p, int64_t count) {
  const __mmask32 mask = count >= 32 ? 0xffffffffu : (1u << count) - 1u;
  return (__m512bh)_mm512_maskz_loadu_epi16(mask, p);
}

// The same from bf16 queries, which the scratch holds as bf16 in the same float-sized stride.
template <int GB>
struct Scorer<BF16, GB> {
  static constexpr int TT = keys_at_once<GB>();

  OMNI_INLINE void dot(const float* q, int64_t q_stride, const BF16* const* k, int64_t head_size, VF* sums) {
    const BF16* query_rows = reinterpret_cast<const BF16*>(q);
    for (int64_t h = 0; h < head_size; h += 32) {
      __m512bh query[GB];
      for (int g = 0; g < GB; ++g) query[g] = load_bf16_pairs(query_rows + 2 * g * q_stride + h, head_size - h);
      for (int t = 0; t < TT; ++t) {
        const __m512bh key = load_bf16_pairs(k[t] + h, head_size - h);
        for (int g = 0; g < GB; ++g)
          sums[g * TT + t] = (VF)_mm512_dpbf16_ps((__m512)sums[g * TT + t], query[g], key);
      }
    }
  }
};
#endif

// scores[g][t] = q[g] . k[t] for t < rows.count; asks for the K rows of `next` on the way if told to.
template <typename T, int GB>
static inline void score_keys(const float* q, int64_t q_stride, const Rows<T>& rows, int64_t head_size, float* scores,
                              const Rows<T>* next) {
  constexpr int TT = keys_at_once<GB>();
  for (int64_t t0 = 0; t0 < rows.count; t0 += TT) {
    const T* keys[TT];
    for (int t = 0; t < TT; ++t) keys[t] = rows.k[min64(t0 + t, rows.count - 1)];
    if (next != nullptr)
      for (int64_t t = t0; t < min64(t0 + TT, next->count); ++t) prefetch_row(next->k[t], head_size);
    VF sums[W]{};
    Scorer<T, GB>::dot(q, q_stride, keys, head_size, sums);
    float packed[W];
    store(packed, sum_each(sums));
    for (int g = 0; g < GB; ++g)  // a tile is a whole number of TT wide, so the padding of the last pass has room
      for (int t = 0; t < TT; ++t) scores[g * kDecodeTile + t0 + t] = packed[g * TT + t];
  }
}

// acc[g][h0 : h0 + HB * W] = acc * rescale[g] + sum_t weights[g][t] * v[t].
template <typename T, int GB, int HB>
static inline void add_values(const float* weights, const float* rescale, const Rows<T>& rows, int64_t h0,
                              int64_t head_size, float* acc, const Rows<T>* next) {
  VF sums[GB][HB];
  for (int g = 0; g < GB; ++g)
    for (int j = 0; j < HB; ++j) sums[g][j] = load(acc + g * head_size + h0 + j * W) * splat(rescale[g]);
  for (int64_t t = 0; t < rows.count; ++t) {
    if (next != nullptr && t < next->count) prefetch_row(next->v[t], head_size);
    VF value[HB];
    for (int j = 0; j < HB; ++j) value[j] = load(rows.v[t] + h0 + j * W);
    for (int g = 0; g < GB; ++g) {
      const VF weight = splat(weights[g * kDecodeTile + t]);
      for (int j = 0; j < HB; ++j) sums[g][j] += weight * value[j];
    }
  }
  for (int g = 0; g < GB; ++g)
    for (int j = 0; j < HB; ++j) store(acc + g * head_size + h0 + j * W, sums[g][j]);
}

template <typename T, int GB>
static inline void add_values_half(const float* weights, const float* rescale, const Rows<T>& rows, int64_t h0,
                                   int64_t head_size, float* acc) {
  VF sums[GB];
  for (int g = 0; g < GB; ++g) sums[g] = load_half(acc + g * head_size + h0) * splat(rescale[g]);
  for (int64_t t = 0; t < rows.count; ++t) {
    const VF value = load_half(rows.v[t] + h0);
    for (int g = 0; g < GB; ++g) sums[g] += splat(weights[g * kDecodeTile + t]) * value;
  }
  for (int g = 0; g < GB; ++g) store_half(acc + g * head_size + h0, sums[g]);
}

// One tile of keys for GB query heads: scores, softmax, values.
template <typename T, int GB>
static void decode_heads(const float* q, int64_t q_stride, const Rows<T>& rows, const Rows<T>* next, int64_t head_size,
                         const AttentionParams& params, float* scores, float* acc, float* m, float* l) {
  score_keys<T, GB>(q, q_stride, rows, head_size, scores, next);
  float rescale[GB];
  for (int g = 0; g < GB; ++g) {
    float* row = scores + g * kDecodeTile;
    for (int64_t t = rows.count; t < (rows.count + W - 1) / W * W; ++t) row[t] = kNegInf;
    VF best = splat(m[g]);
    for (int64_t t = 0; t < rows.count; t += W) {
      VF s = soften(load(row + t), params);
      if (t + W > rows.count)  // soft-capping lifts the padding off -inf
        for (int64_t i = rows.count - t; i < W; ++i) s[i] = kNegInf;
      store(row + t, s);
      best = vmax(best, s);
    }
    const float new_max = max_lane(best);
    VF total{};
    for (int64_t t = 0; t < rows.count; t += W) {
      const VF weight = vexp(load(row + t) - splat(new_max));
      store(row + t, weight);
      total += weight;
    }
    rescale[g] = vexp(splat(m[g] - new_max))[0];
    l[g] = l[g] * rescale[g] + sum_lanes(total);
    m[g] = new_max;
  }
  constexpr int HB = W == 16 ? 4 : 2;
  int64_t h = 0;
  for (; h + HB * W <= head_size; h += HB * W)
    add_values<T, GB, HB>(scores, rescale, rows, h, head_size, acc, h == 0 ? next : nullptr);
  for (; h + W <= head_size; h += W)
    add_values<T, GB, 1>(scores, rescale, rows, h, head_size, acc, h == 0 ? next : nullptr);
  if (h < head_size) add_values_half<T, GB>(scores, rescale, rows, h, head_size, acc);
}

// Put one query row into the scratch in the form that Scorer<T> reads.
template <typename T>
static inline void pack_query(const T* q, int64_t head_size, int64_t stride, float* packed) {
  for (int64_t h = 0; h < stride; ++h) packed[h] = h < head_size ? to_float(q[h]) : 0.0f;
}
#if OMNI_DPBF16
template <>
inline void pack_query<BF16>(const BF16* q, int64_t head_size, int64_t, float* packed) {
  __builtin_memcpy(packed, q, static_cast<size_t>(head_size) * sizeof(BF16));
}
#endif

template <typename T>
static void decode_typed(const T* q, const PagedKV& kv, const int32_t* block_table, int64_t position, int64_t begin,
                         int64_t end, const AttentionParams& params, float* acc, float* m, float* l, float* scratch) {
  const int64_t head_size = kv.head_size, group = params.num_heads / kv.kv_heads;
  const int64_t stride = (head_size + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
  for (int64_t i = 0; i < params.num_heads * head_size; ++i) acc[i] = 0.0f;
  for (int64_t n = 0; n < params.num_heads; ++n) {
    m[n] = kNegInf;
    l[n] = 0.0f;
  }
  end = min64(end, position + 1);
  if (params.window > 0) begin = max64(begin, position + 1 - params.window);
  if (begin >= end) return;

  float* packed_q = scratch;
  float* scores = scratch + group * stride;
  Rows<T> tiles[2];  // [now, next]: the next tile's addresses are known early, to prefetch them
  int now = 0;
  tiles[0].find(kv, block_table, 0, begin, min64(begin + kDecodeTile, end));
  for (int64_t head = 0; head < kv.kv_heads; ++head) {
    const int64_t first = head * group;
    for (int64_t g = 0; g < group; ++g)
      pack_query(q + (first + g) * head_size, head_size, stride, packed_q + g * stride);
    for (int64_t tile = begin; tile < end; tile += kDecodeTile, now ^= 1) {
      const Rows<T>& rows = tiles[now];
      Rows<T>* next = &tiles[now ^ 1];
      if (tile + kDecodeTile < end) {
        next->find(kv, block_table, head, tile + kDecodeTile, min64(tile + 2 * kDecodeTile, end));
      } else if (head + 1 < kv.kv_heads) {
        next->find(kv, block_table, head + 1, begin, min64(begin + kDecodeTile, end));
      } else {
        next = nullptr;
      }
      for (int64_t g = 0; g < group; g += 4) {
        const int64_t n = first + g, left = group - g;
        const auto run = left >= 4   ? decode_heads<T, 4>
                         : left == 3 ? decode_heads<T, 3>
                         : left == 2 ? decode_heads<T, 2>
                                     : decode_heads<T, 1>;
        run(packed_q + g * stride, stride, rows, g == 0 ? next : nullptr, head_size, params, scores,
            acc + n * head_size, m + n, l + n);
      }
    }
  }
}

void decode(const void* q, const PagedKV& kv, const int32_t* block_table, int64_t position, int64_t begin, int64_t end,
            const AttentionParams& params, float* acc, float* m, float* l, float* scratch) {
  switch (kv.dtype) {
    case DType::f32:
      return decode_typed(static_cast<const float*>(q), kv, block_table, position, begin, end, params, acc, m, l,
                          scratch);
    case DType::bf16:
      return decode_typed(static_cast<const BF16*>(q), kv, block_table, position, begin, end, params, acc, m, l,
                          scratch);
    case DType::f16:
      return decode_typed(static_cast<const F16*>(q), kv, block_table, position, begin, end, params, acc, m, l,
                          scratch);
  }
}

template <typename T>
static void merge_typed(const float* acc, const float* m, const float* l, int64_t num_pieces, int64_t num_heads,
                        int64_t head_size, T* out) {
  for (int64_t n = 0; n < num_heads; ++n) {
    float best = kNegInf;
    for (int64_t i = 0; i < num_pieces; ++i) best = best > m[i * num_heads + n] ? best : m[i * num_heads + n];
    float total = 0.0f;
    for (int64_t i = 0; i < num_pieces; ++i)
      if (l[i * num_heads + n] != 0.0f) total += l[i * num_heads + n] * vexp(splat(m[i * num_heads + n] - best))[0];
    const float inverse = total != 0.0f ? 1.0f / total : 0.0f;
    for (int64_t h = 0; h < head_size; h += W) {
      VF sum{};
      const bool half = h + W > head_size;
      for (int64_t i = 0; i < num_pieces; ++i) {
        if (l[i * num_heads + n] == 0.0f) continue;  // the window saw none of this piece: exp(-inf + inf) is NaN
        const float* row = acc + (i * num_heads + n) * head_size + h;
        sum += (half ? load_half(row) : load(row)) * vexp(splat(m[i * num_heads + n] - best));
      }
      sum *= splat(inverse);
      half ? store_half(out + n * head_size + h, sum) : store(out + n * head_size + h, sum);
    }
  }
}

void merge(const float* acc, const float* m, const float* l, int64_t num_pieces, int64_t num_heads, int64_t head_size,
           DType dtype, void* out) {
  switch (dtype) {
    case DType::f32:
      return merge_typed(acc, m, l, num_pieces, num_heads, head_size, static_cast<float*>(out));
    case DType::bf16:
      return merge_typed(acc, m, l, num_pieces, num_heads, head_size, static_cast<BF16*>(out));
    case DType::f16:
      return merge_typed(acc, m, l, num_pieces, num_heads, head_size, static_cast<F16*>(out));
  }
}
