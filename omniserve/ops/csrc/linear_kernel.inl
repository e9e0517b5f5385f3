// The linear kernels of one instruction set; macros as for attention_kernel.inl, and OMNI_TILES with AMX.
//
// A block is some rows of x by a panel or a part of one: their sums stay in registers while the inputs pass. Each vector
// of weights is loaded once for all rows, each value of x once for all vectors.
//
// A single block is bound by reading the weight from memory: it prefetches what lies a little further on into L2. Of
// several the first would wait for memory and the others not: together they prefetch the next panel, evenly.
//
// Many inputs are passed in pieces, so that the rows and the panels of a piece stay in L2. The sums of a piece go
// through memory, in fp32, which changes no bit of them.

namespace omniserve {
namespace OMNI_ISA {
namespace {

#include "attention_simd.inl"

// A block has as many sums as registers hold beside weights and x: 24 of 32, or 12 of 16.
constexpr int kVectors = static_cast<int>(kPanel) / OMNI_LANES;  // of a panel
constexpr int kPartVectors = kVectors < 2 ? kVectors : 2;        // of the part of a panel in a block
constexpr int kBlockRows = OMNI_LANES == 16 ? 12 : 6;
constexpr int kWholeRows = OMNI_LANES == 16 ? 12 : OMNI_LANES == 8 ? 2 : 1;  // up to which a block has the whole panel

constexpr int64_t kTaskRows = 120;
constexpr int64_t kPieceBytes = 4096;  // of a row of packed x
constexpr int64_t kAhead = 4096;       // bytes of the weight that a single block prefetches
constexpr int64_t kLine = 64;

#if OMNI_LANES == 16
OMNI_INLINE VF broadcast(float x) { return VF{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
#elif OMNI_LANES == 8
OMNI_INLINE VF broadcast(float x) { return VF{x, x, x, x, x, x, x, x}; }
#else
OMNI_INLINE VF broadcast(float x) { return VF{x, x, x, x}; }
#endif

// sum += a * b. In assembly where there are 16 registers: GCC 12 moves sums among them, and to memory, otherwise.
OMNI_INLINE void add_product(VF& sum, VF a, VF b) {
#if OMNI_LANES == 8
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
  sum += a * b;
#endif
}

// second_of_pairs(), without the register that a mask takes where there are 16.
OMNI_INLINE VF upper_halves(VU pairs) {
#if OMNI_LANES == 8
  VU halves;
  asm("vpsrld $16, %1, %0" : "=x"(halves) : "x"(pairs));
  return first_of_pairs(halves);
#else
  return second_of_pairs(pairs);
#endif
}

// Inputs of codes whose products are summed before they are scaled: a group, or, of a long one, at most kPart.
constexpr int64_t kPart = 128;
OMNI_INLINE int64_t parts_of_group(const QuantForm& form) { return (form.group + kPart - 1) / kPart; }
OMNI_INLINE int64_t num_parts(const LinearArgs& args) {
  const int64_t group = args.form->group;
  return args.num_in / group * parts_of_group(*args.form) + (args.num_in % group + kPart - 1) / kPart;
}

// Whether a row of packed x has, behind its inputs, the sums of its parts in fp32; and where.
OMNI_INLINE bool has_sums_of_x(const LinearArgs& args) { return args.form != nullptr && args.form->has_offset(); }
OMNI_INLINE int64_t sums_at(const LinearArgs& args) { return (args.num_in + 31) / 32 * 32; }

// Whether rows of packed x are whole numbers of 16 bits: few rows of bf16 for codes, with AVX2 (linear_quantized.inl).
// With small groups the scales cost more than the products: more rows are faster with a weight in fp32.
OMNI_INLINE bool are_fixed(const LinearArgs& args) {
  if (OMNI_LANES != 8 || args.form == nullptr || args.dtype != DType::bf16) return false;
  return args.num_rows <= (args.form->group >= 32 ? 8 : 4);
}

// Elements between two rows of packed x. Two floats, or four of 16 bits, for what is behind a row of each of its parts.
template <typename Packed>
OMNI_INLINE int64_t x_stride(const LinearArgs& args) {
  constexpr int64_t kBytes = sizeof(Packed);
  const bool sums = kBytes == 2 ? has_sums_of_x(args) : are_fixed(args);
  return packed_row_bytes(sums ? sums_at(args) + 2 * num_parts(args) : args.num_in, kBytes) / kBytes;
}

// The products of one step of a panel of fp32 or fp16: of one input.
template <typename T>
struct Product {
  typedef T Weight;
  typedef float Packed;
  static constexpr int64_t kStep = 1;  // inputs
  template <int ROWS, int VECTORS>
  OMNI_INLINE void add(const T* w, const float* x, int64_t stride, VF* sum) {
    VF v[VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; ++i) v[i] = load(w + i * W);
#pragma GCC unroll 16
    for (int t = 0; t < ROWS; ++t) {
      const VF row = broadcast(x[t * stride]);
#pragma GCC unroll 8
      for (int i = 0; i < VECTORS; ++i) add_product(sum[t * VECTORS + i], v[i], row);
    }
  }
};

template <>
struct Product<BF16> {  // of two inputs, widened: a bf16 is the upper half of an fp32
  typedef BF16 Weight;
  typedef float Packed;
  static constexpr int64_t kStep = 2;
  template <int ROWS, int VECTORS>
  OMNI_INLINE void add(const BF16* w, const float* x, int64_t stride, VF* sum) {
    VF v[VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; ++i) v[i] = first_of_pairs(load_pairs(w + i * 2 * W));
#pragma GCC unroll 16
    for (int t = 0; t < ROWS; ++t) {
      const VF row = broadcast(x[t * stride]);
#pragma GCC unroll 8
      for (int i = 0; i < VECTORS; ++i) add_product(sum[t * VECTORS + i], v[i], row);
    }
    if (OMNI_LANES < 16) asm volatile("" : : : "memory");  // 16 registers do not hold both halves beside the sums
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; ++i) v[i] = upper_halves(load_pairs(w + i * 2 * W));
#pragma GCC unroll 16
    for (int t = 0; t < ROWS; ++t) {
      const VF row = broadcast(x[t * stride + 1]);
#pragma GCC unroll 8
      for (int i = 0; i < VECTORS; ++i) add_product(sum[t * VECTORS + i], v[i], row);
    }
  }
};

#if OMNI_DPBF16
struct Products {  // VDPBF16PS: products are exact in fp32, sums are rounded to fp32; subnormals are zero
  typedef BF16 Weight;
  typedef BF16 Packed;
  static constexpr int64_t kStep = 2;
  template <int ROWS, int VECTORS>
  OMNI_INLINE void add(const BF16* w, const BF16* x, int64_t stride, VF* sum) {
    __m512bh v[VECTORS];
#pragma GCC unroll 2
    for (int i = 0; i < VECTORS; ++i) __builtin_memcpy(&v[i], w + i * 2 * W, sizeof(v[i]));
#pragma GCC unroll 16
    for (int t = 0; t < ROWS; ++t) {
      int32_t pair;
      __builtin_memcpy(&pair, x + t * stride, sizeof(pair));
      const __m512bh row = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 2
      for (int i = 0; i < VECTORS; ++i)
        sum[t * VECTORS + i] = (VF)_mm512_dpbf16_ps((__m512)sum[t * VECTORS + i], v[i], row);
    }
  }
};
#endif

// A piece of the inputs of a block.
template <typename P>
struct Piece {
  const typename P::Packed* x;
  int64_t stride;  // of x
  int64_t num_steps;
  const typename P::Weight* panel;
  const char* ahead;   // prefetched meanwhile
  int64_t ahead_step;  // bytes
  float* sums;         // [rows, kPanel]
  bool goes_on;        // sums has those of the pieces before
};

template <typename P, int ROWS, int VECTORS>
static __attribute__((noinline)) void block(const Piece<P>& piece) {  // alone it gets the registers it needs
  VF sum[ROWS * VECTORS];  // in registers
#pragma GCC unroll 32
  for (int s = 0; s < ROWS * VECTORS; ++s)
    sum[s] = piece.goes_on ? load(piece.sums + s / VECTORS * kPanel + s % VECTORS * W) : VF{};
  const typename P::Packed* x = piece.x;
  const typename P::Weight* w = piece.panel;
  const char* ahead = piece.ahead;
  const int64_t num_steps = piece.num_steps, ahead_step = piece.ahead_step, stride = piece.stride;
  for (int64_t step = 0; step < num_steps; ++step) {
    __builtin_prefetch(ahead, 0, 2);
    __builtin_prefetch(ahead + kLine, 0, 2);
    P::template add<ROWS, VECTORS>(w, x, stride, sum);
    x += P::kStep;
    w += P::kStep * kPanel;
    ahead += ahead_step;
  }
#pragma GCC unroll 32
  for (int s = 0; s < ROWS * VECTORS; ++s) store(piece.sums + s / VECTORS * kPanel + s % VECTORS * W, sum[s]);
}

template <typename P, int ROWS, int VECTORS>
OMNI_INLINE void block_of(int64_t rows, const Piece<P>& piece) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return block_of<P, ROWS - 1, VECTORS>(rows, piece);
  }
  block<P, ROWS, VECTORS>(piece);
}

// All of a panel, for at most kBlockRows rows.
template <typename P>
static void blocks_of(int64_t rows, Piece<P> piece) {
  if (rows <= kWholeRows) return block_of<P, kWholeRows, kVectors>(rows, piece);
  for (int v = 0; v < kVectors; v += kPartVectors) {
    block_of<P, kBlockRows, kPartVectors>(rows, piece);
    piece.panel += P::kStep * kPartVectors * W;
    piece.sums += kPartVectors * W;
    piece.ahead += piece.num_steps * piece.ahead_step;
  }
}

// Round sums and write them.
template <typename X>
OMNI_INLINE void write(X* to, VF sum) {
  store(to, sum);
}
#if OMNI_DPBF16
OMNI_INLINE void write(BF16* to, VF sum) {  // one instruction for eight; as in the products, subnormals are zero
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)sum);
  __builtin_memcpy(to, &rounded, sizeof(rounded));
}
#endif

// Round the sums of some rows, add the bias, and write them.
template <typename X>
OMNI_INLINE void write_rows(const LinearArgs& args, const float* sums, int64_t feature, int64_t row,
                            int64_t num_rows) {
  const int64_t count = min64(kPanel, args.num_out - feature);
  const X* const bias = static_cast<const X*>(args.bias);
  float added[kPanel] = {};
  if (bias != nullptr)
    for (int64_t f = 0; f < count; ++f) added[f] = to_float(bias[feature + f]);
  X* to = static_cast<X*>(args.out) + row * args.num_out + feature;
  for (int64_t t = 0; t < num_rows; ++t, sums += kPanel, to += args.num_out) {
    X whole[kPanel];
    X* const line = count == kPanel ? to : whole;
#pragma GCC unroll 8
    for (int64_t f = 0; f < kPanel; f += W)
      write(line + f, bias != nullptr ? load(sums + f) + load(added + f) : load(sums + f));
    if (line == whole) __builtin_memcpy(to, whole, static_cast<size_t>(count) * sizeof(X));
  }
}

static void write_sums(const LinearArgs& args, const float* sums, int64_t feature, int64_t row, int64_t num_rows) {
  switch (args.dtype) {
    case DType::f32: return write_rows<float>(args, sums, feature, row, num_rows);
    case DType::f16: return write_rows<F16>(args, sums, feature, row, num_rows);
    default: write_rows<BF16>(args, sums, feature, row, num_rows);
  }
}

// Have a line that will be written. Not __builtin_prefetch(.., 1, ..), which GCC makes a read without -mprfchw.
OMNI_INLINE void claim(const void* line) {
#if OMNI_LANES >= 8
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(line)));
#else
  __builtin_prefetch(line, 1, 3);
#endif
}

// Have the lines that write_rows will write: the core that wrote them last may be another one.
OMNI_INLINE void claim_rows(const LinearArgs& args, int64_t feature, int64_t row, int64_t num_rows) {
  const int64_t bytes = dtype_bytes(args.dtype);
  const char* to = static_cast<const char*>(args.out) + (row * args.num_out + feature) * bytes;
  for (int64_t t = 0; t < num_rows; ++t, to += args.num_out * bytes)
    for (int64_t i = 0; i < kPanel * bytes; i += kLine) claim(to + i);
}

// Features of a panel for all rows, or a piece of their inputs; `next` is computed after it.
template <typename P>
struct Panel {
  Piece<P> piece;  // of the first row
  const typename P::Weight* next;
  int64_t feature;
  int64_t first_row;
  int64_t last_row;
  bool is_last;  // piece
};

// `write` gets the sums of some rows behind their last piece: (sums, row, num_rows).
template <typename P, typename Write>
static void rows_of(const LinearArgs& args, const Panel<P>& panel, const Write& write) {
  const int64_t num_rows = panel.last_row - panel.first_row, num_blocks = (num_rows + kBlockRows - 1) / kBlockRows;
  constexpr int64_t kStepBytes = P::kStep * kPanel * static_cast<int64_t>(sizeof(typename P::Weight));
  const bool whole = num_rows <= num_blocks * kWholeRows;
  const int64_t passes = num_blocks * (whole ? 1 : kVectors / kPartVectors);  // over the panel
  Piece<P> piece = panel.piece;
  piece.ahead_step = kStepBytes / passes;
  const char* const ahead = reinterpret_cast<const char*>(passes > 1 ? panel.next : piece.panel);
  for (int64_t b = 0; b < num_blocks; ++b) {
    piece.ahead = passes > 1 ? ahead + piece.num_steps * kStepBytes * b / num_blocks : ahead + kAhead;
    const int64_t row = num_rows * b / num_blocks, rows = num_rows * (b + 1) / num_blocks - row;
    piece.x = panel.piece.x + row * piece.stride;
    piece.sums = panel.piece.sums + row * kPanel;
    if (panel.is_last) claim_rows(args, panel.feature, panel.first_row + row, rows);
    blocks_of<P>(rows, piece);
    if (!panel.is_last) continue;
    write(piece.sums, panel.first_row + row, rows);
  }
}

template <typename P>
static void rows_of(const LinearArgs& args, const Panel<P>& panel) {
  rows_of(args, panel, [&](const float* sums, int64_t row, int64_t num_rows) {
    write_sums(args, sums, panel.feature, row, num_rows);
  });
}

template <typename P>
static void features_of(const LinearArgs& args, const void* packed_x, float* sums, int64_t begin, int64_t end,
                        int64_t first_row, int64_t last_row) {
  typedef typename P::Packed Packed;
  const int64_t num_steps = (args.num_in + P::kStep - 1) / P::kStep, num_rows = last_row - first_row;
  const int64_t piece_steps =
      num_rows <= kBlockRows ? max64(num_steps, 1) : kPieceBytes / static_cast<int64_t>(sizeof(Packed)) / P::kStep;
  const int64_t size = panel_size(args.num_in, args.weight_dtype);
  const auto* const weight = static_cast<const typename P::Weight*>(args.weight);
  Panel<P> panel;
  panel.piece.stride = x_stride<Packed>(args);
  panel.first_row = first_row;
  panel.last_row = last_row;
  for (int64_t step = 0; step == 0 || step < num_steps; step += piece_steps) {  // without inputs, too
    panel.piece.x = static_cast<const Packed*>(packed_x) + step * P::kStep;
    panel.piece.num_steps = min64(piece_steps, num_steps - step);
    panel.piece.goes_on = step > 0;
    panel.is_last = step + piece_steps >= num_steps;
    for (panel.feature = begin; panel.feature < end; panel.feature += kPanel) {
      panel.piece.panel = weight + panel.feature / kPanel * size + step * P::kStep * kPanel;
      if (panel.feature + kPanel < end)
        panel.next = panel.piece.panel + size;
      else if (!panel.is_last)
        panel.next = weight + begin / kPanel * size + (step + piece_steps) * P::kStep * kPanel;
      else
        panel.next = weight + (end < args.num_out ? end / kPanel * size : 0);
      panel.piece.sums = sums + (panel.feature - begin) * num_rows;
      rows_of<P>(args, panel);
    }
  }
}

#if OMNI_TILES
#include "linear_amx.inl"
#endif
#include "linear_quantized.inl"
#include "linear_int8.inl"
#include "lora_kernel.inl"

template <typename T>
OMNI_INLINE void pack_row(const T* x, int64_t num_in, float* packed) {
  int64_t i = 0;
  for (; i + W <= num_in; i += W) store(packed + i, load(x + i));
  for (; i < num_in; ++i) packed[i] = to_float(x[i]);
}
#if OMNI_DPBF16
OMNI_INLINE void pack_row(const BF16* x, int64_t num_in, BF16* packed) {
  if (num_in > 0) __builtin_memcpy(packed, x, static_cast<size_t>(num_in) * sizeof(BF16));  // nothing may be nowhere
}
#endif

// Columns of a row in another order.
template <typename X, typename Packed>
OMNI_INLINE void gather_row(const X* x, const int32_t* order, int64_t num_in, Packed* packed) {
  for (int64_t i = 0; i < num_in; ++i) {
    if constexpr (__is_same(X, Packed))
      packed[i] = x[order[i]];
    else
      packed[i] = to_float(x[order[i]]);
  }
}

template <typename X, typename Packed>
static void pack_typed(const LinearArgs& args, void* packed_x, int64_t begin, int64_t end) {
  const int64_t stride = x_stride<Packed>(args);
  for (int64_t t = begin; t < end; ++t) {
    Packed* const to = static_cast<Packed*>(packed_x) + (t - begin) * stride;
    const X* const row = static_cast<const X*>(args.x) + t * args.x_stride;
    if (args.order != nullptr)
      gather_row(row, args.order, args.num_in, to);
    else
      pack_row(row, args.num_in, to);
    __builtin_memset(to + args.num_in, 0, static_cast<size_t>(stride - args.num_in) * sizeof(Packed));
#if OMNI_DPBF16
    if constexpr (sizeof(Packed) == 2)
      if (has_sums_of_x(args)) sum_parts(args, to);
#elif OMNI_LANES == 8
    if (are_fixed(args)) fix_row(args, to);
#endif
  }
}

LinearRows rows(const LinearArgs& args) {
#if OMNI_TILES
  if (args.dtype == DType::bf16 || args.int8 != nullptr) return {2 * kTileRows, kTileTaskRows};
#endif
  (void)args;
  return {kBlockRows, kTaskRows};
}

int64_t row_bytes(const LinearArgs& args) {
  if (args.int8 != nullptr) return int8_row_bytes(args.num_in);
#if OMNI_DPBF16
  if (args.dtype == DType::bf16) return x_stride<BF16>(args) * 2;
#endif
  return x_stride<float>(args) * 4;
}

void pack(const LinearArgs& args, void* packed_x, int64_t begin, int64_t end) {
  if (args.int8 != nullptr) return int8_pack(args, packed_x, begin, end);
  switch (args.dtype) {
    case DType::f32: return pack_typed<float, float>(args, packed_x, begin, end);
    case DType::f16: return pack_typed<F16, float>(args, packed_x, begin, end);
#if OMNI_DPBF16
    default: return pack_typed<BF16, BF16>(args, packed_x, begin, end);
#else
    default: return pack_typed<BF16, float>(args, packed_x, begin, end);
#endif
  }
}

void features(const LinearArgs& args, const void* packed_x, float* sums, int64_t begin, int64_t end,
              int64_t first_row, int64_t last_row) {
  const auto typed = [&](auto product) {
    features_of<decltype(product)>(args, packed_x, sums, begin, end, first_row, last_row);
  };
  if (args.int8 != nullptr) {
#if OMNI_TILES
    return tile_int8_features(args, packed_x, sums, begin, end, first_row, last_row);
#else
    return int8_features(args, packed_x, sums, begin, end, first_row, last_row);
#endif
  }
  if (args.form != nullptr) {
    const int64_t num_rows = last_row - first_row;
#if OMNI_DPBF16
    if (args.dtype == DType::bf16) {
      const auto* const x = static_cast<const BF16*>(packed_x);
      if (are_paired(args, args.num_rows)) return pairs_of_codes(args, x, sums, begin, end, first_row, num_rows);
#if OMNI_TILES
      return tile_quantized_features(args, x, sums, begin, end, first_row, last_row);
#else
      return quantized_features<Products, ToPairs>(args, x, sums, begin, end, first_row, last_row);
#endif
    }
#endif
    const auto* const x = static_cast<const float*>(packed_x);
#if OMNI_LANES == 8
    if (are_fixed(args)) return fixed_rows_of_codes(args, x, sums, begin, end, first_row, num_rows);
#endif
    if (num_rows <= kMultipliedRows) return few_rows_of_codes(args, x, sums, begin, end, first_row, num_rows);
    return quantized_features<Product<float>, ToFloats>(args, x, sums, begin, end, first_row, last_row);
  }
  if (args.weight_dtype == DType::f32) return typed(Product<float>());
  if (args.weight_dtype == DType::f16) return typed(Product<F16>());
#if OMNI_TILES
  if (args.dtype == DType::bf16)
    return tile_features(args, packed_x, sums, begin, end, first_row, last_row);
#elif OMNI_DPBF16
  if (args.dtype == DType::bf16) return typed(Products());
#endif
  typed(Product<BF16>());
}

}  // namespace

#define OMNI_TEXT_OF(name) #name
#define OMNI_TEXT(name) OMNI_TEXT_OF(name)
const LinearKernels kLinearKernels = {OMNI_TEXT(OMNI_ISA), rows, row_bytes, pack, features, lora};

}  // namespace OMNI_ISA
}  // namespace omniserve
