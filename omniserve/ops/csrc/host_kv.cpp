#include "host_kv.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace omniserve {
namespace {

// The pool's bytes are read and written as 16 and 32-bit lanes, whatever type the kernels give them.
using Half = uint16_t __attribute__((may_alias));
using Lane = uint32_t __attribute__((may_alias));
using Float = float __attribute__((may_alias));

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

#if defined(__SSE2__)
bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }
#endif

// Non-temporal stores where they are possible: a block that arrives is not read soon, and a plain store would first
// fetch the line that it overwrites. Asks for the bytes at `next` meanwhile, unless it is null. The caller fences.
void stream_copy(char* to, const char* from, int64_t bytes, const char* next) {
#if defined(__SSE2__)
  if (is_aligned(to) && bytes % 64 == 0) {
    for (int64_t i = 0; i < bytes; i += 64) {
      if (next != nullptr) _mm_prefetch(next + i, _MM_HINT_T0);
      const __m128i* in = reinterpret_cast<const __m128i*>(from + i);
      __m128i* out = reinterpret_cast<__m128i*>(to + i);
      const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1), c = _mm_loadu_si128(in + 2),
                    d = _mm_loadu_si128(in + 3);
      _mm_stream_si128(out, a);
      _mm_stream_si128(out + 1, b);
      _mm_stream_si128(out + 2, c);
      _mm_stream_si128(out + 3, d);
    }
    return;
  }
#else
  (void)next;
#endif
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

void fence_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Rows [S, H] of 16 bits into token pairs [S/2, H, 2]. Asks for as many bytes at `next` meanwhile.
void interleave_rows(const char* rows, int64_t block_size, int64_t head_size, char* pairs, const char* next) {
  const Half* from = reinterpret_cast<const Half*>(rows);
  Half* to = reinterpret_cast<Half*>(pairs);
  for (int64_t t = 0; t < block_size; t += 2, from += 2 * head_size, to += 2 * head_size) {
    int64_t h = 0;
#if defined(__SSE2__)
    if (is_aligned(to)) {
      for (; h + 16 <= head_size; h += 16) {
        _mm_prefetch(next + (reinterpret_cast<const char*>(to + 2 * h) - pairs), _MM_HINT_T0);
        const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + h));
        const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + head_size + h));
        const __m128i first2 = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + h + 8));
        const __m128i second2 = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + head_size + h + 8));
        __m128i* out = reinterpret_cast<__m128i*>(to + 2 * h);
        _mm_stream_si128(out, _mm_unpacklo_epi16(first, second));
        _mm_stream_si128(out + 1, _mm_unpackhi_epi16(first, second));
        _mm_stream_si128(out + 2, _mm_unpacklo_epi16(first2, second2));
        _mm_stream_si128(out + 3, _mm_unpackhi_epi16(first2, second2));
      }
    }
#else
    (void)next;
#endif
    for (; h < head_size; ++h) {
      to[2 * h] = from[h];
      to[2 * h + 1] = from[head_size + h];
    }
  }
}

// Token pairs [S/2, H, 2] into rows [S, H].
void separate_pairs(const char* pairs, int64_t block_size, int64_t head_size, char* rows) {
  const Half* from = reinterpret_cast<const Half*>(pairs);
  Half* to = reinterpret_cast<Half*>(rows);
  for (int64_t t = 0; t < block_size; t += 2, from += 2 * head_size, to += 2 * head_size) {
    int64_t h = 0;
#if defined(__SSE2__)
    if (is_aligned(to) && head_size % 8 == 0) {
      for (; h < head_size; h += 8) {
        __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * h));
        __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * h + 8));
        for (int round = 0; round < 3; ++round) {  // three unpacks sort 16 lanes by their parity
          const __m128i mixed = _mm_unpacklo_epi16(low, high);
          high = _mm_unpackhi_epi16(low, high);
          low = mixed;
        }
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + h), low);
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + head_size + h), high);
      }
    }
#endif
    for (; h < head_size; ++h) {
      to[h] = from[2 * h];
      to[head_size + h] = from[2 * h + 1];
    }
  }
}

struct RowKernels {
  float (*quantize)(const char* row, int64_t head_size, char* to);  // returns the scale
  void (*dequantize)(const char* row, float scale, int64_t head_size, char* to);
};

namespace baseline {
#include "host_kv_rows.inl"
}  // namespace baseline

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
#include "host_kv_rows.inl"
}  // namespace avx2
#pragma GCC pop_options
#endif

const RowKernels& row_kernels(DType row_dtype) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2) return avx2::kRowKernels[static_cast<int>(row_dtype)];
#endif
  return baseline::kRowKernels[static_cast<int>(row_dtype)];
}

}  // namespace

float quantize_row(DType row_dtype, const char* row, int64_t head_size, char* to) {
  return row_kernels(row_dtype).quantize(row, head_size, to);
}

void append_host_token(const HostBlockShape& shape, int64_t offset, const TokenRow& k, const TokenRow& v, char* block,
                       float* scales) {
  const int64_t row_bytes = shape.head_size * dtype_bytes(shape.dtype), plane = shape.plane_bytes();
  for (int64_t head = 0; head < shape.kv_heads; ++head, block += 2 * plane) {
    const char* const k_row = k.data + head * k.head_stride;
    const char* const v_row = v.data + head * v.head_stride;
    char* const k_to = block + offset * row_bytes;
    if (shape.dtype == DType::i8) {
      const RowKernels& rows = row_kernels(shape.row_dtype);
      float* const k_scale = scales + 2 * head * shape.block_size + offset;
      k_scale[0] = rows.quantize(k_row, shape.head_size, k_to);
      k_scale[shape.block_size] = rows.quantize(v_row, shape.head_size, k_to + plane);
      continue;
    }
    std::memcpy(k_to, k_row, static_cast<size_t>(row_bytes));
    if (shape.v_pairs()) {
      // Whole lanes are read and written, for scattered 16-bit stores are slower. The other half is not in anybody's
      // hands: both tokens are one request's, and its pieces never part a pair.
      Lane* const pairs = reinterpret_cast<Lane*>(block + plane) + offset / 2 * shape.head_size;
      const Half* const from = reinterpret_cast<const Half*>(v_row);
      const int shift = offset % 2 == 0 ? 0 : 16;
      const uint32_t other = 0xffff0000u >> shift;
      for (int64_t h = 0; h < shape.head_size; ++h) {
        pairs[h] = (pairs[h] & other) | static_cast<uint32_t>(from[h]) << shift;
      }
    } else {
      std::memcpy(k_to + plane, v_row, static_cast<size_t>(row_bytes));
    }
  }
}

void pack_host_block(const HostBlockShape& shape, const char* k, const char* v, char* block, float* scales) {
  if (shape.cache_dtype == DType::i8) {  // codes and scales are copied as they are
    const int64_t plane = shape.plane_bytes(), scale_bytes = shape.block_size * kScaleBytes;
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      for (const char* side : {k, v}) {
        const char* const from = side + head * shape.cache_head_bytes();
        stream_copy(block, from, plane, nullptr);
        std::memcpy(scales, from + plane, static_cast<size_t>(scale_bytes));
        block += plane;
        scales += shape.block_size;
      }
    }
    return fence_stream();
  }
  const int64_t row_bytes = shape.head_size * dtype_bytes(shape.row_dtype), head_bytes = shape.block_size * row_bytes;
  const int64_t plane = shape.plane_bytes();
  if (shape.dtype == DType::i8) {
    const RowKernels& rows = row_kernels(shape.row_dtype);
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      for (const char* side : {k, v}) {
        const char* row = side + head * head_bytes;
        for (int64_t t = 0; t < shape.block_size; ++t, row += row_bytes, block += shape.head_size) {
          *scales++ = rows.quantize(row, shape.head_size, block);
        }
      }
    }
    return;
  }
  for (int64_t head = 0; head < shape.kv_heads; ++head, block += 2 * plane, k += plane, v += plane) {
    // K and V of a head are two streams of a few pages, too short for the hardware to run ahead in: each asks for the
    // other's next.
    stream_copy(block, k, plane, v);
    const char* const next = head + 1 < shape.kv_heads ? k + plane : k;
    if (shape.v_pairs()) {
      interleave_rows(v, shape.block_size, shape.head_size, block + plane, next);
    } else {
      stream_copy(block + plane, v, plane, next);
    }
  }
  fence_stream();
}

void unpack_host_block(const HostBlockShape& shape, const char* block, const float* scales, char* k, char* v) {
  if (shape.cache_dtype == DType::i8) {
    const int64_t plane = shape.plane_bytes(), scale_bytes = shape.block_size * kScaleBytes;
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      for (char* side : {k, v}) {
        char* const to = side + head * shape.cache_head_bytes();
        stream_copy(to, block, plane, nullptr);
        std::memcpy(to + plane, scales, static_cast<size_t>(scale_bytes));
        block += plane;
        scales += shape.block_size;
      }
    }
    return fence_stream();
  }
  const int64_t row_bytes = shape.head_size * dtype_bytes(shape.row_dtype), head_bytes = shape.block_size * row_bytes;
  const int64_t plane = shape.plane_bytes();
  if (shape.dtype == DType::i8) {
    const RowKernels& rows = row_kernels(shape.row_dtype);
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      for (char* side : {k, v}) {
        char* row = side + head * head_bytes;
        for (int64_t t = 0; t < shape.block_size; ++t, row += row_bytes, block += shape.head_size) {
          rows.dequantize(block, *scales++, shape.head_size, row);
        }
      }
    }
    return;
  }
  for (int64_t head = 0; head < shape.kv_heads; ++head, block += 2 * plane, k += plane, v += plane) {
    stream_copy(k, block, plane, nullptr);
    if (shape.v_pairs()) {
      separate_pairs(block + plane, shape.block_size, shape.head_size, v);
    } else {
      stream_copy(v, block + plane, plane, nullptr);
    }
  }
  fence_stream();
}

void reverse_rows(const HostBlockShape& shape, const char* from, char* to) {
  const int64_t last = shape.block_size - 1, row_bytes = shape.head_size * dtype_bytes(shape.cache_dtype);
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    for (int64_t row = 0; row <= last; ++row)
      std::memcpy(to + row * row_bytes, from + (last - row) * row_bytes, static_cast<size_t>(row_bytes));
    if (shape.cache_dtype == DType::i8) {
      const int64_t codes = (last + 1) * row_bytes;
      for (int64_t row = 0; row <= last; ++row)
        std::memcpy(to + codes + row * kScaleBytes, from + codes + (last - row) * kScaleBytes, kScaleBytes);
    }
    from += shape.cache_head_bytes();
    to += shape.cache_head_bytes();
  }
}

}  // namespace omniserve
