// SPDX-License-Identifier: Apache-2.0
// recv.cc - the verb that receives: a netcat for rxtoken, over shared memory or over gRPC.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iostream>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "rxtoken/v1/port.grpc.pb.h"
#include "rxtoken/v1/rx_socket.grpc.pb.h"
#include "rxtoken/v1/token.grpc.pb.h"
#include "tools/ctl.h"

namespace rxtoken {
namespace {

using std::chrono::steady_clock;
using std::chrono::system_clock;
using namespace std::chrono_literals;

constexpr std::size_t kMaxHold = 1'000'000'000;

struct RecvOptions {
  std::string socket = "recv-" + std::to_string(getpid());
  bool frames = false;
  v1::Match match;
  std::int32_t priority = 0;
  std::vector<std::string> bind;  // queues
  std::uint64_t buffer_bytes = 64 << 20;

  bool hexdump = false;
  bool count = false;
  std::string write_file;
  std::string pcap_file;

  std::uint64_t messages = 0;  // 0: no limit
  double seconds = 0;          // 0: no limit
  std::size_t hold = 0;        // fragments
  bool stream = false;
  bool keep = false;
};

// ---- when to stop ------------------------------------------------------------------------

// Turns SIGINT, SIGTERM and the end of `seconds` into a flag. Made before any other thread,
// so that all of them leave the signals to this one.
class Stopper {
 public:
  explicit Stopper(double seconds) {
    sigemptyset(&signals_);
    sigaddset(&signals_, SIGINT);
    sigaddset(&signals_, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
    if (seconds > 0) deadline_ = steady_clock::now() + std::chrono::duration<double>(seconds);
  }

  // Calls `on_stop` when the time has come. Once.
  void Start(std::function<void()> on_stop) {
    thread_ = std::jthread([this, on_stop = std::move(on_stop)](const std::stop_token& done) {
      while (!done.stop_requested() && !Wait()) continue;
      requested_ = true;
      on_stop();
    });
  }
  bool requested() const { return requested_.load(std::memory_order_relaxed); }

 private:
  // True at a signal, or at the deadline.
  bool Wait() const {
    constexpr std::chrono::nanoseconds kTick = 20ms;
    const std::chrono::duration<double, std::nano> left = deadline_ - steady_clock::now();
    const timespec wait = {
        0, static_cast<long>(std::clamp<double>(left.count(), 0, double{kTick.count()}))};
    return sigtimedwait(&signals_, nullptr, &wait) > 0 || steady_clock::now() >= deadline_;
  }

  sigset_t signals_;
  std::chrono::time_point<steady_clock, std::chrono::duration<double>> deadline_ =
      steady_clock::time_point::max();
  std::atomic<bool> requested_ = false;
  std::jthread thread_;
};

// ---- what to do with a message -------------------------------------------------------------

struct Received {
  system_clock::time_point arrival;
  std::string source;
  std::size_t size = 0;
  std::vector<std::string_view> fragments;
  std::vector<std::uint32_t> kept;  // tokens
};

class Output {
 public:
  // Opens the file that is to be written, if any.
  explicit Output(const RecvOptions& options) : options_(options) {
    const std::string& name = options.pcap_file.empty() ? options.write_file : options.pcap_file;
    if (!name.empty() && name != "-") {
      file_.open(name, std::ios::binary | std::ios::trunc);
      out_ = &file_;
    }
    if (!options.pcap_file.empty()) {
      Put32(0xA1B23C4D);   // nanoseconds, in our byte order
      Put32(2 | 4 << 16);  // version 2.4
      Put32(0);
      Put32(0);
      Put32(kSnapBytes);
      Put32(1);  // Ethernet
    }
  }

  bool counts_only() const { return options_.count; }

  void Write(const Received& message) {
    if (!options_.pcap_file.empty()) {
      const auto at = message.arrival.time_since_epoch();
      Put32(static_cast<std::uint32_t>(at / 1s));
      Put32(static_cast<std::uint32_t>(at % 1s / 1ns));
      Put32(static_cast<std::uint32_t>(message.size));
      Put32(static_cast<std::uint32_t>(message.size));
      PutPayload(message);
    } else if (!options_.write_file.empty()) {
      PutPayload(message);
    } else if (!options_.count) {
      PutLine(message);
      if (options_.hexdump) PutHexdump(message);
    }
  }

  Status Flush() {
    out_->flush();
    if (*out_) return Status();
    const std::string& name = options_.pcap_file.empty() ? options_.write_file : options_.pcap_file;
    return Status(Code::kResourceExhausted,
                  "cannot write " + (name.empty() || name == "-" ? "to standard output" : name) +
                      ": " + std::strerror(errno));
  }

 private:
  static constexpr std::uint32_t kSnapBytes = 262144;

  void Put32(std::uint32_t word) {
    out_->write(reinterpret_cast<const char*>(&word), sizeof(word));
  }
  void PutPayload(const Received& message) {
    for (const std::string_view part : message.fragments) *out_ << part;
  }
  void PutLine(const Received& message) {
    const std::time_t seconds = system_clock::to_time_t(message.arrival);
    std::tm local;
    localtime_r(&seconds, &local);
    char time[16];
    std::strftime(time, sizeof(time), "%H:%M:%S", &local);
    char fraction[16];
    std::snprintf(fraction, sizeof(fraction), ".%09ld",
                  static_cast<long>(message.arrival.time_since_epoch() % 1s / 1ns));
    *out_ << time << fraction << ' ' << message.source << ' ' << message.size << " bytes";
    if (message.fragments.size() > 1) *out_ << " in " << message.fragments.size() << " fragments";
    for (const std::uint32_t token : message.kept) *out_ << " token " << token;
    *out_ << '\n';
  }
  void PutHexdump(const Received& message) {
    constexpr std::size_t kPerLine = 16;
    std::string all;
    for (const std::string_view part : message.fragments) all += part;
    for (std::size_t at = 0; at < all.size(); at += kPerLine) {
      const std::string_view line = std::string_view(all).substr(at, kPerLine);
      char hex[32];
      std::snprintf(hex, sizeof(hex), "  %04zx ", at);
      *out_ << hex;
      for (std::size_t i = 0; i < kPerLine; i++) {
        std::snprintf(hex, sizeof(hex), i < line.size() ? " %02x" : "   ",
                      i < line.size() ? static_cast<unsigned char>(line[i]) : 0u);
        *out_ << hex;
      }
      *out_ << "  ";
      for (const char c : line) *out_ << (c >= 0x20 && c < 0x7F ? c : '.');
      *out_ << '\n';
    }
  }

  const RecvOptions& options_;
  std::ofstream file_;
  std::ostream* out_ = &std::cout;
};

// Counts, and says how fast.
class Totals {
 public:
  explicit Totals(bool rates) : rates_(rates) {}

  void Add(std::uint64_t messages, std::uint64_t bytes) {
    messages_ += messages;
    bytes_ += bytes;
  }
  std::uint64_t messages() const { return messages_; }

  // Every second, the rates of that second.
  void Tick() {
    const auto now = steady_clock::now();
    if (!rates_ || now - last_ < 1s) return;
    const double seconds = std::chrono::duration<double>(now - last_).count();
    std::fprintf(stderr, "%12.0f messages/s %10.3f Gbit/s\n",
                 static_cast<double>(messages_ - last_messages_) / seconds,
                 static_cast<double>(bytes_ - last_bytes_) * 8e-9 / seconds);
    last_ = now;
    last_messages_ = messages_;
    last_bytes_ = bytes_;
  }

  void Print(bool json) const {
    const double seconds = std::chrono::duration<double>(steady_clock::now() - start_).count();
    const double per_second = static_cast<double>(messages_) / seconds;
    const double bits_per_second = static_cast<double>(bytes_) * 8 / seconds;
    std::fprintf(stderr, "%llu messages, %llu bytes in %.2f s: %.0f messages/s, %.3f Gbit/s\n",
                 static_cast<unsigned long long>(messages_),
                 static_cast<unsigned long long>(bytes_), seconds, per_second,
                 bits_per_second * 1e-9);
    if (!json) return;
    const nlohmann::ordered_json totals = {{"messages", messages_},
                                           {"bytes", bytes_},
                                           {"seconds", seconds},
                                           {"messages_per_second", per_second},
                                           {"bits_per_second", bits_per_second}};
    std::cout << totals.dump(1) << std::endl;
  }

 private:
  const bool rates_;
  const steady_clock::time_point start_ = steady_clock::now();
  std::uint64_t messages_ = 0;
  std::uint64_t bytes_ = 0;
  steady_clock::time_point last_ = start_;
  std::uint64_t last_messages_ = 0;
  std::uint64_t last_bytes_ = 0;
};

// ---- over shared memory ------------------------------------------------------------------

Match ToSdk(const v1::Match& from) {
  Match match;
  match.port = from.port();
  if (from.has_queue()) match.queue = from.queue();
  if (from.has_vlan()) match.vlan = static_cast<std::uint16_t>(from.vlan());
  match.source = from.source();
  match.destination = from.destination();
  if (from.has_protocol()) match.protocol = static_cast<std::uint8_t>(from.protocol());
  if (from.has_source_port()) {
    match.source_port = static_cast<std::uint16_t>(from.source_port());
  }
  if (from.has_destination_port()) {
    match.destination_port = static_cast<std::uint16_t>(from.destination_port());
  }
  return match;
}

// Binds those of the queues that have no binding yet.
Status BindQueues(const Ctl& ctl, const RecvOptions& options, Client& client) {
  BindOptions bind{.name = options.socket, .buffer_bytes = options.buffer_bytes};
  for (const std::string& text : options.bind) {
    Result<QueueId> queue = ParseQueue(text);
    if (!queue.ok()) return queue.status();
    v1::GetPortRequest request;
    request.set_name(queue->port);
    v1::Port port;
    Status status = Call(ctl, &v1::Ports::Stub::GetPort, request, &port);
    if (!status.ok()) return status;
    const bool bound = std::any_of(port.queues().begin(), port.queues().end(), [&](const auto& q) {
      return q.index() == queue->queue && !q.binding().empty();
    });
    if (!bound) bind.queues.push_back(std::move(*queue));
  }
  return bind.queues.empty() ? Status() : client.Bind(bind).status();
}

// `clock_offset`: from CLOCK_MONOTONIC to the wall clock; the same for a whole batch, so that
// times keep their order.
Received View(const Message& message, system_clock::duration clock_offset) {
  Received view;
  view.arrival = system_clock::time_point(clock_offset + message.arrival_mono());
  view.source = message.source().ToString();
  view.size = message.size();
  for (const Fragment& fragment : message.fragments()) {
    view.fragments.emplace_back(reinterpret_cast<const char*>(fragment.payload().data()),
                                fragment.payload().size());
  }
  return view;
}

// Keeps the last `size` fragments from going back.
class Window {
 public:
  explicit Window(std::size_t size) : size_(size) {}

  // Takes the messages' fragments, and gives back as many old ones as are too many.
  void Take(std::span<Message> messages, RxSocket& rx) {
    if (size_ == 0) return;
    back_.clear();
    for (Message& message : messages) {
      for (const Fragment& fragment : message.fragments()) {
        if (held_.size() < size_) {
          held_.push_back(fragment.token());
        } else {
          back_.push_back(std::exchange(held_[oldest_], fragment.token()));
          oldest_ = (oldest_ + 1) % size_;
        }
      }
      message.Release();
    }
    rx.Return(back_);
  }
  void Empty(RxSocket& rx) { rx.Return(held_); }

 private:
  const std::size_t size_;
  std::size_t oldest_ = 0;
  std::vector<HeldToken> held_;
  std::vector<HeldToken> back_;
};

std::string Description(const BindingEvent& event) {
  const std::string binding =
      "binding with id " + std::to_string(static_cast<std::uint64_t>(event.binding));
  switch (event.kind) {
    case BindingEvent::Kind::kUnbound: return binding + " was unbound";
    case BindingEvent::Kind::kRevoked: return binding + " was revoked";
    case BindingEvent::Kind::kExpired: return binding + " was held too long";
    case BindingEvent::Kind::kLowWater: return binding + " has few free pages";
    case BindingEvent::Kind::kHeldLimit: return "all that may be held is held";
  }
  return binding;
}

Status ReceiveShared(const Ctl& ctl, const RecvOptions& options, Stopper& stopper, Output& output,
                     Totals& totals) {
  auto client = Client::Connect({.run_dir = ctl.run_dir});
  if (!client.ok()) return client.status();
  Status status = BindQueues(ctl, options, *client);
  if (!status.ok()) return status;
  auto rx = client->OpenRxSocket(
      {.name = options.socket, .content = options.frames ? Content::kFrame : Content::kPayload});
  if (!rx.ok()) return rx.status();
  const auto flow = client->AddFlow(ToSdk(options.match), *rx, {.priority = options.priority});
  if (!flow.ok()) return flow.status();

  stopper.Start([] {});
  std::vector<Message> messages(64);
  Window window(options.hold);
  while (status.ok() && !stopper.requested()) {
    std::span<Message> room(messages);
    if (options.messages > 0) {
      const std::uint64_t left = options.messages - totals.messages();
      if (left == 0) break;
      room = room.first(std::min<std::uint64_t>(left, room.size()));
    }
    const auto received = rx->Receive(room, 20ms);
    if (!received.ok()) return received.status();
    for (const BindingEvent& event : rx->TakeEvents()) {
      std::fprintf(stderr, "%s\n", Description(event).c_str());
    }
    const auto clock_offset =
        system_clock::now().time_since_epoch() - steady_clock::now().time_since_epoch();
    std::uint64_t bytes = 0;
    for (const Message& message : *received) {
      bytes += message.size();
      if (!output.counts_only()) output.Write(View(message, clock_offset));
    }
    totals.Add(received->size(), bytes);
    totals.Tick();
    window.Take(*received, *rx);
    if (!output.counts_only() && !received->empty()) status = output.Flush();
  }
  window.Empty(*rx);
  rx->Return(messages);
  return status;
}

// ---- over gRPC ---------------------------------------------------------------------------

Received View(const v1::Message& message, bool kept) {
  Received view;
  view.arrival = system_clock::time_point(std::chrono::seconds(message.arrival().seconds()) +
                                          std::chrono::nanoseconds(message.arrival().nanos()));
  view.source = message.source().empty() ? "-" : message.source();
  if (message.source_port() != 0) {
    const bool v6 = view.source.find(':') != std::string::npos;
    view.source =
        (v6 ? "[" + view.source + "]" : view.source) + ":" + std::to_string(message.source_port());
  }
  for (const v1::Fragment& fragment : message.fragments()) {
    view.fragments.push_back(fragment.payload());
    view.size += fragment.payload().size();
    if (kept) view.kept.push_back(fragment.token());
  }
  return view;
}

Status ReceiveStream(const Ctl& ctl, const RecvOptions& options, Stopper& stopper, Output& output,
                     Totals& totals) {
  // A stream has no deadline: whether the daemon answers is found out before.
  v1::GetRxSocketRequest get;
  get.set_name(options.socket);
  v1::RxSocket rx_socket;
  Status status = Call(ctl, &v1::RxSockets::Stub::GetRxSocket, get, &rx_socket);
  if (!status.ok()) return status;
  if (!options.pcap_file.empty() && rx_socket.content() != v1::CONTENT_FRAME) {
    return Status(Code::kFailedPrecondition,
                  "rx socket '" + options.socket +
                      "' delivers payload: open it with --frames for a pcap file");
  }

  v1::Tokens::Stub stub(ctl.Channel());
  v1::ReceiveRequest request;
  request.set_rx_socket(options.socket);
  request.set_hold(options.keep);
  request.set_max_messages(options.messages);
  grpc::ClientContext context;
  status = ctl.AddSession(context);
  if (!status.ok()) return status;
  const auto stream = stub.Receive(&context, request);
  stopper.Start([&context] { context.TryCancel(); });
  v1::ReceiveResponse response;
  while (status.ok() && stream->Read(&response)) {
    for (const v1::Message& message : response.messages()) {
      const Received view = View(message, options.keep);
      totals.Add(1, view.size);
      output.Write(view);
    }
    totals.Tick();
    status = output.Flush();
  }
  if (!status.ok()) context.TryCancel();
  const grpc::Status end = stream->Finish();
  return !status.ok() || stopper.requested() ? status : ctl.ToStatus(end);
}

int Recv(const Ctl& ctl, const RecvOptions& options) {
  Stopper stopper(options.seconds);
  Output output(options);
  Status status = output.Flush();
  if (!status.ok()) return Fail(status);
  Totals totals(options.count);
  status = options.stream ? ReceiveStream(ctl, options, stopper, output, totals)
                          : ReceiveShared(ctl, options, stopper, output, totals);
  if (status.ok() || totals.messages() > 0) totals.Print(ctl.json && options.count);
  return status.ok() ? kDone : Fail(status);
}

}  // namespace

void AddRecv(CLI::App& app, Ctl& ctl) {
  CLI::App& verb = *app.add_subcommand("recv", "Receive, and print, count or write what comes");
  verb.footer(
      "Examples:\n"
      "  rxtokenctl recv --bind p0:0 --proto udp --dport 4000         print what comes\n"
      "  rxtokenctl recv --bind p0:0 --count --seconds 10             how fast is it?\n"
      "  rxtokenctl recv --bind p0:0 --frames --pcap out.pcap -n 100  capture\n"
      "  rxtokenctl recv --proto udp --dport 9 --write - | tar x      netcat\n"
      "  rxtokenctl recv --stream --socket s0                         of `socket open s0`");
  const auto options = std::make_shared<RecvOptions>();

  CLI::Option* socket =
      verb.add_option("--socket", options->socket, "Name of the new rx socket [recv-<pid>]")
          ->option_text("NAME");
  CLI::Option* frames =
      verb.add_flag("--frames", options->frames, "Whole frames, not the payload of UDP datagrams")
          ->option_text(" ");
  CLI::Option* bind =
      verb.add_option("--bind", options->bind, "Queues to give a buffer, unless they have one")
          ->option_text("PORT:QUEUE ...");
  AddSize(
      verb, "--buffer", [options](std::uint64_t bytes) { options->buffer_bytes = bytes; },
      "Size of that buffer [64MiB]")
      ->needs(bind);
  verb.add_option("-n,--messages", options->messages, "End after so many messages")
      ->check(Between(std::uint64_t{1}, std::numeric_limits<std::uint64_t>::max()))
      ->option_text("N");
  verb.add_option("--seconds", options->seconds, "End after so many seconds")
      ->check(Between(0.001, 1e9))
      ->option_text("S");
  CLI::Option* hold =
      verb.add_option("--hold", options->hold,
                      "Return a fragment only when so many later ones have come [0]")
          ->check(Between(std::size_t{0}, kMaxHold))
          ->option_text("N");
  CLI::Option* stream =
      verb.add_flag("--stream", options->stream, "Over gRPC, from a --socket that exists")
          ->option_text(" ")
          ->needs(socket)
          ->excludes(frames)
          ->excludes(bind)
          ->excludes(hold);
  verb.add_flag("--keep", options->keep, "Leave what comes held, and print tokens; see `return`")
      ->option_text(" ")
      ->needs(stream);

  const std::vector<CLI::Option*> outputs = {
      verb.add_flag("--print")->description("A line for each message: time, source, bytes"),
      verb.add_flag("--hexdump", options->hexdump, "That line, and the payload"),
      verb.add_flag("--count", options->count, "Rates every second; with --json totals as JSON"),
      verb.add_option("--write", options->write_file, "Payload; - is standard output"),
      verb.add_option("--pcap", options->pcap_file, "Frames, for tcpdump; - is standard output")};
  for (CLI::Option* output : outputs) {
    output->group("Output, one of these")
        ->option_text(output->get_items_expected() > 0 ? "FILE" : " ");
    for (CLI::Option* other : outputs) {
      if (other != output) output->excludes(other);
    }
  }
  const CLI::Option* pcap = outputs.back();

  AddMatchFlags(verb, options->match, options->priority);

  verb.callback([&ctl, options, pcap] {
    if (*pcap && !options->frames && !options->stream) {
      throw CLI::ValidationError("--pcap", "needs --frames");
    }
    if (ctl.json && !options->count) throw CLI::ValidationError("--json", "needs --count");
    ctl.verb = [&ctl, options] { return Recv(ctl, *options); };
  });
}

}  // namespace rxtoken
