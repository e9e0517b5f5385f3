// torch.ops.omniserve_host: the host tier for omniserve/host/tier.py. A library of its own beside `omniserve`, for these
// are handles and side effects, nothing that a compiled graph may hold. Like every torch operator they run without the
// GIL, and std::invalid_argument arrives in Python as ValueError.
#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "handles.h"
#include "host_server.h"
#include "host_tier.h"
#include "host_tier_memory.h"
#include "op_checks.h"

namespace omniserve {
namespace {

// A tier and the memory that its threads use; `tier` goes first.
struct Entry {
  Tensor pool, results;
  std::optional<Tensor> scales, mailbox, flags_3S, per_head;
  std::unique_ptr<HostTier> tier;
};

Handles<Entry>& tiers() {
  static Handles<Entry>* const all = new Handles<Entry>;
  return *all;
}

std::shared_ptr<Entry> find(int64_t handle) {
  std::shared_ptr<Entry> found = tiers().find(handle);
  if (!found) throw std::invalid_argument("no host tier has this handle");
  return found;
}

std::vector<int64_t> to_vector(const Tensor& tensor, const char* name) {
  check_index(tensor, ScalarType::Long, name);
  const int64_t* data = static_cast<const int64_t*>(tensor.const_data_ptr());
  return {data, data + tensor.numel()};
}

// layers_L4: float64 rows (scale, window, softcap, chunk). per_head_L2N: float32 sinks and ALiBi slopes of each layer; a
// layer without sinks has -inf, one without slopes 0. The results are in the model's dtype, the pool too or in i8.
int64_t create(Tensor pool_LBK2SH, std::optional<Tensor> scales_LBK2S, Tensor results_SMD, Tensor layers_L4,
               std::optional<Tensor> per_head_L2N, int64_t num_heads, int64_t num_threads, Tensor cores, bool prefault,
               bool int8_caches, std::optional<Tensor> mailbox_SW, std::optional<Tensor> flags_3S,
               double mailbox_spin_s, double mailbox_sleep_s) {
  check_dim(pool_LBK2SH, 6, "pool");
  check_contiguous(pool_LBK2SH, "pool");
  STD_TORCH_CHECK(pool_LBK2SH.size(3) == 2, "pool must be [L, B, K, 2, S, H], got ", shape_of(pool_LBK2SH));
  check_dim(results_SMD, 3, "results");
  check_contiguous(results_SMD, "results");
  const int64_t num_layers = pool_LBK2SH.size(0);
  check_dim(layers_L4, 2, "layers");
  check_type(layers_L4, ScalarType::Double, "layers");
  check_contiguous(layers_L4, "layers");
  STD_TORCH_CHECK(layers_L4.size(0) == num_layers && layers_L4.size(1) == 4, "layers must be [", num_layers,
                  ", 4], got ", shape_of(layers_L4));
  if (per_head_L2N) {
    check_dim(*per_head_L2N, 3, "per_head");
    check_type(*per_head_L2N, ScalarType::Float, "per_head");
    check_contiguous(*per_head_L2N, "per_head");
    STD_TORCH_CHECK(per_head_L2N->size(0) == num_layers && per_head_L2N->size(1) == 2 &&
                        per_head_L2N->size(2) == num_heads,
                    "per_head must be [", num_layers, ", 2, ", num_heads, "], got ", shape_of(*per_head_L2N));
  }
  HostTierConfig config;
  config.num_blocks = pool_LBK2SH.size(1);
  config.num_kv_heads = pool_LBK2SH.size(2);
  config.block_size = pool_LBK2SH.size(4);
  config.head_size = pool_LBK2SH.size(5);
  config.num_heads = num_heads;
  config.num_slots = results_SMD.size(0);
  config.max_rows = results_SMD.size(1);
  config.dtype = dtype_of(results_SMD, "results");
  STD_TORCH_CHECK(results_SMD.size(2) == num_heads * config.head_size, "results must be [slots, rows, ",
                  num_heads * config.head_size, "], got ", shape_of(results_SMD));
  config.pool_dtype = pool_LBK2SH.scalar_type() == ScalarType::Char ? DType::i8 : dtype_of(pool_LBK2SH, "pool");
  const double* layer = static_cast<const double*>(layers_L4.const_data_ptr());
  for (int64_t i = 0; i < num_layers; ++i, layer += 4) {
    AttentionParams params = {num_heads, static_cast<float>(layer[0]), static_cast<int64_t>(layer[1]),
                              static_cast<float>(layer[2]), static_cast<int64_t>(layer[3])};
    if (per_head_L2N) {
      const float* const sinks = static_cast<const float*>(per_head_L2N->const_data_ptr()) + i * 2 * num_heads;
      const float* const slopes = sinks + num_heads;
      if (sinks[0] != -std::numeric_limits<float>::infinity()) params.sinks = sinks;
      if (std::any_of(slopes, slopes + num_heads, [](float slope) { return slope != 0; })) params.alibi_slopes = slopes;
    }
    config.layers.push_back(params);
  }
  config.pool = pool_LBK2SH.mutable_data_ptr();
  config.scales = nullptr;
  if (scales_LBK2S) {
    check_dim(*scales_LBK2S, 5, "scales");
    check_type(*scales_LBK2S, ScalarType::Float, "scales");
    check_contiguous(*scales_LBK2S, "scales");
    for (int64_t i = 0; i < 5; ++i) {
      STD_TORCH_CHECK(scales_LBK2S->size(i) == pool_LBK2SH.size(i), "scales must be the pool's ",
                      shape_of(pool_LBK2SH), " without its last dimension, got ", shape_of(*scales_LBK2S));
    }
    config.scales = static_cast<float*>(scales_LBK2S->mutable_data_ptr());
  }
  config.results = results_SMD.mutable_data_ptr();
  config.num_threads = static_cast<int>(num_threads);
  for (int64_t core : to_vector(cores, "cores")) config.cores.push_back(static_cast<int>(core));
  config.prefault = prefault;
  config.i8_caches = int8_caches;
  STD_TORCH_CHECK(mailbox_SW.has_value() == flags_3S.has_value(), "a mailbox needs flags, and nothing else does");
  if (mailbox_SW) {
    const int64_t width = (num_heads + 2 * config.num_kv_heads) * config.head_size;
    check_dim(*mailbox_SW, 2, "mailbox");
    check_contiguous(*mailbox_SW, "mailbox");
    check_aligned(*mailbox_SW, "mailbox");
    check_type(*mailbox_SW, results_SMD.scalar_type(), "mailbox");
    const int64_t num_rows = config.num_slots * config.max_rows;
    STD_TORCH_CHECK(mailbox_SW->size(0) == num_rows && mailbox_SW->size(1) == width, "mailbox must be [", num_rows,
                    ", ", width, "], got ", shape_of(*mailbox_SW));
    check_dim(*flags_3S, 2, "flags");
    check_type(*flags_3S, ScalarType::Long, "flags");
    check_contiguous(*flags_3S, "flags");
    check_aligned(*flags_3S, "flags");
    STD_TORCH_CHECK(flags_3S->size(0) == 3 && flags_3S->size(1) == num_rows, "flags must be [3, ", num_rows, "], got ",
                    shape_of(*flags_3S));
    config.mailbox = static_cast<const char*>(mailbox_SW->const_data_ptr());
    config.result_flags = static_cast<int64_t*>(flags_3S->mutable_data_ptr());
    config.flags = config.result_flags + num_rows;
    config.skips = config.flags + num_rows;
  }
  config.mailbox_spin_s = mailbox_spin_s;
  config.mailbox_sleep_s = mailbox_sleep_s;
  auto entry = std::make_shared<Entry>(Entry{pool_LBK2SH, results_SMD, scales_LBK2S, mailbox_SW, flags_3S,
                                             per_head_L2N, nullptr});
  entry->tier = std::make_unique<HostTier>(std::move(config));
  return tiers().add(std::move(entry));
}

void interleave(Tensor memory, Tensor nodes) {
  check_index(memory, ScalarType::Byte, "memory");
  interleave_pages(static_cast<char*>(memory.mutable_data_ptr()), memory.numel(), to_vector(nodes, "nodes"));
}

void begin_token(int64_t tier, int64_t slot, int64_t epoch, int64_t position, std::vector<int64_t> block_ids,
                 int64_t num_rows) {
  find(tier)->tier->begin_token(slot, epoch, position, block_ids.data(), static_cast<int64_t>(block_ids.size()),
                                num_rows);
}

// The rows of x [P, heads, H]; only the last dimension must be contiguous, so slices of a fused projection will do.
std::vector<TokenRow> token_rows(const Tensor& x, const char* name, int64_t num_seats, int64_t num_heads,
                                 int64_t head_size, DType dtype) {
  check_dim(x, 3, name);
  STD_TORCH_CHECK(x.size(0) == num_seats && x.size(1) == num_heads && x.size(2) == head_size, name, " must be [",
                  num_seats, ", ", num_heads, ", ", head_size, "], got ", shape_of(x));
  STD_TORCH_CHECK(dtype_of(x, name) == dtype, name, " must have the model's dtype, got ",
                  torch::headeronly::toString(x.scalar_type()));
  STD_TORCH_CHECK(x.stride(2) == 1 || head_size == 1, name, " must be contiguous in its last dimension, got stride ",
                  x.stride(2));
  const int64_t element_bytes = dtype_bytes(dtype);
  const int64_t row_stride = x.stride(0) * element_bytes, head_stride = x.stride(1) * element_bytes;
  const char* data = static_cast<const char*>(x.const_data_ptr());
  std::vector<TokenRow> rows(static_cast<size_t>(num_seats));
  for (auto& row : rows) {
    row = {data, head_stride};
    data += row_stride;
  }
  return rows;
}

void submit(int64_t tier, int64_t layer, Tensor slots_P, Tensor q_PNH, Tensor k_PKH, Tensor v_PKH) {
  const auto entry = find(tier);
  const HostTierConfig& config = entry->tier->config();
  check_index(slots_P, ScalarType::Long, "slots");
  const int64_t num_seats = slots_P.size(0);
  const auto q = token_rows(q_PNH, "q", num_seats, config.num_heads, config.head_size, config.dtype);
  const auto k = token_rows(k_PKH, "k", num_seats, config.num_kv_heads, config.head_size, config.dtype);
  const auto v = token_rows(v_PKH, "v", num_seats, config.num_kv_heads, config.head_size, config.dtype);
  entry->tier->submit(layer, static_cast<const int64_t*>(slots_P.const_data_ptr()), num_seats, q.data(), k.data(),
                      v.data());
}

void expect(int64_t tier, int64_t step, Tensor layers_R, Tensor slots_R, Tensor widths_R, bool may_skip) {
  const int64_t num_tasks = slots_R.size(0);
  for (const auto& [tensor, name] :
       {std::pair<const Tensor&, const char*>{layers_R, "layers"}, {slots_R, "slots"}, {widths_R, "widths"}}) {
    check_index(tensor, ScalarType::Long, name);
    STD_TORCH_CHECK(tensor.size(0) == num_tasks, "there are ", tensor.size(0), " ", name, " for ", num_tasks, " slots");
  }
  find(tier)->tier->expect(step, static_cast<const int64_t*>(layers_R.const_data_ptr()),
                           static_cast<const int64_t*>(slots_R.const_data_ptr()),
                           static_cast<const int64_t*>(widths_R.const_data_ptr()), num_tasks, may_skip);
}

bool cancel(int64_t tier, int64_t slot) { return find(tier)->tier->cancel(slot); }

// K and V of the cache are [L, blocks, K, S, H] apart, contiguous, in the model's dtype, or in int8 as paged_kv() has it
// where the tier was made for that. The caller keeps them alive
// until the move's event.
void start_move(int64_t tier, int64_t move_id, bool to_host, Tensor k_LBKSH, Tensor v_LBKSH,
                std::vector<int64_t> cache_ids, std::vector<int64_t> pool_ids, bool reversed) {
  const auto entry = find(tier);
  const HostTierConfig& config = entry->tier->config();
  for (const auto& [cache, name] : {std::pair{&k_LBKSH, "the cache's K"}, std::pair{&v_LBKSH, "the cache's V"}}) {
    check_dim(*cache, 5, name);
    check_contiguous(*cache, name);
    const int64_t row_size = config.head_size + (config.i8_caches ? kScaleBytes : 0);
    if (config.i8_caches) {
      check_type(*cache, ScalarType::Char, name);
    } else {
      STD_TORCH_CHECK(dtype_of(*cache, name) == config.dtype, name, " must have the model's dtype, got ",
                      torch::headeronly::toString(cache->scalar_type()));
    }
    STD_TORCH_CHECK(cache->size(0) == static_cast<int64_t>(config.layers.size()) &&
                        cache->size(1) == k_LBKSH.size(1) && cache->size(2) == config.num_kv_heads &&
                        cache->size(3) == config.block_size && cache->size(4) == row_size,
                    name, " must be [", config.layers.size(), ", blocks, ", config.num_kv_heads, ", ",
                    config.block_size, ", ", row_size, "], got ", shape_of(*cache));
  }
  entry->tier->start_move({move_id, to_host, reversed, static_cast<char*>(k_LBKSH.mutable_data_ptr()),
                           static_cast<char*>(v_LBKSH.mutable_data_ptr()), k_LBKSH.size(1), std::move(cache_ids),
                           std::move(pool_ids)});
}

// int64 rows (kind, slot, epoch, layer, position, move_id, host), and one message per row.
std::tuple<Tensor, std::vector<std::string>> poll(int64_t tier) {
  std::vector<HostEvent> events = find(tier)->tier->poll();
  const int64_t sizes[] = {static_cast<int64_t>(events.size()), 7}, strides[] = {7, 1};
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(2, sizes, strides, aoti_torch_dtype_int64(),
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  Tensor rows(handle);
  std::vector<std::string> messages;
  int64_t* row = static_cast<int64_t*>(rows.mutable_data_ptr());
  for (HostEvent& event : events) {
    *row++ = static_cast<int64_t>(event.kind);
    for (int64_t value : {event.slot, event.epoch, event.layer, event.position, event.move_id, event.host}) {
      *row++ = value;
    }
    messages.push_back(std::move(event.message));
  }
  return {std::move(rows), std::move(messages)};
}

bool wait(int64_t tier, double timeout_s) { return find(tier)->tier->wait(timeout_s); }

void inject(int64_t tier, double delay_s, int64_t shuffle_seed, int64_t fail_next, int64_t kill_threads) {
  find(tier)->tier->inject(
      {delay_s, shuffle_seed >= 0, static_cast<uint64_t>(shuffle_seed), fail_next, kill_threads});
}

// In the order of HostTierStats.
std::vector<int64_t> stats(int64_t tier) {
  const HostTierStats s = find(tier)->tier->stats();
  return {s.tasks_done, s.failures,      s.threads_alive, s.tasks_in_hand,   s.moves_in_hand,
          s.busy_ns,    s.kv_bytes_read, s.bytes_moved,   s.bytes_prefaulted};
}

void connect(int64_t tier, int64_t host, int64_t rows_fd, int64_t blocks_fd, int64_t num_blocks, double timeout_s) {
  find(tier)->tier->connect(host, static_cast<int>(rows_fd), static_cast<int>(blocks_fd), num_blocks, timeout_s);
}

// In the order of HostLinkStats and its Load, for each host.
std::vector<int64_t> link_stats(int64_t tier) {
  std::vector<int64_t> all;
  for (const HostLinkStats& s : find(tier)->tier->link_stats()) {
    all.insert(all.end(), {s.host, s.lost, s.tasks_in_hand, s.moves_in_hand, s.times_lost, s.tasks_sent, s.bytes_sent,
                           s.bytes_received, s.bytes_moved, s.load.busy_ns, s.load.bytes_read, s.load.threads_alive,
                           s.load.tasks_done});
  }
  return all;
}

// The tier's events go to the engine until this returns, with the one reason why it does.
std::vector<std::string> serve(int64_t tier, int64_t rows_fd, int64_t blocks_fd, double timeout_s) {
  const auto entry = find(tier);
  HostServer server(*entry->tier, static_cast<int>(rows_fd), static_cast<int>(blocks_fd), timeout_s);
  return {server.serve()};
}

// Both return how many threads had not ended in time, see HostTier::close().
int64_t close(int64_t tier, double timeout_s) { return find(tier)->tier->close(timeout_s); }

// A tier whose threads do not end stays for good, with its memory.
int64_t destroy(int64_t tier, double timeout_s) {
  const int64_t num_left = close(tier, timeout_s);
  if (num_left == 0) tiers().remove(tier);
  return num_left;
}

}  // namespace
}  // namespace omniserve

STABLE_TORCH_LIBRARY(omniserve_host, m) {
  m.def(
      "create(Tensor(a!) pool_LBK2SH, Tensor(b!)? scales_LBK2S, Tensor(c!) results_SMD, Tensor layers_L4, "
      "Tensor? per_head_L2N, int num_heads, int num_threads, Tensor cores, bool prefault, bool int8_caches, "
      "Tensor? mailbox_SW, "
      "Tensor(d!)? flags_3S, float mailbox_spin_s, float mailbox_sleep_s) -> int");
  m.def("interleave(Tensor(a!) memory, Tensor nodes) -> ()");
  m.def("begin_token(int tier, int slot, int epoch, int position, int[] block_ids, int num_rows) -> ()");
  m.def("submit(int tier, int layer, Tensor slots_P, Tensor q_PNH, Tensor k_PKH, Tensor v_PKH) -> ()");
  m.def("expect(int tier, int step, Tensor layers_R, Tensor slots_R, Tensor widths_R, bool may_skip=False) -> ()");
  m.def("cancel(int tier, int slot) -> bool");
  m.def(
      "start_move(int tier, int move_id, bool to_host, Tensor(a!) k_LBKSH, Tensor(b!) v_LBKSH, int[] cache_ids, "
      "int[] pool_ids, bool reversed=False) -> ()");
  m.def("poll(int tier) -> (Tensor, str[])");
  m.def("wait(int tier, float timeout_s) -> bool");
  m.def("inject(int tier, float delay_s, int shuffle_seed, int fail_next, int kill_threads) -> ()");
  m.def("stats(int tier) -> int[]");
  m.def(
      "connect(int tier, int host, int rows_fd, int blocks_fd, int num_blocks, float timeout_s) -> ()");
  m.def("link_stats(int tier) -> int[]");
  m.def("serve(int tier, int rows_fd, int blocks_fd, float timeout_s) -> str[]");
  m.def("close(int tier, float timeout_s) -> int");
  m.def("destroy(int tier, float timeout_s) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(omniserve_host, CompositeExplicitAutograd, m) {
  m.impl("create", TORCH_BOX(&omniserve::create));
  m.impl("interleave", TORCH_BOX(&omniserve::interleave));
  m.impl("begin_token", TORCH_BOX(&omniserve::begin_token));
  m.impl("submit", TORCH_BOX(&omniserve::submit));
  m.impl("expect", TORCH_BOX(&omniserve::expect));
  m.impl("cancel", TORCH_BOX(&omniserve::cancel));
  m.impl("start_move", TORCH_BOX(&omniserve::start_move));
  m.impl("poll", TORCH_BOX(&omniserve::poll));
  m.impl("wait", TORCH_BOX(&omniserve::wait));
  m.impl("inject", TORCH_BOX(&omniserve::inject));
  m.impl("stats", TORCH_BOX(&omniserve::stats));
  m.impl("connect", TORCH_BOX(&omniserve::connect));
  m.impl("link_stats", TORCH_BOX(&omniserve::link_stats));
  m.impl("serve", TORCH_BOX(&omniserve::serve));
  m.impl("close", TORCH_BOX(&omniserve::close));
  m.impl("destroy", TORCH_BOX(&omniserve::destroy));
}
