// SPDX-License-Identifier: Apache-2.0
#include "control/config.h"

#include <grp.h>
#include <pwd.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <limits>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>
#include <utility>

namespace rxtoken {
namespace {

constexpr std::uint32_t kMaxQueues = 1024;
constexpr std::uint32_t kMaxReassemblyDatagrams = 1 << 20;
constexpr std::uint32_t kMaxReassemblyPages = 1 << 22;
constexpr std::uint32_t kMaxNicRingEntries = 65535;
constexpr std::uint64_t kDefaultBufferBytes = 64u << 20;
constexpr std::uint64_t kMax32 = std::numeric_limits<std::uint32_t>::max();
constexpr int kMaxCpu = 1023;

// The whole text as a decimal number in [min, max].
std::optional<std::int64_t> ParseNumber(std::string_view text, std::int64_t min, std::int64_t max) {
  std::int64_t number = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || stop != text.data() + text.size()) return std::nullopt;
  if (number < min || number > max) return std::nullopt;
  return number;
}

// "4096", "64KiB", "64MiB", "1GiB".
std::optional<std::uint64_t> ParseBytes(std::string_view text) {
  unsigned shift = 0;
  for (const auto& [suffix, bits] :
       {std::pair{"KiB", 10u}, std::pair{"MiB", 20u}, std::pair{"GiB", 30u}}) {
    if (text.ends_with(suffix)) {
      shift = bits;
      text.remove_suffix(3);
    }
  }
  const auto number = ParseNumber(text, 0, std::numeric_limits<std::int64_t>::max() >> shift);
  if (!number) return std::nullopt;
  return static_cast<std::uint64_t>(*number) << shift;
}

constexpr std::string_view kBytesAllowed = "bytes, or with KiB, MiB or GiB";
constexpr std::string_view kPageAllowed = "2048, 4096, 16384 or 65536";

std::optional<std::uint32_t> ParsePageBytes(std::string_view text) {
  const auto bytes = ParseBytes(text);
  for (const std::uint32_t allowed : {2048u, 4096u, 16384u, 65536u}) {
    if (bytes == allowed) return allowed;
  }
  return std::nullopt;
}

std::optional<v1::Memory> ParseMemory(std::string_view text) {
  if (text == "plain") return v1::MEMORY_PLAIN;
  if (text == "huge") return v1::MEMORY_HUGE;
  return std::nullopt;
}

// Where the first byte lies that does not belong into a text file, because it is not UTF-8 or a
// control character.
std::optional<std::size_t> FindNoText(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i]);
    if (first < 0x80) {
      const bool control = first < ' ' || first == 0x7F;
      if (control && first != '\t' && first != '\n' && first != '\r') return i;
      i++;
      continue;
    }
    const std::size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
    std::uint32_t code = first & (0x7Fu >> length);
    if (first < 0xC2 || first > 0xF4 || length > text.size() - i) return i;
    for (std::size_t at = i + 1; at < i + length; at++) {
      const auto next = static_cast<unsigned char>(text[at]);
      if ((next & 0xC0) != 0x80) return i;
      code = code << 6 | (next & 0x3Fu);
    }
    const bool overlong = code < (length == 4 ? 0x10000u : length == 3 ? 0x800u : 0x80u);
    const bool surrogate = code >= 0xD800 && code <= 0xDFFF;
    if (overlong || surrogate || code > 0x10FFFF) return i;
    i += length;
  }
  return std::nullopt;
}

// A CPU number, or "any": not pinned (-1).
std::optional<int> ParseCpu(std::string_view text) {
  if (text == "any") return -1;
  const auto cpu = ParseNumber(text, 0, kMaxCpu);
  if (!cpu) return std::nullopt;
  return static_cast<int>(*cpu);
}

constexpr std::string_view kCpuAllowed =
    "a CPU number from 0 to 1023, or 'any' for one that is not pinned";

// -- YAML -------------------------------------------------------------------------------------

// yaml-cpp reports by exception, so this file does too, up to ParseConfig().
struct ConfigError {
  std::string message;
};

// A place in the file.
class Value {
 public:
  using Fields = std::initializer_list<std::pair<const char*, std::function<void(Value)>>>;

  Value(std::string file, std::string key, YAML::Node node)
      : file_(std::move(file)), key_(std::move(key)), node_(std::move(node)) {}

  std::string where() const {
    return file_ + ":" + std::to_string(node_.Mark().line + 1) + ": " + key_;
  }

  [[noreturn]] void Refuse(std::string_view allowed) const {
    std::string message = where();
    message += node_.IsScalar() ? ": '" + node_.Scalar() + "' is not allowed" : ": wrong type";
    throw ConfigError{message + "; use " + std::string(allowed)};
  }

  std::string Text() const {
    if (!node_.IsScalar() || node_.Scalar().empty()) Refuse("a text");
    return node_.Scalar();
  }

  std::int64_t Number(std::int64_t min, std::int64_t max) const {
    const auto number =
        node_.IsScalar() ? ParseNumber(node_.Scalar(), min, max) : std::optional<std::int64_t>();
    if (!number) {
      Refuse("a whole number from " + std::to_string(min) + " to " + std::to_string(max));
    }
    return *number;
  }
  std::uint32_t Number32(std::uint32_t min, std::uint32_t max) const {
    return static_cast<std::uint32_t>(Number(min, max));
  }

  // What `parse` makes of the text.
  template <typename Parse>
  auto Parsed(Parse parse, std::string_view allowed) const {
    const auto value = node_.IsScalar() ? parse(node_.Scalar()) : std::nullopt;
    if (!value) Refuse(allowed);
    return *value;
  }

  bool Bool() const {
    const auto parse = [](std::string_view text) {
      return text == "true"    ? std::optional(true)
             : text == "false" ? std::optional(false)
                               : std::nullopt;
    };
    return Parsed(parse, "true or false");
  }

  bool is_list() const { return node_.IsSequence(); }

  void ForEach(const std::function<void(Value)>& visit) const {
    if (!node_.IsSequence()) Refuse("a list");
    for (std::size_t i = 0; i < node_.size(); i++) {
      visit(Value(file_, key_ + "[" + std::to_string(i) + "]", node_[i]));
    }
  }

  // Visits the mapping's keys. One that is not among `fields`, or comes twice, is an error,
  // as is one of `required` that is missing.
  void Map(Fields fields, std::initializer_list<std::string_view> required = {}) const {
    if (!node_.IsMap()) Refuse("a mapping with " + KeyList(fields));
    std::set<std::string, std::less<>> seen;
    for (const auto& entry : node_) {
      const std::string& name = entry.first.Scalar();
      const Value value(file_, key_.empty() ? name : key_ + "." + name, entry.second);
      const auto field = std::find_if(fields.begin(), fields.end(),
                                      [&](const auto& known) { return name == known.first; });
      const Value key_place(file_, value.key_, entry.first);
      if (field == fields.end()) {
        throw ConfigError{key_place.where() + ": unknown key; use " + KeyList(fields)};
      }
      if (!seen.insert(name).second) throw ConfigError{key_place.where() + ": given twice"};
      field->second(value);
    }
    for (const std::string_view name : required) {
      if (!seen.contains(name))
        throw ConfigError{where() + ": " + std::string(name) + " is missing"};
    }
  }

 private:
  static std::string KeyList(Fields fields) {
    std::string list;
    for (const auto& [name, visit] : fields) list += (list.empty() ? "" : ", ") + std::string(name);
    return list;
  }

  std::string file_;
  std::string key_;  // "bindings[0].queues[1].port"
  YAML::Node node_;
};

void ReadWorkers(const Value& value, std::vector<int>& cpus) {
  cpus.clear();
  if (!value.is_list()) {
    cpus.assign(value.Number32(1, kMaxWorkers), -1);
    return;
  }
  value.ForEach([&](const Value& worker) {
    int& cpu = cpus.emplace_back(-1);
    worker.Map({{"cpu", [&](Value v) { cpu = v.Parsed(ParseCpu, kCpuAllowed); }}});
  });
  if (cpus.empty() || cpus.size() > kMaxWorkers) {
    value.Refuse("1.." + std::to_string(kMaxWorkers) + " workers");
  }
}

void ReadReassembly(const Value& value, ReassemblyLimits& limits) {
  value.Map(
      {{"datagrams", [&](Value v) { limits.datagrams = v.Number32(64, kMaxReassemblyDatagrams); }},
       {"pages", [&](Value v) { limits.pages = v.Number32(64, kMaxReassemblyPages); }},
       {"timeout_ms", [&](Value v) { limits.timeout_ms = v.Number32(10, 30'000); }}});
}

PortOptions ReadPort(const Value& value) {
  PortOptions port;
  value.Map(
      {{"name", [&](Value v) { port.name = v.Text(); }},
       {"device", [&](Value v) { port.device = v.Text(); }},
       {"queues", [&](Value v) { port.queues = v.Number32(1, kMaxQueues); }},
       {"ring_entries", [&](Value v) { port.ring_entries = v.Number32(1, kMaxNicRingEntries); }},
       {"exception_tap", [&](Value v) { port.exception_tap = v.Text(); }}},
      {"name", "device"});
  return port;
}

void ReadQueue(const Value& value, v1::QueueId& queue) {
  value.Map({{"port", [&](Value v) { queue.set_port(v.Text()); }},
             {"queue", [&](Value v) { queue.set_queue(v.Number32(0, kMaxQueues - 1)); }}},
            {"port", "queue"});
}

v1::BindRequest ReadBinding(const Value& value) {
  v1::BindRequest binding;
  value.Map(
      {{"name", [&](Value v) { binding.set_name(v.Text()); }},
       {"buffer_bytes",
        [&](Value v) { binding.set_buffer_bytes(v.Parsed(ParseBytes, kBytesAllowed)); }},
       {"page_bytes",
        [&](Value v) { binding.set_page_bytes(v.Parsed(ParsePageBytes, kPageAllowed)); }},
       {"frames_per_page", [&](Value v) { binding.set_frames_per_page(v.Number32(1, 32)); }},
       {"memory", [&](Value v) { binding.set_memory(v.Parsed(ParseMemory, "plain or huge")); }},
       {"queues",
        [&](Value v) {
          v.ForEach([&](const Value& queue) { ReadQueue(queue, *binding.add_queues()); });
        }}},
      {"name", "buffer_bytes"});
  return binding;
}

v1::OpenRxSocketRequest ReadRxSocket(const Value& value) {
  v1::OpenRxSocketRequest rx_socket;
  const auto content = [](std::string_view text) {
    return text == "payload" ? std::optional(v1::CONTENT_PAYLOAD)
           : text == "frame" ? std::optional(v1::CONTENT_FRAME)
                             : std::nullopt;
  };
  const auto outside = [](std::string_view text) {
    return text == "copy"   ? std::optional(v1::OUTSIDE_COPY)
           : text == "drop" ? std::optional(v1::OUTSIDE_DROP)
                            : std::nullopt;
  };
  const auto slow = [](std::string_view text) {
    return text == "drop"       ? std::optional(v1::SLOW_DROP_NEW)
           : text == "copy-out" ? std::optional(v1::SLOW_COPY_OUT)
           : text == "pause"    ? std::optional(v1::SLOW_PAUSE)
                                : std::nullopt;
  };
  const auto steering = [](std::string_view text) {
    return text == "migrate"  ? std::optional(v1::STEERING_MIGRATE)
           : text == "strict" ? std::optional(v1::STEERING_STRICT)
                              : std::nullopt;
  };
  value.Map(
      {{"name", [&](Value v) { rx_socket.set_name(v.Text()); }},
       {"content", [&](Value v) { rx_socket.set_content(v.Parsed(content, "payload or frame")); }},
       {"ring_entries",
        [&](Value v) { rx_socket.set_ring_entries(v.Number32(kMinRingEntries, kMaxRingEntries)); }},
       {"max_held_fragments",
        [&](Value v) { rx_socket.set_max_held_fragments(v.Number32(0, kMax32)); }},
       {"bindings",
        [&](Value v) {
          v.ForEach([&](const Value& name) { rx_socket.add_bindings(name.Text()); });
        }},
       {"outside", [&](Value v) { rx_socket.set_outside(v.Parsed(outside, "copy or drop")); }},
       {"steering",
        [&](Value v) { rx_socket.set_steering(v.Parsed(steering, "migrate or strict")); }},
       {"slow", [&](Value v) { rx_socket.set_slow(v.Parsed(slow, "drop, copy-out or pause")); }},
       {"copy_out_bytes",
        [&](Value v) { rx_socket.set_copy_out_bytes(v.Parsed(ParseBytes, kBytesAllowed)); }},
       {"lease_ms", [&](Value v) { rx_socket.set_lease_ms(v.Number32(0, 3'600'000)); }}},
      {"name"});
  return rx_socket;
}

v1::Match ReadMatch(const Value& value) {
  v1::Match match;
  value.Map(
      {{"port", [&](Value v) { match.set_port(v.Text()); }},
       {"queue", [&](Value v) { match.set_queue(v.Number32(0, kMaxQueues - 1)); }},
       {"vlan", [&](Value v) { match.set_vlan(v.Number32(0, 4094)); }},
       {"source", [&](Value v) { match.set_source(v.Text()); }},
       {"destination", [&](Value v) { match.set_destination(v.Text()); }},
       {"protocol", [&](Value v) { match.set_protocol(v.Number32(0, 255)); }},
       {"source_port", [&](Value v) { match.set_source_port(v.Number32(1, 65535)); }},
       {"destination_port", [&](Value v) { match.set_destination_port(v.Number32(1, 65535)); }}});
  return match;
}

v1::AddFlowRequest ReadFlow(const Value& value) {
  v1::AddFlowRequest flow;
  value.Map(
      {{"match", [&](Value v) { *flow.mutable_match() = ReadMatch(v); }},
       {"rx_sockets",
        [&](Value v) { v.ForEach([&](const Value& name) { flow.add_rx_sockets(name.Text()); }); }},
       {"steer_to", [&](Value v) { ReadQueue(v, *flow.mutable_steer_to()); }},
       {"priority",
        [&](Value v) { flow.set_priority(static_cast<std::int32_t>(v.Number(-32768, 32767))); }}},
      {"match", "rx_sockets"});
  return flow;
}

// "1000", or the name of a user that the host knows.
std::optional<uid_t> ParseUser(const std::string& text) {
  if (const auto number = ParseNumber(text, 0, kMax32 - 1)) return static_cast<uid_t>(*number);
  const passwd* const user = getpwnam(text.c_str());
  return user == nullptr ? std::nullopt : std::optional(user->pw_uid);
}
std::optional<gid_t> ParseGroup(const std::string& text) {
  if (const auto number = ParseNumber(text, 0, kMax32 - 1)) return static_cast<gid_t>(*number);
  const group* const found = getgrnam(text.c_str());
  return found == nullptr ? std::nullopt : std::optional(found->gr_gid);
}
constexpr std::string_view kUserAllowed = "a user of this host, by name or number";
constexpr std::string_view kGroupAllowed = "a group of this host, by name or number";

void ReadLimits(const Value& value, Limits& limits) {
  const auto amount = [&](Resource resource) {
    return [&limits, resource](const Value& v) {
      limits.amounts[static_cast<std::size_t>(resource)] = v.Parsed(ParseBytes, kBytesAllowed);
    };
  };
  value.Map({{"sessions", amount(Resource::kSessions)},
             {"bindings", amount(Resource::kBindings)},
             {"buffer_bytes", amount(Resource::kBufferBytes)},
             {"rx_sockets", amount(Resource::kRxSockets)},
             {"ring_entries", amount(Resource::kRingEntries)},
             {"held_fragments", amount(Resource::kHeldFragments)},
             {"flows", amount(Resource::kFlows)},
             {"streams", amount(Resource::kStreams)},
             {"default_held_fragments",
              [&](Value v) { limits.default_held_fragments = v.Number32(1, kMax32); }}});
}

// For a list of things that are made of `read(place)`.
template <typename T, typename Read>
std::function<void(Value)> ListInto(std::vector<T>& list, Read read) {
  return [&list, read](const Value& value) {
    value.ForEach([&](const Value& item) { list.push_back(read(item)); });
  };
}

Tenant ReadTenant(const Value& value) {
  Tenant tenant;
  const auto text = [](const Value& v) { return v.Text(); };
  value.Map(
      {{"uids", ListInto(tenant.uids, [](Value v) { return v.Parsed(ParseUser, kUserAllowed); })},
       {"gids", ListInto(tenant.gids, [](Value v) { return v.Parsed(ParseGroup, kGroupAllowed); })},
       {"certificate_names", ListInto(tenant.certificate_names, text)},
       {"ports", [&](Value v) { ListInto(tenant.ports.emplace(), text)(v); }},
       {"flows", [&](Value v) { ListInto(tenant.flows.emplace(), ReadMatch)(v); }},
       {"bindings", ListInto(tenant.bindings, text)},
       {"limits", [&](Value v) { ReadLimits(v, tenant.limits); }}});
  if (tenant.uids.empty() && tenant.gids.empty() && tenant.certificate_names.empty()) {
    value.Refuse("one of uids, gids and certificate_names at least");
  }
  return tenant;
}

void ReadAccess(const Value& value, Config& config) {
  config.access.configured = true;
  value.Map({{"group", [&](Value v) { config.access_gid = v.Parsed(ParseGroup, kGroupAllowed); }},
             {"admin_group",
              [&](Value v) { config.access.admin_gid = v.Parsed(ParseGroup, kGroupAllowed); }},
             {"tenants", ListInto(config.access.tenants, ReadTenant)}});
}

// For a list of things that are read by `read`.
template <typename Request>
std::function<void(Value)> ListOf(std::vector<Item<Request>>& items,
                                  Request (*read)(const Value&)) {
  return [&items, read](const Value& list) {
    list.ForEach([&](const Value& item) { items.push_back({item.where(), read(item)}); });
  };
}

TcpOptions ReadListen(const Value& value) {
  TcpOptions tcp;
  value.Map({{"tcp", [&](Value v) { tcp.address = v.Text(); }},
             {"certificate", [&](Value v) { tcp.certificate = v.Text(); }},
             {"key", [&](Value v) { tcp.key = v.Text(); }},
             {"client_ca", [&](Value v) { tcp.client_ca = v.Text(); }}},
            {"tcp"});
  return tcp;
}

Config ReadConfig(const Value& root) {
  Config config;
  DataplaneOptions& dataplane = config.dataplane;
  const auto poll = [](std::string_view text) {
    return text == "adaptive" ? std::optional(PollMode::kAdaptive)
           : text == "busy"   ? std::optional(PollMode::kBusy)
                              : std::nullopt;
  };
  root.Map({{"run_dir", [&](Value v) { config.run_dir = v.Text(); }},
            {"workers", [&](Value v) { ReadWorkers(v, dataplane.worker_cpus); }},
            {"poll", [&](Value v) { dataplane.poll = v.Parsed(poll, "adaptive or busy"); }},
            {"hugepages", [&](Value v) { dataplane.hugepages = v.Bool(); }},
            {"memory_mib", [&](Value v) { dataplane.memory_mib = v.Number32(1, kMax32); }},
            {"eal_args",
             [&](Value v) {
               v.ForEach([&](const Value& arg) { dataplane.eal_args.push_back(arg.Text()); });
             }},
            {"reassembly", [&](Value v) { ReadReassembly(v, dataplane.reassembly); }},
            {"ports", ListOf(config.ports, ReadPort)},
            {"bindings", ListOf(config.bindings, ReadBinding)},
            {"rx_sockets", ListOf(config.rx_sockets, ReadRxSocket)},
            {"flows", ListOf(config.flows, ReadFlow)},
            {"access", [&](Value v) { ReadAccess(v, config); }},
            {"listen", [&](Value v) { config.tcp = ReadListen(v); }},
            {"limits", [&](Value v) { ReadLimits(v, config.access.limits); }}});
  return config;
}

// -- flags ------------------------------------------------------------------------------------

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

// "a=b=c" -> {"a", "b=c"}; the second is empty if there is no '='.
std::pair<std::string, std::string> SplitOnce(const std::string& text, char separator) {
  const std::size_t at = text.find(separator);
  if (at == std::string::npos) return {text, ""};
  return {text.substr(0, at), text.substr(at + 1)};
}

Status BadFlag(const std::string& where, const std::string& part, std::string_view allowed) {
  return Status(Code::kInvalidArgument,
                where + ": '" + part + "' is not allowed; use " + std::string(allowed));
}

}  // namespace

Result<Config> ParseConfig(const std::string& name, const std::string& text) {
  if (const auto at = FindNoText(text)) {
    const auto line =
        1 + std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(*at), '\n');
    return Status(Code::kInvalidArgument,
                  name + ":" + std::to_string(line) + ": not a text in UTF-8");
  }
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(text);
    if (documents.size() > 1) {
      return Status(Code::kInvalidArgument,
                    name + ": " + std::to_string(documents.size()) +
                        " YAML documents; use one, without a line of '---' in between");
    }
    if (documents.empty() || documents[0].IsNull()) return Config();  // an empty file
    return ReadConfig(Value(name, "", documents[0]));
  } catch (const ConfigError& error) {
    return Status(Code::kInvalidArgument, error.message);
  } catch (const YAML::Exception& error) {
    return Status(Code::kInvalidArgument, name + ":" + std::to_string(error.mark.line + 1) +
                                              ": not valid YAML: " + error.msg);
  }
}

Result<Config> LoadConfig(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  // A directory opens like a file, and reads like an empty one.
  std::error_code ignored;
  if (!file || std::filesystem::is_directory(path, ignored)) {
    return Status(Code::kInvalidArgument, "configuration file '" + path + "' cannot be read");
  }
  return ParseConfig(path, text.str());
}

Result<Item<PortOptions>> ParsePortFlag(const std::string& text) {
  Item<PortOptions> item{"--port '" + text + "'", {}};
  PortOptions& port = item.request;
  std::vector<std::string> parts = Split(text, ';');
  if (parts.empty()) parts.emplace_back();
  std::tie(port.name, port.device) = SplitOnce(parts[0], '=');
  if (FindNoText(text)) return BadFlag(item.where, parts[0], "a text in UTF-8");
  if (port.name.empty() || port.device.empty()) {
    return BadFlag(item.where, parts[0], "NAME=DEVICE, for example p0=net_null0,size=64");
  }
  for (std::size_t i = 1; i < parts.size(); i++) {
    const auto [key, value] = SplitOnce(parts[i], '=');
    const auto number = ParseNumber(value, 1, key == "ring" ? kMaxNicRingEntries : kMaxQueues);
    if (key == "queues" && number) {
      port.queues = static_cast<std::uint32_t>(*number);
    } else if (key == "ring" && number) {
      port.ring_entries = static_cast<std::uint32_t>(*number);
    } else if (key == "exception_tap" && !value.empty()) {
      port.exception_tap = value;
    } else {
      return BadFlag(item.where, parts[i],
                     "queues=1..1024, ring=1..65535 or exception_tap=INTERFACE");
    }
  }
  return item;
}

Result<Item<v1::BindRequest>> ParseBindFlag(const std::string& text) {
  Item<v1::BindRequest> item{"--bind '" + text + "'", {}};
  v1::BindRequest& binding = item.request;
  binding.set_buffer_bytes(kDefaultBufferBytes);
  const auto [name, parts] = SplitOnce(text, '=');
  if (name.empty() || parts.empty()) {
    return BadFlag(item.where, text, "NAME=PORT:QUEUE, for example b0=p0:0,size=64MiB");
  }
  binding.set_name(name);
  for (const std::string& part : Split(parts, ',')) {
    const auto [key, value] = SplitOnce(part, '=');
    if (key == "size") {
      const auto bytes = ParseBytes(value);
      if (!bytes) return BadFlag(item.where, part, "size in " + std::string(kBytesAllowed));
      binding.set_buffer_bytes(*bytes);
    } else if (key == "page") {
      const auto bytes = ParsePageBytes(value);
      if (!bytes) return BadFlag(item.where, part, "page=" + std::string(kPageAllowed));
      binding.set_page_bytes(*bytes);
    } else if (key == "memory") {
      const auto memory = ParseMemory(value);
      if (!memory) return BadFlag(item.where, part, "memory=plain or memory=huge");
      binding.set_memory(*memory);
    } else {
      const auto [port, queue] = SplitOnce(part, ':');
      const auto number = ParseNumber(queue, 0, kMaxQueues - 1);
      if (port.empty() || !number) {
        return BadFlag(item.where, part, "PORT:QUEUE, size=, page= or memory=");
      }
      v1::QueueId& id = *binding.add_queues();
      id.set_port(port);
      id.set_queue(static_cast<std::uint32_t>(*number));
    }
  }
  return item;
}

Result<int> ParseWorkerFlag(const std::string& text) {
  const auto cpu = ParseCpu(text);
  if (!cpu) return BadFlag("--worker", text, kCpuAllowed);
  return *cpu;
}

}  // namespace rxtoken
