// The table of linear kernels that one instruction set provides; linear.cpp picks a table at run time.
#pragma once

#include "linear.h"

namespace omniserve {

// A row of packed x holds a multiple of this: elements of the widest multiply-add, and so whole cache lines.
constexpr int64_t kLinearPad = 32;

struct LinearKernels {
  const char* name;
  void (*pack)(const LinearArgs& args, void* packed);  // as linear_pack
  void (*features)(const LinearArgs& args, const void* packed, int64_t begin, int64_t end);  // as linear_features
};

const LinearKernels& portable_linear_kernels();
#if defined(__x86_64__)
const LinearKernels& avx2_linear_kernels();
const LinearKernels& avx512_linear_kernels();
const LinearKernels& avx512_bf16_linear_kernels();
#endif

}  // namespace omniserve
