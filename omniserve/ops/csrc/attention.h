// Attention kernels over a paged KV cache. No torch header: they can be read, fuzzed and timed alone.
//
// Cache layout, both tiers: K and V are [num_blocks, kv_heads, block_size, head_size] (head-major blocks), row-major.
// Legend: T packed query tokens, N query heads, K KV heads, H head size, S block size.
#pragma once

#include <cstdint>

namespace omniserve {

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2 };

// One layer's paged cache of one tier.
struct PagedKV {
  const void* k;  // [num_blocks, K, S, H]
  const void* v;  // [num_blocks, K, S, H]
  int64_t num_blocks;
  int64_t kv_heads;
  int64_t block_size;
  int64_t head_size;
  DType dtype;
};

struct AttentionParams {
  int64_t num_heads;  // a multiple of kv_heads; query head n reads KV head n / (num_heads / kv_heads)
  float scale;
  int64_t window;  // query at p sees keys (p - window, p]; 0: all of [0, p]
  float softcap;   // 0: none
};

// Flash-decoding piece: one query token at `position` over the keys at positions [begin, end) of its sequence that its
// window lets it see. `q` is [N, H] in the cache's dtype. Writes, in fp32 and for each query head: the softmax-weighted
// sum of V not yet divided (acc [N, H]), the running maximum score (m [N], -inf if no key was seen) and the sum of
// exponentials (l [N]). Reads nothing past `end`.
void decode_partial(const void* q, const PagedKV& kv, const int32_t* block_table, int64_t position, int64_t begin,
                    int64_t end, const AttentionParams& params, float* acc, float* m, float* l);

// Join `num_pieces` results of decode_partial, in order (so the outcome depends on the split only), into out [N, H].
// Piece i's arrays start at acc + i*N*H, m + i*N, l + i*N.
void merge_partials(const float* acc, const float* m, const float* l, int64_t num_pieces, int64_t num_heads,
                    int64_t head_size, DType dtype, void* out);

// Keys per piece when a decode over `context_len` keys is split: a function of the length alone, so that a result does
// not depend on the batch or on the number of threads.
int64_t decode_piece_tokens(int64_t context_len);

// One tile of prefill or mixed attention: query tokens [q_begin, q_end) of one sequence (indices into its chunk), all
// query heads of KV head `kv_head`. `q` points at the chunk's first row [q_len, N, H] (row stride q_stride elements),
// `out` likewise with out_stride. Query i stands at position context_len + i; keys are [0, context_len + q_len).
void prefill_tile(const void* q, int64_t q_stride, const PagedKV& kv, const int32_t* block_table, int64_t context_len,
                  int64_t q_begin, int64_t q_end, int64_t kv_head, const AttentionParams& params, void* out,
                  int64_t out_stride);

// Name of the instruction set in use: "avx512_bf16", "avx512", "avx2" or "portable". OMNISERVE_ISA forces one
// (std::invalid_argument if this CPU lacks it or the name is unknown).
const char* isa_name();

}  // namespace omniserve
