// The host tier: CPU threads that compute decode attention over a paged KV pool in host memory, and copy KV blocks
// between the tiers, beside the device's steps. No torch header, no GIL: it can be stressed alone under sanitizers.
//
// A slot is one request's seat; it holds at most one task (one or a few consecutive tokens at one layer), so the input
// queue is bounded by the number of slots. A task is cut into pieces of decode_piece_tokens() keys, a cut that depends on
// its first token's position only: whichever threads take the pieces, the sum is formed in the same order and the result
// is the same to the bit. A task's tokens share its pieces: K and V are read once for all of them.
//
// A task's rows come with submit(), or by the mailbox, which carries one token: the device writes it, then the step's
// number as a flag, and a thread of the tier watches the flags of what expect() has named (host_tier_mailbox.cpp).
//
// A device that is given a whole step at once may be told to join a result that is not there yet. It looks at the slot's
// result flag as it reaches the layer. If the result is there, the row goes on and is sent at the next layer; if it is
// not, the device skips the row: it writes the step's number to the slot's skip flag, and what was expected is dropped.
//
// A block id names a host, too: blocks from kHostBlocks on are on CPU hosts on the network, so many ids for each. A slot
// that is bound to such blocks has its tasks computed there: its rows go to the host, and its results come back, beside
// the local threads (host_tier_links.cpp, host_tier_link_rows.cpp, host_tier_link_blocks.cpp). A host that is gone fails what it has in hand, and an event tells of it.
//
// Paper: omniserve 3.2.3 (input and output queue), 4 "The implementation of CPU Attention".
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "attention.h"
#include "host_kv.h"
#include "host_wire.h"

namespace omniserve {

constexpr int64_t kHostBlocks = int64_t{1} << 24;  // host h has the block ids from h * kHostBlocks on; this machine is 0
constexpr int64_t kMostHosts = 127;  // beside this machine; their ids fit an int32
constexpr int64_t kMaxTaskRows = 16;  // as many columns as an AMX tile has

struct HostTierConfig {
  int64_t num_blocks;
  int64_t block_size;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t num_slots;
  DType dtype;       // of the rows and the results
  DType pool_dtype;  // the same, or i8
  std::vector<AttentionParams> layers;  // their sinks and slopes outlive the tier
  void* pool;     // [L, num_blocks, K, 2, S, H], in the layout of host_layout()
  float* scales;  // [L, num_blocks, K, 2, S] for an i8 pool, else null
  void* results;  // [num_slots, max_rows, N*H]
  int num_threads;
  std::vector<int> cores;  // thread i is pinned to cores[i % size]; empty: not pinned
  bool i8_caches = false;  // the caches of moves are in i8, as the pool then is; else in dtype
  bool prefault;           // touch the pool's pages ahead of the work: a first touch runs at a tenth of a copy's speed
  // The mailbox; null: none. Whoever sends to a slot writes the rows of its tokens, and behind each its flag, the step's
  // number, with release order at system scope. Row slot * max_rows + i is that of token i.
  const char* mailbox = nullptr;   // [num_slots * max_rows, (N + 2 * K) * H]: q, k, v of a token
  const int64_t* flags = nullptr;  // [num_slots * max_rows], 0 at the start
  // Of the rows of first tokens in [num_slots * max_rows], 0 at the start:
  const int64_t* skips = nullptr;   // the step that last skipped the slot's rows, released
  int64_t* result_flags = nullptr;  // result_flag() of the slot's last result, released
  double mailbox_spin_s = 200e-6;  // so long after the last flag, or the last expect(), its thread looks without a rest
  double mailbox_sleep_s = 20e-6;  // and then sleeps so long between two looks
  int64_t max_rows = 1;  // tokens of a task, at most; up to kMaxTaskRows
};

enum class EventKind : int {
  attention_done = 0, attention_failed = 1, move_done = 2, move_failed = 3, cancelled = 4, host_lost = 5
};

struct HostEvent {
  EventKind kind;
  int64_t slot = -1;
  int64_t epoch = -1;
  int64_t layer = -1;
  int64_t position = -1;  // of the task's first token
  int64_t move_id = -1;
  int64_t host = -1;  // that is lost
  std::string message;
};

// Names a slot's result; never 0. The host writes it behind the result, and the device compares it with what it waits
// for. Positions are below kMaxResultPosition and layers below kMaxResultLayer; epochs are taken modulo 2^27.
constexpr int64_t kMaxResultPosition = int64_t{1} << 24;
constexpr int64_t kMaxResultLayer = (int64_t{1} << 12) - 1;
inline int64_t result_flag(int64_t epoch, int64_t layer, int64_t position) {
  return (epoch & ((int64_t{1} << 27) - 1)) << 36 | position << 12 | (layer + 1);
}

// Whole-block copies over all layers, between the pool and a cache, K and V apart, each layer as in device_layout().
struct BlockMove {
  int64_t move_id;
  bool to_host;
  bool reversed;  // the cache's blocks run from the right: see from_right() in attention.h
  char* k;        // only read if to_host
  char* v;
  int64_t num_blocks;
  std::vector<int64_t> cache_ids;
  std::vector<int64_t> pool_ids;
};

// What there is to tell of a CPU host on the network.
struct HostLinkStats {
  int64_t host;
  bool lost;
  int64_t tasks_in_hand;
  int64_t moves_in_hand;
  int64_t times_lost;      // of all sessions, like the counters that follow
  int64_t tasks_sent;
  int64_t bytes_sent;      // of rows
  int64_t bytes_received;  // of results
  int64_t bytes_moved;     // of blocks, both ways
  wire::Load load;         // as the host has told last
};

// Faults that tests ask for; a new set replaces the one before, and ends a delay that is under way.
struct Faults {
  double delay_s = 0;        // sleep before each attention task
  bool shuffle = false;      // take work and deliver events in random order
  uint64_t shuffle_seed = 0;
  int64_t fail_next = 0;     // so many attention tasks throw
  int64_t kill_threads = 0;  // so many threads exit with their next piece in hand
};

struct HostTierStats {
  int64_t tasks_done = 0;      // attention tasks that gave a result
  int64_t failures = 0;        // attention tasks and moves that failed (cancelled ones did not)
  int64_t threads_alive = 0;
  int64_t tasks_in_hand = 0;   // expected, queued or running
  int64_t moves_in_hand = 0;
  int64_t busy_ns = 0;         // summed over threads, waiting excluded
  int64_t kv_bytes_read = 0;   // by attention
  int64_t bytes_moved = 0;     // as they are in the cache: an i8 pool takes half of them or less
  int64_t bytes_prefaulted = 0;  // up to the pool's
};

// Every method may be called from any thread; those that check arguments throw std::invalid_argument.
class HostTier {
 public:
  explicit HostTier(HostTierConfig config);
  ~HostTier();
  HostTier(const HostTier&) = delete;
  HostTier& operator=(const HostTier&) = delete;

  const HostTierConfig& config() const { return config_; }

  // A slot is free if it has no task and no row of it is expected, or, with a mailbox, if nothing is left of its task but
  // a result that was not polled: the device has used it, and no event tells of it any more.

  // Bind a free slot to the `num_rows` tokens from `position` on. The block ids cover [0, position + num_rows). What the pool
  // holds at these positions and behind is overwritten or not read, so a later call may go back to a lower position.
  void begin_token(int64_t slot, int64_t epoch, int64_t position, const int64_t* block_ids, int64_t num_blocks,
                   int64_t num_rows = 1);

  // Queue one task per slot. A slot has a seat for each of its tokens, side by side in their order, or for the first of
  // them: the slot is then bound to these alone. -1 is an empty seat. Copies the rows before it returns; all seats or
  // none.
  void submit(int64_t layer, const int64_t* slots, int64_t num_seats, const TokenRow* q, const TokenRow* k,
              const TokenRow* v);

  // As submit(), for rows that come by the mailbox: the task of slots[i], at layers[i], is queued once the flags of its
  // first widths[i] tokens are `step`; the slot is then bound to these alone. Tasks are named in the order in which their
  // rows will be sent, as far as that is known: the order of looking.
  //
  // With `may_skip` the device may skip a task's rows, and a slot may have a task, or one that is expected already: its
  // rows come only if the device has used the result before. A task whose rows come takes the place of the slot's last
  // one, of which no event tells any more. Rows that are skipped leave it as it is.
  void expect(int64_t step, const int64_t* layers, const int64_t* slots, const int64_t* widths, int64_t num_tasks,
              bool may_skip = false);

  // Drop the slot's task and unbind the slot. True: one event is still to be polled, which comes when no thread touches
  // the slot or its blocks any more, nor a device the slot's row in the mailbox: what is expected is waited for. So is
  // it with an event that a task has failed. False: the slot was not bound, and there is none to wait for.
  bool cancel(int64_t slot);

  void start_move(BlockMove move);

  // Use a CPU host from now on, over two connections to it, which this closes in the end. It has the blocks
  // [host * kHostBlocks, host * kHostBlocks + num_blocks). It is lost when a connection ends, when it sends what it should
  // not, or nothing for `timeout_s`: all that it has in hand fails then, and what it is given later. A host that is lost
  // can be connected again.
  void connect(int64_t host, int rows_fd, int blocks_fd, int64_t num_blocks, double timeout_s);

  std::vector<HostLinkStats> link_stats();

  // Put a block's K and V, [K, S, H] each, into the pool, or get them out of it. Nobody else may use the block meanwhile.
  void pack(int64_t layer, int64_t block, const char* k, const char* v);
  void unpack(int64_t layer, int64_t block, char* k, char* v) const;
  int64_t cache_block_bytes() const { return shape_.cache_block_bytes(); }

  // Of the tokens that a slot is bound to.
  int64_t num_rows(int64_t slot);

  std::vector<HostEvent> poll();

  // Sleep until an event is pending, `timeout_s` is over, or nothing can come any more (closed). True: one is pending.
  bool wait(double timeout_s);

  void inject(const Faults& faults);
  HostTierStats stats();

  // Join the threads; what was queued or expected is reported failed. Returns 0, or the number of threads that had not
  // ended after `timeout_s`: then the tier and all its memory must stay, for they may go on. Can be called again.
  int close(double timeout_s);

 private:
  struct Scratch {
    std::unique_ptr<float[]> data;
    int64_t size = 0;
  };

  // A task's rows, q, k and v of all its tokens: the slot's own, or its one row of the mailbox.
  struct Rows {
    const char* q = nullptr;
    const char* k = nullptr;
    const char* v = nullptr;
  };

  struct Slot {
    // The binding.
    bool bound = false;
    int64_t epoch = -1;
    int64_t position = -1;  // of the first token
    int64_t num_rows = 1;
    std::vector<int32_t> block_table;  // of ids on its host
    int64_t host = 0;
    int64_t session = 0;  // of the host on the network, when it was bound
    bool told = false;  // the host on the network knows of the binding
    int64_t told_host = 0;
    std::vector<int32_t> told_table;  // what the host `told_host` has of it
    int64_t last_step = 0;   // that expect() named
    int64_t num_expected = 0;  // tasks whose flags have not been seen
    std::unique_ptr<HostEvent> held;  // failed or cancelled: the event comes when nothing is expected any more
    int64_t named_in = 0;    // the last call of submit() or expect() that named it
    // The task: in flight from submit() or its flag until poll() hands its event out, or the next row takes its place.
    bool in_flight = false;
    Rows rows;
    bool cancelled = false;  // until the slot is bound again
    bool failed = false;
    std::string message;
    int64_t layer = -1;
    int64_t piece_tokens = 1;
    int64_t begin = 0;        // piece i: keys [begin + i * piece_tokens, begin + (i + 1) * piece_tokens), up to end()
    int64_t num_pieces = 0;
    int64_t next_piece = 0;   // pieces [0, next_piece) were handed out
    int64_t num_running = 0;  // of those, still in a thread's hands
    bool awaited = false;     // the host on the network has it; its answer counts as one that runs
    Scratch scratch;

    int64_t end() const { return position + num_rows; }  // of the keys
  };

  struct Move {
    BlockMove spec;
    bool failed = false;
    std::string message;
    int64_t num_units = 0;  // layers x blocks, in this order
    int64_t next_unit = 0;
    int64_t units_per_piece = 1;
    int64_t num_running = 0;
    int64_t host = 0;
    int64_t id = 0;  // between here and the host on the network
    bool stored = false;  // all is where it should be
  };

  // A CPU host on the network, and the threads that talk to it.
  struct Link {
    Link(int64_t host_, int rows_fd, int blocks_fd, int64_t num_blocks_, double timeout_s_)
        : host(host_), num_blocks(num_blocks_), timeout_s(timeout_s_), rows(rows_fd), blocks(blocks_fd) {}

    const int64_t host;
    const int64_t num_blocks;
    const double timeout_s;
    int64_t session = 0;  // which of this tier's
    wire::Connection rows;
    wire::Connection blocks;
    bool lost = false;
    std::deque<int64_t> tasks;  // slots whose rows are to be sent
    std::deque<Move*> moves;
    bool wants_ping = false;
    std::condition_variable wake_rows;
    std::condition_variable wake_blocks;
    int64_t num_moves = 0;     // that have begun and not ended
    int64_t num_progressed = 0;  // counts what they sent and got
    HostLinkStats stats{};
    std::vector<std::thread> threads;
  };

  // What a thread has in hand: piece `piece` of a slot's task, or units [first, last) of a move.
  struct Piece {
    Slot* task = nullptr;
    int64_t slot = -1;
    int64_t piece = 0;
    Move* move = nullptr;
    int64_t first_unit = 0;
    int64_t last_unit = 0;
    bool starts_task = false;
    bool must_throw = false;
    bool must_die = false;
  };

  // A task whose flags have not been seen.
  struct Expected {
    int64_t slot;
    int64_t layer;
    int64_t step;
    int64_t num_rows;
    bool may_skip;
  };
  enum class Arrival { waited_for, sent, skipped };

  struct Worker {
    std::condition_variable wake;
    bool signalled = false;
    std::thread thread;
  };

  // Sleeping workers chosen to be woken; notified once the lock is free, or they would wake only to wait for it.
  using Called = std::vector<Worker*>;
  using Lock = std::unique_lock<std::mutex>;

  template <typename Body>
  std::thread start(Body body);
  void run(Worker& self);
  Piece take();
  void take_attention(Piece& piece);
  void take_move(Piece& piece);
  void execute(const Piece& piece);
  void attend(const Piece& piece);
  void merge(const Slot& task, int64_t slot);
  void copy_blocks(const Piece& piece);
  void finish(const Piece& piece, std::string error, Lock& lock);
  void withdraw(Slot& task, int64_t slot);
  void fail_task(Slot& task, int64_t slot, std::string message);
  void fail_move(Move& move, std::string message);
  void publish_task(Slot& task, int64_t slot);
  HostEvent event_of(const Slot& task, int64_t slot) const;
  void deliver(Slot& task, HostEvent event);
  std::unique_ptr<HostEvent> take_back(int64_t slot);
  bool is_free(Slot& task, int64_t slot);
  void publish_move(Move& move);
  void push_event(HostEvent event);

  int64_t host_of(const int64_t* block_ids, int64_t num_blocks) const;
  void send_rows(Link& link);
  void receive_results(Link& link);
  void take_results(Link& link, const wire::Frame& frame);
  void send_blocks(Link& link);
  void send_move(Link& link, Move& move);
  void receive_blocks(Link& link);
  void take_blocks(Link& link, const wire::Frame& frame);
  Move& move_of(Link& link, int64_t id);
  void lose(Link& link, const std::string& why);
  void release_task(int64_t slot);
  void release_move(Move& move);
  void fail_everything_queued(const std::string& message);
  void call_workers(Called& called, int most = 1);
  static void notify(const Called& called);
  size_t pick(size_t size);
  bool has_work() const { return !tasks_.empty() || !moves_.empty(); }
  void prefault();
  void watch();
  Arrival look_at(const Expected& task) const;
  void take_flagged(bool all);
  void copy_from_mailbox(const Expected& task);
  void begin_expected(const Expected& row);
  void drop_expected(int64_t slot);
  void fail_expected(const std::string& message);
  Slot& checked_slot(int64_t slot);
  void check_layer(int64_t layer) const;
  void check_free(const int64_t* slots, int64_t num_slots, bool may_be_busy = false);
  void claim(int64_t slot, int64_t layer, const Rows& rows);
  void enqueue(int64_t slot);

  struct FreeDeleter {
    void operator()(char* data) const { std::free(data); }
  };

  char* q_rows(int64_t slot) const { return rows_.get() + slot * slot_stride_; }
  char* k_rows(int64_t slot) const { return q_rows(slot) + round_up(config_.max_rows * q_bytes_); }
  char* v_rows(int64_t slot) const { return k_rows(slot) + round_up(config_.max_rows * kv_bytes_); }
  Rows own_rows(int64_t slot) const { return {q_rows(slot), k_rows(slot), v_rows(slot)}; }
  Rows mailbox_row(int64_t slot, int64_t token) const {
    const char* const q = config_.mailbox + (slot * config_.max_rows + token) * (q_bytes_ + 2 * kv_bytes_);
    return {q, q + q_bytes_, q + q_bytes_ + kv_bytes_};
  }
  // A row of the mailbox is read where it is: the slot's next one is sent only after the result was used. Several are
  // copied, as attention reads the q of all tokens side by side.
  Rows rows_of(const Expected& task) const {
    return task.num_rows == 1 ? mailbox_row(task.slot, 0) : own_rows(task.slot);
  }
  static std::chrono::nanoseconds to_duration(double seconds) {
    constexpr double kLongest_s = 1e9;  // fits a nanosecond count, with room for today's clock
    return std::chrono::nanoseconds(seconds > 0 ? static_cast<int64_t>(std::min(seconds, kLongest_s) * 1e9) : 0);
  }
  static int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }  // to a cache line

  char* q_result(int64_t slot) const {
    return static_cast<char*>(config_.results) + slot * config_.max_rows * q_bytes_;
  }
  char* pool_block(int64_t layer, int64_t block) const {
    return static_cast<char*>(config_.pool) + (layer * config_.num_blocks + block) * shape_.block_bytes();
  }
  float* block_scales(int64_t layer, int64_t block) const {
    return config_.scales + (layer * config_.num_blocks + block) * shape_.block_scales();
  }
  int64_t num_layers() const { return static_cast<int64_t>(config_.layers.size()); }

  const HostTierConfig config_;
  const HostBlockShape shape_;
  const int64_t head_bytes_;
  const int64_t q_bytes_;   // one query row, N*H
  const int64_t kv_bytes_;  // one key row, K*H
  const int64_t token_bytes_;  // K, V and scales of a token in the pool
  const int64_t slot_stride_;
  std::unique_ptr<char, FreeDeleter> rows_;  // per slot: q, k, v of submit(), max_rows each
  std::vector<Slot> slots_;

  std::mutex mutex_;  // guards everything below, and the slots' and moves' bookkeeping
  std::deque<int64_t> tasks_;  // slots with pieces to hand out
  std::deque<Move*> moves_;    // moves with units to hand out
  int64_t num_queued_pieces_ = 0;
  std::vector<std::unique_ptr<Move>> live_moves_;
  std::vector<Scratch> free_scratch_;
  std::vector<Expected> expected_;  // what the watcher has not taken over yet
  std::condition_variable watcher_wake_;
  std::deque<HostEvent> events_;
  std::condition_variable events_wake_;
  int64_t num_waiters_ = 0;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<Worker*> idle_;  // a stack: the thread that fell asleep last has the warmest cache
  int64_t num_waking_ = 0;     // called, but not running yet
  int64_t num_calls_ = 0;      // of submit() and expect()
  bool closing_ = false;
  Faults faults_;
  int64_t faults_set_ = 0;  // calls of inject
  std::mt19937_64 rng_;
  HostTierStats stats_;
  int num_threads_ = 0;  // of every kind, that have not come to their end
  std::condition_variable threads_end_;
  std::mutex close_mutex_;  // serialises close()

  std::thread watcher_;
  std::vector<Expected> watched_;  // the watcher's alone while it lives; in the order in which it was expected
  std::vector<std::pair<Expected, Arrival>> flagged_;  // likewise: what this look found
  std::atomic<bool> watcher_called_{false};  // expected_ has something, or the tier closes

  std::map<int64_t, std::unique_ptr<Link>> links_;  // by host
  int64_t num_remote_moves_ = 0;
  int64_t num_sessions_ = 0;

  std::thread prefaulter_;
  std::atomic<bool> stop_prefault_{false};
  std::atomic<int64_t> bytes_prefaulted_{0};
};

// A thread that close() waits for.
template <typename Body>
std::thread HostTier::start(Body body) {
  Lock lock(mutex_);  // the thread comes to its end after this
  std::thread thread([this, body] {
    body();
    Lock end(mutex_);
    --num_threads_;
    threads_end_.notify_all();
  });
  ++num_threads_;
  return thread;
}

}  // namespace omniserve
