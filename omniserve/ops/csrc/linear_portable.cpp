// Linear kernels in 4-lane vectors that every compiler target has.
#include "linear_kernels.h"

#define OMNI_ISA portable
#define OMNI_LANES 4
#define OMNI_DPBF16 0
#define OMNI_VNNI 0
#include "linear_kernel.inl"

namespace omniserve {
const LinearKernels& portable_linear_kernels() { return portable::kLinearKernels; }
}  // namespace omniserve
