// out[t, o] = sum over i of x[t, i] * weight[o, i] (+ bias[o]) with a packed weight, for any number of rows. No torch
// header.
//
// A packed weight is a row of panels of 32 features. A panel of bf16 is [ceil(I / 2), 32, 2]: of two neighbouring inputs
// the 32 features' weights. Such a row of pairs is two vectors for VDPBF16PS, two rows of a tile for AMX, and a shift and
// a mask away from vectors of fp32. A panel of fp32 or fp16 is [I, 32]. Behind the last feature and the last input are
// zeros. A panel of codes of few bits is a row of records (QuantForm below), which are expanded, some inputs at a
// time, to what a dense panel would be there.
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

// How the scales of codes of few bits are held; s and m are a scale and an offset of a feature and a group of inputs,
// and the zero of a code of b bits is 2^(b - 1), or 0 beside an offset.
enum class Scales : int32_t {
  f16,       // s, in a record of each group: GGUF's Q4_0, Q5_0 and Q8_0
  f32,       // the same in fp32
  affine16,  // s and m: GGUF's Q4_1 and Q5_1
  affine32,  // the same in fp32: also zero points, of which m is -s * zero
  k,         // GGUF's Q4_K, Q5_K: of a record of 256 inputs d, e in fp16; of its 8 groups bytes u, v: s = d u, m = -e v
  k_signed,  // GGUF's Q6_K: of a record of 256 inputs d in fp16; of its 16 groups a signed byte u: s = d u
};

// A weight of codes: w = s * (code - zero) + m, computed in fp32. A panel is a row of records of `block` inputs:
// scales, each [32] and those of the groups [block / group, 32]; then the codes. 8 bits are [block, 32] bytes, signed
// unless there is an offset. Fewer are [block / 8, 32] words of the lower four bits, and then of 5 bits the fifth as
// [block / 32, 32] words, of 6 the upper two as [block / 16, 32] words. In a word the lower half has the even inputs, the
// first in the lowest place, and the upper half the odd ones: two neighbours are a shift away from the two bf16 of a
// pair.
struct QuantForm {
  int64_t bits;   // 4, 5, 6 or 8
  Scales scales;
  int64_t group;  // inputs that share a scale: 32 for k, 16 for k_signed, else a multiple of 8, of 32 with 5 bits

  bool is_k() const { return scales == Scales::k || scales == Scales::k_signed; }
  int64_t block() const { return is_k() ? 256 : group; }
  bool has_offset() const { return scales == Scales::affine16 || scales == Scales::affine32 || scales == Scales::k; }
  int64_t scale_bytes() const;   // of a record
  int64_t record_bytes() const;
};

// A weight of int8 for rows that are rounded to int8, too: out[t, o] = x_scale[t] * scale[o] * the sum over i of
// x_code[t, i] * code[o, i], which is exact in int32. A panel is 32 scales in fp32, 32 sums of a feature's codes in
// int32, and then the codes: [inputs / 4, 32, 4], of inputs up to a multiple of 64, zeros behind the last one. Four inputs
// of a feature lie side by side for VPDPBUSD; 16 rows of 16 features are a tile of AMX.
constexpr int64_t kInt8Inputs = 64;
constexpr int64_t kInt8Header = kPanel * 8;        // bytes
constexpr int64_t kMostInt8Inputs = int64_t{1} << 16;  // 2^16 products of at most 2^14 are in the range of int32

// How the rows beside a weight of int8 are rounded: code = the nearest integer to x / x_scale, half to even, from -128
// to 127. Without a given scale x_scale is the largest |x| of a row by 127.5, as compressed-tensors has it.
struct Int8Form {
  const float* x_scale;  // one number for all rows, or of each row, or nullptr
  bool is_of_rows;       // each row has its own, which the caller has computed likewise of more inputs
};

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
  DType weight_dtype;  // the same, or bf16 beside fp32; without meaning for codes
  const QuantForm* form = nullptr;  // of codes
  const int32_t* order = nullptr;   // the column of x that each input of codes is, or nullptr: all in their order
  const Int8Form* int8 = nullptr;   // of int8 for rows in int8
};

constexpr int64_t kMostRank = 1024;

// out[order[t]] = y[order[t]] + scale * low[t] B^T: what a LoRA adapter adds to rows of a product. The product with B is
// rounded first.
struct LoraArgs {
  const void* low;       // [T, R]: the rows' products with A, distance of rows low_stride elements
  const void* b;         // packed [O, R]
  const void* y;         // [.., O], row-major, contiguous
  void* out;             // likewise
  const int64_t* order;  // rows of y and out
  int64_t low_stride;
  int64_t rank;          // R, even, at most kMostRank
  int64_t num_out;       // O
  DType dtype;           // of all; sums are in fp32
  float scale;
};

inline int64_t QuantForm::scale_bytes() const {
  switch (scales) {
    case Scales::f16: return kPanel * 2;
    case Scales::f32:
    case Scales::affine16: return kPanel * 4;
    case Scales::affine32: return kPanel * 8;
    case Scales::k: return kPanel * (2 * 2 + 2 * 8);
    default: return kPanel * (2 + 16);
  }
}

inline int64_t QuantForm::record_bytes() const { return scale_bytes() + kPanel * block() * bits / 8; }

inline int64_t num_panels(int64_t num_out) { return (num_out + kPanel - 1) / kPanel; }

// Elements of a panel, in the weight's dtype.
inline int64_t panel_size(int64_t num_in, DType weight_dtype) {
  return kPanel * (weight_dtype == DType::bf16 ? (num_in + 1) / 2 * 2 : num_in);
}

// Bytes of a panel of codes.
inline int64_t panel_bytes(int64_t num_in, const QuantForm& form) {
  return (num_in + form.block() - 1) / form.block() * form.record_bytes();
}

// Bytes of a panel of int8.
inline int64_t int8_panel_bytes(int64_t num_in) {
  return kInt8Header + (num_in + kInt8Inputs - 1) / kInt8Inputs * kInt8Inputs * kPanel;
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
// kPanel. An output depends on its row of x, its row of the weight and its bias alone, to the bit; only bf16 rows with
// codes may have other bits when there are few (are_paired, linear_quantized.inl; are_fixed, linear_kernel.inl). What
// follows these panels is prefetched: the thread most likely goes on there. `sums` has one float for each row and each
// feature of these panels, 64-byte aligned. It and packed_x have room for rows up to the next multiple of kTileOfRows.
void linear_features(const LinearArgs& args, const void* packed_x, float* sums, int64_t begin, int64_t end,
                     int64_t first_row, int64_t last_row);

// Output features [begin, end) of rows [first_row, last_row) of `low`, which have one adapter; begin is a multiple of
// kPanel. An output depends on its own row alone, to the bit.
void lora_features(const LoraArgs& args, int64_t begin, int64_t end, int64_t first_row, int64_t last_row);

// Pack panels [begin, end) of a dense weight [O, I], row-major. Bits are copied.
void pack_panels(const void* dense, void* packed, int64_t num_in, int64_t num_out, DType dtype, int64_t begin,
                 int64_t end);

// Write the I weights of one feature of a packed weight.
void unpack_feature(const void* packed, void* dense, int64_t num_in, DType dtype, int64_t feature);

// Write the I weights of one feature of a weight of codes, in fp32.
void expand_feature(const void* packed, float* dense, int64_t num_in, const QuantForm& form, int64_t feature);

// Name of the linear kernels that an instruction set of attention.h selects; std::invalid_argument if it has none.
const char* linear_kernels_name(const char* isa);

}  // namespace omniserve
