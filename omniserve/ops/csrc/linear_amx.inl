// bf16 rows times a bf16 weight on AMX tiles; included by linear_kernel.inl. Speed is reasoned, not measured yet.
//
// A panel's 16 rows of pairs are two tiles, of 16 features each, as they lie. A block is up to 32 rows of x, two tiles:
// four loads and four products a step of 32 inputs. All row counts use tiles of 16 rows, so that sums are added in one
// order: few rows are bound by memory, where rows that are not there cost nothing.

constexpr int64_t kTileInputs = 32;
constexpr int64_t kTilePieceSteps = 16;  // a piece of a panel stays in L1 while rows pass
constexpr int64_t kTileAhead = 8192;     // bytes of the weight that a single block prefetches

struct TilePiece {
  const BF16* x;
  int64_t x_bytes;  // from row to row
  const BF16* panel;
  int64_t num_steps;
  const char* ahead;
  int64_t ahead_step;  // bytes
  float* sums;         // [rows, kPanel]
  bool goes_on;
};

// Tiles 0 and 1 are the sums of the first 16 rows, 2 and 3 of the next; 4 and 5 are x, 6 and 7 the weight.
template <bool TWO>
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
  const char* x = reinterpret_cast<const char*>(piece.x);
  const char* panel = reinterpret_cast<const char*>(piece.panel);
  const char* ahead = piece.ahead;
  for (int64_t step = 0; step < piece.num_steps; ++step) {
    tile_load<6>(panel, kPanelBytes);
    tile_load<4>(x, piece.x_bytes);
    tile_dpbf16<0, 4, 6>();
    tile_load<7>(panel + 64, kPanelBytes);
    tile_dpbf16<1, 4, 7>();
    if (TWO) {
      tile_load<5>(x + kRows * piece.x_bytes, piece.x_bytes);
      tile_dpbf16<2, 5, 6>();
      tile_dpbf16<3, 5, 7>();
    }
    for (int64_t i = 0; i < piece.ahead_step; i += kLine) __builtin_prefetch(ahead + i, 0, 2);
    x += kTileInputs * 2;
    panel += kTileInputs / 2 * kPanelBytes;
    ahead += piece.ahead_step;
  }
  tile_store<0>(piece.sums, kSumBytes);
  tile_store<1>(piece.sums + 16, kSumBytes);
  if (TWO) tile_store<2>(next_sums, kSumBytes), tile_store<3>(next_sums + 16, kSumBytes);
}

static void tile_features(const LinearArgs& args, const void* packed_x, float* sums, int64_t begin, int64_t end,
                          int64_t following, int64_t first_row, int64_t last_row) {
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
  for (int64_t step = 0; step == 0 || step < whole; step += kTilePieceSteps) {
    const int64_t num_steps = min64(kTilePieceSteps, whole - step);
    const bool is_last = step + kTilePieceSteps >= whole;
    for (int64_t feature = begin; feature < end; feature += kPanel) {
      const BF16* const panel = weight + feature / kPanel * size;
      const BF16* const next = feature + kPanel < end ? panel + size + step * kStepElements
                               : !is_last ? weight + begin / kPanel * size + (step + kTilePieceSteps) * kStepElements
                                          : weight + following / kPanel * size;
      TilePiece piece;
      piece.x_bytes = packed_row_bytes(args.num_in, 2);
      piece.ahead_step = kStepElements * 2 / num_blocks / kLine * kLine;
      if (is_last && rest > 0) {
        __builtin_memset(tail, 0, sizeof(tail));
        __builtin_memcpy(tail, panel + whole * kStepElements, static_cast<size_t>((rest + 1) / 2 * 2 * kPanel) * 2);
      }
      for (int64_t b = 0; b < num_blocks; ++b) {
        const int64_t row = b * 2 * kTileRows, rows = min64(2 * kTileRows, num_rows - row);
        const BF16* const x_row = x + row * (piece.x_bytes / 2);
        piece.x = x_row + step * kTileInputs;
        piece.panel = panel + step * kStepElements;
        piece.num_steps = num_steps;
        piece.ahead = num_blocks > 1 ? reinterpret_cast<const char*>(next) + num_steps * piece.ahead_step * b
                                     : reinterpret_cast<const char*>(piece.panel) + kTileAhead;
        piece.sums = sums + (feature - begin) * padded_rows + row * kPanel;
        piece.goes_on = step > 0;
        if (is_last) claim_rows(args, feature, first_row + row, rows);
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
