// Pages of the host pool. No torch header.
#pragma once

#include <cstdint>
#include <vector>

namespace omniserve {

// Have the kernel back these bytes with memory, by a write to each page that changes nothing: they keep their contents,
// whoever uses them meanwhile. MADV_POPULATE_WRITE would do the same, but it holds the lock of the whole address space
// for as long as the kernel clears pages, and a step that allocates memory would wait for an idle thread.
void touch_pages(char* data, int64_t bytes);

// Spread pages that are not backed yet over these NUMA nodes, in turn. std::runtime_error if the kernel refuses.
void interleave_pages(char* data, int64_t bytes, const std::vector<int64_t>& nodes);

}  // namespace omniserve
