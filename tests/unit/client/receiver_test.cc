// SPDX-License-Identifier: Apache-2.0
#include "client/src/receiver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "rxtoken/rxtoken.h"
#include "tests/unit/client/lanes.h"

namespace rxtoken {
namespace {

using std::chrono::nanoseconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using testing::UnorderedElementsAre;
using namespace std::chrono_literals;

TEST(Receiver, AMessageIsReadInPlace) {
  TestSocket socket;
  socket.lane().MapSlot(3, kBinding);
  socket.lane().Lend(Token(5, 3), 142, 100, kCopied);
  std::vector<Message> messages(4);

  const auto received = socket.ReceiveNow(messages);

  ASSERT_THAT(received, SizeIs(1));
  const Message& message = received[0];
  EXPECT_EQ(message.payload().data(), socket.page(5) + 142);
  EXPECT_EQ(message.payload().size(), 100u);
  EXPECT_EQ(message.size(), 100u);
  ASSERT_THAT(message.fragments(), SizeIs(1));
  EXPECT_EQ(message.fragments()[0].token().token, Token(5, 3));
  EXPECT_EQ(message.fragments()[0].offset(), 142);
  EXPECT_TRUE(message.copied());
  EXPECT_FALSE(message.whole_frame());
  EXPECT_EQ(socket.lane().backlog(), 0u);
}

TEST(Receiver, PollingAnEmptyRingAnswersNothing) {
  TestSocket socket(3);
  std::vector<Message> messages(4);

  EXPECT_THAT(socket.ReceiveNow(messages), IsEmpty());
}

TEST(Receiver, RoomForNoMessageIsRefused) {
  TestSocket socket;

  EXPECT_EQ(socket.receiver().Receive({}, 0ns).status().code(), Code::kInvalidArgument);
}

TEST(Receiver, AnEmptyDatagramHoldsItsPage) {
  TestSocket socket;
  socket.lane().MapSlot(0, kBinding);
  socket.lane().Lend(Token(1), 170, 0);
  std::vector<Message> messages(1);

  const auto received = socket.ReceiveNow(messages);

  ASSERT_THAT(received, SizeIs(1));
  EXPECT_EQ(received[0].size(), 0u);
  EXPECT_THAT(received[0].fragments(), SizeIs(1));
  socket.receiver().Return(received);
  EXPECT_THAT(socket.lane().TakeReturned(), ElementsAre(Token(1).wire()));
}

TEST(Receiver, ArrivalTimesHaveTheUpperHalfThatWasAnnounced) {
  TestSocket socket;
  socket.lane().MapSlot(0, kBinding);
  socket.lane().SetTime(1);
  socket.lane().Lend(Token(1), 0, 1, 0, 0, 0xFFFF'FFFF);
  socket.lane().SetTime(2);
  socket.lane().Lend(Token(2), 0, 1, 0, 0, 5);
  std::vector<Message> messages(2);

  const auto received = socket.ReceiveNow(messages);

  ASSERT_THAT(received, SizeIs(2));
  EXPECT_EQ(received[0].arrival_mono(), nanoseconds(0x1'FFFF'FFFF));
  EXPECT_EQ(received[1].arrival_mono(), nanoseconds(0x2'0000'0005));
}

TEST(Receiver, ADescriptorOfALaterMinorVersionIsIgnored) {
  TestSocket socket;
  socket.lane().MapSlot(0, kBinding);
  Descriptor news = {};
  news.kind = DescriptorKind{200};
  socket.lane().Publish(news);
  socket.lane().Lend(Token(1), 0, 1);
  std::vector<Message> messages(2);

  EXPECT_THAT(socket.ReceiveNow(messages), SizeIs(1));
}

// ---- messages of several fragments -----------------------------------------------------

TEST(Receiver, SeveralFragmentsAreOneMessage) {
  TestSocket socket;
  socket.page(1)[100] = std::byte{'a'};
  socket.page(2)[0] = std::byte{'b'};
  socket.page(3)[0] = std::byte{'c'};
  socket.lane().MapSlot(0, kBinding);
  socket.lane().Lend(Token(1), 100, 1, kMoreFragments | kWholeFrame, 0, 77);
  socket.lane().Lend(Token(2), 0, 1, kMoreFragments);
  socket.lane().Lend(Token(3), 0, 1);
  socket.lane().Lend(Token(4), 0, 9);
  std::vector<Message> messages(4);

  const auto received = socket.ReceiveNow(messages);

  ASSERT_THAT(received, SizeIs(2));
  EXPECT_THAT(received[0].fragments(), SizeIs(3));
  EXPECT_EQ(received[0].size(), 3u);
  EXPECT_TRUE(received[0].whole_frame());
  EXPECT_EQ(received[0].arrival_mono(), nanoseconds(77));
  EXPECT_EQ(received[0].payload().data(), socket.page(1) + 100);
  std::array<std::byte, 8> copy = {};
  EXPECT_EQ(received[0].CopyTo(copy), 3u);
  EXPECT_THAT(std::span(copy).first(3),
              ElementsAre(std::byte{'a'}, std::byte{'b'}, std::byte{'c'}));
  EXPECT_EQ(received[0].CopyTo(std::span(copy).first(2)), 2u);
  EXPECT_EQ(received[1].size(), 9u);
}

TEST(Receiver, AMessageWaitsForItsLastFragment) {
  TestSocket socket;
  socket.lane().MapSlot(0, kBinding);
  std::vector<Message> messages(4);
  socket.lane().Lend(Token(1), 0, 10, kMoreFragments);
  EXPECT_THAT(socket.ReceiveNow(messages), IsEmpty());
  socket.lane().Lend(Token(2), 0, 20, kMoreFragments);
  EXPECT_THAT(socket.ReceiveNow(messages), IsEmpty());

  socket.lane().Lend(Token(3), 0, 30);
  const auto received = socket.ReceiveNow(messages);

  ASSERT_THAT(received, SizeIs(1));
  EXPECT_EQ(received[0].size(), 60u);
  EXPECT_THAT(socket.lane().TakeReturned(), IsEmpty());
  socket.receiver().Return(received);
  EXPECT_THAT(socket.lane().TakeReturned(),
              ElementsAre(Token(1).wire(), Token(2).wire(), Token(3).wire()));
}

TEST(Receiver, PartialMessagesOfSeveralLanesDoNotMix) {
  TestSocket socket(2);
  socket.lane(0).MapSlot(0, kBinding);
  socket.lane(1).MapSlot(0, kBinding);
  socket.lane(0).Lend(Token(1), 0, 1, kMoreFragments);
  socket.lane(1).Lend(Token(11), 0, 10, kMoreFragments);
  std::vector<Message> messages(4);
  EXPECT_THAT(socket.ReceiveNow(messages), IsEmpty());
  socket.lane(0).Lend(Token(2), 0, 2);
  socket.lane(1).Lend(Token(12), 0, 20);

  const auto received = socket.ReceiveNow(messages);

  ASSERT_THAT(received, SizeIs(2));
  EXPECT_THAT((std::vector{received[0].size(), received[1].size()}), UnorderedElementsAre(3, 30));
}

TEST(Receiver, AMessageMayHaveMoreFragmentsThanTheRing) {
  TestSocket socket;
  socket.lane().MapSlot(0, kBinding);
  std::vector<Message> messages(1);
  for (std::uint32_t i = 0; i < 3 * kMinRingEntries; i++) {
    socket.lane().Lend(Token(i % kPages), 0, 1, kMoreFragments);
    EXPECT_THAT(socket.ReceiveNow(messages), IsEmpty());
  }
  socket.lane().Lend(Token(0), 0, 1);

  const auto received = socket.ReceiveNow(messages);

  ASSERT_THAT(received, SizeIs(1));
  EXPECT_EQ(received[0].size(), 3 * kMinRingEntries + 1);
}

// ---- what a broken daemon would send ---------------------------------------------------

TEST(Receiver, AFragmentOutsideItsBufferEndsTheRxSocket) {
  const std::vector<std::pair<PageToken, std::pair<std::uint16_t, std::uint16_t>>> outside = {
      {Token(kPages), {0, 1}}, {Token(kMaxPagesPerBuffer - 1), {0, 1}},
      {Token(0), {4095, 2}},   {Token(0), {0xFFFF, 0xFFFF}},
      {Token(0, 1), {0, 1}},  // of a slot that was never mapped
  };
  for (const auto& [token, place] : outside) {
    TestSocket socket;
    socket.lane().MapSlot(0, kBinding);
    socket.lane().Lend(Token(1), 4095, 1);
    socket.lane().Lend(token, place.first, place.second);
    std::vector<Message> messages(4);

    EXPECT_THAT(socket.ReceiveNow(messages), SizeIs(1)) << "what came before it";
    EXPECT_EQ(socket.receiver().Receive(messages, 0ns).status().code(), Code::kInternal);
    EXPECT_EQ(socket.receiver().Receive(messages, 0ns).status().code(), Code::kInternal);
  }
}

TEST(Receiver, ASlotPastTheThirtySecondEndsTheRxSocket) {
  TestSocket socket;
  socket.lane().MapSlot(32, kBinding);
  std::vector<Message> messages(1);

  EXPECT_EQ(socket.receiver().Receive(messages, 0ns).status().code(), Code::kInternal);
}

// ---- slots and buffers -----------------------------------------------------------------

TEST(Receiver, ABufferThatCannotBeMappedIsTriedAgain) {
  TestSocket socket;
  socket.lane().MapSlot(0, kBinding);
  socket.lane().Lend(Token(1), 0, 1);
  socket.RefuseToMap(Status(Code::kResourceExhausted, "no memory"));
  std::vector<Message> messages(1);
  EXPECT_EQ(socket.receiver().Receive(messages, 0ns).status().code(), Code::kResourceExhausted);

  socket.RefuseToMap(Status());

  EXPECT_THAT(socket.ReceiveNow(messages), SizeIs(1));
}

TEST(Receiver, EachLaneHasItsOwnSlots) {
  TestSocket socket(2);
  socket.lane(0).MapSlot(1, kBinding);
  socket.lane(1).Lend(Token(1, 1), 0, 1);
  std::vector<Message> messages(1);

  EXPECT_EQ(socket.receiver().Receive(messages, 0ns).status().code(), Code::kInternal);
}

TEST(Receiver, BuffersStayMappedUntilTheRxSocketAndItsLastMessageAreGone) {
  TestSocket socket;
  socket.lane().MapSlot(0, kBinding);
  socket.lane().Lend(Token(1), 0, 1);
  std::vector<Message> messages(1);
  socket.ReceiveNow(messages);

  socket.Abandon();
  EXPECT_EQ(socket.mappings(), 1);
  messages.clear();
  EXPECT_EQ(socket.mappings(), 0);
}

TEST(Receiver, WhatWasLentOfABindingThatIsGoneIsSkipped) {
  TestSocket socket;
  constexpr std::uint32_t kGone = kBinding + 1;
  socket.lane().MapSlot(0, kBinding);
  socket.lane().MapSlot(1, kGone);
  socket.lane().Lend(Token(1, 1), 0, 1);
  socket.lane().Lend(Token(2), 0, 2);
  socket.lane().Lend(Token(2, 1), 0, 1, kMoreFragments);
  socket.lane().Lend(Token(3), 0, 1, kMoreFragments);
  socket.lane().Lend(Token(3, 1), 0, 1);
  socket.lane().Lend(Token(4), 0, 4);
  std::vector<Message> messages(8);

  const auto received = socket.ReceiveNow(messages);

  ASSERT_THAT(received, SizeIs(2));
  EXPECT_EQ(received[0].size(), 2u);
  EXPECT_EQ(received[1].size(), 4u);
  EXPECT_THAT(socket.lane().TakeReturned(), ElementsAre(3)) << "of the message in between";
}

// ---- the end of bindings ---------------------------------------------------------------

constexpr BindingEvent kUnbound = {BindingEvent::Kind::kUnbound, BindingId{kBinding}};
constexpr BindingEvent kRevoked = {BindingEvent::Kind::kRevoked, BindingId{kBinding}};

// Pages 1, 2, ... lent through slot 3.
class BindingsEnd : public testing::Test {
 protected:
  std::vector<Message> Receive(std::uint32_t n) {
    if (!std::exchange(mapped_, true)) socket.lane().MapSlot(3, kBinding);
    for (std::uint32_t page = 1; page <= n; page++) socket.lane().Lend(Token(page, 3), 0, 1);
    std::vector<Message> messages(n);
    EXPECT_THAT(socket.ReceiveNow(messages), SizeIs(n));
    return messages;
  }
  void Poll() {
    std::vector<Message> none(1);
    EXPECT_THAT(socket.ReceiveNow(none), IsEmpty());
  }
  std::vector<std::uint32_t> Returned() {
    socket.receiver().Flush();
    return socket.lane().TakeReturned();
  }

  TestSocket socket{2};

 private:
  bool mapped_ = false;
};

TEST_F(BindingsEnd, EachEventIsTakenOnceWhateverLaneSaysIt) {
  EXPECT_THAT(socket.receiver().TakeEvents(), IsEmpty());
  socket.lane(0).Unbind(kBinding);
  socket.lane(1).Unbind(kBinding);
  Poll();
  EXPECT_THAT(socket.receiver().TakeEvents(), ElementsAre(kUnbound));
  socket.lane(1).Revoke(0, kBinding);
  Poll();
  EXPECT_THAT(socket.receiver().TakeEvents(), ElementsAre(kRevoked));
  socket.lane(0).Revoke(0, kBinding);
  Poll();
  EXPECT_THAT(socket.receiver().TakeEvents(), IsEmpty());
}

TEST_F(BindingsEnd, WhatCanComeAgainIsToldAgainOnceItWasTaken) {
  constexpr BindingEvent kLowWater = {BindingEvent::Kind::kLowWater, BindingId{kBinding}};
  constexpr BindingEvent kHeldLimit = {BindingEvent::Kind::kHeldLimit, BindingId{0}};
  for (int i = 0; i < 2; i++) {
    for (const std::size_t lane : {0, 1, 0}) {
      socket.lane(lane).Tell(DescriptorKind::kLowWater, kBinding);
      socket.lane(lane).Tell(DescriptorKind::kHeldLimit, 0);
    }
    Poll();
    EXPECT_THAT(socket.receiver().TakeEvents(), ElementsAre(kLowWater, kHeldLimit));
  }
}

TEST_F(BindingsEnd, AnEventEndsTheWaitInWhichItComes) {
  std::thread worker([&] {
    while (!socket.lane().waited_for()) std::this_thread::yield();
    socket.lane().Unbind(kBinding);
    socket.RingDoorbell();
  });
  std::vector<Message> messages(1);

  const auto received = socket.receiver().Receive(messages, kForever);
  worker.join();

  ASSERT_TRUE(received.ok());
  EXPECT_THAT(*received, IsEmpty());
  EXPECT_THAT(socket.receiver().TakeEvents(), ElementsAre(kUnbound));
}

TEST_F(BindingsEnd, AnEventThatNobodyTakesEndsNoOtherWait) {
  socket.lane().Unbind(kBinding);
  Poll();
  socket.lane().MapSlot(0, kBinding);
  std::thread worker([&] {
    while (!socket.lane().waited_for()) std::this_thread::yield();
    socket.lane().Lend(Token(1), 0, 1);
    socket.RingDoorbell();
  });
  std::vector<Message> messages(1);

  const auto received = socket.receiver().Receive(messages, kForever);
  worker.join();

  ASSERT_TRUE(received.ok());
  EXPECT_THAT(*received, SizeIs(1));
}

TEST_F(BindingsEnd, WhatIsHeldOfAnUnboundBindingIsReadAndReturnedAsBefore) {
  std::vector<Message> messages = Receive(3);
  const HeldToken by_hand = messages[2].fragments()[0].token();
  messages[2].Release();
  socket.lane().Unbind(kBinding);
  Poll();
  EXPECT_EQ(messages[0].payload().data(), socket.page(1));
  EXPECT_EQ(socket.mappings(), 1);

  messages[1].Return();
  EXPECT_THAT(Returned(), ElementsAre(Token(2, 3).wire()));
  socket.receiver().Return(std::span(&by_hand, 1));
  EXPECT_THAT(Returned(), ElementsAre(Token(3, 3).wire()));
  EXPECT_EQ(socket.mappings(), 1);
  messages.clear();
  EXPECT_THAT(Returned(), ElementsAre(Token(1, 3).wire()));
  EXPECT_EQ(socket.mappings(), 0) << "the memory is not ours any more";
}

TEST_F(BindingsEnd, TheBufferOfAnUnboundBindingOfWhichNothingIsHeldGoesAtOnce) {
  Receive(2).clear();
  EXPECT_EQ(socket.mappings(), 1);
  socket.lane().Unbind(kBinding);
  Poll();
  EXPECT_EQ(socket.mappings(), 0);
}

TEST_F(BindingsEnd, AnUnboundBindingStaysMappedForTheOtherLanes) {
  socket.lane(1).MapSlot(3, kBinding);
  Receive(1).clear();
  socket.lane(0).Unbind(kBinding);
  Poll();
  EXPECT_EQ(socket.mappings(), 1);
  socket.lane(1).Lend(Token(9, 3), 0, 1);
  std::vector<Message> messages(1);
  EXPECT_THAT(socket.ReceiveNow(messages), SizeIs(1));
}

TEST_F(BindingsEnd, ATokenOfAnUnboundBindingIsSentOnce) {
  std::vector<Message> messages = Receive(1);
  const HeldToken token = messages[0].fragments()[0].token();
  messages[0].Release();
  socket.lane().Unbind(kBinding);
  Poll();
  socket.receiver().Return(std::vector{token, token});
  EXPECT_THAT(Returned(), ElementsAre(Token(1, 3).wire()));
}

TEST_F(BindingsEnd, RevokedTokensAreNotSent) {
  std::vector<Message> messages = Receive(3);
  const HeldToken by_hand = messages[2].fragments()[0].token();
  messages[2].Release();
  socket.lane().Unbind(kBinding);
  socket.lane().Revoke(3, kBinding);
  Poll();
  EXPECT_THAT(socket.receiver().TakeEvents(), ElementsAre(kUnbound, kRevoked));

  EXPECT_EQ(messages[0].payload().data(), socket.page(1)) << "still mapped";
  socket.receiver().Return(std::span(&by_hand, 1));
  socket.receiver().Return(std::span(messages).first(1));
  EXPECT_EQ(socket.mappings(), 1);
  messages.clear();
  EXPECT_EQ(socket.mappings(), 0);
  EXPECT_THAT(Returned(), IsEmpty());
}

TEST_F(BindingsEnd, RevokingWorksWithoutUnboundToo) {
  std::vector<Message> messages = Receive(1);
  socket.lane().Revoke(3, kBinding);
  Poll();
  messages.clear();
  EXPECT_THAT(Returned(), IsEmpty());
  EXPECT_EQ(socket.mappings(), 0);
}

TEST_F(BindingsEnd, TokensThatArePutAsideWhenTheyAreRevokedAreNotSent) {
  socket.lane().MapSlot(0, kBinding + 1);
  Receive(2).clear();  // put aside
  socket.lane().Revoke(3, kBinding);
  Poll();
  EXPECT_THAT(Returned(), ElementsAre(Token(1, 3).wire(), Token(2, 3).wire()))
      << "sent by Receive() itself, before it came to the news";

  // With the return ring full they stay with us.
  socket.lane().MapSlot(3, kBinding);
  for (std::uint32_t i = 0; i < kMinRingEntries + 2; i++) Receive(1).clear();
  socket.lane().Revoke(3, kBinding);
  Poll();
  EXPECT_THAT(Returned(), SizeIs(kMinRingEntries));
  EXPECT_THAT(Returned(), IsEmpty());
}

TEST_F(BindingsEnd, RevokedTokensDoNotTouchTheNextBindingOfTheirSlot) {
  std::vector<Message> revoked = Receive(1);
  socket.lane().Unbind(kBinding);
  socket.lane().Revoke(3, kBinding);
  socket.lane().MapSlot(3, kBinding);
  std::vector<Message> messages = Receive(1);

  revoked.clear();
  EXPECT_THAT(Returned(), IsEmpty());
  messages.clear();
  EXPECT_THAT(Returned(), ElementsAre(Token(1, 3).wire()));
}

TEST_F(BindingsEnd, AnotherThreadMayGiveBackMeanwhile) {
  std::vector<std::vector<Message>> handed_over;
  std::mutex mutex;
  std::atomic<bool> done = false;
  std::thread returner([&] {
    for (bool last = false; !last;) {
      last = done;
      std::vector<std::vector<Message>> mine;
      {
        std::lock_guard lock(mutex);
        mine.swap(handed_over);
      }
    }
  });
  for (int round = 0; round < 1000; round++) {
    socket.lane().MapSlot(3, kBinding);
    std::vector<Message> messages = Receive(4);
    {
      std::lock_guard lock(mutex);
      handed_over.push_back(std::move(messages));
    }
    socket.lane().Unbind(kBinding);
    if (round % 2 == 0) socket.lane().Revoke(3, kBinding);
    Poll();
    Returned();
  }
  done = true;
  returner.join();
  handed_over.clear();
  EXPECT_EQ(socket.mappings(), 0);
}

TEST_F(BindingsEnd, ATokenThatWasGivenBackDoesNotTouchTheNextBindingOfItsSlot) {
  std::vector<Message> messages = Receive(1);
  const HeldToken token = messages[0].fragments()[0].token();
  messages.clear();
  EXPECT_THAT(Returned(), SizeIs(1));
  socket.lane().MapSlot(3, kBinding);
  messages = Receive(1);

  socket.receiver().Return(std::span(&token, 1));
  EXPECT_THAT(Returned(), IsEmpty());
}

// ---- the end of leases -----------------------------------------------------------------

constexpr BindingEvent kExpired = {BindingEvent::Kind::kExpired, BindingId{kBinding}};

class LeasesEnd : public BindingsEnd {
 protected:
  // A message on `page`, through slot 3, that arrived at a time of HoldClock().
  Message ReceiveAt(std::uint32_t ticks, std::uint32_t page) {
    if (!std::exchange(mapped_, true)) socket.lane().MapSlot(3, kBinding);
    socket.lane().SetTime(ticks >> 16);
    socket.lane().Lend(Token(page, 3), 0, 1, 0, 0, ticks << 16);
    std::vector<Message> messages(1);
    EXPECT_THAT(socket.ReceiveNow(messages), SizeIs(1));
    return std::move(messages[0]);
  }

 private:
  bool mapped_ = false;
};

TEST_F(LeasesEnd, WhatArrivedByThenIsNotSentAndTheRestIs) {
  Message old = ReceiveAt(99, 1);
  Message older = ReceiveAt(100, 2);
  Message young = ReceiveAt(101, 3);
  Message by_hand = ReceiveAt(102, 4);
  const HeldToken token = by_hand.fragments()[0].token();
  by_hand.Release();

  socket.lane().Expire(3, kBinding, 100);
  Poll();
  EXPECT_THAT(socket.receiver().TakeEvents(), ElementsAre(kExpired));

  EXPECT_EQ(old.payload().data(), socket.page(1)) << "still mapped";
  old.Return();
  older.Return();
  EXPECT_THAT(Returned(), IsEmpty());
  EXPECT_EQ(socket.receiver().void_returns(), 2u);
  young.Return();
  EXPECT_THAT(Returned(), ElementsAre(Token(3, 3).wire()));
  EXPECT_EQ(socket.mappings(), 1);
  socket.receiver().Return(std::span(&token, 1));
  EXPECT_THAT(Returned(), ElementsAre(Token(4, 3).wire()));
  EXPECT_EQ(socket.mappings(), 0);
}

TEST_F(LeasesEnd, TheRestMayExpireLater) {
  Message first = ReceiveAt(100, 1);
  Message second = ReceiveAt(200, 2);
  Message third = ReceiveAt(300, 3);
  socket.lane().Expire(3, kBinding, 150);
  Poll();
  socket.lane().Expire(3, kBinding, 250);
  Poll();
  EXPECT_THAT(socket.receiver().TakeEvents(), ElementsAre(kExpired)) << "nobody took it before";

  first.Return();
  second.Return();
  third.Return();
  EXPECT_THAT(Returned(), ElementsAre(Token(3, 3).wire()));
  EXPECT_EQ(socket.receiver().void_returns(), 2u);
}

TEST_F(LeasesEnd, EachTimeIsTold) {
  for (std::uint32_t i = 1; i < 4; i++) {
    const Message message = ReceiveAt(i, 1);
    socket.lane().Expire(3, kBinding, i);
    Poll();
    EXPECT_THAT(socket.receiver().TakeEvents(), ElementsAre(kExpired));
    socket.lane().MapSlot(3, kBinding);
  }
}

TEST_F(LeasesEnd, VoidTokensDoNotTouchWhatTheirSlotIsUsedForNext) {
  Message old = ReceiveAt(100, 1);
  socket.lane().Expire(3, kBinding, 100);
  socket.lane().MapSlot(3, kBinding);
  Message next = ReceiveAt(200, 1);

  old.Return();
  EXPECT_THAT(Returned(), IsEmpty());
  next.Return();
  EXPECT_THAT(Returned(), ElementsAre(Token(1, 3).wire()));
}

TEST_F(LeasesEnd, AnotherSlotOrLaneIsNotTouched) {
  socket.lane(1).MapSlot(3, kBinding);
  socket.lane().MapSlot(4, kBinding);
  socket.lane(1).Lend(Token(1, 3), 0, 1);
  socket.lane(0).Lend(Token(2, 4), 0, 1);
  std::vector<Message> messages(2);
  EXPECT_THAT(socket.ReceiveNow(messages), SizeIs(2));
  socket.lane(0).Expire(3, kBinding, 100);
  Poll();

  messages.clear();
  socket.receiver().Flush();
  EXPECT_THAT(socket.lane(1).TakeReturned(), ElementsAre(Token(1, 3).wire()));
  EXPECT_THAT(socket.lane(0).TakeReturned(), ElementsAre(Token(2, 4).wire()));
}

// The daemon takes it that all that comes before this is known is void or was lent before, and
// refuses what is void.
TEST_F(LeasesEnd, TheNewsWaitUntilAllIsSentThatWasGivenBackBefore) {
  for (std::uint32_t i = 0; i < kMinRingEntries + 2; i++) ReceiveAt(100 + i, 1).Return();
  socket.lane().Expire(3, kBinding, 1000);
  socket.lane().Unbind(kBinding + 1);
  Poll();
  Poll();
  EXPECT_THAT(socket.receiver().TakeEvents(), IsEmpty());
  EXPECT_EQ(socket.lane().backlog(), 2u);

  EXPECT_THAT(Returned(), SizeIs(kMinRingEntries));
  Poll();
  EXPECT_THAT(Returned(), SizeIs(2));
  EXPECT_THAT(socket.receiver().TakeEvents(), SizeIs(2));
  EXPECT_EQ(socket.lane().backlog(), 0u);
}

TEST_F(BindingsEnd, OnlyTheBindingsThatEndedLastAreRemembered) {
  for (std::uint32_t binding = 1; binding <= 3000; binding++) {
    for (std::size_t lane = 0; lane < 2; lane++) {
      socket.lane(lane).Unbind(binding);
      socket.lane(lane).Revoke(0, binding);
      Poll();
    }
    EXPECT_THAT(socket.receiver().TakeEvents(), SizeIs(2));
  }
}

// ---- giving back -----------------------------------------------------------------------

class Returning : public testing::Test {
 protected:
  // `n` messages of one fragment each: pages 0, 1, ...
  std::vector<Message> Receive(TestSocket& socket, std::uint32_t n) {
    std::vector<Message> messages(n);
    std::size_t received = 0;
    if (!mapped_) socket.lane().MapSlot(0, kBinding);
    mapped_ = true;
    for (std::uint32_t i = 0; i < n; i++) {
      socket.lane().Lend(Token(i % kPages), 0, 1);
      received += socket.ReceiveNow(std::span(messages).subspan(received)).size();
    }
    EXPECT_EQ(received, n);
    return messages;
  }
  bool mapped_ = false;
};

TEST_F(Returning, ReceiveGivesBackWhatItsArrayStillHolds) {
  TestSocket socket;
  std::vector<Message> messages = Receive(socket, 3);
  EXPECT_THAT(socket.lane().TakeReturned(), IsEmpty());

  socket.ReceiveNow(messages);

  EXPECT_THAT(socket.lane().TakeReturned(), ElementsAre(0, 1, 2));
  for (const Message& message : messages) EXPECT_THAT(message.fragments(), IsEmpty());
}

TEST_F(Returning, AMessageThatWasMovedOutIsKept) {
  TestSocket socket;
  std::vector<Message> messages = Receive(socket, 3);
  Message kept = std::move(messages[1]);

  socket.ReceiveNow(messages);

  EXPECT_THAT(socket.lane().TakeReturned(), ElementsAre(0, 2));
  kept.Return();
  EXPECT_THAT(kept.fragments(), IsEmpty());
  socket.receiver().Flush();
  EXPECT_THAT(socket.lane().TakeReturned(), ElementsAre(1));
}

TEST_F(Returning, MoveAssignmentGivesBackWhatWasThere) {
  TestSocket socket;
  std::vector<Message> messages = Receive(socket, 2);

  messages[0] = std::move(messages[1]);
  socket.receiver().Flush();

  EXPECT_THAT(socket.lane().TakeReturned(), ElementsAre(0));
  EXPECT_THAT(messages[0].fragments(), SizeIs(1));
  EXPECT_THAT(messages[1].fragments(), IsEmpty());
}

TEST_F(Returning, DestroyedMessagesAreSentInLots) {
  TestSocket socket(1, 256);
  std::vector<Message> messages = Receive(socket, 100);

  messages.erase(messages.begin(), messages.begin() + 63);
  EXPECT_THAT(socket.lane().TakeReturned(), IsEmpty());
  messages.erase(messages.begin());
  EXPECT_THAT(socket.lane().TakeReturned(), SizeIs(64));
  messages.clear();
  EXPECT_THAT(socket.lane().TakeReturned(), IsEmpty());
  socket.receiver().Flush();
  EXPECT_THAT(socket.lane().TakeReturned(), SizeIs(36));
}

TEST_F(Returning, ReleasedTokensComeBackByHandInAnyOrder) {
  TestSocket socket;
  std::vector<Message> messages = Receive(socket, 3);
  std::vector<HeldToken> held;
  for (Message& message : messages) {
    held.push_back(message.fragments()[0].token());
    message.Release();
  }
  socket.ReceiveNow(messages);
  EXPECT_THAT(socket.lane().TakeReturned(), IsEmpty());

  socket.receiver().Return(std::vector{held[2], held[0]});
  EXPECT_THAT(socket.lane().TakeReturned(), ElementsAre(2, 0));
  socket.receiver().Return(std::vector{held[1]});
  EXPECT_THAT(socket.lane().TakeReturned(), ElementsAre(1));
}

TEST_F(Returning, ATokenGoesBackOverTheLaneThatItCameFrom) {
  TestSocket socket(2);
  socket.lane(0).MapSlot(0, kBinding);
  socket.lane(1).MapSlot(4, kBinding);
  socket.lane(0).Lend(Token(1, 0), 0, 1);
  socket.lane(1).Lend(Token(2, 4), 0, 1);
  std::vector<Message> messages(2);

  socket.receiver().Return(socket.ReceiveNow(messages));

  EXPECT_THAT(socket.lane(0).TakeReturned(), ElementsAre(Token(1, 0).wire()));
  EXPECT_THAT(socket.lane(1).TakeReturned(), ElementsAre(Token(2, 4).wire()));
}

TEST_F(Returning, ATokenOfALaneThatDoesNotExistIsIgnored) {
  TestSocket socket;
  const HeldToken foreign = {Token(1), 9};

  socket.receiver().Return(std::span(&foreign, 1));

  EXPECT_THAT(socket.lane().TakeReturned(), IsEmpty());
}

TEST_F(Returning, WhatFindsNoRoomIsKeptAndSentLater) {
  TestSocket socket;
  const std::uint32_t n = 3 * kMinRingEntries;
  std::vector<Message> messages = Receive(socket, n);
  std::vector<std::uint32_t> expected;
  for (std::uint32_t i = 0; i < n; i++) expected.push_back(i % kPages);

  socket.receiver().Return(messages);
  std::vector<std::uint32_t> returned = socket.lane().TakeReturned();
  EXPECT_THAT(returned, SizeIs(kMinRingEntries));
  std::vector<Message> none(1);
  for (int i = 0; i < 2; i++) {
    socket.ReceiveNow(none);
    const auto more = socket.lane().TakeReturned();
    EXPECT_THAT(more, SizeIs(kMinRingEntries));
    returned.insert(returned.end(), more.begin(), more.end());
  }

  EXPECT_EQ(returned, expected);
}

TEST_F(Returning, AMessageThatOutlivesItsRxSocketIsHarmless) {
  TestSocket socket;
  std::vector<Message> messages = Receive(socket, 3);
  Message kept = std::move(messages[1]);
  messages[2].Release();

  socket.Abandon();

  kept.Return();
  messages.clear();
  EXPECT_THAT(socket.lane().TakeReturned(), IsEmpty());
}

TEST_F(Returning, MessagesOfAnotherRxSocketGoBackToIt) {
  TestSocket first;
  TestSocket second;
  std::vector<Message> messages = Receive(first, 2);

  second.ReceiveNow(messages);
  first.receiver().Flush();

  EXPECT_THAT(second.lane().TakeReturned(), IsEmpty());
  EXPECT_THAT(first.lane().TakeReturned(), ElementsAre(0, 1));
}

TEST_F(Returning, AnotherThreadMayReturnWhileThisOneReceives) {
  constexpr std::uint32_t kMessages = 20000;
  TestSocket socket(1, 256);
  socket.lane().MapSlot(0, kBinding);
  std::vector<std::vector<Message>> handed_over;
  std::mutex mutex;
  std::atomic<bool> done = false;
  std::thread returner([&] {
    for (bool last = false; !last;) {
      last = done;
      std::vector<std::vector<Message>> mine;
      {
        std::lock_guard lock(mutex);
        mine.swap(handed_over);
      }
      // Every other one as a whole, the rest by their destructors.
      for (std::size_t i = 0; i < mine.size(); i += 2) socket.receiver().Return(mine[i]);
    }
  });

  std::vector<std::uint64_t> returned(kPages, 0);
  std::uint32_t lent = 0, received = 0, back = 0;
  auto drain = [&] {
    for (const std::uint32_t token : socket.lane().TakeReturned()) {
      returned[token]++;
      back++;
    }
  };
  while (received < kMessages) {
    while (lent < kMessages && socket.lane().backlog() < 100) {
      socket.lane().Lend(Token(lent++ % kPages), 0, 1);
    }
    std::vector<Message> messages(32);
    const std::size_t n = socket.ReceiveNow(messages).size();
    received += static_cast<std::uint32_t>(n);
    messages.resize(n);
    std::lock_guard lock(mutex);
    handed_over.push_back(std::move(messages));
    drain();
  }
  done = true;
  returner.join();
  handed_over.clear();
  while (back < kMessages) {
    socket.receiver().Flush();
    drain();
  }

  EXPECT_EQ(back, kMessages);
  for (std::uint32_t page = 0; page < kPages; page++) {
    EXPECT_EQ(returned[page], kMessages / kPages + (page < kMessages % kPages)) << page;
  }
}

// ---- waiting, and the end ----------------------------------------------------------------

TEST(Waiting, ATimeoutThatPassesIsNoError) {
  TestSocket socket;
  std::vector<Message> messages(1);

  const auto received = socket.receiver().Receive(messages, 1ms);

  ASSERT_TRUE(received.ok());
  EXPECT_THAT(*received, IsEmpty());
}

TEST(Waiting, TheDoorbellWakes) {
  TestSocket socket;
  socket.lane().MapSlot(0, kBinding);
  std::thread worker([&] {
    while (!socket.lane().waited_for()) std::this_thread::yield();
    socket.lane().Lend(Token(1), 0, 1);
    socket.RingDoorbell();
  });
  std::vector<Message> messages(1);

  const auto received = socket.receiver().Receive(messages, kForever);
  worker.join();

  ASSERT_TRUE(received.ok());
  EXPECT_THAT(*received, SizeIs(1));
  EXPECT_FALSE(socket.lane().waited_for());
}

TEST(Waiting, WhatIsReturnedDuringASleepIsSentAtOnce) {
  TestSocket socket;
  socket.lane().MapSlot(0, kBinding);
  socket.lane().Lend(Token(1), 0, 1);
  std::vector<Message> first(1);
  socket.ReceiveNow(first);
  std::vector<std::uint32_t> returned;
  std::thread worker([&] {
    while (!socket.lane().waited_for()) std::this_thread::yield();
    first.clear();
    returned = socket.lane().TakeReturned();
    socket.lane().Lend(Token(2), 0, 1);
    socket.RingDoorbell();
  });
  std::vector<Message> second(1);

  const auto received = socket.receiver().Receive(second, kForever);
  worker.join();

  EXPECT_TRUE(received.ok());
  EXPECT_THAT(returned, ElementsAre(1));
}

TEST(Waiting, TheEndOfTheDoorbellIsTheEndOfTheRxSocket) {
  TestSocket socket;
  std::thread daemon([&] {
    while (!socket.lane().waited_for()) std::this_thread::yield();
    socket.CloseDoorbell();
  });
  std::vector<Message> messages(1);

  const auto received = socket.receiver().Receive(messages, kForever);
  daemon.join();

  EXPECT_EQ(received.status().code(), Code::kUnavailable);
}

TEST(Waiting, APollerNoticesTheEndOfTheDaemonToo) {
  TestSocket socket;
  socket.CloseDoorbell();
  std::vector<Message> messages(1);
  Status status;

  for (int i = 0; i < 1'000'000 && status.ok(); i++) {
    status = socket.receiver().Receive(messages, 0ns).status();
  }

  EXPECT_EQ(status.code(), Code::kUnavailable);
}

TEST(Waiting, AClosedRxSocketDeliversNothingMore) {
  TestSocket socket(2);
  socket.lane(1).MapSlot(0, kBinding);
  socket.lane(1).Lend(Token(1), 0, 1);
  socket.lane(0).Close(CloseReason::kClosed);
  socket.lane(1).Close(CloseReason::kClosed);
  std::vector<Message> messages(1);

  const auto received = socket.receiver().Receive(messages, 1s);

  EXPECT_EQ(received.status().code(), Code::kUnavailable);
  EXPECT_THAT(received.status().message(), HasSubstr("rx socket 'test'"));
}

}  // namespace
}  // namespace rxtoken
