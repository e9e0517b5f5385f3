// The second product of LoRA of one instruction set, part of linear_kernel.inl: y + scale * low B^T, some rows at a time.
//
// A panel of B is a few lines, which stay in L1 while the rows of an adapter pass.

constexpr int64_t kPanelsAhead = 4;  // of B, which are short: what lies so far on is prefetched
constexpr int kLoraRows = OMNI_LANES == 16 ? 4 : 1;  // whose sums do not wait for each other

// Inputs of a row as they are multiplied: bf16 in pairs as they are, all else as fp32.
OMNI_INLINE const float* low_inputs(const float* low, int64_t, float*) { return low; }
template <typename X>
static const float* low_inputs(const X* low, int64_t rank, float* widened) {
  for (int64_t i = 0; i < rank; ++i) widened[i] = to_float(low[i]);
  return widened;
}
#if OMNI_DPBF16
OMNI_INLINE const BF16* low_inputs(const BF16* low, int64_t, BF16*) { return low; }
#endif

template <typename X>
OMNI_INLINE VF rounded(VF v) {
  X values[W];
  write(values, v);
  return load(values);
}

// Round the sums of one row and a panel, add them to y, and write that.
template <typename X>
OMNI_INLINE void add_scaled(const LoraArgs& args, int64_t row, int64_t feature, VF scale, const VF* sum) {
  const X* from = static_cast<const X*>(args.y) + row * args.num_out + feature;
  X* const to = static_cast<X*>(args.out) + row * args.num_out + feature;
  X whole[kPanel] = {};
  const int64_t count = min64(kPanel, args.num_out - feature);
  X* const line = count == kPanel ? to : whole;
  if (line == whole) {
    __builtin_memcpy(whole, from, static_cast<size_t>(count) * sizeof(X));
    from = whole;
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) write(line + v * W, load(from + v * W) + scale * rounded<X>(sum[v]));
  if (line == whole) __builtin_memcpy(to, whole, static_cast<size_t>(count) * sizeof(X));
}

template <typename P, typename X, int ROWS>
static void lora_block(const LoraArgs& args, int64_t begin, int64_t end, int64_t first_row) {
  alignas(64) typename P::Packed widened[ROWS * kMostRank];
  const int64_t num_steps = args.rank / P::kStep, size = panel_size(args.rank, args.dtype);
  const typename P::Packed* x = nullptr;
  for (int t = ROWS - 1; t >= 0; --t)
    x = low_inputs(static_cast<const X*>(args.low) + (first_row + t) * args.low_stride, args.rank, widened + t * kMostRank);
  const int64_t stride = x == widened ? kMostRank : args.low_stride;
  constexpr int64_t kStepBytes = P::kStep * kPanel * static_cast<int64_t>(sizeof(typename P::Weight));
  const VF scale = broadcast(args.scale);
  for (int64_t feature = begin; feature < end; feature += kPanel) {
    const auto* const panel = static_cast<const typename P::Weight*>(args.b) + feature / kPanel * size;
    VF sum[ROWS * kVectors] = {};
    const char* ahead = reinterpret_cast<const char*>(panel + kPanelsAhead * size);
    for (int64_t step = 0; step < num_steps; ++step) {
      P::template add<ROWS, kVectors>(panel + step * P::kStep * kPanel, x + step * P::kStep, stride, sum);
      for (int64_t i = 0; i < kStepBytes; i += kLine) __builtin_prefetch(ahead + i, 0, 2);
      ahead += kStepBytes;
    }
#pragma GCC unroll 4
    for (int t = 0; t < ROWS; ++t)
      add_scaled<X>(args, args.order[first_row + t], feature, scale, sum + t * kVectors);
  }
}

template <typename P, typename X>
static void lora_typed(const LoraArgs& args, int64_t begin, int64_t end, int64_t row, int64_t last_row) {
  for (; row + kLoraRows <= last_row; row += kLoraRows) lora_block<P, X, kLoraRows>(args, begin, end, row);
  for (; row < last_row; ++row) lora_block<P, X, 1>(args, begin, end, row);
}

void lora(const LoraArgs& args, int64_t begin, int64_t end, int64_t first_row, int64_t last_row) {
  switch (args.dtype) {
    case DType::f32: return lora_typed<Product<float>, float>(args, begin, end, first_row, last_row);
    case DType::f16: return lora_typed<Product<F16>, F16>(args, begin, end, first_row, last_row);
#if OMNI_DPBF16
    default: return lora_typed<Products, BF16>(args, begin, end, first_row, last_row);
#else
    default: return lora_typed<Product<BF16>, BF16>(args, begin, end, first_row, last_row);
#endif
  }
}
