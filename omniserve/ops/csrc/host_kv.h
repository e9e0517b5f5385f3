// The host tier's KV pool: its blocks, and what goes in and out of them. No torch header.
//
// A block is [K, 2, S, H]: per KV head a plane of K and one of V, in the layout of host_layout() (attention.h): V of a
// bf16 pool with an even S in token pairs, everything else in rows. An i8 block has scales [K, 2, S] beside it: a row's
// values are i8 * scale, scale = max|x| / 127, and 0 for a row of zeros. A row that holds inf or NaN becomes NaN as a
// whole, by its scale: what is broken stays visible, and stays where it is. The device tier's i8 is rounded alike.
//
// Legend: K KV heads, S block size, H head size.
#pragma once

#include <cstdint>

#include "attention.h"

namespace omniserve {

struct HostBlockShape {
  int64_t kv_heads;
  int64_t block_size;
  int64_t head_size;
  DType dtype;       // of the pool
  DType row_dtype;   // of a token's K and V: the pool's, or any but i8 if the pool is i8
  DType cache_dtype; // of whole blocks that go in and come out: row_dtype, or i8 in the layout of device_layout()

  bool v_pairs() const { return host_v_pairs(dtype, block_size); }
  int64_t plane_elements() const { return block_size * head_size; }
  int64_t plane_bytes() const { return plane_elements() * dtype_bytes(dtype); }
  int64_t block_bytes() const { return 2 * kv_heads * plane_bytes(); }
  int64_t block_scales() const { return dtype == DType::i8 ? 2 * kv_heads * block_size : 0; }
  int64_t cache_head_bytes() const { return device_head_bytes(block_size, head_size, cache_dtype); }
  int64_t cache_block_bytes() const { return kv_heads * cache_head_bytes(); }  // of K, and as many of V
};

// One row to i8; returns its scale.
float quantize_row(DType row_dtype, const char* row, int64_t head_size, char* to);

// Heads of one token, contiguous each; head i starts at i * head_stride bytes.
struct TokenRow {
  const char* data;
  int64_t head_stride;
};

// Put one token's K and V at `offset` of a block. `scales` is the block's, null but for i8.
void append_host_token(const HostBlockShape& shape, int64_t offset, const TokenRow& k, const TokenRow& v, char* block,
                       float* scales);

// Copy a whole block in from, or out to, K and V of a block of a cache, in the layout of device_layout().
void pack_host_block(const HostBlockShape& shape, const char* k, const char* v, char* block, float* scales);
void unpack_host_block(const HostBlockShape& shape, const char* block, const float* scales, char* k, char* v);

// K or V of a cache's block, each head's rows the other way round.
void reverse_rows(const HostBlockShape& shape, const char* from, char* to);

}  // namespace omniserve
