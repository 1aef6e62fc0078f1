// SPDX-License-Identifier: Apache-2.0
#include "control/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rxtoken {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::StrEq;

std::string Error(const std::string& text) {
  const Result<Config> config = ParseConfig("f.yaml", text);
  EXPECT_FALSE(config.ok());
  EXPECT_EQ(config.status().code(), Code::kInvalidArgument);
  return config.status().message();
}

TEST(Config, EveryKeyIsRead) {
  const Result<Config> config = ParseConfig("f.yaml", R"(
run_dir: /run/elsewhere
workers: [{cpu: 2}, {cpu: any}, {}]
poll: busy
hugepages: true
memory_mib: 512
eal_args: [--log-level=debug]
ports:
  - {name: p0, device: "net_null0,size=64", queues: 2, ring_entries: 1024,
     exception_tap: kernel0}
bindings:
  - name: b0
    buffer_bytes: 64MiB
    page_bytes: 16KiB
    frames_per_page: 4
    memory: plain
    queues: [{port: p0, queue: 1}]
rx_sockets:
  - {name: s0, content: frame, ring_entries: 64, max_held_fragments: 100, bindings: [b0],
     outside: drop, steering: strict}
flows:
  - rx_sockets: [s0, s1]
    priority: -5
    steer_to: {port: p0, queue: 2}
    match: {port: p0, queue: 1, vlan: 7, source: 10.0.0.0/8, destination: 10.0.0.1,
            protocol: 17, source_port: 1, destination_port: 65535}
)");
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->run_dir, "/run/elsewhere");
  EXPECT_THAT(config->dataplane.worker_cpus, ElementsAre(2, -1, -1));
  EXPECT_EQ(config->dataplane.poll, PollMode::kBusy);
  EXPECT_TRUE(config->dataplane.hugepages);
  EXPECT_EQ(config->dataplane.memory_mib, 512u);
  EXPECT_THAT(config->dataplane.eal_args, ElementsAre("--log-level=debug"));

  ASSERT_EQ(config->ports.size(), 1u);
  EXPECT_EQ(config->ports[0].where, "f.yaml:9: ports[0]");
  EXPECT_EQ(config->ports[0].request.device, "net_null0,size=64");
  EXPECT_EQ(config->ports[0].request.queues, 2u);
  EXPECT_EQ(config->ports[0].request.ring_entries, 1024u);
  EXPECT_EQ(config->ports[0].request.exception_tap, "kernel0");

  ASSERT_EQ(config->bindings.size(), 1u);
  const v1::BindRequest& binding = config->bindings[0].request;
  EXPECT_EQ(binding.buffer_bytes(), 64u << 20);
  EXPECT_EQ(binding.page_bytes(), 16384u);
  EXPECT_EQ(binding.memory(), v1::MEMORY_PLAIN);
  EXPECT_EQ(binding.frames_per_page(), 4u);
  EXPECT_EQ(binding.queues(0).queue(), 1u);

  ASSERT_EQ(config->rx_sockets.size(), 1u);
  const v1::OpenRxSocketRequest& rx_socket = config->rx_sockets[0].request;
  EXPECT_EQ(rx_socket.content(), v1::CONTENT_FRAME);
  EXPECT_EQ(rx_socket.max_held_fragments(), 100u);
  EXPECT_THAT(rx_socket.bindings(), ElementsAre("b0"));
  EXPECT_EQ(rx_socket.outside(), v1::OUTSIDE_DROP);
  EXPECT_EQ(rx_socket.steering(), v1::STEERING_STRICT);

  ASSERT_EQ(config->flows.size(), 1u);
  const v1::AddFlowRequest& flow = config->flows[0].request;
  EXPECT_THAT(flow.rx_sockets(), ElementsAre("s0", "s1"));
  EXPECT_EQ(flow.steer_to().queue(), 2u);
  EXPECT_EQ(flow.priority(), -5);
  EXPECT_EQ(flow.match().source(), "10.0.0.0/8");
  EXPECT_EQ(flow.match().destination_port(), 65535u);
}

TEST(Config, AnEmptyFileIsTheDefaults) {
  const Result<Config> config = ParseConfig("f.yaml", "# nothing\n");
  ASSERT_TRUE(config.ok());
  EXPECT_THAT(config->dataplane.worker_cpus, ElementsAre(-1));
}

TEST(Config, WorkersCanBeANumber) {
  EXPECT_THAT(ParseConfig("f.yaml", "workers: 3")->dataplane.worker_cpus, ElementsAre(-1, -1, -1));
}

TEST(Config, ErrorsNameFileLineKeyValueAndWhatIsAllowed) {
  EXPECT_THAT(Error("poll: busy\nbindings:\n  - {name: b, page_bytes: 3000}\n"),
              StrEq("f.yaml:3: bindings[0].page_bytes: '3000' is not allowed; use 2048, 4096, "
                    "16384 or 65536"));
  EXPECT_THAT(Error("memory_mib: 12x"),
              StrEq("f.yaml:1: memory_mib: '12x' is not allowed; use a whole number from 1 to "
                    "4294967295"));
  EXPECT_THAT(Error("hugepages: yes"),
              StrEq("f.yaml:1: hugepages: 'yes' is not allowed; use true or false"));
  EXPECT_THAT(Error("\nports: {}"), StrEq("f.yaml:2: ports: wrong type; use a list"));
  EXPECT_THAT(Error("rx_sockets: [{name: a, rings: 4}]"),
              StrEq("f.yaml:1: rx_sockets[0].rings: unknown key; use name, content, "
                    "ring_entries, max_held_fragments, bindings, outside, steering, slow, "
                    "copy_out_bytes, lease_ms"));
  EXPECT_THAT(Error("poll: busy\npoll: busy"), StrEq("f.yaml:2: poll: given twice"));
  EXPECT_THAT(Error("ports:\n  - name: p0"), StrEq("f.yaml:2: ports[0]: device is missing"));
}

TEST(Config, ValuesOutOfRangeAreRefused) {
  for (const char* text :
       {"workers: 0",
        "workers: 17",
        "reassembly: {datagrams: 63}",
        "reassembly: {pages: 4194305}",
        "reassembly: {timeout_ms: 9}",
        "reassembly: {timeout_ms: 30001}",
        "workers: []",
        "workers: [{cpu: -1}]",
        "workers: [3]",
        "memory_mib: 0",
        "memory_mib: 4294967296",
        "memory_mib: 0x10",
        "memory_mib: 1.0",
        "poll: never",
        "run_dir: ''",
        "run_dir: [a]",
        "eal_args: -l",
        "ports: [{name: p, device: d, queues: 1025}]",
        "ports: [{name: p, device: d, queues: 0}]",
        "bindings: [{name: b, buffer_bytes: 64MB, queues: []}]",
        "bindings: [{name: b, buffer_bytes: 18446744073709551616, queues: []}]",
        "bindings: [{name: b, buffer_bytes: 9223372036854775807GiB, queues: []}]",
        "bindings: [{name: b, buffer_bytes: -1, queues: []}]",
        "rx_sockets: [{name: s, ring_entries: 65537}]",
        "bindings: [{name: b, buffer_bytes: 1MiB, frames_per_page: 0, queues: []}]",
        "rx_sockets: [{name: s, outside: keep}]",
        "rx_sockets: [{name: s, steering: loose}]",
        "flows: [{rx_sockets: [s], match: {vlan: 4095}}]",
        "flows: [{rx_sockets: [s], match: {}, priority: 32768}]",
        "flows: [{rx_sockets: s, match: {}}]",
        "just text",
        "a: [",
        "[]"}) {
    EXPECT_THAT(Error(text), testing::StartsWith("f.yaml:1")) << text;
  }
}

TEST(Config, ASecondDocumentIsRefused) {
  EXPECT_THAT(Error("poll: busy\n---\npoll: adaptive\n"), testing::HasSubstr("2 YAML documents"));
  EXPECT_TRUE(ParseConfig("f.yaml", "---\npoll: busy\n...\n").ok());
}

TEST(Config, WhatIsNotATextInUtf8IsRefused) {
  using std::string_literals::operator""s;
  for (const std::string& bytes :
       {"\0"s, "\x7F"s, "\x80"s, "\xC1\xBF"s, "\xC3"s, "\xC3 "s, "\xE0\x9F\xBF"s, "\xED\xA0\x80"s,
        "\xF0\x8F\xBF\xBF"s, "\xF4\x90\x80\x80"s, "\xF8\x88\x80\x80\x80"s, "\x1B[0m"s,
        "\x7F\x45LF\2\1\1\0\0"s}) {
    EXPECT_THAT(Error("poll: busy\n# " + bytes), StrEq("f.yaml:2: not a text in UTF-8"));
    EXPECT_FALSE(ParsePortFlag("p0=" + bytes).ok());
  }
  for (const std::string& text : {"\xC3\xA9"s, "\xE2\x82\xAC"s, "\xF0\x9F\x98\x80"s, "\t\r"s}) {
    EXPECT_TRUE(ParseConfig("f.yaml", "poll: busy # " + text + "\n").ok()) << text;
    EXPECT_TRUE(ParsePortFlag("p0=" + text).ok());
  }
}

TEST(Config, AFileThatCannotBeReadIsNamed) {
  const Result<Config> config = LoadConfig("/nonexistent/rxtokend.yaml");
  ASSERT_FALSE(config.ok());
  EXPECT_THAT(config.status().message(), testing::HasSubstr("/nonexistent/rxtokend.yaml"));
}

TEST(Flags, APortKeepsTheCommasOfItsDevice) {
  const auto port =
      ParsePortFlag("p0=net_null0,size=64,copy=0;queues=2;ring=256;exception_tap=kernel0");
  ASSERT_TRUE(port.ok());
  EXPECT_EQ(port->request.name, "p0");
  EXPECT_EQ(port->request.device, "net_null0,size=64,copy=0");
  EXPECT_EQ(port->request.queues, 2u);
  EXPECT_EQ(port->request.ring_entries, 256u);
  EXPECT_EQ(port->request.exception_tap, "kernel0");
}

TEST(Flags, ABindingTakesQueuesAndOptionsInAnyOrder) {
  const auto binding = ParseBindFlag("b0=p0:0,size=1GiB,p1:3,page=2048,memory=huge");
  ASSERT_TRUE(binding.ok());
  EXPECT_EQ(binding->request.name(), "b0");
  EXPECT_EQ(binding->request.buffer_bytes(), 1u << 30);
  EXPECT_EQ(binding->request.page_bytes(), 2048u);
  EXPECT_EQ(binding->request.memory(), v1::MEMORY_HUGE);
  ASSERT_EQ(binding->request.queues_size(), 2);
  EXPECT_EQ(binding->request.queues(1).port(), "p1");
  EXPECT_EQ(binding->request.queues(1).queue(), 3u);
}

TEST(Flags, ABindingOf64MiBIsTheDefault) {
  EXPECT_EQ(ParseBindFlag("b0=p0:0")->request.buffer_bytes(), 64u << 20);
}

TEST(Flags, WhatIsMalformedIsRefused) {
  for (const char* text :
       {"", "p0", "=dev", "p0=", "p0=d;queues=0", "p0=d;ring", "p0=d;x=1", "p0=d;exception_tap="}) {
    EXPECT_FALSE(ParsePortFlag(text).ok()) << text;
  }
  for (const char* text : {"", "b0", "b0=", "b0=p0", "b0=p0:", "b0=p0:x", "b0=:0", "b0=p0:1024",
                           "b0=p0:0,size=1MB", "b0=p0:0,page=3000", "b0=p0:0,memory=gpu"}) {
    EXPECT_FALSE(ParseBindFlag(text).ok()) << text;
  }
  for (const char* text : {"", "-1", "1024", "2x"})
    EXPECT_FALSE(ParseWorkerFlag(text).ok()) << text;
  EXPECT_EQ(ParseWorkerFlag("any").value(), -1);
  EXPECT_EQ(ParseWorkerFlag("2").value(), 2);
}

TEST(Config, SaysWhoMayDoWhatAndHowMuch) {
  const Result<Config> config = ParseConfig("f", R"(
access:
  group: 0
  admin_group: root
  tenants:
    - uids: [root, 1000]
      gids: [100]
      ports: [p0]
      flows: [{destination: 10.1.0.0/16, protocol: 17}]
      bindings: [b0]
      limits: {buffer_bytes: 64MiB, held_fragments: 4096, default_held_fragments: 256}
    - certificate_names: [rx1.example]
limits: {sessions: 3}
)");
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->access_gid, 0u);
  const Access& access = config->access;
  EXPECT_TRUE(access.configured);
  EXPECT_EQ(access.admin_gid, 0u);
  ASSERT_EQ(access.tenants.size(), 2u);
  const Tenant& tenant = access.tenants[0];
  EXPECT_THAT(tenant.uids, ElementsAre(0, 1000));
  EXPECT_THAT(tenant.gids, ElementsAre(100));
  EXPECT_THAT(*tenant.ports, ElementsAre("p0"));
  EXPECT_EQ(tenant.flows->at(0).destination(), "10.1.0.0/16");
  EXPECT_THAT(tenant.bindings, ElementsAre("b0"));
  const auto of = [](const Limits& limits, Resource resource) {
    return limits.amounts[static_cast<std::size_t>(resource)];
  };
  EXPECT_EQ(of(tenant.limits, Resource::kBufferBytes), 64u << 20);
  EXPECT_EQ(of(tenant.limits, Resource::kHeldFragments), 4096u);
  EXPECT_EQ(tenant.limits.default_held_fragments, 256u);
  EXPECT_EQ(of(tenant.limits, Resource::kSessions), of(DefaultLimits(), Resource::kSessions));
  EXPECT_FALSE(access.tenants[1].ports.has_value());
  EXPECT_THAT(access.tenants[1].certificate_names, ElementsAre("rx1.example"));
  EXPECT_EQ(of(access.limits, Resource::kSessions), 3u);
}

TEST(Config, AccessNamesUsersThatExist) {
  const auto refused = [](const std::string& text) {
    return ParseConfig("f", text).status().message();
  };
  EXPECT_THAT(refused("access: {group: no-such-group}"), HasSubstr("a group of this host"));
  EXPECT_THAT(refused("access: {tenants: [{uids: [no-such-user]}]}"),
              HasSubstr("access.tenants[0].uids[0]: 'no-such-user'"));
  EXPECT_THAT(refused("access: {tenants: [{ports: [p0]}]}"), HasSubstr("uids, gids"));
}

}  // namespace
}  // namespace rxtoken
