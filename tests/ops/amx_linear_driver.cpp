// A C face of the AMX linear kernels for test_amx.py, as amx_driver.cpp is of those of attention.
#include <cstdlib>
#include <cstring>

#include "linear_amx.cpp"

using namespace omniserve;

extern "C" {

#ifdef OMNI_EMULATE_TILES
int64_t amx_products() { return tile_state().products; }
bool amx_released() { return !tile_state().configured; }
#endif

// Features of bf16 rows, from `begin` to `end` in one call; `sizes`: rows, inputs, outputs, distance of rows, and 0, how
// many inputs share an fp32 scale of codes of 8 bits, or -1: rows and weight are int8.
void amx_linear(const void* x, const void* packed, const void* bias, void* out, const int64_t* sizes, int64_t begin,
                int64_t end) {
  const int64_t rows = sizes[0], num_in = sizes[1], num_out = sizes[2];
  const QuantForm form{8, Scales::f32, sizes[4]};
  const Int8Form int8{nullptr};
  const LinearArgs args{x,      packed,  bias,        out,         sizes[3], rows,
                        num_in, num_out, DType::bf16, DType::bf16, sizes[4] > 0 ? &form : nullptr,
                        nullptr, sizes[4] < 0 ? &int8 : nullptr};
  const LinearKernels& kernels = amx_bf16_linear_kernels();
  const int64_t room = (rows + kTileOfRows - 1) / kTileOfRows * kTileOfRows;
  const auto filled = [](int64_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, static_cast<size_t>(bytes + 64)) != 0) std::abort();
    std::memset(memory, 0xff, static_cast<size_t>(bytes));  // NaN
    return memory;
  };
  void* const packed_x = filled(room * kernels.row_bytes(args));
  void* const sums = filled(room * (end - begin + kPanel - 1) / kPanel * kPanel * 4);
  kernels.pack(args, packed_x, 0, rows);
  kernels.features(args, packed_x, static_cast<float*>(sums), begin, end, 0, rows);
  std::free(packed_x);
  std::free(sums);
}

}  // extern "C"
