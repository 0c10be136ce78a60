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

} // namespace shunt

#endif
