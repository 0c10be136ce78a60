// A backend and a client in C++, with the arguments of main.py.

#include <iostream>
#include <map>
#include <mutex>
#include <thread>

#include <thrift/protocol/TBinaryProtocol.h>
#include <thrift/server/TThreadedServer.h>
#include <thrift/transport/TBufferTransports.h>
#include <thrift/transport/TServerSocket.h>
#include <thrift/transport/TSocket.h>

#include "Wider.h"

using namespace apache::thrift;
using namespace apache::thrift::protocol;
using namespace apache::thrift::server;
using namespace apache::thrift::transport;
using std::make_shared;
using std::shared_ptr;
using std::string;

class Backend : public PeerIf {
public:
	explicit Backend(string name) : name(std::move(name)) {}

	void whose(string &answer, const int32_t, const string &payload) override { answer = name + " " + payload; }

	void named(string &answer, const string &, const std::map<string, std::vector<Item>> &items) override
	{
		int64_t sum = 0;

		for (auto &list : items)
			for (auto &item : list.second)
				for (int64_t number : item.numbers)
					sum += number;
		answer = name + " " + std::to_string(sum);
	}

	void wide(string &answer, const int64_t) override { answer = name; }

	void mirror(string &answer, const int32_t, const string &payload) override { answer = payload; }

	void fail(string &, const int32_t key) override
	{
		Refusal refusal;

		refusal.who = name;
		refusal.code = key;
		throw refusal;
	}

	void note(const int32_t key, const string &client) override
	{
		std::lock_guard<std::mutex> guard(mutex);

		notes[{ key, client }]++;
	}

	int32_t noted(const int32_t key, const string &client) override
	{
		std::lock_guard<std::mutex> guard(mutex);

		return notes[{ key, client }];
	}

	void keyless(string &answer, const string &) override { answer = name; }

private:
	const string name;
	std::mutex mutex;
	std::map<std::pair<int32_t, string>, int32_t> notes;
};

static void serve(int count, char **words)
{
	auto processor = make_shared<PeerProcessor>(make_shared<Backend>(words[0]));
	std::vector<std::thread> threads;

	for (int at = 1; at + 1 < count; at += 2) {
		shared_ptr<TTransportFactory> transports;

		if (string(words[at + 1]) == "framed")
			transports = make_shared<TFramedTransportFactory>();
		else
			transports = make_shared<TBufferedTransportFactory>();
		auto listener = make_shared<TServerSocket>("127.0.0.1", atoi(words[at]));
		auto server = make_shared<TThreadedServer>(processor, listener, transports,
							   make_shared<TBinaryProtocolFactory>());
		threads.emplace_back([server] { server->serve(); });
	}
	for (auto &thread : threads)
		thread.join();
}

static void call(const string &client, int port, const string &form, int keys)
{
	auto socket = make_shared<TSocket>("127.0.0.1", port);
	shared_ptr<TTransport> transport;
	string answer, payload;

	if (form == "framed")
		transport = make_shared<TFramedTransport>(socket);
	else
		transport = make_shared<TBufferedTransport>(socket);
	transport->open();
	WiderClient peer(make_shared<TBinaryProtocol>(transport));
	for (int key = 0; key < 3 * keys; key++) {
		peer.whose(answer, key, "payload of " + client);
		std::cout << "whose " << key << " " << answer << "\n";
	}
	for (int key = 0; key < keys; key++) {
		std::map<string, std::vector<Item>> items;
		for (int at = 0; at < 4; at++) {
			Item item;

			item.name = std::to_string(at);
			item.numbers = { at, key };
			items[item.name] = std::vector<Item>(3, item);
		}
		peer.named(answer, "name-" + std::to_string(key), items);
		std::cout << "named " << key << " " << answer << "\n";
		peer.wide(answer, (int64_t)key << 33);
		std::cout << "wide " << key << " " << answer << "\n";
		for (int at = 0; at < key % 4; at++)
			peer.note(key, client);
		std::cout << "noted " << key << " " << peer.noted(key, client) << "\n";
		payload.clear();
		for (int at = 0; at < key * key * 100; at++)
			payload.push_back(at * 7);
		peer.mirror(answer, key, payload);
		std::cout << "mirror " << key << " " << (answer == payload ? "True" : "False") << "\n";
		try {
			peer.fail(answer, key);
		} catch (const Refusal &refusal) {
			std::cout << "fail " << key << " " << refusal.who << " " << refusal.code << "\n";
		}
		try {
			peer.keyless(answer, "payload");
		} catch (const TApplicationException &exception) {
			std::cout << "keyless " << exception.getType() << " " << exception.what() << "\n";
		}
		try {
			peer.unknown(answer, key);
		} catch (const TApplicationException &exception) {
			std::cout << "unknown " << exception.getType() << "\n";
		}
	}
	payload.assign(1000000, '\0');
	peer.mirror(answer, 1, payload);
	std::cout << "large " << (answer == payload ? "True" : "False") << "\n";
}

int main(int count, char **words)
{
	if (string(words[1]) == "serve")
		serve(count - 2, words + 2);
	else
		call(words[2], atoi(words[3]), words[4], atoi(words[5]));
}
