// out[t, o] = sum over i of x[t, i] * weight[o, i] for few rows of x: bound by one read of the weight. No torch header.
// The weight may be bf16 where x is fp32: half the bytes, and no product or sum is rounded more than with an fp32 one.
//
// Legend: T rows of x (tokens), I input features, O output features.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.h"

namespace omniserve {

struct LinearArgs {
  const void* x;       // [T, I], distance of rows x_stride elements
  const void* weight;  // [O, I], row-major, contiguous
  void* out;           // [T, O], row-major, contiguous
  int64_t x_stride;
  int64_t num_rows;  // T
  int64_t num_in;    // I
  int64_t num_out;   // O
  DType dtype;         // of x and out; sums are in fp32
  DType weight_dtype;  // the same, or bf16 beside fp32
};

// Output features that one step of the kernel computes. Split work at multiples of it.
constexpr int64_t kLinearGroup = 4;

// Bytes of the copy of x that the kernel reads, which must be aligned to 64 bytes.
int64_t linear_packed_bytes(const LinearArgs& args);

// Make that copy: padded with zeros, in the dtype that the kernel multiplies.
void linear_pack(const LinearArgs& args, void* packed);

// Output features [begin, end) of all rows. An output depends on its row of x and its row of weight alone, to the bit.
void linear_features(const LinearArgs& args, const void* packed, int64_t begin, int64_t end);

// Name of the linear kernels that an instruction set of attention.h selects; std::invalid_argument if it has none.
const char* linear_kernels_name(const char* isa);

}  // namespace omniserve
