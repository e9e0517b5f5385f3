// Picks the kernels for this CPU, and lends them scratch memory.
#include "attention.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "attention_kernels.h"

namespace omniserve {
namespace {

struct Choice {
  const char* name;
  const Kernels& (*kernels)();
  bool (*supported)();
};

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }
bool has_amx_bf16() { return has_avx512_bf16() && amx_bf16_granted(); }
#endif

const Choice kChoices[] = {  // best first
#if defined(__x86_64__)
    {"amx_bf16", amx_bf16_kernels, has_amx_bf16},
    {"avx512_bf16", avx512_bf16_kernels, has_avx512_bf16},
    {"avx512_vnni", avx512_kernels, has_avx512_vnni},
    {"avx512", avx512_kernels, has_avx512},
    {"avx2", avx2_kernels, has_avx2},
#endif
    {"portable", portable_kernels, [] { return true; }},
};

const Choice& choose() {
  const char* forced = std::getenv("OMNISERVE_ISA");
  std::string known;
  for (const Choice& choice : kChoices) {
    if (forced == nullptr ? choice.supported() : std::string(forced) == choice.name) {
      if (!choice.supported())
        throw std::invalid_argument(std::string("OMNISERVE_ISA=") + forced + ": this CPU lacks these instructions");
      return choice;
    }
    known += std::string(known.empty() ? "" : ", ") + choice.name;
  }
  throw std::invalid_argument(std::string("OMNISERVE_ISA=") + forced + " is unknown; known here: " + known);
}

const Choice& chosen() {
  static const Choice& choice = choose();
  return choice;
}

const Kernels& kernels() {
  static const Kernels& table = chosen().kernels();
  return table;
}

// A thread keeps its scratch for its next call; it only grows, to a few hundred KiB for usual shapes.
float* scratch(int64_t num_floats) {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  static thread_local std::unique_ptr<void, Free> memory;
  static thread_local int64_t capacity = 0;
  if (num_floats > capacity) {
    const size_t bytes = static_cast<size_t>(round_up(num_floats * 4, kScratchAlign));
    memory.reset(std::aligned_alloc(kScratchAlign, bytes));
    capacity = memory ? num_floats : 0;
    if (!memory) throw std::bad_alloc();
  }
  return static_cast<float*>(memory.get());
}

}  // namespace

void decode_partial(const void* q, DType q_dtype, const PagedKV& kv, const int32_t* block_table, int64_t position,
                    int64_t num_rows, int64_t begin, int64_t end, const AttentionParams& params, float* acc, float* m,
                    float* l) {
  const int64_t heads = num_rows * params.num_heads, group = heads / kv.kv_heads;
  int64_t floats = heads * round_up(kv.head_size, kMaxLanes) + round_up(group, 4) * kDecodeTile;
#if defined(__x86_64__)
  floats = std::max(floats, amx_decode_scratch_floats(kv, heads));
#endif
  kernels().decode(q, q_dtype, kv, block_table, position, num_rows, begin, end, params, acc, m, l, scratch(floats));
}

void merge_partials(const float* acc, const float* m, const float* l, int64_t num_pieces, int64_t num_rows,
                    int64_t num_heads, int64_t kv_heads, int64_t head_size, const float* sinks, DType dtype, void* out) {
  kernels().merge(acc, m, l, num_pieces, num_rows, num_heads, kv_heads, head_size, sinks, dtype, out);
}

int64_t decode_piece_tokens(int64_t context_len) {
  if (context_len <= 512) return 128;  // at least two pieces from 129 keys on: a few short requests fill the threads
  return context_len <= 2048 ? 256 : 512;
}

void prefill_tile(const void* q, DType q_dtype, int64_t q_stride, const PagedKV& kv, const int32_t* block_table,
                  int64_t context_len, int64_t q_begin, int64_t q_end, int64_t kv_head, const AttentionParams& params,
                  void* out, int64_t out_stride) {
  const int64_t num_rows = (q_end - q_begin) * (params.num_heads / kv.kv_heads), rows = round_up(num_rows, kMaxLanes);
  const int64_t head_size = round_up(kv.head_size, kMaxLanes);
  int64_t floats = 2 * rows * head_size + (rows + 2 * head_size) * kPrefillTile + 6 * rows;
#if defined(__x86_64__)
  floats = std::max(floats, amx_prefill_scratch_floats(kv, q_dtype, num_rows));
#endif
  kernels().prefill(q, q_dtype, q_stride, kv, block_table, context_len, q_begin, q_end, kv_head, params, out,
                    out_stride, scratch(floats));
}

bool hardware_follows_streams() {
#if defined(__x86_64__)
  static const bool follows = !__builtin_cpu_is("intel");
  return follows;
#else
  return false;
#endif
}

const char* isa_name() { return chosen().name; }

std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> sets;
  for (const Choice& choice : kChoices) sets.push_back({choice.name, choice.supported()});
  return sets;
}

}  // namespace omniserve
