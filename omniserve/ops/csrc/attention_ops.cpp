// paged_attention and cpu_attention: checks, and the division of the work among threads.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "op_checks.h"

namespace omniserve {
namespace {

constexpr int64_t kTileRows = 128;             // query rows (queries x group) of a prefill tile
constexpr int64_t kParallelMacs = int64_t{1} << 18;  // some 10 us of work; less is done before a thread has woken up

// One request's part of the batch.
struct Sequence {
  int64_t query;        // index of its first query token
  int64_t query_len;    // 0: it takes no part
  int64_t context_len;  // keys before the first query
  const int32_t* block_table;
  int64_t first_piece;  // decode: its pieces are [first_piece, first_piece + num_pieces)
  int64_t num_pieces;
};

// A piece of a decode (keys [begin, end), kv_head unused) or a tile of a prefill (queries [begin, end)).
struct Task {
  const Sequence* sequence;
  int64_t begin;
  int64_t end;
  int64_t kv_head;
  int64_t piece;  // -1: a tile
};

// A float for each query head, or null.
const float* per_head(const std::optional<Tensor>& values, int64_t num_heads, const char* name) {
  if (!values.has_value()) return nullptr;
  check_index(*values, ScalarType::Float, name);
  check_aligned(*values, name);
  STD_TORCH_CHECK(values->size(0) == num_heads, name, " must have one entry for each of the ", num_heads,
                  " query heads, got ", values->size(0));
  const auto* const first = static_cast<const float*>(values->const_data_ptr());
  for (int64_t n = 0; n < num_heads; ++n)
    STD_TORCH_CHECK(std::isfinite(first[n]), name, "[", n, "] must be finite, got ", first[n]);
  return first;
}

AttentionParams attention_params(const PagedKV& kv, int64_t num_heads, double scale, int64_t window, double softcap,
                                 int64_t chunk, const std::optional<Tensor>& sinks,
                                 const std::optional<Tensor>& alibi_slopes) {
  STD_TORCH_CHECK(kv.head_size % 8 == 0 && kv.head_size >= 8 && kv.head_size <= 576,
                  "head size must be a multiple of 8 in [8, 576], got ", kv.head_size);
  STD_TORCH_CHECK(kv.kv_heads >= 1 && num_heads >= 1 && num_heads % kv.kv_heads == 0,
                  "query heads must be a multiple of the KV heads, got ", num_heads, " and ", kv.kv_heads);
  STD_TORCH_CHECK(kv.block_size >= 1, "block size must be >= 1, got ", kv.block_size);
  STD_TORCH_CHECK(window >= 0, "window must be >= 0 (0: none), got ", window);
  STD_TORCH_CHECK(softcap >= 0, "softcap must be >= 0 (0: none), got ", softcap);
  STD_TORCH_CHECK(chunk >= 0, "chunk must be >= 0 (0: none), got ", chunk);
  if (window > std::numeric_limits<int32_t>::max()) window = 0;  // longer than any sequence
  return {num_heads,
          static_cast<float>(scale),
          window,
          static_cast<float>(softcap),
          chunk,
          per_head(sinks, num_heads, "sinks"),
          per_head(alibi_slopes, num_heads, "alibi_slopes")};
}

// A query tensor whose rows [N, H] lie together; their distance is free.
Tensor with_packed_rows(Tensor q) {
  const bool packed = q.stride(2) == 1 && (q.size(1) == 1 || q.stride(1) == q.size(2));
  return packed || q.numel() == 0 ? q : torch::stable::contiguous(q);
}

// The block table with from_right(b) where `reversed` holds; `block_table` has been checked.
std::vector<int32_t> directed_table(const Tensor& block_table, const Tensor& reversed) {
  check_dim(reversed, 2, "reversed");
  check_type(reversed, ScalarType::Bool, "reversed");
  check_contiguous(reversed, "reversed");
  STD_TORCH_CHECK(reversed.size(0) == block_table.size(0) && reversed.size(1) == block_table.size(1),
                  "reversed must have the block table's shape ", shape_of(block_table), ", got ", shape_of(reversed));
  const auto* const blocks = static_cast<const int32_t*>(block_table.const_data_ptr());
  const auto* const is_reversed = static_cast<const bool*>(reversed.const_data_ptr());
  std::vector<int32_t> table(static_cast<size_t>(block_table.numel()));
  for (size_t i = 0; i < table.size(); ++i) table[i] = is_reversed[i] ? from_right(blocks[i]) : blocks[i];
  return table;
}

// `query_start` is nullptr where every request has one query token.
std::vector<Sequence> sequences(const PagedKV& kv, const AttentionParams& params, int64_t num_tokens,
                                const Tensor& block_table, const int32_t* query_start, const Tensor& seq_lens) {
  check_dim(block_table, 2, "block_table");
  check_type(block_table, ScalarType::Int, "block_table");
  check_contiguous(block_table, "block_table");
  check_index(seq_lens, ScalarType::Int, "seq_lens");
  const int64_t num_requests = seq_lens.size(0), width = block_table.size(1);
  STD_TORCH_CHECK(block_table.size(0) == num_requests, "block_table has ", block_table.size(0), " rows for ",
                  num_requests, " requests");
  const auto* table = static_cast<const int32_t*>(block_table.const_data_ptr());
  const auto* lens = static_cast<const int32_t*>(seq_lens.const_data_ptr());
  std::vector<Sequence> result;
  result.reserve(static_cast<size_t>(num_requests));
  for (int64_t r = 0; r < num_requests; ++r) {
    const int64_t first = query_start ? query_start[r] : r;
    const int64_t query_len = query_start ? query_start[r + 1] - first : 1;
    STD_TORCH_CHECK(query_len >= 0 && first + query_len <= num_tokens, "query_start is no prefix sum of query lengths: "
                    "request ", r, " has [", first, ", ", first + query_len, ") of ", num_tokens, " tokens");
    if (query_len == 0) continue;
    STD_TORCH_CHECK(lens[r] >= query_len && lens[r] <= width * kv.block_size, "seq_lens[", r, "] is ", lens[r],
                    "; with ", query_len, " query tokens and ", width, " blocks of ", kv.block_size,
                    " it must be in [", query_len, ", ", width * kv.block_size, "]");
    result.push_back({first, query_len, lens[r] - query_len, table + r * width, 0, 0});
    uint32_t highest = 0;  // as unsigned, a negative id is too high as well
    const int64_t begin = first_key(result.back().context_len, params) / kv.block_size;
    const int64_t end = (lens[r] + kv.block_size - 1) / kv.block_size;
    for (int64_t b = begin; b < end; ++b)
      highest = std::max(highest, static_cast<uint32_t>(result.back().block_table[b]));
    STD_TORCH_CHECK(highest < kv.num_blocks, "block_table[", r, "] holds block ", static_cast<int32_t>(highest),
                    " among its entries [", begin, ", ", end, "); the cache has ", kv.num_blocks, " blocks");
  }
  return result;
}

void attend(const Tensor& q, const PagedKV& kv, const AttentionParams& params, std::vector<Sequence>& batch,
            const Tensor& out, int num_threads) {
  const int64_t group = params.num_heads / kv.kv_heads, row_size = params.num_heads * kv.head_size;
  const int64_t tile_queries = std::max<int64_t>(1, kTileRows / group);
  std::vector<Task> tasks;
  std::vector<const Sequence*> decodes;
  int64_t num_pieces = 0, scores = 0;
  for (Sequence& sequence : batch) {
    const int64_t keys = sequence.context_len + sequence.query_len;
    scores += sequence.query_len * (keys - first_key(sequence.context_len, params));
    if (sequence.query_len == 1) continue;
    // Of equal size, and the costly ones first: the last queries see most.
    const int64_t num_tiles = (sequence.query_len + tile_queries - 1) / tile_queries;
    for (int64_t i = num_tiles; i-- > 0;)
      for (int64_t head = 0; head < kv.kv_heads; ++head)
        tasks.push_back({&sequence, sequence.query_len * i / num_tiles, sequence.query_len * (i + 1) / num_tiles, head,
                         -1});
  }
  for (Sequence& sequence : batch) {
    if (sequence.query_len != 1) continue;
    const int64_t keys = sequence.context_len + 1, piece = decode_piece_tokens(keys);
    sequence.first_piece = num_pieces;
    for (int64_t begin = first_key(keys - 1, params) / piece * piece; begin < keys; begin += piece)
      tasks.push_back({&sequence, begin, std::min(begin + piece, keys), 0, num_pieces++});
    sequence.num_pieces = num_pieces - sequence.first_piece;
    decodes.push_back(&sequence);
  }

  const DType q_dtype = dtype_of(q, "q");
  const int64_t element = dtype_bytes(q_dtype);
  const int64_t q_stride = q.dim() == 3 ? q.stride(0) : 0;
  const char* const queries = static_cast<const char*>(q.const_data_ptr());
  char* const results = static_cast<char*>(out.mutable_data_ptr());
  const int64_t num_partials = num_pieces * (row_size + 2 * params.num_heads);
  const std::unique_ptr<float[]> partials(new float[static_cast<size_t>(num_partials)]);  // not zeroed
  float* const acc = partials.get();
  float* const m = acc + num_pieces * row_size;
  float* const l = m + num_pieces * params.num_heads;

  // A team of all threads or of one: libgomp ends and starts threads whenever the size of a team changes.
  const bool parallel = num_threads > 1 && tasks.size() > 1 && scores * row_size > kParallelMacs;
  const auto num_tasks = static_cast<int64_t>(tasks.size()), num_decodes = static_cast<int64_t>(decodes.size());
#pragma omp parallel num_threads(num_threads) if (parallel)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_tasks; ++i) {
      const Task& task = tasks[static_cast<size_t>(i)];
      const Sequence& sequence = *task.sequence;
      const char* const query = queries + sequence.query * q_stride * element;
      if (task.piece >= 0) {
        decode_partial(query, q_dtype, kv, sequence.block_table, sequence.context_len, 1, task.begin, task.end, params,
                       acc + task.piece * row_size, m + task.piece * params.num_heads,
                       l + task.piece * params.num_heads);
      } else {
        prefill_tile(query, q_dtype, q_stride, kv, sequence.block_table, sequence.context_len, task.begin, task.end,
                     task.kv_head, params, results + sequence.query * row_size * element, row_size);
      }
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num_decodes; ++i) {
      const Sequence& sequence = *decodes[static_cast<size_t>(i)];
      merge_partials(acc + sequence.first_piece * row_size, m + sequence.first_piece * params.num_heads,
                     l + sequence.first_piece * params.num_heads, sequence.num_pieces, 1, params.num_heads, kv.kv_heads,
                     kv.head_size, params.sinks, q_dtype, results + sequence.query * row_size * element);
    }
  }
}

void check_query(const Tensor& q, const PagedKV& kv) {
  check_dim(q, 3, "q");
  check_aligned(q, "q");
  STD_TORCH_CHECK(dtype_of(q, "q") == kv.dtype || kv.dtype == DType::i8, "q must have the cache's dtype, got ",
                  torch::headeronly::toString(q.scalar_type()));
  STD_TORCH_CHECK(q.size(2) == kv.head_size, "q must have the cache's head size ", kv.head_size, ", got ", shape_of(q));
  isa_name();  // a wrong OMNISERVE_ISA is reported here, not inside a parallel region
}

}  // namespace

Tensor paged_attention_into(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start,
                            Tensor seq_lens, double scale, int64_t window, double softcap,
                            std::optional<Tensor> reversed, int64_t chunk, std::optional<Tensor> sinks,
                            std::optional<Tensor> alibi_slopes, std::optional<Tensor> given) {
  const PagedKV kv = paged_kv(k_cache, v_cache);
  check_query(q, kv);
  const AttentionParams params =
      attention_params(kv, q.size(1), scale, window, softcap, chunk, sinks, alibi_slopes);
  check_index(query_start, ScalarType::Int, "query_start");
  check_index(seq_lens, ScalarType::Int, "seq_lens");
  const int64_t num_requests = seq_lens.size(0);
  STD_TORCH_CHECK(query_start.size(0) == num_requests + 1, "query_start must have ", num_requests + 1,
                  " entries for ", num_requests, " requests, got ", query_start.size(0));
  const auto* starts = static_cast<const int32_t*>(query_start.const_data_ptr());
  STD_TORCH_CHECK(starts[0] == 0 && starts[num_requests] == q.size(0), "query_start must go from 0 to the ", q.size(0),
                  " tokens of q, got ", starts[0], " to ", starts[num_requests]);
  std::vector<Sequence> batch = sequences(kv, params, q.size(0), block_table, starts, seq_lens);
  std::vector<int32_t> directed;
  if (reversed.has_value()) {
    directed = directed_table(block_table, *reversed);
    const auto* const table = static_cast<const int32_t*>(block_table.const_data_ptr());
    for (Sequence& sequence : batch) sequence.block_table = directed.data() + (sequence.block_table - table);
  }
  Tensor out = given.has_value() ? *given : empty_cpu({q.size(0), q.size(1), q.size(2)}, q);
  check_type(out, q.scalar_type(), "out");
  check_contiguous(out, "out");
  STD_TORCH_CHECK(out.numel() == q.numel(), "out must have q's ", shape_of(q), ", got ", shape_of(out));
  attend(with_packed_rows(q), kv, params, batch, out, omp_get_max_threads());
  return out;
}

Tensor paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start,
                       Tensor seq_lens, double scale, int64_t window, double softcap, std::optional<Tensor> reversed,
                       int64_t chunk, std::optional<Tensor> sinks, std::optional<Tensor> alibi_slopes) {
  return paged_attention_into(q, k_cache, v_cache, block_table, query_start, seq_lens, scale, window, softcap, reversed,
                              chunk, sinks, alibi_slopes, std::nullopt);
}

Tensor cpu_attention(Tensor q, Tensor pool, std::optional<Tensor> scales, Tensor block_table, Tensor seq_lens,
                     double scale, int64_t window, double softcap, int64_t num_threads, int64_t chunk,
                     std::optional<Tensor> sinks, std::optional<Tensor> alibi_slopes) {
  const PagedKV kv = host_kv(pool, scales);
  check_query(q, kv);
  const AttentionParams params =
      attention_params(kv, q.size(1), scale, window, softcap, chunk, sinks, alibi_slopes);
  STD_TORCH_CHECK(num_threads >= 1 && num_threads <= 4096, "num_threads must be in [1, 4096], got ", num_threads);
  check_index(seq_lens, ScalarType::Int, "seq_lens");
  STD_TORCH_CHECK(seq_lens.size(0) == q.size(0), "seq_lens has ", seq_lens.size(0), " entries for ", q.size(0),
                  " query tokens");
  std::vector<Sequence> batch = sequences(kv, params, q.size(0), block_table, nullptr, seq_lens);
  Tensor out = empty_cpu({q.size(0), q.size(1), q.size(2)}, q);
  attend(with_packed_rows(q), kv, params, batch, out, static_cast<int>(num_threads));
  return out;
}

}  // namespace omniserve
