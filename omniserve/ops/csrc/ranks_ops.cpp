// torch.ops.omniserve_ranks.meet: how the ranks of one machine wait for each other, through memory that they share
// (omniserve/ops/shared_memory.py). A collective of a few kilobytes takes a few microseconds that way, where sockets take
// a hundred.
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <string>

#include "op_checks.h"

namespace omniserve {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kLine = 8;  // int64s of a cache line: each rank's turn has one of its own
constexpr auto kSpin = std::chrono::microseconds(30);
constexpr auto kYield = std::chrono::milliseconds(2);
constexpr useconds_t kSleepUs = 100;
constexpr auto kLookAtProcess = std::chrono::milliseconds(20);

inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// A process is gone when it has no entry in /proc, or is a zombie that its parent has not asked about yet.
bool is_gone(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return true;
  const size_t end = text.rfind(')');
  if (end == std::string::npos || end + 2 >= text.size()) return true;
  const char state = text[end + 2];
  return state == 'Z' || state == 'X';
}

// Says that `rank` has come to `turn` and waits for the others. Returns -1 when all have come, r if rank r did not come in
// time, and num_ranks + r if its process is gone. turns and pids are [ranks, 8] int64, of which the first column counts.
int64_t meet(Tensor turns, Tensor pids, int64_t rank, int64_t turn, double timeout_s) {
  check_dim(turns, 2, "turns");
  check_type(turns, ScalarType::Long, "turns");
  check_contiguous(turns, "turns");
  check_contiguous(pids, "pids");
  STD_TORCH_CHECK(turns.size(1) == kLine && pids.size(1) == kLine, "turns and pids must be [ranks, 8]");
  const int64_t num_ranks = turns.size(0);
  STD_TORCH_CHECK(rank >= 0 && rank < num_ranks, "there is no rank ", rank);
  auto* lines = reinterpret_cast<std::atomic<int64_t>*>(static_cast<int64_t*>(turns.mutable_data_ptr()));
  const int64_t* processes = static_cast<const int64_t*>(pids.const_data_ptr());
  lines[rank * kLine].store(turn, std::memory_order_release);
  const auto began = Clock::now();
  auto looked = began;
  for (int64_t other = 0; other < num_ranks; ++other) {
    while (lines[other * kLine].load(std::memory_order_acquire) < turn) {
      pause_core();
      const auto now = Clock::now();
      if (now - began < kSpin) continue;
      // The other rank may need this core, and this rank's host threads do.
      if (now - began < kYield) {
        sched_yield();
        continue;
      }
      usleep(kSleepUs);
      if (now - looked > kLookAtProcess) {
        looked = now;
        const int64_t pid = reinterpret_cast<const std::atomic<int64_t>&>(processes[other * kLine]).load();
        if (pid != 0 && is_gone(pid)) return num_ranks + other;  // 0: it has not come to the first turn yet
      }
      if (std::chrono::duration<double>(now - began).count() > timeout_s) return other;
    }
  }
  return -1;
}

}  // namespace
}  // namespace omniserve

STABLE_TORCH_LIBRARY(omniserve_ranks, m) {
  m.def("meet(Tensor(a!) turns, Tensor pids, int rank, int turn, float timeout_s) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(omniserve_ranks, CPU, m) { m.impl("meet", TORCH_BOX(&omniserve::meet)); }
