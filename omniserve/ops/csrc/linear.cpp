// Picks the linear kernels that belong to this CPU's instruction set.
#include "linear.h"

#include <stdexcept>
#include <string>
#include <string_view>

#include "linear_kernels.h"

namespace omniserve {
namespace {

struct Choice {
  std::string_view isa;
  const LinearKernels& (*kernels)();
};

const Choice kChoices[] = {
#if defined(__x86_64__)
    {"amx_bf16", avx512_bf16_linear_kernels},  // few rows are bound by memory: tiles would not help
    {"avx512_bf16", avx512_bf16_linear_kernels},
    {"avx512", avx512_linear_kernels},
    {"avx2", avx2_linear_kernels},
#endif
    {"portable", portable_linear_kernels},
};

const LinearKernels& choose(std::string_view isa) {
  for (const Choice& choice : kChoices)
    if (choice.isa == isa) return choice.kernels();
  throw std::invalid_argument("no linear kernels for the instruction set " + std::string(isa));
}

const LinearKernels& kernels() {
  static const LinearKernels& table = choose(isa_name());
  return table;
}

}  // namespace

int64_t linear_packed_bytes(const LinearArgs& args) {
  return args.num_rows * ((args.num_in + kLinearPad - 1) / kLinearPad * kLinearPad) * 4;  // fp32 at the most
}

const char* linear_kernels_name(const char* isa) { return choose(isa).name; }

void linear_pack(const LinearArgs& args, void* packed) { kernels().pack(args, packed); }

void linear_features(const LinearArgs& args, const void* packed, int64_t begin, int64_t end) {
  kernels().features(args, packed, begin, end);
}

}  // namespace omniserve
