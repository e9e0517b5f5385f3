// The host tier's beginning and end: what it accepts, its rows' memory, its threads.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "host_tier.h"
#include "host_tier_memory.h"
#include "host_tier_refuse.h"

namespace omniserve {
namespace {

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

constexpr double kForever_s = 1e9;

}  // namespace

HostTier::HostTier(HostTierConfig config)
    : config_(std::move(config)),
      shape_{config_.num_kv_heads, config_.block_size, config_.head_size, config_.pool_dtype, config_.dtype,
             config_.i8_caches ? DType::i8 : config_.dtype},
      head_bytes_(config_.head_size * dtype_bytes(config_.dtype)),
      q_bytes_(config_.num_heads * head_bytes_),
      kv_bytes_(config_.num_kv_heads * head_bytes_),
      token_bytes_((shape_.block_bytes() + 4 * shape_.block_scales()) / std::max<int64_t>(1, config_.block_size)),
      slot_stride_(round_up(config_.max_rows * q_bytes_) + 2 * round_up(config_.max_rows * kv_bytes_)) {
  for (int64_t size : {config_.num_blocks, config_.block_size, config_.num_heads, config_.num_kv_heads,
                       config_.head_size, config_.num_slots, static_cast<int64_t>(config_.num_threads),
                       static_cast<int64_t>(config_.layers.size())}) {
    if (size < 1) refuse("every size of a host tier must be >= 1, got ", size);
  }
  if (config_.max_rows < 1 || config_.max_rows > kMaxTaskRows) {
    refuse("max_rows must be in [1, ", kMaxTaskRows, "], got ", config_.max_rows);
  }
  if (config_.num_heads % config_.num_kv_heads != 0) {
    refuse("num_heads must be a multiple of num_kv_heads, got ", config_.num_heads, " and ", config_.num_kv_heads);
  }
  if (config_.dtype == DType::i8 || (config_.pool_dtype != config_.dtype && config_.pool_dtype != DType::i8)) {
    refuse("a host pool holds the rows' dtype or i8");
  }
  if (config_.i8_caches && config_.pool_dtype != DType::i8) refuse("caches in i8 need a host pool in i8");
  if ((config_.pool_dtype == DType::i8) != (config_.scales != nullptr)) {
    refuse("an i8 host pool, and no other, has scales");
  }
  if ((config_.mailbox != nullptr) != (config_.flags != nullptr)) {
    refuse("a mailbox needs flags, and nothing else does");
  }
  if (config_.mailbox != nullptr && (config_.skips == nullptr || config_.result_flags == nullptr)) {
    refuse("a mailbox needs skip flags and result flags");
  }
  if (config_.mailbox != nullptr && num_layers() > kMaxResultLayer) {
    refuse("a host tier with a mailbox has at most ", kMaxResultLayer, " layers, got ", num_layers());
  }
  if (!(config_.mailbox_spin_s >= 0) || !(config_.mailbox_sleep_s >= 0)) {
    refuse("mailbox_spin_s and mailbox_sleep_s must be >= 0, got ", config_.mailbox_spin_s, " and ",
           config_.mailbox_sleep_s);
  }
  rows_.reset(static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(config_.num_slots * slot_stride_))));
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
        worker.thread = start([this, &worker] { run(worker); });
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
      watcher_ = start([this] { watch(); });
      pthread_setname_np(watcher_.native_handle(), "omni-mailbox");
      set_policy(watcher_, SCHED_BATCH);
      if (!config_.cores.empty()) pin(watcher_, config_.cores);  // whichever of them is free: it must not hold one up
    }
    if (config_.prefault) {
      prefaulter_ = start([this] { prefault(); });
      pthread_setname_np(prefaulter_.native_handle(), "omni-prefault");
      set_policy(prefaulter_, SCHED_IDLE);  // takes cores that nobody wants: neither steps nor attention are to notice
    }
  } catch (...) {
    close(kForever_s);
    throw;
  }
}

HostTier::~HostTier() { close(kForever_s); }

int HostTier::close(double timeout_s) {
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
    for (const auto& [host, link] : links_) lose(*link, "the host tier was closed");
  }
  stop_prefault_ = true;
  if (prefaulter_.joinable()) {
    // Where all cores are busy, an idle thread hears of the end after a second or so; a user may not be allowed this.
    set_policy(prefaulter_, SCHED_OTHER);
  }
  {
    Lock lock(mutex_);
    threads_end_.wait_for(lock, to_duration(timeout_s), [this] { return num_threads_ == 0; });
    if (num_threads_ > 0) return num_threads_;
  }
  if (prefaulter_.joinable()) prefaulter_.join();
  for (auto& worker : workers_) {
    if (worker->thread.joinable()) worker->thread.join();
  }
  if (watcher_.joinable()) watcher_.join();
  for (const auto& [host, link] : links_) {
    for (std::thread& thread : link->threads) thread.join();
    link->threads.clear();
  }
  Lock lock(mutex_);
  fail_expected("the host tier was closed");
  fail_everything_queued("the host tier was closed");
  events_wake_.notify_all();
  return 0;
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

}  // namespace omniserve
