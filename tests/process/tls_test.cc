// SPDX-License-Identifier: Apache-2.0
// tls_test.cc - clients that come by TCP: who they are is what their certificate says, and what
// they made goes when they are not heard of any more.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "rxtoken/v1/session.grpc.pb.h"
#include "tests/process/harness.h"

namespace rxtoken::test {
namespace {

using testing::HasSubstr;

void OpenSsl(const std::vector<std::string>& arguments) {
  std::vector<std::string> argv = {"openssl"};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  std::string errors;
  ASSERT_EQ(RunProgram(argv, nullptr, &errors), 0) << errors;
}

// Certificates, each in NAME.pem with its key in NAME.key.
class Certificates {
 public:
  explicit Certificates(const std::filesystem::path& directory) : directory_(directory) {}

  std::string File(const std::string& name) const { return directory_ / name; }
  std::string Text(const std::string& name) const {
    std::ostringstream text;
    text << std::ifstream(File(name)).rdbuf();
    return text.str();
  }

  void MakeRoot(const std::string& name) {
    std::vector<std::string> arguments = {"req", "-x509", "-out", File(name + ".pem")};
    Request(arguments, name, name);
  }
  // Of `dns_name`, signed by `root`; good for `days` from now, or before if that is negative.
  void Make(const std::string& name, const std::string& root, const std::string& dns_name,
            int days = 1) {
    std::vector<std::string> arguments = {"req", "-out", File(name + ".csr"), "-addext",
                                          "subjectAltName=DNS:" + dns_name};
    Request(arguments, name, "ignored");
    OpenSsl({"x509", "-req", "-in", File(name + ".csr"), "-out", File(name + ".pem"), "-CA",
             File(root + ".pem"), "-CAkey", File(root + ".key"), "-CAcreateserial",
             "-copy_extensions", "copy", "-days", std::to_string(days)});
  }

 private:
  void Request(std::vector<std::string> arguments, const std::string& name,
               const std::string& subject) {
    arguments.insert(arguments.end(),
                     {"-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                      "-keyout", File(name + ".key"), "-subj", "/CN=" + subject});
    OpenSsl(arguments);
  }

  const std::filesystem::path directory_;
};

class Tls : public testing::Test {
 protected:
  void SetUp() override {
    certificates.MakeRoot("ca");
    certificates.Make("daemon", "ca", "daemon.example");
    certificates.Make("rx1", "ca", "rx1.example");
    certificates.Make("rx2", "ca", "rx2.example");
    const std::filesystem::path config = directory.path() / "config.yaml";
    std::ofstream(config) << "listen: {tcp: \"127.0.0.1:0\", certificate: "
                          << certificates.File("daemon.pem")
                          << ", key: " << certificates.File("daemon.key")
                          << ", client_ca: " << certificates.File("ca.pem") << "}\n"
                          << "access: {tenants: [{certificate_names: [rx1.example]},"
                             " {certificate_names: [rx2.example]}]}\n";
    daemon = std::make_unique<Daemon>(
        std::vector<std::string>{"--config", config, "--port", "p0=net_null0"});
    ASSERT_TRUE(daemon->process().Running()) << daemon->process().Errors();
    const std::string log = daemon->process().Errors();
    const std::size_t at = log.find(" tcp=") + 5;
    address = log.substr(at, log.find('\n', at) - at);
    rx1 = Connect("rx1");
  }

  std::shared_ptr<grpc::Channel> Connect(const std::string& name) {
    grpc::ChannelArguments arguments;
    arguments.SetSslTargetNameOverride("daemon.example");
    return grpc::CreateCustomChannel(
        address,
        grpc::SslCredentials({certificates.Text("ca.pem"), certificates.Text(name + ".key"),
                              certificates.Text(name + ".pem")}),
        arguments);
  }

  template <typename Stub, typename Request, typename Response>
  static grpc::StatusCode Call(Stub stub,
                               grpc::Status (Stub::element_type::*method)(grpc::ClientContext*,
                                                                          const Request&,
                                                                          Response*),
                               const Request& request, Response* response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kDeadline);
    return ((*stub).*method)(&context, request, response).error_code();
  }
  grpc::StatusCode Open(const std::shared_ptr<grpc::Channel>& channel, std::string* session,
                        std::uint32_t lease_ms = 0) {
    v1::OpenSessionRequest request;
    request.set_lease_ms(lease_ms);
    v1::OpenSessionResponse response;
    const grpc::StatusCode code =
        Call(v1::Sessions::NewStub(channel), &v1::Sessions::Stub::OpenSession, request, &response);
    *session = response.session();
    return code;
  }
  grpc::StatusCode Bind(const std::shared_ptr<grpc::Channel>& channel, const std::string& session) {
    v1::BindRequest request;
    request.set_name("b0");
    request.set_session(session);
    request.set_buffer_bytes(16 << 20);
    request.add_queues()->set_port("p0");
    v1::Binding response;
    return Call(v1::Bindings::NewStub(channel), &v1::Bindings::Stub::Bind, request, &response);
  }

  TempDir directory;
  Certificates certificates{directory.path()};
  std::unique_ptr<Daemon> daemon;
  std::string address;
  std::shared_ptr<grpc::Channel> rx1;
  std::string session;
};

TEST_F(Tls, ARemoteClientReceivesAndCloses) {
  ASSERT_EQ(Open(rx1, &session), grpc::OK);
  ASSERT_EQ(Bind(rx1, session), grpc::OK);
  v1::OpenRxSocketRequest open;
  open.set_name("s");
  open.set_session(session);
  v1::OpenRxSocketResponse opened;
  ASSERT_EQ(Call(v1::RxSockets::NewStub(rx1), &v1::RxSockets::Stub::OpenRxSocket, open, &opened),
            grpc::OK);
  EXPECT_EQ(opened.rx_socket().user(), "certificate:rx1.example");
  v1::AddFlowRequest add;
  add.add_rx_sockets("s");
  add.set_session(session);
  v1::Flow flow;
  ASSERT_EQ(Call(v1::Flows::NewStub(rx1), &v1::Flows::Stub::AddFlow, add, &flow), grpc::OK);
  v1::ReceiveRequest receive;
  receive.set_rx_socket("s");
  receive.set_session(session);
  receive.set_max_messages(100);
  grpc::ClientContext context;
  const auto tokens = v1::Tokens::NewStub(rx1);
  const auto stream = tokens->Receive(&context, receive);
  int messages = 0;
  for (v1::ReceiveResponse response; stream->Read(&response);) messages += response.messages_size();
  EXPECT_EQ(messages, 100);
  EXPECT_TRUE(stream->Finish().ok());

  v1::CloseSessionRequest close;
  close.set_session(session);
  v1::CloseSessionResponse closed;
  const auto close_it = [&] {
    return Call(v1::Sessions::NewStub(rx1), &v1::Sessions::Stub::CloseSession, close, &closed);
  };
  EXPECT_EQ(close_it(), grpc::OK);
  EXPECT_EQ(close_it(), grpc::NOT_FOUND);
  EXPECT_EQ(Call(v1::RxSockets::NewStub(rx1), &v1::RxSockets::Stub::OpenRxSocket, open, &opened),
            grpc::NOT_FOUND);
}

TEST_F(Tls, ASessionEndsWithoutKeepAlive) {
  ASSERT_EQ(Open(rx1, &session, /*lease_ms=*/1000), grpc::OK);
  ASSERT_EQ(Bind(rx1, session), grpc::OK);
  v1::KeepAliveRequest keep;
  keep.set_session(session);
  v1::KeepAliveResponse kept;
  EXPECT_EQ(Call(v1::Sessions::NewStub(rx1), &v1::Sessions::Stub::KeepAlive, keep, &kept),
            grpc::OK);
  EXPECT_TRUE(WaitUntil(
      [&] { return daemon->process().Errors().find("event=binding_freed") != std::string::npos; }));
  EXPECT_EQ(Call(v1::Sessions::NewStub(rx1), &v1::Sessions::Stub::KeepAlive, keep, &kept),
            grpc::NOT_FOUND);
  EXPECT_EQ(Open(rx1, &session, /*lease_ms=*/999), grpc::INVALID_ARGUMENT);
}

TEST_F(Tls, AKeyIsGoodFromItsOwnCertificateOnly) {
  ASSERT_EQ(Open(rx1, &session), grpc::OK);
  EXPECT_EQ(Bind(Connect("rx2"), session), grpc::NOT_FOUND);
  EXPECT_EQ(Bind(grpc::CreateChannel("unix:" + (daemon->run_dir() / "api.sock").string(),
                                     grpc::InsecureChannelCredentials()),
                 session),
            grpc::NOT_FOUND);
  EXPECT_EQ(Bind(rx1, ""), grpc::PERMISSION_DENIED);
  EXPECT_EQ(Bind(rx1, session), grpc::OK);
}

TEST_F(Tls, WrongRootExpiredAndUnknownNamesAreRefused) {
  certificates.MakeRoot("other");
  certificates.Make("foreign", "other", "rx1.example");
  certificates.Make("expired", "ca", "rx1.example", /*days=*/-1);
  certificates.Make("unknown", "ca", "rx3.example");
  EXPECT_EQ(Open(Connect("foreign"), &session), grpc::UNAVAILABLE);
  EXPECT_EQ(Open(Connect("expired"), &session), grpc::UNAVAILABLE);
  EXPECT_EQ(Open(Connect("unknown"), &session), grpc::PERMISSION_DENIED);
  EXPECT_EQ(Open(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()), &session),
            grpc::UNAVAILABLE);
}

TEST(Tcp, WithoutACertificateIsForThisHostOnly) {
  TempDir directory;
  const std::filesystem::path config = directory.path() / "config.yaml";
  const auto errors = [&](const std::string& listen) {
    std::ofstream(config) << "listen: " << listen << "\n";
    Daemon daemon({"--config", config});
    const int status = daemon.process().Running() ? 0 : daemon.process().Wait().value_or(-1);
    return std::to_string(status) + " " + daemon.process().Errors();
  };
  EXPECT_THAT(errors("{tcp: \"0.0.0.0:0\"}"), testing::StartsWith("2 "));
  EXPECT_THAT(errors("{tcp: \"0.0.0.0:0\"}"), HasSubstr("listen on 127.0.0.1"));
  EXPECT_THAT(errors("{tcp: \"127.0.0.1:0\", key: k}"), HasSubstr("give all three"));
  EXPECT_THAT(errors("{tcp: \"nowhere\"}"), testing::StartsWith("2 "));
  EXPECT_THAT(errors("{tcp: \"127.0.0.1:0\"}"), HasSubstr("event=no_certificate"));
}

}  // namespace
}  // namespace rxtoken::test
