// What an engine and a CPU host on the network say to each other, once both have proven that they know the secret
// (omniserve/core/link.py): frames over two TCP connections. Rows and results go over one, blocks of KV over the
// other, so that no row waits behind a block. No torch header.
//
// A frame is a header and a body. The header has a checksum of both: TCP's own misses one error in 65536.
// Both ends have the same byte order and the same version, as they have told each other before.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace omniserve::wire {

enum class Kind : uint32_t {
  rows = 1,     // to the host: `count` tasks, each a Task, the new ids of its block table, q, k and v of its rows
  ping = 2,     // to the host, over the first connection, when there was nothing to say for a while
  results = 3,  // from the host: `count` results, each a Result and its rows, or a message if it failed
  pong = 4,     // from the host: a Load
  move = 5,     // to the host, over the second connection: a Move and the ids of its blocks
  blocks = 6,   // in the move's direction: Blocks, then K and V of each unit, [K, S, H] each
  stored = 7,   // from the host: a Move whose blocks are all there
  failure = 8,  // from the host: why it ends the session
};

struct Header {
  uint32_t magic;
  Kind kind;
  uint32_t checksum;  // of the header, with 0 in this place, and the body
  uint32_t count;
  uint64_t bytes;  // of the body
};

// A slot's next token, or several, at one layer. If the slot is bound to them now, its table comes with it: `kept` of the
// ids that the host has of it, then `num_new` others. Else `kept` is -1.
struct Task {
  int32_t slot, layer, num_rows, kept, num_new, padding;
  int64_t epoch, position;
};

struct Result {
  int32_t slot, layer, num_rows, message_bytes;  // it failed if there are no rows
  int64_t epoch, position;
};

struct Load {
  int64_t busy_ns, bytes_read, threads_alive, tasks_done;  // as in HostTierStats
};

struct Move {
  int64_t id;
  int64_t to_host;
  int64_t num_blocks;
};

// Units [first, first + count) of a move: layers x blocks, in this order. As long as a cache line: what follows is aligned.
struct Blocks {
  int64_t id, first, count, padding[5];
};
static_assert(sizeof(Blocks) == 64);

uint32_t checksum(uint32_t before, const void* data, size_t bytes);  // CRC-32C

struct Frame {
  Kind kind;
  uint32_t count;
  const char* data;
  size_t bytes;
};

// Reads a frame's body from its beginning to its end; std::runtime_error if it is too short.
class Reader {
 public:
  explicit Reader(const Frame& frame) : at_(frame.data), end_(frame.data + frame.bytes) {}
  const char* take(int64_t bytes);
  template <typename T>
  T take() {
    T value;
    copy(&value, sizeof(T));
    return value;
  }
  void copy(void* to, size_t bytes);
  size_t left() const { return static_cast<size_t>(end_ - at_); }
  void finish() const;  // std::runtime_error if something is left

 private:
  const char* at_;
  const char* end_;
};

constexpr double kTicks = 8;               // looks at the clock within the timeout; half of them ask the other end
constexpr int64_t kBlocksBytes = 1 << 20;  // of a frame of blocks, about

inline iovec part(const void* data, int64_t bytes) { return {const_cast<void*>(data), static_cast<size_t>(bytes)}; }

// One end of a connection, which it owns. One thread receives; another may send. Both throw std::runtime_error when the
// connection is gone, and receive() when what came is no frame.
class Connection {
 public:
  explicit Connection(int fd) : fd_(fd) {}
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void send(Kind kind, uint32_t count, std::vector<iovec>& body);

  // Wait for a frame, which stays valid until the next call. `tick` is called about every `tick_s` meanwhile; what it
  // throws ends the wait.
  Frame receive(double tick_s, const std::function<void()>& tick);

  void shut_down();  // both directions: whoever sends or receives throws

 private:
  void read(char* to, size_t bytes, double tick_s, const std::function<void()>& tick);

  struct FreeDeleter {
    void operator()(char* data) const;
  };

  const int fd_;
  std::unique_ptr<char, FreeDeleter> buffer_;
  size_t capacity_ = 0;
};

}  // namespace omniserve::wire
