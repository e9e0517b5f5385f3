// out[t, o] = sum over i of x[t, i] * weight[o, i] (+ bias[o]) with a packed weight, for any number of rows. No torch
// header.
//
// A packed weight is a row of panels of 32 features. A panel of bf16 is [ceil(I / 2), 32, 2]: of two neighbouring inputs
// the 32 features' weights. Such a row of pairs is two vectors for VDPBF16PS, two rows of a tile for AMX, and a shift and
// a mask away from vectors of fp32. A panel of fp32 or fp16 is [I, 32]. Behind the last feature and the last input are
// zeros.
//
// Few rows are bound by reading the weight, which is read once, in the order in which it lies; many rows by arithmetic.
//
// Legend: T rows of x (tokens), I input features, O output features.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.h"

namespace omniserve {

constexpr int64_t kPanel = 32;       // features; split work at multiples of it
constexpr int64_t kTileOfRows = 16;

struct LinearArgs {
  const void* x;       // [T, I], distance of rows x_stride elements
  const void* weight;  // packed, aligned to 64 bytes
  const void* bias;    // [O] in dtype, or nullptr
  void* out;           // [T, O], row-major, contiguous
  int64_t x_stride;
  int64_t num_rows;    // T
  int64_t num_in;      // I
  int64_t num_out;     // O
  DType dtype;         // of x, bias and out; sums are in fp32
  DType weight_dtype;  // the same, or bf16 beside fp32
};

inline int64_t num_panels(int64_t num_out) { return (num_out + kPanel - 1) / kPanel; }

// Elements of a panel, in the weight's dtype.
inline int64_t panel_size(int64_t num_in, DType weight_dtype) {
  return kPanel * (weight_dtype == DType::bf16 ? (num_in + 1) / 2 * 2 : num_in);
}

// How a kernel wants many rows to be split.
struct LinearRows {
  int64_t block;  // rows that are computed at once; split at multiples of it
  int64_t task;   // up to so many rows of a piece of x stay in L2
};
LinearRows linear_rows(const LinearArgs& args);

// Bytes of a copy of so many rows of x, which must be aligned to 64 bytes.
int64_t linear_rows_bytes(const LinearArgs& args, int64_t num_rows);

// Copy rows [begin, end) of x in the dtype that is multiplied. A copy is for one thread: to write what another core has
// read takes longer than to copy it twice.
void linear_pack_rows(const LinearArgs& args, void* packed_x, int64_t begin, int64_t end);

// Output features [begin, end) of rows [first_row, last_row), of which packed_x is the copy; begin is a multiple of
// kPanel. An output depends on its row of x, its row of the weight and its bias alone, to the bit. What
// follows these panels is prefetched: the thread most likely goes on there. `sums` has one float for each row and each
// feature of these panels, 64-byte aligned. It and packed_x have room for rows up to the next multiple of kTileOfRows.
void linear_features(const LinearArgs& args, const void* packed_x, float* sums, int64_t begin, int64_t end,
                     int64_t first_row, int64_t last_row);

// Pack panels [begin, end) of a dense weight [O, I], row-major. Bits are copied.
void pack_panels(const void* dense, void* packed, int64_t num_in, int64_t num_out, DType dtype, int64_t begin,
                 int64_t end);

// Write the I weights of one feature of a packed weight.
void unpack_feature(const void* packed, void* dense, int64_t num_in, DType dtype, int64_t feature);

// Name of the linear kernels that an instruction set of attention.h selects; std::invalid_argument if it has none.
const char* linear_kernels_name(const char* isa);

}  // namespace omniserve
