// Handles: the numbers by which Python names objects of C++. No torch header.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace omniserve {

// Never destroy one: at exit a thread may still be inside an object.
template <typename T>
class Handles {
 public:
  int64_t add(std::shared_ptr<T> object) {
    std::lock_guard<std::mutex> lock(mutex_);
    objects_.emplace(next_, std::move(object));
    return next_++;
  }

  // The object, which a call keeps alive while it is inside; nullptr if there is none.
  std::shared_ptr<T> find(int64_t handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }

  void remove(int64_t handle) {
    std::shared_ptr<T> last;  // declared first, so it dies after the lock
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) return;
    last = std::move(found->second);
    objects_.erase(found);
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<T>> objects_;
  int64_t next_ = 0;
};

}  // namespace omniserve
