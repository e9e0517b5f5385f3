// Sizes of the AMX kernels' work and the parts of their scratch. Compiled for any x86: attention.cpp asks for sizes
// before it knows which kernels run. To be included by attention_amx.cpp alone.
#pragma once

#include "amx_tiles.h"
#include "attention_kernels.h"

namespace omniserve {
namespace amx_bf16 {
namespace {

constexpr int64_t kStepTokens = 2 * kTileRows;  // one product of weights and V: the columns of an A tile
constexpr int64_t kUnitTokens = 64;             // keys that decode scores at once, at most

// Blocks must hold whole steps, in token pairs, and rows whole tiles (see tile_dim). Block sizes of 16 and less, tiny
// heads and other dtypes are served by vectors.
bool tiles_serve_decode(const PagedKV& kv) {
  return kv.dtype == DType::bf16 && kv.v_pairs && kv.block_size % kStepTokens == 0 && kv.head_size >= 32;
}

// Sizes of one call, and the parts of its scratch.
struct DecodeShape {
  int64_t head_size;
  int64_t score_tiles;  // tiles of 32 elements that a row of K has
  int64_t value_tiles;  // tiles of 16 elements that a row of V has
  int64_t group;        // query heads of a KV head, of all query rows, served `heads` at a time
  int64_t batches;      // of them
  int64_t heads;        // of a batch; the last may be padded with zeros
  int64_t columns;      // of a score tile: heads, to a power of two
  int64_t parts;        // A tiles that the weights of a step take: [hi; lo] fits one up to 8 heads
  int64_t tile_heads;   // rows of such an A tile
  int64_t states;       // batches of all KV heads

  DecodeShape(const PagedKV& kv, int64_t num_heads)
      : head_size(kv.head_size), score_tiles((head_size + 31) / 32), value_tiles((head_size + 15) / 16),
        group(num_heads / kv.kv_heads), batches((group + kTileRows - 1) / kTileRows),
        heads((group + batches - 1) / batches), columns(1), parts(heads <= 8 ? 1 : 2),
        tile_heads(parts == 1 ? 2 * heads : heads), states(batches * kv.kv_heads) {
    while (columns < heads) columns *= 2;
  }

  // The scratch has, first, a state for each batch: Q^T in tiles [score_tiles][16][columns] of bf16 pairs, the output
  // [tile_heads][16 value_tiles], and a vector each of maxima and of sums, whose lane i belongs to head i % columns.
  int64_t query_floats() const { return score_tiles * kTileRows * columns; }
  int64_t output_floats() const { return tile_heads * value_tiles * 16; }
  int64_t state_floats() const { return query_floats() + output_floats() + 2 * kTileRows; }
  // Then, for a unit: scores [steps][even, odd][16][columns], weights [steps][hi, lo][heads][16] of pairs, and copies
  // of K and V for units that are not all of the sequence.
  int64_t score_floats() const { return kUnitTokens * columns; }
  int64_t weight_floats() const { return kUnitTokens * kTileRows; }
  int64_t copy_floats() const { return kUnitTokens * head_size / 2; }
  int64_t scratch_floats() const {
    return states * state_floats() + score_floats() + weight_floats() + 2 * round_up(copy_floats(), kTileRows);
  }
};

// Groups of kTileRows keys must lie in one block. See tiles_serve_decode. Codes of i8 are exact in bf16; their scales
// multiply scores and weights.
bool tiles_serve_prefill(const PagedKV& kv, DType q_dtype) {
  const bool is_exact = kv.dtype == DType::bf16 || kv.dtype == DType::i8;
  return is_exact && q_dtype == DType::bf16 && !kv.v_pairs && kv.block_size % kTileRows == 0 && kv.head_size >= 32;
}

constexpr int64_t kKeySteps = kPrefillTile / kStepTokens;
constexpr int64_t kTileFloats = kTileRows * kTileRows;

// Sizes of one call, and the parts of its scratch.
struct PrefillTile {
  int64_t rows;  // in use
  int64_t head_size;
  int64_t columns;
  int64_t score_tiles;  // tiles of 32 elements that a row of K has
  int64_t value_tiles;  // tiles of 16 elements that a row of V has

  float* query;       // tiles [columns][score_tiles] of bf16 pairs
  float* output;      // tiles [columns][value_tiles], not yet divided
  float* scores;      // [columns][kPrefillTile][kTileRows]
  float* weights;     // tiles [columns][kKeySteps][hi, lo] of bf16 pairs
  float* values;      // V^T: tiles [kKeySteps][value_tiles] of bf16 pairs
  float* keys;        // [kPrefillTile][H] of bf16, for groups of keys that the chunk does not see as a whole, or of i8
  float* max;         // [columns][kTileRows]
  float* sum;         // [columns][kTileRows]
  float* slopes;      // [columns][kTileRows], of ALiBi
  int32_t* position;  // [columns][kTileRows], ascending; padding repeats the last row's
  int32_t* first_key; // [columns][kTileRows], the lowest position that the row sees; ascending

  PrefillTile(int64_t num_rows, int64_t head_size)
      : rows(num_rows), head_size(head_size), columns((num_rows + kTileRows - 1) / kTileRows),
        score_tiles((head_size + 31) / 32), value_tiles((head_size + 15) / 16) {}

  int64_t scratch_floats() const {
    return columns * kTileFloats * (score_tiles + value_tiles) + columns * kTileRows * (2 * kPrefillTile + 5) +
           kKeySteps * value_tiles * kTileFloats + kPrefillTile * head_size / 2;
  }
  void lay_out(float* scratch) {
    query = scratch;
    output = query + columns * score_tiles * kTileFloats;
    scores = output + columns * value_tiles * kTileFloats;
    weights = scores + columns * kTileRows * kPrefillTile;
    values = weights + columns * kTileRows * kPrefillTile;
    max = values + kKeySteps * value_tiles * kTileFloats;
    sum = max + columns * kTileRows;
    slopes = sum + columns * kTileRows;
    position = reinterpret_cast<int32_t*>(slopes + columns * kTileRows);
    first_key = position + columns * kTileRows;
    keys = reinterpret_cast<float*>(first_key + columns * kTileRows);
  }
};

}  // namespace
}  // namespace amx_bf16
}  // namespace omniserve
