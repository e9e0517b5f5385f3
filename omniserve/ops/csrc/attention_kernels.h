// The table of kernels that one instruction set provides; attention.cpp picks a table at run time.
#pragma once

#include "attention.h"

namespace omniserve {

constexpr int64_t kMaxLanes = 16;       // fp32 lanes of the widest vector
constexpr int64_t kDecodeTile = 64;     // keys that one pass of the decode kernel scores
constexpr int64_t kPrefillTile = 64;    // keys that one pass of the prefill kernel scores
constexpr int64_t kScratchAlign = 64;   // bytes

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

struct Kernels {
  // As decode_partial; `scratch` holds decode_scratch_floats() floats, aligned to kScratchAlign.
  void (*decode)(const void* q, DType q_dtype, const PagedKV& kv, const int32_t* block_table, int64_t position,
                 int64_t num_rows, int64_t begin, int64_t end, const AttentionParams& params, float* acc, float* m,
                 float* l, float* scratch);
  // As merge_partials.
  void (*merge)(const float* acc, const float* m, const float* l, int64_t num_pieces, int64_t num_rows,
                int64_t num_heads, int64_t kv_heads, int64_t head_size, const float* sinks, DType dtype, void* out);
  // As prefill_tile; `scratch` holds prefill_scratch_floats() floats, aligned to kScratchAlign.
  void (*prefill)(const void* q, DType q_dtype, int64_t q_stride, const PagedKV& kv, const int32_t* block_table,
                  int64_t context_len, int64_t q_begin, int64_t q_end, int64_t kv_head, const AttentionParams& params,
                  void* out, int64_t out_stride, float* scratch);
};

// Whether this CPU's prefetchers keep up with a sequential reader by themselves, across 4 KiB borders: AMD's do (see
// Ahead in attention_decode.inl), Intel's need to be asked.
bool hardware_follows_streams();

const Kernels& portable_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512_bf16_kernels();
const Kernels& amx_bf16_kernels();
bool amx_bf16_granted();  // the CPU has it, and the operating system lends it to this process
// What the AMX kernels need of the scratch, in floats. Decode: num_heads is rows x query heads; prefill: num_rows is
// queries x group.
int64_t amx_decode_scratch_floats(const PagedKV& kv, int64_t num_heads);
int64_t amx_prefill_scratch_floats(const PagedKV& kv, DType q_dtype, int64_t num_rows);
#endif

}  // namespace omniserve
