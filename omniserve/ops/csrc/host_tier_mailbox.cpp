// The mailbox's thread: watches the flags of rows that a device writes into host memory, and queues their tasks.
#include <sys/prctl.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "host_tier.h"

namespace omniserve {
namespace {

// Every so many looks without a rest go through all rows, not only to the first layer that has nothing new.
constexpr int64_t kFullLook = 16;

inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void HostTier::watch() {
  prctl(PR_SET_TIMERSLACK, 1UL);  // the default of 50 us would make 70 us of a sleep of 20
  const auto spin = to_duration(config_.mailbox_spin_s), sleep = to_duration(config_.mailbox_sleep_s);
  auto last_news = std::chrono::steady_clock::now();
  for (int64_t look = 0;; ++look) {
    if (watched_.empty() || watcher_called_) {
      Lock lock(mutex_);
      watcher_wake_.wait(lock, [this] { return closing_ || !watched_.empty() || !expected_.empty(); });
      if (closing_) return;
      watched_.insert(watched_.end(), expected_.begin(), expected_.end());
      expected_.clear();
      watcher_called_ = false;
      last_news = std::chrono::steady_clock::now();
    }
    const auto now = std::chrono::steady_clock::now();
    const bool rests = now - last_news >= spin;
    take_flagged(rests || look % kFullLook == 0);
    if (!flagged_.empty()) {
      last_news = now;
    } else if (rests) {
      std::this_thread::sleep_for(sleep);
    } else {
      pause_core();
    }
  }
}

// Without `may_skip` no flags but the step's own are taken. The order of the loads matters: a step that skips the slot
// comes after one that has sent its rows, so the rows' flags are there if a later skip is.
HostTier::Arrival HostTier::look_at(const Expected& task) const {
  const int64_t first = task.slot * config_.max_rows;
  const bool is_past = task.may_skip && __atomic_load_n(config_.skips + first, __ATOMIC_ACQUIRE) >= task.step;
  const int64_t flag = __atomic_load_n(config_.flags + first, __ATOMIC_ACQUIRE);
  if (flag == task.step) {
    for (int64_t token = 1; token < task.num_rows; ++token) {
      if (__atomic_load_n(config_.flags + first + token, __ATOMIC_ACQUIRE) != task.step) return Arrival::waited_for;
    }
    return Arrival::sent;
  }
  // A row that was sent is not sent again before its result is there, which it cannot be unless its flag was seen.
  if (is_past || (task.may_skip && flag > task.step)) return Arrival::skipped;
  return Arrival::waited_for;
}

// The slot's own rows are free: its rows were sent, so the device has used the result that was computed from the last.
void HostTier::copy_from_mailbox(const Expected& task) {
  const auto q_bytes = static_cast<size_t>(q_bytes_), kv_bytes = static_cast<size_t>(kv_bytes_);
  for (int64_t token = 0; token < task.num_rows; ++token) {
    const Rows from = mailbox_row(task.slot, token);
    std::memcpy(q_rows(task.slot) + token * q_bytes_, from.q, q_bytes);
    std::memcpy(k_rows(task.slot) + token * kv_bytes_, from.k, kv_bytes);
    std::memcpy(v_rows(task.slot) + token * kv_bytes_, from.v, kv_bytes);
  }
}

// Queue the tasks of rows whose flags are there, and drop the rows that were skipped. Layers are sent in the order in
// which they are watched, their rows in any: behind a layer with nothing new there is nothing, as a rule. `all`: look
// behind it too, for a device may have another order, or have given a step up, and no row waits for another for ever.
void HostTier::take_flagged(bool all) {
  flagged_.clear();
  size_t kept = 0, i = 0;
  for (size_t group = 0; i < watched_.size(); group = i) {
    const size_t num_before = flagged_.size();
    for (; i < watched_.size() && watched_[i].layer == watched_[group].layer &&
           watched_[i].step == watched_[group].step;
         ++i) {
      const Expected row = watched_[i];
      const Arrival arrival = look_at(row);
      if (arrival == Arrival::waited_for) {
        watched_[kept++] = row;
      } else {
        flagged_.emplace_back(row, arrival);
      }
    }
    if (!all && flagged_.size() == num_before) break;
  }
  if (flagged_.empty()) return;
  const auto begin = watched_.begin();
  watched_.erase(begin + static_cast<std::ptrdiff_t>(kept), begin + static_cast<std::ptrdiff_t>(i));
  for (const auto& [task, arrival] : flagged_) {
    if (arrival == Arrival::sent && task.num_rows > 1) copy_from_mailbox(task);
  }
  Called called;
  Lock lock(mutex_);
  for (const auto& [row, arrival] : flagged_) {
    if (arrival == Arrival::sent) {
      begin_expected(row);
    } else {
      drop_expected(row.slot);
    }
  }
  call_workers(called);
  lock.unlock();
  notify(called);
}

// The row takes the place of the slot's task, whose result the device has used. What was expected of the slot before it
// was skipped, although this look may have come too early to see that.
void HostTier::begin_expected(const Expected& row) {
  Slot& task = slots_[static_cast<size_t>(row.slot)];
  const auto earlier = [&row](const Expected& other) { return other.slot == row.slot && other.step < row.step; };
  if (task.num_expected > 1) {
    const auto kept = std::remove_if(watched_.begin(), watched_.end(), earlier);
    task.num_expected -= watched_.end() - kept;
    stats_.tasks_in_hand -= watched_.end() - kept;
    watched_.erase(kept, watched_.end());
  }
  --task.num_expected;
  task.held.reset();
  take_back(row.slot);
  task.num_rows = row.num_rows;
  claim(row.slot, row.layer, rows_of(row));
  enqueue(row.slot);
}

void HostTier::drop_expected(int64_t slot) {
  Slot& task = slots_[static_cast<size_t>(slot)];
  --stats_.tasks_in_hand;
  if (--task.num_expected == 0 && task.held) push_event(std::move(*std::exchange(task.held, nullptr)));
}

// The mutex is held, and the watcher is gone.
void HostTier::fail_expected(const std::string& message) {
  for (std::vector<Expected>* rows : {&watched_, &expected_}) {
    for (const Expected& row : *rows) {
      Slot& task = slots_[static_cast<size_t>(row.slot)];
      if (task.num_expected > 1 || task.held || task.in_flight) {  // the slot has, or will have, another event
        drop_expected(row.slot);
        continue;
      }
      --task.num_expected;
      claim(row.slot, row.layer, rows_of(row));
      fail_task(task, row.slot, message);
      publish_task(task, row.slot);
    }
    rows->clear();
  }
}

}  // namespace omniserve
