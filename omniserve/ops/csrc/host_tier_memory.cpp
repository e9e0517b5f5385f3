#include "host_tier_memory.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <stdexcept>
#include <string>

namespace omniserve {
namespace {

uintptr_t page_of(const char* data) {
  static const uintptr_t page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  return reinterpret_cast<uintptr_t>(data) / page_bytes * page_bytes;
}

}  // namespace

// Other threads use the same bytes without atomics. That is no race, for nothing changes; the sanitizer cannot know.
__attribute__((no_sanitize("thread"))) void touch_pages(char* data, int64_t bytes) {
  const char* const end = data + bytes;
  const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  for (char* p = data; p < end; p = reinterpret_cast<char*>(page_of(p)) + page_bytes) {
    __atomic_fetch_or(p, 0, __ATOMIC_RELAXED);
  }
}

// By system call, for libnuma would be a dependency. Only the call itself was tried so far, on machines with one node.
void interleave_pages(char* data, int64_t bytes, const std::vector<int64_t>& nodes) {
  constexpr int kInterleave = 3;
  constexpr size_t kBits = sizeof(unsigned long) * CHAR_BIT;
  constexpr int64_t kMostNodes = 1024;
  unsigned long mask[kMostNodes / kBits]{};
  for (int64_t node : nodes) {
    if (node < 0 || node >= kMostNodes) throw std::runtime_error("no NUMA node " + std::to_string(node));
    mask[static_cast<size_t>(node) / kBits] |= 1UL << static_cast<size_t>(node) % kBits;
  }
  const uintptr_t first = page_of(data);
  const size_t length = reinterpret_cast<uintptr_t>(data) + static_cast<size_t>(bytes) - first;
  if (syscall(SYS_mbind, first, length, kInterleave, mask, kMostNodes + 1, 0) != 0) {
    throw std::runtime_error(std::string("the pool's pages cannot be interleaved: ") + std::strerror(errno));
  }
}

}  // namespace omniserve
