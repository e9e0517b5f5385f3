#include "host_server.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <thread>
#include <utility>

namespace omniserve {

using wire::part;

namespace {

constexpr double kLongestWait_s = 0.1;  // until a thread that waits for results hears of the session's end

int64_t row_bytes(const HostTierConfig& config, int64_t heads) {
  return heads * config.head_size * dtype_bytes(config.dtype);
}

}  // namespace

HostServer::HostServer(HostTier& tier, int rows_fd, int blocks_fd, double timeout_s)
    : tier_(tier),
      timeout_s_(timeout_s),
      rows_(rows_fd),
      blocks_(blocks_fd),
      tables_(static_cast<size_t>(tier.config().num_slots)) {}

std::string HostServer::serve() {
  std::vector<std::thread> threads;
  for (const auto loop : {&HostServer::send_results, &HostServer::receive_blocks, &HostServer::send_blocks,
                          &HostServer::receive_rows}) {
    threads.emplace_back([this, loop] {
      try {
        (this->*loop)();
      } catch (const std::exception& error) {
        end(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return why_;
}

void HostServer::end(const std::string& why) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ended_) return;
    ended_ = true;
    why_ = why;
  }
  std::vector<iovec> body = {part(why.data(), static_cast<int64_t>(why.size()))};
  try {  // a sender that hangs keeps its mutex; the engine then sees that the connections end
    std::unique_lock<std::mutex> lock(rows_mutex_, std::try_to_lock);
    if (lock.owns_lock()) rows_.send(wire::Kind::failure, 1, body);
  } catch (const std::exception&) {  // it is gone
  }
  rows_.shut_down();
  blocks_.shut_down();
  wake_.notify_all();
}

bool HostServer::has_ended() {
  std::lock_guard<std::mutex> lock(mutex_);
  return ended_;
}

void HostServer::send(wire::Connection& connection, std::mutex& mutex, wire::Kind kind, uint32_t count,
                      std::vector<iovec>& body) {
  std::lock_guard<std::mutex> lock(mutex);
  connection.send(kind, count, body);
}

// -- rows and results -------------------------------------------------------------------------------------------------

void HostServer::receive_rows() {
  double quiet_s = 0;
  const auto tick = [&] {
    quiet_s += timeout_s_ / wire::kTicks;
    if (quiet_s > timeout_s_) throw std::runtime_error("the engine has said nothing for too long");
  };
  while (!has_ended()) {
    const wire::Frame frame = rows_.receive(timeout_s_ / wire::kTicks, tick);
    quiet_s = 0;
    if (frame.kind == wire::Kind::rows) {
      take_tasks(frame);
    } else if (frame.kind == wire::Kind::ping) {
      const HostTierStats stats = tier_.stats();
      const wire::Load load = {stats.busy_ns, stats.kv_bytes_read, stats.threads_alive, stats.tasks_done};
      std::vector<iovec> body = {part(&load, sizeof(load))};
      send(rows_, rows_mutex_, wire::Kind::pong, 1, body);
    } else {
      throw std::runtime_error("the engine sends a frame that belongs elsewhere");
    }
  }
}

void HostServer::take_tasks(const wire::Frame& frame) {
  const HostTierConfig& config = tier_.config();
  const int64_t head_bytes = row_bytes(config, 1);
  const int64_t q_bytes = row_bytes(config, config.num_heads), kv_bytes = row_bytes(config, config.num_kv_heads);
  std::vector<int64_t> slots;
  std::vector<TokenRow> q, k, v;
  int64_t layer = -1;
  const auto submit = [&] {
    if (!slots.empty()) tier_.submit(layer, slots.data(), static_cast<int64_t>(slots.size()), q.data(), k.data(), v.data());
    slots.clear();
    q.clear();
    k.clear();
    v.clear();
  };
  wire::Reader reader(frame);
  for (uint32_t i = 0; i < frame.count; ++i) {
    const auto task = reader.take<wire::Task>();
    if (task.slot < 0 || task.slot >= config.num_slots || task.num_rows < 1 || task.num_rows > config.max_rows) {
      throw std::runtime_error("the engine sends a task of a slot or a size that there is not");
    }
    if (task.kept >= 0) {
      auto& table = tables_[static_cast<size_t>(task.slot)];
      if (static_cast<size_t>(task.kept) > table.size() || task.num_new < 0) {
        throw std::runtime_error("the engine refers to blocks that it has not named");
      }
      table.resize(static_cast<size_t>(task.kept));
      for (int32_t j = 0; j < task.num_new; ++j) table.push_back(reader.take<int32_t>());
      tier_.begin_token(task.slot, task.epoch, task.position, table.data(), static_cast<int64_t>(table.size()),
                        task.num_rows);
    }
    if (task.layer != layer) submit();
    layer = task.layer;
    const char* const rows = reader.take(task.num_rows * (q_bytes + 2 * kv_bytes));
    for (int64_t row = 0; row < task.num_rows; ++row) {
      slots.push_back(task.slot);
      q.push_back({rows + row * q_bytes, head_bytes});
      k.push_back({rows + task.num_rows * q_bytes + row * kv_bytes, head_bytes});
      v.push_back({rows + task.num_rows * (q_bytes + kv_bytes) + row * kv_bytes, head_bytes});
    }
  }
  reader.finish();
  submit();
}

void HostServer::send_results() {
  const HostTierConfig& config = tier_.config();
  const int64_t q_bytes = row_bytes(config, config.num_heads);
  std::vector<wire::Result> heads;
  std::vector<iovec> body;
  while (!has_ended()) {
    const bool is_dead = tier_.stats().threads_alive == 0;
    if (!tier_.wait(is_dead ? 0 : kLongestWait_s)) {
      if (is_dead) throw std::runtime_error("all threads that attend have died");
      continue;
    }
    const std::vector<HostEvent> events = tier_.poll();
    heads.clear();
    heads.reserve(events.size());
    body.clear();
    for (const HostEvent& event : events) {
      const bool is_done = event.kind == EventKind::attention_done;
      const int64_t num_rows = is_done ? tier_.num_rows(event.slot) : 0;
      const auto message_bytes = static_cast<int32_t>(is_done ? 0 : event.message.size());
      heads.push_back({static_cast<int32_t>(event.slot), static_cast<int32_t>(event.layer),
                       static_cast<int32_t>(num_rows), message_bytes, event.epoch, event.position});
      body.push_back(part(&heads.back(), sizeof(wire::Result)));
      if (is_done) {
        const char* const results = static_cast<const char*>(config.results);
        body.push_back(part(results + event.slot * config.max_rows * q_bytes, num_rows * q_bytes));
      } else {
        body.push_back(part(event.message.data(), message_bytes));
      }
    }
    send(rows_, rows_mutex_, wire::Kind::results, static_cast<uint32_t>(events.size()), body);
  }
}

// -- blocks -----------------------------------------------------------------------------------------------------------

void HostServer::receive_blocks() {
  const auto tick = [&] {
    if (has_ended()) throw std::runtime_error("the session has ended");
  };
  while (!has_ended()) {
    const wire::Frame frame = blocks_.receive(timeout_s_ / wire::kTicks, tick);
    if (frame.kind == wire::Kind::blocks) {
      store(frame);
      continue;
    }
    if (frame.kind != wire::Kind::move) throw std::runtime_error("the engine sends a frame that belongs elsewhere");
    wire::Reader reader(frame);
    Move move;
    move.head = reader.take<wire::Move>();
    if (move.head.num_blocks < 1) throw std::runtime_error("the engine begins a move of no block");
    if (static_cast<size_t>(move.head.num_blocks) > reader.left() / 8) {
      throw std::runtime_error("a frame is shorter than it says");
    }
    move.ids.resize(static_cast<size_t>(move.head.num_blocks));
    reader.copy(move.ids.data(), 8 * move.ids.size());
    reader.finish();
    for (int64_t id : move.ids) {
      if (id < 0 || id >= tier_.config().num_blocks) throw std::runtime_error("the engine names a block that there is not");
    }
    if (move.head.to_host) {
      const int64_t id = move.head.id;
      if (!arriving_.emplace(id, std::move(move)).second) throw std::runtime_error("the engine begins a move twice");
    } else {
      std::lock_guard<std::mutex> lock(mutex_);
      leaving_.push_back(std::move(move));
      wake_.notify_one();
    }
  }
}

void HostServer::store(const wire::Frame& frame) {
  wire::Reader reader(frame);
  const auto blocks = reader.take<wire::Blocks>();
  const auto found = arriving_.find(blocks.id);
  if (found == arriving_.end()) throw std::runtime_error("the engine sends blocks of a move that it has not begun");
  Move& move = found->second;
  const int64_t num_units = static_cast<int64_t>(tier_.config().layers.size()) * move.head.num_blocks;
  if (blocks.first != move.next_unit || blocks.count < 1 || blocks.count > num_units - blocks.first) {
    throw std::runtime_error("the engine sends other blocks than it has said");
  }
  const int64_t bytes = tier_.cache_block_bytes();
  for (int64_t unit = blocks.first; unit < blocks.first + blocks.count; ++unit) {
    const char* const k = reader.take(bytes);
    const char* const v = reader.take(bytes);
    tier_.pack(unit / move.head.num_blocks, move.ids[static_cast<size_t>(unit % move.head.num_blocks)], k, v);
  }
  reader.finish();
  move.next_unit += blocks.count;
  if (move.next_unit < num_units) return;
  const wire::Move head = move.head;
  arriving_.erase(found);
  std::vector<iovec> body = {part(&head, sizeof(head))};
  send(blocks_, blocks_mutex_, wire::Kind::stored, 1, body);
}

void HostServer::send_blocks() {
  const int64_t bytes = tier_.cache_block_bytes();
  const int64_t most = std::max<int64_t>(1, wire::kBlocksBytes / (2 * bytes));
  std::vector<char> data(static_cast<size_t>(2 * bytes * most));
  while (true) {
    Move move;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this] { return ended_ || !leaving_.empty(); });
      if (ended_) return;
      move = std::move(leaving_.front());
      leaving_.pop_front();
    }
    const int64_t num_units = static_cast<int64_t>(tier_.config().layers.size()) * move.head.num_blocks;
    for (int64_t first = 0; first < num_units; first += most) {
      const wire::Blocks blocks = {move.head.id, first, std::min(most, num_units - first), {}};
      char* to = data.data();
      for (int64_t unit = first; unit < first + blocks.count; ++unit, to += 2 * bytes) {
        tier_.unpack(unit / move.head.num_blocks, move.ids[static_cast<size_t>(unit % move.head.num_blocks)], to,
                     to + bytes);
      }
      std::vector<iovec> body = {part(&blocks, sizeof(blocks)), part(data.data(), 2 * bytes * blocks.count)};
      send(blocks_, blocks_mutex_, wire::Kind::blocks, 1, body);
    }
  }
}

}  // namespace omniserve
