// Picks the linear kernels that belong to this CPU's instruction set.
#include "linear.h"

#include <string_view>

#include "linear_kernels.h"

namespace omniserve {
namespace {

const LinearKernels& choose() {
#if defined(__x86_64__)
  const std::string_view isa = isa_name();
  if (isa == "avx512_bf16") return avx512_bf16_linear_kernels();
  if (isa == "avx512") return avx512_linear_kernels();
  if (isa == "avx2") return avx2_linear_kernels();
#endif
  return portable_linear_kernels();
}

const LinearKernels& kernels() {
  static const LinearKernels& table = choose();
  return table;
}

}  // namespace

int64_t linear_packed_bytes(const LinearArgs& args) {
  return args.num_rows * ((args.num_in + kLinearPad - 1) / kLinearPad * kLinearPad) * 4;  // fp32 at the most
}

void linear_pack(const LinearArgs& args, void* packed) { kernels().pack(args, packed); }

void linear_features(const LinearArgs& args, const void* packed, int64_t begin, int64_t end) {
  kernels().features(args, packed, begin, end);
}

}  // namespace omniserve
