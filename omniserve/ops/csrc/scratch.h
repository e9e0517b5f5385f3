// Scratch: memory of one thread for its calls, aligned to 64 bytes. No torch header.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace omniserve {

// It grows and stays: pages that are mapped anew at each call cost more than a small product.
class Scratch {
 public:
  void* of(int64_t bytes) {
    if (bytes > size_) {
      const int64_t size = (bytes + 4095) / 4096 * 4096;
      memory_.reset(std::aligned_alloc(64, static_cast<size_t>(size)));
      size_ = memory_ ? size : 0;
      if (!memory_) throw std::bad_alloc();
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  int64_t size_ = 0;
};

}  // namespace omniserve
