// Decode by tiles: one or a few query tokens over many keys. Part of attention_amx.cpp.
//
// A unit is up to kUnitTokens keys of one (block, KV head), read where they lie. Scores: K's rows are the A tile and
// Q^T, packed once, is B, so that scores come with a token a row; tile 0 takes the even tokens and tile 1 the odd ones,
// and the weights of a V pair then stand in the same lane of two vectors. Values: the weights as rows [hi; lo] of the A
// tile, V's token pairs as B. One configuration serves both products: to change it costs as much as ten products.
//
// Blocks are walked in order and KV heads inside a block, which is the order of the host pool's bytes.
//
// Several query rows of a sequence are a larger group: a score tile has 16 columns for the heads of a KV head, of all
// rows. Where not all of them see a unit's keys, the softmax masks each column's own.

// Prefetch, the part that decides the speed: kPrefetchStreams places of the tiles ahead in turn, kPrefetchRow bytes at
// each, spread over all the work of a tile. Streams of about a page keep several pages of DRAM open.
constexpr int64_t kPrefetchStreams = 8;  // a power of two; together they look 1 to 2 times kStreams pages ahead
constexpr int64_t kPrefetchPage = 4096;
constexpr int64_t kPrefetchRow = 256;

struct BatchState {
  float* query;
  float* output;
  float* max;
  float* sum;

  BatchState(const DecodeShape& shape, float* scratch, int64_t i)
      : query(scratch + i * shape.state_floats()), output(query + shape.query_floats()),
        max(output + shape.output_floats()), sum(max + W) {}
};

// Where the sequence's keys lie: tile i of the reading order is KV head i % kv_heads of the block of its keys
// [i / kv_heads * block_size, + block_size) from `first_block` on, and of these [low, high) count.
struct Keys {
  const PagedKV& kv;
  const int32_t* block_table;
  int64_t position;  // of the first query row
  int64_t num_rows;
  int64_t begin;
  int64_t end;
  int64_t first_block = begin / kv.block_size;
  int64_t num_tiles = ((end + kv.block_size - 1) / kv.block_size - first_block) * kv.kv_heads;

  int64_t first_position(int64_t i) const { return (first_block + i / kv.kv_heads) * kv.block_size; }
  int64_t low(int64_t i) const { return max64(0, begin - first_position(i)); }
  int64_t high(int64_t i) const { return min64(kv.block_size, end - first_position(i)); }
  int64_t offset(int64_t i) const {
    return block_table[first_block + i / kv.kv_heads] * kv.block_stride + i % kv.kv_heads * kv.head_stride;
  }
};

// Asks for window n + 1, some tiles each, during the work on window n. Never faults, whatever the address.
class Prefetcher {
 public:
  // `slots`: how often next() is called during one tile.
  Prefetcher(const Keys& keys, int64_t slots) : keys_(keys) {
    row_bytes_ = keys.kv.head_size * static_cast<int64_t>(sizeof(BF16));
    const int64_t plane = keys.kv.block_size * row_bytes_;
    while (2 * tiles_ < kPrefetchStreams && 4 * tiles_ * plane <= kPrefetchStreams * kPrefetchPage) tiles_ *= 2;
    plane_streams_ = kPrefetchStreams / (2 * tiles_);
    stream_bytes_ = round_up((plane + plane_streams_ - 1) / plane_streams_, kPrefetchRow);
    rows_ = kPrefetchStreams * stream_bytes_ / kPrefetchRow;
    slots_ = tiles_ * slots;
  }

  // Before the work on tile i, for each i in turn.
  void start(int64_t i) {
    if (i % tiles_ != 0) return;
    const char* const planes[] = {keys_.kv.k, keys_.kv.v};
    int64_t stream = 0;
    for (int64_t ahead = i + tiles_; ahead < i + 2 * tiles_; ++ahead) {
      const bool exists = ahead < keys_.num_tiles;
      const int64_t offset = exists ? keys_.offset(ahead) : 0;
      // A V pair is two rows; a row too much of K does no harm.
      const int64_t low = exists ? keys_.low(ahead) / 2 * 2 * row_bytes_ : 0;
      const int64_t high = exists ? round_up(keys_.high(ahead), 2) * row_bytes_ : 0;
      for (const char* plane : planes)
        for (int64_t from = 0; from < plane_streams_ * stream_bytes_; from += stream_bytes_, ++stream) {
          const auto base = reinterpret_cast<uintptr_t>(plane) + static_cast<uintptr_t>(offset);
          at_[stream] = base + static_cast<uintptr_t>(max64(from, low));
          end_[stream] = base + static_cast<uintptr_t>(min64(from + stream_bytes_, high));
        }
    }
  }

  // As evenly as it goes: if all of a window is asked for after four fifths of the work, memory idles for the rest.
  inline __attribute__((always_inline)) void next() {
    for (due_ += rows_; due_ >= slots_; due_ -= slots_, stream_ = (stream_ + 1) % kPrefetchStreams) {
      const uintptr_t row = at_[stream_];
      if (row >= end_[stream_]) continue;
      at_[stream_] = row + kPrefetchRow;
      for (uintptr_t line = 0; line < kPrefetchRow; line += 64)
        __builtin_prefetch(reinterpret_cast<const void*>(row + line), 0, 2);
    }
  }

 private:
  const Keys& keys_;
  int64_t row_bytes_;
  int64_t tiles_ = 1;  // of a window
  int64_t plane_streams_;
  int64_t stream_bytes_;
  int64_t rows_;   // of a window
  int64_t slots_;  // over which they are spread
  int64_t due_ = 0;
  uint64_t stream_ = 0;  // the next to be asked for
  uintptr_t at_[kPrefetchStreams] = {};
  uintptr_t end_[kPrefetchStreams] = {};
};

constexpr int kEvenScores = 0, kOddScores = 1, kQuery = 2, kStream0 = 3, kStream1 = 4, kWeights = 5, kOut0 = 6,
              kOut1 = 7;

TileConfig decode_config(const DecodeShape& shape) {
  TileConfig config;
  for (int tile = kEvenScores; tile <= kQuery; ++tile) config.shape(tile, kTileRows, 4 * shape.columns);
  for (int tile = kStream0; tile <= kStream1; ++tile) config.shape(tile, kTileRows, kTileRowBytes);
  for (int tile = kWeights; tile <= kOut1; ++tile) config.shape(tile, shape.tile_heads, kTileRowBytes);
  return config;
}

// Keys of one unit; V in token pairs.
struct Unit {
  const BF16* k;
  const BF16* v;
  int64_t tokens;  // whole steps; the sequence has [low, high) of them
  int64_t low;
  int64_t high;
  int64_t distance;  // of the first key's position from the first query row's
};

// Rows that are not the sequence's count for nothing: NaN times a weight of 0 would be NaN. They become zeros.
Unit copy_unit(const Unit& unit, int64_t head_size, BF16* k, BF16* v) {
  const auto bytes = [=](int64_t tokens) { return static_cast<size_t>(tokens * head_size) * sizeof(BF16); };
  __builtin_memset(k, 0, bytes(unit.tokens));
  __builtin_memset(v, 0, bytes(unit.tokens));
  const int64_t first = unit.low * head_size;
  __builtin_memcpy(k + first, unit.k + first, bytes(unit.high - unit.low));
  for (int64_t t = unit.low / 2 * 2; t < unit.high; t += 2) {
    const uint32_t mask = (t >= unit.low ? 0x0000ffffu : 0u) | (t + 1 < unit.high ? 0xffff0000u : 0u);
    const BF16* const from = unit.v + t * head_size;
    BF16* const to = v + t * head_size;
    for (int64_t h = 0; h < 2 * head_size; h += 16) {  // 8 pairs
      const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + h));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + h),
                          _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int32_t>(mask))));
    }
  }
  return {k, v, unit.tokens, unit.low, unit.high, unit.distance};
}

static inline void score_unit(const DecodeShape& shape, const Unit& unit, const float* query, float* scores,
                              Prefetcher& prefetcher) {
  const int64_t head_size = shape.head_size, stride = 2 * head_size * static_cast<int64_t>(sizeof(BF16));
  const int64_t tile_floats = kTileRows * shape.columns;
  for (int64_t t = 0; t < unit.tokens; t += kStepTokens, scores += 2 * tile_floats) {
    const BF16* const k = unit.k + t * head_size;
    tile_zero<kEvenScores>();
    tile_zero<kOddScores>();
    for (int64_t i = 0; i < shape.score_tiles; ++i) {
      const int64_t h = tile_dim<32>(i, head_size);
      tile_load<kQuery>(query + i * tile_floats, 4 * shape.columns);
      tile_load<kStream0>(k + h, stride);
      tile_dpbf16<kEvenScores, kStream0, kQuery>();
      prefetcher.next();
      tile_load<kStream1>(k + head_size + h, stride);
      tile_dpbf16<kOddScores, kStream1, kQuery>();
      prefetcher.next();
    }
    tile_store<kEvenScores>(scores, 4 * shape.columns);
    tile_store<kOddScores>(scores + tile_floats, 4 * shape.columns);
  }
}

// A vector of scores or weights holds kColumns heads of W / kColumns tokens, every other one of a step.
template <int kColumns>
struct Softmax {
  static constexpr VI kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

  // The unit's scores become weights in bf16 pairs, and its maxima the running ones. `head`: the batch's first, in the
  // order of acc.
  static void run(const DecodeShape& shape, const Unit& unit, const Keys& keys, const AttentionParams& params,
                  int64_t head, float* scores, BatchState& state, float* weights, Prefetcher& prefetcher) {
    const int64_t steps = unit.tokens / kStepTokens, first = keys.position + unit.distance;
    const auto lowest = [&](int64_t row) { return max64(unit.low, first_key(keys.position + row, params) - first); };
    const auto highest = [&](int64_t row) { return min64(unit.high, row + 1 - unit.distance); };
    const bool has_slopes = params.alibi_slopes != nullptr;
    const bool rows_differ = keys.num_rows > 1 && (lowest(keys.num_rows - 1) > unit.low || highest(0) < unit.high);
    const bool is_cut = unit.low > 0 || unit.high < unit.tokens || rows_differ;
    // Of each column: its row, and the tokens [low, high) that this one sees.
    VI rows{}, low = VI{} + static_cast<int32_t>(unit.low), high = VI{} + static_cast<int32_t>(unit.high);
    VF slopes{};
    if (has_slopes || rows_differ) {
      const int64_t row_group = shape.group / keys.num_rows;
      for (int64_t lane = 0; lane < W; ++lane) {
        const int64_t n = min64(head + lane % kColumns, keys.num_rows * params.num_heads - 1);
        const int64_t row = n % shape.group / row_group;
        rows[lane] = static_cast<int32_t>(row);
        low[lane] = static_cast<int32_t>(lowest(row));
        high[lane] = static_cast<int32_t>(highest(row));
        if (has_slopes) slopes[lane] = params.alibi_slopes[n / shape.group * row_group + n % row_group];
      }
    }
    const bool is_plain = !is_cut && kColumns > 1 && only_scaled(params);  // scores stay as they are
    const VF old_max = load(state.max);
    VF best = old_max;
    if (is_plain) {
      best = vmax(best, max_of(scores, steps * 2 * kColumns) * splat(params.scale));
    } else {
      for (int64_t i = 0; i < steps * 2 * kColumns; ++i) {
        VF s = soften(load(scores + i * W), params);
        if (has_slopes || is_cut) {
          const int64_t row = i % kColumns * W;  // of the tile, in elements
          const VI token = (kLane + static_cast<int32_t>(row)) / kColumns * 2 +
                           static_cast<int32_t>(i / (2 * kColumns) * kStepTokens + i / kColumns % 2);
          if (has_slopes) s += slopes * __builtin_convertvector(token + static_cast<int32_t>(unit.distance) - rows, VF);
          s = token < low || token >= high ? splat(kNegInf) : s;
        }
        store(scores + i * W, s);
        best = vmax(best, s);
      }
    }
    for (int32_t distance = kColumns; distance < W; distance *= 2)
      best = vmax(best, __builtin_shuffle(best, kLane ^ distance));
    const VF base = best == splat(kNegInf) ? splat(0.0f) : best;  // a column that has seen no key yet
    VF sum = load(state.sum);
    if (_mm512_cmp_ps_mask((__m512)best, (__m512)old_max, _CMP_NEQ_UQ) != 0) {  // seldom, after the first units
      const VF rescale = vexp(old_max - base);
      for (int64_t row = 0; row < shape.tile_heads; ++row)
        for (float *out = state.output + row * shape.value_tiles * W, *stop = out + shape.value_tiles * W; out < stop;
             out += W)
          store(out, load(out) * splat(rescale[row % shape.heads]));
      sum *= rescale;
      store(state.max, best);
    }
    const VF factor = splat(is_plain ? params.scale * kLog2E : kLog2E), offset = base * splat(kLog2E);
    for (int64_t step = 0; step < steps; ++step, scores += 2 * kColumns * W, weights += 2 * shape.heads * kTileRows) {
      VI hi[kColumns], lo[kColumns];
      for (int i = 0; i < kColumns; ++i) {
        const VF even = vexp2(load(scores + i * W) * factor - offset);
        const VF odd = vexp2(load(scores + (kColumns + i) * W) * factor - offset);
        sum += even + odd;
        split_pairs(even, odd, &hi[i], &lo[i]);
        prefetcher.next();
      }
      constexpr int kColumnBits = __builtin_ctz(kColumns);
      unzip<kColumns, kColumnBits>(hi);  // from [16 pairs][columns] to [columns][16 pairs]
      unzip<kColumns, kColumnBits>(lo);
      for (int64_t n = 0; n < kColumns && n < shape.heads; ++n) {
        store_bits(weights + n * kTileRows, hi[n]);
        store_bits(weights + (shape.heads + n) * kTileRows, lo[n]);
      }
    }
    store(state.sum, sum);
  }
};

static inline void add_unit(const DecodeShape& shape, const Unit& unit, const float* weights, float* output,
                            Prefetcher& prefetcher) {
  const int64_t stride = shape.value_tiles * kTileRowBytes;  // of the output
  const int64_t v_stride = 2 * shape.head_size * static_cast<int64_t>(sizeof(BF16));
  const int64_t steps = unit.tokens / kStepTokens, part_floats = shape.tile_heads * kTileRows;
  for (int64_t i = 0; i < shape.value_tiles; i += 2) {
    const bool two = i + 1 < shape.value_tiles;
    tile_load<kOut0>(output + i * W, stride);
    if (two) tile_load<kOut1>(output + (i + 1) * W, stride);
    for (int64_t step = 0; step < steps; ++step) {
      const BF16* const v = unit.v + step * kStepTokens * shape.head_size;
      tile_load<kStream0>(v + 2 * tile_dim<16>(i, shape.head_size), v_stride);
      if (two) tile_load<kStream1>(v + 2 * tile_dim<16>(i + 1, shape.head_size), v_stride);
      for (int64_t part = 0; part < shape.parts; ++part) {
        tile_load<kWeights>(weights + (step * shape.parts + part) * part_floats, kTileRowBytes);
        tile_dpbf16<kOut0, kWeights, kStream0>();
        if (two) tile_dpbf16<kOut1, kWeights, kStream1>();
      }
      prefetcher.next();
      if (two) prefetcher.next();
    }
    tile_store<kOut0>(output + i * W, stride);
    if (two) tile_store<kOut1>(output + (i + 1) * W, stride);
  }
}

// Q^T: row p of tile i holds the elements tile_dim(i) + 2p and + 1 of each head; those that the tile before has, and
// heads that the batch lacks, are zeros. `queries`: a batch's heads.
template <int kColumns>
static void start_batch(const DecodeShape& shape, const BF16* const* queries, int64_t num_heads, BatchState& state) {
  for (int64_t i = 0; i < shape.score_tiles; ++i) {
    VI rows[kColumns] = {};
    for (int64_t n = 0; n < kColumns && n < num_heads; ++n)
      rows[n] = load_query(queries[n], tile_dim<32>(i, shape.head_size), 32 * i);
    unzip<kColumns, 4>(rows);
    for (int n = 0; n < kColumns; ++n) store_bits(state.query + (i * kColumns + n) * W, rows[n]);
  }
  for (int64_t i = 0; i < shape.output_floats(); ++i) state.output[i] = 0.0f;
  store(state.max, splat(kNegInf));
  store(state.sum, splat(0.0f));
}

static void finish_batch(const DecodeShape& shape, const BatchState& state, int64_t num_heads, float* acc, float* m,
                         float* l) {
  for (int64_t n = 0; n < num_heads; ++n) {
    m[n] = state.max[n];
    l[n] = 0.0f;
    for (int64_t lane = n; lane < W; lane += shape.columns) l[n] += state.sum[lane];
    const float* const hi = state.output + n * shape.value_tiles * W;
    const float* const lo = hi + shape.heads * shape.value_tiles * W;  // if one tile has both
    float* const row = acc + n * shape.head_size;
    for (int64_t i = 0; i < shape.value_tiles; ++i) {
      const VF sum = shape.parts == 1 ? load(hi + i * W) + load(lo + i * W) : load(hi + i * W);
      store(row + tile_dim<16>(i, shape.head_size), sum);
    }
  }
}

template <int kColumns>
static void decode_columns(const DecodeShape& shape, const BF16* q, const Keys& keys, const AttentionParams& params,
                           float* acc, float* m, float* l, float* scratch) {
  const PagedKV& kv = keys.kv;
  const int64_t head_size = kv.head_size;
  const auto each_batch = [&](auto&& visit) {
    for (int64_t i = 0; i < shape.states; ++i) {
      const int64_t in_group = i % shape.batches * shape.heads;
      visit(BatchState(shape, scratch, i), i / shape.batches * shape.group + in_group,
            min64(shape.heads, shape.group - in_group));
    }
  };
  const int64_t row_group = shape.group / keys.num_rows;
  each_batch([&](BatchState state, int64_t head, int64_t num_heads) {
    const BF16* queries[kTileRows];
    for (int64_t i = 0; i < num_heads; ++i) {
      const int64_t n = head + i, row = n % shape.group / row_group;
      queries[i] = q + (row * params.num_heads + n / shape.group * row_group + n % row_group) * head_size;
    }
    start_batch<kColumns>(shape, queries, num_heads, state);
  });

  float* const scores = scratch + shape.states * shape.state_floats();
  float* const weights = scores + shape.score_floats();
  auto* const k_copy = reinterpret_cast<BF16*>(weights + shape.weight_floats());
  BF16* const v_copy = k_copy + 2 * round_up(shape.copy_floats(), W);
  const int64_t step_slots = 2 * shape.score_tiles + kColumns + shape.value_tiles;
  Prefetcher prefetcher(keys, kv.block_size / kStepTokens * shape.batches * step_slots);

  tile_configure(decode_config(shape));
  for (int64_t i = 0; i < keys.num_tiles; ++i) {
    prefetcher.start(i);
    const int64_t low = keys.low(i), high = keys.high(i), offset = keys.offset(i);
    for (int64_t t = low / kUnitTokens * kUnitTokens; t < high; t += kUnitTokens) {
      Unit unit = {reinterpret_cast<const BF16*>(kv.k + offset) + t * head_size,
                   reinterpret_cast<const BF16*>(kv.v + offset) + t * head_size,
                   min64(kUnitTokens, round_up(high - t, kStepTokens)), max64(0, low - t),
                   min64(kUnitTokens, high - t), keys.first_position(i) + t - keys.position};
      if (unit.low > 0 || unit.high < unit.tokens) unit = copy_unit(unit, head_size, k_copy, v_copy);
      for (int64_t batch = 0; batch < shape.batches; ++batch) {
        BatchState state(shape, scratch, i % kv.kv_heads * shape.batches + batch);
        score_unit(shape, unit, state.query, scores, prefetcher);
        const int64_t head = i % kv.kv_heads * shape.group + batch * shape.heads;
        Softmax<kColumns>::run(shape, unit, keys, params, head, scores, state, weights, prefetcher);
        add_unit(shape, unit, weights, state.output, prefetcher);
      }
    }
  }
  tile_release();

  each_batch([&](BatchState state, int64_t head, int64_t num_heads) {
    finish_batch(shape, state, num_heads, acc + head * head_size, m + head, l + head);
  });
}

void decode_by_tiles(const BF16* q, const PagedKV& kv, const int32_t* block_table, int64_t position, int64_t num_rows,
                     int64_t begin, int64_t end, const AttentionParams& params, float* acc, float* m, float* l,
                     float* scratch) {
  const int64_t num_heads = num_rows * params.num_heads;
  end = min64(end, position + num_rows);
  begin = max64(begin, first_key(position, params));
  if (begin >= end) {
    for (int64_t i = 0; i < num_heads * kv.head_size; ++i) acc[i] = 0.0f;
    for (int64_t n = 0; n < num_heads; ++n) {
      m[n] = kNegInf;
      l[n] = 0.0f;
    }
    return;
  }
  const DecodeShape shape(kv, num_heads);
  const auto run = shape.columns == 1   ? decode_columns<1>
                   : shape.columns == 2 ? decode_columns<2>
                   : shape.columns == 4 ? decode_columns<4>
                   : shape.columns == 8 ? decode_columns<8>
                                        : decode_columns<16>;
  run(shape, q, Keys{kv, block_table, position, num_rows, begin, end}, params, acc, m, l, scratch);
}
