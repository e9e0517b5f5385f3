// Linear kernels for x86 with avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c.
#if defined(__x86_64__)
#include <immintrin.h>

#include "linear_kernels.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#define OMNI_ISA avx512_vnni
#define OMNI_LANES 16
#define OMNI_DPBF16 0
#define OMNI_VNNI 1
#include "linear_kernel.inl"

namespace omniserve {
const LinearKernels& avx512_vnni_linear_kernels() { return avx512_vnni::kLinearKernels; }
}  // namespace omniserve
#endif
