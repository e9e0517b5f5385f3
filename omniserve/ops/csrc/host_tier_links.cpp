// The host tier's CPU hosts on the network: their connections, from the first to the last. Each has four threads here,
// which are in host_tier_link_rows.cpp and host_tier_link_blocks.cpp; host_server.cpp is at the other end.
//
// A task whose rows are under way counts as running twice, in the hands of the thread that sends them and of the host; a
// move counts as running while a thread reads or writes its cache. So nobody reuses a slot's rows or a cache's blocks
// while they are still read, also when the host is lost meanwhile.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "host_tier.h"
#include "host_tier_refuse.h"

namespace omniserve {

int64_t HostTier::host_of(const int64_t* block_ids, int64_t num_blocks) const {
  const int64_t host = num_blocks > 0 ? block_ids[0] / kHostBlocks : 0;
  int64_t count = config_.num_blocks;
  if (host != 0) {
    const auto found = links_.find(host);
    if (found == links_.end()) refuse("there is no host of block ", block_ids[0]);
    count = found->second->num_blocks;
  }
  for (int64_t i = 0; i < num_blocks; ++i) {
    const int64_t id = block_ids[i] - host * kHostBlocks;
    if (id >= 0 && id < count) continue;
    const std::string where = host > 0 ? "the block ids of host " + std::to_string(host) : "block ids";
    refuse(where, " must be in [", host * kHostBlocks, ", ", host * kHostBlocks + count, "), got ", block_ids[i]);
  }
  return host;
}

void HostTier::connect(int64_t host, int rows_fd, int blocks_fd, int64_t num_blocks, double timeout_s) {
  auto link = std::make_unique<Link>(host, rows_fd, blocks_fd, num_blocks, timeout_s);
  if (host < 1 || host > kMostHosts) refuse("a host must be in [1, ", kMostHosts, "], got ", host);
  if (num_blocks < 1 || num_blocks > kHostBlocks) refuse("a host has 1 to ", kHostBlocks, " blocks, got ", num_blocks);
  if (!(timeout_s > 0)) refuse("timeout_s must be > 0, got ", timeout_s);
  std::vector<std::thread> ended;
  {
    Lock lock(mutex_);
    if (closing_) refuse("the host tier is closed");
    const auto before = links_.find(host);
    if (before != links_.end()) {
      if (!before->second->lost) refuse("host ", host, " is connected already");
      ended.swap(before->second->threads);
    }
  }
  for (std::thread& thread : ended) thread.join();
  Lock lock(mutex_);
  if (closing_) refuse("the host tier is closed");
  for (Slot& slot : slots_) {
    if (slot.told_host == host) slot.told_table.clear();  // a new session of the host knows nothing
  }
  link->session = ++num_sessions_;
  if (const auto before = links_.find(host); before != links_.end()) {
    link->stats = before->second->stats;
    link->stats.load = {};
  }
  Link& added = *(links_[host] = std::move(link));
  lock.unlock();
  void (HostTier::*const loops[])(Link&) = {&HostTier::send_rows, &HostTier::receive_results, &HostTier::send_blocks,
                                            &HostTier::receive_blocks};
  for (const auto loop : loops) {
    std::thread thread = start([this, loop, &added] {
      try {
        (this->*loop)(added);
      } catch (const std::exception& error) {
        Lock lost(mutex_);
        lose(added, error.what());
      }
    });
    pthread_setname_np(thread.native_handle(), ("omni-net-" + std::to_string(host)).substr(0, 15).c_str());
    const sched_param no_priority{};
    pthread_setschedparam(thread.native_handle(), SCHED_BATCH, &no_priority);  // as for the workers
    lock.lock();
    added.threads.push_back(std::move(thread));
    lock.unlock();
  }
}

std::vector<HostLinkStats> HostTier::link_stats() {
  Lock lock(mutex_);
  std::vector<HostLinkStats> all;
  for (const auto& [host, link] : links_) {
    HostLinkStats stats = link->stats;
    stats.host = host;
    stats.lost = link->lost;
    stats.moves_in_hand = link->num_moves;
    stats.tasks_in_hand = std::count_if(slots_.begin(), slots_.end(), [host = host](const Slot& slot) {
      return slot.host == host && slot.in_flight && (slot.awaited || slot.next_piece < slot.num_pieces);
    });
    all.push_back(stats);
  }
  return all;
}

// What the host had in hand fails, here and now but for what one of its threads still reads or writes.
void HostTier::lose(Link& link, const std::string& why) {
  if (std::exchange(link.lost, true)) return;
  if (!closing_) ++link.stats.times_lost;
  link.rows.shut_down();
  link.blocks.shut_down();
  link.wake_rows.notify_all();
  link.wake_blocks.notify_all();
  HostEvent event;
  event.kind = EventKind::host_lost;
  event.host = link.host;
  event.message = why;
  if (!closing_) push_event(std::move(event));
  while (!link.tasks.empty()) {
    const int64_t slot = link.tasks.front();
    Slot& task = slots_[static_cast<size_t>(slot)];
    fail_task(task, slot, "the host is lost");
    publish_task(task, slot);
  }
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    Slot& task = slots_[slot];
    if (task.host != link.host || !task.awaited) continue;
    task.awaited = false;
    fail_task(task, static_cast<int64_t>(slot), "the host is lost");
    release_task(static_cast<int64_t>(slot));
  }
  std::vector<Move*> moves;
  for (const auto& move : live_moves_) {
    if (move->host == link.host) moves.push_back(move.get());
  }
  for (Move* move : moves) {
    fail_move(*move, "the host is lost");
    if (move->num_running == 0) publish_move(*move);
  }
}

}  // namespace omniserve
