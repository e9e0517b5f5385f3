#include "host_wire.h"

#include <limits.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace omniserve::wire {
namespace {

constexpr uint32_t kMagic = 0x31484f4f;
constexpr uint64_t kMostBytes = uint64_t{1} << 30;  // a frame of rows of the largest models takes some megabytes
constexpr size_t kAlignment = 64;

std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table;
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) ? 0x82f63b78u : 0);
    table[i] = value;
  }
  return table;
}

uint32_t checksum_bytewise(uint32_t crc, const unsigned char* data, size_t bytes) {
  static const std::array<uint32_t, 256> table = make_table();
  for (; bytes > 0; --bytes) crc = table[(crc ^ *data++) & 0xff] ^ (crc >> 8);
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t checksum_sse42(uint32_t crc, const unsigned char* data, size_t bytes) {
  uint64_t wide = crc;
  for (; bytes >= 8; bytes -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  crc = static_cast<uint32_t>(wide);
  for (; bytes > 0; --bytes) crc = _mm_crc32_u8(crc, *data++);
  return crc;
}
#endif

[[noreturn]] void fail(const char* what) { throw std::runtime_error(std::string(what) + ": " + std::strerror(errno)); }

}  // namespace

uint32_t checksum(uint32_t before, const void* data, size_t bytes) {
  const auto* const from = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
  static const bool has_sse42 = __builtin_cpu_supports("sse4.2");
  if (has_sse42) return ~checksum_sse42(~before, from, bytes);
#endif
  return ~checksum_bytewise(~before, from, bytes);
}

const char* Reader::take(int64_t bytes) {
  if (bytes < 0 || static_cast<size_t>(bytes) > left()) throw std::runtime_error("a frame is shorter than it says");
  const char* const data = at_;
  at_ += bytes;
  return data;
}

void Reader::copy(void* to, size_t bytes) { std::memcpy(to, take(static_cast<int64_t>(bytes)), bytes); }

void Reader::finish() const {
  if (left() > 0) throw std::runtime_error("a frame is longer than it says");
}

void Connection::FreeDeleter::operator()(char* data) const { std::free(data); }

Connection::~Connection() { ::close(fd_); }

void Connection::shut_down() { ::shutdown(fd_, SHUT_RDWR); }

void Connection::send(Kind kind, uint32_t count, std::vector<iovec>& body) {
  Header header = {kMagic, kind, 0, count, 0};
  for (const iovec& part : body) header.bytes += part.iov_len;
  uint32_t sum = checksum(0, &header, sizeof(header));
  for (const iovec& part : body) sum = checksum(sum, part.iov_base, part.iov_len);
  header.checksum = sum;
  body.insert(body.begin(), {&header, sizeof(header)});
  size_t first = 0;
  while (first < body.size()) {
    msghdr message = {};
    message.msg_iov = body.data() + first;
    message.msg_iovlen = std::min<size_t>(body.size() - first, IOV_MAX);
    ssize_t sent = ::sendmsg(fd_, &message, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      fail("the connection is gone");
    }
    for (; first < body.size() && static_cast<size_t>(sent) >= body[first].iov_len; ++first) {
      sent -= static_cast<ssize_t>(body[first].iov_len);
    }
    if (sent > 0) {
      body[first].iov_base = static_cast<char*>(body[first].iov_base) + sent;
      body[first].iov_len -= static_cast<size_t>(sent);
    }
  }
}

void Connection::read(char* to, size_t bytes, double tick_s, const std::function<void()>& tick) {
  while (bytes > 0) {
    const ssize_t got = ::recv(fd_, to, bytes, MSG_DONTWAIT);
    if (got > 0) {
      to += got;
      bytes -= static_cast<size_t>(got);
      continue;
    }
    if (got == 0) throw std::runtime_error("the other end has closed the connection");
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) fail("the connection is gone");
    pollfd readable = {fd_, POLLIN, 0};
    const int ready = ::poll(&readable, 1, std::max(1, static_cast<int>(tick_s * 1000)));
    if (ready < 0 && errno != EINTR) fail("the connection is gone");
    if (ready == 0) tick();
  }
}

Frame Connection::receive(double tick_s, const std::function<void()>& tick) {
  Header header;
  read(reinterpret_cast<char*>(&header), sizeof(header), tick_s, tick);
  if (header.magic != kMagic || header.bytes > kMostBytes) throw std::runtime_error("what came is no frame");
  if (capacity_ < header.bytes) {
    const size_t wanted = (header.bytes + kAlignment - 1) / kAlignment * kAlignment;
    buffer_.reset(static_cast<char*>(std::aligned_alloc(kAlignment, wanted)));
    capacity_ = buffer_ ? wanted : 0;
    if (!buffer_) throw std::bad_alloc();
  }
  read(buffer_.get(), header.bytes, tick_s, tick);
  const uint32_t told = header.checksum;
  header.checksum = 0;
  if (checksum(checksum(0, &header, sizeof(header)), buffer_.get(), header.bytes) != told) {
    throw std::runtime_error("a frame's checksum is wrong");
  }
  return {header.kind, header.count, buffer_.get(), header.bytes};
}

}  // namespace omniserve::wire
