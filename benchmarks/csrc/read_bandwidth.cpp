// What benchmarks/attention/bandwidth.py calls through ctypes: read, fill and pin, on the OpenMP threads that torch and the
// operators use (one libgomp in the process), so that a limit is measured on the very threads it is compared with.
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#define CLONE_PER_ISA __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONE_PER_ISA
#endif

namespace {

typedef uint64_t Line __attribute__((vector_size(64), may_alias));
constexpr int64_t kChunk = 256;  // bytes that one stream advances before the next one's turn
constexpr int kMaxWays = 16;

// XOR of everything in `ways` runs of `piece` bytes, read in turns of kChunk. `ahead` > 0 prefetches that far ahead, past
// the end of a run into the one that follows it (`next`).
CLONE_PER_ISA
uint64_t read_runs(const char* const* runs, const char* const* next, int ways, int64_t piece, int64_t ahead) {
  Line a = {}, b = {}, c = {}, d = {};
  for (int64_t i = 0; i < piece; i += kChunk) {
    for (int way = 0; way < ways; ++way) {
      if (ahead > 0) {
        const char* target = i + ahead < piece ? runs[way] + i + ahead : next[way] + (i + ahead - piece);
        for (int64_t line = 0; line < kChunk; line += 64) __builtin_prefetch(target + line, 0, 3);
      }
      const Line* line = reinterpret_cast<const Line*>(runs[way] + i);
      a ^= line[0];
      b ^= line[1];
      c ^= line[2];
      d ^= line[3];
    }
  }
  const Line all = (a ^ b) ^ (c ^ d);
  uint64_t folded = 0;
  for (int lane = 0; lane < 8; ++lane) folded ^= all[lane];
  return folded;
}

}  // namespace

extern "C" {

// Read `num_pieces` pieces of `piece` bytes (a multiple of 256; base 64-byte aligned) at base + offsets[i]. Each thread
// takes a contiguous share of the list and reads `ways` (at most 16) of its pieces at a time.
uint64_t read_pieces(const char* base, const int64_t* offsets, int64_t num_pieces, int64_t piece, int ways,
                     int64_t ahead, int num_threads) {
  std::atomic<uint64_t> result{0};
  ways = std::min(ways, kMaxWays);
#pragma omp parallel num_threads(num_threads)
  {
    const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
    const int64_t first = num_pieces * me / team, last = num_pieces * (me + 1) / team;
    const char *runs[kMaxWays], *next[kMaxWays];
    uint64_t folded = 0;
    for (int64_t i = first; i < last; i += ways) {
      const int here = static_cast<int>(std::min<int64_t>(ways, last - i));
      for (int way = 0; way < here; ++way) {
        runs[way] = base + offsets[i + way];
        next[way] = base + offsets[std::min(i + way + ways, last - 1)];
      }
      folded ^= read_runs(runs, next, here, piece, ahead);
    }
    result ^= folded;
  }
  return result;
}

// Fill `bytes` bytes with copies of a tile; each thread a contiguous share, so that it is the first to touch its pages.
void fill(char* base, int64_t bytes, const char* tile, int64_t tile_bytes, int num_threads) {
#pragma omp parallel num_threads(num_threads)
  {
    const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
    const int64_t num_tiles = (bytes + tile_bytes - 1) / tile_bytes;
    for (int64_t i = num_tiles * me / team; i < num_tiles * (me + 1) / team; ++i) {
      std::memcpy(base + i * tile_bytes, tile, static_cast<size_t>(std::min(tile_bytes, bytes - i * tile_bytes)));
    }
  }
}

// Pin thread i of the caller's OpenMP team to cpus[i]. 0, or the errno of a thread that could not be.
int pin_team(const int* cpus, int num_threads) {
  std::atomic<int> error{0};
#pragma omp parallel num_threads(num_threads)
  {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus[omp_get_thread_num()], &set);
    if (sched_setaffinity(0, sizeof(set), &set) != 0) error = errno;
  }
  return error;
}

}  // extern "C"
