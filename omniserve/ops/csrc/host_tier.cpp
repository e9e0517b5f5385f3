// The callers' side of the host tier: tokens, rows, moves, events. The threads' side is in host_tier_workers.cpp and
// host_tier_mailbox.cpp; where they come from and go to, in host_tier_life.cpp.
#include "host_tier.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "host_tier_refuse.h"

namespace omniserve {
namespace {

// About as long in a thread's hands as a piece of attention.
constexpr int64_t kMovePieceBytes = 512 << 10;

}  // namespace

HostTier::Slot& HostTier::checked_slot(int64_t slot) {
  if (slot < 0 || slot >= config_.num_slots) refuse("slot must be in [0, ", config_.num_slots, "), got ", slot);
  return slots_[static_cast<size_t>(slot)];
}

void HostTier::begin_token(int64_t slot, int64_t epoch, int64_t position, const int64_t* block_ids,
                           int64_t num_blocks, int64_t num_rows) {
  if (epoch < 0) refuse("epoch must be >= 0, got ", epoch);
  if (position < 0) refuse("position must be >= 0, got ", position);
  if (num_rows < 1 || num_rows > config_.max_rows) {
    refuse("num_rows must be in [1, ", config_.max_rows, "], got ", num_rows);
  }
  const int64_t last = position + num_rows - 1, needed = last / config_.block_size + 1;
  if (num_blocks < needed) {
    refuse("position ", last, " needs ", needed, " blocks of ", config_.block_size, " tokens, got ", num_blocks);
  }
  Lock lock(mutex_);
  const int64_t host = host_of(block_ids, num_blocks);
  Slot& state = checked_slot(slot);
  if (!is_free(state, slot)) {
    refuse("slot ", slot, " has a task in flight: poll its event before the next token begins");
  }
  state.bound = true;
  state.cancelled = false;
  state.epoch = epoch;
  state.position = position;
  state.num_rows = num_rows;
  state.block_table.resize(static_cast<size_t>(num_blocks));
  std::transform(block_ids, block_ids + num_blocks, state.block_table.begin(),
                 [host](int64_t id) { return static_cast<int32_t>(id - host * kHostBlocks); });
  state.host = host;
  state.session = host > 0 ? links_.at(host)->session : 0;
  state.told = false;
}

int64_t HostTier::num_rows(int64_t slot) {
  Lock lock(mutex_);
  return checked_slot(slot).num_rows;
}

void HostTier::check_layer(int64_t layer) const {
  if (layer < 0 || layer >= num_layers()) refuse("layer must be in [0, ", num_layers(), "), got ", layer);
}

// Whether a task may begin in each of these slots, -1 left out, or may follow what is in them.
void HostTier::check_free(const int64_t* slots, int64_t num_slots, bool may_be_busy) {
  if (closing_) refuse("the host tier is closed");
  ++num_calls_;
  for (int64_t i = 0; i < num_slots; ++i) {
    if (slots[i] == -1) continue;
    Slot& task = checked_slot(slots[i]);
    if (!task.bound) refuse("slot ", slots[i], " holds no token: call begin_token first");
    if (!may_be_busy && (task.in_flight || task.num_expected > 0)) {
      refuse("slot ", slots[i], " has a task in flight: poll its event before the next one begins");
    }
    if (task.named_in == num_calls_) refuse("slot ", slots[i], " sits in two seats");
    task.named_in = num_calls_;
  }
}

// The slot has a task from here on, which counts as in hand; it is queued once its rows are there.
void HostTier::claim(int64_t slot, int64_t layer, const Rows& rows) {
  Slot& task = slots_[static_cast<size_t>(slot)];
  task.in_flight = true;
  task.failed = false;
  task.message.clear();
  task.rows = rows;
  task.layer = layer;
  const int64_t lowest = first_key(task.position, config_.layers[static_cast<size_t>(layer)]);
  task.piece_tokens = decode_piece_tokens(task.position + 1);
  task.begin = lowest / task.piece_tokens * task.piece_tokens;  // cpu_attention cuts here too, so they agree exactly
  task.num_pieces = task.next_piece = task.num_running = 0;
  task.awaited = false;
}

// Its rows are there.
void HostTier::enqueue(int64_t slot) {
  Slot& task = slots_[static_cast<size_t>(slot)];
  Link* const link = task.host > 0 ? links_.at(task.host).get() : nullptr;
  const bool is_lost = link != nullptr && (closing_ || link->lost || link->session != task.session);
  if (is_lost) fail_task(task, slot, "the host is lost");
  if (link == nullptr && (closing_ || stats_.threads_alive == 0)) fail_task(task, slot, "no host thread is alive");
  if (task.cancelled || task.failed) {
    publish_task(task, slot);
    return;
  }
  if (link != nullptr) {
    task.num_pieces = 1;
    link->tasks.push_back(slot);
    link->wake_rows.notify_one();
    return;
  }
  task.num_pieces = (task.end() - 1 - task.begin) / task.piece_tokens + 1;
  num_queued_pieces_ += task.num_pieces;
  tasks_.push_back(slot);
}

void HostTier::submit(int64_t layer, const int64_t* slots, int64_t num_seats, const TokenRow* q, const TokenRow* k,
                      const TokenRow* v) {
  check_layer(layer);
  const auto goes_on = [slots](int64_t seat) { return seat > 0 && slots[seat] == slots[seat - 1]; };
  std::vector<int64_t> named, widths;  // each slot, and how many seats it has
  for (int64_t i = 0; i < num_seats; ++i) {
    if (slots[i] == -1) continue;
    if (goes_on(i)) {
      ++widths.back();
    } else {
      named.push_back(slots[i]);
      widths.push_back(1);
    }
  }
  {
    Lock lock(mutex_);
    check_free(named.data(), static_cast<int64_t>(named.size()));
    for (size_t i = 0; i < named.size(); ++i) {
      const int64_t num_rows = slots_[static_cast<size_t>(named[i])].num_rows;
      if (widths[i] > num_rows) {
        refuse("slot ", named[i], " has ", widths[i], " seats for ", num_rows, num_rows == 1 ? " token" : " tokens");
      }
    }
    for (size_t i = 0; i < named.size(); ++i) {
      slots_[static_cast<size_t>(named[i])].num_rows = widths[i];
      claim(named[i], layer, own_rows(named[i]));
    }
    stats_.tasks_in_hand += static_cast<int64_t>(named.size());
  }
  // The rows of a slot in flight that is not queued yet are this thread's alone.
  auto copy = [this](char* to, const TokenRow& from, int64_t num_heads) {
    if (from.head_stride == head_bytes_) {
      std::memcpy(to, from.data, static_cast<size_t>(num_heads * head_bytes_));
      return;
    }
    for (int64_t h = 0; h < num_heads; ++h) {
      std::memcpy(to + h * head_bytes_, from.data + h * from.head_stride, static_cast<size_t>(head_bytes_));
    }
  };
  for (int64_t i = 0, row = 0; i < num_seats; ++i) {
    if (slots[i] == -1) continue;
    row = goes_on(i) ? row + 1 : 0;
    copy(q_rows(slots[i]) + row * q_bytes_, q[i], config_.num_heads);
    copy(k_rows(slots[i]) + row * kv_bytes_, k[i], config_.num_kv_heads);
    copy(v_rows(slots[i]) + row * kv_bytes_, v[i], config_.num_kv_heads);
  }
  Called called;
  Lock lock(mutex_);
  for (int64_t slot : named) enqueue(slot);
  call_workers(called);
  lock.unlock();
  notify(called);
}

void HostTier::expect(int64_t step, const int64_t* layers, const int64_t* slots, const int64_t* widths,
                      int64_t num_tasks, bool may_skip) {
  if (config_.mailbox == nullptr) refuse("the host tier has no mailbox: make it with mailbox=True");
  if (step < 1) refuse("step must be >= 1 (a flag is 0 at the start), got ", step);
  for (int64_t i = 0; i < num_tasks; ++i) {
    if (slots[i] != -1) check_layer(layers[i]);
  }
  Lock lock(mutex_);
  check_free(slots, num_tasks, may_skip);
  for (int64_t i = 0; i < num_tasks; ++i) {
    if (slots[i] == -1) continue;
    const Slot& task = slots_[static_cast<size_t>(slots[i])];
    if (widths[i] < 1 || widths[i] > task.num_rows) {
      refuse("slot ", slots[i], " is bound to ", task.num_rows, " tokens: a task of ", widths[i], " is not possible");
    }
    // Its flag may still say `step` from then.
    const int64_t last = task.last_step;
    if (step <= last) refuse("slot ", slots[i], " was expected in step ", last, " before: steps rise, got ", step);
  }
  for (int64_t i = 0; i < num_tasks; ++i) {
    if (slots[i] == -1) continue;
    Slot& task = slots_[static_cast<size_t>(slots[i])];
    task.last_step = step;
    if (++task.num_expected == 1 && task.failed) task.held = take_back(slots[i]);
    ++stats_.tasks_in_hand;
    expected_.push_back({slots[i], layers[i], step, widths[i], may_skip});
  }
  if (expected_.empty()) return;
  watcher_called_ = true;
  lock.unlock();
  watcher_wake_.notify_one();
}

bool HostTier::cancel(int64_t slot) {
  Lock lock(mutex_);
  Slot& task = checked_slot(slot);
  if (!task.bound) return task.in_flight;
  task.bound = false;
  task.cancelled = true;
  if (!task.in_flight) {  // there is no task, or its event was polled
    task.in_flight = true;
    deliver(task, event_of(task, slot));
    return true;
  }
  const bool was_queued = task.next_piece < task.num_pieces;
  withdraw(task, slot);
  if (was_queued && task.num_running == 0) {
    publish_task(task, slot);
  } else if (std::unique_ptr<HostEvent> event = take_back(slot)) {
    deliver(task, std::move(*event));
  }
  return true;
}

void HostTier::start_move(BlockMove spec) {
  if (spec.cache_ids.size() != spec.pool_ids.size()) {
    refuse("a move needs as many cache blocks as pool blocks, got ", spec.cache_ids.size(), " and ",
           spec.pool_ids.size());
  }
  auto check = [](const char* side, const std::vector<int64_t>& ids, int64_t num_blocks) {
    for (int64_t id : ids) {
      if (id < 0 || id >= num_blocks) refuse(side, " block ids must be in [0, ", num_blocks, "), got ", id);
    }
  };
  check("cache", spec.cache_ids, spec.num_blocks);
  auto move = std::make_unique<Move>();
  move->num_units = num_layers() * static_cast<int64_t>(spec.pool_ids.size());
  move->units_per_piece = std::max<int64_t>(1, kMovePieceBytes / (2 * cache_block_bytes()));
  move->spec = std::move(spec);
  Called called;
  Lock lock(mutex_);
  if (closing_) refuse("the host tier is closed");
  Move& queued = *move;
  queued.host = host_of(queued.spec.pool_ids.data(), static_cast<int64_t>(queued.spec.pool_ids.size()));
  live_moves_.push_back(std::move(move));
  if (queued.host > 0) {
    Link& link = *links_.at(queued.host);
    queued.id = ++num_remote_moves_;
    for (int64_t& id : queued.spec.pool_ids) id -= queued.host * kHostBlocks;
    ++link.num_moves;
    if (link.lost) {
      fail_move(queued, "the host is lost");
      publish_move(queued);
    } else {
      link.moves.push_back(&queued);
      link.wake_blocks.notify_one();
    }
  } else if (stats_.threads_alive == 0) {
    fail_move(queued, "no host thread is alive");
    publish_move(queued);
  } else if (queued.num_units == 0) {
    publish_move(queued);
  } else {
    num_queued_pieces_ += (queued.num_units + queued.units_per_piece - 1) / queued.units_per_piece;
    moves_.push_back(&queued);
    call_workers(called);
    lock.unlock();
    notify(called);
  }
}

std::vector<HostEvent> HostTier::poll() {
  Lock lock(mutex_);
  std::vector<HostEvent> out;
  size_t count = events_.size();
  if (faults_.shuffle && count > 0) count = 1 + pick(count);  // some are kept back, but never all: callers get on
  out.reserve(count);
  for (; count > 0; --count) {
    const size_t chosen = pick(events_.size());
    HostEvent event = std::move(events_[chosen]);
    events_.erase(events_.begin() + static_cast<std::ptrdiff_t>(chosen));
    if (event.slot >= 0) {
      Slot& task = slots_[static_cast<size_t>(event.slot)];
      if (task.cancelled) {
        event.kind = EventKind::cancelled;
        event.message = "cancelled";
      }
      task.in_flight = false;
    }
    out.push_back(std::move(event));
  }
  return out;
}

bool HostTier::wait(double timeout_s) {
  Lock lock(mutex_);
  ++num_waiters_;
  events_wake_.wait_for(lock, to_duration(timeout_s), [this] { return !events_.empty() || closing_; });
  --num_waiters_;
  return !events_.empty();
}

void HostTier::inject(const Faults& faults) {
  if (!(faults.delay_s >= 0)) refuse("delay_s must be >= 0, got ", faults.delay_s);
  if (faults.fail_next < 0 || faults.kill_threads < 0) refuse("fail_next and kill_threads must be >= 0");
  Lock lock(mutex_);
  faults_ = faults;
  rng_.seed(faults.shuffle_seed);
  ++faults_set_;  // a delay that is under way ends
  for (auto& worker : workers_) worker->wake.notify_one();
}

HostTierStats HostTier::stats() {
  Lock lock(mutex_);
  HostTierStats stats = stats_;
  stats.moves_in_hand = static_cast<int64_t>(live_moves_.size());
  stats.bytes_prefaulted = bytes_prefaulted_;
  return stats;
}

}  // namespace omniserve
