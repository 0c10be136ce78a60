// SPDX-License-Identifier: Apache-2.0
//
// The message channel for C++17: shunt_channel.h with owners. See docs/channel.md.
//
// Only one thread may use a Sender or a Receiver at a time. Time-outs: shunt::forever, shunt::never,
// or a duration. A call that has nothing or no room in time returns false or an empty optional; every
// other error is a std::system_error.
#ifndef SHUNT_CHANNEL_HPP
#define SHUNT_CHANNEL_HPP

#include "shunt_channel.h"

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace shunt {

using Timeout = std::chrono::milliseconds;
inline constexpr Timeout forever{-1};
inline constexpr Timeout never{0};

namespace detail {

// Returns whether the call was done in time.
inline bool done(int result, const char *what)
{
	if (result == -EAGAIN || result == -ETIMEDOUT)
		return false;
	if (result < 0)
		throw std::system_error(-result, std::generic_category(), what);
	return true;
}

inline void must(int result, const char *what)
{
	if (result < 0)
		throw std::system_error(-result, std::generic_category(), what);
}

inline int ms(Timeout timeout)
{
	return timeout.count() > INT32_MAX ? -1 : static_cast<int>(timeout.count());
}

} // namespace detail

// Memory for one message, which the receiver can read too, even before it is sent. It goes back to the
// sender when it is destroyed.
class Loan {
public:
	Loan(Loan &&other) noexcept : loaned_(std::exchange(other.loaned_, shunt_loaned{})) {}
	Loan &operator=(Loan &&other) noexcept
	{
		if (this != &other) {
			shunt_give_back(&loaned_);
			loaned_ = std::exchange(other.loaned_, shunt_loaned{});
		}
		return *this;
	}
	~Loan() { shunt_give_back(&loaned_); }

	std::byte *data() noexcept { return static_cast<std::byte *>(loaned_.bytes); }
	std::size_t size() const noexcept { return loaned_.len; }
	// Shortens the message. Has no effect if it is not longer.
	void truncate(std::size_t len) noexcept { loaned_.len = len < loaned_.len ? len : loaned_.len; }

private:
	friend class Sender;
	friend class Publisher;
	Loan() = default;
	shunt_loaned loaned_{};
};

// The sending end.
class Sender {
public:
	explicit Sender(const std::string &path, Timeout timeout = forever, const shunt_sender_options *options = nullptr)
	{
		shunt_sender *made = nullptr;
		detail::must(shunt_connect_with(path.c_str(), options, detail::ms(timeout), &made), "shunt_connect_with");
		sender_.reset(made);
	}
	// Takes a handle of the C interface.
	explicit Sender(shunt_sender *sender) noexcept : sender_(sender) {}

	// Sends a message with copies of the descriptors.
	bool send(std::string_view bytes, const std::vector<int> &descriptors = {}, Timeout timeout = forever)
	{
		return detail::done(shunt_send(sender_.get(), bytes.data(), bytes.size(), descriptors.data(),
					       descriptors.size(), detail::ms(timeout)),
				    "shunt_send");
	}

	// Sends one message whose bytes are in several places.
	bool send(const std::vector<iovec> &pieces, const std::vector<int> &descriptors = {}, Timeout timeout = forever)
	{
		return detail::done(shunt_send_gathered(sender_.get(), pieces.data(), pieces.size(), descriptors.data(),
							descriptors.size(), detail::ms(timeout)),
				    "shunt_send_gathered");
	}

	// Returns memory for a message, which commit sends without a copy.
	std::optional<Loan> loan(std::size_t len, Timeout timeout = forever)
	{
		Loan loan;
		if (!detail::done(shunt_loan(sender_.get(), len, &loan.loaned_, detail::ms(timeout)), "shunt_loan"))
			return std::nullopt;
		return loan;
	}

	// Sends a loan. If the result is false, the loan can be sent again.
	bool commit(Loan &loan, const std::vector<int> &descriptors = {}, Timeout timeout = forever)
	{
		return detail::done(shunt_commit(sender_.get(), &loan.loaned_, descriptors.data(), descriptors.size(),
						 detail::ms(timeout)),
				    "shunt_commit");
	}
	bool commit(Loan &&loan, const std::vector<int> &descriptors = {}, Timeout timeout = forever)
	{
		return commit(loan, descriptors, timeout);
	}

	// Returns a descriptor for poll, as shunt_sender_fd does.
	int fd() const noexcept { return shunt_sender_fd(sender_.get()); }
	shunt_sender *handle() noexcept { return sender_.get(); }

private:
	struct Close {
		void operator()(shunt_sender *sender) const noexcept { shunt_sender_close(sender); }
	};
	std::unique_ptr<shunt_sender, Close> sender_;
};

// A message that was received, in place if it was a loan, or the end of a sender. The memory goes back
// to the sender when this is destroyed.
class Borrowed {
public:
	Borrowed(Borrowed &&other) noexcept : borrowed_(std::exchange(other.borrowed_, shunt_borrowed{})) {}
	Borrowed &operator=(Borrowed &&other) noexcept
	{
		if (this != &other) {
			shunt_release(&borrowed_);
			borrowed_ = std::exchange(other.borrowed_, shunt_borrowed{});
		}
		return *this;
	}
	~Borrowed() { shunt_release(&borrowed_); }

	std::uint64_t sender() const noexcept { return borrowed_.event.sender; }
	// 0 for a message, else why the sender has ended: see struct shunt_event.
	int ended() const noexcept { return borrowed_.event.ended; }
	// Whether the sender is able to change the bytes: copy them, then check and use the copy.
	bool may_change() const noexcept { return borrowed_.may_change != 0; }
	// Whether all that was read until now is of this message: false once a publisher has taken its memory
	// back.
	bool is_intact() const noexcept { return shunt_is_intact(&borrowed_) != 0; }
	const std::byte *data() const noexcept { return static_cast<const std::byte *>(borrowed_.event.bytes); }
	std::size_t size() const noexcept { return borrowed_.event.len; }
	// Returns a copy of the bytes.
	std::string copy() const
	{
		return size() == 0 ? std::string() : std::string(reinterpret_cast<const char *>(data()), size());
	}

	std::size_t descriptors() const noexcept { return borrowed_.event.count; }
	// Returns a descriptor, which stays with the message.
	int descriptor(std::size_t index) const { return borrowed_.event.descriptors[index]; }
	// Takes a descriptor; the caller closes it.
	int take_descriptor(std::size_t index)
	{
		int taken = shunt_take_borrowed_descriptor(&borrowed_, index);
		detail::must(taken, "shunt_take_borrowed_descriptor");
		return taken;
	}

private:
	friend class Receiver;
	friend class Subscriber;
	Borrowed() = default;
	shunt_borrowed borrowed_{};
};

// The receiving end of any number of senders.
class Receiver {
public:
	explicit Receiver(const std::string &path, const shunt_receiver_options *options = nullptr)
	{
		shunt_receiver *made = nullptr;
		detail::must(shunt_listen_with(path.c_str(), options, &made), "shunt_listen_with");
		receiver_.reset(made);
	}
	// Takes a handle of the C interface.
	explicit Receiver(shunt_receiver *receiver) noexcept : receiver_(receiver) {}

	// Receives the next message, or reports the end of a sender.
	std::optional<Borrowed> borrow(Timeout timeout = forever)
	{
		Borrowed borrowed;
		if (!detail::done(shunt_borrow(receiver_.get(), &borrowed.borrowed_, detail::ms(timeout)), "shunt_borrow"))
			return std::nullopt;
		return borrowed;
	}

	// Returns the identity of a sender.
	shunt_credentials credentials(std::uint64_t sender) const
	{
		shunt_credentials found{};
		detail::must(shunt_sender_credentials(receiver_.get(), sender, &found), "shunt_sender_credentials");
		return found;
	}

	// Returns a descriptor for poll, as shunt_receiver_fd does.
	int fd() const noexcept { return shunt_receiver_fd(receiver_.get()); }
	shunt_receiver *handle() noexcept { return receiver_.get(); }

private:
	struct Close {
		void operator()(shunt_receiver *receiver) const noexcept { shunt_receiver_close(receiver); }
	};
	std::unique_ptr<shunt_receiver, Close> receiver_;
};

// Makes a sender and a receiver that are connected only to each other.
inline std::pair<Sender, Receiver> pair()
{
	shunt_sender *sender = nullptr;
	shunt_receiver *receiver = nullptr;
	detail::must(shunt_pair(&sender, &receiver), "shunt_pair");
	return {Sender(sender), Receiver(receiver)};
}

// A request that a server has received, or a response that a client has. The server or client owns the
// bytes and descriptors until it receives again.
struct Numbered {
	std::uint64_t number; // of the request
	std::uint64_t client; // of a request: its client
	std::string_view bytes;
	const int *descriptors;
	std::size_t count;

	static Numbered of(const shunt_numbered &found)
	{
		return {found.number, found.client, {static_cast<const char *>(found.bytes), found.len},
			found.descriptors, found.count};
	}
};

// The end that responds, for any number of clients.
class Server {
public:
	explicit Server(const std::string &path, const shunt_receiver_options *options = nullptr,
			const shunt_sender_options *responses = nullptr)
	{
		shunt_server *made = nullptr;
		detail::must(shunt_serve(path.c_str(), options, responses, &made), "shunt_serve");
		server_.reset(made);
	}

	// Receives the next request.
	std::optional<Numbered> receive(Timeout timeout = forever)
	{
		shunt_numbered found{};
		if (!detail::done(shunt_server_receive(server_.get(), &found, detail::ms(timeout)), "shunt_server_receive"))
			return std::nullopt;
		return Numbered::of(found);
	}

	// Sends the response to a request. Returns false if its client has gone, which is counted, or has no
	// room for it in time.
	bool respond(std::uint64_t client, std::uint64_t number, std::string_view bytes,
		     const std::vector<int> &descriptors = {}, Timeout timeout = never)
	{
		int result = shunt_respond(server_.get(), client, number, bytes.data(), bytes.size(), descriptors.data(),
					   descriptors.size(), detail::ms(timeout));
		return result != -EPIPE && detail::done(result, "shunt_respond");
	}
	bool respond(const Numbered &request, std::string_view bytes, const std::vector<int> &descriptors = {},
		     Timeout timeout = never)
	{
		return respond(request.client, request.number, bytes, descriptors, timeout);
	}

	// Returns how many responses were not sent, because their client had gone.
	std::uint64_t unanswered() const noexcept { return shunt_unanswered(server_.get()); }

	// Returns the identity of a client.
	shunt_credentials credentials(std::uint64_t client) const
	{
		shunt_credentials found{};
		detail::must(shunt_client_credentials(server_.get(), client, &found), "shunt_client_credentials");
		return found;
	}

	// Takes a descriptor of the last request; the caller closes it.
	int take_descriptor(std::size_t index)
	{
		int taken = shunt_take_request_descriptor(server_.get(), index);
		detail::must(taken, "shunt_take_request_descriptor");
		return taken;
	}

	int fd() const noexcept { return shunt_server_fd(server_.get()); }
	shunt_server *handle() noexcept { return server_.get(); }

private:
	struct Close {
		void operator()(shunt_server *server) const noexcept { shunt_server_close(server); }
	};
	std::unique_ptr<shunt_server, Close> server_;
};

// The end that asks.
class Client {
public:
	explicit Client(const std::string &path, Timeout timeout = forever, const shunt_sender_options *options = nullptr)
	{
		shunt_client *made = nullptr;
		detail::must(shunt_client_connect(path.c_str(), options, detail::ms(timeout), &made), "shunt_client_connect");
		client_.reset(made);
	}

	// Sends a request and waits for its response.
	std::optional<Numbered> call(std::string_view bytes, const std::vector<int> &descriptors = {},
				     Timeout timeout = forever)
	{
		shunt_numbered found{};
		if (!detail::done(shunt_call(client_.get(), bytes.data(), bytes.size(), descriptors.data(),
					     descriptors.size(), &found, detail::ms(timeout)),
				  "shunt_call"))
			return std::nullopt;
		return Numbered::of(found);
	}

	// Sends a request, and returns its number. Several requests may wait for their responses.
	std::optional<std::uint64_t> request(std::string_view bytes, const std::vector<int> &descriptors = {},
					     Timeout timeout = forever)
	{
		std::uint64_t number = 0;
		if (!detail::done(shunt_request(client_.get(), bytes.data(), bytes.size(), descriptors.data(),
						descriptors.size(), &number, detail::ms(timeout)),
				  "shunt_request"))
			return std::nullopt;
		return number;
	}

	// Receives the next response.
	std::optional<Numbered> response(Timeout timeout = forever)
	{
		shunt_numbered found{};
		if (!detail::done(shunt_response(client_.get(), &found, detail::ms(timeout)), "shunt_response"))
			return std::nullopt;
		return Numbered::of(found);
	}

	// Takes a descriptor of the last response; the caller closes it.
	int take_descriptor(std::size_t index)
	{
		int taken = shunt_take_response_descriptor(client_.get(), index);
		detail::must(taken, "shunt_take_response_descriptor");
		return taken;
	}

	int fd() const noexcept { return shunt_client_fd(client_.get()); }
	shunt_client *handle() noexcept { return client_.get(); }

private:
	struct Close {
		void operator()(shunt_client *client) const noexcept { shunt_client_close(client); }
	};
	std::unique_ptr<shunt_client, Close> client_;
};

// The end that sends each message to all of its subscribers, and waits for none.
class Publisher {
public:
	explicit Publisher(const std::string &path, const shunt_publisher_options *options = nullptr)
	{
		shunt_publisher *made = nullptr;
		detail::must(shunt_publisher_listen(path.c_str(), options, &made), "shunt_publisher_listen");
		publisher_.reset(made);
	}
	// Takes a handle of the C interface.
	explicit Publisher(shunt_publisher *publisher) noexcept : publisher_(publisher) {}

	// Publishes a copy of a message, and returns its number.
	std::uint64_t publish(std::string_view bytes)
	{
		std::uint64_t number = 0;
		detail::must(shunt_publish(publisher_.get(), bytes.data(), bytes.size(), &number), "shunt_publish");
		return number;
	}

	// Returns memory for a message, which commit publishes without a copy.
	Loan loan(std::size_t len)
	{
		Loan loan;
		detail::must(shunt_publisher_loan(publisher_.get(), len, &loan.loaned_), "shunt_publisher_loan");
		return loan;
	}

	// Publishes a loan, and returns the number of the message.
	std::uint64_t commit(Loan &&loan)
	{
		std::uint64_t number = 0;
		detail::must(shunt_publisher_commit(publisher_.get(), &loan.loaned_, &number), "shunt_publisher_commit");
		return number;
	}

	// Attends to the subscribers until there is one more or less, or until the time is over.
	shunt_attended attend(Timeout timeout = forever)
	{
		shunt_attended found{};
		detail::must(shunt_attend(publisher_.get(), &found, detail::ms(timeout)), "shunt_attend");
		return found;
	}

	// Attends until no subscriber is behind. Returns false if one still is when the time is over.
	bool flush(Timeout timeout = forever)
	{
		return detail::done(shunt_flush(publisher_.get(), detail::ms(timeout)), "shunt_flush");
	}

	// Returns the status of each subscriber.
	std::vector<shunt_subscriber_status> subscribers() const
	{
		std::vector<shunt_subscriber_status> found(shunt_subscribers(publisher_.get(), nullptr, 0));
		shunt_subscribers(publisher_.get(), found.data(), found.size());
		return found;
	}

	int fd() const noexcept { return shunt_publisher_fd(publisher_.get()); }
	shunt_publisher *handle() noexcept { return publisher_.get(); }

private:
	struct Close {
		void operator()(shunt_publisher *publisher) const noexcept { shunt_publisher_close(publisher); }
	};
	std::unique_ptr<shunt_publisher, Close> publisher_;
};

// The end that receives from a publisher.
class Subscriber {
public:
	explicit Subscriber(const std::string &path, Timeout timeout = forever, std::size_t max_message = 0)
	{
		shunt_subscriber *made = nullptr;
		detail::must(shunt_subscribe(path.c_str(), max_message, detail::ms(timeout), &made), "shunt_subscribe");
		subscriber_.reset(made);
	}
	// Takes a handle of the C interface.
	explicit Subscriber(shunt_subscriber *subscriber) noexcept : subscriber_(subscriber) {}

	// Receives the next message, and stores its number and how many were missed before it.
	std::optional<Borrowed> borrow(Timeout timeout = forever, shunt_publication *publication = nullptr)
	{
		Borrowed borrowed;
		if (!detail::done(shunt_subscriber_borrow(subscriber_.get(), &borrowed.borrowed_, publication,
							  detail::ms(timeout)),
				  "shunt_subscriber_borrow"))
			return std::nullopt;
		return borrowed;
	}

	// Returns the identity of the publisher.
	shunt_credentials credentials() const
	{
		shunt_credentials found{};
		detail::must(shunt_publisher_credentials(subscriber_.get(), &found), "shunt_publisher_credentials");
		return found;
	}

	int fd() const noexcept { return shunt_subscriber_fd(subscriber_.get()); }
	shunt_subscriber *handle() noexcept { return subscriber_.get(); }

private:
	struct Close {
		void operator()(shunt_subscriber *subscriber) const noexcept { shunt_subscriber_close(subscriber); }
	};
	std::unique_ptr<shunt_subscriber, Close> subscriber_;
};

} // namespace shunt

#endif
