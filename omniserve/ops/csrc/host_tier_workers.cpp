// The threads' side of the host tier: taking pieces, computing them, and what follows. The mutex is held in every
// function here but execute() and what that calls, and merge().
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>

#include "host_tier.h"

namespace omniserve {
namespace {

// A wake-up is a system call of 2 us and more, so a caller makes one and the woken thread goes on from there.
constexpr int kWorkerWakes = 2;

}  // namespace

void HostTier::run(Worker& self) {
  Called called;
  Lock lock(mutex_);
  while (true) {
    while (!closing_ && !has_work()) {
      self.signalled = false;
      idle_.push_back(&self);
      self.wake.wait(lock, [&self] { return self.signalled; });
      if (!closing_) --num_waking_;  // close() calls everybody, and nobody counts any more
    }
    if (closing_) break;
    const Piece piece = take();
    call_workers(called, kWorkerWakes);
    if (!called.empty()) {
      lock.unlock();
      notify(called);
      called.clear();
      lock.lock();
    }
    if (piece.must_die) {
      finish(piece, "a host thread died", lock);
      break;
    }
    if (piece.starts_task && faults_.delay_s > 0) {
      self.wake.wait_for(lock, to_duration(faults_.delay_s),
                         [this, set = faults_set_] { return closing_ || faults_set_ != set; });
    }
    lock.unlock();
    std::string error;
    const auto start = std::chrono::steady_clock::now();
    try {
      execute(piece);
    } catch (const std::exception& thrown) {
      error = std::string("a host thread threw: ") + thrown.what();
    } catch (...) {
      error = "a host thread threw something that is no std::exception";
    }
    const auto elapsed = std::chrono::steady_clock::now() - start;
    lock.lock();
    stats_.busy_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count();
    finish(piece, std::move(error), lock);
  }
  --stats_.threads_alive;
  // close() does the same once it has joined all threads.
  if (stats_.threads_alive == 0 && !closing_) fail_everything_queued("the last host thread died");
}

size_t HostTier::pick(size_t size) { return faults_.shuffle ? rng_() % size : 0; }

HostTier::Piece HostTier::take() {
  Piece piece;
  // Copies first: they are finite, and a latency-sensitive prompt may wait for the memory that one frees.
  if (!moves_.empty()) {
    take_move(piece);
  } else {
    take_attention(piece);
  }
  --num_queued_pieces_;
  if (faults_.kill_threads > 0) {
    --faults_.kill_threads;
    piece.must_die = true;
  }
  return piece;
}

void HostTier::take_attention(Piece& piece) {
  const size_t index = pick(tasks_.size());
  piece.slot = tasks_[index];
  Slot& task = slots_[static_cast<size_t>(piece.slot)];
  piece.task = &task;
  piece.piece = task.next_piece++;
  ++task.num_running;
  if (piece.piece == 0) {
    piece.starts_task = true;
    if (faults_.fail_next > 0) {
      --faults_.fail_next;
      piece.must_throw = true;
    }
    if (!free_scratch_.empty()) {
      task.scratch = std::move(free_scratch_.back());
      free_scratch_.pop_back();
    }
    const int64_t needed = task.num_pieces * task.num_rows * config_.num_heads * (config_.head_size + 2);
    if (task.scratch.size < needed) {
      task.scratch.data.reset(new (std::nothrow) float[static_cast<size_t>(needed)]);  // attend() checks it
      task.scratch.size = task.scratch.data ? needed : 0;
    }
  }
  if (task.next_piece == task.num_pieces) tasks_.erase(tasks_.begin() + static_cast<std::ptrdiff_t>(index));
}

void HostTier::take_move(Piece& piece) {
  const size_t index = pick(moves_.size());
  Move& move = *moves_[index];
  piece.move = &move;
  piece.first_unit = move.next_unit;
  piece.last_unit = move.next_unit = std::min(move.next_unit + move.units_per_piece, move.num_units);
  ++move.num_running;
  if (move.next_unit == move.num_units) moves_.erase(moves_.begin() + static_cast<std::ptrdiff_t>(index));
}

void HostTier::execute(const Piece& piece) {
  if (piece.move != nullptr) {
    copy_blocks(piece);
  } else {
    attend(piece);
  }
}

void HostTier::attend(const Piece& piece) {
  if (piece.must_throw) throw std::runtime_error("injected failure");
  const Slot& task = *piece.task;
  if (!task.scratch.data) throw std::bad_alloc();
  const int64_t begin = task.begin + piece.piece * task.piece_tokens;
  const int64_t end = std::min(begin + task.piece_tokens, task.end());
  // The tokens' own k and v, as far as they lie in this piece. Only it reads them, so the others need not wait.
  for (int64_t position = std::max(begin, task.position); position < end; ++position) {
    const int64_t row = (position - task.position) * kv_bytes_;
    const int64_t block = task.block_table[static_cast<size_t>(position / config_.block_size)];
    append_host_token(shape_, position % config_.block_size, {task.rows.k + row, head_bytes_},
                      {task.rows.v + row, head_bytes_}, pool_block(task.layer, block),
                      block_scales(task.layer, block));
  }
  const PagedKV kv = host_layout(pool_block(task.layer, 0), block_scales(task.layer, 0), config_.num_blocks,
                                 config_.num_kv_heads, config_.block_size, config_.head_size, config_.pool_dtype);
  const int64_t heads = task.num_rows * config_.num_heads;
  float* acc = task.scratch.data.get();
  float* m = acc + task.num_pieces * heads * config_.head_size;
  float* l = m + task.num_pieces * heads;
  decode_partial(task.rows.q, config_.dtype, kv, task.block_table.data(), task.position, task.num_rows, begin, end,
                 config_.layers[static_cast<size_t>(task.layer)], acc + piece.piece * heads * config_.head_size,
                 m + piece.piece * heads, l + piece.piece * heads);
}

void HostTier::merge(const Slot& task, int64_t slot) {
  const int64_t heads = task.num_rows * config_.num_heads;
  const float* acc = task.scratch.data.get();
  const float* m = acc + task.num_pieces * heads * config_.head_size;
  merge_partials(acc, m, m + task.num_pieces * heads, task.num_pieces, task.num_rows, config_.num_heads,
                 config_.num_kv_heads, config_.head_size, config_.layers[static_cast<size_t>(task.layer)].sinks,
                 config_.dtype, q_result(slot));
}

void HostTier::pack(int64_t layer, int64_t block, const char* k, const char* v) {
  pack_host_block(shape_, k, v, pool_block(layer, block), block_scales(layer, block));
}

void HostTier::unpack(int64_t layer, int64_t block, char* k, char* v) const {
  unpack_host_block(shape_, pool_block(layer, block), block_scales(layer, block), k, v);
}

void HostTier::copy_blocks(const Piece& piece) {
  const BlockMove& spec = piece.move->spec;
  const int64_t bytes = cache_block_bytes();
  std::vector<char> turned(spec.reversed ? static_cast<size_t>(2 * bytes) : 0);
  char* const k_turned = turned.data();
  char* const v_turned = k_turned + turned.size() / 2;
  const int64_t count = static_cast<int64_t>(spec.pool_ids.size());
  for (int64_t unit = piece.first_unit; unit < piece.last_unit; ++unit) {
    const int64_t layer = unit / count;
    const size_t i = static_cast<size_t>(unit % count);
    const int64_t at = (layer * spec.num_blocks + spec.cache_ids[i]) * bytes;
    char* const block = pool_block(layer, spec.pool_ids[i]);
    float* const scales = block_scales(layer, spec.pool_ids[i]);
    if (spec.reversed) {
      if (spec.to_host) {
        reverse_rows(shape_, spec.k + at, k_turned);
        reverse_rows(shape_, spec.v + at, v_turned);
        pack_host_block(shape_, k_turned, v_turned, block, scales);
      } else {
        unpack_host_block(shape_, block, scales, k_turned, v_turned);
        reverse_rows(shape_, k_turned, spec.k + at);
        reverse_rows(shape_, v_turned, spec.v + at);
      }
    } else if (spec.to_host) {
      pack_host_block(shape_, spec.k + at, spec.v + at, block, scales);
    } else {
      unpack_host_block(shape_, block, scales, spec.k + at, spec.v + at);
    }
  }
}

void HostTier::finish(const Piece& piece, std::string error, Lock& lock) {
  if (piece.move != nullptr) {
    Move& move = *piece.move;
    --move.num_running;
    if (!error.empty()) {
      fail_move(move, std::move(error));
    } else {
      stats_.bytes_moved += (piece.last_unit - piece.first_unit) * 2 * cache_block_bytes();
    }
    if (move.num_running == 0 && move.next_unit == move.num_units) publish_move(move);
    return;
  }
  Slot& task = *piece.task;
  if (!error.empty()) {
    fail_task(task, piece.slot, std::move(error));
  } else {
    const int64_t begin = task.begin + piece.piece * task.piece_tokens;
    const int64_t tokens = std::min(task.piece_tokens, task.end() - begin);
    stats_.kv_bytes_read += tokens * token_bytes_;
  }
  if (task.num_running == 1 && task.next_piece == task.num_pieces) {
    if (!task.failed && !task.cancelled) {
      // This thread still counts as running, so nobody publishes the task meanwhile.
      lock.unlock();
      try {
        merge(task, piece.slot);
      } catch (const std::exception& thrown) {
        error = std::string("a host thread threw: ") + thrown.what();
      }
      lock.lock();
      if (!error.empty()) fail_task(task, piece.slot, std::move(error));
    }
    --task.num_running;
    publish_task(task, piece.slot);
  } else {
    --task.num_running;
  }
}

// Hand out no more pieces of a task.
void HostTier::withdraw(Slot& task, int64_t slot) {
  if (task.next_piece == task.num_pieces) return;
  std::deque<int64_t>& queue = task.host > 0 ? links_.at(task.host)->tasks : tasks_;
  if (task.host == 0) num_queued_pieces_ -= task.num_pieces - task.next_piece;
  task.next_piece = task.num_pieces;
  queue.erase(std::find(queue.begin(), queue.end(), slot));
}

void HostTier::fail_task(Slot& task, int64_t slot, std::string message) {
  withdraw(task, slot);
  if (!task.failed) task.message = std::move(message);
  task.failed = true;
}

void HostTier::fail_move(Move& move, std::string message) {
  std::deque<Move*>& queue = move.host > 0 ? links_.at(move.host)->moves : moves_;
  const auto queued = std::find(queue.begin(), queue.end(), &move);
  if (queued != queue.end()) {
    if (move.host == 0) {
      num_queued_pieces_ -= (move.num_units - move.next_unit + move.units_per_piece - 1) / move.units_per_piece;
    }
    queue.erase(queued);
  }
  move.next_unit = move.num_units;
  if (!move.failed) move.message = std::move(message);
  move.failed = true;
}

void HostTier::publish_task(Slot& task, int64_t slot) {
  --stats_.tasks_in_hand;
  if (task.scratch.data) free_scratch_.push_back(std::move(task.scratch));
  task.scratch = Scratch{};
  HostEvent event = event_of(task, slot);
  if (task.failed && !task.cancelled) {
    event.kind = EventKind::attention_failed;
    event.message = std::move(task.message);
    ++stats_.failures;
  } else if (!task.cancelled) {
    ++stats_.tasks_done;
    if (config_.result_flags != nullptr) {
      // Whoever sees the flag, or has polled the event, sees the result.
      const int64_t flag = result_flag(task.epoch, task.layer, task.position);
      __atomic_store_n(config_.result_flags + slot * config_.max_rows, flag, __ATOMIC_RELEASE);
    }
  }
  deliver(task, std::move(event));
}

// Of a task that is done or cancelled.
HostEvent HostTier::event_of(const Slot& task, int64_t slot) const {
  HostEvent event;
  event.kind = EventKind::attention_done;
  event.slot = slot;
  event.epoch = task.epoch;
  event.layer = task.layer;
  event.position = task.position;
  return event;
}

// An event behind which the slot is given to others waits until no device writes the slot's row any more.
void HostTier::deliver(Slot& task, HostEvent event) {
  const bool ends = task.cancelled || event.kind == EventKind::attention_failed;
  if (ends && task.num_expected > 0) {
    task.held = std::make_unique<HostEvent>(std::move(event));
  } else {
    push_event(std::move(event));
  }
}

// Return the slot's event, which is not polled then; null: there is none. A slot has one at most.
std::unique_ptr<HostEvent> HostTier::take_back(int64_t slot) {
  const auto found = std::find_if(events_.begin(), events_.end(), [slot](const auto& e) { return e.slot == slot; });
  if (found == events_.end()) return nullptr;
  auto event = std::make_unique<HostEvent>(std::move(*found));
  events_.erase(found);
  return event;
}

bool HostTier::is_free(Slot& task, int64_t slot) {
  if (task.num_expected > 0) return false;
  const bool is_used = task.in_flight && config_.mailbox != nullptr && !task.cancelled && !task.failed;
  if (is_used && take_back(slot)) task.in_flight = false;
  return !task.in_flight;
}

void HostTier::publish_move(Move& move) {
  HostEvent event;
  event.kind = move.failed ? EventKind::move_failed : EventKind::move_done;
  event.move_id = move.spec.move_id;
  event.message = std::move(move.message);
  if (move.failed) ++stats_.failures;
  if (move.host > 0) --links_.at(move.host)->num_moves;
  live_moves_.erase(
      std::find_if(live_moves_.begin(), live_moves_.end(), [&move](const auto& live) { return live.get() == &move; }));
  push_event(std::move(event));
}

void HostTier::push_event(HostEvent event) {
  events_.push_back(std::move(event));
  if (num_waiters_ > 0) events_wake_.notify_all();
}

void HostTier::fail_everything_queued(const std::string& message) {
  while (!tasks_.empty()) {
    const int64_t slot = tasks_.front();
    fail_task(slots_[static_cast<size_t>(slot)], slot, message);
    publish_task(slots_[static_cast<size_t>(slot)], slot);
  }
  while (!moves_.empty()) {
    Move& move = *moves_.front();
    fail_move(move, message);
    publish_move(move);
  }
}

void HostTier::call_workers(Called& called, int most) {
  for (int i = 0; i < most && num_waking_ < num_queued_pieces_ && !idle_.empty(); ++i) {
    Worker& worker = *idle_.back();
    idle_.pop_back();
    ++num_waking_;
    worker.signalled = true;
    called.push_back(&worker);
  }
}

void HostTier::notify(const Called& called) {
  for (Worker* worker : called) worker->wake.notify_one();
}

}  // namespace omniserve
