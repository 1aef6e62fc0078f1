// SPDX-License-Identifier: Apache-2.0
// test_client.cc - an application on the SDK that checks every byte of a stream.
//
// Opens a rx socket and adds one flow rule, or attaches the rx socket that --secret is of;
// prints "ready", and receives --count messages, which must be datagrams 0 .. count - 1 of the
// stream (stream.h), in order and complete. Each payload must lie in a read-only mapping of a
// buffer, at the place that its token names. Then it prints
// "done messages=<n> fragments=<n> bytes=<n> errors=<n>" and obeys its standard input until
// that ends:
//   more N   receives N more, and prints "done" again
//   events   waits for news of bindings, and prints "unbound <id>" or "revoked <id>" for each
//   check    looks again at all that it holds, and prints "held messages=<n> errors=<n>"
//   return   gives all of that back, and prints "returned messages=<n>"
//   again    waits for the end of the session, prints "ended <code>", connects again, gives all
//            tokens of the former session to the new one, and prints "ready"
//
// With --hold N it gives messages back only while it holds more than N, the newest and the
// oldest in turn, and looks at them again first. With --keep it gives nothing back before it is
// told to. With --copied each must be a copy. With --discard it receives for ever and checks
// nothing.
//
// With --until-end it receives until its input ends. With --numbered, too, and whichever datagrams
// of a numbered stream come: before "done" it prints "range <first> <last>" for each run of
// successive ones, in order of arrival.
#include <CLI/CLI.hpp>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "rxtoken/rxtoken.h"
#include "tests/process/stream.h"

namespace rxtoken::test {
namespace {

struct Options {
  std::string run_dir;
  std::string name = "rx";
  std::string secret;
  Match match;
  int vlan = -1;
  std::uint16_t destination_port = 0;
  std::uint32_t ring_entries = kDefaultRingEntries;
  std::uint32_t lease_ms = 0;
  std::uint32_t page_bytes = kDefaultPageBytes;
  std::string source;  // address that every message must have
  Stream stream;
  std::uint64_t count = 0;
  std::size_t hold = 0;
  bool keep = false;
  bool copied = false;
  bool discard = false;
  bool until_end = false;
};

// The buffers as the kernel sees them in this process.
class Mappings {
 public:
  // Where the buffer that holds [data, data + bytes) starts; null if that is not all inside
  // one shared, read-only mapping of a memfd.
  const std::byte* BufferOf(const std::byte* data, std::size_t bytes) {
    const std::byte* start = Find(data, bytes);
    if (start == nullptr) {
      Load();
      start = Find(data, bytes);
    }
    return start;
  }

 private:
  struct Range {
    const std::byte* start;
    const std::byte* end;
  };

  const std::byte* Find(const std::byte* data, std::size_t bytes) const {
    for (const Range& range : ranges_) {
      if (data >= range.start && data + bytes <= range.end) return range.start;
    }
    return nullptr;
  }

  void Load() {
    ranges_.clear();
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      std::uintptr_t start = 0;
      std::uintptr_t end = 0;
      char rights[5] = "";
      if (std::sscanf(line.c_str(), "%lx-%lx %4s", &start, &end, rights) == 3 &&
          std::strcmp(rights, "r--s") == 0 && line.find("/memfd:") != std::string::npos) {
        ranges_.push_back(
            {reinterpret_cast<const std::byte*>(start), reinterpret_cast<const std::byte*>(end)});
      }
    }
  }

  std::vector<Range> ranges_;
};

class Checker {
 public:
  explicit Checker(const Options& options) : options_(options) {}

  // The next message; its number.
  std::uint64_t Check(const Message& message) {
    std::uint64_t number = messages_;
    if (options_.stream.numbered) {
      message.CopyTo(std::as_writable_bytes(std::span(&number, 1)));
      if (ranges_.empty() || number != ranges_.back().second + 1)
        ranges_.emplace_back(number, number);
      ranges_.back().second = number;
    }
    CheckIs(message, number);
    messages_++;
    fragments_ += message.fragments().size();
    bytes_ += message.size();
    return number;
  }

  // Whether it is datagram `number`, complete and in place.
  void CheckIs(const Message& message, std::uint64_t number) {
    const std::vector<std::uint8_t> expected = Datagram(options_.stream, number);
    std::size_t at = 0;
    for (const Fragment& fragment : message.fragments()) {
      const std::span<const std::byte> payload = fragment.payload();
      if (at + payload.size() > expected.size() ||
          !std::equal(payload.begin(), payload.end(),
                      std::as_bytes(std::span(expected)).subspan(at).begin())) {
        Complain("bytes differ");
      }
      at += payload.size();
      const std::byte* buffer = mappings_.BufferOf(payload.data(), payload.size());
      if (buffer == nullptr) {
        Complain("payload is in no buffer");
      } else if (payload.data() - buffer !=
                 static_cast<std::ptrdiff_t>(fragment.token().token.page()) *
                         static_cast<std::ptrdiff_t>(options_.page_bytes) +
                     fragment.offset()) {
        Complain("payload is not where its token says");
      }
    }
    if (at != expected.size()) Complain("size differs");
    if (message.copied() != options_.copied) Complain("it is a copy, or it is none");
    if (!options_.source.empty() && !message.source().ToString().starts_with(options_.source)) {
      Complain("source address is " + message.source().ToString());
    }
  }

  std::uint64_t messages() const noexcept { return messages_; }
  std::uint64_t errors() const noexcept { return errors_; }

  void Print() const {
    for (const auto& [first, last] : ranges_) std::printf("range %lu %lu\n", first, last);
    std::printf("done messages=%lu fragments=%lu bytes=%lu errors=%lu\n", messages_, fragments_,
                bytes_, errors_);
    std::fflush(stdout);
  }

 private:
  void Complain(const std::string& what) {
    if (++errors_ <= 20) {
      std::fprintf(stderr, "message %lu: %s\n", messages_, what.c_str());
    }
  }

  const Options& options_;
  Mappings mappings_;
  std::uint64_t messages_ = 0;
  std::uint64_t fragments_ = 0;
  std::uint64_t bytes_ = 0;
  std::uint64_t errors_ = 0;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges_;
};

RxSocket OpenRxSocket(Client& client, const Options& options) {
  RxSocket rx_socket =
      OrDie(options.secret.empty()
                ? client.OpenRxSocket({.name = options.name,
                                       .ring_entries = options.ring_entries,
                                       .lease = std::chrono::milliseconds(options.lease_ms)})
                : client.AttachRxSocket(options.name, options.secret));
  if (options.secret.empty()) OrDie(client.AddFlow(options.match, rx_socket));
  std::puts("ready");
  std::fflush(stdout);
  return rx_socket;
}

void Run(const Options& options) {
  Client client = OrDie(Client::Connect({.run_dir = options.run_dir}));
  RxSocket rx_socket = OpenRxSocket(client, options);

  Checker checker(options);
  std::vector<Message> batch(64);
  std::vector<Message> held;
  std::vector<std::uint64_t> numbers;  // of those that are held
  bool newest = false;
  std::atomic<bool> stop = false;
  std::jthread input;
  if (options.until_end) {
    input = std::jthread([&] {
      while (std::cin.get() != EOF) {
      }
      stop = true;
    });
  }
  const auto receive = [&] {
    const auto timeout = options.until_end ? std::chrono::milliseconds(10) : kForever;
    for (Message& message : OrDie(rx_socket.Receive(batch, timeout))) {
      numbers.push_back(options.discard ? 0 : checker.Check(message));
      held.push_back(std::move(message));
      if (options.keep || held.size() <= options.hold) continue;
      // Out of order: now the newest, now the oldest.
      newest = !newest;
      const auto at = newest ? static_cast<std::ptrdiff_t>(held.size() - 1) : 0;
      if (!options.discard && options.hold != 0)
        checker.CheckIs(*(held.begin() + at), *(numbers.begin() + at));
      held.erase(held.begin() + at);
      numbers.erase(numbers.begin() + at);
    }
    rx_socket.Flush();
  };
  const auto receive_until = [&](std::uint64_t count) {
    while (options.discard || (options.until_end ? !stop : checker.messages() < count)) {
      receive();
    }
    if (!options.keep) {
      held.clear();
      numbers.clear();
      rx_socket.Flush();
    }
    checker.Print();
  };

  receive_until(options.count);
  if (options.until_end) return;
  for (std::string command; std::cin >> command;) {
    if (command == "more") {
      std::uint64_t more = 0;
      std::cin >> more;
      receive_until(checker.messages() + more);
    } else if (command == "events") {
      std::vector<BindingEvent> events;
      while ((events = rx_socket.TakeEvents()).empty()) receive();
      for (const BindingEvent& event : events) {
        constexpr const char* kNames[] = {"unbound", "revoked", "expired", "low-water",
                                          "held-limit"};
        const char* const what = kNames[static_cast<std::size_t>(event.kind)];
        std::printf("%s %lu\n", what, static_cast<std::uint64_t>(event.binding));
      }
    } else if (command == "check") {
      const std::uint64_t errors = checker.errors();
      for (std::size_t i = 0; i < held.size(); i++) checker.CheckIs(held[i], numbers[i]);
      std::printf("held messages=%zu errors=%lu\n", held.size(), checker.errors() - errors);
    } else if (command == "again") {
      Result<std::span<Message>> end = rx_socket.Receive(batch, kForever);
      while (end.ok()) end = rx_socket.Receive(batch, kForever);
      std::printf("ended %s\n", CodeName(end.status().code()).c_str());
      client = OrDie(Client::Connect({.run_dir = options.run_dir}));
      RxSocket next = OpenRxSocket(client, options);
      for (const Message& message : held) {
        for (const Fragment& fragment : message.fragments()) {
          next.Return(std::array{fragment.token()});
        }
      }
      rx_socket = std::move(next);
    } else if (command == "return") {
      rx_socket.Return(held);
      std::printf("returned messages=%zu\n", held.size());
      held.clear();
      numbers.clear();
    }
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace rxtoken::test

int main(int argc, char** argv) {
  rxtoken::test::Options options;
  CLI::App app("Receives a stream and checks every byte.");
  app.add_option("--run-dir", options.run_dir)->required();
  app.add_option("--name", options.name);
  app.add_option("--secret", options.secret);
  app.add_option("--port", options.match.port);
  app.add_option("--vlan", options.vlan);
  app.add_option("--udp-port", options.destination_port);
  app.add_option("--ring-entries", options.ring_entries);
  app.add_option("--lease-ms", options.lease_ms);
  app.add_option("--page-bytes", options.page_bytes);
  app.add_option("--source", options.source);
  app.add_option("--seed", options.stream.seed);
  app.add_option("--min-bytes", options.stream.min_bytes);
  app.add_option("--max-bytes", options.stream.max_bytes);
  app.add_option("--count", options.count);
  app.add_option("--hold", options.hold);
  app.add_flag("--keep", options.keep);
  app.add_flag("--copied", options.copied);
  app.add_flag("--discard", options.discard);
  app.add_flag("--until-end", options.until_end);
  app.add_flag("--numbered", options.stream.numbered);
  CLI11_PARSE(app, argc, argv);
  options.until_end |= options.stream.numbered;
  if (options.vlan >= 0) options.match.vlan = static_cast<std::uint16_t>(options.vlan);
  if (options.destination_port != 0) {
    options.match.protocol = rxtoken::kUdp;
    options.match.destination_port = options.destination_port;
  }
  rxtoken::test::Run(options);
  return 0;
}
