// skinny_linear: checks, and the division of the output features among threads.
#include "linear.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "op_checks.h"

namespace omniserve {
namespace {

constexpr int64_t kParallelMacs = int64_t{1} << 18;  // less is done before a thread has woken up
constexpr int64_t kPiecesPerThread = 8;              // a thread that lost its core for a while leaves pieces to others

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

}  // namespace

Tensor skinny_linear(Tensor x, Tensor weight) {
  check_rows(x, "x");
  check_dim(weight, 2, "weight");
  check_contiguous(weight, "weight");
  const DType dtype = dtype_of(x, "x");
  const bool mixed = dtype == DType::f32 && weight.scalar_type() == ScalarType::BFloat16;
  if (!mixed) check_type(weight, x.scalar_type(), "weight");
  STD_TORCH_CHECK(weight.size(1) == x.size(1), "weight must have x's width ", x.size(1), ", got ", shape_of(weight));
  isa_name();  // a wrong OMNISERVE_ISA is reported here, not inside a parallel region

  Tensor out = empty_cpu({x.size(0), weight.size(0)}, x);
  const LinearArgs args{x.const_data_ptr(), weight.const_data_ptr(), out.mutable_data_ptr(), x.stride(0),
                        x.size(0),          x.size(1),               weight.size(0),         dtype,
                        mixed ? DType::bf16 : dtype};
  if (out.numel() == 0) return out;
  // At least one cache line: aligned_alloc of nothing may be nullptr.
  const std::unique_ptr<void, Free> packed(std::aligned_alloc(64, static_cast<size_t>(linear_packed_bytes(args) + 64)));
  if (!packed) throw std::bad_alloc();
  linear_pack(args, packed.get());

  // A team of all threads or of one: libgomp ends and starts threads whenever the size of a team changes.
  const int64_t num_threads = omp_get_max_threads();
  const bool parallel = num_threads > 1 && weight.numel() * args.num_rows > kParallelMacs;
  const int64_t num_groups = (args.num_out + kLinearGroup - 1) / kLinearGroup;
  const int64_t num_pieces = parallel ? std::min(num_groups, num_threads * kPiecesPerThread) : 1;
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(num_threads)) if (parallel)
  for (int64_t piece = 0; piece < num_pieces; ++piece) {
    const int64_t begin = num_groups * piece / num_pieces * kLinearGroup;
    const int64_t end = std::min(num_groups * (piece + 1) / num_pieces * kLinearGroup, args.num_out);
    linear_features(args, packed.get(), begin, end);
  }
  return out;
}

}  // namespace omniserve
