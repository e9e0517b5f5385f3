// Attention kernels over a paged KV cache. No torch header: they can be read, fuzzed and timed alone.
//
// Legend: T packed query tokens, N query heads, K KV heads, H head size, S block size.
#pragma once

#include <cstdint>
#include <vector>

namespace omniserve {

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2, i8 = 3 };

inline int64_t dtype_bytes(DType dtype) { return dtype == DType::f32 ? 4 : dtype == DType::i8 ? 1 : 2; }

// One layer's paged cache of one tier. Row t of a block's KV head is H elements at block * block_stride +
// head * head_stride + t * H elements, or, where v_pairs holds, V's rows 2i and 2i+1 share [H, 2] in the same place.
struct PagedKV {
  const char* k;
  const char* v;
  int64_t num_blocks;
  int64_t kv_heads;
  int64_t block_size;
  int64_t head_size;
  DType dtype;
  int64_t block_stride;  // bytes
  int64_t head_stride;   // bytes
  bool v_pairs;
  const float* k_scales = nullptr;  // i8: the row's value is i8 * scale; row t's at block * scale_block_stride +
  const float* v_scales = nullptr;  // head * scale_head_stride + t
  int64_t scale_block_stride = 0;
  int64_t scale_head_stride = 0;
};

constexpr int64_t kScaleBytes = 4;  // of a row of i8

// Bytes of a block's KV head in the device tier's K, or V: rows, and for i8 behind them their scales.
inline int64_t device_head_bytes(int64_t block_size, int64_t head_size, DType dtype) {
  return block_size * (head_size * dtype_bytes(dtype) + (dtype == DType::i8 ? kScaleBytes : 0));
}

// Device tier: K and V apart, [num_blocks, K, S, H] each; for i8 [num_blocks, K] runs of codes [S, H] and scales [S],
// so that whoever copies blocks as bytes takes the scales along.
inline PagedKV device_layout(const void* k, const void* v, int64_t num_blocks, int64_t kv_heads, int64_t block_size,
                             int64_t head_size, DType dtype) {
  const int64_t head = device_head_bytes(block_size, head_size, dtype), rows = block_size * head_size;
  PagedKV kv{static_cast<const char*>(k), static_cast<const char*>(v), num_blocks, kv_heads, block_size, head_size,
             dtype, kv_heads * head, head, false};
  if (dtype == DType::i8) {
    kv.k_scales = reinterpret_cast<const float*>(kv.k + rows);
    kv.v_scales = reinterpret_cast<const float*>(kv.v + rows);
    kv.scale_block_stride = kv.block_stride / kScaleBytes;
    kv.scale_head_stride = kv.head_stride / kScaleBytes;
  }
  return kv;
}

// Whether the host layout keeps V in token pairs: one 32-bit lane then holds two tokens, which is what VDPBF16PS, AMX
// and the shift that widens bf16 all want.
inline bool host_v_pairs(DType dtype, int64_t block_size) { return dtype == DType::bf16 && block_size % 2 == 0; }

// Host tier: [num_blocks, K, 2, S, H], and `scales` [num_blocks, K, 2, S] for i8. A block is one run of memory: heads
// inside blocks are read in the order in which they lie, and long runs are what the hardware prefetches best.
inline PagedKV host_layout(const void* pool, const float* scales, int64_t num_blocks, int64_t kv_heads,
                           int64_t block_size, int64_t head_size, DType dtype) {
  const int64_t plane = block_size * head_size * dtype_bytes(dtype);
  const char* const k = static_cast<const char*>(pool);
  PagedKV kv{k,     k + plane, num_blocks,           kv_heads,  block_size,
             head_size, dtype, kv_heads * 2 * plane, 2 * plane, host_v_pairs(dtype, block_size)};
  if (scales != nullptr) {
    kv.k_scales = scales;
    kv.v_scales = scales + block_size;
    kv.scale_block_stride = kv_heads * 2 * block_size;
    kv.scale_head_stride = 2 * block_size;
  }
  return kv;
}

// A block table names the block of each run of block_size positions: b, whose rows lie in the order of their positions,
// or from_right(b), whose position i lies in row block_size - 1 - i (device layouts only). Paper: bros 6.
inline int32_t from_right(int32_t block) { return ~block; }

// Where a block table's entry points to.
struct BlockRef {
  int64_t block;
  bool reversed;

  explicit BlockRef(int32_t entry) : block(entry < 0 ? ~entry : entry), reversed(entry < 0) {}
};

struct AttentionParams {
  int64_t num_heads;  // a multiple of kv_heads; query head n reads KV head n / (num_heads / kv_heads)
  float scale;
  int64_t window;  // query at p sees keys (p - window, p]; 0: all of [0, p]
  float softcap;   // 0: none
  int64_t chunk = 0;                    // query at p sees keys [p - p % chunk, p]; 0: all of [0, p]
  const float* sinks = nullptr;         // [N] logits that join the softmax's sum, and have no value; null: none
  const float* alibi_slopes = nullptr;  // [N]; slope * (key position - query position) is added to a score; null: none
};

// The lowest position that the query at `position` sees. It never falls from one position to the next.
inline int64_t first_key(int64_t position, const AttentionParams& params) {
  const int64_t in_chunk = params.chunk > 0 ? position - position % params.chunk : 0;
  const int64_t in_window = params.window > 0 ? position + 1 - params.window : 0;
  return in_chunk > in_window ? in_chunk : in_window;
}

// Flash-decoding piece: `num_rows` query tokens of one sequence, at `position` and the positions behind it, over the keys
// at positions [begin, end) that each one's own position, window and chunk let it see. K and V are read from memory once
// for all rows. `q` is [num_rows, N, H] in q_dtype: the cache's, or any but i8 where the cache is i8. Writes, in fp32 and
// for each row and query head: the softmax-weighted sum of V not yet divided (acc), the running maximum score (m, -inf if
// no key was seen) and the sum of exponentials (l). Takes nothing in from past `end`.
//
// acc is [K, num_rows, N/K, H], m and l are [K, num_rows, N/K]: what reads a KV head lies together. With vectors a row's
// part is the same to the bit as if it came alone. Tiles of AMX score the rows together, so their sums may round
// otherwise, and V that is inf or NaN at a row's position also reaches the rows before it.
void decode_partial(const void* q, DType q_dtype, const PagedKV& kv, const int32_t* block_table, int64_t position,
                    int64_t num_rows, int64_t begin, int64_t end, const AttentionParams& params, float* acc, float* m,
                    float* l);

// Join `num_pieces` results of decode_partial, in order (so the outcome depends on the split only), into out
// [num_rows, N, H]. With R = num_rows*N, piece i's arrays start at acc + i*R*H, m + i*R, l + i*R. The sinks of
// AttentionParams are counted here.
void merge_partials(const float* acc, const float* m, const float* l, int64_t num_pieces, int64_t num_rows,
                    int64_t num_heads, int64_t kv_heads, int64_t head_size, const float* sinks, DType dtype, void* out);

// Keys per piece when a decode over `context_len` keys is split: a function of the length alone, so that a result does
// not depend on the batch or on the number of threads.
int64_t decode_piece_tokens(int64_t context_len);

// One tile of prefill or mixed attention: query tokens [q_begin, q_end) of one sequence (indices into its chunk), all
// query heads of KV head `kv_head`. `q` points at the chunk's first row [q_len, N, H] (row stride q_stride elements),
// `out` likewise with out_stride; both are in q_dtype, as in decode_partial. Query i stands at position context_len + i;
// keys are [0, context_len + q_len). Not for V in pairs.
void prefill_tile(const void* q, DType q_dtype, int64_t q_stride, const PagedKV& kv, const int32_t* block_table,
                  int64_t context_len, int64_t q_begin, int64_t q_end, int64_t kv_head, const AttentionParams& params,
                  void* out, int64_t out_stride);

// Name of the instruction set in use: "amx_bf16", "avx512_bf16", "avx512_vnni", "avx512", "avx2" or "portable".
// OMNISERVE_ISA forces one (std::invalid_argument if this CPU lacks it or the name is unknown).
const char* isa_name();

struct InstructionSet {
  const char* name;
  bool supported;  // by this CPU and its operating system, whatever OMNISERVE_ISA says
};

// All for which there are kernels, best first.
std::vector<InstructionSet> instruction_sets();

}  // namespace omniserve
