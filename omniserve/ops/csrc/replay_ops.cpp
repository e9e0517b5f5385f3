// torch.ops.omniserve_replay: runs a noted sequence of calls again, on the same memory, for omniserve/ops/replay.py.
//
// Between two products of a small model, Python and torch's dispatcher take about as long as a product, because the
// weights have pushed their code and data out of the caches. A replay does without both. Handles and side effects are
// nothing that a compiled graph may hold, so this is a library of its own. Like every torch operator a replay runs
// without the GIL.
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "handles.h"
#include "op_checks.h"

namespace omniserve {
namespace {

constexpr size_t kMostArguments = 48;

// Numbers and addresses, which C passes alike.
using Arguments = std::vector<int64_t>;

template <size_t... I>
void call_with(int64_t function, const Arguments& arguments, std::index_sequence<I...>) {
  reinterpret_cast<void (*)(decltype(static_cast<int64_t>(I))...)>(function)(arguments[I]...);
}

template <size_t N>
void call_n(int64_t function, const Arguments& arguments) {
  call_with(function, arguments, std::make_index_sequence<N>());
}

template <size_t... N>
constexpr auto callers(std::index_sequence<N...>) {
  return std::array<void (*)(int64_t, const Arguments&), sizeof...(N)>{call_n<N>...};
}

constexpr auto kCallers = callers(std::make_index_sequence<kMostArguments + 1>());

using Calls = std::vector<std::function<void()>>;

Handles<Calls>& replays() {
  static Handles<Calls>* const all = new Handles<Calls>;
  return *all;
}

std::shared_ptr<Calls> find(int64_t handle) {
  std::shared_ptr<Calls> found = replays().find(handle);
  STD_TORCH_CHECK(found != nullptr, "no replay has the handle ", handle);
  return found;
}

int64_t create() { return replays().add(std::make_shared<Calls>()); }

void destroy(int64_t handle) { replays().remove(handle); }

void add_kernel(int64_t handle, int64_t function, std::vector<int64_t> arguments) {
  STD_TORCH_CHECK(arguments.size() <= kMostArguments, "a kernel may have ", kMostArguments, " arguments, got ",
                  arguments.size());
  STD_TORCH_CHECK(function != 0, "a kernel must have an address");
  find(handle)->emplace_back([function, arguments = std::move(arguments)] {
    kCallers[arguments.size()](function, arguments);
  });
}

void add_linear(int64_t handle, Tensor x, Tensor packed, std::optional<Tensor> bias, Tensor out) {
  find(handle)->emplace_back([=] { packed_linear_into(x, packed, bias, out.size(-1), out); });
}

void add_heads(int64_t handle, Tensor x, Tensor packed, Tensor out) {
  find(handle)->emplace_back([=] { packed_heads_into(x, packed, out.size(-1), out); });
}

void add_quantized_linear(int64_t handle, Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t bits,
                          int64_t scales, int64_t group, std::optional<Tensor> order, Tensor out) {
  find(handle)->emplace_back(
      [=] { quantized_linear_into(x, packed, bias, out.size(-1), bits, scales, group, order, out); });
}

void add_int8_linear(int64_t handle, Tensor x, Tensor packed, std::optional<Tensor> bias, std::optional<Tensor> x_scale,
                     Tensor out) {
  find(handle)->emplace_back([=] { int8_linear_into(x, packed, bias, out.size(-1), x_scale, out); });
}

void add_add_lora(int64_t handle, Tensor y, Tensor x, Tensor slots, Tensor a, Tensor b, Tensor scales, Tensor out) {
  find(handle)->emplace_back([=] { add_lora_into(y, x, slots, a, b, scales, out); });
}

void add_store_kv(int64_t handle, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slot_mapping) {
  find(handle)->emplace_back([=] { store_kv(k, v, k_cache, v_cache, slot_mapping); });
}

void add_attention(int64_t handle, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start,
                   Tensor seq_lens, double scale, int64_t window, double softcap, int64_t chunk,
                   std::optional<Tensor> sinks, std::optional<Tensor> alibi_slopes, Tensor out) {
  find(handle)->emplace_back([=] {
    paged_attention_into(q, k_cache, v_cache, block_table, query_start, seq_lens, scale, window, softcap, std::nullopt,
                         chunk, sinks, alibi_slopes, out);
  });
}

void run(int64_t handle) {
  const std::shared_ptr<Calls> calls = find(handle);
  for (const auto& call : *calls) call();
}

}  // namespace
}  // namespace omniserve

STABLE_TORCH_LIBRARY(omniserve_replay, m) {
  m.def("create() -> int");
  m.def("destroy(int replay) -> ()");
  m.def("add_kernel(int replay, int function, int[] arguments) -> ()");
  m.def("add_linear(int replay, Tensor x, Tensor packed, Tensor? bias_O, Tensor(a!) out) -> ()");
  m.def("add_heads(int replay, Tensor x_TNI, Tensor packed, Tensor(a!) out) -> ()");
  m.def(
      "add_quantized_linear(int replay, Tensor x, Tensor packed, Tensor? bias_O, int bits, int scales, int group, "
      "Tensor? order_I, Tensor(a!) out) -> ()");
  m.def(
      "add_int8_linear(int replay, Tensor x, Tensor packed, Tensor? bias_O, Tensor? x_scale, Tensor(a!) out) -> ()");
  m.def(
      "add_add_lora(int replay, Tensor y, Tensor x, Tensor slots_T, Tensor a, Tensor b, Tensor scales_S, "
      "Tensor(a!) out) -> ()");
  m.def(
      "add_store_kv(int replay, Tensor k_TKH, Tensor v_TKH, Tensor(a!) k_cache_BKSH, Tensor(b!) v_cache_BKSH, "
      "Tensor slot_mapping_T) -> ()");
  m.def(
      "add_attention(int replay, Tensor q_TNH, Tensor k_cache_BKSH, Tensor v_cache_BKSH, Tensor block_table_RM, "
      "Tensor query_start_R1, Tensor seq_lens_R, float scale, int window, float softcap, int chunk, Tensor? sinks_N, "
      "Tensor? alibi_slopes_N, Tensor(a!) out) -> ()");
  m.def("run(int replay) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(omniserve_replay, CompositeExplicitAutograd, m) {
  m.impl("create", TORCH_BOX(&omniserve::create));
  m.impl("destroy", TORCH_BOX(&omniserve::destroy));
  m.impl("add_kernel", TORCH_BOX(&omniserve::add_kernel));
  m.impl("add_linear", TORCH_BOX(&omniserve::add_linear));
  m.impl("add_int8_linear", TORCH_BOX(&omniserve::add_int8_linear));
  m.impl("add_heads", TORCH_BOX(&omniserve::add_heads));
  m.impl("add_quantized_linear", TORCH_BOX(&omniserve::add_quantized_linear));
  m.impl("add_add_lora", TORCH_BOX(&omniserve::add_add_lora));
  m.impl("add_store_kv", TORCH_BOX(&omniserve::add_store_kv));
  m.impl("add_attention", TORCH_BOX(&omniserve::add_attention));
  m.impl("run", TORCH_BOX(&omniserve::run));
}
