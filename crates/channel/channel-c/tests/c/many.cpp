// Requests and responses, publishers and subscribers, in one process with threads.
#undef NDEBUG
#include <cassert>
#include <cerrno>
#include <cstring>
#include <iostream>
#include <thread>
#include <unistd.h>

#include "shunt_channel.hpp"

using namespace std::chrono_literals;

static void calls(const std::string &path)
{
	shunt::Server server(path);
	assert(!server.receive(shunt::never));
	std::thread asking([&] {
		shunt::Client client(path, 20s);
		auto answer = client.call("ping", {1}, 20s);
		assert(answer->bytes == "ping!" && answer->count == 1);
		::close(client.take_descriptor(0));
		auto one = client.request("one"), two = client.request("two");
		assert(client.response(20s)->number == two && client.response(20s)->number == one);
		assert(!client.response(shunt::never));
	});
	auto request = server.receive(20s);
	assert(request->bytes == "ping" && request->count == 1);
	assert(server.credentials(request->client).pid == ::getpid());
	int taken = server.take_descriptor(0);
	assert(server.respond(*request, std::string(request->bytes) + "!", {taken}));
	::close(taken);
	auto one = server.receive(20s), two = server.receive(20s);
	assert(server.respond(two->client, two->number, "") && server.respond(one->client, one->number, ""));
	asking.join();
	while (server.respond(one->client, one->number, "late")) {
	}
	assert(server.unanswered() == 1);
}

static void publications(const std::string &path)
{
	shunt_publisher_options options{};
	options.size = sizeof options;
	options.history = 1;
	shunt::Publisher publisher(path, &options);
	auto subscribe = [&] {
		shunt::Subscriber subscriber(path, 20s);
		shunt_publication publication{};
		for (unsigned round = 0; round < 10; round++) {
			auto message = subscriber.borrow(20s, &publication);
			assert(publication.number == round && publication.missed == 0 && message->is_intact());
			assert(message->size() == 5000 && message->data()[4999] == std::byte(round));
		}
		try {
			subscriber.borrow(20s);
			assert(false);
		} catch (const std::system_error &error) {
			assert(error.code().value() == EPIPE);
		}
	};
	std::thread one(subscribe), two(subscribe);
	for (std::uint64_t joined = 0; joined < 2;)
		joined += publisher.attend(20s).joined;
	for (unsigned round = 0; round < 10; round++) {
		auto loan = publisher.loan(5000);
		std::memset(loan.data(), static_cast<int>(round), loan.size());
		assert(publisher.commit(std::move(loan)) == round);
		assert(publisher.flush(20s));
	}
	assert(publisher.subscribers().size() == 2 && publisher.subscribers()[0].missed == 0);
	{
		shunt::Publisher closed = std::move(publisher);
	}
	one.join();
	two.join();
}

int main(int, char **argv)
{
	calls(argv[1]);
	publications(argv[1]);
	std::cout << "many\n";
}
