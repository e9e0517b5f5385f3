// Linear kernels for x86 with avx2,fma,f16c.
#if defined(__x86_64__)
#include <immintrin.h>

#include "linear_kernels.h"

#pragma GCC target("avx2,fma,f16c")
#define OMNI_ISA avx2
#define OMNI_LANES 8
#define OMNI_DPBF16 0
#define OMNI_VNNI 0
#include "linear_kernel.inl"

namespace omniserve {
const LinearKernels& avx2_linear_kernels() { return avx2::kLinearKernels; }
}  // namespace omniserve
#endif
