// SPDX-License-Identifier: Apache-2.0
#include "control/match.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rxtoken {
namespace {

using testing::HasSubstr;

std::string Error(const v1::Match& match) {
  const Result<FlowMatch> parsed = ParseMatch(match);
  EXPECT_FALSE(parsed.ok());
  EXPECT_EQ(parsed.status().code(), Code::kInvalidArgument);
  return parsed.status().message();
}

TEST(Match, AnEmptyMatchMatchesEverything) {
  const Result<FlowMatch> parsed = ParseMatch(v1::Match());
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(*parsed, FlowMatch());
}

TEST(Match, AllFieldsAreConverted) {
  v1::Match match;
  match.set_vlan(0);
  match.set_source("10.1.0.0/16");
  match.set_destination("192.0.2.7");
  match.set_protocol(17);
  match.set_source_port(53);
  match.set_destination_port(65535);
  const Result<FlowMatch> parsed = ParseMatch(match);
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->vlan, 0);
  EXPECT_EQ(parsed->source, (IpPrefix{IpFamily::kV4, 16, {10, 1}}));
  EXPECT_EQ(parsed->destination, (IpPrefix{IpFamily::kV4, 32, {192, 0, 2, 7}}));
  EXPECT_EQ(parsed->protocol, 17);
  EXPECT_EQ(parsed->source_port, 53);
  EXPECT_EQ(parsed->destination_port, 65535);
}

TEST(Match, PrefixesOfEveryLengthKeepTheirBits) {
  EXPECT_EQ(ParsePrefix("source", "0.0.0.0/0").value(), (IpPrefix{IpFamily::kV4, 0, {}}));
  EXPECT_EQ(ParsePrefix("source", "10.128.0.0/9").value(), (IpPrefix{IpFamily::kV4, 9, {10, 128}}));
  EXPECT_EQ(ParsePrefix("source", "::/0").value(), (IpPrefix{IpFamily::kV6, 0, {}}));
  EXPECT_EQ(ParsePrefix("source", "2001:db8::/33").value(),
            (IpPrefix{IpFamily::kV6, 33, {0x20, 0x01, 0x0D, 0xB8}}));
  EXPECT_EQ(ParsePrefix("source", "::1").value().length, 128);
}

TEST(Match, MatchesForTheSameFramesAreEqualHoweverTheyAreWritten) {
  v1::Match from, to, both, v6;
  from.set_source("0.0.0.0/0");
  to.set_destination("0.0.0.0/0");
  both.set_source("0.0.0.0/0");
  both.set_destination("0.0.0.0/0");
  v6.set_source("::/0");
  EXPECT_EQ(*ParseMatch(from), *ParseMatch(to));
  EXPECT_EQ(*ParseMatch(from), *ParseMatch(both));
  EXPECT_NE(*ParseMatch(from), *ParseMatch(v6));
  EXPECT_NE(*ParseMatch(from), *ParseMatch(v1::Match()));
}

TEST(Match, BitsBelowThePrefixAreRefusedAndTheRightPrefixIsShown) {
  v1::Match match;
  match.set_source("10.1.2.3/20");
  EXPECT_THAT(Error(match), HasSubstr("use '10.1.0.0/20'"));
  match.set_source("2001:db8:ffff::/33");
  EXPECT_THAT(Error(match), HasSubstr("use '2001:db8:8000::/33'"));
}

TEST(Match, WhatIsNoAddressIsRefused) {
  for (const char* text : {"10.0.0", "10.0.0.0/33", "::/129", "10.0.0.0/", "10.0.0.0/8x",
                           "10.0.0.0/-1", "10.0.0.0/+8", "host", "/8", "10.0.0.0/8/8"}) {
    v1::Match match;
    match.set_destination(text);
    EXPECT_THAT(Error(match), HasSubstr(text));
  }
}

TEST(Match, FieldsThatCannotOccurTogetherAreRefused) {
  v1::Match families;
  families.set_source("10.0.0.0/8");
  families.set_destination("2001:db8::/32");
  EXPECT_THAT(Error(families), HasSubstr("different families"));

  v1::Match queue;
  queue.set_queue(0);
  EXPECT_THAT(Error(queue), HasSubstr("port is empty"));

  v1::Match port;
  port.set_source_port(53);
  EXPECT_THAT(Error(port), HasSubstr("set protocol to 6 or 17"));
  port.set_protocol(1);
  EXPECT_THAT(Error(port), HasSubstr("set protocol to 6 or 17"));
}

TEST(Match, NumbersOutOfRangeAreRefused) {
  v1::Match vlan;
  vlan.set_vlan(4095);
  EXPECT_THAT(Error(vlan), HasSubstr("vlan is 4095"));

  v1::Match protocol;
  protocol.set_protocol(256);
  EXPECT_THAT(Error(protocol), HasSubstr("protocol is 256"));

  v1::Match port;
  port.set_protocol(17);
  port.set_destination_port(0);
  EXPECT_THAT(Error(port), HasSubstr("destination_port is 0"));
  port.set_destination_port(65536);
  EXPECT_THAT(Error(port), HasSubstr("destination_port is 65536"));
}

TEST(Covers, EveryFieldThatTheOuterOneSets) {
  const auto parse = [](const std::string& source, const std::string& destination,
                        std::uint32_t protocol) {
    v1::Match match;
    match.set_source(source);
    match.set_destination(destination);
    if (protocol != 0) match.set_protocol(protocol);
    return ParseMatch(match).value();
  };
  const FlowMatch any;
  const FlowMatch outer = parse("", "10.1.0.0/16", 17);
  EXPECT_TRUE(Covers(any, any));
  EXPECT_TRUE(Covers(any, outer));
  EXPECT_FALSE(Covers(outer, any));
  EXPECT_TRUE(Covers(outer, outer));
  EXPECT_TRUE(Covers(outer, parse("192.0.2.1", "10.1.2.0/24", 17)));
  EXPECT_FALSE(Covers(outer, parse("", "10.1.2.0/24", 6)));
  EXPECT_FALSE(Covers(outer, parse("", "10.1.2.0/24", 0)));
  EXPECT_FALSE(Covers(outer, parse("", "10.2.0.0/16", 17)));
  EXPECT_FALSE(Covers(outer, parse("", "10.0.0.0/8", 17)));
  EXPECT_FALSE(Covers(outer, parse("", "2001:db8::/32", 17)));
  FlowMatch queue = outer;
  queue.port = 0;
  EXPECT_TRUE(Covers(outer, queue));
  EXPECT_FALSE(Covers(queue, outer));
}

}  // namespace
}  // namespace rxtoken
