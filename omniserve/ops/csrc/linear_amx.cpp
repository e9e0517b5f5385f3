// Linear kernels for x86 with AMX-BF16: tiles for bf16, everything else as with AVX512-BF16.
#if defined(__x86_64__)
#include <immintrin.h>

#include "amx_tiles.h"
#include "linear_kernels.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")
#define OMNI_ISA amx_bf16
#define OMNI_LANES 16
#define OMNI_DPBF16 1
#define OMNI_VNNI 1
#define OMNI_TILES 1
#include "linear_kernel.inl"

namespace omniserve {
const LinearKernels& amx_bf16_linear_kernels() { return amx_bf16::kLinearKernels; }
}  // namespace omniserve
#endif
