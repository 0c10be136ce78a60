// The C++ header: loans and messages, owners that move, errors that are thrown.
#undef NDEBUG
#include <cassert>
#include <cstdio>
#include <cstring>
#include <thread>
#include <unistd.h>

#include "shunt_channel.hpp"

int main(int argc, char **argv)
{
	assert(argc == 2);
	const std::string path = argv[1];
	try {
		shunt::Sender nowhere(path);
		assert(false);
	} catch (const std::system_error &error) {
		assert(error.code() == std::errc::no_such_file_or_directory);
	}
	shunt::Receiver receiver(path);
	assert(!receiver.borrow(shunt::never) && receiver.fd() >= 0);
	std::thread sending([&] {
		shunt::Sender sender(path, std::chrono::seconds(20));
		for (int round = 0; round < 50; round++) {
			auto loan = sender.loan(1 << 20);
			std::memset(loan->data(), round, loan->size());
			loan->truncate(1000);
			assert(sender.commit(std::move(*loan)));
		}
		assert(sender.send("copied", {1}));
		char one[] = "one", two[] = "two";
		assert(sender.send({iovec{one, 3}, iovec{two, 3}}));
		auto dropped = sender.loan(10);
		shunt::Loan moved = std::move(*dropped);
		moved = *sender.loan(20);
		assert(moved.size() == 20 && sender.fd() >= 0 && sender.handle());
	});
	std::optional<shunt::Borrowed> kept;
	for (int round = 0; round < 50; round++) {
		auto message = receiver.borrow();
		assert(message->size() == 1000 && message->may_change() && message->ended() == 0);
		assert(message->data()[999] == std::byte(round));
		if (round == 0)
			assert(receiver.credentials(message->sender()).pid == getpid());
		kept = std::move(message);
	}
	auto copied = receiver.borrow();
	assert(copied->copy() == "copied" && copied->descriptors() == 1 && copied->descriptor(0) > 2);
	assert(close(copied->take_descriptor(0)) == 0);
	assert(receiver.borrow()->copy() == "onetwo");
	assert(receiver.borrow()->ended() == 1);
	sending.join();
	assert(kept->data()[0] == std::byte(49));

	auto [sender, other] = shunt::pair();
	assert(sender.send("", {}, shunt::never) && other.borrow(shunt::never)->copy().empty());
	std::puts("lent");
}
