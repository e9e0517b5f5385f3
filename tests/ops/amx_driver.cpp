// A C face of the AMX kernels for test_amx.py, which compiles this file with OMNI_EMULATE_TILES or, on a machine that
// has them, with the real tiles. Scratch is of exactly the size asked for, and filled with NaN.
#include <cstdlib>
#include <cstring>

#include "attention_amx.cpp"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#endif

// attention.cpp, which picks the kernels, is not in this library.
bool omniserve::hardware_follows_streams() { return true; }

using namespace omniserve;

namespace {

struct Scratch {
  float* floats;
  explicit Scratch(int64_t asked) {
    const auto bytes = static_cast<size_t>(asked > 0 ? asked * 4 : int64_t{1} << 24);  // 0: for the other kernels
    void* memory = nullptr;
    if (posix_memalign(&memory, kScratchAlign, bytes) != 0) std::abort();
    std::memset(memory, 0xff, bytes);
    floats = static_cast<float*>(memory);
  }
  ~Scratch() { std::free(floats); }
};

}  // namespace

extern "C" {

// kv: num_blocks, kv_heads, block_size, head_size. `keys`: position, num_rows, begin, end.
void amx_decode(const void* q, const void* pool, const int64_t* kv, const int32_t* block_table, const int64_t* keys,
                int64_t num_heads, float scale, int64_t window, float softcap, int64_t chunk_size, const float* slopes,
                float* acc, float* m, float* l) {
  const PagedKV cache = host_layout(pool, nullptr, kv[0], kv[1], kv[2], kv[3], DType::bf16);
  const AttentionParams params = {num_heads, scale, window, softcap, chunk_size, nullptr, slopes};
  const Scratch scratch(amx_decode_scratch_floats(cache, keys[1] * num_heads));
  amx_bf16_kernels().decode(q, DType::bf16, cache, block_table, keys[0], keys[1], keys[2], keys[3], params, acc, m, l,
                            scratch.floats);
}

// `chunk`: context_len, q_begin, q_end. q and out are [q_len, N, H]. The cache is in bf16, or in i8.
void amx_prefill(const void* q, const void* k, const void* v, const int64_t* kv, const int32_t* block_table,
                 const int64_t* chunk, int64_t num_heads, float scale, int64_t window, float softcap,
                 int64_t chunk_size, const float* slopes, const float* sinks, void* out, int64_t is_i8) {
  const PagedKV cache = device_layout(k, v, kv[0], kv[1], kv[2], kv[3], is_i8 != 0 ? DType::i8 : DType::bf16);
  const AttentionParams params = {num_heads, scale, window, softcap, chunk_size, sinks, slopes};
  const int64_t stride = num_heads * kv[3];
  const Scratch scratch(amx_prefill_scratch_floats(cache, DType::bf16, (chunk[2] - chunk[1]) * (num_heads / kv[1])));
  for (int64_t head = 0; head < kv[1]; ++head)
    amx_bf16_kernels().prefill(q, DType::bf16, stride, cache, block_table, chunk[0], chunk[1], chunk[2], head, params,
                               out, stride, scratch.floats);
}

bool amx_granted() { return amx_bf16_granted(); }

// Memory that the kernels must not touch; nothing happens without AddressSanitizer.
void amx_forbid(const char* memory, int64_t bytes) { ASAN_POISON_MEMORY_REGION(memory, static_cast<size_t>(bytes)); }
void amx_allow(const char* memory, int64_t bytes) { ASAN_UNPOISON_MEMORY_REGION(memory, static_cast<size_t>(bytes)); }

#ifdef OMNI_EMULATE_TILES
int64_t amx_products() { return tile_state().products; }
int64_t amx_loads() { return tile_state().loads; }
int64_t amx_stores() { return tile_state().stores; }
bool amx_released() { return !tile_state().configured; }

// One product by itself: A [m, 2k] and B [k, n] pairs of bf16, C [m, n].
void amx_multiply(const void* a, const void* b, float* c, int64_t m, int64_t k, int64_t n) {
  TileConfig config;
  config.shape(0, m, 4 * n);
  config.shape(1, m, 4 * k);
  config.shape(2, k, 4 * n);
  tile_configure(config);
  tile_load<0>(c, 4 * n);
  tile_load<1>(a, 4 * k);
  tile_load<2>(b, 4 * n);
  tile_dpbf16<0, 1, 2>();
  tile_store<0>(c, 4 * n);
  tile_release();
}
#endif
}
