// The table of linear kernels that one instruction set provides; linear.cpp picks a table at run time.
#pragma once

#include "linear.h"

namespace omniserve {

// Bytes between two rows of packed x: whole cache lines, an odd number of them, so that rows lie in different sets of
// a cache.
inline int64_t packed_row_bytes(int64_t num_in, int64_t element_bytes) {
  return ((num_in * element_bytes + 63) / 64 | 1) * 64;
}

struct LinearKernels {
  const char* name;
  LinearRows (*rows)(const LinearArgs& args);  // as linear_rows
  int64_t (*row_bytes)(const LinearArgs& args);
  void (*pack)(const LinearArgs& args, void* packed_x, int64_t begin, int64_t end);  // as linear_pack_rows
  void (*features)(const LinearArgs& args, const void* packed_x, float* sums, int64_t begin, int64_t end,
                   int64_t first_row, int64_t last_row);  // as linear_features
  void (*lora)(const LoraArgs& args, int64_t begin, int64_t end, int64_t first_row, int64_t last_row);
};

const LinearKernels& portable_linear_kernels();
#if defined(__x86_64__)
const LinearKernels& avx2_linear_kernels();
const LinearKernels& avx512_linear_kernels();
const LinearKernels& avx512_vnni_linear_kernels();
const LinearKernels& avx512_bf16_linear_kernels();
const LinearKernels& amx_bf16_linear_kernels();
#endif

}  // namespace omniserve
