// Stress of the torch-free host tier with scalar kernels in place of the real ones, for the sanitizers: random requests
// grow by one or a few tokens at a time, of which some are taken back, are cancelled, moved out and back, under injected
// faults; rows come with submit or by the mailbox. Every result
// is compared to the bit with a serial run over the request's own history, and blocks and rows of the mailbox are
// poisoned by this thread as soon as the tier says that they are free: a thread that still touches them is a data race,
// and a copy that strays is seen in the poison. In f32 if the seed is even, in bf16 (with V in token pairs) if not. The
// same once more with all blocks on a host of the network: another tier here, at the other end of two sockets.
// Usage: stress [seed] [steps]
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include <sys/socket.h>

#include "host_server.h"
#include "host_tier.h"
#include "host_tier_memory.h"

namespace omniserve {

// A value of a cache in f32, or in bf16, which is all that these requests hold: nothing is ever rounded.
float get(DType dtype, const char* at) {
  uint32_t bits = 0;
  std::memcpy(dtype == DType::f32 ? reinterpret_cast<char*>(&bits) : reinterpret_cast<char*>(&bits) + 2, at,
              static_cast<size_t>(dtype_bytes(dtype)));
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

void put(DType dtype, char* at, float value) {
  const char* const bits = reinterpret_cast<const char*>(&value);
  std::memcpy(at, dtype == DType::f32 ? bits : bits + 2, static_cast<size_t>(dtype_bytes(dtype)));
}

// One row; there is one KV head, so the rows follow each other in acc, m and l, too.
void decode_row(const char* q, DType q_dtype, const PagedKV& kv, const int32_t* block_table, int64_t position,
                int64_t begin, int64_t end, const AttentionParams& params, float* acc, float* m, float* l) {
  const int64_t H = kv.head_size, S = kv.block_size, group = params.num_heads / kv.kv_heads;
  const int64_t bytes = dtype_bytes(kv.dtype);
  if (params.window > 0) begin = std::max(begin, position - params.window + 1);
  end = std::min(end, position + 1);
  for (int64_t n = 0; n < params.num_heads; ++n) {
    float* out = acc + n * H;
    std::memset(out, 0, static_cast<size_t>(H) * sizeof(float));
    m[n] = -std::numeric_limits<float>::infinity();
    l[n] = 0;
    for (int64_t p = begin; p < end; ++p) {
      const int64_t head = block_table[p / S] * kv.block_stride + n / group * kv.head_stride, t = p % S;
      auto v_at = [&](int64_t h) { return (kv.v_pairs ? (t / 2 * H + h) * 2 + t % 2 : t * H + h) * bytes; };
      float score = 0;
      for (int64_t h = 0; h < H; ++h) {
        score += get(q_dtype, q + (n * H + h) * bytes) * get(kv.dtype, kv.k + head + (t * H + h) * bytes);
      }
      score *= params.scale;
      const float highest = std::max(m[n], score), old = std::exp(m[n] - highest), weight = std::exp(score - highest);
      for (int64_t h = 0; h < H; ++h) out[h] = out[h] * old + weight * get(kv.dtype, kv.v + head + v_at(h));
      l[n] = l[n] * old + weight;
      m[n] = highest;
    }
  }
}

void decode_partial(const void* q, DType q_dtype, const PagedKV& kv, const int32_t* block_table, int64_t position,
                    int64_t num_rows, int64_t begin, int64_t end, const AttentionParams& params, float* acc, float* m,
                    float* l) {
  const int64_t heads = params.num_heads, row = heads * kv.head_size;
  for (int64_t i = 0; i < num_rows; ++i)
    decode_row(static_cast<const char*>(q) + i * row * dtype_bytes(q_dtype), q_dtype, kv, block_table, position + i,
               begin, end, params, acc + i * row, m + i * heads, l + i * heads);
}

void merge_partials(const float* acc, const float* m, const float* l, int64_t num_pieces, int64_t num_rows,
                    int64_t row_heads, int64_t, int64_t head_size, const float* sinks, DType dtype, void* out_ptr) {
  const int64_t num_heads = num_rows * row_heads;
  std::vector<float> out(static_cast<size_t>(num_heads * head_size));
  for (int64_t n = 0; n < num_heads; ++n) {
    float highest = -std::numeric_limits<float>::infinity(), sum = 0;
    for (int64_t i = 0; i < num_pieces; ++i) highest = std::max(highest, m[i * num_heads + n]);
    if (sinks) {
      highest = std::max(highest, sinks[n % row_heads]);
      sum = std::exp(sinks[n % row_heads] - highest);
    }
    for (int64_t h = 0; h < head_size; ++h) out[n * head_size + h] = 0;
    for (int64_t i = 0; i < num_pieces; ++i) {
      const float weight = std::exp(m[i * num_heads + n] - highest);
      sum += weight * l[i * num_heads + n];
      for (int64_t h = 0; h < head_size; ++h) {
        out[n * head_size + h] += weight * acc[(i * num_heads + n) * head_size + h];
      }
    }
    for (int64_t h = 0; h < head_size; ++h) out[n * head_size + h] /= sum;
  }
  char* const to = static_cast<char*>(out_ptr);
  for (size_t i = 0; i < out.size(); ++i) put(dtype, to + static_cast<int64_t>(i) * dtype_bytes(dtype), out[i]);
}

int64_t decode_piece_tokens(int64_t context_len) { return context_len <= 512 ? 64 : 256; }

}  // namespace omniserve

using namespace omniserve;

namespace {

constexpr int64_t kLayers = 2, kHeads = 2, kKVHeads = 1, kHeadSize = 4, kBlockSize = 16, kBlocks = 320, kSlots = 12,
                  kMaxRows = 4;
constexpr int64_t kPlane = kBlockSize * kHeadSize, kRows = kLayers * kBlocks * kKVHeads * 2 * kPlane;
constexpr char kPoison = 0x7e;  // 8e37 in every dtype

#define CHECK(condition, slot)                                                                      \
  do {                                                                                              \
    if (!(condition)) {                                                                             \
      std::fprintf(stderr, "line %d, slot %ld: not so: %s\n", __LINE__, long(slot), #condition);    \
      std::exit(1);                                                                                 \
    }                                                                                               \
  } while (0)

// One tier's KV and which of its blocks are free. Free blocks hold poison. Both tiers have their blocks in one array,
// the host's as it must be, the device's all of K before all of V.
struct Pool {
  const DType dtype;
  const bool is_host;
  const int64_t bytes = dtype_bytes(dtype);
  std::vector<char> data = std::vector<char>(static_cast<size_t>(kRows * bytes), kPoison);
  std::set<int64_t> free;

  Pool(DType dtype, bool is_host) : dtype(dtype), is_host(is_host) {
    for (int64_t block = 0; block < kBlocks; ++block) free.insert(block);
  }

  char* side(bool is_v) { return data.data() + (is_v ? kRows / 2 * bytes : 0); }

  std::vector<int64_t> allocate(std::mt19937_64& rng, size_t count) {
    std::vector<int64_t> ids;
    if (free.size() < count) return ids;
    while (ids.size() < count) {
      ids.push_back(*std::next(free.begin(), static_cast<std::ptrdiff_t>(rng() % free.size())));
      free.erase(ids.back());
    }
    return ids;
  }

  // Element h of K or V of the token at place t in a block.
  int64_t at(int64_t layer, int64_t block, bool is_v, int64_t t, int64_t h) const {
    const int64_t row = t * kHeadSize + h, pair = (t / 2 * kHeadSize + h) * 2 + t % 2, first = layer * kBlocks + block;
    if (!is_host) return ((is_v ? kLayers * kBlocks : 0) + first) * kPlane + row;
    return (first * 2 + is_v) * kPlane + (is_v && host_v_pairs(dtype, kBlockSize) ? pair : row);
  }

  template <typename Function>
  void for_each(int64_t block, Function function) {
    for (int64_t i = 0; i < kLayers * 2 * kPlane; ++i) {
      function(&data[at(i / (2 * kPlane), block, i / kPlane % 2, i / kHeadSize % kBlockSize, i % kHeadSize) * bytes]);
    }
  }

  void release(std::vector<int64_t>& blocks) {
    for (int64_t block : blocks) {
      for_each(block, [this](char* element) { std::memset(element, kPoison, static_cast<size_t>(bytes)); });
      free.insert(block);
    }
    blocks.clear();
  }

  // Element h of K or V of the token at position p.
  char* element(const std::vector<int64_t>& blocks, int64_t layer, bool is_v, int64_t p, int64_t h) {
    return &data[at(layer, blocks[p / kBlockSize], is_v, p % kBlockSize, h) * bytes];
  }

  void check_poison() {
    for (int64_t block : free) {
      for_each(block, [this](char* element) { CHECK(std::count(element, element + bytes, kPoison) == bytes, -1); });
    }
  }
};

// Writes rows into the mailbox as a device does: in order, some time later, each row before its flag. Some flags hold
// another step before, while the row is anything; but not in steps that may skip rows.
struct Device {
  struct Row {
    int64_t row, step;  // row slot * kMaxRows + i is that of token i
    std::vector<char> data;  // empty: the row is skipped
    bool may_skip;
    int64_t layer;
  };

  std::mt19937_64 rng;
  const int64_t row_bytes;
  std::vector<char> mailbox = std::vector<char>(static_cast<size_t>(kSlots * kMaxRows * row_bytes), kPoison);
  std::vector<int64_t> flags = std::vector<int64_t>(kSlots * kMaxRows, 0), skips = flags, result_flags = flags;
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<Row> queue;
  bool stop = false;
  std::thread thread{[this] { run(); }};

  Device(uint64_t seed, int64_t row_bytes) : rng(seed), row_bytes(row_bytes) {}

  ~Device() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      stop = true;
    }
    wake.notify_one();
    thread.join();
  }

  void send(std::vector<Row> rows) {
    std::lock_guard<std::mutex> lock(mutex);
    for (Row& row : rows) queue.push_back(std::move(row));
    wake.notify_one();
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      wake.wait(lock, [this] { return stop || !queue.empty(); });
      if (stop) return;
      const Row row = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      if (rng() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(rng() % 300));
      int64_t* const flag = row.data.empty() ? &skips[row.row] : &flags[row.row];
      if (!row.may_skip && rng() % 4 == 0) {
        __atomic_store_n(flag, row.step + (rng() % 2 ? 1 : -1), __ATOMIC_RELEASE);
        std::this_thread::sleep_for(std::chrono::microseconds(rng() % 200));
      }
      if (!row.data.empty()) std::memcpy(poison(row.row), row.data.data(), row.data.size());
      __atomic_store_n(flag, row.step, __ATOMIC_RELEASE);
      lock.lock();
    }
  }

  char* poison(int64_t row) {
    char* const data = &mailbox[row * row_bytes];
    std::fill_n(data, row_bytes, kPoison);
    return data;
  }
};

struct Request {
  enum State { absent, ready, attending, dying, moving_out, away, moving_in } state = absent;
  int64_t epoch = 0, position = 0, num_rows = 1, layer = 0;
  std::vector<int64_t> blocks, device_blocks;
  std::vector<char> rows[kLayers][2];  // the history of K and V, row after row
  std::vector<char> expected;
  bool by_mailbox = false;
  bool was_skipped = false;  // a row of it is expected, for all that is known
};

// A host of the network: attends over a pool for whoever is at the other ends of its connections.
struct Far {
  std::vector<char> results;
  HostTier tier;
  int ends[2];  // the engine's
  std::thread server;

  Far(HostTierConfig config, size_t result_bytes) : results(result_bytes, kPoison), tier(here(config, results)) {
    int rows[2], blocks[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, rows) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, blocks) == 0, -1);
    ends[0] = rows[0];
    ends[1] = blocks[0];
    server = std::thread([this, rows = rows[1], blocks = blocks[1]] { HostServer(tier, rows, blocks, 60).serve(); });
  }

  static HostTierConfig here(HostTierConfig config, std::vector<char>& results) {
    config.results = results.data();
    return config;
  }

  // Once the engine is gone.
  void end() {
    server.join();
    CHECK(tier.close(60) == 0, -1);
  }

  ~Far() {
    if (server.joinable()) end();
  }
};

struct Stress {
  std::mt19937_64 rng;
  const DType dtype;
  const int64_t bytes = dtype_bytes(dtype);
  Pool host{dtype, true}, device{dtype, false};
  std::vector<char> results = std::vector<char>(kSlots * kMaxRows * kHeads * kHeadSize * bytes, kPoison);
  std::vector<AttentionParams> layers{{kHeads, 0.5f, 0, 0.f}, {kHeads, 0.5f, 300, 0.f}};
  std::vector<Request> requests = std::vector<Request>(kSlots);
  std::map<int64_t, int64_t> moves;  // id -> slot
  int64_t next_move = 0, done = 0, failed = 0, cancelled = 0, moved = 0, sent = 0, skipped = 0, num_steps = 0;
  bool closed = false;
  Device gpu;
  std::vector<char> no_pool = std::vector<char>(static_cast<size_t>(kLayers * 2 * kPlane * bytes));
  std::unique_ptr<Far> far;
  HostTier tier;

  Stress(uint64_t seed, int num_threads, DType dtype, bool has_far)
      : rng(seed),
        dtype(dtype),
        gpu(seed, (kHeads + 2 * kKVHeads) * kHeadSize * bytes),
        far(has_far ? new Far({kBlocks, kBlockSize, kHeads, kKVHeads, kHeadSize, kSlots, dtype, dtype, layers,
                               host.data.data(), nullptr, nullptr, num_threads, {}, true, nullptr, nullptr, nullptr,
                               nullptr, 0, 0, kMaxRows},
                              results.size())
                    : nullptr),
        tier({has_far ? 1 : kBlocks, kBlockSize, kHeads, kKVHeads, kHeadSize, kSlots, dtype, dtype, layers,
              has_far ? no_pool.data() : host.data.data(), nullptr, results.data(), num_threads, {}, true,
              gpu.mailbox.data(), gpu.flags.data(), gpu.skips.data(), gpu.result_flags.data(), 50e-6, 20e-6, kMaxRows}) {
    if (far) tier.connect(1, far->ends[0], far->ends[1], kBlocks, 60);
  }

  // Whose threads attend.
  HostTier& worker() { return far ? far->tier : tier; }

  std::vector<int64_t> ids_of(std::vector<int64_t> blocks) const {
    if (far) {
      for (int64_t& block : blocks) block += kHostBlocks;
    }
    return blocks;
  }

  int64_t below(int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(n)); }

  std::vector<char> random_row(int64_t heads) {
    std::vector<char> row(static_cast<size_t>(heads * kHeadSize * bytes));
    for (int64_t i = 0; i < heads * kHeadSize; ++i) {
      put(dtype, &row[i * bytes], static_cast<float>(below(255) - 127) / 128);
    }
    return row;
  }

  void start(int64_t slot) {
    Request& request = requests[slot];
    const int64_t position = below(3) == 0 ? below(1400) : below(60);
    request.blocks = host.allocate(rng, static_cast<size_t>(position / kBlockSize + 1));
    if (request.blocks.empty()) return;
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      for (bool is_v : {false, true}) {
        std::vector<char>& rows = request.rows[layer][is_v];
        rows.clear();
        for (int64_t p = 0; p < position; ++p) {
          const std::vector<char> row = random_row(kKVHeads);
          rows.insert(rows.end(), row.begin(), row.end());
          for (int64_t h = 0; h < kHeadSize; ++h) {
            std::copy_n(&row[h * bytes], bytes, host.element(request.blocks, layer, is_v, p, h));
          }
        }
      }
    }
    request.position = position;
    begin(slot);
  }

  void begin(int64_t slot) {
    Request& request = requests[slot];
    request.state = Request::ready;
    request.layer = 0;
    ++request.epoch;
    const int64_t wanted = below(2) ? 1 : 1 + below(kMaxRows);
    if (static_cast<int64_t>(request.blocks.size()) * kBlockSize < request.position + wanted) {
      for (int64_t block : host.allocate(rng, 1)) request.blocks.push_back(block);
    }
    const int64_t room = static_cast<int64_t>(request.blocks.size()) * kBlockSize - request.position;
    request.num_rows = std::min(wanted, room);
    const std::vector<int64_t> ids = ids_of(request.blocks);
    tier.begin_token(slot, request.epoch, request.position, ids.data(), static_cast<int64_t>(ids.size()),
                     request.num_rows);
  }

  void drop(int64_t slot) {
    host.release(requests[slot].blocks);
    device.release(requests[slot].device_blocks);
    requests[slot].state = Request::absent;
  }

  struct Expected {
    std::vector<int64_t> layers, slots, widths;
  };

  void submit(int64_t layer, bool may_skip, Expected& expected, std::vector<Device::Row>& sent_rows) {
    const bool by_mailbox = below(2);
    std::vector<int64_t> slots{-1}, seats;
    for (int64_t slot = 0; slot < kSlots; ++slot) {
      const Request& request = requests[slot];
      const bool can_be_sent =
          request.state == Request::ready && (!request.was_skipped || (by_mailbox && may_skip));
      if (can_be_sent && request.layer == layer && below(2)) slots.push_back(slot);
    }
    std::vector<std::vector<char>> rows;
    std::vector<TokenRow> q, k, v;
    auto add = [this, &rows](std::vector<TokenRow>& to, int64_t heads) {
      rows.push_back(random_row(heads));
      to.push_back({rows.back().data(), kHeadSize * bytes});
      return rows.back();
    };
    for (int64_t slot : slots) {
      std::vector<char> parts[3];  // q, k, v of all its rows
      const bool is_skipped = slot != -1 && by_mailbox && may_skip && layer > 0 && below(3) == 0;
      if (slot != -1 && by_mailbox && !is_skipped && below(4) == 0) {
        requests[slot].num_rows = 1 + below(requests[slot].num_rows);  // the others are left out from this layer on
      }
      const int64_t num_rows = slot == -1 ? 1 : requests[slot].num_rows;
      for (int64_t i = 0; i < num_rows; ++i) {
        seats.push_back(slot);
        const std::vector<char> row[3] = {add(q, kHeads), add(k, kKVHeads), add(v, kKVHeads)};
        for (int part = 0; part < 3; ++part) parts[part].insert(parts[part].end(), row[part].begin(), row[part].end());
      }
      if (slot == -1) continue;
      Request& request = requests[slot];
      if (by_mailbox) {
        expected.layers.push_back(layer);
        expected.slots.push_back(slot);
        expected.widths.push_back(num_rows);
      }
      auto send = [&](Device::Row row) {
        auto is_here = [layer](const Device::Row& other) { return other.layer == layer; };
        const int64_t place = below(1 + std::count_if(sent_rows.begin(), sent_rows.end(), is_here));
        sent_rows.insert(sent_rows.end() - place, std::move(row));
      };
      if (is_skipped) {
        request.was_skipped = true;
        ++skipped;
        send({slot * kMaxRows, num_steps, {}, may_skip, layer});
        continue;
      }
      request.state = Request::attending;
      for (int part : {0, 1})
        request.rows[layer][part].insert(request.rows[layer][part].end(), parts[part + 1].begin(),
                                         parts[part + 1].end());
      request.expected = serial(layer, request, parts[0]);
      request.by_mailbox = by_mailbox;
      if (!by_mailbox) continue;
      for (int64_t i = 0; i < num_rows; ++i) {
        Device::Row row{slot * kMaxRows + i, num_steps, {}, may_skip, layer};
        for (const std::vector<char>& part : parts) {
          const auto size = static_cast<std::ptrdiff_t>(part.size()) / num_rows;
          row.data.insert(row.data.end(), part.begin() + i * size, part.begin() + (i + 1) * size);
        }
        send(std::move(row));
      }
      ++sent;
    }
    if (by_mailbox) return;
    tier.submit(layer, seats.data(), static_cast<int64_t>(seats.size()), q.data(), k.data(), v.data());
    for (auto& row : rows) std::fill(row.begin(), row.end(), kPoison);  // the tier has its own copy by now
  }

  // The history as one long block.
  std::vector<char> serial(int64_t layer, const Request& request, const std::vector<char>& q) const {
    const int64_t rows_in_hand = request.num_rows, end = request.position + rows_in_hand;
    const int64_t size = decode_piece_tokens(request.position + 1);
    const int64_t first_piece = first_key(request.position, layers[layer]) / size;
    const int64_t pieces = (end - 1) / size + 1 - first_piece, heads = rows_in_hand * kHeads;
    const std::vector<char>(&rows)[2] = request.rows[layer];
    const PagedKV kv = device_layout(rows[0].data(), rows[1].data(), 1, kKVHeads, end, kHeadSize, dtype);
    const int32_t table[] = {0};
    std::vector<float> acc(pieces * heads * kHeadSize), m(pieces * heads), l(pieces * heads);
    std::vector<char> out(heads * kHeadSize * bytes);
    for (int64_t i = 0; i < pieces; ++i) {
      const int64_t begin = (first_piece + i) * size;
      decode_partial(q.data(), dtype, kv, table, request.position, rows_in_hand, begin, std::min(begin + size, end),
                     layers[layer], &acc[i * heads * kHeadSize], &m[i * heads], &l[i * heads]);
    }
    merge_partials(acc.data(), m.data(), l.data(), pieces, rows_in_hand, kHeads, kKVHeads, kHeadSize,
                   layers[layer].sinks, dtype, out.data());
    return out;
  }

  void move(int64_t slot, bool to_host) {
    Request& request = requests[slot];
    Pool& to = to_host ? host : device;
    const std::vector<int64_t>& from_ids = to_host ? request.device_blocks : request.blocks;
    std::vector<int64_t>& to_ids = to_host ? request.blocks : request.device_blocks;
    to_ids = to.allocate(rng, from_ids.size());
    if (to_ids.empty()) return;
    request.state = to_host ? Request::moving_in : Request::moving_out;
    moves[next_move] = slot;
    tier.start_move({next_move++, to_host, false, device.side(false), device.side(true), kBlocks, request.device_blocks,
                     ids_of(request.blocks)});
  }

  void finish_move(const HostEvent& event) {
    CHECK(moves.count(event.move_id) == 1, event.move_id);
    const int64_t slot = moves[event.move_id];
    moves.erase(event.move_id);
    Request& request = requests[slot];
    if (event.kind == EventKind::move_failed) {
      ++failed;
      return drop(slot);
    }
    ++moved;
    const bool out = request.state == Request::moving_out;
    Pool& to = out ? device : host;
    for (int64_t i = 0; i < kLayers * 2 * request.position * kHeadSize; ++i) {
      const int64_t h = i % kHeadSize, p = i / kHeadSize % request.position, side = i / kHeadSize / request.position;
      const char* const got = to.element(out ? request.device_blocks : request.blocks, side / 2, side % 2, p, h);
      CHECK(std::memcmp(got, &request.rows[side / 2][side % 2][(p * kHeadSize + h) * bytes], bytes) == 0, slot);
    }
    if (out) {
      host.release(request.blocks);
      request.state = Request::away;
    } else {
      device.release(request.device_blocks);
      begin(slot);
    }
  }

  void finish_task(const HostEvent& event) {
    Request& request = requests[event.slot];
    request.was_skipped = false;
    for (int64_t i = 0; request.by_mailbox && !closed && i < kMaxRows; ++i) {
      gpu.poison(event.slot * kMaxRows + i);  // nobody uses it any more
    }
    CHECK(event.epoch == request.epoch && event.position == request.position, event.slot);
    if (request.state == Request::dying) {
      ++cancelled;
      CHECK(event.kind == EventKind::cancelled, event.slot);
      return drop(event.slot);
    }
    if (closed && request.state == Request::ready) return drop(event.slot);  // it was expected, for all that is known
    CHECK(request.state == Request::attending && event.layer == request.layer, event.slot);
    if (event.kind == EventKind::attention_failed) {
      ++failed;
      return drop(event.slot);
    }
    ++done;
    CHECK(event.kind == EventKind::attention_done, event.slot);
    const int64_t flag = __atomic_load_n(&gpu.result_flags[event.slot * kMaxRows], __ATOMIC_ACQUIRE);
    CHECK(flag == result_flag(event.epoch, event.layer, event.position), event.slot);
    const char* got = &results[event.slot * kMaxRows * kHeads * kHeadSize * bytes];
    CHECK(std::memcmp(got, request.expected.data(), request.expected.size()) == 0, event.slot);
    request.state = Request::ready;
    if (++request.layer < kLayers) return;
    request.position += 1 + below(request.num_rows);  // the rest is taken back
    for (auto& layer : request.rows)
      for (auto& rows : layer) rows.resize(static_cast<size_t>(request.position * kKVHeads * kHeadSize * bytes));
    if (request.position / kBlockSize == static_cast<int64_t>(request.blocks.size())) {
      const std::vector<int64_t> more = host.allocate(rng, 1);
      if (more.empty()) return drop(event.slot);
      request.blocks.push_back(more[0]);
    }
    begin(event.slot);
  }

  void poll() {
    for (const HostEvent& event : tier.poll()) {
      if (event.kind == EventKind::host_lost) {  // without threads it is of no use
        CHECK(far && far->tier.stats().threads_alive == 0, -1);
        continue;
      }
      event.slot >= 0 ? finish_task(event) : finish_move(event);
    }
  }

  void step() {
    for (int64_t slot = 0; slot < kSlots; ++slot) {
      Request& request = requests[slot];
      const bool at_boundary = request.state == Request::ready && request.layer == 0;
      if (request.state == Request::absent && below(3) == 0) {
        start(slot);
      } else if ((request.state == Request::attending || request.was_skipped) && request.state != Request::dying &&
                 below(12) == 0) {
        CHECK(tier.cancel(slot), slot);
        request.state = Request::dying;
      } else if (at_boundary && request.position > 0 && below(8) == 0) {
        move(slot, false);
      } else if (request.state == Request::away && below(3) == 0) {
        move(slot, true);
      }
    }
    ++num_steps;
    Expected expected;
    std::vector<Device::Row> rows;
    const bool may_skip = below(2);
    for (int64_t layer = 0; layer < kLayers; ++layer) submit(layer, may_skip, expected, rows);
    const bool sends_first = below(2);
    if (sends_first) gpu.send(rows);
    tier.expect(num_steps, expected.layers.data(), expected.slots.data(), expected.widths.data(),
                static_cast<int64_t>(expected.slots.size()), may_skip);
    if (!sends_first) gpu.send(std::move(rows));
    tier.wait(0.001);
    poll();
  }

  bool is_waiting() const {
    if (!moves.empty()) return true;
    for (const Request& request : requests) {
      if (request.state == Request::attending || request.state == Request::dying) return true;
    }
    return false;
  }

  void drain() {
    poll();  // close() fails what was expected, and a row that was skipped unseen is not waited for
    while (is_waiting()) {
      tier.wait(1);
      poll();
    }
    HostTierStats stats = tier.stats();
    while (stats.tasks_in_hand > 0) {  // what was skipped is dropped without an event
      std::this_thread::yield();
      stats = tier.stats();
    }
    CHECK(stats.tasks_in_hand == 0 && stats.moves_in_hand == 0 && tier.poll().empty(), -1);
    host.check_poison();
    device.check_poison();
  }
};

void try_all(uint64_t seed, int steps, bool has_far) {
  const DType dtype = seed % 2 == 0 ? DType::f32 : DType::bf16;
  Stress run(seed, 3, dtype, has_far);
  std::atomic<bool> stop{false};
  std::thread watcher([&] {  // another thread may look on, and touch pages, for they keep their contents
    while (!stop) {
      touch_pages(run.host.data.data(), static_cast<int64_t>(run.host.data.size()));
      run.tier.stats();
      run.tier.wait(0.0005);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  for (int i = 0; i < steps; ++i) {
    if (i == steps / 4) run.worker().inject({0.0002, true, seed, 5, 0});
    if (i == steps / 2) run.worker().inject({0, true, seed, 5, 2});  // leaves one thread
    run.step();
    if (i % 50 == 0) run.drain();
  }
  run.drain();
  CHECK(run.worker().stats().threads_alive == 1, -1);
  while (run.worker().stats().bytes_prefaulted < static_cast<int64_t>(run.host.data.size())) std::this_thread::yield();
  CHECK(run.done > steps / 2 && run.failed > 0 && run.cancelled > 0 && run.moved > 0 && run.sent > steps / 4 &&
            run.skipped > steps / 40, -1);
  run.worker().inject({0, false, 0, 0, 1});  // the last one dies: from here on everything fails, once
  const int64_t failed = run.failed;
  for (int i = 0; i < 10; ++i) run.step();
  run.drain();
  CHECK(run.worker().stats().threads_alive == 0 && run.failed > failed, -1);
  stop = true;
  watcher.join();

  for (uint64_t i = 0; i < 20; ++i) {  // closed, or destroyed, with work in hand
    Stress brief(seed + i, 2, dtype, has_far);
    if (i % 2 == 0) brief.worker().inject({3600, false, 0, 0, 0});
    for (int j = 0; j < 4; ++j) brief.step();
    if (i % 3 == 0) continue;
    CHECK(brief.tier.close(60) == 0, -1);
    CHECK(brief.tier.close(60) == 0, -1);
    if (brief.far) brief.far->end();
    brief.closed = true;
    brief.drain();
  }
  std::printf("%s: %ld done, %ld failed, %ld cancelled, %ld moved, %ld by the mailbox, %ld skipped\n",
              has_far ? "network" : "here", long(run.done), long(run.failed), long(run.cancelled), long(run.moved), long(run.sent), long(run.skipped));
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
  const int steps = argc > 2 ? std::atoi(argv[2]) : 300;

  for (bool has_far : {false, true}) try_all(seed, steps, has_far);
  return 0;
}
