// The host tier's CPU hosts on the network: their threads here, four for each host. The other end is in host_server.cpp.
//
// A task whose rows are under way counts as running twice, in the hands of the thread that sends them and of the host; a
// move counts as running while a thread reads or writes its cache. So nobody reuses a slot's rows or a cache's blocks
// while they are still read, also when the host is lost meanwhile.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "host_tier.h"
#include "host_tier_moves.h"
#include "host_tier_refuse.h"

namespace omniserve {
namespace {

constexpr double kTicks = 8;  // looks at the clock within the timeout; a host is asked whether it is there at half of them
constexpr int64_t kBlocksBytes = 1 << 20;  // of a frame of blocks, about

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
    quiet_s_ += std::min(seconds_since(looked_), 2 * timeout_s_ / kTicks);
    looked_ = Clock::now();
    return quiet_s_ > timeout_s_;
  }

 private:
  const double timeout_s_;
  double quiet_s_ = 0;
  Clock::time_point looked_;
};

iovec part(const void* data, int64_t bytes) { return {const_cast<void*>(data), static_cast<size_t>(bytes)}; }

}  // namespace

int64_t HostTier::host_of(const int64_t* block_ids, int64_t num_blocks) const {
  const int64_t host = num_blocks > 0 ? block_ids[0] / kHostBlocks : 0;
  int64_t count = config_.num_blocks;
  if (host != 0) {
    const auto found = links_.find(host);
    if (found == links_.end()) refuse("there is no host of block ", block_ids[0]);
    count = found->second->num_blocks;
  }
  for (int64_t i = 0; i < num_blocks; ++i) {
    const int64_t id = block_ids[i] - host * kHostBlocks;
    if (id >= 0 && id < count) continue;
    const std::string where = host > 0 ? "the block ids of host " + std::to_string(host) : "block ids";
    refuse(where, " must be in [", host * kHostBlocks, ", ", host * kHostBlocks + count, "), got ", block_ids[i]);
  }
  return host;
}

void HostTier::connect(int64_t host, int rows_fd, int blocks_fd, int64_t num_blocks, double timeout_s) {
  auto link = std::make_unique<Link>(host, rows_fd, blocks_fd, num_blocks, timeout_s);
  if (host < 1 || host > kMostHosts) refuse("a host must be in [1, ", kMostHosts, "], got ", host);
  if (num_blocks < 1 || num_blocks > kHostBlocks) refuse("a host has 1 to ", kHostBlocks, " blocks, got ", num_blocks);
  if (!(timeout_s > 0)) refuse("timeout_s must be > 0, got ", timeout_s);
  std::vector<std::thread> ended;
  {
    Lock lock(mutex_);
    if (closing_) refuse("the host tier is closed");
    const auto before = links_.find(host);
    if (before != links_.end()) {
      if (!before->second->lost) refuse("host ", host, " is connected already");
      ended.swap(before->second->threads);
    }
  }
  for (std::thread& thread : ended) thread.join();
  Lock lock(mutex_);
  if (closing_) refuse("the host tier is closed");
  for (Slot& slot : slots_) {
    if (slot.told_host == host) slot.told_table.clear();  // a new session of the host knows nothing
  }
  link->session = ++num_sessions_;
  if (const auto before = links_.find(host); before != links_.end()) {
    link->stats = before->second->stats;
    link->stats.load = {};
  }
  Link& added = *(links_[host] = std::move(link));
  lock.unlock();
  void (HostTier::*const loops[])(Link&) = {&HostTier::send_rows, &HostTier::receive_results, &HostTier::send_blocks,
                                            &HostTier::receive_blocks};
  for (const auto loop : loops) {
    std::thread thread = start([this, loop, &added] {
      try {
        (this->*loop)(added);
      } catch (const std::exception& error) {
        Lock lost(mutex_);
        lose(added, error.what());
      }
    });
    pthread_setname_np(thread.native_handle(), ("omni-net-" + std::to_string(host)).substr(0, 15).c_str());
    const sched_param no_priority{};
    pthread_setschedparam(thread.native_handle(), SCHED_BATCH, &no_priority);  // as for the workers
    lock.lock();
    added.threads.push_back(std::move(thread));
    lock.unlock();
  }
}

std::vector<HostLinkStats> HostTier::link_stats() {
  Lock lock(mutex_);
  std::vector<HostLinkStats> all;
  for (const auto& [host, link] : links_) {
    HostLinkStats stats = link->stats;
    stats.host = host;
    stats.lost = link->lost;
    stats.moves_in_hand = link->num_moves;
    stats.tasks_in_hand = std::count_if(slots_.begin(), slots_.end(), [host = host](const Slot& slot) {
      return slot.host == host && slot.in_flight && (slot.awaited || slot.next_piece < slot.num_pieces);
    });
    all.push_back(stats);
  }
  return all;
}

// -- rows and results -------------------------------------------------------------------------------------------------

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
    const wire::Frame frame = link.rows.receive(link.timeout_s / kTicks, tick);
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

// -- blocks -----------------------------------------------------------------------------------------------------------

void HostTier::send_blocks(Link& link) {
  Lock lock(mutex_);
  while (true) {
    link.wake_blocks.wait(lock, [&link] { return link.lost || !link.moves.empty(); });
    if (link.lost) return;
    Move& move = *link.moves.front();
    link.moves.pop_front();
    ++move.num_running;
    lock.unlock();
    std::string error;
    try {
      send_move(link, move);
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
    lock.lock();
    release_move(move);
    if (!error.empty()) lose(link, error);
  }
}

void HostTier::send_move(Link& link, Move& move) {
  const BlockMove& spec = move.spec;
  const auto count = static_cast<int64_t>(spec.pool_ids.size());
  std::vector<iovec> body;
  const wire::Move head = {move.id, spec.to_host, count};
  body = {part(&head, sizeof(head)), part(spec.pool_ids.data(), 8 * count)};
  link.blocks.send(wire::Kind::move, 1, body);
  if (!spec.to_host) return;
  const int64_t bytes = cache_block_bytes(), row_bytes = config_.head_size * dtype_bytes(config_.dtype);
  const int64_t most = std::max<int64_t>(1, kBlocksBytes / (2 * bytes));
  std::vector<char> turned(spec.reversed ? static_cast<size_t>(2 * bytes * most) : 0);
  for (int64_t first = 0; first < move.num_units; first += most) {
    const wire::Blocks blocks = {move.id, first, std::min(most, move.num_units - first), {}};
    body = {part(&blocks, sizeof(blocks))};
    char* to = turned.data();
    for (int64_t unit = first; unit < first + blocks.count; ++unit) {
      const int64_t at = (unit / count * spec.num_blocks + spec.cache_ids[static_cast<size_t>(unit % count)]) * bytes;
      for (const char* from : {spec.k + at, spec.v + at}) {
        if (spec.reversed) {
          reverse_rows(from, config_.num_kv_heads, config_.block_size, row_bytes, to);
          body.push_back(part(std::exchange(to, to + bytes), bytes));
        } else {
          body.push_back(part(from, bytes));
        }
      }
    }
    link.blocks.send(wire::Kind::blocks, 1, body);
    Lock lock(mutex_);
    ++link.num_progressed;
    link.stats.bytes_moved += 2 * bytes * blocks.count;
    stats_.bytes_moved += 2 * bytes * blocks.count;
    if (link.lost) return;
  }
}

void HostTier::receive_blocks(Link& link) {
  const auto tick = [&] {
    Lock lock(mutex_);
    if (link.lost) throw std::runtime_error("the host is lost");
  };
  while (true) {
    const wire::Frame frame = link.blocks.receive(link.timeout_s / kTicks, tick);
    if (frame.kind == wire::Kind::stored) {
      wire::Reader reader(frame);
      const auto head = reader.take<wire::Move>();
      reader.finish();
      Lock lock(mutex_);
      if (link.lost) return;
      Move& move = move_of(link, head.id);
      if (!move.spec.to_host) throw std::runtime_error("it has stored what it was asked for");
      move.stored = true;
      ++move.num_running;
      release_move(move);
    } else if (frame.kind == wire::Kind::blocks) {
      take_blocks(link, frame);
    } else if (frame.kind == wire::Kind::failure) {
      throw std::runtime_error("it says: " + std::string(frame.data, frame.bytes));
    } else {
      throw std::runtime_error("it sends a frame that belongs elsewhere");
    }
  }
}

void HostTier::take_blocks(Link& link, const wire::Frame& frame) {
  wire::Reader reader(frame);
  const auto blocks = reader.take<wire::Blocks>();
  Lock lock(mutex_);
  if (link.lost) return;
  Move& move = move_of(link, blocks.id);
  if (move.spec.to_host || blocks.first != move.next_unit || blocks.count < 1 ||
      blocks.count > move.num_units - move.next_unit) {
    throw std::runtime_error("it sends blocks that nobody has asked for");
  }
  ++move.num_running;
  lock.unlock();
  const BlockMove& spec = move.spec;
  const auto count = static_cast<int64_t>(spec.pool_ids.size());
  const int64_t bytes = cache_block_bytes(), row_bytes = config_.head_size * dtype_bytes(config_.dtype);
  std::string error;
  try {
    for (int64_t unit = blocks.first; unit < blocks.first + blocks.count; ++unit) {
      const int64_t at = (unit / count * spec.num_blocks + spec.cache_ids[static_cast<size_t>(unit % count)]) * bytes;
      for (char* to : {spec.k + at, spec.v + at}) {
        const char* const from = reader.take(bytes);
        if (spec.reversed) {
          reverse_rows(from, config_.num_kv_heads, config_.block_size, row_bytes, to);
        } else {
          std::memcpy(to, from, static_cast<size_t>(bytes));
        }
      }
    }
    reader.finish();
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  lock.lock();
  ++link.num_progressed;
  link.stats.bytes_moved += 2 * bytes * blocks.count;
  stats_.bytes_moved += 2 * bytes * blocks.count;
  if (!move.failed && error.empty()) {
    move.next_unit += blocks.count;
    move.stored = move.next_unit == move.num_units;
  }
  release_move(move);
  if (!error.empty()) lose(link, error);
}

// Its host has begun it, so it is in the hands of a thread or waits for the host.
HostTier::Move& HostTier::move_of(Link& link, int64_t id) {
  const auto found = std::find_if(live_moves_.begin(), live_moves_.end(), [&link, id](const auto& move) {
    return move->host == link.host && move->id == id;
  });
  if (found == live_moves_.end() || std::count(link.moves.begin(), link.moves.end(), found->get()) > 0) {
    throw std::runtime_error("it speaks of a move that there is not");
  }
  return **found;
}

void HostTier::release_move(Move& move) {
  if (--move.num_running == 0 && (move.failed || move.stored)) publish_move(move);
}

// -- the end ----------------------------------------------------------------------------------------------------------

// What the host had in hand fails, here and now but for what one of its threads still reads or writes.
void HostTier::lose(Link& link, const std::string& why) {
  if (std::exchange(link.lost, true)) return;
  if (!closing_) ++link.stats.times_lost;
  link.rows.shut_down();
  link.blocks.shut_down();
  link.wake_rows.notify_all();
  link.wake_blocks.notify_all();
  HostEvent event;
  event.kind = EventKind::host_lost;
  event.host = link.host;
  event.message = why;
  if (!closing_) push_event(std::move(event));
  while (!link.tasks.empty()) {
    const int64_t slot = link.tasks.front();
    Slot& task = slots_[static_cast<size_t>(slot)];
    fail_task(task, slot, "the host is lost");
    publish_task(task, slot);
  }
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    Slot& task = slots_[slot];
    if (task.host != link.host || !task.awaited) continue;
    task.awaited = false;
    fail_task(task, static_cast<int64_t>(slot), "the host is lost");
    release_task(static_cast<int64_t>(slot));
  }
  std::vector<Move*> moves;
  for (const auto& move : live_moves_) {
    if (move->host == link.host) moves.push_back(move.get());
  }
  for (Move* move : moves) {
    fail_move(*move, "the host is lost");
    if (move->num_running == 0) publish_move(*move);
  }
}

}  // namespace omniserve
