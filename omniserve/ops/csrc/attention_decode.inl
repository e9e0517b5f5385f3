// Decode: one or a few query tokens over many keys. Part of attention_kernel.inl.
//
// Blocks are read in order and KV heads inside a block, as they lie in memory; K and V of a tile are read once for all
// query heads of the group. The running softmax of every head waits in acc, m and l meanwhile. A query sees all keys
// of a tile, so the tiles of a reversed block are read as they lie, too.
//
// Several query rows of a sequence are a larger group: where all of them see a whole tile, their heads take it together.
// Where they do not, at the sequence's end and where windows begin, each row takes its part of the tile by itself while
// the tile is in the cache. So no row meets a key that it does not see, and its sums have the order that they would have
// if it came alone.

// Up to kDecodeTile keys of one block and KV head.
template <typename T>
struct KeyTile {
  const T* k;
  const T* v;  // row 0 of the tile; if in pairs, that of the pair which holds row 0
  int64_t count;
  int64_t lead;  // in pairs: 1 if the tile begins with the second row of a pair
  const float* k_scales;  // i8 only
  const float* v_scales;
  const float* slopes;  // of the group's heads, for ALiBi; null: none
  int64_t distance;     // of the position of row 0 from the query's
  int64_t step;         // from the position of one row to that of the next: 1, or -1 in a reversed block
};

// Distances of W rows from row t on.
template <typename T>
OMNI_INLINE VF distances(const KeyTile<T>& tile, int64_t t) {
  const VI row = lane_numbers() + static_cast<int32_t>(t);
  return __builtin_convertvector(row * static_cast<int32_t>(tile.step) + static_cast<int32_t>(tile.distance), VF);
}

// Asks for K and V before they are read, in step with the work: memory then delivers all the while, where a burst would
// fill the queues and stall the loads that the work itself needs. Work is counted as below.
class Ahead {
 public:
  // `bytes` of K and as many of V, to be asked for over `work` from now on. Much work per byte: the next tile, into L2.
  OMNI_MEMBER void aim_far(const void* k, const void* v, int64_t bytes, int64_t work) {
    far_ = true;
    aim(static_cast<const char*>(k), static_cast<const char*>(v), bytes, work);
  }
  // Little work per byte, and hardware_follows_streams(): the same tile, but a page further on, into L1. The hardware
  // then runs ahead into memory faster than instructions can ask for it (one Zen 4 core: 27 against 22 GB/s). With more
  // work it stops and starts, and loses.
  OMNI_MEMBER void aim_near(const void* k, const void* v, int64_t bytes, int64_t work) {
    far_ = false;
    aim(static_cast<const char*>(k) + kNear, static_cast<const char*>(v) + kNear, bytes, work);
  }

  // Ask for what is due after so much more work.
  OMNI_MEMBER void pace(int64_t work) {
    due_ += work * rate_;
    for (; due_ >= int64_t{1} << kShift; due_ -= int64_t{1} << kShift) {
      if (at_ >= end_) {
        if (v_ == nullptr) continue;
        at_ = v_;
        end_ = v_ + v_bytes_;
        v_ = nullptr;
      }
      far_ ? __builtin_prefetch(at_, 0, 2) : __builtin_prefetch(at_, 0, 3);
      at_ += kLine;
    }
  }

 private:
  OMNI_MEMBER void aim(const char* k, const char* v, int64_t bytes, int64_t work) {
    at_ = k;
    end_ = k + bytes;
    v_ = v;
    v_bytes_ = bytes;
    rate_ = (2 * bytes / kLine << kShift) / work;
  }

  static constexpr int64_t kLine = 64;
  static constexpr int64_t kNear = 4096;
  static constexpr int kShift = 16;
  bool far_ = true;
  const char* at_ = nullptr;
  const char* end_ = nullptr;
  const char* v_ = nullptr;
  int64_t v_bytes_ = 0;
  int64_t rate_ = 0;  // lines per unit of work, and
  int64_t due_ = 0;   // lines, times 2^kShift
};

// Work of the parts of a tile, in cycles of a core that does one wide operation in each; only the ratios matter.
template <typename T>
OMNI_INLINE int64_t score_work(int64_t head_size) {  // of W sums
  constexpr int64_t kElements = (OMNI_DPBF16 && __is_same(T, BF16) ? 2 : 1) * W;
  return (head_size + kElements - 1) / kElements * W + 20;
}
constexpr int64_t kSoftenWork = 24;  // of W scores
template <bool pairs>
constexpr int64_t value_work(int64_t heads, int64_t vectors) {  // of a row, or pair of rows
  return (pairs ? 2 : 1) * heads * vectors;
}
template <typename T, bool pairs>
OMNI_INLINE int64_t tile_work(int64_t count, int64_t group, int64_t head_size) {
  const int64_t sums = count * (group / 4 * 4 + (group % 4 == 3 ? 4 : group % 4));
  return (sums * score_work<T>(head_size) + count * group * (kSoftenWork + kSoftenWork / 4)) / W + count * group * (head_size / W);
}

// Whether a group has so little work per byte that Ahead must aim near: with bf16 products alone. Without them two heads
// a group read 22 GB/s if they aim far, 18 if near (one Zen 4 core with AVX2).
template <typename T>
OMNI_INLINE bool has_little_work(int64_t group) {
  return OMNI_DPBF16 && __is_same(T, BF16) && group <= 2;
}

// GB query heads are scored at a time, W / GB keys (3 counts as 4) at a time: together at most W sums.
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
OMNI_INLINE __m512bh load_bf16_pairs(const BF16* p) { return (__m512bh)_mm512_loadu_si512(p); }
OMNI_INLINE __m512bh load_bf16_pairs(const BF16* p, int64_t count) {
  return (__m512bh)_mm512_maskz_loadu_epi16((1u << count) - 1u, p);
}

// The same from bf16 queries, which the scratch holds as bf16 in the same float-sized stride.
template <int GB>
struct Scorer<BF16, GB> {
  static constexpr int TT = keys_at_once<GB>();

  OMNI_INLINE void dot(const float* q, int64_t q_stride, const BF16* const* k, int64_t head_size, VF* sums) {
    const BF16* query_rows = reinterpret_cast<const BF16*>(q);
    int64_t h = 0;
    if (GB == 1) {  // one query is no reason to leave the order of memory
      for (int t = 0; t < TT; ++t)
        for (h = 0; h + 32 <= head_size; h += 32)
          sums[t] = (VF)_mm512_dpbf16_ps((__m512)sums[t], load_bf16_pairs(query_rows + h), load_bf16_pairs(k[t] + h));
    }
    for (; h + 32 <= head_size; h += 32) {
      __m512bh query[GB];
      for (int g = 0; g < GB; ++g) query[g] = load_bf16_pairs(query_rows + 2 * g * q_stride + h);
      for (int t = 0; t < TT; ++t) {
        const __m512bh key = load_bf16_pairs(k[t] + h);
        for (int g = 0; g < GB; ++g)
          sums[g * TT + t] = (VF)_mm512_dpbf16_ps((__m512)sums[g * TT + t], query[g], key);
      }
    }
    if (h < head_size) {
      for (int t = 0; t < TT; ++t) {
        const __m512bh key = load_bf16_pairs(k[t] + h, head_size - h);
        for (int g = 0; g < GB; ++g) {
          const __m512bh query = load_bf16_pairs(query_rows + 2 * g * q_stride + h, head_size - h);
          sums[g * TT + t] = (VF)_mm512_dpbf16_ps((__m512)sums[g * TT + t], query, key);
        }
      }
    }
  }
};
#else

// A vector of 2 W elements is widened as W pairs of them, in two operations. The queries are in that order, too: of each
// 2 W elements first the even ones, then the odd ones; what is left of them as it is.
template <int GB>
struct Scorer<BF16, GB> {
  static constexpr int TT = keys_at_once<GB>();

  OMNI_INLINE void dot(const float* q, int64_t q_stride, const BF16* const* k, int64_t head_size, VF* sums) {
    int64_t h = 0;
    for (; h + 2 * W <= head_size; h += 2 * W) {
      if constexpr (GB == 1) {
        const VF even = load(q + h), odd = load(q + h + W);
        for (int t = 0; t < TT; ++t) {
          const VU key = load_pairs(k[t] + h);
          sums[t] += even * first_of_pairs(key);
          sums[t] += odd * second_of_pairs(key);
        }
      } else {
        VF even[TT], odd[TT];
        for (int t = 0; t < TT; ++t) {
          const VU key = load_pairs(k[t] + h);
          even[t] = first_of_pairs(key);
          odd[t] = second_of_pairs(key);
        }
        for (int g = 0; g < GB; ++g) {
          const VF query = in_register(load(q + g * q_stride + h));
          for (int t = 0; t < TT; ++t) sums[g * TT + t] += query * even[t];
        }
        for (int g = 0; g < GB; ++g) {
          const VF query = in_register(load(q + g * q_stride + h + W));
          for (int t = 0; t < TT; ++t) sums[g * TT + t] += query * odd[t];
        }
      }
    }
    for (; h + W <= head_size; h += W) {
      for (int t = 0; t < TT; ++t) {
        const VF key = load(k[t] + h);
        for (int g = 0; g < GB; ++g) sums[g * TT + t] += load(q + g * q_stride + h) * key;
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
#endif

// scores[g][t] = q[g] . k[t] for t < count, and garbage behind these.
template <typename T, int GB, int HS>
static inline void score_keys(const float* q, int64_t q_stride, const KeyTile<T>& tile, int64_t any_head_size,
                              float* scores, Ahead& ahead) {
  const int64_t head_size = HS != 0 ? HS : any_head_size;
  constexpr int TT = keys_at_once<GB>();
  for (int64_t t0 = 0; t0 < tile.count; t0 += TT) {
    const T* keys[TT];
    for (int t = 0; t < TT; ++t) keys[t] = tile.k + min64(t0 + t, tile.count - 1) * head_size;
    ahead.pace(score_work<T>(head_size));
    VF sums[W]{};
    Scorer<T, GB>::dot(q, q_stride, keys, head_size, sums);
    const VF packed = sum_each(sums);
    for (int g = 0; g < GB; ++g)  // a tile is a whole number of TT wide, so the padding of the last pass has room
      __builtin_memcpy(scores + g * kDecodeTile + t0, reinterpret_cast<const char*>(&packed) + g * TT * sizeof(float),
                       TT * sizeof(float));
  }
}

// acc[g][h0 : h0 + HB * W] += sum_t weights[g][t] * v[t]; `half`: half a vector instead of HB.
template <typename T, int GB, int HB, bool half = false>
OMNI_INLINE void add_rows(const float* weights, const KeyTile<T>& tile, int64_t h0, int64_t head_size, float* acc, Ahead& ahead) {
  VF sums[GB][HB];
  for (int g = 0; g < GB; ++g)
    for (int j = 0; j < HB; ++j) {
      const float* const from = acc + g * head_size + h0 + j * W;
      sums[g][j] = half ? load_half(from) : load(from);
    }
  const T* row = tile.v + h0;
  for (int64_t t = 0; t < tile.count; ++t, row += head_size) {
    ahead.pace(value_work<false>(GB, HB));
    VF value[HB];
    for (int j = 0; j < HB; ++j) value[j] = half ? load_half(row + j * W) : load(row + j * W);
    for (int g = 0; g < GB; ++g) {
      const VF weight = splat(weights[g * kDecodeTile + t]);
      for (int j = 0; j < HB; ++j) sums[g][j] += weight * value[j];
    }
  }
  for (int g = 0; g < GB; ++g)
    for (int j = 0; j < HB; ++j) {
      float* const to = acc + g * head_size + h0 + j * W;
      half ? store_half(to, sums[g][j]) : store(to, sums[g][j]);
    }
}

// The same from token pairs. A pair of which the tile holds one row only is added apart: the other row may be anything,
// and NaN times a weight of 0 is NaN.
template <int GB, int HB, bool half = false>
OMNI_INLINE void add_pairs(const float* weights, const KeyTile<BF16>& tile, int64_t h0, int64_t head_size,
                             float* acc, Ahead& ahead) {
  VF sums[GB][HB];
  for (int g = 0; g < GB; ++g)
    for (int j = 0; j < HB; ++j) {
      const float* const from = acc + g * head_size + h0 + j * W;
      sums[g][j] = half ? load_half(from) : load(from);
    }
  const BF16* pair = tile.v + 2 * h0;
  int64_t t = 0;
  if (tile.lead) {
    for (int j = 0; j < HB; ++j) {
      const VF second = second_of_pairs(half ? load_half_pairs(pair + 2 * j * W) : load_pairs(pair + 2 * j * W));
      for (int g = 0; g < GB; ++g) sums[g][j] += splat(weights[g * kDecodeTile]) * second;
    }
    t = 1;
    pair += 2 * head_size;
  }
  for (; t + 2 <= tile.count; t += 2, pair += 2 * head_size) {
    if (GB <= 2) {  // four pairs at once would be a burst
      ahead.pace(value_work<true>(GB, HB));
    } else if (t % 8 < 2) {  // to count has its price, too
      ahead.pace(4 * value_work<true>(GB, HB));
    }
    if constexpr (HB == 2) {  // registers for the values of both rows, not for the weights
      VF first[HB], second[HB];
      for (int j = 0; j < HB; ++j) {
        const VU both = load_pairs(pair + 2 * j * W);
        first[j] = first_of_pairs(both);
        second[j] = second_of_pairs(both);
      }
      for (int g = 0; g < GB; ++g) {
        const VF weight = splat(weights[g * kDecodeTile + t]);
        for (int j = 0; j < HB; ++j) sums[g][j] += weight * first[j];
      }
      for (int g = 0; g < GB; ++g) {
        const VF weight = splat(weights[g * kDecodeTile + t + 1]);
        for (int j = 0; j < HB; ++j) sums[g][j] += weight * second[j];
      }
    } else {
      VF first_weight[GB], second_weight[GB];
      for (int g = 0; g < GB; ++g) {
        first_weight[g] = splat(weights[g * kDecodeTile + t]);
        second_weight[g] = splat(weights[g * kDecodeTile + t + 1]);
      }
      for (int j = 0; j < HB; ++j) {
        const VU both = half ? load_half_pairs(pair + 2 * j * W) : load_pairs(pair + 2 * j * W);
        const VF first = first_of_pairs(both), second = second_of_pairs(both);
        for (int g = 0; g < GB; ++g) sums[g][j] += first_weight[g] * first;
        for (int g = 0; g < GB; ++g) sums[g][j] += second_weight[g] * second;
      }
    }
  }
  if (t < tile.count) {
    for (int j = 0; j < HB; ++j) {
      const VF first = first_of_pairs(half ? load_half_pairs(pair + 2 * j * W) : load_pairs(pair + 2 * j * W));
      for (int g = 0; g < GB; ++g) sums[g][j] += splat(weights[g * kDecodeTile + t]) * first;
    }
  }
  for (int g = 0; g < GB; ++g)
    for (int j = 0; j < HB; ++j) {
      float* const to = acc + g * head_size + h0 + j * W;
      half ? store_half(to, sums[g][j]) : store(to, sums[g][j]);
    }
}

template <typename T, bool pairs, int GB, int HB, bool half = false>
OMNI_INLINE void add_values(const float* weights, const KeyTile<T>& tile, int64_t h0, int64_t head_size, float* acc, Ahead& ahead) {
  if constexpr (pairs) {
    add_pairs<GB, HB, half>(weights, tile, h0, head_size, acc, ahead);
  } else {
    add_rows<T, GB, HB, half>(weights, tile, h0, head_size, acc, ahead);
  }
}

// HB vectors of every head, as many heads at a time as the registers hold sums for.
template <typename T, bool pairs, int HS, int HB, bool half = false>
static inline void add_heads(const float* weights, const KeyTile<T>& tile, int64_t h0, int64_t any_head_size,
                             int64_t group, float* acc, Ahead& ahead) {
  const int64_t head_size = HS != 0 ? HS : any_head_size;
  constexpr int kMost = HB >= 8 ? (W < 16 ? 1 : 2) : (W < 16 && HB >= 4 ? 2 : 4);
  for (int64_t g = 0; g < group;) {
    const int64_t left = group - g;
    const float* const w = weights + g * kDecodeTile;
    float* const a = acc + g * head_size;
    if (left >= kMost) {
      add_values<T, pairs, kMost, HB, half>(w, tile, h0, head_size, a, ahead);
      g += kMost;
    } else if (kMost > 3 && left == 3) {
      add_values<T, pairs, 3, HB, half>(w, tile, h0, head_size, a, ahead);
      g += 3;
    } else if (left >= 2) {
      add_values<T, pairs, 2, HB, half>(w, tile, h0, head_size, a, ahead);
      g += 2;
    } else {
      add_values<T, pairs, 1, HB, half>(w, tile, h0, head_size, a, ahead);
      g += 1;
    }
  }
}

// Scores become weights in place; the running max and sum are brought up to date, and acc is rescaled. `slope`: of
// ALiBi, if has_slopes.
template <typename T, bool has_slopes>
OMNI_INLINE void soften_scores(float* scores, const KeyTile<T>& tile, const AttentionParams& params, float slope,
                               int64_t head_size, float* acc, float* m, float* l, Ahead& ahead) {
  const int64_t count = tile.count, padded = (count + W - 1) / W * W;
  for (int64_t t = count; t < padded; ++t) scores[t] = kNegInf;
  // Whatever is more than a product with a positive scale needs a pass of its own.
  VF scale = splat(params.scale);
  if (params.softcap > 0.0f || tile.k_scales != nullptr || has_slopes || !(params.scale > 0.0f)) {
    for (int64_t t = 0; t < padded; t += W) {
      VF s = load(scores + t);
      if (tile.k_scales != nullptr) s *= load_first(tile.k_scales + t, count - t);
      s = soften(s, params);
      if (has_slopes) s += splat(slope) * distances(tile, t);
      if (t + W > count)  // soft-capping lifts the padding off -inf
        for (int64_t i = count - t; i < W; ++i) s[i] = kNegInf;
      store(scores + t, s);
    }
    scale = splat(1.0f);
  }
  VF best = splat(kNegInf);
  for (int64_t t = 0; t < padded; t += W) {
    ahead.pace(kSoftenWork / 4);
    best = vmax(best, load(scores + t));
  }
  const float tile_max = max_lane(best) * scale[0];
  const float new_max = *m > tile_max ? *m : tile_max;
  VF total{};
  for (int64_t t = 0; t < padded; t += W) {
    ahead.pace(kSoftenWork);
    VF weight = vexp(load(scores + t) * scale - splat(new_max));
    total += weight;
    if (tile.v_scales != nullptr) weight *= load_first(tile.v_scales + t, count - t);
    store(scores + t, weight);
  }
  if (new_max != *m) {  // also when it is NaN
    const VF rescale = splat(vexp(splat(*m - new_max))[0]);
    int64_t h = 0;
    for (; h + W <= head_size; h += W) store(acc + h, load(acc + h) * rescale);
    if (h < head_size) store_half(acc + h, load_half(acc + h) * rescale);
    *l *= rescale[0];
    *m = new_max;
  }
  *l += sum_lanes(total);
}

// One tile of keys for all heads of the group: scores, softmax, values.
template <typename T, bool pairs, int HS, bool has_slopes = false>
static void attend_tile(const float* q, int64_t q_stride, const KeyTile<T>& tile, int64_t any_head_size, int64_t group,
                        const AttentionParams& params, float* scores, float* acc, float* m, float* l,
                        Ahead& ahead) {
  const int64_t head_size = HS != 0 ? HS : any_head_size;
  for (int64_t g = 0; g < group; g += 4) {
    const int64_t left = group - g;
    const auto run = left >= 4   ? score_keys<T, 4, HS>
                     : left == 3 ? score_keys<T, 3, HS>
                     : left == 2 ? score_keys<T, 2, HS>
                                 : score_keys<T, 1, HS>;
    run(q + g * q_stride, q_stride, tile, head_size, scores + g * kDecodeTile, ahead);
  }
  for (int64_t g = 0; g < group; ++g) {
    soften_scores<T, has_slopes>(scores + g * kDecodeTile, tile, params, has_slopes ? tile.slopes[g] : 0.0f, head_size,
                                 acc + g * head_size, m + g, l + g, ahead);
  }
  int64_t h = 0;
  if (W == 16 && sizeof(T) > 1)  // whole rows of the usual head sizes; int8 is better widened for four heads at once
    for (; h + 8 * W <= head_size; h += 8 * W) add_heads<T, pairs, HS, 8>(scores, tile, h, head_size, group, acc, ahead);
  if (W < 16) {  // eight sums, of one to four heads: each needs the result of the last product four cycles later
    if (group == 1)
      for (; h + 8 * W <= head_size; h += 8 * W) add_heads<T, pairs, HS, 8>(scores, tile, h, head_size, group, acc, ahead);
    if (group > 2)
      for (; h + 2 * W <= head_size; h += 2 * W) add_heads<T, pairs, HS, 2>(scores, tile, h, head_size, group, acc, ahead);
  }
  for (; h + 4 * W <= head_size; h += 4 * W) add_heads<T, pairs, HS, 4>(scores, tile, h, head_size, group, acc, ahead);
  for (; h + W <= head_size; h += W) add_heads<T, pairs, HS, 1>(scores, tile, h, head_size, group, acc, ahead);
  if (h < head_size) add_heads<T, pairs, HS, 1, true>(scores, tile, h, head_size, group, acc, ahead);
}

// Put one query row into the scratch in the form that Scorer<T> reads.
template <typename T, typename Q>
static inline void pack_query(const Q* q, int64_t head_size, int64_t stride, float* packed) {
  for (int64_t h = 0; h < stride; ++h) packed[h] = h < head_size ? to_float(q[h]) : 0.0f;
}
#if OMNI_DPBF16
template <>
inline void pack_query<BF16, BF16>(const BF16* q, int64_t head_size, int64_t, float* packed) {
  __builtin_memcpy(packed, q, static_cast<size_t>(head_size) * sizeof(BF16));
}
#else
template <>
inline void pack_query<BF16, BF16>(const BF16* q, int64_t head_size, int64_t stride, float* packed) {
  const int64_t in_pairs = head_size / (2 * W) * (2 * W);
  for (int64_t h = 0; h < stride; ++h) {
    const int64_t i = h % (2 * W), from = h < in_pairs ? h - i + i % W * 2 + i / W : h;
    packed[h] = from < head_size ? to_float(q[from]) : 0.0f;
  }
}
#endif

// The tiles of [begin, end) in reading order: blocks, in these KV heads, in these at most kDecodeTile keys.
class Walk {
 public:
  BlockRef ref;
  int64_t head = 0;
  int64_t offset;  // of the tile's first position in the block

  OMNI_MEMBER Walk(const PagedKV& kv, const int32_t* block_table, int64_t begin, int64_t end)
      : ref(block_table[begin / kv.block_size]), offset(begin % kv.block_size), kv_(&kv), block_table_(block_table),
        position_(begin), end_(end) {
    enter();
  }
  OMNI_MEMBER int64_t count() const { return tile_end_ - offset; }
  OMNI_MEMBER int64_t end() const { return tile_end_; }  // of the tile's positions in the block
  OMNI_MEMBER int64_t block_position() const { return block_position_; }
  // Where positions [low, high) of the block begin in its memory.
  OMNI_MEMBER int64_t first_row(int64_t low, int64_t high) const {
    return ref.reversed ? kv_->block_size - high : low;
  }
  OMNI_MEMBER int64_t first_row() const { return first_row(offset, tile_end_); }
  template <typename T>
  OMNI_MEMBER const T* row(const char* base, int64_t row_offset) const {
    return reinterpret_cast<const T*>(base + ref.block * kv_->block_stride + head * kv_->head_stride) +
           row_offset * kv_->head_size;
  }
  // False: that was the last tile.
  OMNI_MEMBER bool advance() {
    if (tile_end_ < block_end_) {
      offset = tile_end_;
    } else if (head + 1 < kv_->kv_heads) {
      ++head;
      offset = position_ - block_position_;
    } else {
      position_ = block_position_ + block_end_;
      if (position_ >= end_) return false;
      head = 0;
      ref = BlockRef(block_table_[position_ / kv_->block_size]);
      offset = 0;
      enter();
      return true;
    }
    cut();
    return true;
  }

 private:
  OMNI_MEMBER void enter() {
    block_position_ = position_ - offset;
    block_end_ = min64(kv_->block_size, offset + end_ - position_);
    cut();
  }
  OMNI_MEMBER void cut() {
    tile_end_ = min64(block_end_, offset / kDecodeTile * kDecodeTile + kDecodeTile);
  }

  const PagedKV* kv_;
  const int32_t* block_table_;
  int64_t position_;  // of the first key that is read of the block
  int64_t end_;
  int64_t block_position_;  // of the block's first token
  int64_t block_end_;       // in the block
  int64_t tile_end_;        // in the block
};

template <typename T, bool pairs, typename Q>
static void decode_typed(const Q* q, const PagedKV& kv, const int32_t* block_table, int64_t position,
                         int64_t num_rows, int64_t begin, int64_t end, const AttentionParams& params, float* acc,
                         float* m, float* l, float* scratch) {
  const int64_t head_size = kv.head_size, row_group = params.num_heads / kv.kv_heads, group = num_rows * row_group;
  const int64_t num_heads = num_rows * params.num_heads;  // of all rows, in the order of acc
  const int64_t stride = (head_size + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
  for (int64_t i = 0; i < num_heads * head_size; ++i) acc[i] = 0.0f;
  for (int64_t n = 0; n < num_heads; ++n) {
    m[n] = kNegInf;
    l[n] = 0.0f;
  }
  end = min64(end, position + num_rows);
  begin = max64(begin, first_key(position, params));
  if (begin >= end) return;

  float* const packed_q = scratch;
  float* const scores = scratch + num_heads * stride;
  float* packed = packed_q;
  for (int64_t first = 0; first < params.num_heads; first += row_group)
    for (int64_t row = 0; row < num_rows; ++row)
      for (int64_t head = first; head < first + row_group; ++head, packed += stride)
        pack_query<T, Q>(q + (row * params.num_heads + head) * head_size, head_size, stride, packed);
  // The usual head sizes are constants, so that the loops over them unroll.
  constexpr bool kUnroll = sizeof(T) <= 2;
  const auto attend = params.alibi_slopes != nullptr  ? attend_tile<T, pairs, 0, true>
                      : kUnroll && head_size == 128 ? attend_tile<T, pairs, kUnroll ? 128 : 0>
                      : kUnroll && head_size == 64 ? attend_tile<T, pairs, kUnroll ? 64 : 0>
                                                   : attend_tile<T, pairs, 0>;
  const bool near = has_little_work<T>(group) && hardware_follows_streams();
  Ahead ahead;
  Walk walk(kv, block_table, begin, end);
  while (true) {
    const Walk now = walk;
    const bool more = walk.advance();
    const int64_t row_bytes = head_size * static_cast<int64_t>(sizeof(T));
    const int64_t work = tile_work<T, pairs>(now.count(), group, head_size);
    if (near) {
      ahead.aim_near(now.template row<T>(kv.k, now.first_row()), now.template row<T>(kv.v, now.first_row()),
                     now.count() * row_bytes, work);
    } else if (more) {
      ahead.aim_far(walk.template row<T>(kv.k, walk.first_row()), walk.template row<T>(kv.v, walk.first_row()),
                    walk.count() * row_bytes, work);
    }
    const int64_t block_position = now.block_position();
    // Slopes count from the query, so with them each row has scores of its own.
    const bool together = num_rows == 1 || (params.alibi_slopes == nullptr &&
                                            first_key(position + num_rows - 1, params) <= block_position + now.offset &&
                                            block_position + now.end() <= position + 1);
    const int64_t rows_at_once = together ? num_rows : 1;
    for (int64_t row = 0; row < num_rows; row += rows_at_once) {
      int64_t low = now.offset, high = now.end();  // of the block's positions
      if (!together) {
        low = max64(low, first_key(position + row, params) - block_position);
        high = min64(high, position + row + 1 - block_position);
        if (low >= high) continue;
      }
      KeyTile<T> tile{nullptr, nullptr, high - low, pairs ? low % 2 : 0, nullptr, nullptr, nullptr, 0, 1};
      tile.k = now.template row<T>(kv.k, now.first_row(low, high));
      tile.v = now.template row<T>(kv.v, now.first_row(low, high) - tile.lead);
      if (kv.k_scales != nullptr) {
        const int64_t scale = now.ref.block * kv.scale_block_stride + now.head * kv.scale_head_stride +
                              now.first_row(low, high);
        tile.k_scales = kv.k_scales + scale;
        tile.v_scales = kv.v_scales + scale;
      }
      if (params.alibi_slopes != nullptr) {
        tile.slopes = params.alibi_slopes + now.head * row_group;
        tile.distance = block_position + (now.ref.reversed ? high - 1 : low) - (position + row);
        tile.step = now.ref.reversed ? -1 : 1;
      }
      const int64_t n = now.head * group + row * row_group;
      attend(packed_q + n * stride, stride, tile, head_size, rows_at_once * row_group, params, scores,
             acc + n * head_size, m + n, l + n, ahead);
    }
    if (!more) return;
  }
}

void decode(const void* q, DType q_dtype, const PagedKV& kv, const int32_t* block_table, int64_t position,
            int64_t num_rows, int64_t begin, int64_t end, const AttentionParams& params, float* acc, float* m, float* l,
            float* scratch) {
  const auto run = [&](auto function, auto* query) {
    function(query, kv, block_table, position, num_rows, begin, end, params, acc, m, l, scratch);
  };
  const auto* const q_f32 = static_cast<const float*>(q);
  const auto* const q_bf16 = static_cast<const BF16*>(q);
  const auto* const q_f16 = static_cast<const F16*>(q);
  switch (kv.dtype) {
    case DType::f32: return run(decode_typed<float, false, float>, q_f32);
    case DType::f16: return run(decode_typed<F16, false, F16>, q_f16);
    case DType::bf16:
      return kv.v_pairs ? run(decode_typed<BF16, true, BF16>, q_bf16) : run(decode_typed<BF16, false, BF16>, q_bf16);
    case DType::i8:
      switch (q_dtype) {
        case DType::f32: return run(decode_typed<I8, false, float>, q_f32);
        case DType::f16: return run(decode_typed<I8, false, F16>, q_f16);
        default: return run(decode_typed<I8, false, BF16>, q_bf16);
      }
  }
}

template <typename T>
static void merge_typed(const float* acc, const float* m, const float* l, int64_t num_pieces, int64_t num_rows,
                        int64_t row_heads, int64_t kv_heads, int64_t head_size, const float* all_sinks, T* all_out) {
  const int64_t num_heads = num_rows * row_heads, row_group = row_heads / kv_heads, group = num_rows * row_group;
  for (int64_t n = 0; n < num_heads; ++n) {
    const int64_t head = n / group * row_group + n % row_group, query = n % group / row_group;
    const float* const sinks = all_sinks != nullptr ? all_sinks + head : nullptr;
    T* const out = all_out + (query * row_heads + head) * head_size;
    float best = sinks != nullptr ? *sinks : kNegInf;
    for (int64_t i = 0; i < num_pieces; ++i) best = best > m[i * num_heads + n] ? best : m[i * num_heads + n];
    float total = sinks != nullptr ? vexp(splat(*sinks - best))[0] : 0.0f;
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
      half ? store_half(out + h, sum) : store(out + h, sum);
    }
  }
}

void merge(const float* acc, const float* m, const float* l, int64_t num_pieces, int64_t num_rows, int64_t num_heads,
           int64_t kv_heads, int64_t head_size, const float* sinks, DType dtype, void* out) {
  const auto run = [&](auto* to) {
    merge_typed(acc, m, l, num_pieces, num_rows, num_heads, kv_heads, head_size, sinks, to);
  };
  switch (dtype) {
    case DType::f32: return run(static_cast<float*>(out));
    case DType::f16: return run(static_cast<F16*>(out));
    default: return run(static_cast<BF16*>(out));
  }
}
