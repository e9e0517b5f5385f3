// Attention kernels in 4-lane vectors that every compiler target has.
#include "attention_kernels.h"

#define OMNI_ISA portable
#define OMNI_LANES 4
#define OMNI_DPBF16 0
#include "attention_kernel.inl"

namespace omniserve {
const Kernels& portable_kernels() { return portable::kKernels; }
}  // namespace omniserve
