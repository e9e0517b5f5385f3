// What the host tier sends to a CPU host on the network over its second connection, and gets back: blocks of KV.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "host_tier.h"

namespace omniserve {

using wire::part;

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
  const int64_t bytes = cache_block_bytes();
  const int64_t most = std::max<int64_t>(1, wire::kBlocksBytes / (2 * bytes));
  std::vector<char> turned(spec.reversed ? static_cast<size_t>(2 * bytes * most) : 0);
  for (int64_t first = 0; first < move.num_units; first += most) {
    const wire::Blocks blocks = {move.id, first, std::min(most, move.num_units - first), {}};
    body = {part(&blocks, sizeof(blocks))};
    char* to = turned.data();
    for (int64_t unit = first; unit < first + blocks.count; ++unit) {
      const int64_t at = (unit / count * spec.num_blocks + spec.cache_ids[static_cast<size_t>(unit % count)]) * bytes;
      for (const char* from : {spec.k + at, spec.v + at}) {
        if (spec.reversed) {
          reverse_rows(shape_, from, to);
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
    const wire::Frame frame = link.blocks.receive(link.timeout_s / wire::kTicks, tick);
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
  const int64_t bytes = cache_block_bytes();
  std::string error;
  try {
    for (int64_t unit = blocks.first; unit < blocks.first + blocks.count; ++unit) {
      const int64_t at = (unit / count * spec.num_blocks + spec.cache_ids[static_cast<size_t>(unit % count)]) * bytes;
      for (char* to : {spec.k + at, spec.v + at}) {
        const char* const from = reader.take(bytes);
        if (spec.reversed) {
          reverse_rows(shape_, from, to);
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

}  // namespace omniserve
