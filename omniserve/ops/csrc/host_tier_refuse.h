// How the host tier says no to a caller.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

namespace omniserve {

// Throws std::invalid_argument; the message is all arguments, one behind the other.
template <typename... Args>
[[noreturn]] void refuse(const Args&... args) {
  std::string message;
  auto append = [&message](const auto& arg) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(arg)>>) {
      message += std::to_string(arg);
    } else {
      message += arg;
    }
  };
  (append(args), ...);
  throw std::invalid_argument(message);
}

}  // namespace omniserve
