// AMX tiles: the instructions that the kernels need and, with OMNI_EMULATE_TILES, the same in software, so that the
// kernels are tested on machines without AMX. To be included by one source file, inside no namespace.
//
// A thread configures its tiles, uses them and releases them within one call: a thread that holds tile data has 8 KiB
// more to save at each context switch. Nobody else's tiles are lost by that. oneDNN, the other user of AMX in a process
// with torch, loads its configuration (or compares it with the thread's, by STTILECFG) inside each parallel region that
// computes and releases the tiles at its end, and torch's own kernels on top of it do the same.
#pragma once

#include <cstdint>
#ifdef OMNI_EMULATE_TILES
#include <immintrin.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#endif

namespace omniserve {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;

// What LDTILECFG reads. Tiles left without a shape must not be touched.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void shape(int tile, int64_t num_rows, int64_t num_row_bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(num_row_bytes);
  }
};
static_assert(sizeof(TileConfig) == 64, "the format is the processor's");

#define OMNI_TILE static inline __attribute__((always_inline))

#ifndef OMNI_EMULATE_TILES

// Not the compiler's intrinsics: theirs do not tell it that they read and write memory (GCC 12), and want literals for
// the tiles' numbers.
OMNI_TILE void tile_configure(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config) : "memory"); }
OMNI_TILE void tile_release() { asm volatile("tilerelease" : : : "memory"); }

template <int kTile>
OMNI_TILE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
template <int kTile>
OMNI_TILE void tile_load(const void* rows, int64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride_bytes), "i"(kTile) : "memory");
}
template <int kTile>
OMNI_TILE void tile_store(void* rows, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(stride_bytes), "i"(kTile) : "memory");
}
// C [M, N] fp32 += A [M, 2K] bf16 x B [K, N] of bf16 pairs: B's pair k stands under A's columns 2k and 2k + 1.
template <int kC, int kA, int kB>
OMNI_TILE void tile_dpbf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}
// C [M, N] int32 += A [M, 4K] uint8 x B [K, N] of four int8 each, modulo 2^32.
template <int kC, int kA, int kB>
OMNI_TILE void tile_dpbusd() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

#else  // in software, by the operation sections of Intel's manual; where the processor would fault, abort

struct Tile {
  alignas(64) unsigned char row[kTileRows][kTileRowBytes];
};

struct TileState {
  TileConfig config;
  bool configured = false;
  Tile tile[8];
  int64_t products = 0;  // instructions so far, for tests that ask whether the tiles were used at all
  int64_t loads = 0;
  int64_t stores = 0;
};

TileState& tile_state() {
  static thread_local TileState state;
  return state;
}

void tile_require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "tile fault: %s\n", what);
  std::abort();
}

bool tile_exists(int tile) {
  const TileState& state = tile_state();
  return state.configured && state.config.rows[tile] != 0;
}

void tile_configure(const TileConfig& config) {
  TileState& state = tile_state();
  tile_require(config.palette == 1 && config.start_row == 0, "palette 1, start row 0");
  for (const uint8_t byte : config.reserved) tile_require(byte == 0, "reserved bytes are 0");
  for (int i = 0; i < 16; ++i) {
    tile_require(config.rows[i] <= kTileRows && config.row_bytes[i] <= kTileRowBytes, "a tile is too large");
    tile_require((config.rows[i] == 0) == (config.row_bytes[i] == 0), "a tile has rows or columns, not both");
    tile_require(i < 8 || config.rows[i] == 0, "palette 1 has eight tiles");
  }
  state.config = config;
  state.configured = true;
  std::memset(state.tile, 0, sizeof(state.tile));
}

void tile_release() { tile_state().configured = false; }

template <int kTile>
void tile_zero() {
  tile_require(tile_exists(kTile), "zero: no such tile");
  tile_state().tile[kTile] = Tile{};
}

template <int kTile>
void tile_load(const void* rows, int64_t stride_bytes) {
  TileState& state = tile_state();
  tile_require(tile_exists(kTile), "load: no such tile");
  state.tile[kTile] = Tile{};
  for (int i = 0; i < state.config.rows[kTile]; ++i)
    std::memcpy(state.tile[kTile].row[i], static_cast<const char*>(rows) + i * stride_bytes,
                state.config.row_bytes[kTile]);
  ++state.loads;
}

template <int kTile>
void tile_store(void* rows, int64_t stride_bytes) {
  TileState& state = tile_state();
  tile_require(tile_exists(kTile), "store: no such tile");
  for (int i = 0; i < state.config.rows[kTile]; ++i)
    std::memcpy(static_cast<char*>(rows) + i * stride_bytes, state.tile[kTile].row[i],
                state.config.row_bytes[kTile]);
  ++state.stores;
}

// Out of line, so that no arithmetic leaves the region in which denormals are zero. Even and odd elements are summed
// apart, by fused multiply-adds; their sum is added to C at the end.
__attribute__((noinline)) void tile_multiply(Tile& c, const Tile& a, const Tile& b, int rows, int pairs, int columns) {
  const auto widen = [](uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  };
  for (int m = 0; m < rows; ++m) {
    float even[16] = {}, odd[16] = {};
    for (int k = 0; k < pairs; ++k) {
      uint32_t left, right[16];
      std::memcpy(&left, a.row[m] + 4 * k, sizeof(left));
      std::memcpy(right, b.row[k], sizeof(right));
      for (int n = 0; n < 16; ++n) {
        even[n] = __builtin_fmaf(widen(left << 16), widen(right[n] << 16), even[n]);
        odd[n] = __builtin_fmaf(widen(left & 0xffff0000u), widen(right[n] & 0xffff0000u), odd[n]);
      }
    }
    float sums[16] = {};
    std::memcpy(sums, c.row[m], sizeof(sums));
    for (int n = 0; n < columns; ++n) sums[n] += even[n] + odd[n];
    std::memcpy(c.row[m], sums, sizeof(sums));
  }
}

// The same of four integers each.
void tile_multiply_bytes(Tile& c, const Tile& a, const Tile& b, int rows, int fours, int columns) {
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < columns; ++n) {
      uint32_t sum;
      std::memcpy(&sum, c.row[m] + 4 * n, sizeof(sum));
      for (int k = 0; k < 4 * fours; ++k) {
        const int right = static_cast<signed char>(b.row[k / 4][4 * n + k % 4]);
        sum += static_cast<uint32_t>(a.row[m][k] * right);
      }
      std::memcpy(c.row[m] + 4 * n, &sum, sizeof(sum));
    }
}

// That three tiles can be multiplied.
template <int kC, int kA, int kB>
void tile_check_shapes() {
  static_assert(kC != kA && kC != kB && kA != kB, "the processor wants three different tiles");
  const TileConfig& config = tile_state().config;
  tile_require(tile_exists(kC) && tile_exists(kA) && tile_exists(kB), "product: no such tile");
  tile_require(config.row_bytes[kC] % 4 == 0 && config.row_bytes[kA] % 4 == 0, "product: columns are 32 bits wide");
  tile_require(config.rows[kC] == config.rows[kA], "product: rows of C and A");
  tile_require(config.row_bytes[kC] == config.row_bytes[kB], "product: columns of C and B");
  tile_require(config.row_bytes[kA] / 4 == config.rows[kB], "product: columns of A and rows of B");
}

template <int kC, int kA, int kB>
void tile_dpbusd() {
  TileState& state = tile_state();
  const TileConfig& config = state.config;
  tile_check_shapes<kC, kA, kB>();
  tile_multiply_bytes(state.tile[kC], state.tile[kA], state.tile[kB], config.rows[kC], config.row_bytes[kA] / 4,
                      config.row_bytes[kC] / 4);
  ++state.products;
}

template <int kC, int kA, int kB>
void tile_dpbf16() {
  TileState& state = tile_state();
  const TileConfig& config = state.config;
  tile_check_shapes<kC, kA, kB>();
  const unsigned int before = _mm_getcsr();
  _mm_setcsr(0x9fc0);  // denormals are zero, results are flushed, to nearest even, no exceptions
  tile_multiply(state.tile[kC], state.tile[kA], state.tile[kB], config.rows[kC], config.row_bytes[kA] / 4,
                config.row_bytes[kC] / 4);
  _mm_setcsr(before);
  ++state.products;
}

#endif

}  // namespace
}  // namespace omniserve
