// SPDX-License-Identifier: Apache-2.0
#include "control/local_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "tests/unit/control/fake_dataplane.h"

namespace rxtoken {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

class LocalReaderTest : public testing::Test {
 protected:
  LocalReaderTest() {
    binding_ = *dataplane_.Bind({.name = "b", .buffer_bytes = 1 << 20, .queues = {}});
    rx_socket_ = *dataplane_.OpenRxSocket({.name = "s", .ring_entries = 64});
    const Result<Attachment> attachment = dataplane_.Attach(rx_socket_);
    reader_ = std::make_unique<LocalReader>(*attachment);
    doorbell_ = UniqueFd(attachment->doorbell);
  }

  void MapSlot() {
    dataplane_.MapSlot(rx_socket_, 0, binding_);
    reader_->AddBuffer(binding_, *dataplane_.GetBuffer(binding_));
  }
  LocalReader::ReadResult Read(int max_messages = 64) {
    batch_.Clear();
    return reader_->Read(batch_, max_messages);
  }

  FakeDataplane dataplane_;
  std::uint64_t binding_ = 0;
  std::uint64_t rx_socket_ = 0;
  std::unique_ptr<LocalReader> reader_;
  UniqueFd doorbell_;
  v1::ReceiveResponse batch_;
};

TEST_F(LocalReaderTest, AsksForABufferAndThenReadsFromIt) {
  dataplane_.MapSlot(rx_socket_, 5, binding_);
  dataplane_.Lend(rx_socket_, binding_, 5u << 27 | 3, 100, "hello");
  EXPECT_EQ(Read().unknown_binding, binding_);
  EXPECT_EQ(batch_.messages_size(), 0);
  reader_->AddBuffer(binding_, *dataplane_.GetBuffer(binding_));
  EXPECT_EQ(Read().unknown_binding, std::nullopt);
  ASSERT_EQ(batch_.messages_size(), 1);
  EXPECT_EQ(batch_.messages(0).fragments(0).payload(), "hello");
  EXPECT_EQ(batch_.messages(0).fragments(0).token(), 5u << 27 | 3);
  EXPECT_EQ(batch_.messages(0).fragments(0).offset(), 100u);
}

TEST_F(LocalReaderTest, AMessageThatGoesOnIsKeptUntilItIsWhole) {
  MapSlot();
  dataplane_.Lend(rx_socket_, binding_, 1, 0, "one ", kMoreFragments);
  Read();
  EXPECT_EQ(batch_.messages_size(), 0);
  dataplane_.Lend(rx_socket_, binding_, 2, 0, "two");
  Read();
  ASSERT_EQ(batch_.messages_size(), 1);
  EXPECT_EQ(batch_.messages(0).fragments(0).payload(), "one ");
  EXPECT_EQ(batch_.messages(0).fragments(1).payload(), "two");
  reader_->Settle(true);
  EXPECT_THAT(dataplane_.DrainReturns(rx_socket_), ElementsAre(1, 2));
}

TEST_F(LocalReaderTest, NotMoreMessagesThanAskedForAreTaken) {
  MapSlot();
  for (std::uint32_t token = 0; token < 5; token++) {
    dataplane_.Lend(rx_socket_, binding_, token, 0, "x");
  }
  Read(3);
  EXPECT_EQ(batch_.messages_size(), 3);
  Read(3);
  EXPECT_EQ(batch_.messages_size(), 2);
}

TEST_F(LocalReaderTest, ABatchStaysFarBelowTheSizeThatClientsTake) {
  MapSlot();
  const std::string big(60'000, 'x');
  const std::uint64_t binding =
      *dataplane_.Bind({.name = "big", .buffer_bytes = 4 << 20, .page_bytes = 65536, .queues = {}});
  dataplane_.MapSlot(rx_socket_, 1, binding);
  reader_->AddBuffer(binding, *dataplane_.GetBuffer(binding));
  for (std::uint32_t page = 0; page < 40; page++) {
    dataplane_.Lend(rx_socket_, binding, 1u << 27 | page, 0, big);
  }
  Read();
  EXPECT_LT(batch_.ByteSizeLong(), 2u << 20);
  EXPECT_GT(batch_.messages_size(), 10);
}

TEST_F(LocalReaderTest, HeldTokensAreNotReturned) {
  MapSlot();
  dataplane_.Lend(rx_socket_, binding_, 1, 0, "x");
  Read();
  reader_->Settle(false);
  dataplane_.Lend(rx_socket_, binding_, 2, 0, "x");
  Read();
  reader_->Settle(true);
  EXPECT_THAT(dataplane_.DrainReturns(rx_socket_), ElementsAre(2));
}

TEST_F(LocalReaderTest, RevokedTokensAreNotReturned) {
  MapSlot();
  dataplane_.MapSlot(rx_socket_, 1, binding_);
  dataplane_.Lend(rx_socket_, binding_, 3, 0, "revoked");
  dataplane_.Lend(rx_socket_, binding_, 1u << 27 | 4, 0, "kept");
  Descriptor revoked = {};
  revoked.kind = DescriptorKind::kRevoked;
  revoked.binding = static_cast<std::uint32_t>(binding_);
  dataplane_.Publish(rx_socket_, revoked);
  Read();
  EXPECT_EQ(batch_.messages_size(), 2);
  ASSERT_EQ(batch_.events_size(), 1);
  EXPECT_EQ(batch_.events(0).binding(), binding_);
  EXPECT_EQ(batch_.events(0).kind(), v1::BindingEvent::KIND_REVOKED);
  reader_->Settle(true);
  EXPECT_THAT(dataplane_.DrainReturns(rx_socket_), ElementsAre(1u << 27 | 4));
}

TEST_F(LocalReaderTest, AllThatWasReadGoesBackBeforeTheEndOfALeaseIsTaken) {
  MapSlot();
  const auto now =
      static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  dataplane_.Lend(rx_socket_, binding_, 3, 0, "x");
  Descriptor expired = {};
  expired.kind = DescriptorKind::kExpired;
  expired.slot = 0;
  expired.binding = static_cast<std::uint32_t>(binding_);
  expired.expired_at = HoldClock(now);
  dataplane_.Publish(rx_socket_, expired);
  Read();
  EXPECT_EQ(batch_.messages_size(), 1);
  EXPECT_EQ(batch_.events_size(), 0);
  reader_->Settle(true);
  EXPECT_THAT(dataplane_.DrainReturns(rx_socket_), ElementsAre(3));

  Read();
  ASSERT_EQ(batch_.events_size(), 1);
  const v1::BindingEvent& event = batch_.events(0);
  EXPECT_EQ(event.binding(), binding_);
  EXPECT_EQ(event.kind(), v1::BindingEvent::KIND_EXPIRED);
  EXPECT_EQ(event.expired_slot(), 0u);
  // The tick has an end, which may not have come yet.
  const auto wall = std::chrono::system_clock::now().time_since_epoch();
  EXPECT_NEAR(static_cast<double>(event.expired_until().seconds()),
              static_cast<double>(std::chrono::duration_cast<std::chrono::seconds>(wall).count()),
              60);
}

TEST_F(LocalReaderTest, TokensThatFoundNoRoomBeforeTheyWereRevokedAreNotReturned) {
  MapSlot();
  for (int round = 0; round < 2; round++) {
    for (std::uint32_t i = 0; i < 40; i++) dataplane_.Lend(rx_socket_, binding_, i, 0, "x");
    Read();
    reader_->Settle(true);
  }
  Descriptor revoked = {};
  revoked.kind = DescriptorKind::kRevoked;
  dataplane_.Publish(rx_socket_, revoked);
  Read();
  EXPECT_EQ(dataplane_.DrainReturns(rx_socket_).size(), 64u);
  Read();
  EXPECT_THAT(dataplane_.DrainReturns(rx_socket_), IsEmpty());
  EXPECT_THAT(reader_->TakeUnreturned(), IsEmpty());
}

TEST_F(LocalReaderTest, WhatFindsTheReturnRingFullIsReturnedLater) {
  MapSlot();
  for (int round = 0; round < 2; round++) {
    for (std::uint32_t i = 0; i < 40; i++) dataplane_.Lend(rx_socket_, binding_, i, 0, "x");
    Read();
    ASSERT_EQ(batch_.messages_size(), 40);
    reader_->Settle(true);
  }
  EXPECT_EQ(dataplane_.DrainReturns(rx_socket_).size(), 64u);
  Read();
  EXPECT_EQ(dataplane_.DrainReturns(rx_socket_).size(), 16u);
  EXPECT_THAT(reader_->TakeUnreturned(), IsEmpty());
}

TEST_F(LocalReaderTest, TheSourceIsReadFromTheHeadersInFrontOfThePayload) {
  MapSlot();
  std::string v4(28, '\0');
  v4[0] = 0x45;
  v4.replace(12, 4, "\x0A\x00\x00\x07", 4);
  v4.replace(20, 2, "\x12\x34", 2);
  std::string v6(48, '\0');
  v6[0] = 0x60;
  v6.replace(8, 16, "\x20\x01\x0D\xB8\0\0\0\0\0\0\0\0\0\0\0\x01", 16);
  v6.replace(40, 2, "\x00\x35", 2);
  std::uint32_t token = 0;
  for (const std::string& headers : {v4, v6}) {
    FakeDataplane::Buffer& buffer = dataplane_.buffers.at(binding_);
    headers.copy(reinterpret_cast<char*>(buffer.data) + token * 4096 + 128, headers.size());
    Descriptor descriptor = {};
    descriptor.kind = DescriptorKind::kFragment;
    descriptor.ip_header_distance = static_cast<std::uint8_t>(headers.size());
    descriptor.token = token++;
    descriptor.offset = static_cast<std::uint16_t>(128 + headers.size());
    dataplane_.Publish(rx_socket_, descriptor);
  }
  Read();
  ASSERT_EQ(batch_.messages_size(), 2);
  EXPECT_EQ(batch_.messages(0).source(), "10.0.0.7");
  EXPECT_EQ(batch_.messages(0).source_port(), 0x1234u);
  EXPECT_EQ(batch_.messages(0).fragments(0).payload(), "");
  EXPECT_EQ(batch_.messages(1).source(), "2001:db8::1");
  EXPECT_EQ(batch_.messages(1).source_port(), 53u);
}

TEST_F(LocalReaderTest, ArrivalIsTheWallClockTimeOfTheMonotonicStamp) {
  MapSlot();
  timespec mono, real;
  clock_gettime(CLOCK_MONOTONIC, &mono);
  clock_gettime(CLOCK_REALTIME, &real);
  const std::uint64_t now = static_cast<std::uint64_t>(mono.tv_sec) * 1'000'000'000 +
                            static_cast<std::uint64_t>(mono.tv_nsec);
  Descriptor time = {};
  time.kind = DescriptorKind::kTime;
  time.time_high = static_cast<std::uint32_t>(now >> 32);
  dataplane_.Publish(rx_socket_, time);
  Descriptor fragment = {};
  fragment.kind = DescriptorKind::kFragment;
  fragment.time_low = static_cast<std::uint32_t>(now);
  dataplane_.Publish(rx_socket_, fragment);
  Read();
  ASSERT_EQ(batch_.messages_size(), 1);
  EXPECT_NEAR(static_cast<double>(batch_.messages(0).arrival().seconds()),
              static_cast<double>(real.tv_sec), 5);
}

TEST_F(LocalReaderTest, AFragmentOfABindingThatIsGoneHasNoPayload) {
  dataplane_.MapSlot(rx_socket_, 0, 999);
  Descriptor fragment = {};
  fragment.kind = DescriptorKind::kFragment;
  fragment.offset = 60;
  fragment.length = 10;
  fragment.ip_header_distance = 28;
  dataplane_.Publish(rx_socket_, fragment);
  EXPECT_EQ(Read().unknown_binding, 999u);
  reader_->AddBuffer(999, BufferView());
  Read();
  ASSERT_EQ(batch_.messages_size(), 1);
  EXPECT_EQ(batch_.messages(0).fragments(0).payload(), "");
  EXPECT_EQ(batch_.messages(0).source(), "");
}

TEST_F(LocalReaderTest, ThePayloadStaysReadableWhenTheBindingGoesBehindOurBack) {
  MapSlot();
  dataplane_.Lend(rx_socket_, binding_, 1, 0, "still here");
  dataplane_.buffers.clear();
  Read();
  ASSERT_EQ(batch_.messages_size(), 1);
  EXPECT_EQ(batch_.messages(0).fragments(0).payload(), "still here");
}

TEST_F(LocalReaderTest, TheRxSocketMayGoWhileItIsRead) {
  MapSlot();
  dataplane_.Lend(rx_socket_, binding_, 1, 0, "x");
  Read();
  reader_->Close();
  dataplane_.sockets.clear();
  reader_->Settle(true);
  EXPECT_FALSE(reader_->Arm());
  reader_->Disarm();
  EXPECT_TRUE(Read().closed);
  EXPECT_EQ(batch_.messages_size(), 0);
}

}  // namespace
}  // namespace rxtoken
