// SPDX-License-Identifier: Apache-2.0
// receive.cc - prints the source and the size of what arrives on UDP port 4000 of port p0.
#include <rxtoken/rxtoken.h>

#include <cstdio>
#include <vector>

int main() {
  auto client = rxtoken::OrDie(rxtoken::Client::Connect());
  rxtoken::OrDie(client.Bind({.name = "b0", .buffer_bytes = 64 << 20, .queues = {{"p0", 0}}}));
  auto rx = rxtoken::OrDie(client.OpenRxSocket({.name = "example"}));
  rxtoken::OrDie(client.AddFlow({.protocol = rxtoken::kUdp, .destination_port = 4000}, rx));
  std::vector<rxtoken::Message> messages(64);
  for (;;) {
    for (const auto& message : rxtoken::OrDie(rx.Receive(messages, rxtoken::kForever))) {
      std::printf("%s %zu bytes\n", message.source().ToString().c_str(), message.size());
    }
  }
}
