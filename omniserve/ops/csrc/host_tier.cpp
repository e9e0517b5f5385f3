// The callers' side of the host tier; the threads' side is in host_tier_workers.cpp and host_tier_mailbox.cpp.
#include "host_tier.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "host_tier_memory.h"

namespace omniserve {
namespace {

// About as long in a thread's hands as a piece of attention.
constexpr int64_t kMovePieceBytes = 512 << 10;

template <typename... Args>
[[noreturn]] void refuse(const Args&... args) {
  std::string message;
  auto append = [&message](const auto& arg) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(arg)>>) {
      message += std::to_string(arg);
    } else {
      message += arg;
    }
  };
  (append(args), ...);
  throw std::invalid_argument(message);
}

// A refusal (some sandboxes) costs time, as said where a policy is chosen, and is no error.
void set_policy(std::thread& thread, int policy) {
  const sched_param no_priority{};
  pthread_setschedparam(thread.native_handle(), policy, &no_priority);
}

void pin(std::thread& thread, const std::vector<int>& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int core : cores) {
    if (core >= 0 && core < CPU_SETSIZE) CPU_SET(core, &set);
  }
  const int error = pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
  if (error != 0) refuse("a host thread cannot be pinned to core ", cores[0], ": ", std::strerror(error));
}

}  // namespace

HostTier::HostTier(HostTierConfig config)
    : config_(std::move(config)),
      shape_{config_.num_kv_heads, config_.block_size, config_.head_size, config_.pool_dtype, config_.dtype},
      head_bytes_(config_.head_size * dtype_bytes(config_.dtype)),
      q_bytes_(config_.num_heads * head_bytes_),
      kv_bytes_(config_.num_kv_heads * head_bytes_),
      token_bytes_((shape_.block_bytes() + 4 * shape_.block_scales()) / std::max<int64_t>(1, config_.block_size)),
      row_stride_(round_up(q_bytes_) + 2 * round_up(kv_bytes_)) {
  for (int64_t size : {config_.num_blocks, config_.block_size, config_.num_heads, config_.num_kv_heads,
                       config_.head_size, config_.num_slots, static_cast<int64_t>(config_.num_threads),
                       static_cast<int64_t>(config_.layers.size())}) {
    if (size < 1) refuse("every size of a host tier must be >= 1, got ", size);
  }
  if (config_.num_heads % config_.num_kv_heads != 0) {
    refuse("num_heads must be a multiple of num_kv_heads, got ", config_.num_heads, " and ", config_.num_kv_heads);
  }
  if (config_.dtype == DType::i8 || (config_.pool_dtype != config_.dtype && config_.pool_dtype != DType::i8)) {
    refuse("a host pool holds the rows' dtype or i8");
  }
  if ((config_.pool_dtype == DType::i8) != (config_.scales != nullptr)) {
    refuse("an i8 host pool, and no other, has scales");
  }
  if ((config_.mailbox != nullptr) != (config_.flags != nullptr)) {
    refuse("a mailbox needs flags, and nothing else does");
  }
  if (!(config_.mailbox_spin_s >= 0) || !(config_.mailbox_sleep_s >= 0)) {
    refuse("mailbox_spin_s and mailbox_sleep_s must be >= 0, got ", config_.mailbox_spin_s, " and ",
           config_.mailbox_sleep_s);
  }
  rows_.reset(static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(config_.num_slots * row_stride_))));
  if (!rows_) throw std::bad_alloc();
  slots_.resize(static_cast<size_t>(config_.num_slots));
  idle_.reserve(static_cast<size_t>(config_.num_threads));
  try {
    for (int i = 0; i < config_.num_threads; ++i) {
      workers_.push_back(std::make_unique<Worker>());
      Worker& worker = *workers_.back();
      {
        Lock lock(mutex_);
        ++stats_.threads_alive;
      }
      try {
        worker.thread = std::thread([this, &worker] { run(worker); });
      } catch (...) {
        workers_.pop_back();
        throw;
      }
      pthread_setname_np(worker.thread.native_handle(), ("omni-host-" + std::to_string(i)).substr(0, 15).c_str());
      // A woken batch thread waits for its turn instead of preempting the thread that woke it. Without this, on a
      // machine without a free core, submit takes 50 to 180 us instead of 4: the step would stop for best-effort work.
      set_policy(worker.thread, SCHED_BATCH);
      if (!config_.cores.empty()) pin(worker.thread, {config_.cores[static_cast<size_t>(i) % config_.cores.size()]});
    }
    if (config_.mailbox != nullptr) {
      for (std::vector<Expected>* rows : {&expected_, &watched_}) rows->reserve(slots_.size());
      flagged_.reserve(slots_.size());
      watcher_ = std::thread([this] { watch(); });
      pthread_setname_np(watcher_.native_handle(), "omni-mailbox");
      set_policy(watcher_, SCHED_BATCH);
      if (!config_.cores.empty()) pin(watcher_, config_.cores);  // whichever of them is free: it must not hold one up
    }
    if (config_.prefault) {
      prefaulter_ = std::thread([this] { prefault(); });
      pthread_setname_np(prefaulter_.native_handle(), "omni-prefault");
      set_policy(prefaulter_, SCHED_IDLE);  // takes cores that nobody wants: neither steps nor attention are to notice
    }
  } catch (...) {
    close();
    throw;
  }
}

HostTier::~HostTier() { close(); }

void HostTier::close() {
  std::lock_guard<std::mutex> only_one(close_mutex_);
  {
    Lock lock(mutex_);
    closing_ = true;
    idle_.clear();
    for (auto& worker : workers_) {
      worker->signalled = true;
      worker->wake.notify_one();
    }
    watcher_called_ = true;
    watcher_wake_.notify_one();
  }
  stop_prefault_ = true;
  if (prefaulter_.joinable()) {
    // Where all cores are busy, an idle thread hears of the end after a second or so; a user may not be allowed this.
    set_policy(prefaulter_, SCHED_OTHER);
    prefaulter_.join();
  }
  for (auto& worker : workers_) {
    if (worker->thread.joinable()) worker->thread.join();
  }
  if (watcher_.joinable()) watcher_.join();
  Lock lock(mutex_);
  fail_expected("the host tier was closed");
  fail_everything_queued("the host tier was closed");
  events_wake_.notify_all();
}

// Stripe by stripe of every layer, for blocks are handed out in ascending order.
void HostTier::prefault() {
  constexpr int64_t kStripeBytes = 2 << 20;  // a huge page
  const int64_t layer_bytes = config_.num_blocks * shape_.block_bytes();
  for (int64_t begin = 0; begin < layer_bytes; begin += kStripeBytes) {
    const int64_t bytes = std::min(kStripeBytes, layer_bytes - begin);
    for (int64_t layer = 0; layer < num_layers(); ++layer) {
      if (stop_prefault_) return;
      touch_pages(pool_block(layer, 0) + begin, bytes);
      bytes_prefaulted_ += bytes;
    }
  }
}

HostTier::Slot& HostTier::checked_slot(int64_t slot) {
  if (slot < 0 || slot >= config_.num_slots) refuse("slot must be in [0, ", config_.num_slots, "), got ", slot);
  return slots_[static_cast<size_t>(slot)];
}

void HostTier::begin_token(int64_t slot, int64_t epoch, int64_t position, const int64_t* block_ids,
                           int64_t num_blocks) {
  if (epoch < 0) refuse("epoch must be >= 0, got ", epoch);
  if (position < 0) refuse("position must be >= 0, got ", position);
  const int64_t needed = position / config_.block_size + 1;
  if (num_blocks < needed) {
    refuse("position ", position, " needs ", needed, " blocks of ", config_.block_size, " tokens, got ", num_blocks);
  }
  for (int64_t i = 0; i < num_blocks; ++i) {
    if (block_ids[i] < 0 || block_ids[i] >= config_.num_blocks) {
      refuse("host block ids must be in [0, ", config_.num_blocks, "), got ", block_ids[i]);
    }
  }
  Lock lock(mutex_);
  Slot& state = checked_slot(slot);
  if (state.in_flight) refuse("slot ", slot, " has a task in flight: poll its event before the next token begins");
  state.bound = true;
  state.epoch = epoch;
  state.position = position;
  state.block_table.assign(block_ids, block_ids + num_blocks);
}

void HostTier::check_layer(int64_t layer) const {
  if (layer < 0 || layer >= num_layers()) refuse("layer must be in [0, ", num_layers(), "), got ", layer);
}

// Whether a task may begin in each of these slots, -1 left out.
void HostTier::check_free(const int64_t* slots, int64_t num_seats) {
  if (closing_) refuse("the host tier is closed");
  ++num_calls_;
  for (int64_t i = 0; i < num_seats; ++i) {
    if (slots[i] == -1) continue;
    Slot& task = checked_slot(slots[i]);
    if (!task.bound) refuse("slot ", slots[i], " holds no token: call begin_token first");
    if (task.in_flight) refuse("slot ", slots[i], " has a task in flight: poll its event before the next one begins");
    if (task.named_in == num_calls_) refuse("slot ", slots[i], " sits in two seats");
    task.named_in = num_calls_;
  }
}

// The slot has a task from here on; it is queued once its rows are there.
void HostTier::claim(int64_t slot, int64_t layer, const Rows& rows) {
  Slot& task = slots_[static_cast<size_t>(slot)];
  const int64_t window = config_.layers[static_cast<size_t>(layer)].window;
  task.in_flight = true;
  task.cancelled = task.failed = false;
  task.message.clear();
  task.rows = rows;
  task.layer = layer;
  const int64_t lowest = window > 0 ? std::max<int64_t>(0, task.position - window + 1) : 0;
  task.piece_tokens = decode_piece_tokens(task.position + 1);
  task.begin = lowest / task.piece_tokens * task.piece_tokens;  // cpu_attention cuts here too, so they agree exactly
  task.num_pieces = task.next_piece = task.num_running = 0;
  ++stats_.tasks_in_hand;
}

// Its rows are there.
void HostTier::enqueue(int64_t slot) {
  Slot& task = slots_[static_cast<size_t>(slot)];
  if (closing_ || stats_.threads_alive == 0) fail_task(task, slot, "no host thread is alive");
  if (task.cancelled || task.failed) {
    publish_task(task, slot);
    return;
  }
  task.num_pieces = (task.position - task.begin) / task.piece_tokens + 1;
  num_queued_pieces_ += task.num_pieces;
  tasks_.push_back(slot);
}

void HostTier::submit(int64_t layer, const int64_t* slots, int64_t num_seats, const TokenRow* q, const TokenRow* k,
                      const TokenRow* v) {
  check_layer(layer);
  {
    Lock lock(mutex_);
    check_free(slots, num_seats);
    for (int64_t i = 0; i < num_seats; ++i) {
      if (slots[i] != -1) claim(slots[i], layer, own_rows(slots[i]));
    }
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
  for (int64_t i = 0; i < num_seats; ++i) {
    if (slots[i] == -1) continue;
    copy(q_row(slots[i]), q[i], config_.num_heads);
    copy(k_row(slots[i]), k[i], config_.num_kv_heads);
    copy(v_row(slots[i]), v[i], config_.num_kv_heads);
  }
  Called called;
  Lock lock(mutex_);
  for (int64_t i = 0; i < num_seats; ++i) {
    if (slots[i] != -1) enqueue(slots[i]);
  }
  call_workers(called);
  lock.unlock();
  notify(called);
}

void HostTier::expect(int64_t step, const int64_t* layers, const int64_t* slots, int64_t num_rows) {
  if (config_.mailbox == nullptr) refuse("the host tier has no mailbox: make it with mailbox=True");
  if (step < 1) refuse("step must be >= 1 (a flag is 0 at the start), got ", step);
  for (int64_t i = 0; i < num_rows; ++i) {
    if (slots[i] != -1) check_layer(layers[i]);
  }
  Lock lock(mutex_);
  check_free(slots, num_rows);
  for (int64_t i = 0; i < num_rows; ++i) {
    if (slots[i] == -1) continue;
    // Its flag may still say `step` from then.
    const int64_t last = slots_[static_cast<size_t>(slots[i])].last_step;
    if (step <= last) refuse("slot ", slots[i], " was expected in step ", last, " before: steps rise, got ", step);
  }
  for (int64_t i = 0; i < num_rows; ++i) {
    if (slots[i] == -1) continue;
    claim(slots[i], layers[i], mailbox_rows(slots[i]));
    slots_[static_cast<size_t>(slots[i])].last_step = step;
    expected_.push_back({slots[i], layers[i], step});
  }
  if (expected_.empty()) return;
  watcher_called_ = true;
  lock.unlock();
  watcher_wake_.notify_one();
}

bool HostTier::cancel(int64_t slot) {
  Lock lock(mutex_);
  Slot& task = checked_slot(slot);
  task.bound = false;
  if (!task.in_flight) return false;
  task.cancelled = true;
  const bool was_queued = task.next_piece < task.num_pieces;
  withdraw(task, slot);
  if (was_queued && task.num_running == 0) publish_task(task, slot);
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
  check("pool", spec.pool_ids, config_.num_blocks);
  auto move = std::make_unique<Move>();
  move->num_units = num_layers() * static_cast<int64_t>(spec.pool_ids.size());
  move->units_per_piece = std::max<int64_t>(1, kMovePieceBytes / (2 * config_.block_size * kv_bytes_));
  move->spec = std::move(spec);
  Called called;
  Lock lock(mutex_);
  if (closing_) refuse("the host tier is closed");
  Move& queued = *move;
  live_moves_.push_back(std::move(move));
  if (stats_.threads_alive == 0) {
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
