// Blocks of a cache that run from the right. No torch header.
#pragma once

#include <cstdint>

namespace omniserve {

// Copy K or V of a cache block, [K, S, H], each head's rows the other way round.
void reverse_rows(const char* from, int64_t num_heads, int64_t block_size, int64_t row_bytes, char* to);

}  // namespace omniserve
