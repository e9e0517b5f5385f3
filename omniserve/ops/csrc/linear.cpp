// Picks the linear kernels that belong to this CPU's instruction set, and packs weights.
#include "linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
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
    {"amx_bf16", amx_bf16_linear_kernels},
    {"avx512_bf16", avx512_bf16_linear_kernels},
    {"avx512_vnni", avx512_vnni_linear_kernels},
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

// E: what lies side by side of one feature, a pair of bf16 or one value.
template <typename E>
void pack_typed(const char* dense, E* packed, int64_t row_bytes, int64_t num_out, int64_t begin, int64_t end) {
  constexpr int64_t kSize = sizeof(E);
  const int64_t whole = row_bytes / kSize, rest = row_bytes % kSize, steps = whole + (rest > 0);
  for (int64_t panel = begin; panel < end; ++panel) {
    E* const to = packed + panel * steps * kPanel;
    const int64_t count = std::min(kPanel, num_out - panel * kPanel);
    if (count < kPanel) std::memset(to, 0, static_cast<size_t>(steps * kPanel * kSize));
    const char* const from = dense + panel * kPanel * row_bytes;
    constexpr int64_t kTile = 64 / kSize;  // steps: of each feature one cache line
    for (int64_t first = 0; first < whole; first += kTile)
      for (int64_t f = 0; f < count; ++f)
        for (int64_t s = first; s < std::min(first + kTile, whole); ++s)
          std::memcpy(to + s * kPanel + f, from + f * row_bytes + s * kSize, kSize);
    for (int64_t f = 0; f < count && rest > 0; ++f) {
      E last{};
      std::memcpy(&last, from + f * row_bytes + whole * kSize, static_cast<size_t>(rest));
      to[whole * kPanel + f] = last;
    }
  }
}

template <typename E>
void unpack_row(const E* packed, char* dense, int64_t row_bytes, int64_t feature) {
  constexpr int64_t kSize = sizeof(E);
  const int64_t whole = row_bytes / kSize, rest = row_bytes % kSize, steps = whole + (rest > 0);
  const E* const from = packed + feature / kPanel * steps * kPanel + feature % kPanel;
  for (int64_t s = 0; s < whole; ++s) std::memcpy(dense + s * kSize, from + s * kPanel, kSize);
  if (rest > 0) std::memcpy(dense + whole * kSize, from + whole * kPanel, static_cast<size_t>(rest));
}

}  // namespace

LinearRows linear_rows(const LinearArgs& args) { return kernels().rows(args); }

int64_t linear_rows_bytes(const LinearArgs& args, int64_t num_rows) {
  return num_rows * kernels().row_bytes(args);
}

void linear_pack_rows(const LinearArgs& args, void* packed_x, int64_t begin, int64_t end) {
  kernels().pack(args, packed_x, begin, end);
}

void linear_features(const LinearArgs& args, const void* packed_x, float* sums, int64_t begin, int64_t end,
                     int64_t first_row, int64_t last_row) {
  kernels().features(args, packed_x, sums, begin, end, first_row, last_row);
}

void lora_features(const LoraArgs& args, int64_t begin, int64_t end, int64_t first_row, int64_t last_row) {
  kernels().lora(args, begin, end, first_row, last_row);
}

const char* linear_kernels_name(const char* isa) { return choose(isa).name; }

void pack_panels(const void* dense, void* packed, int64_t num_in, int64_t num_out, DType dtype, int64_t begin,
                 int64_t end) {
  const char* const from = static_cast<const char*>(dense);
  if (dtype == DType::f16) return pack_typed(from, static_cast<uint16_t*>(packed), num_in * 2, num_out, begin, end);
  pack_typed(from, static_cast<uint32_t*>(packed), num_in * dtype_bytes(dtype), num_out, begin, end);
}

void unpack_feature(const void* packed, void* dense, int64_t num_in, DType dtype, int64_t feature) {
  char* const to = static_cast<char*>(dense);
  if (dtype == DType::f16) return unpack_row(static_cast<const uint16_t*>(packed), to, num_in * 2, feature);
  unpack_row(static_cast<const uint32_t*>(packed), to, num_in * dtype_bytes(dtype), feature);
}

namespace {

float half_value(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 1023u;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * std::ldexp(static_cast<float>(fraction), -24);
  const uint32_t whole = sign | (exponent == 31 ? 255u : exponent + 112u) << 23 | fraction << 13;
  float value;
  std::memcpy(&value, &whole, sizeof(value));
  return value;
}

template <typename T>
T value_at(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

}  // namespace

void expand_feature(const void* packed, float* dense, int64_t num_in, const QuantForm& form, int64_t feature) {
  const int64_t block = form.block(), f = feature % kPanel;
  const uint8_t* const panel =
      static_cast<const uint8_t*>(packed) + feature / kPanel * panel_bytes(num_in, form);
  for (int64_t input = 0; input < num_in; ++input) {
    const uint8_t* const record = panel + input / block * form.record_bytes();
    const uint8_t* const codes = record + form.scale_bytes();
    const int64_t i = input % block, group = i / form.group;
    int32_t code = 0;
    if (form.bits == 8) {
      const uint8_t byte = codes[i * kPanel + f];
      code = form.has_offset() ? byte : static_cast<int8_t>(byte);
    } else {
      const auto word = [&](int64_t row) { return value_at<uint32_t>(codes + (row * kPanel + f) * 4); };
      const auto bits = [&](int64_t row, int64_t place, int64_t width) {  // of input `place` of a word
        return word(row) >> (place / 2 * width + place % 2 * 16) & ((1u << width) - 1);
      };
      const uint32_t lower = bits(i / 8, i % 8, 4);
      uint32_t upper = 0;
      if (form.bits == 5) upper = bits(block / 8 + i / 32, i % 32, 1);
      if (form.bits == 6) upper = bits(block / 8 + i / 16, i % 16, 2);
      code = static_cast<int32_t>(lower | upper << 4) - (form.has_offset() ? 0 : 1 << (form.bits - 1));
    }
    const float value = static_cast<float>(code);
    volatile float rounded;  // a product that must not be fused with a sum
    switch (form.scales) {
      case Scales::f16: dense[input] = half_value(record + f * 2) * value; break;
      case Scales::f32: dense[input] = value_at<float>(record + f * 4) * value; break;
      case Scales::affine16:
        dense[input] = value * half_value(record + f * 2) + half_value(record + (kPanel + f) * 2);
        break;
      case Scales::affine32:
        rounded = value * value_at<float>(record + f * 4);
        dense[input] = rounded + value_at<float>(record + (kPanel + f) * 4);
        break;
      case Scales::k: {
        const uint8_t* const bytes = record + kPanel * 4 + group * kPanel + f;
        const float scale = half_value(record + f * 2) * static_cast<float>(bytes[0]);
        dense[input] = scale * value - half_value(record + (kPanel + f) * 2) * static_cast<float>(bytes[8 * kPanel]);
        break;
      }
      default:
        dense[input] = half_value(record + f * 2) *
                       static_cast<float>(static_cast<int8_t>(record[kPanel * 2 + group * kPanel + f])) * value;
    }
  }
}

}  // namespace omniserve
