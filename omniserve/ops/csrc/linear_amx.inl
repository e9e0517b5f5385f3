// bf16 rows times a bf16 weight on AMX tiles, and the blocks that other weights share; included by linear_kernel.inl.
//
// A panel's 16 rows of pairs are two tiles, of 16 features each, as they lie. Many rows are bound by arithmetic: a block
// is 32 rows, two tiles, by a panel, which makes four products of four loads. Few rows are bound by memory: 16 rows by
// two panels, for two streams are read faster than one. All row counts use tiles of 16 rows, so that sums are added in
// one order; rows that are not there cost nothing where memory is the bound.

constexpr int64_t kTileInputs = 32;
constexpr int64_t kTilePieceSteps = 8;  // at most: a piece of a panel stays in L1 while rows pass
constexpr int64_t kTileTaskRows = 256;  // L2 is 2 MiB where AMX is
constexpr int64_t kFewRows = 48;        // up to which a product is bound by memory
constexpr int64_t kTileAhead = 1024;    // bytes of the weight that a panel without a pair prefetches
constexpr int64_t kPairAhead = 1536;    // and of each panel of a pair

// The product of a step: of 32 pairs of bf16, or of 64 inputs in int8. Both are 64 bytes of a row of x.
struct Bf16Step {
  template <int C, int A, int B>
  OMNI_INLINE void add() {
    tile_dpbf16<C, A, B>();
  }
};
struct Int8Step {
  template <int C, int A, int B>
  OMNI_INLINE void add() {
    tile_dpbusd<C, A, B>();
  }
};

struct TilePiece {
  const void* x;
  int64_t x_bytes;  // from row to row
  const void* panel;
  int64_t num_steps;
  const char* ahead;
  int64_t ahead_step;  // bytes
  float* sums;         // [rows, kPanel]; of int8 the bits of int32
  bool goes_on;
};

// Tiles 0 and 1 are the sums of the first 16 rows, 2 and 3 of the next; 4 and 5 are x, 6 and 7 the weight.
template <bool TWO, typename Step = Bf16Step>
static void tile_block(const TilePiece& piece) {
  constexpr int64_t kSumBytes = kPanel * 4, kPanelBytes = kPanel * 4, kRows = kTileRows;
  float* const next_sums = piece.sums + kRows * kPanel;
  if (piece.goes_on) {
    tile_load<0>(piece.sums, kSumBytes);
    tile_load<1>(piece.sums + 16, kSumBytes);
    if (TWO) tile_load<2>(next_sums, kSumBytes), tile_load<3>(next_sums + 16, kSumBytes);
  } else {
    tile_zero<0>();
    tile_zero<1>();
    if (TWO) tile_zero<2>(), tile_zero<3>();
  }
  const char* x = static_cast<const char*>(piece.x);
  const char* panel = static_cast<const char*>(piece.panel);
  const char* ahead = piece.ahead;
  for (int64_t step = 0; step < piece.num_steps; ++step) {
    tile_load<6>(panel, kPanelBytes);
    tile_load<4>(x, piece.x_bytes);
    Step::template add<0, 4, 6>();
    tile_load<7>(panel + 64, kPanelBytes);
    Step::template add<1, 4, 7>();
    if (TWO) {
      tile_load<5>(x + kRows * piece.x_bytes, piece.x_bytes);
      Step::template add<2, 5, 6>();
      Step::template add<3, 5, 7>();
    }
    for (int64_t i = 0; i < piece.ahead_step; i += kLine) __builtin_prefetch(ahead + i, 0, 2);
    x += kTileRowBytes;
    panel += kTileRows * kPanelBytes;
    ahead += piece.ahead_step;
  }
  tile_store<0>(piece.sums, kSumBytes);
  tile_store<1>(piece.sums + 16, kSumBytes);
  if (TWO) tile_store<2>(next_sums, kSumBytes), tile_store<3>(next_sums + 16, kSumBytes);
}

// Two panels, `apart` bytes from each other, for up to 16 rows: memory is read faster as two streams. Sums of the
// second panel follow those of the first. Tiles 0 and 1 are the first panel's sums, 2 and 3 the second's.
template <typename Step = Bf16Step>
static void tile_pair(const TilePiece& piece, int64_t apart) {
  constexpr int64_t kSumBytes = kPanel * 4, kPanelBytes = kPanel * 4;
  float* const next_sums = piece.sums + kTileRows * kPanel;
  if (piece.goes_on) {
    tile_load<0>(piece.sums, kSumBytes);
    tile_load<1>(piece.sums + 16, kSumBytes);
    tile_load<2>(next_sums, kSumBytes);
    tile_load<3>(next_sums + 16, kSumBytes);
  } else {
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
  }
  const char* x = static_cast<const char*>(piece.x);
  const char* panel = static_cast<const char*>(piece.panel);
  const char* other = panel + apart;
  for (int64_t step = 0; step < piece.num_steps; ++step) {
    tile_load<4>(x, piece.x_bytes);
    tile_load<5>(panel, kPanelBytes);
    Step::template add<0, 4, 5>();
    tile_load<6>(panel + 64, kPanelBytes);
    Step::template add<1, 4, 6>();
    tile_load<7>(other, kPanelBytes);
    Step::template add<2, 4, 7>();
    tile_load<5>(other + 64, kPanelBytes);
    Step::template add<3, 4, 5>();
    for (int64_t i = 0; i < piece.ahead_step; i += kLine) {
      __builtin_prefetch(panel + kPairAhead + i, 0, 2);
      __builtin_prefetch(other + kPairAhead + i, 0, 2);
    }
    x += kTileRowBytes;
    panel += kTileRows * kPanelBytes;
    other += kTileRows * kPanelBytes;
  }
  tile_store<0>(piece.sums, kSumBytes);
  tile_store<1>(piece.sums + 16, kSumBytes);
  tile_store<2>(next_sums, kSumBytes);
  tile_store<3>(next_sums + 16, kSumBytes);
}

// The inputs behind the last whole step of a panel, and zeros.
OMNI_INLINE void tile_rest(const BF16* panel, int64_t whole, int64_t rest, BF16* tail) {
  constexpr int64_t kStepElements = kTileInputs * kPanel;
  __builtin_memset(tail, 0, kStepElements * sizeof(BF16));
  __builtin_memcpy(tail, panel + whole * kStepElements, static_cast<size_t>((rest + 1) / 2 * 2 * kPanel) * 2);
}

// At most kFewRows rows: bound by memory. Panels in pairs, and a last one alone; 16 rows after the other have each piece.
static void tile_few_rows(const LinearArgs& args, const BF16* x, float* sums, int64_t begin, int64_t end,
                          int64_t first_row, int64_t num_rows) {
  const int64_t whole = args.num_in / kTileInputs, rest = args.num_in % kTileInputs;
  constexpr int64_t kStepElements = kTileInputs * kPanel, kSums = kTileRows * kPanel;
  const int64_t size = panel_size(args.num_in, args.weight_dtype);
  alignas(64) BF16 tail[2 * kStepElements];
  for (int64_t feature = begin; feature < end; feature += 2 * kPanel) {
    const bool paired = feature + kPanel < end;
    const int64_t row_sums = (paired ? 2 : 1) * kSums;  // of 16 rows
    const BF16* const panel = static_cast<const BF16*>(args.weight) + feature / kPanel * size;
    TilePiece piece;
    piece.x_bytes = packed_row_bytes(args.num_in, 2);
    const auto compute = [&](const BF16* weight, int64_t apart, int64_t first_step, int64_t num_steps) {
      piece.num_steps = num_steps;
      piece.panel = weight;
      piece.ahead = reinterpret_cast<const char*>(weight) + kTileAhead;
      piece.goes_on = first_step > 0;
      for (int64_t row = 0; row < num_rows; row += kTileRows) {
        piece.ahead_step = weight != tail ? kStepElements * 2 : 0;
        piece.x = x + row * (piece.x_bytes / 2) + first_step * kTileInputs;
        piece.sums = sums + row / kTileRows * row_sums;
        paired ? tile_pair(piece, apart * 2) : tile_block<false>(piece);
      }
    };
    claim_rows(args, feature, first_row, num_rows);  // of the second panel brings nothing
    const int64_t piece_steps = num_rows > kTileRows ? kTilePieceSteps : max64(1, whole);
    for (int64_t step = 0; step == 0 || step < whole; step += piece_steps)
      compute(panel + step * kStepElements, size, step, min64(piece_steps, whole - step));
    if (rest > 0) {
      tile_rest(panel, whole, rest, tail);
      if (paired) tile_rest(panel + size, whole, rest, tail + kStepElements);
      compute(tail, kStepElements, whole, 1);
    }
    for (int64_t row = 0; row < num_rows; row += kTileRows) {
      const float* const from = sums + row / kTileRows * row_sums;
      const int64_t rows = min64(kTileRows, num_rows - row);
      write_rows<BF16>(args, from, feature, first_row + row, rows);
      if (paired) write_rows<BF16>(args, from + kSums, feature + kPanel, first_row + row, rows);
    }
  }
}

static void tile_features(const LinearArgs& args, const void* packed_x, float* sums, int64_t begin, int64_t end,
                          int64_t first_row, int64_t last_row) {
  const int64_t num_rows = last_row - first_row, padded_rows = (num_rows + kTileRows - 1) / kTileRows * kTileRows;
  const int64_t num_blocks = (num_rows + 2 * kTileRows - 1) / (2 * kTileRows);
  const int64_t size = panel_size(args.num_in, args.weight_dtype);
  const int64_t whole = args.num_in / kTileInputs, rest = args.num_in % kTileInputs;
  const auto* const weight = static_cast<const BF16*>(args.weight);
  const auto* const x = static_cast<const BF16*>(packed_x);
  constexpr int64_t kStepElements = kTileInputs * kPanel;
  alignas(64) BF16 tail[kStepElements];
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.shape(tile, kTileRows, kTileRowBytes);
  tile_configure(config);
  if (num_rows <= kFewRows) {
    tile_few_rows(args, x, sums, begin, end, first_row, num_rows);
    return tile_release();
  }
  const int64_t num_pieces = max64(1, (whole + kTilePieceSteps - 1) / kTilePieceSteps);
  for (int64_t p = 0; p < num_pieces; ++p) {
    const int64_t step = whole * p / num_pieces, num_steps = whole * (p + 1) / num_pieces - step;
    const bool is_last = p + 1 == num_pieces;
    for (int64_t feature = begin; feature < end; feature += kPanel) {
      const BF16* const panel = weight + feature / kPanel * size;
      const BF16* const next = feature + kPanel < end ? panel + size + step * kStepElements
                               : !is_last ? weight + begin / kPanel * size + (step + num_steps) * kStepElements
                                          : weight + (end < args.num_out ? end / kPanel * size : 0);
      TilePiece piece;
      piece.x_bytes = packed_row_bytes(args.num_in, 2);
      piece.ahead_step = kStepElements * 2 / num_blocks / kLine * kLine;
      if (is_last && rest > 0) tile_rest(panel, whole, rest, tail);
      for (int64_t b = 0; b < num_blocks; ++b) {
        const int64_t row = b * 2 * kTileRows, rows = min64(2 * kTileRows, num_rows - row);
        const BF16* const x_row = x + row * (piece.x_bytes / 2);
        piece.x = x_row + step * kTileInputs;
        piece.panel = panel + step * kStepElements;
        piece.num_steps = num_steps;
        piece.ahead = reinterpret_cast<const char*>(next) + num_steps * piece.ahead_step * b;
        piece.sums = sums + (feature - begin) * padded_rows + row * kPanel;
        piece.goes_on = step > 0;
        const auto compute = rows > kTileRows ? tile_block<true> : tile_block<false>;
        compute(piece);
        if (!is_last) continue;
        if (rest > 0) {
          piece.x = x_row + whole * kTileInputs;
          piece.panel = tail;
          piece.num_steps = 1;
          piece.ahead_step = 0;
          piece.goes_on = true;
          compute(piece);
          piece.ahead_step = kStepElements * 2 / num_blocks / kLine * kLine;
        }
        write_rows<BF16>(args, piece.sums, feature, first_row + row, rows);
      }
    }
  }
  tile_release();
}
