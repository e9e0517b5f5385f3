// Rows to i8 and back, compiled once per instruction set by host_kv.cpp: in vector code of 16 bytes it is these loops
// that limit a move, not memory. No set with fused multiply-add, so that all of them round alike.

// Conversions without branches, so that the loops around them become vector code on every machine.
struct FloatRow {
  using Element = Float;
  static uint32_t widen(Element x) { return bits_of(x); }
  static Element narrow(float x) { return x; }
};

struct BF16Row {
  using Element = Half;
  static uint32_t widen(Element x) { return static_cast<uint32_t>(x) << 16; }
  static Element narrow(float x) {
    const uint32_t bits = bits_of(x);
    return static_cast<uint16_t>(x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0);
  }
};

struct F16Row {
  using Element = Half;
  static uint32_t widen(Element x) {
    const uint32_t magnitude = x & 0x7fffu;
    uint32_t bits = bits_of(float_of(magnitude << 13) * 0x1p112f);  // makes the exponent's bias that of fp32
    bits |= magnitude >= 0x7c00 ? 0x7f800000u : 0u;
    return bits | static_cast<uint32_t>(x & 0x8000u) << 16;
  }
  static Element narrow(float x) {
    const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13;
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;  // the sum rounds to 2^-24
    uint32_t half = magnitude < 0x38800000 ? subnormal : normal;
    half = magnitude >= 0x47800000 ? (magnitude > 0x7f800000 ? 0x7e00 : 0x7c00) : half;
    return static_cast<uint16_t>(half | (bits >> 16 & 0x8000));
  }
};

// One row to i8; returns its scale.
template <typename Row>
float quantize_row(const char* row, int64_t head_size, char* out) {
  const auto* const from = reinterpret_cast<const typename Row::Element*>(row);
  int8_t* const to = reinterpret_cast<int8_t*>(out);
  int32_t most = 0;  // as integers the magnitudes of floats sort like the floats, and inf and NaN come last
  for (int64_t h = 0; h < head_size; ++h) most = std::max(most, static_cast<int32_t>(Row::widen(from[h]) & 0x7fffffff));
  if (most >= 0x7f800000) {
    std::memset(to, 0, static_cast<size_t>(head_size));
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float scale = float_of(static_cast<uint32_t>(most)) / 127.0f;
  if (scale < std::numeric_limits<float>::min()) {  // all zero, or so small that 1 / scale is not finite
    std::memset(to, 0, static_cast<size_t>(head_size));
    return 0;
  }
  const float inverse = 1.0f / scale;
  constexpr float kRound = 0x1.8p23f;  // the sum's last bit is worth 1: it rounds to the nearest integer
  for (int64_t h = 0; h < head_size; ++h) {
    to[h] = static_cast<int8_t>(bits_of(float_of(Row::widen(from[h])) * inverse + kRound) - bits_of(kRound));
  }
  return scale;
}

template <typename Row>
void dequantize_row(const char* row, float scale, int64_t head_size, char* out) {
  const int8_t* const from = reinterpret_cast<const int8_t*>(row);
  auto* const to = reinterpret_cast<typename Row::Element*>(out);
  for (int64_t h = 0; h < head_size; ++h) to[h] = Row::narrow(static_cast<float>(from[h]) * scale);
}

template <typename Row>
constexpr RowKernels kernels_of() {
  return {quantize_row<Row>, dequantize_row<Row>};
}

constexpr RowKernels kRowKernels[] = {kernels_of<FloatRow>(), kernels_of<BF16Row>(), kernels_of<F16Row>()};  // by DType
