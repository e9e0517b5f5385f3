// What the host tier sends to a CPU host on the network over its first connection, and gets back: rows and results.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "host_tier.h"

namespace omniserve {

using wire::part;

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point time) { return std::chrono::duration<double>(Clock::now() - time).count(); }

// Counts the time in which nothing came. A pause between two looks counts for little: this process was stopped, or busy.
class Quiet {
 public:
  explicit Quiet(double timeout_s) : timeout_s_(timeout_s), looked_(Clock::now()) {}

  void news() {
    quiet_s_ = 0;
    looked_ = Clock::now();
  }
  bool too_long() {
    quiet_s_ += std::min(seconds_since(looked_), 2 * timeout_s_ / wire::kTicks);
    looked_ = Clock::now();
    return quiet_s_ > timeout_s_;
  }

 private:
  const double timeout_s_;
  double quiet_s_ = 0;
  Clock::time_point looked_;
};

}  // namespace

void HostTier::send_rows(Link& link) {
  struct Sent {
    int64_t slot;
    wire::Task head;
    Rows rows;
    std::vector<int32_t> new_ids;
  };
  std::vector<Sent> sent;
  std::vector<iovec> body;
  Lock lock(mutex_);
  while (true) {
    link.wake_rows.wait(lock, [&link] { return link.lost || !link.tasks.empty() || link.wants_ping; });
    if (link.lost) return;
    const bool is_ping = link.tasks.empty();
    link.wants_ping = false;
    sent.clear();
    for (int64_t slot : link.tasks) {
      Slot& task = slots_[static_cast<size_t>(slot)];
      task.next_piece = 1;
      task.num_running = 2;
      task.awaited = true;
      Sent next = {slot, {}, task.rows, {}};
      next.head = {static_cast<int32_t>(slot), static_cast<int32_t>(task.layer), static_cast<int32_t>(task.num_rows),
                   -1, 0, 0, task.epoch, task.position};
      if (!task.told) {
        if (task.told_host != link.host) task.told_table.clear();
        const auto& table = task.block_table;
        const size_t most = std::min(table.size(), task.told_table.size());
        const auto differs = std::mismatch(table.begin(), table.begin() + static_cast<std::ptrdiff_t>(most),
                                           task.told_table.begin()).first;
        next.new_ids.assign(differs, table.end());
        next.head.kept = static_cast<int32_t>(differs - table.begin());
        next.head.num_new = static_cast<int32_t>(next.new_ids.size());
        task.told = true;
        task.told_host = link.host;
        task.told_table = table;
      }
      sent.push_back(std::move(next));
    }
    link.tasks.clear();
    lock.unlock();
    body.clear();
    int64_t bytes = 0;
    for (const Sent& task : sent) {
      const int64_t num_rows = task.head.num_rows;
      body.push_back(part(&task.head, sizeof(task.head)));
      if (task.head.num_new > 0) body.push_back(part(task.new_ids.data(), 4 * task.head.num_new));
      body.push_back(part(task.rows.q, num_rows * q_bytes_));
      body.push_back(part(task.rows.k, num_rows * kv_bytes_));
      body.push_back(part(task.rows.v, num_rows * kv_bytes_));
      bytes += num_rows * (q_bytes_ + 2 * kv_bytes_);
    }
    std::string error;
    try {
      link.rows.send(is_ping ? wire::Kind::ping : wire::Kind::rows, static_cast<uint32_t>(sent.size()), body);
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
    lock.lock();
    link.stats.tasks_sent += static_cast<int64_t>(sent.size());
    link.stats.bytes_sent += bytes;
    for (const Sent& task : sent) release_task(task.slot);
    if (!error.empty()) lose(link, error);
  }
}

void HostTier::receive_results(Link& link) {
  Quiet quiet(link.timeout_s), moves_quiet(link.timeout_s);
  int64_t num_progressed = -1;
  const auto look = [&] {
    Lock lock(mutex_);
    if (link.lost) throw std::runtime_error("the host is lost");
    if (link.num_moves == 0 || link.num_progressed != num_progressed) moves_quiet.news();
    num_progressed = link.num_progressed;
    if (moves_quiet.too_long()) throw std::runtime_error("no block has moved for too long");
  };
  const auto tick = [&] {
    look();
    if (quiet.too_long()) throw std::runtime_error("it has not answered for too long");
    Lock lock(mutex_);
    link.wants_ping = true;
    link.wake_rows.notify_one();
  };
  while (true) {
    const wire::Frame frame = link.rows.receive(link.timeout_s / wire::kTicks, tick);
    quiet.news();
    if (frame.kind == wire::Kind::results) {
      take_results(link, frame);
    } else if (frame.kind == wire::Kind::pong) {
      wire::Reader reader(frame);
      const auto load = reader.take<wire::Load>();
      reader.finish();
      Lock lock(mutex_);
      link.stats.load = load;
    } else if (frame.kind == wire::Kind::failure) {
      throw std::runtime_error("it says: " + std::string(frame.data, frame.bytes));
    } else {
      throw std::runtime_error("it sends a frame that belongs elsewhere");
    }
    look();
  }
}

void HostTier::take_results(Link& link, const wire::Frame& frame) {
  struct Taken {
    int64_t slot;
    const char* rows;
    int64_t bytes;
    std::string message;
  };
  std::vector<Taken> taken;
  wire::Reader reader(frame);
  Lock lock(mutex_);
  if (link.lost) return;
  for (uint32_t i = 0; i < frame.count; ++i) {
    const auto result = reader.take<wire::Result>();
    const bool is_slot = result.slot >= 0 && result.slot < config_.num_slots;
    Slot* const task = is_slot ? &slots_[static_cast<size_t>(result.slot)] : nullptr;
    if (task == nullptr || task->host != link.host || !task->awaited || task->epoch != result.epoch ||
        task->layer != result.layer || task->position != result.position) {
      throw std::runtime_error("it sends a result that nobody has asked for");
    }
    if (result.num_rows != 0 && result.num_rows != task->num_rows) {
      throw std::runtime_error("it sends a result of another size");
    }
    const int64_t bytes = result.num_rows * q_bytes_;
    Taken next = {result.slot, reader.take(bytes), bytes, ""};
    const char* const message = reader.take(result.message_bytes);
    if (result.num_rows == 0) {
      next.message = "on the network: " + std::string(message, static_cast<size_t>(result.message_bytes));
    }
    taken.push_back(std::move(next));
  }
  reader.finish();
  // From here on the answers are there: these tasks are in the hands of this thread.
  for (const Taken& next : taken) slots_[static_cast<size_t>(next.slot)].awaited = false;
  link.stats.bytes_received += static_cast<int64_t>(frame.bytes);
  lock.unlock();
  for (const Taken& next : taken) std::memcpy(q_result(next.slot), next.rows, static_cast<size_t>(next.bytes));
  lock.lock();
  for (Taken& next : taken) {
    if (!next.message.empty()) fail_task(slots_[static_cast<size_t>(next.slot)], next.slot, std::move(next.message));
    release_task(next.slot);
  }
}

void HostTier::release_task(int64_t slot) {
  Slot& task = slots_[static_cast<size_t>(slot)];
  if (--task.num_running == 0) publish_task(task, slot);
}

}  // namespace omniserve
