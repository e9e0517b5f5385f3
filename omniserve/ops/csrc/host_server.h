// A CPU host's side of a session with an engine on the network: gives the rows that come to a host tier, and sends back
// its results; puts blocks into the tier's pool, and sends those that are asked for. The engine's side is in
// host_tier_link_rows.cpp and host_tier_link_blocks.cpp. No torch header.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "host_tier.h"
#include "host_wire.h"

namespace omniserve {

class HostServer {
 public:
  // Closes the connections in the end.
  HostServer(HostTier& tier, int rows_fd, int blocks_fd, double timeout_s);

  // Serve until the engine is gone, sends what it should not, or nothing for the timeout; return why it ended.
  std::string serve();

 private:
  void receive_rows();
  void take_tasks(const wire::Frame& frame);
  void send_results();
  void receive_blocks();
  void store(const wire::Frame& frame);
  void send_blocks();
  void send(wire::Connection& connection, std::mutex& mutex, wire::Kind kind, uint32_t count, std::vector<iovec>& body);
  void end(const std::string& why);
  bool has_ended();

  struct Move {
    wire::Move head;
    std::vector<int64_t> ids;
    int64_t next_unit = 0;
  };

  HostTier& tier_;
  const double timeout_s_;
  wire::Connection rows_;
  wire::Connection blocks_;
  std::mutex rows_mutex_;    // who sends over rows_
  std::mutex blocks_mutex_;  // who sends over blocks_
  std::vector<std::vector<int64_t>> tables_;  // of each slot, as far as it is known
  std::map<int64_t, Move> arriving_;          // moves to this host, by id

  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::deque<Move> leaving_;
  bool ended_ = false;
  std::string why_;
};

}  // namespace omniserve
