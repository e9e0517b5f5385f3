// Fuzzer of the attention and linear kernels, to be built with a sanitizer: random shapes, layouts, block tables and cuts, against
// loops in double precision. The cache is allocated to the byte and holds NaN wherever a kernel must not look, and
// pieces run on several threads at once. Usage: kernel_fuzz first_seed seconds
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "attention.h"
#include "host_kv.h"
#include "linear.h"

using namespace omniserve;

namespace {

using Rng = std::mt19937_64;

template <typename T>
T one_of(Rng& rng, std::initializer_list<T> values) {
  return values.begin()[rng() % values.size()];
}
int64_t between(Rng& rng, int64_t low, int64_t high) {
  return low + static_cast<int64_t>(rng() % static_cast<uint64_t>(high - low + 1));
}

float bf16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, sizeof(x));
  return x;
}

// Values that every dtype holds exactly: multiples of 1/64 in [-2, 2).
float draw(Rng& rng) { return static_cast<float>(static_cast<int64_t>(rng() % 256) - 128) / 64.0f; }

void put(char* to, DType dtype, float x) {
  if (dtype == DType::f32) {
    std::memcpy(to, &x, 4);
    return;
  }
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  uint16_t bits;
  if (dtype == DType::bf16) {
    bits = static_cast<uint16_t>(wide >> 16);
  } else if (x == 0.0f) {
    bits = 0;
  } else {
    const uint32_t exponent = ((wide >> 23) & 0xff) - 127 + 15;  // normal in fp16: |x| >= 1/64
    bits = static_cast<uint16_t>((wide >> 31) << 15 | exponent << 10 | ((wide >> 13) & 0x3ff));
  }
  std::memcpy(to, &bits, 2);
}

float get(const char* from, DType dtype) {
  if (dtype == DType::f32) {
    float x;
    std::memcpy(&x, from, 4);
    return x;
  }
  uint16_t bits;
  std::memcpy(&bits, from, 2);
  if (dtype == DType::bf16) return bf16_to_float(bits);
  const int exponent = (bits >> 10) & 31, fraction = bits & 0x3ff;
  const float magnitude = exponent == 31  ? (fraction != 0 ? NAN : INFINITY)
                          : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                          : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return (bits >> 15) != 0 ? -magnitude : magnitude;
}

// One sequence: its keys and values [T, K, H] as numbers, and its cache.
struct Case {
  int64_t kv_heads, group, head_size, block_size, num_blocks, length;
  DType dtype, row_dtype;
  bool host;
  AttentionParams params;
  std::vector<int32_t> table;
  std::vector<float> k, v;  // as the cache holds them
  std::unique_ptr<char[]> pool, k_cache, v_cache;
  std::unique_ptr<float[]> scales, sinks, slopes;

  int64_t at(int64_t t, int64_t head, int64_t h) const { return (t * kv_heads + head) * head_size + h; }
  int64_t element() const { return dtype_bytes(row_dtype); }
  PagedKV kv() const {
    return host ? host_layout(pool.get(), scales.get(), num_blocks, kv_heads, block_size, head_size, dtype)
                : device_layout(k_cache.get(), v_cache.get(), num_blocks, kv_heads, block_size, head_size, dtype);
  }
};

void fail(const Case& c, const char* what, double error) {
  std::fprintf(stderr,
               "%s: %s wrong by %g: K %ld, group %ld, H %ld, S %ld, length %ld, dtype %d, rows %d, host %d, window %ld, "
               "softcap %g, chunk %ld, sinks %d, slopes %d\n",
               isa_name(), what, error, long(c.kv_heads), long(c.group), long(c.head_size), long(c.block_size),
               long(c.length), int(c.dtype), int(c.row_dtype), int(c.host), long(c.params.window),
               double(c.params.softcap), long(c.params.chunk), int(c.params.sinks != nullptr),
               int(c.params.alibi_slopes != nullptr));
  std::exit(1);
}

Case make_case(Rng& rng) {
  Case c;
  c.kv_heads = between(rng, 1, 3);
  c.group = one_of<int64_t>(rng, {1, 1, 2, 3, 4, 4, 5, 7, 8, 12, 16, 17});
  c.head_size = one_of<int64_t>(rng, {64, 80, 96, 128, 128, 256, 512, 8 * between(rng, 1, 64)});
  c.block_size = one_of<int64_t>(rng, {1, 2, 3, 8, 16, 32, 64, 128});
  c.length = between(rng, 1, one_of<int64_t>(rng, {3, 70, 400}));
  c.host = rng() % 2 != 0;
  c.dtype = one_of(rng, {DType::f32, DType::bf16, DType::bf16, DType::f16, DType::i8});
  c.row_dtype = c.dtype == DType::i8 ? one_of(rng, {DType::f32, DType::bf16, DType::f16}) : c.dtype;
  c.params = {c.kv_heads * c.group, static_cast<float>(1 / std::sqrt(double(c.head_size))),
              rng() % 3 != 0 ? 0 : between(rng, 1, c.length + 5), rng() % 4 != 0 ? 0.0f : 3.0f,
              rng() % 3 != 0 ? 0 : between(rng, 1, c.length + 5)};
  const auto per_head = [&] {  // a slope below 0 would favour far keys, whose scores are large and so less exact
    std::unique_ptr<float[]> values(new float[static_cast<size_t>(c.params.num_heads)]);
    for (int64_t n = 0; n < c.params.num_heads; ++n) values[static_cast<size_t>(n)] = std::abs(draw(rng));
    return values;
  };
  if (rng() % 3 == 0) c.params.sinks = (c.sinks = per_head()).get();
  if (rng() % 3 == 0) c.params.alibi_slopes = (c.slopes = per_head()).get();
  const int64_t used = (c.length + c.block_size - 1) / c.block_size;
  c.num_blocks = used + 2;
  std::vector<int32_t> ids(static_cast<size_t>(c.num_blocks));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
  std::shuffle(ids.begin(), ids.end(), rng);
  c.table.assign(ids.begin(), ids.begin() + used);
  c.table.shrink_to_fit();
  if (!c.host && rng() % 2 != 0)
    for (int32_t& entry : c.table) entry = rng() % 2 != 0 ? from_right(entry) : entry;

  const int64_t plane = c.block_size * c.head_size, planes = c.num_blocks * c.kv_heads;
  // All bits set is NaN; int8 has none, but its scales have.
  auto poisoned = [](int64_t bytes) {
    std::unique_ptr<char[]> data(new char[static_cast<size_t>(bytes)]);
    std::memset(data.get(), 0xff, static_cast<size_t>(bytes));
    return data;
  };
  if (c.host) {
    c.pool = poisoned(2 * planes * plane * dtype_bytes(c.dtype));
    if (c.dtype == DType::i8) {
      c.scales.reset(new float[static_cast<size_t>(2 * planes * c.block_size)]);
      for (int64_t i = 0; i < 2 * planes * c.block_size; ++i) c.scales[static_cast<size_t>(i)] = NAN;
    }
  } else {
    c.k_cache = poisoned(planes * device_head_bytes(c.block_size, c.head_size, c.dtype));
    c.v_cache = poisoned(planes * device_head_bytes(c.block_size, c.head_size, c.dtype));
  }
  // What lies before every query's window was freed.
  const int64_t row = c.kv_heads * c.head_size;
  std::vector<char> k_row(static_cast<size_t>(row * c.element())), v_row(k_row.size());
  c.k.resize(static_cast<size_t>(c.length * row));
  c.v.resize(c.k.size());
  const HostBlockShape shape{c.kv_heads, c.block_size, c.head_size, c.dtype, c.row_dtype, c.row_dtype};
  for (int64_t t = 0; t < c.length; ++t) {
    for (int64_t i = 0; i < row; ++i) {
      c.k[static_cast<size_t>(t * row + i)] = draw(rng);
      c.v[static_cast<size_t>(t * row + i)] = draw(rng);
      put(k_row.data() + i * c.element(), c.row_dtype, c.k[static_cast<size_t>(t * row + i)]);
      put(v_row.data() + i * c.element(), c.row_dtype, c.v[static_cast<size_t>(t * row + i)]);
    }
    const BlockRef ref(c.table[static_cast<size_t>(t / c.block_size)]);
    const int64_t block = ref.block, in_block = t % c.block_size;
    const int64_t offset = ref.reversed ? c.block_size - 1 - in_block : in_block;
    if (c.host) {
      append_host_token(shape, offset, {k_row.data(), c.head_size * c.element()},
                        {v_row.data(), c.head_size * c.element()}, c.pool.get() + block * shape.block_bytes(),
                        c.scales ? c.scales.get() + block * shape.block_scales() : nullptr);
      continue;
    }
    for (int64_t head = 0; head < c.kv_heads; ++head) {
      const int64_t plane_at = (block * c.kv_heads + head) * device_head_bytes(c.block_size, c.head_size, c.dtype);
      for (const auto& [rows, cache] : {std::pair{&k_row, &c.k_cache}, std::pair{&v_row, &c.v_cache}}) {
        const char* const from = rows->data() + head * c.head_size * c.element();
        char* const to = cache->get() + plane_at;
        if (c.dtype == DType::i8) {
          const float scale = quantize_row(c.row_dtype, from, c.head_size, to + offset * c.head_size);
          std::memcpy(to + c.block_size * c.head_size + offset * kScaleBytes, &scale, kScaleBytes);
        } else {
          std::memcpy(to + offset * c.head_size * c.element(), from, static_cast<size_t>(c.head_size * c.element()));
        }
      }
    }
  }
  if (c.dtype == DType::i8) {  // the numbers that were kept, which the appending rounded
    for (int64_t t = 0; t < c.length; ++t)
      for (int64_t head = 0; head < c.kv_heads; ++head)
        for (int plane_index = 0; plane_index < 2; ++plane_index) {
          const BlockRef ref(c.table[static_cast<size_t>(t / c.block_size)]);
          const int64_t offset = ref.reversed ? c.block_size - 1 - t % c.block_size : t % c.block_size;
          const PagedKV kv = c.kv();
          const char* const plane = plane_index == 0 ? kv.k : kv.v;
          const float* const scales = plane_index == 0 ? kv.k_scales : kv.v_scales;
          const int8_t* const values =
              reinterpret_cast<const int8_t*>(plane + ref.block * kv.block_stride + head * kv.head_stride) +
              offset * c.head_size;
          const float scale = scales[ref.block * kv.scale_block_stride + head * kv.scale_head_stride + offset];
          std::vector<float>& numbers = plane_index == 0 ? c.k : c.v;
          for (int64_t h = 0; h < c.head_size; ++h)
            numbers[static_cast<size_t>(c.at(t, head, h))] = scale * values[h];
        }
  }
  return c;
}

// Attention of the query row at `position`, [N, H].
std::vector<double> expected(const Case& c, const float* q, int64_t position) {
  const int64_t num_heads = c.params.num_heads, H = c.head_size;
  const int64_t first = first_key(position, c.params);
  std::vector<double> out(static_cast<size_t>(num_heads * H));
  for (int64_t n = 0; n < num_heads; ++n) {
    std::vector<double> scores;
    double highest = -INFINITY, sum = 0;
    for (int64_t t = first; t <= position; ++t) {
      double score = 0;
      for (int64_t h = 0; h < H; ++h)
        score += double(q[n * H + h]) * double(c.k[static_cast<size_t>(c.at(t, n / c.group, h))]);
      score *= double(c.params.scale);
      if (c.params.softcap > 0) score = double(c.params.softcap) * std::tanh(score / double(c.params.softcap));
      if (c.slopes) score += double(c.slopes[static_cast<size_t>(n)]) * double(t - position);
      scores.push_back(score);
      highest = std::max(highest, score);
    }
    if (c.sinks) sum = std::exp(double(c.sinks[static_cast<size_t>(n)]) - highest);
    for (double& score : scores) sum += score = std::exp(score - highest);
    for (int64_t t = first; t <= position; ++t)
      for (int64_t h = 0; h < H; ++h)
        out[static_cast<size_t>(n * H + h)] +=
            scores[static_cast<size_t>(t - first)] / sum * double(c.v[static_cast<size_t>(c.at(t, n / c.group, h))]);
  }
  return out;
}

double relative_rms(const std::vector<double>& wanted, const std::vector<double>& got) {
  double error = 0, size = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    error += (wanted[i] - got[i]) * (wanted[i] - got[i]);
    size += wanted[i] * wanted[i];
  }
  return size > 0 ? std::sqrt(error / size) : std::sqrt(error);
}

// A decode of `num_rows` query tokens, `q` [num_rows, N, H] in the rows' dtype, from `position` on, over the keys
// [0, end); cut into pieces of `piece` keys, each by one of two threads. Returns [num_rows, N, H].
std::vector<float> decode(const Case& c, const char* q, int64_t position, int64_t num_rows, int64_t end, int64_t piece) {
  const int64_t heads = num_rows * c.params.num_heads, size = heads * c.head_size, num_pieces = (end + piece - 1) / piece;
  std::vector<float> acc(static_cast<size_t>(num_pieces * size)), m(static_cast<size_t>(num_pieces * heads));
  std::vector<float> l(m.size()), out(static_cast<size_t>(size));
  auto run = [&](int64_t begin, int64_t step) {
    for (int64_t i = begin; i < num_pieces; i += step)
      decode_partial(q, c.row_dtype, c.kv(), c.table.data(), position, num_rows, i * piece,
                     std::min((i + 1) * piece, end), c.params, acc.data() + i * size, m.data() + i * heads,
                     l.data() + i * heads);
  };
  std::thread other(run, 1, 2);
  run(0, 2);
  other.join();
  merge_partials(acc.data(), m.data(), l.data(), num_pieces, num_rows, c.params.num_heads, c.kv_heads, c.head_size,
                 c.params.sinks, DType::f32, out.data());
  return out;
}

// One query token or several. With vectors, a row's result is that of a decode of its own, to the bit, and the last rows
// may stand where the cache holds NaN, which the others must not notice.
void check_decode(const Case& c, Rng& rng) {
  const bool by_tiles = std::strcmp(isa_name(), "amx_bf16") == 0 && c.host && c.dtype == DType::bf16;
  const int64_t row = c.params.num_heads * c.head_size;
  const int64_t num_rows = between(rng, 1, std::min<int64_t>(c.length, one_of<int64_t>(rng, {1, 4, 16})));
  const int64_t position = c.length - num_rows;
  const int64_t room = static_cast<int64_t>(c.table.size()) * c.block_size - c.length;
  const int64_t num_broken = by_tiles || rng() % 2 != 0 ? 0 : between(rng, 0, std::min<int64_t>(room, 3));
  std::vector<float> q(static_cast<size_t>((num_rows + num_broken) * row));
  std::vector<char> packed(q.size() * static_cast<size_t>(c.element()));
  for (int64_t i = 0; i < static_cast<int64_t>(q.size()); ++i) {
    q[static_cast<size_t>(i)] = draw(rng);
    put(packed.data() + i * c.element(), c.row_dtype, q[static_cast<size_t>(i)]);
  }
  const int64_t piece = between(rng, 1, c.length);
  const std::vector<float> out =
      decode(c, packed.data(), position, num_rows + num_broken, c.length + num_broken, piece);
  for (int64_t i = 0; i < num_rows; ++i) {
    const std::vector<float> got(out.begin() + i * row, out.begin() + (i + 1) * row);
    const double error =
        relative_rms(expected(c, q.data() + i * row, position + i), std::vector<double>(got.begin(), got.end()));
    if (!(error < 1e-5)) fail(c, "decode", error);
    if (by_tiles) continue;
    const std::vector<float> alone =
        decode(c, packed.data() + i * row * c.element(), position + i, 1, position + i + 1, piece);
    if (std::memcmp(alone.data(), got.data(), got.size() * sizeof(float)) != 0) fail(c, "a row beside others", 0);
  }
}

void check_prefill(const Case& c, Rng& rng) {
  const int64_t row = c.params.num_heads * c.head_size, query_len = between(rng, 1, std::min<int64_t>(c.length, 40));
  const int64_t context_len = c.length - query_len, stride = row + 8 * between(rng, 0, 1);
  std::vector<float> q(static_cast<size_t>(query_len * row));
  std::vector<char> packed(static_cast<size_t>(query_len * stride * c.element())), out(q.size() * size_t(c.element()));
  for (int64_t i = 0; i < query_len; ++i)
    for (int64_t j = 0; j < row; ++j) {
      q[static_cast<size_t>(i * row + j)] = draw(rng);
      put(packed.data() + (i * stride + j) * c.element(), c.row_dtype, q[static_cast<size_t>(i * row + j)]);
    }
  const int64_t cut = between(rng, 0, query_len);
  for (int64_t head = 0; head < c.kv_heads; ++head)
    for (const auto& [begin, end] : {std::pair{int64_t{0}, cut}, std::pair{cut, query_len}})
      if (begin < end)
        prefill_tile(packed.data(), c.row_dtype, stride, c.kv(), c.table.data(), context_len, begin, end, head,
                     c.params, out.data(), row);
  // Results are rounded to the rows' dtype, and bf16 weights may be.
  const double allowed = c.row_dtype == DType::f32 ? 1e-5 : c.row_dtype == DType::f16 ? 1e-3 : 6e-3;
  for (int64_t i = 0; i < query_len; ++i) {
    std::vector<double> got(static_cast<size_t>(row));
    for (int64_t j = 0; j < row; ++j)
      got[static_cast<size_t>(j)] = double(get(out.data() + (i * row + j) * c.element(), c.row_dtype));
    const double error = relative_rms(expected(c, q.data() + i * row, context_len + i), got);
    if (!(error < allowed)) fail(c, "prefill", error);
  }
}

// Memory to the byte, aligned to 64.
std::unique_ptr<void, void (*)(void*)> aligned(int64_t size) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, static_cast<size_t>(size)) != 0) std::abort();
  return std::unique_ptr<void, void (*)(void*)>(memory, std::free);
}

// All features of all rows; the panels are divided among two threads.
void run_linear(const LinearArgs& args, Rng& rng) {
  const auto run = [&](int64_t begin, int64_t end) {
    if (begin >= end) return;
    const int64_t room = (args.num_rows + kTileOfRows - 1) / kTileOfRows * kTileOfRows;
    const auto copy = aligned(linear_rows_bytes(args, room));
    const auto sums = aligned(room * (end - begin + kPanel - 1) / kPanel * kPanel * 4);
    linear_pack_rows(args, copy.get(), 0, args.num_rows);
    linear_features(args, copy.get(), static_cast<float*>(sums.get()), begin, end, 0, args.num_rows);
  };
  const int64_t middle = between(rng, 0, num_panels(args.num_out) - 1) * kPanel;
  std::thread other(run, 0, middle);
  run(middle, args.num_out);
  other.join();
}

// A linear with memory to the byte.
void check_linear(Rng& rng) {
  const DType weight_dtype = one_of(rng, {DType::f32, DType::bf16, DType::f16});
  const DType dtype = weight_dtype == DType::bf16 && rng() % 2 ? DType::f32 : weight_dtype;
  const int64_t rows = between(rng, 1, one_of<int64_t>(rng, {3, 13, 50}));
  const int64_t num_in = between(rng, 0, one_of<int64_t>(rng, {5, 100, 2500}));
  const int64_t num_out = between(rng, 1, one_of<int64_t>(rng, {5, 33, 100})), x_stride = num_in + between(rng, 0, 3);
  const int64_t bytes = dtype_bytes(dtype), weight_bytes = dtype_bytes(weight_dtype);
  std::vector<float> x(static_cast<size_t>(rows * num_in)), weight(static_cast<size_t>(num_out * num_in));
  std::vector<float> bias(static_cast<size_t>(num_out));
  std::vector<char> packed_bias(static_cast<size_t>(num_out * bytes)), dense(weight.size() * size_t(weight_bytes));
  std::vector<char> laid(static_cast<size_t>((rows - 1) * x_stride + num_in) * size_t(bytes));
  std::vector<char> out(static_cast<size_t>(rows * num_out * bytes));
  for (size_t i = 0; i < weight.size(); ++i) put(&dense[i * size_t(weight_bytes)], weight_dtype, weight[i] = draw(rng));
  for (size_t i = 0; i < bias.size(); ++i) put(&packed_bias[i * size_t(bytes)], dtype, bias[i] = draw(rng));
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t i = 0; i < num_in; ++i)
      put(laid.data() + (t * x_stride + i) * bytes, dtype, x[size_t(t * num_in + i)] = draw(rng));
  const auto packed = aligned(num_panels(num_out) * panel_size(num_in, weight_dtype) * weight_bytes);
  pack_panels(dense.data(), packed.get(), num_in, num_out, weight_dtype, 0, num_panels(num_out));
  const bool has_bias = rng() % 2;
  const LinearArgs args{laid.data(), packed.get(), has_bias ? packed_bias.data() : nullptr, out.data(),
                        x_stride,    rows,         num_in,  num_out, dtype, weight_dtype};
  run_linear(args, rng);
  std::vector<char> row(static_cast<size_t>(num_in * weight_bytes));
  for (int64_t o = 0; o < num_out; ++o) {
    unpack_feature(packed.get(), row.data(), num_in, weight_dtype, o);
    const bool same = row.empty() || std::memcmp(row.data(), &dense[size_t(o * num_in * weight_bytes)], row.size()) == 0;
    for (int64_t t = 0; t < rows; ++t) {
      double exact = has_bias ? bias[size_t(o)] : 0.0;
      for (int64_t i = 0; i < num_in; ++i) exact += double(x[size_t(t * num_in + i)]) * weight[size_t(o * num_in + i)];
      const double got = get(out.data() + (t * num_out + o) * bytes, dtype);
      const double allowed = 1e-4 + std::abs(exact) * (dtype == DType::f32 ? 1e-5 : dtype == DType::f16 ? 1e-3 : 4e-3);
      if (same && std::abs(got - exact) <= allowed) continue;
      std::fprintf(stderr, "%s: linear [%ld, %ld] x [%ld, %ld], dtypes %d and %d: row %ld, feature %ld is %g, not %g\n",
                   isa_name(), long(rows), long(num_in), long(num_out), long(num_in), int(dtype), int(weight_dtype),
                   long(t), long(o), got, exact);
      std::exit(1);
    }
  }
}

// A linear of codes with memory to the byte. The codes behind the last feature and the last input are random like the
// others, and must not count.
void check_quantized(Rng& rng) {
  const QuantForm forms[] = {
      {4, Scales::f16, 32},       {5, Scales::f16, 32},  {8, Scales::f16, 32},
      {4, Scales::affine16, 32},  {4, Scales::k, 32},    {5, Scales::k, 32},
      {6, Scales::k_signed, 16},  {4, Scales::f32, 8 * between(rng, 1, 40)},
      {8, Scales::f32, 8 * between(rng, 1, 40)},         {5, Scales::affine16, 32 * between(rng, 1, 5)},
      {4, Scales::affine32, 8 * between(rng, 1, 40)},    {8, Scales::affine32, 8 * between(rng, 1, 40)},
  };
  const QuantForm form = forms[rng() % (sizeof(forms) / sizeof(forms[0]))];
  const DType dtype = one_of(rng, {DType::f32, DType::bf16, DType::f16});
  const int64_t rows = between(rng, 1, one_of<int64_t>(rng, {3, 13, 50}));
  const int64_t num_in = between(rng, 0, one_of<int64_t>(rng, {5, 100, 1000}));
  const int64_t num_out = between(rng, 1, one_of<int64_t>(rng, {5, 33, 100})), bytes = dtype_bytes(dtype);
  std::vector<float> x(static_cast<size_t>(rows * num_in)), weight(static_cast<size_t>(num_in));
  std::vector<char> laid(x.size() * size_t(bytes)), out(static_cast<size_t>(rows * num_out * bytes));
  for (size_t i = 0; i < x.size(); ++i) put(&laid[i * size_t(bytes)], dtype, x[i] = draw(rng));
  const int64_t size = num_panels(num_out) * panel_bytes(num_in, form);
  const auto packed = aligned(size);
  char* const begin = static_cast<char*>(packed.get());
  for (int64_t i = 0; i < size; ++i) begin[i] = static_cast<char>(rng());
  // Numbers that are no random bits: scales and offsets, but for the bytes of the groups of k.
  const bool single = form.scales == Scales::f32 || form.scales == Scales::affine32;
  const int64_t numbers = kPanel * (form.has_offset() ? 2 : 1), width = single ? 4 : 2;
  for (char* record = begin; record < begin + size; record += form.record_bytes())
    for (int64_t i = 0; i < numbers; ++i) put(record + i * width, single ? DType::f32 : DType::f16, draw(rng) / 64);
  const LinearArgs args{laid.data(), begin,  nullptr, out.data(), num_in, rows,
                        num_in,      num_out, dtype,  dtype,      &form};
  run_linear(args, rng);
  for (int64_t o = 0; o < num_out; ++o) {
    expand_feature(begin, weight.data(), num_in, form, o);
    for (int64_t t = 0; t < rows; ++t) {
      double exact = 0, products = 0;
      for (int64_t i = 0; i < num_in; ++i) {
        const double product = double(x[size_t(t * num_in + i)]) * weight[size_t(i)];
        exact += product;
        products += std::abs(product);
      }
      const double got = get(out.data() + (t * num_out + o) * bytes, dtype);
      // Beside the result's rounding that of weights to bf16. An offset of k is up to 8, 10 times most weights.
      const double rounding = dtype == DType::f32 ? 1e-5 : dtype == DType::f16 ? 1e-3 : 4e-3;
      const double allowed = 2e-3 + std::abs(exact) * rounding + products * (dtype == DType::bf16 ? 4e-3 : 1e-6);
      if (std::abs(got - exact) <= allowed) continue;
      std::fprintf(stderr, "%s: codes of %ld bits, scales %d, groups of %ld, [%ld, %ld] x [%ld, %ld], dtype %d: row %ld, "
                   "feature %ld is %g, not %g\n", isa_name(), long(form.bits), int(form.scales), long(form.group),
                   long(rows), long(num_in), long(num_out), long(num_in), int(dtype), long(t), long(o), got, exact);
      std::exit(1);
    }
  }
}

// Rows and a weight in int8, with memory to the byte: the definition, rounded to the rows' dtype. Codes, sums and scales behind the last
// feature are random, and must not count.
void check_int8(Rng& rng) {
  const DType dtype = one_of(rng, {DType::f32, DType::bf16, DType::f16});
  const int64_t rows = between(rng, 1, one_of<int64_t>(rng, {3, 13, 50}));
  const int64_t num_in = between(rng, 0, one_of<int64_t>(rng, {5, 100, 1000, 5000}));
  const int64_t num_out = between(rng, 1, one_of<int64_t>(rng, {5, 33, 100})), bytes = dtype_bytes(dtype);
  const int64_t inputs = (num_in + kInt8Inputs - 1) / kInt8Inputs * kInt8Inputs, size = int8_panel_bytes(num_in);
  std::vector<float> x(static_cast<size_t>(rows * num_in));
  std::vector<char> laid(x.size() * size_t(bytes)), out(static_cast<size_t>(rows * num_out * bytes));
  for (size_t i = 0; i < x.size(); ++i) {
    put(&laid[i * size_t(bytes)], dtype, draw(rng));
    x[i] = float(get(&laid[i * size_t(bytes)], dtype));
  }
  const auto packed = aligned(num_panels(num_out) * size);
  char* const begin = static_cast<char*>(packed.get());
  for (int64_t i = 0; i < num_panels(num_out) * size; ++i) begin[i] = static_cast<char>(rng());
  const auto code_at = [&](int64_t o, int64_t i) {
    return begin + o / kPanel * size + kInt8Header + (i / 4 * kPanel + o % kPanel) * 4 + i % 4;
  };
  for (int64_t o = 0; o < num_out; ++o) {
    int32_t total = 0;
    for (int64_t i = 0; i < inputs; ++i) {
      if (i >= num_in) *code_at(o, i) = 0;
      total += static_cast<signed char>(*code_at(o, i));
    }
    char* const header = begin + o / kPanel * size + o % kPanel * 4;
    put(header, DType::f32, draw(rng) / 64);
    std::memcpy(header + kPanel * 4, &total, sizeof(total));
  }
  const float fixed = 0.03125f;
  const Int8Form form{rng() % 2 ? &fixed : nullptr};
  LinearArgs args{laid.data(), begin, nullptr, out.data(), num_in, rows, num_in, num_out, dtype, dtype};
  args.int8 = &form;
  run_linear(args, rng);
  std::vector<int32_t> codes(static_cast<size_t>(num_in));
  for (int64_t t = 0; t < rows; ++t) {
    float most = 0;
    for (int64_t i = 0; i < num_in; ++i) most = std::max(most, std::abs(x[size_t(t * num_in + i)]));
    const float scale = form.x_scale != nullptr ? fixed : most / 127.5f;
    for (int64_t i = 0; i < num_in; ++i) {
      const float value = scale == 0 ? 0 : x[size_t(t * num_in + i)] / scale;
      codes[size_t(i)] = static_cast<int32_t>(std::nearbyint(std::clamp(value, -128.0f, 127.0f)));
    }
    for (int64_t o = 0; o < num_out; ++o) {
      int32_t sum = 0;
      for (int64_t i = 0; i < num_in; ++i) sum += codes[size_t(i)] * static_cast<signed char>(*code_at(o, i));
      const float by_row = static_cast<float>(sum) * scale;
      const float exact = by_row * get(begin + o / kPanel * size + o % kPanel * 4, DType::f32);
      const double got = get(out.data() + (t * num_out + o) * bytes, dtype);
      // Half a unit of the last place; f16 has none above 65504 and coarser ones below 2^-14.
      const double rounding = dtype == DType::f32 ? 0 : std::ldexp(1, dtype == DType::f16 ? -11 : -8);
      const bool is_infinite = dtype == DType::f16 && std::abs(exact) > 65504;
      if (is_infinite || std::abs(exact - got) <= std::abs(exact) * rounding + (dtype == DType::f32 ? 0 : 1e-7)) continue;
      std::fprintf(stderr, "%s: int8 [%ld, %ld] x [%ld, %ld], dtype %d: row %ld, feature %ld is %g, not %g\n", isa_name(),
                   long(rows), long(num_in), long(num_out), long(num_in), int(dtype), long(t), long(o), got, exact);
      std::exit(1);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return std::fprintf(stderr, "usage: %s first_seed seconds\n", argv[0]), 2;
  uint64_t seed = std::strtoull(argv[1], nullptr, 10);
  const auto stop = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::atof(argv[2]));
  int64_t count = 0;
  for (; count < 20 || std::chrono::steady_clock::now() < stop; ++count) {
    Rng rng(seed++);
    const Case c = make_case(rng);
    check_decode(c, rng);
    if (!c.host) check_prefill(c, rng);
    check_linear(rng);
    check_quantized(rng);
    check_int8(rng);
  }
  std::printf("%s: %ld cases agree\n", isa_name(), long(count));
}
