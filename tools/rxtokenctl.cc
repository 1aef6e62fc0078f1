// SPDX-License-Identifier: Apache-2.0
// rxtokenctl.cc - the daemon's API on the command line: one verb for each RPC.
#include <google/protobuf/empty.pb.h>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/generic/generic_stub.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <csignal>
#include <future>
#include <iomanip>
#include <iostream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <vector>

#include "rxtoken/v1/binding.grpc.pb.h"
#include "rxtoken/v1/flow.grpc.pb.h"
#include "rxtoken/v1/port.grpc.pb.h"
#include "rxtoken/v1/rx_socket.grpc.pb.h"
#include "rxtoken/v1/token.grpc.pb.h"
#include "rxtoken/v1/worker.grpc.pb.h"
#include "tools/ctl.h"
#include "tools/table.h"

namespace rxtoken {

int Fail(const Status& status) {
  std::cerr << "rxtokenctl: " << status.ToString() << '\n';
  return kFailed;
}

Status Ctl::AddSession(grpc::ClientContext& context) const {
  if (!client) {
    // Not zero, which would be without end.
    const auto milliseconds = static_cast<std::int64_t>(std::ceil(timeout * 1000));
    Result<Client> opened = Client::Connect(
        {.run_dir = run_dir, .answer_timeout = std::chrono::milliseconds(milliseconds)});
    if (!opened.ok()) return opened.status();
    client.emplace(*std::move(opened));
  }
  context.AddMetadata("rxtoken-session", client->session_key());
  return Status();
}

Status Ctl::ToStatus(const grpc::Status& status) const {
  if (status.ok()) return Status();
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    return Status(Code::kDeadlineExceeded,
                  "the daemon of " + run_dir + " does not answer; is it stopped? See --timeout");
  }
  return Status(static_cast<Code>(status.error_code()), status.error_message());
}

CLI::Option* AddSize(CLI::App& verb, const std::string& flag,
                     const std::function<void(std::uint64_t)>& set, const std::string& what) {
  const auto not_negative = [](const std::string& text) {
    return text.find('-') == std::string::npos ? "" : "'" + text + "' is no size";
  };
  // Transformations are applied last to first.
  return verb
      .add_option_function<std::uint64_t>(
          flag, [set](const std::uint64_t& bytes) { set(bytes); }, what)
      ->transform(CLI::AsSizeValue(false))
      ->transform(CLI::Validator(not_negative, ""))
      ->option_text("BYTES");
}

void AddMatchFlags(CLI::App& verb, v1::Match& match, std::int32_t& priority) {
  const std::string group = "Match, where what is not given matches everything";
  const auto text = [&](const char* flag, const char* kind, const char* what, std::string* value) {
    return verb.add_option(flag, *value, what)->option_text(kind)->group(group);
  };
  const auto number = [&](const char* flag, const char* what, std::uint32_t low, std::uint32_t high,
                          void (v1::Match::*set)(std::uint32_t)) {
    return verb
        .add_option_function<std::uint32_t>(
            flag, [&match, set](const std::uint32_t& value) { (match.*set)(value); }, what)
        ->check(Between(low, high))
        ->option_text("N")
        ->group(group);
  };
  CLI::Option* port = text("--port", "NAME", "Port of the daemon", match.mutable_port());
  number("--queue", "Queue of that port", 0, 65535, &v1::Match::set_queue)->needs(port);
  number("--vlan", "VLAN ID of the outermost tag, 0..4094; 0: untagged", 0, 4094,
         &v1::Match::set_vlan);
  text("--src", "PREFIX", "Source address: 10.0.0.0/8, 2001:db8::1", match.mutable_source());
  text("--dst", "PREFIX", "Destination address", match.mutable_destination());
  CLI::Option* protocol =
      number("--proto", "IP protocol: udp, tcp or its number", 0, 255, &v1::Match::set_protocol)
          ->transform(CLI::Transformer({{"udp", "17"}, {"tcp", "6"}}, CLI::ignore_case))
          ->option_text("PROTO");
  number("--sport", "Source port; needs --proto udp or tcp", 1, 65535, &v1::Match::set_source_port)
      ->needs(protocol);
  number("--dport", "Destination port; needs --proto udp or tcp", 1, 65535,
         &v1::Match::set_destination_port)
      ->needs(protocol);
  verb.add_option("--priority", priority,
                  "-32768..32767, highest wins; then the rule that fixes more bits [0]")
      ->check(Between(-32768, 32767))
      ->option_text("N")
      ->group(group);
}

Result<QueueId> ParseQueue(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  QueueId id{text.substr(0, colon), 0};
  if (colon == std::string::npos) return id;
  const char* end = text.data() + text.size();
  const auto [last, error] = std::from_chars(text.data() + colon + 1, end, id.queue);
  if (error == std::errc() && last == end && !id.port.empty()) return id;
  return Status(Code::kInvalidArgument, "'" + text + "' is no queue: use PORT:QUEUE, as in p0:0");
}

namespace {

// ---- the API's objects as tables ---------------------------------------------------------

std::string YesNo(bool value) { return value ? "yes" : "no"; }

std::string Text(const v1::QueueId& queue) {
  return queue.port() + ":" + std::to_string(queue.queue());
}

// "a b c"; how each is shown says `text`.
template <typename Range, typename ToText>
std::string Joined(const Range& range, ToText text) {
  std::string all;
  for (const auto& each : range) all += (all.empty() ? "" : " ") + text(each);
  return all;
}

using Counts = google::protobuf::Map<std::string, std::uint64_t>;

// "no_rule=12 ring_full=3", or nothing.
std::string Text(const Counts& counts) {
  std::string text;
  for (const auto& [reason, count] : std::map(counts.begin(), counts.end())) {
    if (count > 0) text += (text.empty() ? "" : " ") + reason + "=" + std::to_string(count);
  }
  return text;
}

std::string Text(const v1::Match& match) {
  std::string text;
  const auto add = [&text](const std::string& name, const std::string& value) {
    text += (text.empty() ? "" : " ") + name + "=" + value;
  };
  if (!match.port().empty()) add("port", match.port());
  if (match.has_queue()) add("queue", std::to_string(match.queue()));
  if (match.has_vlan()) add("vlan", std::to_string(match.vlan()));
  if (!match.source().empty()) add("src", match.source());
  if (!match.destination().empty()) add("dst", match.destination());
  if (match.has_protocol()) {
    const std::map<std::uint32_t, std::string> names = {{kUdp, "udp"}, {kTcp, "tcp"}};
    const auto name = names.find(match.protocol());
    add("proto", name != names.end() ? name->second : std::to_string(match.protocol()));
  }
  if (match.has_source_port()) add("sport", std::to_string(match.source_port()));
  if (match.has_destination_port()) add("dport", std::to_string(match.destination_port()));
  return text.empty() ? "any" : text;
}

Table PortTable(const auto& ports) {
  Table table({"PORT", "DEVICE", "DRIVER", "MAC", "LINK", "MTU", "QUEUES", "RX_PACKETS", "RX_BYTES",
               "MISSED", "NO_BUFFER", "ERRORS"});
  for (const v1::Port& port : ports) {
    const v1::PortStatistics& statistics = port.statistics();
    table.Add(port.name(), port.device(), port.driver(), port.mac(), port.link_up() ? "up" : "down",
              port.mtu_bytes(), port.queues_size(), statistics.rx_packets(), statistics.rx_bytes(),
              statistics.rx_missed(), statistics.rx_no_buffer(), statistics.rx_errors());
  }
  return table;
}

Table QueueTable(const auto& ports) {
  Table table({"PORT", "QUEUE", "WORKER", "BINDING", "RX_PACKETS", "RX_BYTES", "COPIED", "DROPS"});
  for (const v1::Port& port : ports) {
    for (const v1::Queue& queue : port.queues()) {
      table.Add(port.name(), queue.index(), queue.worker(), queue.binding(), queue.rx_packets(),
                queue.rx_bytes(), queue.copied_packets(), Text(queue.drops()));
    }
  }
  return table;
}

Table BindingTable(const auto& bindings) {
  Table table({"BINDING", "ID", "STATE", "PAGES", "FREE", "PAGE_BYTES", "FRAMES", "BUFFER_BYTES",
               "MEMORY", "OWNED", "QUEUES"});
  for (const v1::Binding& binding : bindings) {
    std::string state = binding.state() == v1::BINDING_STATE_DRAINING ? "draining" : "active";
    if (binding.has_drain_left_ms()) state += "," + std::to_string(binding.drain_left_ms()) + "ms";
    table.Add(binding.name(), binding.id(), state, binding.pages(), binding.pages_free(),
              binding.page_bytes(), binding.frames_per_page(), binding.buffer_bytes(),
              binding.memory() == v1::MEMORY_HUGE ? "huge" : "plain", YesNo(binding.owned()),
              Joined(binding.queues(), [](const v1::QueueId& queue) { return Text(queue); }));
  }
  return table;
}

// Nothing if no port has an exception path.
Table ExceptionPathTable(const auto& ports) {
  Table table({"PORT", "KERNEL_INTERFACE", "TO_KERNEL", "FROM_KERNEL", "TO_KERNEL_DROPS",
               "FROM_KERNEL_DROPS"});
  for (const v1::Port& port : ports) {
    if (!port.has_exception_path()) continue;
    const v1::ExceptionPath& path = port.exception_path();
    table.Add(port.name(), path.interface(), path.to_kernel(), path.from_kernel(),
              path.to_kernel_drops(), path.from_kernel_drops());
  }
  return table;
}

void ShowPorts(const auto& ports) {
  std::cout << PortTable(ports);
  const Table paths = ExceptionPathTable(ports);
  if (!paths.empty()) std::cout << '\n' << paths;
}

Table RxSocketTable(const auto& rx_sockets) {
  Table table({"RX_SOCKET", "ID",       "CONTENT", "RING",     "ATTACHED",  "OWNED",
               "MESSAGES",  "BYTES",    "LENT",    "RETURNED", "REVOKED",   "OUTSTANDING",
               "LIMIT",     "WAITING",  "SLOTS",   "COPIED",   "DOORBELLS", "BINDINGS",
               "OUTSIDE",   "STEERING", "DROPS",   "REFUSALS"});
  const auto same = [](const std::string& name) { return name; };
  for (const v1::RxSocket& rx_socket : rx_sockets) {
    const v1::RxSocketStatistics& statistics = rx_socket.statistics();
    table.Add(
        rx_socket.name(), rx_socket.id(),
        rx_socket.content() == v1::CONTENT_FRAME ? "frame" : "payload", rx_socket.ring_entries(),
        YesNo(rx_socket.attached()), YesNo(rx_socket.owned()), statistics.messages(),
        statistics.bytes(), statistics.lent(), statistics.returned(), statistics.revoked(),
        statistics.outstanding(),
        rx_socket.max_held_fragments() == 0 ? "" : std::to_string(rx_socket.max_held_fragments()),
        statistics.waiting(), statistics.slots_in_use(), statistics.copied_messages(),
        statistics.doorbells(), Joined(rx_socket.bindings(), same),
        rx_socket.outside() == v1::OUTSIDE_DROP ? "drop" : "copy",
        rx_socket.steering() == v1::STEERING_STRICT ? "strict" : "migrate",
        Text(statistics.drops()), Text(statistics.refusals()));
  }
  return table;
}

Table FlowTable(const auto& flows) {
  Table table({"FLOW", "PRIORITY", "RX_SOCKETS", "PACKETS", "BYTES", "DROPS", "COPIED", "OWNED",
               "STEER_TO", "PLACEMENT", "MATCH", "REASON"});
  const auto same = [](const std::string& name) { return name; };
  for (const v1::Flow& flow : flows) {
    table.Add(flow.id(), flow.priority(), Joined(flow.rx_sockets(), same), flow.packets(),
              flow.bytes(), flow.drops(), flow.copied(), YesNo(flow.owned()),
              flow.has_steer_to() ? Text(flow.steer_to()) : "",
              flow.placement() == v1::PLACEMENT_HARDWARE ? "hardware" : "software",
              Text(flow.match()), flow.placement_reason());
  }
  return table;
}

// ---- verbs -------------------------------------------------------------------------------

std::string ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  // It fails for invalid UTF-8 only, which gRPC would not have delivered.
  (void)google::protobuf::util::MessageToJsonString(message, &json, options);
  return json;
}

CLI::App& AddNoun(CLI::App& app, const std::string& name, const std::string& what) {
  return *app.add_subcommand(name, what)->require_subcommand(1);
}

CLI::App& AddVerb(CLI::App& noun, const std::string& name, const std::string& what,
                  const std::string& example) {
  CLI::App* verb = noun.add_subcommand(name, what);
  verb->footer("Example: rxtokenctl " + example);
  return *verb;
}

void AddName(CLI::App& verb, const std::string& label, const std::string& what,
             std::string* value) {
  verb.add_option(label, *value, what)->required()->option_text(" ");
}

using Names = google::protobuf::RepeatedPtrField<std::string>;

CLI::Option* AddNames(CLI::App& verb, const std::string& label, const std::string& what,
                      Names& names) {
  return verb
      .add_option_function<std::vector<std::string>>(
          label,
          [&names](const std::vector<std::string>& given) {
            names.Assign(given.begin(), given.end());
          },
          what)
      ->option_text(" ");
}

// Turns "p0:3" into the API's words.
v1::QueueId QueueArgument(const std::string& label, const std::string& text) {
  const Result<QueueId> queue = ParseQueue(text);
  if (!queue.ok()) throw CLI::ValidationError(label, queue.status().message());
  v1::QueueId proto;
  proto.set_port(queue->port);
  proto.set_queue(queue->queue);
  return proto;
}

CLI::Option* AddQueues(CLI::App& verb, const std::string& what,
                       google::protobuf::RepeatedPtrField<v1::QueueId>& queues) {
  return verb
      .add_option_function<std::vector<std::string>>(
          "QUEUE",
          [&queues](const std::vector<std::string>& given) {
            for (const std::string& text : given) *queues.Add() = QueueArgument("QUEUE", text);
          },
          what)
      ->option_text(" ");
}

// A flag with a number from `low` to `high`, which goes to `set`.
template <typename Request, typename T>
void AddNumber(CLI::App& verb, const std::string& flag, const std::string& what, Request& request,
               T low, T high, void (Request::*set)(T)) {
  verb.add_option_function<T>(
          flag, [&request, set](const T& value) { (request.*set)(value); }, what)
      ->check(Between(low, high))
      ->option_text("N");
}

// A flag with one of some words, which goes to `set`.
template <typename Request, typename Enum>
void AddChoice(CLI::App& verb, const std::string& flag, const std::string& what, Request& request,
               void (Request::*set)(Enum), const std::map<std::string, Enum>& words) {
  verb.add_option_function<std::string>(
          flag,
          [flag, &request, set, words](const std::string& word) {
            const auto found = words.find(word);
            if (found == words.end()) {
              throw CLI::ValidationError(
                  flag, "'" + word + "' is not allowed: use one of " +
                            Joined(words, [](const auto& each) { return each.first; }));
            }
            (request.*set)(found->second);
          },
          what)
      ->option_text("KIND");
}

constexpr std::uint32_t kMax32 = std::numeric_limits<std::uint32_t>::max();

// Makes `verb` call an RPC, and show the answer as JSON or by `show`. Answers the request,
// for the verb's flags to fill; it lives as long as the verb.
template <typename Stub, typename Request, typename Response>
Request& SetCall(CLI::App& verb, Ctl& ctl,
                 grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                 void (*show)(const Response&)) {
  const auto request = std::make_shared<Request>();
  verb.callback([&ctl, method, show, request] {
    ctl.verb = [&ctl, method, show, request] {
      Response response;
      const Status status = Call(ctl, method, *request, &response);
      if (!status.ok()) return Fail(status);
      if (ctl.json) {
        std::cout << ToJson(response);
      } else {
        show(response);
      }
      return kDone;
    };
  });
  return *request;
}

Table WorkerTable(const v1::ListWorkersResponse& response) {
  Table table({"WORKER", "CPU", "FRAGMENTS", "REASSEMBLED", "TIMED_OUT", "EVICTED", "OVERLAP",
               "INVALID", "OVER_BUDGET", "DUPLICATES", "DISCARDED", "NO_PAGE", "COPIED_OUT_BYTES",
               "HANDED_OVER", "DATAGRAMS", "PAGES"});
  for (const v1::Worker& worker : response.workers()) {
    const v1::Reassembly& r = worker.reassembly();
    table.Add(worker.index(), worker.cpu() < 0 ? "any" : std::to_string(worker.cpu()),
              r.fragments(), r.reassembled(), r.timed_out(), r.evicted(), r.overlap(), r.invalid(),
              r.over_budget(), r.duplicates(), r.discarded(), r.no_page(), r.copied_out_bytes(),
              r.handed_over(), r.datagrams(), r.pages());
  }
  return table;
}

void AddWorker(CLI::App& app, Ctl& ctl) {
  CLI::App& worker = AddNoun(app, "worker", "Threads that poll queues, and their IP reassembly");
  CLI::App& list = AddVerb(worker, "list", "All workers", "worker list");
  SetCall(
      list, ctl, &v1::Workers::Stub::ListWorkers,
      +[](const v1::ListWorkersResponse& response) { std::cout << WorkerTable(response); });
}

void AddPort(CLI::App& app, Ctl& ctl) {
  CLI::App& port = AddNoun(app, "port", "Network ports and their queues");

  CLI::App& list = AddVerb(port, "list", "All ports, with their statistics", "port list");
  SetCall(
      list, ctl, &v1::Ports::Stub::ListPorts,
      +[](const v1::ListPortsResponse& response) { ShowPorts(response.ports()); });

  CLI::App& get = AddVerb(port, "get", "One port and its queues", "port get p0");
  auto& request = SetCall(
      get, ctl, &v1::Ports::Stub::GetPort, +[](const v1::Port& response) {
        ShowPorts(std::array{response});
        std::cout << '\n' << QueueTable(std::array{response});
      });
  AddName(get, "PORT", "Its name", request.mutable_name());
}

void ShowBinding(const v1::Binding& binding) { std::cout << BindingTable(std::array{binding}); }

void AddBinding(CLI::App& app, Ctl& ctl) {
  CLI::App& bind =
      AddVerb(app, "bind", "Create a buffer and let queues receive into it, until `unbind`",
              "bind b0 p0:0 p0:1 --buffer 256MiB --page 2048");
  auto& request = SetCall(bind, ctl, &v1::Bindings::Stub::Bind, ShowBinding);
  AddName(bind, "NAME", "Of the binding", request.mutable_name());
  AddQueues(bind, "PORT:QUEUE, any number; see `attach-queues`", *request.mutable_queues());
  AddSize(
      bind, "--buffer", [&request](std::uint64_t bytes) { request.set_buffer_bytes(bytes); },
      "Size of the buffer: 64MiB, 1GiB")
      ->required();
  AddNumber(bind, "--page", "Size of a page: 2048, 4096, 16384 or 65536 bytes [4096]", request, 0u,
            kMax32, &v1::BindRequest::set_page_bytes);
  AddNumber(bind, "--frames-per-page", "Frames on a page, each in 2048 bytes or more of it [1]",
            request, 1u, 32u, &v1::BindRequest::set_frames_per_page);
  AddChoice(
      bind, "--memory", "auto, plain or huge [auto]", request, &v1::BindRequest::set_memory,
      {{"auto", v1::MEMORY_UNSPECIFIED}, {"plain", v1::MEMORY_PLAIN}, {"huge", v1::MEMORY_HUGE}});

  CLI::App& attach = AddVerb(app, "attach-queues",
                             "Let further queues receive into a binding, away from their own",
                             "attach-queues b0 p0:2 p1:0");
  auto& attach_request = SetCall(attach, ctl, &v1::Bindings::Stub::AttachQueues, ShowBinding);
  AddName(attach, "NAME", "Of the binding", attach_request.mutable_name());
  AddQueues(attach, "PORT:QUEUE, one or more", *attach_request.mutable_queues())->required();

  CLI::App& unbind = AddVerb(app, "unbind", "End a binding", "unbind b0 --drain-timeout 5");
  auto& unbind_request = SetCall(unbind, ctl, &v1::Bindings::Stub::Unbind, ShowBinding);
  AddName(unbind, "NAME", "Of the binding", unbind_request.mutable_name());
  unbind
      .add_option_function<double>(
          "--drain-timeout",
          [&unbind_request](const double& seconds) {
            unbind_request.set_drain_timeout_ms(static_cast<std::uint32_t>(seconds * 1000));
          },
          "Seconds after which what is still held is revoked, at most 3600 [never]")
      ->check(Between(0.001, 3600.0))
      ->option_text("S");

  CLI::App& binding = AddNoun(app, "binding", "What queues receive into");
  CLI::App& list = AddVerb(binding, "list", "All bindings", "binding list");
  SetCall(
      list, ctl, &v1::Bindings::Stub::ListBindings, +[](const v1::ListBindingsResponse& response) {
        std::cout << BindingTable(response.bindings());
      });
  CLI::App& get = AddVerb(binding, "get", "One binding", "binding get b0");
  auto& get_request = SetCall(get, ctl, &v1::Bindings::Stub::GetBinding, ShowBinding);
  AddName(get, "NAME", "Of the binding", get_request.mutable_name());
}

void AddSocket(CLI::App& app, Ctl& ctl) {
  CLI::App& socket = AddNoun(app, "socket", "Rx sockets, which flow rules deliver to");

  CLI::App& open = AddVerb(socket, "open",
                           "Open a rx socket that lives until `socket close`; see `recv --stream`",
                           "socket open s0 --frames --max-held 1000 --binding b0 --outside drop");
  auto& open_request = SetCall(
      open, ctl, &v1::RxSockets::Stub::OpenRxSocket, +[](const v1::OpenRxSocketResponse& response) {
        std::cout << RxSocketTable(std::array{response.rx_socket()});
      });
  AddName(open, "NAME", "Of the rx socket", open_request.mutable_name());
  open.add_flag_callback(
      "--frames", [&open_request] { open_request.set_content(v1::CONTENT_FRAME); },
      "Deliver whole frames, not the payload of UDP datagrams");
  using Open = v1::OpenRxSocketRequest;
  AddNumber(open, "--ring", "Descriptors per worker, a power of two from 64 to 65536 [4096]",
            open_request, 64u, 65536u, &Open::set_ring_entries);
  AddNumber(open, "--max-held", "Fragments that it may hold of each worker; 0: no limit [0]",
            open_request, 0u, kMax32, &Open::set_max_held_fragments);
  AddNames(open, "--binding", "In which it may be lent pages; can be repeated [any]",
           *open_request.mutable_bindings())
      ->option_text("NAME")
      ->allow_extra_args(false);
  AddChoice(open, "--outside", "What lies in another binding: copy it, or drop it [copy]",
            open_request, &Open::set_outside,
            {{"copy", v1::OUTSIDE_COPY}, {"drop", v1::OUTSIDE_DROP}});
  AddChoice(open, "--steering",
            "migrate, or strict: while it is read, its rules change only by --force [migrate]",
            open_request, &Open::set_steering,
            {{"migrate", v1::STEERING_MIGRATE}, {"strict", v1::STEERING_STRICT}});
  AddChoice(
      open, "--slow",
      "When it has no room: drop, copy-out (see --copy-out), or pause its queues [drop]",
      open_request, &Open::set_slow,
      {{"drop", v1::SLOW_DROP_NEW}, {"copy-out", v1::SLOW_COPY_OUT}, {"pause", v1::SLOW_PAUSE}});
  AddSize(
      open, "--copy-out",
      [&open_request](std::uint64_t bytes) { open_request.set_copy_out_bytes(bytes); },
      "Size of the buffer for copies of what is more than --max-held");
  AddNumber(open, "--lease", "Milliseconds that it may hold a page, 100..3600000; 0: no limit [0]",
            open_request, 0u, 3'600'000u, &Open::set_lease_ms);

  CLI::App& close =
      AddVerb(socket, "close", "Close a rx socket; its pages go back", "socket close s0");
  auto& close_request = SetCall(
      close, ctl, &v1::RxSockets::Stub::CloseRxSocket,
      +[](const v1::CloseRxSocketResponse& response) {
        std::cout << "reclaimed " << response.reclaimed_fragments() << " fragments\n";
      });
  AddName(close, "NAME", "Of the rx socket", close_request.mutable_name());

  CLI::App& list = AddVerb(socket, "list", "All rx sockets", "socket list");
  SetCall(
      list, ctl, &v1::RxSockets::Stub::ListRxSockets,
      +[](const v1::ListRxSocketsResponse& response) {
        std::cout << RxSocketTable(response.rx_sockets());
      });

  CLI::App& get = AddVerb(socket, "get", "One rx socket", "socket get s0 --audit");
  auto& get_request = SetCall(
      get, ctl, &v1::RxSockets::Stub::GetRxSocket, +[](const v1::RxSocket& response) {
        std::cout << RxSocketTable(std::array{response});
        if (response.statistics().has_audited_outstanding()) {
          std::cout << "audited outstanding: " << response.statistics().audited_outstanding()
                    << '\n';
        }
      });
  AddName(get, "NAME", "Of the rx socket", get_request.mutable_name());
  get.add_flag_callback(
      "--audit", [&get_request] { get_request.set_audit(true); },
      "Also count what is outstanding page by page; receiving stands still meanwhile");
}

// ---- holders -----------------------------------------------------------------------------

std::string Percent(std::uint64_t part, std::uint64_t whole) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << 100.0 * static_cast<double>(part) / whole << '%';
  return text.str();
}

// The time for less than which `percent` of the sample was held. Empty if there is none.
std::string HoldTimeOf(const v1::RxSocketStatistics& statistics, std::uint64_t percent) {
  std::uint64_t all = 0;
  for (const v1::HoldTime& time : statistics.hold_times()) all += time.count();
  std::uint64_t counted = 0;
  for (const v1::HoldTime& time : statistics.hold_times()) {
    counted += time.count();
    if (counted * 100 < all * percent) continue;
    return time.has_upper_us() ? std::to_string(time.upper_us()) : "more";
  }
  return "";
}

Table HolderTable(const auto& rx_sockets) {
  Table table({"RX_SOCKET", "USER", "PAGES", "OLDEST_MS", "P50_US", "P99_US", "OF"});
  for (const v1::RxSocket& rx_socket : rx_sockets) {
    const v1::RxSocketStatistics& statistics = rx_socket.statistics();
    const v1::Held& held = statistics.held();
    table.Add(rx_socket.name(), rx_socket.user(), held.pages(), held.oldest_us() / 1000,
              HoldTimeOf(statistics, 50), HoldTimeOf(statistics, 99),
              Joined(held.bindings(), [](const v1::HeldPages& pages) {
                return (pages.binding().empty() ? "copies" : pages.binding()) + "=" +
                       Percent(pages.pages(), pages.of_pages());
              }));
  }
  return table;
}

int Holders(const Ctl& ctl, int top) {
  v1::ListRxSocketsRequest request;
  request.set_held(true);
  v1::ListRxSocketsResponse response;
  const Status status = Call(ctl, &v1::RxSockets::Stub::ListRxSockets, request, &response);
  if (!status.ok()) return Fail(status);
  auto& holders = *response.mutable_rx_sockets();
  std::stable_sort(holders.begin(), holders.end(), [](const auto& a, const auto& b) {
    return a.statistics().held().pages() > b.statistics().held().pages();
  });
  if (holders.size() > top) holders.DeleteSubrange(top, holders.size() - top);
  if (ctl.json) {
    std::cout << ToJson(response);
  } else {
    std::cout << HolderTable(holders);
  }
  return kDone;
}

void AddHolders(CLI::App& app, Ctl& ctl) {
  CLI::App& verb =
      AddVerb(app, "holders", "Which rx sockets hold how much of which binding", "holders --top 5");
  verb.footer(
      "OLDEST_MS is how long the oldest page is held, P50_US and P99_US for how long at most half\n"
      "and 99 of 100 of those were that have come back, and OF what part of each binding it "
      "holds.\n"
      "Example: rxtokenctl holders --top 5");
  const auto top = std::make_shared<int>(10);
  verb.add_option("--top", *top, "How many, those with most pages first [10]")
      ->check(Between(1, std::numeric_limits<int>::max()))
      ->option_text("N");
  verb.callback([&ctl, top] { ctl.verb = [&ctl, top] { return Holders(ctl, *top); }; });
}

void ShowFlow(const v1::Flow& flow) { std::cout << FlowTable(std::array{flow}); }

void AddFlow(CLI::App& app, Ctl& ctl) {
  CLI::App& flow = AddNoun(app, "flow", "Rules that deliver frames to rx sockets");

  const auto add_sockets = [](CLI::App& verb, Names& names) {
    AddNames(verb, "SOCKET", "Names of rx sockets, one or more; each gets every frame", names)
        ->required();
  };
  CLI::App& add = AddVerb(flow, "add", "Deliver matching frames to rx sockets",
                          "flow add s0 s1 --port p0 --proto udp --dport 4000 --steer-to p0:3");
  auto& add_request = SetCall(add, ctl, &v1::Flows::Stub::AddFlow, ShowFlow);
  add_sockets(add, *add_request.mutable_rx_sockets());
  add.add_option_function<std::string>(
         "--steer-to",
         [&add_request](const std::string& text) {
           *add_request.mutable_steer_to() = QueueArgument("--steer-to", text);
         },
         "Ask the port to deliver matching frames to this queue")
      ->option_text("PORT:QUEUE");
  const auto priority = std::make_shared<std::int32_t>(0);
  AddMatchFlags(add, *add_request.mutable_match(), *priority);
  add.parse_complete_callback([&add_request, priority] { add_request.set_priority(*priority); });

  const auto add_id = [](CLI::App& verb, auto& request) {
    verb.add_option_function<std::uint64_t>(
            "FLOW", [&request](const std::uint64_t& id) { request.set_id(id); },
            "Number of the rule")
        ->check(Between(std::uint64_t{1}, std::numeric_limits<std::uint64_t>::max()))
        ->required()
        ->option_text(" ");
  };
  const auto add_force = [](CLI::App& verb, auto& request) {
    verb.add_flag_callback(
        "--force", [&request] { request.set_force(true); }, "Although a rx socket is strict");
  };
  CLI::App& update = AddVerb(flow, "update", "Point a rule at other rx sockets, in one step",
                             "flow update 3 s1 s2");
  auto& update_request = SetCall(update, ctl, &v1::Flows::Stub::UpdateFlow, ShowFlow);
  add_id(update, update_request);
  add_sockets(update, *update_request.mutable_rx_sockets());
  add_force(update, update_request);

  CLI::App& remove = AddVerb(flow, "delete", "Remove a rule", "flow delete 3");
  auto& remove_request = SetCall(
      remove, ctl, &v1::Flows::Stub::DeleteFlow, +[](const v1::DeleteFlowResponse&) {});
  add_id(remove, remove_request);
  add_force(remove, remove_request);

  CLI::App& list =
      AddVerb(flow, "list", "All rules, in the order in which they are tried", "flow list");
  SetCall(
      list, ctl, &v1::Flows::Stub::ListFlows,
      +[](const v1::ListFlowsResponse& response) { std::cout << FlowTable(response.flows()); });
}

// "5" or "0x28000000:16".
Result<v1::TokenRange> ParseRange(const std::string& text) {
  const auto number = [](const std::string& digits) -> std::optional<std::uint32_t> {
    const bool hex = digits.starts_with("0x");
    std::uint32_t value;
    const char* end = digits.data() + digits.size();
    const auto [last, error] =
        std::from_chars(digits.data() + (hex ? 2 : 0), end, value, hex ? 16 : 10);
    if (error != std::errc() || last != end) return std::nullopt;
    return value;
  };
  const std::size_t colon = text.find(':');
  const auto first = number(text.substr(0, colon));
  const auto count = colon == std::string::npos ? 1 : number(text.substr(colon + 1));
  if (!first || !count) {
    return Status(Code::kInvalidArgument,
                  "'" + text + "' is no range of tokens: use FIRST or FIRST:COUNT");
  }
  v1::TokenRange range;
  range.set_first_token(*first);
  range.set_count(*count);
  return range;
}

void AddReturn(CLI::App& app, Ctl& ctl) {
  CLI::App& verb =
      AddVerb(app, "return", "Return tokens that a rx socket holds", "return s0 17 0x28000000:16");
  auto& request = SetCall(
      verb, ctl, &v1::Tokens::Stub::ReturnTokens, +[](const v1::ReturnTokensResponse& response) {
        Table table({"RANGE", "RELEASED", "REFUSALS"});
        for (int i = 0; i < response.results_size(); i++) {
          table.Add(i + 1, response.results(i).released(), Text(response.results(i).refusals()));
        }
        std::cout << table;
      });
  AddName(verb, "SOCKET", "Name of the rx socket", request.mutable_rx_socket());
  verb.add_option_function<std::vector<std::string>>(
          "RANGE",
          [&request](const std::vector<std::string>& ranges) {
            for (const std::string& text : ranges) {
              const Result<v1::TokenRange> range = ParseRange(text);
              if (!range.ok()) throw CLI::ValidationError("RANGE", range.status().message());
              *request.add_ranges() = *range;
            }
          },
          "FIRST or FIRST:COUNT, one or more; decimal, or hexadecimal with 0x")
      ->required()
      ->option_text(" ");
  verb.add_flag_function(
      "--all-or-nothing", [&request](std::int64_t) { request.set_all_or_nothing(true); },
      "Return nothing unless all are accepted");
}

// ---- stats -------------------------------------------------------------------------------

struct Snapshot {
  v1::ListPortsResponse ports;
  v1::ListBindingsResponse bindings;
  v1::ListRxSocketsResponse rx_sockets;
};

Status TakeSnapshot(const Ctl& ctl, Snapshot& snapshot) {
  Status status = Call(ctl, &v1::Ports::Stub::ListPorts, {}, &snapshot.ports);
  if (status.ok()) {
    status = Call(ctl, &v1::Bindings::Stub::ListBindings, {}, &snapshot.bindings);
  }
  if (status.ok()) {
    status = Call(ctl, &v1::RxSockets::Stub::ListRxSockets, {}, &snapshot.rx_sockets);
  }
  return status;
}

void ShowJson(const Snapshot& snapshot, bool one_line) {
  nlohmann::ordered_json all;
  all.update(nlohmann::ordered_json::parse(ToJson(snapshot.ports)));
  all.update(nlohmann::ordered_json::parse(ToJson(snapshot.bindings)));
  all.update(nlohmann::ordered_json::parse(ToJson(snapshot.rx_sockets)));
  std::cout << all.dump(one_line ? -1 : 1) << std::endl;
}

void ShowTables(const Snapshot& snapshot) {
  Table drops({"DROPPED_AT", "REASON", "PACKETS"});
  const auto add = [&drops](const std::string& at, const Counts& counts) {
    for (const auto& [reason, count] : std::map(counts.begin(), counts.end())) {
      if (count > 0) drops.Add(at, reason, count);
    }
  };
  for (const v1::Port& port : snapshot.ports.ports()) {
    for (const v1::Queue& queue : port.queues()) {
      add(port.name() + ":" + std::to_string(queue.index()), queue.drops());
    }
  }
  for (const v1::RxSocket& rx_socket : snapshot.rx_sockets.rx_sockets()) {
    add(rx_socket.name(), rx_socket.statistics().drops());
  }
  ShowPorts(snapshot.ports.ports());
  std::cout << '\n'
            << QueueTable(snapshot.ports.ports()) << '\n'
            << BindingTable(snapshot.bindings.bindings()) << '\n'
            << RxSocketTable(snapshot.rx_sockets.rx_sockets()) << '\n'
            << drops << std::flush;
}

int Stats(const Ctl& ctl, bool watch) {
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGINT);
  sigaddset(&stop, SIGTERM);
  if (watch) pthread_sigmask(SIG_BLOCK, &stop, nullptr);
  const timespec second = {1, 0};
  const bool clear = !ctl.json && isatty(STDOUT_FILENO);
  do {
    Snapshot snapshot;
    const Status status = TakeSnapshot(ctl, snapshot);
    if (!status.ok()) return Fail(status);
    if (ctl.json) {
      ShowJson(snapshot, watch);
    } else {
      if (watch) std::cout << (clear ? "\x1b[H\x1b[2J" : "\n");
      ShowTables(snapshot);
    }
  } while (watch && sigtimedwait(&stop, nullptr, &second) < 0);
  return kDone;
}

void AddStats(CLI::App& app, Ctl& ctl) {
  CLI::App& verb = AddVerb(app, "stats", "Ports, queues, bindings, rx sockets, and drops by reason",
                           "stats --watch");
  const auto watch = std::make_shared<bool>(false);
  verb.add_flag("--watch", *watch, "Again every second; with --json one line for each");
  verb.callback([&ctl, watch] { ctl.verb = [&ctl, watch] { return Stats(ctl, *watch); }; });
}

// ---- health ------------------------------------------------------------------------------

// grpc.health.v1.Health/Check: an empty request asks for the server as a whole, and field 1
// of the answer is its state.
int Health(const Ctl& ctl) {
  using google::protobuf::Empty;
  constexpr std::uint64_t kServing = 1;
  grpc::TemplatedGenericStub<Empty, Empty> stub(ctl.Channel());
  grpc::ClientContext context;
  ctl.SetDeadline(context);
  Empty request, response;
  std::promise<grpc::Status> done;
  stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", {}, &request, &response,
                 [&done](grpc::Status status) { done.set_value(std::move(status)); });
  const Status status = ctl.ToStatus(done.get_future().get());
  if (!status.ok()) return Fail(status);
  const auto& fields = response.GetReflection()->GetUnknownFields(response);
  const bool serving = fields.field_count() == 1 && fields.field(0).number() == 1 &&
                       fields.field(0).type() == google::protobuf::UnknownField::TYPE_VARINT &&
                       fields.field(0).varint() == kServing;
  const std::string state = serving ? "SERVING" : "NOT_SERVING";
  std::cout << (ctl.json ? "{\"status\": \"" + state + "\"}" : state) << '\n';
  return serving ? kDone : kFailed;
}

void AddHealth(CLI::App& app, Ctl& ctl) {
  CLI::App& verb = AddVerb(app, "health", "Whether the daemon serves", "health");
  verb.callback([&ctl] { ctl.verb = [&ctl] { return Health(ctl); }; });
}

int Main(int argc, char** argv) {
  Ctl ctl;
  CLI::App app("Command line of rxtokend, which lends received packets to applications in place.",
               "rxtokenctl");
  app.footer(
      "Exit codes: 0 done, 1 the daemon refused or is not there, 2 wrong usage.\n"
      "`rxtokenctl VERB --help` explains a verb.");
  app.require_subcommand(1);
  app.fallthrough();
  app.add_option("--run-dir", ctl.run_dir,
                 "Directory of the daemon's sockets [$RXTOKEN_RUN_DIR, else " + ctl.run_dir + "]")
      ->option_text("DIR")
      ->check([](const std::string& dir) { return dir.empty() ? "the path is empty" : ""; });
  app.add_option("--timeout", ctl.timeout, "Seconds that the daemon has for an answer [10]")
      ->check(Between(0.001, 86400.0))
      ->option_text("S");
  app.add_flag("--json", ctl.json, "Print JSON, not tables");
  AddPort(app, ctl);
  AddWorker(app, ctl);
  AddBinding(app, ctl);
  AddSocket(app, ctl);
  AddHolders(app, ctl);
  AddFlow(app, ctl);
  AddReturn(app, ctl);
  AddStats(app, ctl);
  AddRecv(app, ctl);
  AddHealth(app, ctl);
  app.failure_message([](const CLI::App*, const CLI::Error& error) {
    return "rxtokenctl: " + std::string(error.what()) + "\nRun with --help for more.\n";
  });
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error, std::cout, std::cerr) == 0 ? kDone : kUsage;
  }
  return ctl.verb();
}

}  // namespace
}  // namespace rxtoken

int main(int argc, char** argv) {
  try {
    return rxtoken::Main(argc, argv);
  } catch (const std::exception& error) {
    return rxtoken::Fail(rxtoken::Status(rxtoken::Code::kInternal, error.what()));
  }
}
